//! Entropy coding of every expert of the demo model.

use std::path::Path;

use rill_format::{Checkpoint, Folder};
use rill_kernels::{Codec, Kernels, Matrix, Mxfp4zKernels, Mxfp4zMatrix};

#[test]
fn every_expert_matrix_of_the_demo_model_comes_back_whole_and_multiplies_the_same() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/k3-nano");
    let checkpoint = Checkpoint::open(Folder::Disk(folder)).unwrap();
    let (mut matrices, mut weights, mut payload) = (0, 0, 0);
    for info in checkpoint.iter() {
        let Some(name) = info.name.strip_suffix("_packed") else { continue };
        let codes = checkpoint.read(info.id).unwrap();
        let scales = checkpoint.require(&format!("{name}_scale")).unwrap();
        let (rows, scale_cols) = (scales.shape[0], scales.shape[1]);
        let (rows, cols) = (rows as usize, scale_cols as usize * 32);
        let scales = checkpoint.read(scales.id).unwrap();
        let source = Matrix::new(Codec::Mxfp4, rows, cols, &codes, &scales).unwrap();
        let bytes = Mxfp4zMatrix::encode(&source).unwrap();
        let packed = Mxfp4zMatrix::new(rows, cols, &bytes).unwrap();

        let (mut found, mut found_scales) = (vec![0; codes.len()], vec![0; scales.len()]);
        packed.unpack(&mut found, &mut found_scales).unwrap();
        let merged = |nibble: u8| if nibble == 8 { 0 } else { nibble };
        let wanted: Vec<u8> = codes.iter().map(|c| merged(c & 15) | merged(c >> 4) << 4).collect();
        assert!(found == wanted && found_scales == scales, "{name}");

        let x: Vec<f32> = (0..2 * cols).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        let (mut expected, mut out) = (vec![0.0; 2 * rows], vec![0.0; 2 * rows]);
        Kernels::detect().matmul(&source, &x, 2, &mut expected);
        Mxfp4zKernels::detect().multiply(&packed, &x, 2, &mut out);
        assert!(expected.iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
        (matrices, weights) = (matrices + 1, weights + rows * cols);
        payload += packed.payload_bits();
    }
    println!("{matrices} matrices, {:.4} bits a weight", payload as f64 / weights as f64);
    assert!(matrices >= 100 && (payload as f64) < 4.1 * weights as f64);
}
