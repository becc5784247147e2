//! The trellis format: its specification bit by bit, hostile bytes, activations, and real rows of Kimi K3.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use rill_kernels::{Activations, LayoutError, Trellis, TrellisMatrix, TrellisTables};

/// xorshift64*.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| (self.next() >> 56) as u8).collect()
    }

    /// Near enough Gaussian: a sum of twelve uniform numbers.
    fn gaussian(&mut self, n: usize) -> Vec<f32> {
        let mut unit = || (self.next() >> 40) as f32 / (1 << 24) as f32;
        (0..n).map(|_| (0..12).map(|_| unit()).sum::<f32>() - 6.0).collect()
    }
}

/// Random bytes of a matrix, with scales that are numbers.
struct Bytes {
    trellis: Trellis,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    sides: Vec<u8>,
    tables: TrellisTables,
}

impl Bytes {
    fn random(rng: &mut Rng, trellis: Trellis, rows: usize, cols: usize) -> Self {
        let layout = trellis.layout(rows, cols).unwrap();
        let tables: Vec<u8> = rng.bytes(128).iter().map(|b| b % 128).collect();
        let mut bytes = Self {
            trellis,
            rows,
            cols,
            codes: rng.bytes(layout.codes),
            sides: rng.bytes(layout.scales),
            tables: TrellisTables::new(&tables).unwrap(),
        };
        for row in 0..rows.next_multiple_of(8) {
            bytes.set_scale(row, 0.01 + row as f32);
        }
        bytes
    }

    /// Where a row's scale is: the last four bytes of its last word.
    fn set_scale(&mut self, row: usize, scale: f32) {
        let tile = self.codes.len() / self.rows.div_ceil(8);
        let at = row / 8 * tile + tile - 64 + row % 8 * 8 + 4;
        self.codes[at..at + 4].copy_from_slice(&scale.to_le_bytes());
    }

    fn matrix(&self) -> Result<TrellisMatrix<'_>, LayoutError> {
        let Self { trellis, rows, cols, codes, sides, tables } = self;
        TrellisMatrix::new(*trellis, *rows, *cols, codes, sides, tables)
    }
}

/// Weights read bit by bit, as the format is described.
fn weight(b: &Bytes, row: usize, col: usize) -> f32 {
    let (rate, tile) = (b.trellis.rate(), b.codes.len() / b.rows.div_ceil(8));
    let bit = |i: usize| {
        let byte = row / 8 * tile + i / 64 * 64 + row % 8 * 8 + i % 64 / 8;
        u32::from(b.codes[byte] >> (i % 8) & 1)
    };
    let first = col / 8 * rate + col % 8 * rate / 8;
    let window: u32 = (0..16).map(|i| bit(first + i) << i).sum();
    let multiplier = [6736, 10184, 10044, 10058, 11513][b.trellis.width() - 10];
    let entry = (window * multiplier) >> 8 & 63;
    let side_tile = b.sides.len() / b.rows.div_ceil(8);
    let side = b.sides[row / 8 * side_tile + col / 64 * 8 + row % 8] >> (col / 32 % 2 * 4) & 15;
    let table = usize::from(side >> 3) * 64;
    let scale = row as f32 + 0.01;
    let tenths = f32::from(b.tables.bytes()[table + entry as usize]) - 64.0;
    tenths * 0.5f32.powi(i32::from(side & 7)) * scale
}

fn every_trellis() -> impl Iterator<Item = Trellis> {
    (16..=28).flat_map(|rate| (10..=14).map(move |width| Trellis::new(rate, width).unwrap()))
}

