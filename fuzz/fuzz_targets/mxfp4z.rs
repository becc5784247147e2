//! Bytes of an entropy-coded matrix, made up or encoded and then changed: refused, or weights that every
//! kernel reads alike.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rill_kernels::{Codec, Matrix, Mxfp4zKernels, Mxfp4zMatrix};

fuzz_target!(|data: &[u8]| {
    let Some((&[rows, blocks, edits], rest)) = data.split_first_chunk() else { return };
    let (rows, cols) = (usize::from(rows % 70), usize::from(blocks % 8) * 32);
    let mut cycle = rest.iter().copied().cycle();
    // As they come, or, because few bytes are a matrix, encoded with some changed.
    let bytes = if edits == 0 || rest.is_empty() {
        rest.to_vec()
    } else {
        let codes: Vec<u8> = cycle.by_ref().take(rows * cols / 2).collect();
        let scales: Vec<u8> = cycle.by_ref().take(rows * cols / 32).map(|b| b.min(254)).collect();
        let source = Matrix::new(Codec::Mxfp4, rows, cols, &codes, &scales).expect("as laid out");
        let mut bytes = Mxfp4zMatrix::encode(&source).expect("a small matrix");
        assert!(bytes.len() <= Codec::Mxfp4z.layout(rows, cols).expect("small").codes);
        for _ in 1..edits {
            let [low, high, to] = std::array::from_fn(|_| cycle.next().unwrap_or(0));
            let at = usize::from(u16::from_le_bytes([low, high])) % bytes.len();
            bytes[at] ^= to;
        }
        bytes
    };
    let Ok(matrix) = Mxfp4zMatrix::new(rows, cols, &bytes) else {
        assert!(edits != 1 || rest.is_empty(), "an encoded matrix is refused");
        return;
    };
    for n in [1, 3] {
        let x: Vec<f32> = (0..n * cols).map(|i| i as f32 - 3.5).collect();
        let mut expected = vec![f32::NAN; n * rows];
        matrix.multiply(&x, n, &mut expected);
        for kernels in Mxfp4zKernels::all() {
            let mut out = vec![f32::NAN; n * rows];
            kernels.multiply(&matrix, &x, n, &mut out);
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(expected.iter().zip(&out).all(same), "{}", kernels.name());
        }
    }
    let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / 32]);
    if matrix.unpack(&mut codes, &mut scales).is_ok() {
        assert!(!scales.contains(&255));
    }
});
