//! Attention residuals: instead of one running sum, a layer may read a mix of sums that were
//! set aside every few layers.

use rill_kernels::Kernels;

use crate::weights::Mix;

/// The mix of `prefix` and the stored `blocks`, (n, hidden) each, for every token. Candidates
/// are the blocks, then the prefix; their scores come from their normalised values, the result
/// from the raw ones. The result is a new vector, so it may replace any of them.
pub(crate) fn mix(
    kernels: &Kernels,
    eps: f32,
    weights: &Mix,
    blocks: &[Vec<f32>],
    prefix: &[f32],
) -> Vec<f32> {
    let hidden = weights.0.len();
    let mut out = vec![0.0; prefix.len()];
    let mut scores = vec![0.0; blocks.len() + 1];
    for (t, out) in out.chunks_exact_mut(hidden).enumerate() {
        let candidates = || {
            let stored = blocks.iter().map(Vec::as_slice);
            stored.chain([prefix]).map(|v| &v[t * hidden..][..hidden])
        };
        for (score, v) in scores.iter_mut().zip(candidates()) {
            *score = kernels.dot(v, &weights.0) * kernels.inverse_rms(v, eps);
        }
        kernels.softmax(&mut scores);
        for (&p, v) in scores.iter().zip(candidates()) {
            kernels.axpy(p, v, out);
        }
    }
    out
}