#[test]
fn weights_are_where_the_format_says_for_every_rate_width_and_shape() {
    let mut rng = Rng(1);
    for trellis in every_trellis() {
        for (rows, cols) in [(1, 32), (8, 64), (9, 96), (17, 224)] {
            let bytes = Bytes::random(&mut rng, trellis, rows, cols);
            let matrix = bytes.matrix().unwrap();
            let mut decoded = vec![0.0; cols];
            for row in 0..rows {
                matrix.decode_row(row, &mut decoded);
                for (col, &found) in decoded.iter().enumerate() {
                    let wanted = weight(&bytes, row, col);
                    assert_eq!(found, wanted, "{trellis:?} {rows} × {cols}, {row}, {col}");
                }
            }
        }
    }
}

#[test]
fn payload_and_stored_bits_of_an_experts_matrix() {
    // 2.875 bits a weight, an eighth for side nibbles, a tail of 16 and a scale of 32 bits per row.
    let trellis = Trellis::new(23, 12).unwrap();
    let row = 3584 / 8 * 23 + 3584 / 8 + 48;
    assert_eq!(trellis.payload_bits(3072, 3584), 3072 * row as u64);
    let layout = trellis.layout(3072, 3584).unwrap();
    assert_eq!((layout.codes, layout.scales), (3072 / 8 * 162 * 64, 3072 / 8 * 448));
    // A matrix of k3-nano's size: rows and columns are padded.
    let layout = trellis.layout(12, 32).unwrap();
    assert_eq!((layout.codes, layout.scales), (2 * 3 * 64, 2 * 8));
    assert_eq!(trellis.payload_bits(12, 32), 12 * (92 + 4 + 48));
}

#[test]
fn bytes_that_are_not_the_matrix_are_refused() {
    let trellis = Trellis::new(23, 12).unwrap();
    for (rate, width) in [(15, 12), (29, 12), (23, 9), (23, 15)] {
        assert!(matches!(Trellis::new(rate, width), Err(LayoutError::Trellis(_))));
    }
    assert!(matches!(trellis.layout(8, 48), Err(LayoutError::Columns { of: 32, .. })));
    assert!(matches!(trellis.layout(8, usize::MAX - 31), Err(LayoutError::TooLarge { .. })));
    assert!(matches!(trellis.layout(usize::MAX, 64), Err(LayoutError::TooLarge { .. })));

    assert!(matches!(TrellisTables::new(&[0; 127]), Err(LayoutError::Trellis(_))));
    let mut tables = [127; 128];
    assert!(TrellisTables::new(&tables).is_ok());
    tables[100] = 128;
    let refused = TrellisTables::new(&tables);
    assert_eq!(refused, Err(LayoutError::TableByte { byte: 100, found: 128 }));

    let mut bytes = Bytes::random(&mut Rng(2), trellis, 11, 96);
    assert!(bytes.matrix().is_ok());
    bytes.codes.pop();
    assert!(matches!(bytes.matrix(), Err(LayoutError::Length { part: "codes", .. })));
    bytes.codes.push(0);
    bytes.sides.push(0);
    assert!(matches!(bytes.matrix(), Err(LayoutError::Length { part: "sides", .. })));
    bytes.sides.pop();
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        bytes.set_scale(10, scale);
        assert!(matches!(bytes.matrix(), Err(LayoutError::Scale { row: 10, .. })));
    }
    bytes.set_scale(10, 1.0);
    // Lanes of rows that are not there are nobody's.
    bytes.set_scale(11, f32::NAN);
    assert!(bytes.matrix().is_ok());
}

#[test]
fn row_ranges_are_the_rows() {
    let bytes = Bytes::random(&mut Rng(3), Trellis::new(21, 12).unwrap(), 21, 96);
    let matrix = bytes.matrix().unwrap();
    let (mut whole, mut part) = (vec![0.0; 96], vec![0.0; 96]);
    for range in [0..8, 8..16, 8..21, 16..21, 0..21, 16..16] {
        let rows = matrix.row_range(range.clone());
        assert_eq!((rows.rows(), rows.cols()), (range.len(), 96));
        for (i, row) in range.enumerate() {
            matrix.decode_row(row, &mut whole);
            rows.decode_row(i, &mut part);
            assert_eq!(whole, part);
        }
    }
}

