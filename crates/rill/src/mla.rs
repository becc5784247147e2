//! Multi-head latent attention without rotation, in its absorbed form: scores and sums are
//! taken over the cached latents, and keys and values are never expanded.

use crate::compute::{Compute, join_heads};
use crate::config::ModelConfig;
use crate::session::MlaState;
use crate::trunk::{Linear, UnitBytes};
use crate::weights::{Mla, Query};

/// `x` (n, hidden), already normalised → (n, hidden). The cache grows by `n` positions; each
/// token sees itself and everything before it.
pub(crate) fn forward(
    compute: &Compute,
    config: &ModelConfig,
    weights: &Mla,
    matrices: &UnitBytes,
    state: &mut MlaState,
    x: &[f32],
    n: usize,
) -> Vec<f32> {
    let mla = config.mla;
    let (heads, nope, rope, v_dim) =
        (mla.n_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim);
    let (rank, width) = (mla.kv_lora_rank, mla.kv_lora_rank + rope);
    let kernels = &compute.kernels;
    let linear = |w: &Linear, x: &[f32]| compute.matmul(matrices.view(*w), x, n);

    // (n, heads · (nope + rope))
    let q = match &weights.query {
        Query::Full(w) => linear(w, x),
        Query::Factorised { a_proj, a_layernorm, b_proj } => {
            let low = compute.rms_norm(&linear(a_proj, x), a_layernorm, config.rms_norm_eps);
            linear(b_proj, &low)
        }
    };
    // The latent is normalised, the shared key part is neither normalised nor rotated.
    let past = state.cache.len() / width;
    for row in linear(&weights.kv_a_proj_with_mqa, x).chunks_exact(width) {
        let (latent, shared) = row.split_at(rank);
        let latent = compute.rms_norm(latent, &weights.kv_a_layernorm, config.rms_norm_eps);
        state.cache.extend_from_slice(&latent);
        state.cache.extend_from_slice(shared);
    }

    let scale = 1.0 / ((nope + rope) as f32).sqrt();
    let kv_b = matrices.view(weights.kv_b_proj);
    let cache = &state.cache;
    let mut mixed = vec![0.0; n * heads * v_dim]; // (heads, n, v)
    let mut parts: Vec<_> = mixed.chunks_exact_mut(n * v_dim).enumerate().collect();
    let work = n * heads * (rank * (nope + v_dim) + (past + n) * (width + rank));
    compute.pool.each(&mut parts, work, |(h, mixed)| {
        let first = *h * (nope + v_dim);
        let w_k = kv_b.row_range(first..first + nope);
        let w_v = kv_b.row_range(first + nope..first + nope + v_dim);
        let mut query = vec![0.0; width];
        let mut latent = vec![0.0; rank];
        for (t, mixed) in mixed.chunks_exact_mut(v_dim).enumerate() {
            let q = &q[(t * heads + *h) * (nope + rope)..][..nope + rope];
            kernels.columns(&w_k, &q[..nope], &mut query[..rank]);
            query[rank..].copy_from_slice(&q[nope..]);
            let seen = &cache[..(past + t + 1) * width];
            kernels.attend(&query, seen, scale, &mut latent);
            kernels.matmul(&w_v, &latent, 1, mixed);
        }
    });
    let mut mixed = join_heads(&mixed, heads, n, v_dim);
    if let Some(g_proj) = &weights.g_proj {
        kernels.sigmoid_gate(&mut mixed, &linear(g_proj, x));
    }
    linear(&weights.o_proj, &mixed)
}
