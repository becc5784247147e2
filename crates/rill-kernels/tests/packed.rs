//! Experts are never expanded: multiplying packed bytes takes no memory at all.

use rill_kernels::{Codec, Kernels, Matrix};
use rill_testkit::PeakAlloc;

#[global_allocator]
static ALLOC: PeakAlloc = PeakAlloc::new();

#[test]
fn multiplying_packed_experts_allocates_nothing() {
    let (rows, cols) = (256, 512);
    let (packed, scales) = (vec![0x35u8; rows * cols / 2], vec![120u8; rows * cols / 32]);
    let wide = vec![0x3fu8; rows * cols * 2];
    let x = vec![0.5f32; 3 * cols];
    let mut out = vec![0.0f32; 3 * rows];
    let matrices = [
        Matrix::new(Codec::Mxfp4, rows, cols, &packed, &scales).unwrap(),
        Matrix::new(Codec::Bf16, rows, cols, &wide, &[]).unwrap(),
    ];
    for kernels in Kernels::all() {
        for matrix in &matrices {
            // The test harness may allocate at the same moment, but not at every one; a kernel
            // that allocates does so every time.
            let mut growths = (0..20).map(|_| {
                let before = ALLOC.restart_peak();
                kernels.matmul(matrix, &x, 3, &mut out);
                ALLOC.peak_bytes() - before
            });
            assert!(
                growths.any(|bytes| bytes == 0),
                "{kernels:?} allocates for {:?}",
                matrix.codec()
            );
            assert!(out.iter().all(|y| *y != 0.0));
        }
    }
}
