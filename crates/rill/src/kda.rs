//! Kimi Delta Attention: linear attention with a gated delta rule.
//!
//! Prefill is the same recurrence as decoding, one token after another, so the two give the same
//! bits.

use crate::compute::{Compute, join_heads};
use crate::config::{DecayGate, ModelConfig};
use crate::session::KdaState;
use crate::trunk::{Linear, UnitBytes};
use crate::weights::{Gate, Kda};

/// `x` (n, hidden), already normalised → (n, hidden). The state moves on by `n` tokens.
pub(crate) fn forward(
    compute: &Compute,
    config: &ModelConfig,
    weights: &Kda,
    matrices: &UnitBytes,
    state: &mut KdaState,
    x: &[f32],
    n: usize,
) -> Vec<f32> {
    let (heads, dim) = (config.kda.n_heads, config.kda.head_dim);
    let p = heads * dim;
    let kernels = &compute.kernels;
    let linear = |w: &Linear, x: &[f32]| compute.matmul(matrices.view(*w), x, n);

    // q, k, v: projection, short convolution, SiLU. (n, P) each.
    let [q, k, v] = std::array::from_fn(|i| {
        let mut stream = linear(&weights.qkv_proj[i], x);
        for token in stream.chunks_exact_mut(p) {
            kernels.short_conv(token, &mut state.conv[i], &weights.qkv_conv[i]);
        }
        stream
    });
    // Decay input (n, P), write strength (n, heads), output gate (n, P).
    let z = linear(&weights.f_b_proj, &linear(&weights.f_a_proj, x));
    let mut beta = linear(&weights.b_proj, x);
    kernels.sigmoid(&mut beta);
    let gate = match &weights.gate {
        Gate::FullRank(g) => linear(g, x),
        Gate::LowRank(a, b) => linear(b, &linear(a, x)),
    };

    let q_scale = 1.0 / (dim as f32).sqrt();
    let mut mixed = vec![0.0; n * p]; // (heads, n, dim)
    let mut parts: Vec<_> = state
        .heads
        .chunks_exact_mut(dim * dim)
        .zip(mixed.chunks_exact_mut(n * dim))
        .enumerate()
        .collect();
    compute.pool.each(&mut parts, n * p * dim * 4, |(h, (state, mixed))| {
        let h = *h;
        let rate = weights.decay_rate[h];
        let bias = &weights.dt_bias[h * dim..][..dim];
        let [mut q_h, mut k_h, mut v_h, mut decay, mut out] = [(); 5].map(|()| vec![0.0; dim]);
        for (t, mixed) in mixed.chunks_exact_mut(dim).enumerate() {
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
    linear(&weights.o_proj, &join_heads(&mixed, heads, n, dim))
}
