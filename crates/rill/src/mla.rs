//! Multi-head latent attention without rotation, in its absorbed form: scores and sums are
//! taken over the cached latents, and keys and values are never expanded.

use crate::compute::{Compute, join_heads};
use crate::config::ModelConfig;
use crate::session::MlaState;
use crate::trunk::{Linear, UnitBytes};
use crate::weights::{Mla, Query};

/// `x` (rows, hidden), already normalised → (rows, hidden). Rows are those of each session's tokens
/// in turn; `states` are the sessions' and their numbers of rows. Each cache grows by as many
/// positions; each token sees itself and everything before it in its session.
pub(crate) fn forward(
    compute: &Compute,
    config: &ModelConfig,
    weights: &Mla,
    matrices: &UnitBytes,
    states: &mut [(&mut MlaState, usize)],
    x: &[f32],
) -> Vec<f32> {
    let rows = x.len() / config.hidden_size;
    let mla = config.mla;
    let (heads, nope, rope, v_dim) =
        (mla.n_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim);
    let (rank, width) = (mla.kv_lora_rank, mla.kv_lora_rank + rope);
    let kernels = &compute.kernels;
    let linear = |w: &Linear, x: &[f32]| compute.matmul(matrices.view(*w), x, rows);

    // (rows, heads · (nope + rope))
    let q = match &weights.query {
        Query::Full(w) => linear(w, x),
        Query::Factorised { a_proj, a_layernorm, b_proj } => {
            let low = compute.rms_norm(&linear(a_proj, x), a_layernorm, config.rms_norm_eps);
            linear(b_proj, &low)
        }
    };
    // The latent is normalised, the shared key part is neither normalised nor rotated.
    let kv_a = linear(&weights.kv_a_proj_with_mqa, x);
    let mut kv_a = kv_a.chunks_exact(width);
    for (state, n) in &mut *states {
        for row in kv_a.by_ref().take(*n) {
            let (latent, shared) = row.split_at(rank);
            let latent = compute.rms_norm(latent, &weights.kv_a_layernorm, config.rms_norm_eps);
            state.cache.extend_from_slice(&latent);
            state.cache.extend_from_slice(shared);
        }
    }

    let scale = 1.0 / ((nope + rope) as f32).sqrt();
    let kv_b = matrices.view(weights.kv_b_proj);
    let mut mixed = vec![0.0; rows * heads * v_dim]; // of each session (heads, tokens, v)
    // Heads of a session share its cache, so each part takes many: the kernel reads it once for all of
    // them.
    let threads = compute.pool.threads();
    let rounds = heads.div_ceil(threads * HEADS);
    let per_part = heads.div_ceil(threads * rounds);
    let mut parts = Vec::new();
    let (mut row, mut rest, mut work) = (0, mixed.as_mut_slice(), 0);
    for (state, n) in states.iter() {
        let (n, cache) = (*n, state.cache.view());
        let (own, others) = rest.split_at_mut(n * heads * v_dim);
        let of_heads = own.chunks_mut(per_part * n * v_dim).enumerate();
        parts.extend(of_heads.map(|(part, mixed)| (row, n, cache, part * per_part, mixed)));
        work += n * heads * (rank * (nope + v_dim) + cache.len() / width * (width + rank));
        (row, rest) = (row + n, others);
    }
    compute.pool.each(&mut parts, work, |(first_row, n, cache, first_head, mixed)| {
        let (first_row, n) = (*first_row, *n);
        let past = cache.len() / width - n;
        let heads_here = *first_head..*first_head + mixed.len() / (n * v_dim);
        // (tokens, heads of this part, …)
        let mut queries = vec![0.0; TOKENS.min(n) * heads_here.len() * width];
        let mut latents = vec![0.0; TOKENS.min(n) * heads_here.len() * rank];
        for first in (0..n).step_by(TOKENS) {
            let tokens = first..n.min(first + TOKENS);
            let at = |t: usize, i: usize| (t - first) * heads_here.len() + i;
            for (i, h) in heads_here.clone().enumerate() {
                let row = h * (nope + v_dim);
                let w_k = kv_b.row_range(row..row + nope);
                for t in tokens.clone() {
                    let q = &q[((first_row + t) * heads + h) * (nope + rope)..][..nope + rope];
                    let (latent, shared) = queries[at(t, i) * width..][..width].split_at_mut(rank);
                    kernels.columns(&w_k, &q[..nope], latent);
                    shared.copy_from_slice(&q[nope..]);
                }
            }
            for t in tokens.clone() {
                let queries = &queries[at(t, 0) * width..at(t + 1, 0) * width];
                let latents = &mut latents[at(t, 0) * rank..at(t + 1, 0) * rank];
                kernels.attend(queries, width, cache.first((past + t + 1) * width), scale, latents);
            }
            for (i, h) in heads_here.clone().enumerate() {
                let row = h * (nope + v_dim) + nope;
                let w_v = kv_b.row_range(row..row + v_dim);
                for t in tokens.clone() {
                    let latent = &latents[at(t, i) * rank..][..rank];
                    kernels.matmul(&w_v, latent, 1, &mut mixed[(i * n + t) * v_dim..][..v_dim]);
                }
            }
        }
    });
    let tokens = states.iter().map(|(_, n)| *n);
    let mut mixed = join_heads(&mixed, heads, tokens, v_dim);
    if let Some(g_proj) = &weights.g_proj {
        kernels.sigmoid_gate(&mut mixed, &linear(g_proj, x));
    }
    linear(&weights.o_proj, &mixed)
}

/// Heads of a part at most; the kernel gains nothing from more.
const HEADS: usize = 32;
/// Tokens that a head's weights are read for at a time.
const TOKENS: usize = 8;
