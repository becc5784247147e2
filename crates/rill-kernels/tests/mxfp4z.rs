//! Entropy-coded MXFP4: nothing is lost, products are MXFP4's, hostile bytes do no harm, real rows get small.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use rill_kernels::{Codec, Kernels, LayoutError, Matrix, Mxfp4zKernels, Mxfp4zMatrix};

/// xorshift64*.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 32) as usize * n) >> 32
    }

    fn vector(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }
}

/// The bytes of an MXFP4 matrix.
struct Source {
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Source {
    /// Small nibbles more often than large ones, exponents from `lowest` on, which `exponents` of occur.
    fn random(rng: &mut Rng, rows: usize, cols: usize, lowest: u8, exponents: usize) -> Self {
        let mut nibble = || {
            let (sign, size) = (rng.below(2) as u8 * 8, rng.below(8).min(rng.below(8)) as u8);
            sign | size
        };
        let codes = (0..rows * cols / 2).map(|_| nibble() | nibble() << 4).collect();
        let scales = (0..rows * cols / 32).map(|_| lowest + rng.below(exponents) as u8).collect();
        Self { rows, cols, codes, scales }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(Codec::Mxfp4, self.rows, self.cols, &self.codes, &self.scales).unwrap()
    }

    fn thinned(&self, hundredths: u16) -> Self {
        let (codes, scales) = Mxfp4zMatrix::thinned(&self.matrix(), hundredths).unwrap();
        Self { rows: self.rows, cols: self.cols, codes, scales }
    }

    /// ‖W − W′‖ / ‖W′‖.
    fn distance(&self, from: &Self) -> f64 {
        let (mut lost, mut all) = (0.0, 0.0);
        let (mut a, mut b) = (vec![0.0; self.cols], vec![0.0; self.cols]);
        for row in 0..self.rows {
            self.matrix().decode_row(row, &mut a);
            from.matrix().decode_row(row, &mut b);
            for (&a, &b) in a.iter().zip(&b) {
                lost += f64::from(a - b).powi(2);
                all += f64::from(b).powi(2);
            }
        }
        (lost / all).sqrt()
    }

    /// Codes with +0 for −0.
    fn merged(&self) -> Vec<u8> {
        let merged = |nibble: u8| if nibble == 8 { 0 } else { nibble };
        self.codes.iter().map(|c| merged(c & 15) | merged(c >> 4) << 4).collect()
    }
}

/// The 64 rows of a real expert, 3584 inputs wide, which the fixture ends with.
fn real_rows() -> Source {
    let file: &[u8] = include_bytes!("../../../fixtures/k3-real/mxfp4_rows.safetensors");
    let (rows, cols) = (64, 3584);
    let (codes, scales) = (rows * cols / 2, rows * cols / 32);
    let (codes, scales) = file[file.len() - codes - scales..].split_at(codes);
    Source { rows, cols, codes: codes.to_vec(), scales: scales.to_vec() }
}

/// Matrices of every kind: no rows, no columns, ragged tiles, several groups of tiles, one exponent, sixteen, all of them.
fn sources() -> Vec<Source> {
    let mut rng = Rng(1);
    let mut all = vec![real_rows()];
    for (rows, cols) in [(0, 64), (3, 0), (1, 32), (16, 96), (17, 160), (63, 64), (131, 288)] {
        for (lowest, exponents) in [(120, 1), (119, 4), (0, 16), (110, 17), (0, 255)] {
            all.push(Source::random(&mut rng, rows, cols, lowest, exponents));
        }
    }
    for nibble in [0x00, 0x08, 0x80, 0x88, 0x77, 0x1f] {
        all.push(Source { rows: 20, cols: 64, codes: vec![nibble; 640], scales: vec![7; 40] });
    }
    all
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Products of the checkpoint's own nibbles.
fn published(source: &Source, x: &[f32], n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; source.rows * n];
    Kernels::SCALAR.matmul(&source.matrix(), x, n, &mut out);
    out
}

#[test]
fn every_matrix_comes_back_whole() {
    for source in sources() {
        let bytes = Mxfp4zMatrix::encode(&source.matrix()).unwrap();
        let packed = Mxfp4zMatrix::new(source.rows, source.cols, &bytes).unwrap();
        assert_eq!((packed.rows(), packed.cols()), (source.rows, source.cols));
        assert_eq!(packed.stored_bits(), 8 * bytes.len() as u64);
        assert!(packed.payload_bits() < packed.stored_bits());
        let (mut codes, mut scales) = (source.codes.clone(), source.scales.clone());
        codes.fill(0xaa);
        scales.fill(0xaa);
        packed.unpack(&mut codes, &mut scales).unwrap();
        assert!(codes == source.merged() && scales == source.scales);
    }
}

#[test]
fn real_rows_take_at_most_3_63_bits_a_weight() {
    let source = real_rows();
    let bytes = Mxfp4zMatrix::encode(&source.matrix()).unwrap();
    let packed = Mxfp4zMatrix::new(source.rows, source.cols, &bytes).unwrap();
    let bits = |bits: u64| bits as f64 / (source.rows * source.cols) as f64;
    println!("{:.4} bits, {:.4} stored", bits(packed.payload_bits()), bits(packed.stored_bits()));
    assert!(bits(packed.payload_bits()) <= 3.63 && bits(packed.stored_bits()) <= 3.70);
}

#[test]
fn every_machine_makes_the_same_bytes() {
    let all: Vec<u8> =
        sources().iter().flat_map(|s| Mxfp4zMatrix::encode(&s.matrix()).unwrap()).collect();
    assert_eq!(hash(&all), FINGERPRINT, "{:#018x}", hash(&all));
    let thinned = sources().into_iter().map(|source| source.thinned(300));
    let thinned: Vec<u8> = thinned.flat_map(|s| [s.codes, s.scales].concat()).collect();
    assert_eq!(hash(&thinned), THINNED_FINGERPRINT, "{:#018x}", hash(&thinned));
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &b| {
        (hash ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

const FINGERPRINT: u64 = 0x88e4_52f1_041a_34cf;
const THINNED_FINGERPRINT: u64 = 0x153c_fa40_e30b_a579;

#[test]
fn thinned_real_rows_take_the_bits_asked_for_and_err_less_than_a_trellis_of_as_many() {
    let source = real_rows();
    // Errors of a trellis are 8.21 % at 3.39 bits and 6.53 % at 3.51.
    for (hundredths, errors) in [(339, 0.07..0.079), (351, 0.03..0.04)] {
        let thinned = source.thinned(hundredths);
        let bytes = Mxfp4zMatrix::encode(&thinned.matrix()).unwrap();
        let packed = Mxfp4zMatrix::new(source.rows, source.cols, &bytes).unwrap();
        let bits = packed.payload_bits() as f64 / (source.rows * source.cols) as f64;
        let error = thinned.distance(&source);
        println!("{bits:.4} bits, error {error:.4}");
        assert!((bits - f64::from(hundredths) / 100.0).abs() < 0.02, "{bits}");
        assert!(errors.contains(&error), "{error}");
    }
}

#[test]
fn what_takes_no_more_bits_than_asked_for_stays_as_it_is() {
    for source in sources() {
        let thinned = source.thinned(1000);
        assert!(thinned.codes == source.merged() && thinned.scales == source.scales);
    }
}

#[test]
fn thinned_weights_have_their_sign_and_at_most_twice_their_blocks_power_of_two() {
    for source in sources() {
        let thinned = source.thinned(150);
        assert_eq!(
            (thinned.codes.len(), thinned.scales.len()),
            (source.codes.len(), source.scales.len())
        );
        let raised = |(&e, &to): (&u8, &u8)| e == to || to == e + 1 && to < 255;
        assert!(source.scales.iter().zip(&thinned.scales).all(raised));
        let fits = |from: u8, to: u8| to == 0 || from & 8 == to & 8 && from & 7 != 0;
        let of_byte = |(&a, &b): (&u8, &u8)| fits(a & 15, b & 15) && fits(a >> 4, b >> 4);
        assert!(source.codes.iter().zip(&thinned.codes).all(of_byte));
    }
    let other = Matrix::new(Codec::F32, 1, 32, &[0; 128], &[]).unwrap();
    assert!(matches!(Mxfp4zMatrix::thinned(&other, 350), Err(LayoutError::Mxfp4z(_))));
}

#[test]
fn products_have_the_bits_of_the_published_nibbles_with_every_kernel() {
    let mut rng = Rng(2);
    for source in sources() {
        let bytes = Mxfp4zMatrix::encode(&source.matrix()).unwrap();
        let packed = Mxfp4zMatrix::new(source.rows, source.cols, &bytes).unwrap();
        for n in [0, 1, 3, 17, 34] {
            let mut x = rng.vector(n * source.cols);
            if n == 3 && source.cols > 0 {
                (x[0], x[source.cols + 1]) = (f32::NAN, f32::INFINITY);
                x[2 * source.cols..].fill(-0.0);
            }
            let expected = published(&source, &x, n);
            for kernels in Mxfp4zKernels::all() {
                let mut out = vec![f32::NAN; source.rows * n];
                kernels.multiply(&packed, &x, n, &mut out);
                let all = expected.iter().zip(&out).all(|(&a, &b)| same(a, b));
                assert!(all, "{} {} × {}, {n} vectors", kernels.name(), source.rows, source.cols);
            }
        }
    }
}

#[test]
fn a_row_whose_every_sum_is_rounded_to_negative_zero_is_zero_with_either_sign_of_its_nibbles() {
    let cols = 64;
    let mut source = Source { rows: 1, cols, codes: vec![0x88; 32], scales: vec![100; 2] };
    // Block 0: a negative product in every partial sum. Block 1: negative zeros, whose sign is what remains.
    source.codes[..8].fill(0x99);
    let bytes = Mxfp4zMatrix::encode(&source.matrix()).unwrap();
    let packed = Mxfp4zMatrix::new(1, cols, &bytes).unwrap();
    // Weights are −2^−28. Times 2^−121 that is the smallest number there is; half of it is rounded to −0.
    let power = |exponent: i32| f32::from_bits(((127 + exponent) as u32) << 23);
    let x = |input: f32| [vec![input; 16], vec![0.0; 16], vec![1.0; 32]].concat();
    for (x, expected) in [(x(power(-122)), 0.0), (x(power(-121)), -f32::from_bits(16))] {
        // As many vectors as take every way through the kernels.
        for n in [1, 2, 3, 4, 40] {
            let x = x.repeat(n);
            let mut out = vec![f32::NAN; n];
            let check = |name: &str, out: &mut [f32]| {
                let all = out.iter().all(|y| y.to_bits() == expected.to_bits());
                assert!(all, "{name}, {n} vectors: {out:?}, not {expected:?}");
                out.fill(f32::NAN);
            };
            for kernels in Kernels::all() {
                kernels.matmul(&source.matrix(), &x, n, &mut out);
                check(kernels.name(), &mut out);
            }
            for kernels in Mxfp4zKernels::all() {
                kernels.multiply(&packed, &x, n, &mut out);
                check(kernels.name(), &mut out);
            }
        }
    }
}

#[test]
fn row_ranges_are_the_rows() {
    let source = Source::random(&mut Rng(3), 45, 96, 119, 3);
    let bytes = Mxfp4zMatrix::encode(&source.matrix()).unwrap();
    let packed = Mxfp4zMatrix::new(45, 96, &bytes).unwrap();
    let x = Rng(4).vector(96);
    let whole = published(&source, &x, 1);
    let mut payload = 0;
    for range in [0..16, 16..32, 32..45, 16..45, 0..45, 32..32] {
        let rows = packed.row_range(range.clone());
        assert_eq!(rows.rows(), range.len());
        payload += rows.payload_bits();
        for kernels in Mxfp4zKernels::all() {
            let mut out = vec![f32::NAN; range.len()];
            kernels.multiply(&rows, &x, 1, &mut out);
            assert_eq!(out, whole[range.clone()]);
        }
    }
    assert_eq!(payload, 2 * packed.payload_bits() + packed.row_range(16..45).payload_bits());
}

/// Zeros after the last tile.
const SLACK: usize = 544;

#[test]
fn bytes_that_are_not_the_matrix_are_refused() {
    let source = Source::random(&mut Rng(5), 20, 64, 0, 255);
    let bytes = Mxfp4zMatrix::encode(&source.matrix()).unwrap();
    let new = |bytes: &[u8]| Mxfp4zMatrix::new(20, 64, bytes).map(|_| ());
    assert_eq!(new(&bytes), Ok(()));
    // Palette, frequencies of four alphabets, split.
    for (at, byte) in [(0, 255), (16, 200), (32, 200), (48, 200), (64, 200), (80, 17)] {
        let mut damaged = bytes.clone();
        damaged[at] = byte;
        assert!(matches!(new(&damaged), Err(LayoutError::Mxfp4z(_))), "byte {at}");
    }
    // Ends of the two tiles: no room for the states of the first, none for those of the second, beyond the end.
    for (at, end) in [(96, 31), (96, (bytes.len() - SLACK - 104) as u32 / 2), (100, u32::MAX)] {
        let mut damaged = bytes.clone();
        damaged[at..at + 4].copy_from_slice(&end.to_le_bytes());
        assert!(matches!(new(&damaged), Err(LayoutError::Mxfp4z(_))), "end {end} at {at}");
    }
    for len in [0, 95, 96, 104, bytes.len() - 2, bytes.len() - 1] {
        assert!(matches!(new(&bytes[..len]), Err(LayoutError::Mxfp4z(_))));
    }
    assert!(matches!(new(&[&bytes[..], &[0; 2]].concat()), Err(LayoutError::Mxfp4z(_))));
    for (rows, cols) in [(20, 65), (20, 33)] {
        let refused = Mxfp4zMatrix::new(rows, cols, &bytes);
        assert!(matches!(refused, Err(LayoutError::Columns { .. })));
    }
    for (rows, cols) in [(usize::MAX, 64), (usize::MAX, 0), (usize::MAX / 4, 0), (4000, 64)] {
        assert!(Mxfp4zMatrix::new(rows, cols, &bytes).is_err());
    }
    let other = Matrix::new(Codec::F32, 1, 32, &[0; 128], &[]).unwrap();
    assert!(matches!(Mxfp4zMatrix::encode(&other), Err(LayoutError::Mxfp4z(_))));
}

/// Reads a matrix in every way; all kernels agree. Says whether it was whole.
fn read(rows: usize, cols: usize, bytes: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let packed = Mxfp4zMatrix::new(rows, cols, bytes).ok()?;
    let n = 2;
    let x = Rng(9).vector(n * cols);
    let mut expected = vec![f32::NAN; rows * n];
    packed.multiply(&x, n, &mut expected);
    for kernels in Mxfp4zKernels::all() {
        let mut out = vec![f32::NAN; rows * n];
        kernels.multiply(&packed, &x, n, &mut out);
        assert!(expected.iter().zip(&out).all(|(&a, &b)| same(a, b)), "{}", kernels.name());
    }
    let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / 32]);
    packed.unpack(&mut codes, &mut scales).ok()?;
    assert!(!scales.contains(&255));
    Some((codes, scales))
}

proptest! {
    #[test]
    fn flipped_and_random_bytes_are_refused_or_other_weights(
        rows in 1usize..100,
        blocks in 0usize..9,
        exponents in prop_oneof![Just(1usize), Just(3), Just(200)],
        flips in 1usize..20,
        all in any::<bool>(),
        seed in 1u64..,
    ) {
        let (cols, mut rng) = (blocks * 32, Rng(seed));
        let source = Source::random(&mut rng, rows, cols, 30, exponents);
        let mut bytes = Mxfp4zMatrix::encode(&source.matrix()).unwrap();
        prop_assert_eq!(read(rows, cols, &bytes), Some((source.merged(), source.scales.clone())));
        // Behind a header and a directory that are whole, so that something is decoded.
        let first = 96 + 4 * rows.div_ceil(16);
        if all {
            bytes[first..].fill_with(|| (rng.next() >> 56) as u8);
        }
        for _ in 0..flips {
            let at = first + rng.below(bytes.len() - first);
            bytes[at] ^= 1 << rng.below(8);
        }
        read(rows, cols, &bytes);
        for _ in 0..flips {
            let at = rng.below(bytes.len());
            bytes[at] ^= 1 << rng.below(8);
            read(rows, cols, &bytes);
        }
    }
}
