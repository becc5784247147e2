//! Formats that are laid out in tiles of rows, as matrices like any other: every set of kernels, every
//! range of rows, and what is refused.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use rill_kernels::{
    Activations, Codec, Inputs, Kernels, LayoutError, Matrix, Mxfp4zMatrix, Trellis,
    TrellisEncoder, TrellisMatrix, TrellisTables,
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

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }
}

/// Bytes of a matrix.
struct Packed {
    codec: Codec,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Packed {
    fn matrix(&self) -> Matrix<'_> {
        let Self { codec, rows, cols, codes, scales } = self;
        let accepted = Matrix::accepted(*codec, *rows, *cols, codes, scales, &[]).unwrap();
        Matrix::new(*codec, *rows, *cols, codes, scales).unwrap();
        accepted
    }
}

/// The same random MXFP4 matrix as it is, entropy-coded and in three trellis formats, one of them rotated.
fn packed(rng: &mut Rng, rows: usize, cols: usize) -> Vec<Packed> {
    let codes = rng.bytes(rows * cols / 2);
    let scales: Vec<u8> = rng.bytes(rows * cols / 32).iter().map(|b| 120 + b % 4).collect();
    let source = Matrix::new(Codec::Mxfp4, rows, cols, &codes, &scales).unwrap();
    let coded = Mxfp4zMatrix::encode(&source).unwrap();
    let mut all =
        vec![Packed { codec: Codec::Mxfp4z, rows, cols, codes: coded, scales: Vec::new() }];
    for trellis in [Trellis::new(16, 10), Trellis::new(23, 10), Trellis::rotated(20, 10)] {
        let trellis = trellis.unwrap();
        let mut tables: Vec<u8> = rng.bytes(64).iter().map(|b| b % 64).collect();
        (tables[0], tables[32]) = (0, 0);
        let encoder = TrellisEncoder::new(trellis, TrellisTables::new(&tables).unwrap(), 500);
        let codec = Codec::Trellis(trellis);
        let layout = codec.layout(rows, cols).unwrap();
        let (mut codes, mut scales) = (vec![0; layout.codes], vec![0; layout.scales]);
        scales[..64].copy_from_slice(&tables);
        encoder.encode(&source, &mut codes, &mut scales[64..]).unwrap();
        all.push(Packed { codec, rows, cols, codes, scales });
    }
    all
}