/// Relative distance of two vectors in norm.
fn distance(found: &[f32], exact: &[f64]) -> f64 {
    let lost: f64 = found.iter().zip(exact).map(|(&f, e)| (f64::from(f) - e).powi(2)).sum();
    (lost / exact.iter().map(|e| e * e).sum::<f64>()).sqrt()
}

#[test]
fn products_with_gaussian_vectors_are_within_6e_5_of_binary64() {
    let mut rng = Rng(4);
    let (rows, cols, n) = (40, 3584, 3);
    let bytes = Bytes::random(&mut rng, Trellis::new(23, 12).unwrap(), rows, cols);
    let matrix = bytes.matrix().unwrap();
    let x = rng.gaussian(n * cols);
    let activations = Activations::new(&x, cols);
    assert_eq!((activations.vectors(), activations.cols()), (n, cols));
    let mut out = vec![0.0; rows * n];
    matrix.multiply(&activations, &mut out);
    // Of inputs the rounded integers are the only error, of products f32 adds its own.
    let (mut exact, mut seen) = (vec![], vec![]);
    let decoded: Vec<Vec<f32>> = (0..n).map(|v| activations.decode(v)).collect();
    let mut w = vec![0.0; cols];
    for row in 0..rows {
        matrix.decode_row(row, &mut w);
        let dot = |x: &[f32]| -> f64 {
            w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
        };
        exact.extend(x.chunks_exact(cols).map(dot));
        seen.extend(decoded.iter().map(|x| dot(x)));
    }
    let (lost, rounded) = (distance(&out, &exact), distance(&out, &seen));
    println!("{lost:.2e} from the vectors as given, {rounded:.2e} from them as integers");
    assert!(lost < 6e-5 && rounded < 1e-6);
}

#[test]
fn a_vector_that_is_not_finite_makes_every_product_with_it_nan() {
    let bytes = Bytes::random(&mut Rng(5), Trellis::new(16, 10).unwrap(), 9, 96);
    let mut x = vec![1.0; 3 * 96];
    (x[40], x[96 + 95]) = (f32::NAN, f32::INFINITY);
    let mut out = vec![0.0; 9 * 3];
    bytes.matrix().unwrap().multiply(&Activations::new(&x, 96), &mut out);
    for out in out.chunks_exact(3) {
        assert!(out[0].is_nan() && out[1].is_nan() && out[2].is_finite());
    }
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_give_numbers(
        rate in 16usize..=28,
        width in 10usize..=14,
        rows in 0usize..20,
        blocks in 0usize..8,
        missing in prop_oneof![4 => Just(0usize), 1 => 1usize..70],
        seed in 1u64..,
    ) {
        let trellis = Trellis::new(rate, width).unwrap();
        let (cols, mut rng) = (blocks * 32, Rng(seed));
        let layout = trellis.layout(rows, cols).unwrap();
        let codes = rng.bytes(layout.codes.saturating_sub(missing));
        let sides = rng.bytes(layout.scales);
        let tables: Vec<u8> = rng.bytes(128).iter().map(|b| b % 128).collect();
        let tables = TrellisTables::new(&tables).unwrap();
        match TrellisMatrix::new(trellis, rows, cols, &codes, &sides, &tables) {
            Err(error) => prop_assert!(!error.to_string().is_empty()),
            Ok(matrix) => {
                let mut row = vec![f32::NAN; cols];
                for r in 0..rows {
                    matrix.decode_row(r, &mut row);
                    prop_assert!(row.iter().all(|w| !w.is_nan()));
                }
                if cols > 0 {
                    let mut out = vec![0.0; rows];
                    matrix.multiply(&Activations::new(&vec![1e-30; cols], cols), &mut out);
                    prop_assert!(out.iter().all(|y| !y.is_nan()));
                }
            }
        }
    }
}
