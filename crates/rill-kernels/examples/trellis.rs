//! How well and how fast the trellis format encodes real weights, and how fast it is multiplied:
//!
//! ```text
//! cargo run --release -p rill-kernels --example trellis [rotated] [WIDTH or RATE ...]
//! ```
//!
//! Numbers up to 14 are widths, larger ones rates; all rates at width 12 without. `rotated` is for that profile, and
//! says how long turning and quantising a vector takes. Tables are made for the first 32
//! rows of `fixtures/k3-real`, errors ‖W − W′‖/‖W‖ are those of the other 32 against the published weights, bits
//! are without tables. Seconds are those of one core for one expert of Kimi K3, 33.03 million weights, from
//! the fastest of ten runs over each of four tiles, because others may be using the machine. Products are those of
//! a 3072 × 3584 matrix, that is the 32 rows over and over, in 10⁹ weights per second and core for one vector and
//! for sixteen, vectors quantised already, again the fastest of ten.

use std::hint::black_box;
use std::time::Instant;

use rill_kernels::{
    Activations, Codec, Matrix, Trellis, TrellisEncoder, TrellisKernels, TrellisMatrix,
    TrellisTables,
};

const ROWS: usize = 64;
const COLS: usize = 3584;
/// Tiles of eight rows in the half that is measured.
const TILES: usize = ROWS / 2 / 8;
const EXPERT_WEIGHTS: f64 = 3.0 * 3072.0 * 3584.0;

fn main() {
    let rotated = std::env::args().any(|a| a == "rotated");
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let (mut widths, mut rates): (Vec<_>, Vec<_>) = numbers.into_iter().partition(|&n| n <= 14);
    if widths.is_empty() {
        widths.push(12);
    }
    if rates.is_empty() {
        rates.extend(16..=if rotated { 32 } else { 28 });
    }
    let file = include_bytes!("../../../fixtures/k3-real/mxfp4_rows.safetensors");
    let (code_bytes, scale_bytes) = (ROWS * COLS / 2, ROWS * COLS / 32);
    let (codes, scales) = file[file.len() - code_bytes - scale_bytes..].split_at(code_bytes);
    let source = Matrix::new(Codec::Mxfp4, ROWS, COLS, codes, scales).expect("as published");
    let (sample, rest) = (source.row_range(0..ROWS / 2), source.row_range(ROWS / 2..ROWS));
    if rotated {
        let x: Vec<f32> = (0..COLS).map(|i| (i % 13) as f32 - 6.0).collect();
        let [plain, turned] = [Activations::new, Activations::rotated].map(|prepare| {
            let many = || (0..1000).for_each(|_| drop(black_box(prepare(black_box(&x), COLS))));
            best_of(many) * 1e3
        });
        println!("{COLS} inputs: quantised in {plain:.1} µs, turned and quantised in {turned:.1}");
    }
    println!("width  rate  payload bits  stored bits   error  seconds per expert; products");
    for &width in &widths {
        for &rate in &rates {
            let new = if rotated { Trellis::rotated } else { Trellis::new };
            let trellis = new(rate, width).expect("10 to 14, 16 to 28, or 32 if rotated");
            let encoder = TrellisEncoder::train(trellis, &sample).expect("a sample of MXFP4");
            let layout = trellis.layout(rest.rows(), COLS).expect("whole blocks");
            let (mut codes, mut sides) = (vec![0; layout.codes], vec![0; layout.scales]);
            let tile_bytes = (layout.codes / TILES, layout.scales / TILES);
            let mut seconds = TrellisEncoder::all(trellis, encoder.tables(), encoder.split());
            // The specification is there to be compared with.
            let seconds = seconds.split_off(usize::from(seconds.len() > 1));
            let seconds = seconds.iter().map(|encoder| {
                let each_tile = (0..TILES).map(|tile| {
                    let source = rest.row_range(tile * 8..tile * 8 + 8);
                    let codes = &mut codes[tile * tile_bytes.0..][..tile_bytes.0];
                    let sides = &mut sides[tile * tile_bytes.1..][..tile_bytes.1];
                    best_of(|| encoder.encode(&source, codes, sides).expect("MXFP4"))
                });
                let seconds =
                    each_tile.fold(f64::INFINITY, f64::min) * EXPERT_WEIGHTS / (8 * COLS) as f64;
                format!("{} {seconds:.2}", encoder.name())
            });
            let seconds: Vec<String> = seconds.collect();
            let tables = encoder.tables();
            let packed = TrellisMatrix::new(trellis, rest.rows(), COLS, &codes, &sides, tables);
            let weights = (rest.rows() * COLS) as f64;
            println!(
                "{width:>5}  {rate:>4}  {:>12.4}  {:>11.4}  {:>5.2} %  {}; {}",
                trellis.payload_bits(rest.rows(), COLS) as f64 / weights,
                (layout.codes + layout.scales) as f64 * 8.0 / weights,
                error(&rest, &packed.expect("just made")) * 100.0,
                seconds.join(", "),
                speeds(trellis, &codes, &sides, encoder.tables()).join(", "),
            );
        }
    }
}

/// 10⁹ weights per second of every kernel but the specification, for one and for sixteen vectors.
fn speeds(trellis: Trellis, codes: &[u8], sides: &[u8], tables: &TrellisTables) -> Vec<String> {
    let rows = 3072;
    let times = rows / 8 / TILES;
    let (codes, sides) = (codes.repeat(times), sides.repeat(times));
    let matrix = TrellisMatrix::new(trellis, rows, COLS, &codes, &sides, tables);
    let matrix = matrix.expect("tiles that are whole");
    let mut kernels = TrellisKernels::all();
    let kernels = kernels.split_off(usize::from(kernels.len() > 1));
    let speed = |kernels: &TrellisKernels| {
        let [one, sixteen] = [1, 16].map(|n| {
            let x: Vec<f32> = (0..n * COLS).map(|i| (i % 13) as f32 - 6.0).collect();
            let x = integers(trellis)(&x, COLS);
            let mut out = vec![0.0; rows * n];
            let seconds = best_of(|| kernels.multiply(black_box(&matrix), &x, black_box(&mut out)));
            (rows * COLS * n) as f64 / seconds / 1e9
        });
        format!("{} {one:.1} ({sixteen:.1})", kernels.name())
    };
    kernels.iter().map(speed).collect()
}

fn integers(trellis: Trellis) -> fn(&[f32], usize) -> Activations {
    if trellis.is_rotated() { Activations::rotated } else { Activations::new }
}

fn best_of(mut f: impl FnMut()) -> f64 {
    let once = |_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    (0..10).map(once).fold(f64::INFINITY, f64::min)
}

/// ‖W − W′‖/‖W‖.
fn error(source: &Matrix<'_>, packed: &TrellisMatrix<'_>) -> f64 {
    let (mut wanted, mut found) = (vec![0.0; COLS], vec![0.0; COLS]);
    let (mut lost, mut all) = (0.0, 0.0);
    for row in 0..source.rows() {
        source.decode_row(row, &mut wanted);
        packed.decode_row(row, &mut found);
        for (&w, &f) in wanted.iter().zip(&found) {
            lost += (f64::from(w) - f64::from(f)).powi(2);
            all += f64::from(w).powi(2);
        }
    }
    (lost / all).sqrt()
}