/// The product as the format's own module specifies it.
fn specified(p: &Packed, x: &[f32], n: usize) -> Vec<f32> {
    let mut out = vec![0.0; p.rows * n];
    match p.codec {
        Codec::Trellis(trellis) => {
            let tables = TrellisTables::new(&p.scales[..64]).unwrap();
            let sides = &p.scales[64..];
            let prepare =
                if trellis.is_rotated() { Activations::rotated } else { Activations::new };
            TrellisMatrix::new(trellis, p.rows, p.cols, &p.codes, sides, &tables)
                .unwrap()
                .multiply(&prepare(x, p.cols), &mut out);
        }
        _ => Mxfp4zMatrix::new(p.rows, p.cols, &p.codes).unwrap().multiply(x, n, &mut out),
    }
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn products_of_any_range_of_rows_are_those_of_the_whole_matrix_on_every_set_of_kernels() {
    let mut rng = Rng(3);
    for (rows, cols, n) in [(40, 96, 1), (33, 64, 3), (7, 32, 2), (16, 160, 17)] {
        for p in packed(&mut rng, rows, cols) {
            let x = rng.floats(n * cols);
            let expected = specified(&p, &x, n);
            for kernels in Kernels::all() {
                let inputs = Inputs::new(&[p.codec], &x, n, cols);
                for first in 0..rows {
                    for end in [first, first + 1, (first + 8).min(rows), rows] {
                        // A part of a part as well.
                        let part = p.matrix().row_range(first / 2..rows);
                        let part = part.row_range(first - first / 2..end - first / 2);
                        let mut out = vec![f32::NAN; (end - first) * n];
                        kernels.multiply(&part, &inputs, &mut out);
                        assert_eq!(
                            bits(&out),
                            bits(&expected[first * n..end * n]),
                            "{:?}, {kernels:?}, rows {first} to {end} of {rows}",
                            p.codec
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_product_prepares_its_vectors_itself_if_they_are_not() {
    let mut rng = Rng(4);
    for p in packed(&mut rng, 24, 64) {
        let x = rng.floats(2 * 64);
        let mut out = vec![0.0; 24 * 2];
        Kernels::detect().matmul(&p.matrix(), &x, 2, &mut out);
        assert_eq!(bits(&out), bits(&specified(&p, &x, 2)), "{:?}", p.codec);
    }
}

#[test]
fn columns_are_sums_over_decoded_rows() {
    let mut rng = Rng(5);
    let (rows, cols) = (21, 64);
    for p in packed(&mut rng, rows, cols) {
        let a = rng.floats(6);
        let part = p.matrix().row_range(9..15);
        let mut expected = vec![0.0f32; cols];
        let mut row = vec![0.0; cols];
        let mut whole = vec![0.0; cols];
        for r in 0..6 {
            part.decode_row(r, &mut row);
            p.matrix().decode_row(9 + r, &mut whole);
            assert_eq!(bits(&row), bits(&whole), "{:?}, row {r} of a part", p.codec);
        }
        for (r, &a) in a.iter().enumerate() {
            part.decode_row(r, &mut row);
            expected.iter_mut().zip(&row).for_each(|(sum, &w)| *sum = a.mul_add(w, *sum));
        }
        assert!(expected.iter().any(|&sum| sum != 0.0));
        for kernels in Kernels::all() {
            let mut out = vec![f32::NAN; cols];
            kernels.columns(&part, &a, &mut out);
            assert_eq!(bits(&out), bits(&expected), "{:?}, {kernels:?}", p.codec);
        }
    }
}

#[test]
fn entropy_coded_rows_decode_to_the_published_ones() {
    let mut rng = Rng(6);
    let (rows, cols) = (35, 64);
    let codes = rng.bytes(rows * cols / 2);
    let scales: Vec<u8> = rng.bytes(rows * cols / 32);
    let scales: Vec<u8> = scales.iter().map(|&b| b.min(254)).collect();
    let source = Matrix::new(Codec::Mxfp4, rows, cols, &codes, &scales).unwrap();
    let coded = Mxfp4zMatrix::encode(&source).unwrap();
    let most = Codec::Mxfp4z.layout(rows, cols).unwrap();
    assert!(coded.len() <= most.codes && most.scales == 0, "{} of {most:?}", coded.len());
    let packed = Matrix::new(Codec::Mxfp4z, rows, cols, &coded, &[]).unwrap();
    let (mut expected, mut found) = (vec![0.0; cols], vec![0.0; cols]);
    for row in 0..rows {
        source.decode_row(row, &mut expected);
        packed.row_range(row / 3..rows).decode_row(row - row / 3, &mut found);
        assert_eq!(found, expected, "row {row}");
    }
}

#[test]
fn tables_that_cannot_be_and_bytes_of_another_length_are_refused() {
    let mut rng = Rng(7);
    for p in packed(&mut rng, 24, 64) {
        let new =
            |codes: &[u8], scales: &[u8]| Matrix::new(p.codec, 24, 64, codes, scales).map(|_| ());
        let mut longer = p.scales.clone();
        longer.push(0);
        assert!(matches!(new(&p.codes, &longer), Err(LayoutError::Length { .. })));
        let cut = new(&p.codes[..p.codes.len() - 1], &p.scales).unwrap_err();
        match p.codec {
            Codec::Trellis(_) => {
                assert!(matches!(cut, LayoutError::Length { .. }), "{cut}");
                let mut tables = p.scales.clone();
                tables[47] = 64;
                let error = new(&p.codes, &tables).unwrap_err();
                assert_eq!(error, LayoutError::TableByte { byte: 47, most: 63, found: 64 });
            }
            _ => assert!(matches!(cut, LayoutError::Mxfp4z(_)), "{cut}"),
        }
    }
}
