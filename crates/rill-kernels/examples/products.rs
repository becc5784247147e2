//! How fast each set of kernels multiplies, on one core:
//!
//! ```text
//! cargo run --release -p rill-kernels --example products [ROWS COLS] [FORMAT or KERNELS ...]
//! ```
//!
//! Prints 10⁹ weights per second, the bytes of weights that is, and products per cycle. The core's
//! clock and how fast it reads 64 MiB come first, and again last, because others may be using the
//! machine. The best of several runs counts.

use std::hint::black_box;
use std::time::Instant;

use rill_kernels::{Codec, Kernels, Matrix, Vq, probe};

fn main() {
    let (numbers, names): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|a| a.parse::<usize>().is_ok());
    let numbers: Vec<usize> = numbers.iter().filter_map(|a| a.parse().ok()).collect();
    // An expert's gate in Kimi K3; larger than any cache of one core.
    let (rows, cols) = match numbers[..] {
        [rows, cols] => (rows, cols),
        _ => (3072, 7168),
    };
    // 64 MiB: about a matrix in bf16, so from where those are read, be it memory or a large cache.
    let memory = vec![1u8; 1 << 26];
    print_machine(&memory);
    println!("{rows} × {cols}\nformat  kernels     vectors  Gweights/s     GB/s  per cycle");
    let vq3r = Vq { stages: 3, entries: 256, index_block: 4, packed: false };
    let codecs = [
        Codec::F32,
        Codec::Bf16,
        Codec::Q8 { group: 128 },
        Codec::Q4 { group: 128 },
        Codec::Q4 { group: 32 },
        Codec::Mxfp4,
        Codec::Vq(vq3r),
        Codec::Vq(Vq { stages: 4, entries: 64, index_block: 64, packed: true }),
    ];
    for codec in codecs {
        let layout = codec.layout(rows, cols).expect("a shape of this format");
        // Exponents in the middle of their range: no sum becomes infinite or subnormal.
        let codes: Vec<u8> = (0..layout.codes).map(|i| (i * 7 % 64 + 60) as u8).collect();
        let scales = vec![0x2c; layout.scales];
        let tables = match codec {
            Codec::Vq(vq) => (0..vq.stages * vq.entries * 8).map(|i| (i % 11) as f32).collect(),
            _ => vec![],
        };
        let matrix = Matrix::with_tables(codec, rows, cols, &codes, &scales, &tables);
        let matrix = matrix.expect("of this length");
        for kernels in Kernels::all() {
            let wanted = |name: &String| name == codec.name() || name == kernels.name();
            if kernels.name().starts_with("scalar") && !names.iter().any(|n| n == kernels.name())
                || !names.is_empty() && !names.iter().any(wanted)
            {
                continue;
            }
            for n in [1, 2, 4, 7, 16, 64] {
                let x: Vec<f32> = (0..n * cols).map(|i| (i % 13) as f32 - 6.0).collect();
                let mut out = vec![0.0; rows * n];
                let seconds =
                    best_of(|| kernels.matmul(black_box(&matrix), &x, n, black_box(&mut out)));
                let products = (rows * cols * n) as f64;
                println!(
                    "{:<7} {:<11} {n:>7}  {:>10.2}  {:>7.2}  {:>9.1}",
                    codec.name(),
                    kernels.name(),
                    products / seconds / 1e9,
                    (layout.codes + layout.scales) as f64 / seconds / 1e9,
                    products / seconds / clock_hz(),
                );
            }
        }
    }
    print_machine(&memory);
}

fn print_machine(memory: &[u8]) {
    let seconds = best_of(|| {
        black_box(probe::sum_words(black_box(memory)));
    });
    let read = memory.len() as f64 / seconds / 1e9;
    println!("clock {:.2} GHz, one core reads {read:.1} GB/s", clock_hz() / 1e9);
}

/// Cycles per second, from a chain of multiplications of three cycles each, as on every x86-64
/// since 2008 and most Arm cores.
fn clock_hz() -> f64 {
    const CHAIN: u32 = 1 << 18;
    let seconds = best_of(|| {
        let mut x = black_box(3u64);
        for _ in 0..CHAIN {
            x = x.wrapping_mul(x);
        }
        black_box(x);
    });
    3.0 * f64::from(CHAIN) / seconds
}

/// Seconds that the fastest of several calls took.
fn best_of(mut f: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    let mut times = 0;
    while times < 3 || start.elapsed().as_millis() < 250 {
        let begin = Instant::now();
        f();
        best = best.min(begin.elapsed().as_secs_f64());
        times += 1;
    }
    best
}
