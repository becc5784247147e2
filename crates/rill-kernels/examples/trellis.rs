//! How well and how fast the trellis format encodes real weights:
//!
//! ```text
//! cargo run --release -p rill-kernels --example trellis [WIDTH or RATE ...]
//! ```
//!
//! Numbers up to 14 are widths, larger ones rates; all rates at width 12 without. Tables are made for the first 32
//! rows of `fixtures/k3-real`, errors ‖W − W′‖/‖W‖ are those of the other 32 against the published weights, bits
//! are without tables. Seconds are those of one core for one expert of Kimi K3, 33.03 million weights, from
//! the fastest of ten runs over each of four tiles, because others may be using the machine.

use std::time::Instant;

use rill_kernels::{Codec, Matrix, Trellis, TrellisEncoder, TrellisMatrix};

const ROWS: usize = 64;
const COLS: usize = 3584;
/// Tiles of eight rows in the half that is measured.
const TILES: usize = ROWS / 2 / 8;
const EXPERT_WEIGHTS: f64 = 3.0 * 3072.0 * 3584.0;

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let (mut widths, mut rates): (Vec<_>, Vec<_>) = numbers.into_iter().partition(|&n| n <= 14);
    if widths.is_empty() {
        widths.push(12);
    }
    if rates.is_empty() {
        rates.extend(16..=28);
    }
    let file = include_bytes!("../../../fixtures/k3-real/mxfp4_rows.safetensors");
    let (code_bytes, scale_bytes) = (ROWS * COLS / 2, ROWS * COLS / 32);
    let (codes, scales) = file[file.len() - code_bytes - scale_bytes..].split_at(code_bytes);
    let source = Matrix::new(Codec::Mxfp4, ROWS, COLS, codes, scales).expect("as published");
    let (sample, rest) = (source.row_range(0..ROWS / 2), source.row_range(ROWS / 2..ROWS));
    println!("width  rate  payload bits  stored bits   error  seconds per expert");
    for &width in &widths {
        for &rate in &rates {
            let trellis = Trellis::new(rate, width).expect("10 to 14, 16 to 28");
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
                "{width:>5}  {rate:>4}  {:>12.4}  {:>11.4}  {:>5.2} %  {}",
                trellis.payload_bits(rest.rows(), COLS) as f64 / weights,
                (layout.codes + layout.scales) as f64 * 8.0 / weights,
                error(&rest, &packed.expect("just made")) * 100.0,
                seconds.join(", "),
            );
        }
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
