//! How small entropy coding makes real MXFP4 weights, and how fast they are encoded and multiplied:
//!
//! ```text
//! cargo run --release -p rill-kernels --example mxfp4z
//! ```
//!
//! Weights are the 64 rows of `fixtures/k3-real`; for speeds they are repeated to 3072 × 3584. Bits are a weight's, payload
//! without, stored with header, directory and the zeros at the end. Seconds are those of one core for one expert of Kimi K3,
//! 33.03 million weights, products 10⁹ weights per second for one, four and sixteen vectors, the fastest of ten, because others
//! may be using the machine. Every result is compared with the product of the published nibbles. Then what thinning costs: bits,
//! error ‖W − W′‖/‖W‖ and the time it takes once, before encoding.

use std::hint::black_box;
use std::time::Instant;

use rill_kernels::{Codec, Kernels, Matrix, Mxfp4zKernels, Mxfp4zMatrix};

const COLS: usize = 3584;
const REAL_ROWS: usize = 64;
const ROWS: usize = 3072;
const EXPERT_WEIGHTS: f64 = 3.0 * 3072.0 * 3584.0;

fn main() {
    let file = include_bytes!("../../../fixtures/k3-real/mxfp4_rows.safetensors");
    let (code_bytes, scale_bytes) = (REAL_ROWS * COLS / 2, REAL_ROWS * COLS / 32);
    let (codes, scales) = file[file.len() - code_bytes - scale_bytes..].split_at(code_bytes);
    let times = ROWS / REAL_ROWS;
    for (rows, times) in [(REAL_ROWS, 1), (ROWS, times)] {
        let (codes, scales) = (codes.repeat(times), scales.repeat(times));
        let source = Matrix::new(Codec::Mxfp4, rows, COLS, &codes, &scales).expect("as published");
        let bytes = Mxfp4zMatrix::encode(&source).expect("MXFP4");
        let packed = Mxfp4zMatrix::new(rows, COLS, &bytes).expect("just made");
        let bits = |bits: u64| bits as f64 / (rows * COLS) as f64;
        let (payload, stored) = (bits(packed.payload_bits()), bits(packed.stored_bits()));
        println!("{rows} × {COLS}: {payload:.4} bits of payload, {stored:.4} stored");
        if rows == ROWS {
            let seconds = best_of(|| {
                black_box(Mxfp4zMatrix::encode(black_box(&source)).expect("MXFP4"));
            });
            println!(
                "encoding: {:.2} s per expert",
                seconds * EXPERT_WEIGHTS / (rows * COLS) as f64
            );
            products(&source, &packed);
            thinned(&source);
        }
    }
}

/// What fewer bits cost.
fn thinned(source: &Matrix<'_>) {
    for hundredths in [330, 335, 340, 345, 350, 355, 360] {
        let start = Instant::now();
        let made = Mxfp4zMatrix::thinned(source, hundredths).expect("MXFP4");
        let seconds = start.elapsed().as_secs_f64() * EXPERT_WEIGHTS / (ROWS * COLS) as f64;
        let matrix = Matrix::new(Codec::Mxfp4, ROWS, COLS, &made.0, &made.1).expect("MXFP4");
        let bytes = Mxfp4zMatrix::encode(&matrix).expect("MXFP4");
        let packed = Mxfp4zMatrix::new(ROWS, COLS, &bytes).expect("just made");
        let (mut lost, mut all) = (0.0, 0.0);
        let (mut w, mut t) = ([0.0; COLS], [0.0; COLS]);
        for row in 0..REAL_ROWS {
            source.decode_row(row, &mut w);
            matrix.decode_row(row, &mut t);
            lost += w.iter().zip(&t).map(|(w, t)| f64::from(w - t).powi(2)).sum::<f64>();
            all += w.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>();
        }
        println!(
            "thinned to {:.2} bits: {:.4} of payload, error {:.2} %, {seconds:.2} s per expert",
            f64::from(hundredths) / 100.0,
            packed.payload_bits() as f64 / (ROWS * COLS) as f64,
            100.0 * (lost / all).sqrt()
        );
    }
}

fn products(source: &Matrix<'_>, packed: &Mxfp4zMatrix<'_>) {
    for kernels in Mxfp4zKernels::all() {
        let speeds = [1, 4, 16].map(|n| {
            let x: Vec<f32> = (0..n * COLS).map(|i| (i % 13) as f32 - 6.25).collect();
            let (mut out, mut expected) = (vec![0.0; ROWS * n], vec![0.0; ROWS * n]);
            Kernels::detect().matmul(source, &x, n, &mut expected);
            let seconds =
                best_of(|| kernels.multiply(black_box(packed), &x, n, black_box(&mut out)));
            assert!(expected.iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits()));
            format!("{:.2}", (ROWS * COLS * n) as f64 / seconds / 1e9)
        });
        println!("multiplying, {}: {} Gweights/s", kernels.name(), speeds.join(", "));
    }
}

fn best_of(mut f: impl FnMut()) -> f64 {
    let once = |_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    (0..10).map(once).fold(f64::INFINITY, f64::min)
}
