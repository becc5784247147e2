//! How fast each set of kernels multiplies, on one core:
//!
//! ```text
//! cargo run --release -p rill-kernels --example products [ROWS COLS]
//! ```
//!
//! Prints 10⁹ weights per second for one vector and for many, and the bytes of weights that is.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rill_kernels::{Codec, Kernels, Matrix};

fn main() {
    let args: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    // An expert's gate in Kimi K3; larger than any cache of one core.
    let (rows, cols) = match args[..] {
        [rows, cols] => (rows, cols),
        _ => (3072, 7168),
    };
    println!("{rows} × {cols}\nformat  kernels     vectors  Gweights/s     GB/s");
    let codecs =
        [Codec::F32, Codec::Bf16, Codec::Q8 { group: 128 }, Codec::Q4 { group: 128 }, Codec::Mxfp4];
    for codec in codecs {
        let layout = codec.layout(rows, cols).expect("a shape of this format");
        // Exponents in the middle of their range: no sum becomes infinite or subnormal.
        let codes: Vec<u8> = (0..layout.codes).map(|i| (i * 7 % 64 + 60) as u8).collect();
        let scales = vec![0x2c; layout.scales];
        let matrix = Matrix::new(codec, rows, cols, &codes, &scales).expect("of this length");
        for kernels in Kernels::all() {
            for n in [1, 16] {
                let x: Vec<f32> = (0..n * cols).map(|i| (i % 13) as f32 - 6.0).collect();
                let mut out = vec![0.0; rows * n];
                let start = Instant::now();
                let mut times = 0;
                while times < 2 || start.elapsed() < Duration::from_millis(300) {
                    kernels.matmul(black_box(&matrix), &x, n, &mut out);
                    times += 1;
                }
                let seconds = start.elapsed().as_secs_f64() / f64::from(times);
                let weights = (rows * cols) as f64;
                println!(
                    "{:<7} {:<11} {n:>7}  {:>10.2}  {:>7.2}",
                    codec.name(),
                    kernels.name(),
                    weights * n as f64 / seconds / 1e9,
                    (layout.codes + layout.scales) as f64 / seconds / 1e9,
                );
            }
        }
    }
}
