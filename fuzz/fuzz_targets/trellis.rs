//! Trellis matrices of any bytes are refused, or multiplied by every kernel to the specification's bits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rill_kernels::{Activations, Trellis, TrellisKernels, TrellisMatrix, TrellisTables};

fuzz_target!(|data: &[u8]| {
    let Some((&[rate, width, rows, blocks, n, missing], data)) = data.split_first_chunk() else {
        return;
    };
    let (rate, width) = (16 + usize::from(rate % 13), 10 + usize::from(width % 5));
    let trellis = Trellis::new(rate, width).expect("within the ranges");
    let (rows, cols) = (usize::from(rows % 20), 32 * usize::from(blocks % 9));
    let layout = trellis.layout(rows, cols).expect("whole blocks");
    // The fuzzer's bytes over and over, at places that begin anywhere in memory.
    let mut bytes = data.iter().copied().cycle();
    let mut take = |n: usize| -> Box<[u8]> { bytes.by_ref().take(n).collect() };
    // Few have lengths that are wrong.
    let codes = take(layout.codes.saturating_sub(usize::from(missing.saturating_sub(250))));
    let sides = take(layout.scales);
    let tables: Vec<u8> = take(128).iter().map(|byte| byte % 128).collect();
    let Ok(tables) = TrellisTables::new(&tables) else { return };
    let matrix = match TrellisMatrix::new(trellis, rows, cols, &codes, &sides, &tables) {
        Ok(matrix) => matrix,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let mut row = vec![f32::NAN; cols];
    for r in 0..rows {
        matrix.decode_row(r, &mut row);
        assert!(row.iter().all(|w| !w.is_nan()));
    }
    if cols == 0 {
        return;
    }
    let n = 1 + usize::from(n % 6);
    let x: Vec<f32> =
        (take(4 * n * cols).as_chunks().0.iter()).map(|&b| f32::from_le_bytes(b)).collect();
    if x.len() < n * cols {
        return;
    }
    let x = Activations::new(&x, cols);
    let mut expected = vec![f32::NAN; rows * n];
    matrix.multiply(&x, &mut expected);
    for kernels in TrellisKernels::all() {
        let mut found = vec![f32::NAN; rows * n];
        kernels.multiply(&matrix, &x, &mut found);
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(same, "{}: product {i} is {a:e}, should be {b:e}", kernels.name());
        }
    }
});
