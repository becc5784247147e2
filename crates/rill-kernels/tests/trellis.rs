//! The trellis format: its specification bit by bit, hostile bytes, activations, and real rows of Kimi K3.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use rill_kernels::{
    Activations, Codec, LayoutError, Matrix, Pool, Trellis, TrellisEncoder, TrellisKernels,
    TrellisMatrix, TrellisTables,
};

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

/// Random bytes of tables: magnitudes up to 63, of which the first of each class is 0.
fn magnitudes(rng: &mut Rng) -> Vec<u8> {
    let mut bytes: Vec<u8> = rng.bytes(64).iter().map(|b| b % 64).collect();
    (bytes[0], bytes[32]) = (0, 0);
    bytes
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
        let tables = magnitudes(rng);
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

/// Weights read bit by bit, as the format is described; of the rotated profile in its basis, class 0.
fn weight(b: &Bytes, row: usize, col: usize) -> f32 {
    let (rate, tile) = (b.trellis.rate(), b.codes.len() / b.rows.div_ceil(8));
    let bit = |i: usize| {
        let byte = row / 8 * tile + i / 64 * 64 + row % 8 * 8 + i % 64 / 8;
        u32::from(b.codes[byte] >> (i % 8) & 1)
    };
    let first = col / 8 * rate + col % 8 * rate / 8;
    let window: u32 = (0..16).map(|i| bit(first + i) << i).sum();
    let multiplier = match (b.trellis.is_rotated(), b.trellis.width()) {
        (true, 12) if rate <= 21 => 4316,
        (_, width) => [6736, 10184, 10044, 10058, 11513][width - 10],
    };
    let entry = (window * multiplier) >> 8 & 63;
    // A number of six bits with a sign.
    let entry = if entry < 32 { entry as i32 } else { entry as i32 - 64 };
    let units = |class: usize| {
        let index = if entry == -32 { 16 } else { entry.unsigned_abs() as usize };
        f32::from(b.tables.bytes()[class * 32 + index]) * if entry < 0 { -1.0 } else { 1.0 }
    };
    let scale = row as f32 + 0.01;
    if b.trellis.is_rotated() {
        return units(0) * scale;
    }
    let side_tile = b.sides.len() / b.rows.div_ceil(8);
    let side = b.sides[row / 8 * side_tile + col / 64 * 8 + row % 8] >> (col / 32 % 2 * 4) & 15;
    units(usize::from(side >> 3)) * 0.5f32.powi(i32::from(side & 7)) * scale
}

fn every_trellis() -> impl Iterator<Item = Trellis> {
    (16..=28).flat_map(|rate| (10..=14).map(move |width| Trellis::new(rate, width).unwrap()))
}

fn every_rotated_trellis() -> impl Iterator<Item = Trellis> {
    (16..=32).flat_map(|rate| (10..=14).map(move |width| Trellis::rotated(rate, width).unwrap()))
}

/// Integers for a product with matrices of a profile.
fn integers(trellis: Trellis, x: &[f32], cols: usize) -> Activations {
    if trellis.is_rotated() { Activations::rotated(x, cols) } else { Activations::new(x, cols) }
}

#[test]
fn rotated_weights_are_sums_and_differences_of_those_that_the_bits_mean() {
    let negative = |col: usize| {
        let mut hash = col as u32 % 512;
        hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
        hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
        (hash ^ hash >> 16) % 2 == 1
    };
    let mut rng = Rng(11);
    for trellis in every_rotated_trellis() {
        for (rows, cols, span) in [(1, 32, 32), (9, 96, 32), (8, 128, 128), (2, 1536, 512)] {
            let bytes = Bytes::random(&mut rng, trellis, rows, cols);
            let matrix = bytes.matrix().unwrap();
            let mut decoded = vec![0.0; cols];
            for row in 0..rows {
                matrix.decode_row(row, &mut decoded);
                let meant: Vec<f64> =
                    (0..cols).map(|col| f64::from(weight(&bytes, row, col))).collect();
                // Every seventh is enough for the sums of each.
                for (col, &found) in decoded.iter().enumerate().step_by(7) {
                    let first = col / span * span;
                    let term = |i: usize| {
                        let odd = (i & (col - first)).count_ones() % 2 == 1;
                        if odd { -meant[first + i] } else { meant[first + i] }
                    };
                    let sum = (0..span).map(term).sum::<f64>() / (span as f64).sqrt();
                    let wanted = if negative(col) { -sum } else { sum };
                    let near = (f64::from(found) - wanted).abs() <= 1e-5 * (row + 1) as f64;
                    assert!(near, "{trellis:?} {rows} × {cols}, {row}, {col}: {found} {wanted}");
                }
            }
        }
    }
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
    // Rotated: without side nibbles.
    let rotated = Trellis::rotated(20, 12).unwrap();
    assert_eq!(rotated.payload_bits(3072, 3584), 3072 * (3584 / 8 * 20 + 48));
    assert_eq!((rotated.layout(3072, 3584).unwrap().scales), 0);
    assert_eq!(trellis.payload_bits(12, 32), 12 * (92 + 4 + 48));
}

#[test]
fn bytes_that_are_not_the_matrix_are_refused() {
    let trellis = Trellis::new(23, 12).unwrap();
    for (rate, width) in [(15, 12), (29, 12), (23, 9), (23, 15)] {
        assert!(matches!(Trellis::new(rate, width), Err(LayoutError::Trellis(_))));
    }
    for (rate, width) in [(15, 12), (33, 12), (20, 9), (20, 15)] {
        assert!(matches!(Trellis::rotated(rate, width), Err(LayoutError::Trellis(_))));
    }
    assert!(matches!(trellis.layout(8, 48), Err(LayoutError::Columns { of: 32, .. })));
    assert!(matches!(trellis.layout(8, usize::MAX - 31), Err(LayoutError::TooLarge { .. })));
    assert!(matches!(trellis.layout(usize::MAX, 64), Err(LayoutError::TooLarge { .. })));

    assert!(matches!(TrellisTables::new(&[0; 63]), Err(LayoutError::Trellis(_))));
    // What has a sign of its own, or a weight 0 that is not 0, is no table.
    let largest = largest_tables();
    assert!(TrellisTables::new(&largest).is_ok());
    for (byte, most, found) in [(50, 63, 64), (0, 0, 1), (32, 0, 63)] {
        let mut tables = largest;
        tables[byte] = found;
        let refused = TrellisTables::new(&tables);
        assert_eq!(refused, Err(LayoutError::TableByte { byte, most, found }));
    }

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

#[test]
fn every_kernel_gives_the_specifications_bits_for_every_rate_and_shape() {
    let mut rng = Rng(6);
    for trellis in every_trellis().chain(every_rotated_trellis()) {
        for (rows, cols) in [(1, 32), (4, 64), (5, 96), (8, 512), (23, 288)] {
            let bytes = Bytes::random(&mut rng, trellis, rows, cols);
            let matrix = bytes.matrix().unwrap();
            for n in [1, 2, 4, 7] {
                let mut x = rng.gaussian(n * cols);
                // The largest sums there can be, in both directions, and one vector that is no number.
                x[..32].fill(1.0);
                x[n * cols - 32..].fill(-1.0);
                if n == 7 {
                    x[3 * cols] = f32::NAN;
                }
                let x = integers(trellis, &x, cols);
                let [expected, others @ ..] = &products(&matrix, &x)[..] else { panic!() };
                for (name, found) in others {
                    let same = |(a, b): (&f32, &f32)| {
                        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
                    };
                    let all = expected.1.iter().zip(found).all(same);
                    assert!(all, "{name} {trellis:?} {rows} × {cols}, {n} vectors");
                }
            }
        }
    }
}

#[test]
fn the_largest_sums_of_bytes_there_can_be_are_exact() {
    let trellis = Trellis::new(25, 12).unwrap();
    let mut bytes = Bytes::random(&mut Rng(7), trellis, 8, 64);
    bytes.tables = TrellisTables::new(&largest_tables()).unwrap();
    let matrix = bytes.matrix().unwrap();
    for row in 0..8 {
        let mut w = [0.0f32; 64];
        matrix.decode_row(row, &mut w);
        for sign in [1.0, -1.0] {
            // Every product has the same sign.
            let x = w.map(|w| sign * 16319.0 * if w < 0.0 { -1.0 } else { 1.0 });
            let exact: f64 = w.iter().map(|w| f64::from(w.abs()) * f64::from(sign) * 16319.0).sum();
            // For one vector and for several.
            for n in [1, 4] {
                let x = Activations::new(&x.repeat(n), 64);
                for (name, out) in products(&matrix, &x) {
                    for &found in &out[row * n..][..n] {
                        let near = (f64::from(found) / exact - 1.0).abs() < 1e-6;
                        assert!(near, "{name} {found} {exact}");
                    }
                }
            }
        }
    }
}

/// Tables of nothing but the largest magnitude.
fn largest_tables() -> [u8; 64] {
    std::array::from_fn(|i| if i % 32 == 0 { 0 } else { 63 })
}

/// Name and product of every kernel.
fn products(matrix: &TrellisMatrix<'_>, x: &Activations) -> Vec<(&'static str, Vec<f32>)> {
    let product = |kernels: TrellisKernels| {
        let mut out = vec![f32::NAN; matrix.rows() * x.vectors()];
        kernels.multiply(matrix, x, &mut out);
        (kernels.name(), out)
    };
    TrellisKernels::all().into_iter().map(product).collect()
}

/// Relative distance of two vectors in norm.
fn distance(found: &[f32], exact: &[f64]) -> f64 {
    let lost: f64 = found.iter().zip(exact).map(|(&f, e)| (f64::from(f) - e).powi(2)).sum();
    (lost / exact.iter().map(|e| e * e).sum::<f64>()).sqrt()
}

#[test]
fn products_with_gaussian_vectors_are_within_6e_5_of_binary64() {
    for trellis in [Trellis::new(23, 12), Trellis::rotated(20, 12), Trellis::rotated(32, 12)] {
        products_are_near(trellis.unwrap());
    }
}

fn products_are_near(trellis: Trellis) {
    let mut rng = Rng(4);
    let (rows, cols, n) = (40, 3584, 3);
    let bytes = Bytes::random(&mut rng, trellis, rows, cols);
    let matrix = bytes.matrix().unwrap();
    let x = rng.gaussian(n * cols);
    let activations = integers(trellis, &x, cols);
    assert_eq!((activations.vectors(), activations.cols()), (n, cols));
    let mut out = vec![0.0; rows * n];
    matrix.multiply(&activations, &mut out);
    // Of inputs the rounded integers are the only error, of products f32 adds its own.
    let (mut exact, mut seen) = (vec![], vec![]);
    let decoded: Vec<Vec<f32>> = (0..n).map(|v| activations.decode(v)).collect();
    let (mut w, mut of_bits) = (vec![0.0; cols], vec![0.0; cols]);
    for row in 0..rows {
        matrix.decode_row(row, &mut w);
        for (col, w) in of_bits.iter_mut().enumerate() {
            *w = weight(&bytes, row, col);
        }
        let dot = |w: &[f32], x: &[f32]| -> f64 {
            w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
        };
        exact.extend(x.chunks_exact(cols).map(|x| dot(&w, x)));
        seen.extend(decoded.iter().map(|x| dot(&of_bits, x)));
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

const REAL_COLS: usize = 3584;

/// Some of the 64 rows of a real expert, 3584 inputs wide, which the fixture ends with.
fn real_rows(rows: std::ops::Range<usize>) -> Matrix<'static> {
    let file: &[u8] = include_bytes!("../../../fixtures/k3-real/mxfp4_rows.safetensors");
    let (codes, scales) = (64 * REAL_COLS / 2, 64 * REAL_COLS / 32);
    let (codes, scales) = file[file.len() - codes - scales..].split_at(codes);
    Matrix::new(Codec::Mxfp4, 64, REAL_COLS, codes, scales).unwrap().row_range(rows)
}

fn encode(encoder: &TrellisEncoder, trellis: Trellis, source: &Matrix<'_>) -> (Vec<u8>, Vec<u8>) {
    let layout = trellis.layout(source.rows(), source.cols()).unwrap();
    // Not zero, so that nothing counts on it.
    let (mut codes, mut sides) = (vec![0xaa; layout.codes], vec![0xaa; layout.scales]);
    encoder.encode(source, &mut codes, &mut sides).unwrap();
    (codes, sides)
}

/// ‖W − W′‖/‖W‖ of a matrix packed by an encoder.
fn error(encoder: &TrellisEncoder, trellis: Trellis, source: &Matrix<'_>) -> f64 {
    let (rows, cols) = (source.rows(), source.cols());
    let (codes, sides) = encode(encoder, trellis, source);
    let packed = TrellisMatrix::new(trellis, rows, cols, &codes, &sides, encoder.tables()).unwrap();
    let (mut wanted, mut found) = (vec![0.0; cols], vec![0.0; cols]);
    let (mut lost, mut all) = (0.0, 0.0);
    for row in 0..rows {
        source.decode_row(row, &mut wanted);
        packed.decode_row(row, &mut found);
        for (&w, &f) in wanted.iter().zip(&found) {
            lost += (f64::from(w) - f64::from(f)).powi(2);
            all += f64::from(w).powi(2);
        }
    }
    (lost / all).sqrt()
}

#[test]
fn rotated_real_rows_reach_the_errors_the_profile_is_for() {
    for (rate, most_bits, largest) in [(20, 2.53, 0.196), (24, 3.02, 0.139)] {
        let trellis = Trellis::rotated(rate, 12).unwrap();
        let bits = trellis.payload_bits(32, REAL_COLS) as f64 / (32 * REAL_COLS) as f64;
        let encoder = TrellisEncoder::train(trellis, &real_rows(0..32)).unwrap();
        let error = error(&encoder, trellis, &real_rows(32..64));
        println!("{rate}: {bits:.4} bits, error {error:.4}");
        assert!(bits <= most_bits && error <= largest, "{rate}: {bits} bits, error {error}");
    }
}

#[test]
fn gaussian_rows_reach_the_errors_the_rotated_profile_is_for() {
    let cols = 3584;
    let mut rng = Rng(8);
    let mut rows = || -> Vec<u8> {
        rng.gaussian(32 * cols).iter().flat_map(|w| (w * 0.02).to_le_bytes()).collect()
    };
    let (sample, others) = (rows(), rows());
    let matrix = |bytes| Matrix::new(Codec::F32, 32, cols, bytes, &[]).unwrap();
    for (rate, largest) in [(26, 0.1185), (28, 0.1015), (32, 0.0745)] {
        let trellis = Trellis::rotated(rate, 12).unwrap();
        let encoder = TrellisEncoder::train(trellis, &matrix(&sample)).unwrap();
        let error = error(&encoder, trellis, &matrix(&others));
        println!("{rate}: error {error:.4}");
        assert!(error <= largest, "{rate}: error {error}");
    }
}

#[test]
fn rotated_rows_of_any_size_and_of_zeros_are_encoded_and_what_is_no_number_is_refused() {
    let trellis = Trellis::rotated(24, 10).unwrap();
    let cols = 160;
    let mut weights = Rng(9).gaussian(5 * cols);
    for (row, unit) in [1e37, 1e-30, 0.0, -1.0, 1e-3].into_iter().enumerate() {
        weights[row * cols..][..cols].iter_mut().for_each(|w| *w *= unit);
    }
    let bytes =
        |weights: &[f32]| -> Vec<u8> { weights.iter().flat_map(|w| w.to_le_bytes()).collect() };
    let stored = bytes(&weights);
    let source = Matrix::new(Codec::F32, 5, cols, &stored, &[]).unwrap();
    let encoder = TrellisEncoder::train(trellis, &source).unwrap();
    let (codes, sides) = encode(&encoder, trellis, &source);
    let packed = TrellisMatrix::new(trellis, 5, cols, &codes, &sides, encoder.tables()).unwrap();
    let mut found = vec![1.0; cols];
    for (row, wanted) in weights.chunks_exact(cols).enumerate() {
        packed.decode_row(row, &mut found);
        let wanted: Vec<f64> = wanted.iter().map(|&w| f64::from(w)).collect();
        match row {
            2 => assert!(found.iter().all(|&w| w == 0.0)),
            _ => assert!(distance(&found, &wanted) < 0.2, "row {row}"),
        }
    }
    weights[3 * cols + 7] = f32::INFINITY;
    let stored = bytes(&weights);
    let source = Matrix::new(Codec::F32, 5, cols, &stored, &[]).unwrap();
    let refused = encoder.encode(&source, &mut codes.clone(), &mut []);
    assert!(matches!(refused, Err(LayoutError::Weight { row: 3, input: 7, .. })), "{refused:?}");
    assert!(TrellisEncoder::train(trellis, &source).is_err());
}

#[test]
#[should_panic(expected = "different bases")]
fn a_rotated_matrix_does_not_take_vectors_that_are_not() {
    let bytes = Bytes::random(&mut Rng(10), Trellis::rotated(16, 10).unwrap(), 8, 32);
    bytes.matrix().unwrap().multiply(&Activations::new(&[1.0; 32], 32), &mut [0.0; 8]);
}

#[test]
fn real_rows_reach_the_errors_the_format_is_for() {
    // Rate, most bits of payload per weight, largest error on rows that the tables were not made for.
    for (rate, most_bits, largest) in [(19, 2.53, 0.204), (23, 3.03, 0.132), (24, 3.15, 0.115)] {
        let trellis = Trellis::new(rate, 12).unwrap();
        let bits = trellis.payload_bits(32, REAL_COLS) as f64 / (32 * REAL_COLS) as f64;
        let encoder = TrellisEncoder::train(trellis, &real_rows(0..32)).unwrap();
        let error = error(&encoder, trellis, &real_rows(32..64));
        println!("{rate}: {bits:.4} bits, error {error:.4}");
        assert!(bits <= most_bits && error <= largest, "{rate}: {bits} bits, error {error}");
    }
}

/// FNV-1a.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &b| {
        (hash ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[test]
fn every_encoder_and_machine_makes_the_same_bytes() {
    let source = real_rows(56..58);
    for (rate, width, rotated, expected) in FINGERPRINTS {
        let new = if rotated { Trellis::rotated } else { Trellis::new };
        let trellis = new(rate, width).unwrap();
        let trained = TrellisEncoder::train(trellis, &real_rows(0..2)).unwrap();
        for encoder in TrellisEncoder::all(trellis, trained.tables(), trained.split()) {
            let (codes, sides) = encode(&encoder, trellis, &source);
            let all = [trained.tables().bytes(), &codes, &sides].concat();
            let found = fingerprint(&all);
            assert_eq!(found, expected, "{rate} {width} {}: {found:#018x}", encoder.name());
        }
    }
}

/// Of tables and bytes, by rate, width and whether rotated.
const FINGERPRINTS: [(usize, usize, bool, u64); 7] = [
    (16, 12, false, 0x59d9_b799_b371_98b7),
    (21, 10, false, 0xde9c_cfef_4947_3773),
    (23, 12, false, 0x7d4d_0283_a7ca_ae88),
    (27, 11, false, 0xeaf9_f57e_f837_a518),
    (20, 12, true, 0x1171_bbff_b647_953a),
    (26, 10, true, 0x70c0_e4be_613b_7949),
    (32, 11, true, 0xc1fd_cc70_059a_97e7),
];

#[test]
fn any_split_of_the_rows_gives_the_same_bytes() {
    let source = real_rows(0..44);
    let trellis = Trellis::new(22, 10).unwrap();
    let encoder = TrellisEncoder::train(trellis, &real_rows(60..64)).unwrap();
    let (codes, sides) = encode(&encoder, trellis, &source);
    let layout = trellis.layout(8, REAL_COLS).unwrap();
    for threads in [1, 3] {
        let (mut in_parts, mut side_parts) = (vec![0xaa; codes.len()], vec![0xaa; sides.len()]);
        let parts = in_parts.chunks_mut(layout.codes).zip(side_parts.chunks_mut(layout.scales));
        let mut parts: Vec<_> = parts.enumerate().collect();
        Pool::new(threads, &[]).unwrap().each(&mut parts, usize::MAX, |(tile, (codes, sides))| {
            let rows = *tile * 8..(*tile * 8 + 8).min(44);
            encoder.encode(&source.row_range(rows), codes, sides).unwrap();
        });
        assert!(in_parts == codes && side_parts == sides);
    }
}

#[test]
fn blocks_of_zeros_and_far_below_the_largest_are_as_near_as_tables_allow() {
    // Four blocks: as large as can be, 2^-7, 2^-9 of it, and zeros that are said to be larger still.
    let cols = 128;
    let mut codes: Vec<u8> = (0..64u32).map(|i| (i * 37 % 251) as u8).collect();
    codes[48..].fill(0x80);
    let trellis = Trellis::new(28, 12).unwrap();
    let encoder = TrellisEncoder::train(trellis, &real_rows(0..8)).unwrap();
    for top in [250, 130, 10] {
        let scales = [top, top - 7, top - 9, 254];
        let source = Matrix::new(Codec::Mxfp4, 1, cols, &codes, &scales).unwrap();
        let (packed, sides) = encode(&encoder, trellis, &source);
        let tables = encoder.tables();
        let packed = TrellisMatrix::new(trellis, 1, cols, &packed, &sides, tables).unwrap();
        let (mut wanted, mut found) = (vec![0.0; cols], vec![0.0; cols]);
        source.decode_row(0, &mut wanted);
        packed.decode_row(0, &mut found);
        let unit = |e: u8| 2f64.powi(i32::from(e) - 127);
        for (block, most) in
            [1.0 * unit(top), 1.0 * unit(top - 7), 2.0 * unit(top - 7), unit(top - 7)]
                .iter()
                .enumerate()
        {
            let pairs = wanted.iter().zip(&found).skip(32 * block).take(32);
            let lost = pairs.map(|(&w, &f)| (f64::from(w) - f64::from(f)).powi(2)).sum::<f64>();
            assert!(
                (lost / 32.0).sqrt() < *most,
                "{top}, block {block}: {}",
                (lost / 32.0).sqrt() / most
            );
        }
    }
}

#[test]
fn a_row_of_zeros_and_a_matrix_without_columns_are_encoded() {
    let trellis = Trellis::new(16, 10).unwrap();
    let encoder = TrellisEncoder::train(trellis, &real_rows(0..1)).unwrap();
    let source = Matrix::new(Codec::Mxfp4, 1, 64, &[0x08; 32], &[120, 0]).unwrap();
    let (codes, sides) = encode(&encoder, trellis, &source);
    let packed = TrellisMatrix::new(trellis, 1, 64, &codes, &sides, encoder.tables()).unwrap();
    let mut found = [1.0; 64];
    packed.decode_row(0, &mut found);
    assert!(found.iter().all(|w| w.abs() < 1e-30));
    let source = Matrix::new(Codec::Mxfp4, 3, 0, &[], &[]).unwrap();
    encode(&encoder, trellis, &source);
    assert!(TrellisEncoder::train(trellis, &source).is_ok());
}

#[test]
fn only_mxfp4_is_encoded() {
    let trellis = Trellis::new(16, 10).unwrap();
    let source = Matrix::new(Codec::F32, 1, 32, &[0; 128], &[]).unwrap();
    let refused = TrellisEncoder::train(trellis, &source);
    assert!(matches!(refused, Err(LayoutError::Trellis(_))));
    let encoder = TrellisEncoder::train(trellis, &real_rows(0..1)).unwrap();
    assert!(matches!(encoder.encode(&source, &mut [], &mut []), Err(LayoutError::Trellis(_))));
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_give_numbers(
        rate in 16usize..=32,
        rotated in any::<bool>(),
        width in 10usize..=14,
        rows in 0usize..20,
        blocks in 0usize..8,
        missing in prop_oneof![4 => Just(0usize), 1 => 1usize..70],
        seed in 1u64..,
    ) {
        let trellis = match rotated {
            true => Trellis::rotated(rate, width).unwrap(),
            false => Trellis::new(rate.min(28), width).unwrap(),
        };
        let (cols, mut rng) = (blocks * 32, Rng(seed));
        let layout = trellis.layout(rows, cols).unwrap();
        let codes = rng.bytes(layout.codes.saturating_sub(missing));
        let sides = rng.bytes(layout.scales);
        let tables = TrellisTables::new(&magnitudes(&mut rng)).unwrap();
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
                    matrix.multiply(&integers(trellis, &vec![1e-30; cols], cols), &mut out);
                    prop_assert!(out.iter().all(|y| !y.is_nan()));
                }
            }
        }
    }
}
