//! Tries every binary32 value on every elementary function and prints the largest error in
//! units in the last place, against binary64; then on every kernel made of them, and compares each
//! set's bits with the specification's.
//!
//! `cargo run --release -p rill-kernels --example ulp_sweep [stride]`; a stride above 1 samples.
//! Exits with 1 when any error is above 2 ulp or any bit differs.

use rill_kernels::{Kernels, math, ulp_error};
use std::thread;

type Function = (&'static str, fn(f32) -> f32, fn(f64) -> f64);

const FUNCTIONS: [Function; 4] = [
    ("exp", math::exp, f64::exp),
    ("sigmoid", math::sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
    ("tanh", math::tanh, f64::tanh),
    ("softplus", math::softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p()),
];

/// A kernel over some inputs; its result replaces a copy of them.
type Kernel = (&'static str, fn(&Kernels, &[f32], &mut [f32]));

const KERNELS: [Kernel; 5] = [
    ("exp", |k, _, out| k.exp(out)),
    ("sigmoid", |k, _, out| k.sigmoid(out)),
    ("situ_product", |k, x, out| k.situ_product(out, x, 4.0, 25.0)),
    ("decay_bounded", |k, x, out| k.decay_bounded(x, &vec![0.0; x.len()], 1.0, -5.0, out)),
    ("decay_unbounded", |k, x, out| k.decay_unbounded(x, &vec![0.0; x.len()], 1.0, out)),
];

/// Inputs that a kernel gets at once: whole vectors and some left over.
const BLOCK: usize = 4099;

/// How many results of `kernel` differ between a set and the specification, over the bit patterns
/// `first`, `first + step`, ….
fn differing((_, kernel): Kernel, first: u64, step: u64) -> u64 {
    let sets = Kernels::all();
    let mut differing = 0;
    let mut inputs = (first..=u64::from(u32::MAX)).step_by(step as usize).peekable();
    while inputs.peek().is_some() {
        let block: Vec<f32> =
            inputs.by_ref().take(BLOCK).map(|bits| f32::from_bits(bits as u32)).collect();
        let run = |set: &Kernels| {
            let mut out = block.clone();
            kernel(set, &block, &mut out);
            out
        };
        let expected = run(&Kernels::SCALAR);
        for set in &sets[1..] {
            let pairs = run(set).into_iter().zip(&expected);
            differing += pairs
                .filter(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()))
                .count() as u64;
        }
    }
    differing
}

/// Largest error over the bit patterns `first`, `first + step`, …, and where it is.
fn sweep((_, ours, exact): Function, first: u64, step: u64) -> (f64, f32) {
    let mut worst = (0.0, 0.0);
    let mut bits = first;
    while bits <= u64::from(u32::MAX) {
        let x = f32::from_bits(bits as u32);
        if !x.is_nan() {
            let error = ulp_error(ours(x), exact(f64::from(x)));
            if error > worst.0 {
                worst = (error, x);
            }
        }
        bits += step;
    }
    worst
}

fn main() {
    let stride: u64 = std::env::args().nth(1).map_or(1, |s| s.parse().expect("a stride"));
    let threads = thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let mut ok = true;
    for function in FUNCTIONS {
        let worst = thread::scope(|scope| {
            let handles: Vec<_> = (0..threads)
                .map(|t| scope.spawn(move || sweep(function, t * stride, threads * stride)))
                .collect();
            let results = handles.into_iter().map(|h| h.join().expect("a worker panicked"));
            results.fold((0.0, 0.0), |a, b| if b.0 <= a.0 { a } else { b })
        });
        println!("{:<9} {:.3} ulp at {:e}", function.0, worst.0, worst.1);
        ok &= worst.0 <= 2.0;
    }
    for kernel in KERNELS {
        let count: u64 = thread::scope(|scope| {
            let handles: Vec<_> = (0..threads)
                .map(|t| scope.spawn(move || differing(kernel, t * stride, threads * stride)))
                .collect();
            handles.into_iter().map(|h| h.join().expect("a worker panicked")).sum()
        });
        println!("{:<15} {count} results differ", kernel.0);
        ok &= count == 0;
    }
    if !ok {
        std::process::exit(1);
    }
}
