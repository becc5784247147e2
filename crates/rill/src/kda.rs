//! Kimi Delta Attention: linear attention with a gated delta rule.
//!
//! Prefill is the same recurrence as decoding, one token after another, so the two give the same
//! bits.

use crate::compute::{Compute, join_heads};
use crate::config::{DecayGate, ModelConfig};
use crate::session::KdaState;
use crate::trunk::{Linear, UnitBytes};
use crate::weights::{Gate, Kda};

/// `x` (rows, hidden), already normalised → (rows, hidden). Rows are those of each session's tokens
/// in turn; `states` are the sessions' and their numbers of rows. What the rows add is written to each
/// state's `next`.
pub(crate) fn forward(
    compute: &Compute,
    config: &ModelConfig,
    weights: &Kda,
    matrices: &UnitBytes,
    states: &mut [(&mut KdaState, usize)],
    x: &[f32],
) -> Vec<f32> {
    let rows = x.len() / config.hidden_size;
    let (heads, dim) = (config.kda.n_heads, config.kda.head_dim);
    let p = heads * dim;
    let kernels = &compute.kernels;
    let linear = |w: &Linear, x: &[f32]| compute.matmul(matrices.view(*w), x, rows);

    // q, k, v: projection, short convolution, SiLU. (rows, P) each.
    let [q, k, v] = std::array::from_fn(|i| {
        let mut stream = linear(&weights.qkv_proj[i], x);
        let mut tokens = stream.chunks_exact_mut(p);
        for (state, n) in &mut *states {
            let conv = &mut state.next.conv[i];
            conv.clone_from(&state.now.conv[i]);
            for token in tokens.by_ref().take(*n) {
                kernels.short_conv(token, conv, &weights.qkv_conv[i]);
            }
        }
        stream
    });
    // Decay input (rows, P), write strength (rows, heads), output gate (rows, P).
    let z = linear(&weights.f_b_proj, &linear(&weights.f_a_proj, x));
    let mut beta = linear(&weights.b_proj, x);
    kernels.sigmoid(&mut beta);
    let gate = match &weights.gate {
        Gate::FullRank(g) => linear(g, x),
        Gate::LowRank(a, b) => linear(b, &linear(a, x)),
    };

    let q_scale = 1.0 / (dim as f32).sqrt();
    let mut mixed = vec![0.0; rows * p]; // of each session (heads, tokens, dim)
    let mut parts = Vec::with_capacity(states.len() * heads);
    let (mut row, mut rest) = (0, mixed.as_mut_slice());
    for (state, n) in states.iter_mut() {
        let (own, others) = rest.split_at_mut(*n * p);
        let KdaState { now, next } = &mut **state;
        next.heads.resize(now.heads.len(), 0.0);
        let states = now.heads.chunks_exact(dim * dim).zip(next.heads.chunks_exact_mut(dim * dim));
        let of_heads = states.zip(own.chunks_exact_mut(*n * dim)).enumerate();
        parts.extend(of_heads.map(|(h, ((now, next), mixed))| (row, h, now, next, mixed)));
        (row, rest) = (row + *n, others);
    }
    compute.pool.each(&mut parts, rows * p * dim * 4, |(row, h, now, state, mixed)| {
        let h = *h;
        // Head by head, so that the copy is in cache when the first token changes it.
        state.copy_from_slice(now);
        let rate = weights.decay_rate[h];
        let bias = &weights.dt_bias[h * dim..][..dim];
        let [mut q_h, mut k_h, mut v_h, mut decay, mut out] = [(); 5].map(|()| vec![0.0; dim]);
        for (t, mixed) in mixed.chunks_exact_mut(dim).enumerate() {
            let t = *row + t;
            let at = t * p + h * dim..t * p + (h + 1) * dim;
            q_h.copy_from_slice(&q[at.clone()]);
            k_h.copy_from_slice(&k[at.clone()]);
            v_h.copy_from_slice(&v[at.clone()]);
            kernels.l2_normalise(&mut q_h, q_scale);
            kernels.l2_normalise(&mut k_h, 1.0);
            match config.kda.decay_gate {
                DecayGate::Bounded { lower_bound } => {
                    kernels.decay_bounded(&z[at.clone()], bias, rate, lower_bound, &mut decay);
                }
                DecayGate::Unbounded => {
                    kernels.decay_unbounded(&z[at.clone()], bias, rate, &mut decay);
                }
            }
            kernels.kda_step(state, &decay, &q_h, &k_h, &mut v_h, beta[t * heads + h], &mut out);
            kernels.rms_norm(&out, &weights.o_norm, config.rms_norm_eps, mixed);
            kernels.sigmoid_gate(mixed, &gate[at]);
        }
    });
    let tokens = states.iter().map(|(_, n)| *n);
    linear(&weights.o_proj, &join_heads(&mixed, heads, tokens, dim))
}
