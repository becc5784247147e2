//! Kernels and threads of one engine, and the products every layer is made of.

use rill_kernels::{Inputs, Kernels, Matrix, Pool};

/// What an engine computes with.
#[derive(Debug)]
pub(crate) struct Compute {
    pub(crate) kernels: Kernels,
    pub(crate) pool: Pool,
}

impl Compute {
    /// `x` (n, cols) times the matrix: (n, rows).
    pub(crate) fn matmul(&self, w: Matrix<'_>, x: &[f32], n: usize) -> Vec<f32> {
        let rows = w.rows();
        let mut out = vec![0.0; rows * n];
        let inputs = Inputs::new(&[w.codec()], x, n, w.cols());
        self.pool.rows(rows, rows * w.cols() * n, &mut out, |range, out| {
            self.kernels.multiply(&w.row_range(range), &inputs, out);
        });
        if n == 1 { out } else { transpose(&out, rows, n) }
    }

    /// RMSNorm of each row of `x` (n, w.len()).
    pub(crate) fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        self.kernels.rms_norm(x, w, eps, &mut out);
        out
    }
}

/// (rows, cols) → (cols, rows).
pub(crate) fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    debug_assert_eq!(x.len(), rows * cols);
    let mut out = Vec::with_capacity(x.len());
    for c in 0..cols {
        out.extend(x.iter().skip(c).step_by(cols));
    }
    out
}

/// For each session (heads, tokens, dim), as heads are computed, → (rows, heads·dim), as projections
/// read it. `tokens` are the rows of each session.
pub(crate) fn join_heads(
    x: &[f32],
    heads: usize,
    tokens: impl Iterator<Item = usize>,
    dim: usize,
) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    let mut at = 0;
    for n in tokens {
        let session = at..at + n * heads * dim;
        at = session.end;
        let (x, out) = (&x[session.clone()], &mut out[session]);
        for (h, head) in x.chunks_exact(n * dim).enumerate() {
            for (t, values) in head.chunks_exact(dim).enumerate() {
                out[(t * heads + h) * dim..][..dim].copy_from_slice(values);
            }
        }
    }
    out
}
