//! Feed-forward layers: the gated product, and the mixture of experts around it.

use rill_kernels::{Inputs, Kernels, Matrix};

use crate::compute::{Compute, transpose};
use crate::config::{Activation, ModelConfig, MoeConfig};
use crate::error::{Error, ExpertError};
use crate::experts::{Expert, ExpertId, ExpertSource, LayerIdx};
use crate::trunk::UnitBytes;
use crate::weights::{Mlp, Moe};

/// The experts of one layer that `n` tokens chose.
#[derive(Debug)]
pub(crate) struct Routing {
    /// (n, top_k), ascending within a token.
    pub(crate) ids: Vec<u32>,
    /// (n, top_k)
    pub(crate) weights: Vec<f32>,
}

/// Sees what a row's router has chosen and may change it.
pub(crate) type Choose<'a> = &'a mut dyn FnMut(usize, &mut [u32]);

/// A dense feed-forward: `x` (n, hidden) → (n, hidden).
pub(crate) fn dense(
    compute: &Compute,
    activation: Activation,
    weights: &Mlp,
    unit: &UnitBytes,
    x: &[f32],
    n: usize,
) -> Vec<f32> {
    let matrices = [weights.gate_proj, weights.up_proj, weights.down_proj];
    gated(compute, activation, matrices.map(|w| unit.view(w)), x, n)
}

/// Router, routed experts and shared experts: `x` (n, hidden) → (n, hidden).
#[expect(clippy::too_many_arguments, reason = "one layer's weights and where the others come from")]
pub(crate) fn forward(
    compute: &Compute,
    config: &ModelConfig,
    weights: &Moe,
    unit: &UnitBytes,
    source: &dyn ExpertSource,
    layer: LayerIdx,
    x: &[f32],
    n: usize,
    choose: Choose<'_>,
) -> Result<(Vec<f32>, Routing), Error> {
    let kernels = &compute.kernels;
    let mut scores = compute.matmul(unit.view(weights.gate), x, n);
    kernels.sigmoid(&mut scores);
    let bias = &weights.e_score_correction_bias;
    let routing = route(kernels, &config.moe, &scores, bias, layer, choose)?;
    source.chosen(layer, &routing.ids, config.moe.top_k);

    let mut y = match &weights.latent {
        None => routed_experts(compute, config, source, layer, &routing, x, n)?,
        Some(latent) => {
            let x = compute.matmul(unit.view(latent.down_proj), x, n);
            let mut y = routed_experts(compute, config, source, layer, &routing, &x, n)?;
            if let Some(norm) = &latent.norm {
                y = compute.rms_norm(&y, norm, config.rms_norm_eps);
            }
            compute.matmul(unit.view(latent.up_proj), &y, n)
        }
    };
    let shared = dense(compute, config.activation, &weights.shared_experts, unit, x, n);
    kernels.add(&shared, &mut y);
    Ok((y, routing))
}

/// Chooses the top k of score plus bias for every token and weighs them by the score alone.
/// `scores` (n, experts).
fn route(
    kernels: &Kernels,
    moe: &MoeConfig,
    scores: &[f32],
    bias: &[f32],
    layer: LayerIdx,
    choose: Choose<'_>,
) -> Result<Routing, Error> {
    let mut routing = Routing { ids: Vec::new(), weights: Vec::new() };
    for (row, scores) in scores.chunks_exact(moe.n_experts).enumerate() {
        let biased: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
        let mut ids = top_k(&biased, moe.top_k);
        choose(row, &mut ids);
        let exist = ids.last().is_none_or(|&id| (id as usize) < moe.n_experts);
        if !exist || !ids.is_sorted_by(|a, b| a < b) {
            return Err(Error::Routing { layer, ids });
        }
        let mut weights: Vec<f32> = ids.iter().map(|&id| scores[id as usize]).collect();
        let total = if moe.renormalize { kernels.sum(&weights) + 1e-20 } else { 1.0 };
        for w in &mut weights {
            *w = *w / total * moe.routed_scaling_factor;
        }
        routing.ids.extend(ids);
        routing.weights.extend(weights);
    }
    Ok(routing)
}

/// Indices of the k largest values, ascending. Equal values go to the lower index; NaN is below
/// everything.
fn top_k(values: &[f32], k: usize) -> Vec<u32> {
    let mut keys: Vec<u64> = values.iter().enumerate().map(|(i, &v)| rank_key(v, i)).collect();
    if k < keys.len() {
        keys.select_nth_unstable(k);
        keys.truncate(k);
    }
    let mut ids: Vec<u32> = keys.into_iter().map(|key| key as u32).collect();
    ids.sort_unstable();
    ids
}

/// A number that is the smaller, the earlier the value ranks: numbers are compared faster than
/// pairs are by a function.
fn rank_key(value: f32, index: usize) -> u64 {
    // Both zeros are equal.
    let bits = if value.is_nan() { f32::NEG_INFINITY } else { value + 0.0 }.to_bits();
    // The sign stays: negative values come after the others, and their bits grow downwards.
    let rank = if bits >> 31 == 1 { bits } else { !bits & 0x7fff_ffff };
    u64::from(rank) << 32 | index as u64
}

/// The `n` experts that score plus bias puts first, best first.
pub(crate) fn likeliest(scores: &[f32], bias: &[f32], n: usize) -> Vec<u32> {
    let biased: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    let mut ids = top_k(&biased, n);
    ids.sort_by(|&a, &b| biased[b as usize].total_cmp(&biased[a as usize]));
    ids
}

/// The weighted sum of the routed experts: `x` (n, width) → (n, width).
fn routed_experts(
    compute: &Compute,
    config: &ModelConfig,
    source: &dyn ExpertSource,
    layer: LayerIdx,
    routing: &Routing,
    x: &[f32],
    n: usize,
) -> Result<Vec<f32>, Error> {
    let width = x.len() / n;
    let top_k = config.moe.top_k;
    let mut wanted = routing.ids.clone();
    wanted.sort_unstable();
    wanted.dedup();
    let wanted: Vec<ExpertId> = wanted.into_iter().map(ExpertId).collect();

    // Experts arrive in any order: each result waits in its own place, (n, top_k, width), and
    // the sum is taken in ascending order of id afterwards.
    let mut results = vec![0.0; n * top_k * width];
    let mut delivered = vec![false; wanted.len()];
    let mut misfit = None;
    source.fetch(layer, &wanted, &mut |id, expert| {
        if !fits(config, width, &expert) {
            misfit = Some(id);
            return;
        }
        let places: Vec<usize> =
            (0..routing.ids.len()).filter(|&i| routing.ids[i] == id.0).collect();
        let inputs: Vec<f32> =
            places.iter().flat_map(|&i| &x[i / top_k * width..][..width]).copied().collect();
        let matrices = [expert.gate, expert.up, expert.down];
        let out = gated(compute, config.activation, matrices, &inputs, places.len());
        for (&place, out) in places.iter().zip(out.chunks_exact(width)) {
            results[place * width..][..width].copy_from_slice(out);
        }
        if let Ok(index) = wanted.binary_search(&id) {
            delivered[index] = true;
        }
    })?;
    if let Some(expert) = misfit {
        return Err(Error::Expert { layer, expert, source: Box::new(ExpertError::Shape) });
    }
    if let Some(index) = delivered.iter().position(|done| !done) {
        let source = Box::new(ExpertError::Missing);
        return Err(Error::Expert { layer, expert: wanted[index], source });
    }

    let mut y = vec![0.0; n * width];
    for (i, result) in results.chunks_exact(width).enumerate() {
        let token = &mut y[i / top_k * width..][..width];
        compute.kernels.axpy(routing.weights[i], result, token);
    }
    Ok(y)
}

/// Whether an expert has the model's shapes, on which the kernels rely.
fn fits(config: &ModelConfig, width: usize, expert: &Expert<'_>) -> bool {
    let inner = config.moe.intermediate_size;
    let is = |matrix: &Matrix<'_>, rows, cols| (matrix.rows(), matrix.cols()) == (rows, cols);
    is(&expert.gate, inner, width) && is(&expert.up, inner, width) && is(&expert.down, width, inner)
}

/// `down · act(gate · x, up · x)`: `x` (n, width) → (n, width).
fn gated(
    compute: &Compute,
    activation: Activation,
    [gate, up, down]: [Matrix<'_>; 3],
    x: &[f32],
    n: usize,
) -> Vec<f32> {
    let (kernels, rows) = (&compute.kernels, gate.rows());
    let work = 2 * rows * gate.cols() * n;
    // Both products of some rows and their activation in one go, so that threads meet once and not
    // twice, and nothing leaves a core's cache in between. (rows, n)
    let mut inner = vec![0.0; rows * n];
    let inputs = Inputs::new(&[gate.codec(), up.codec()], x, n, gate.cols());
    compute.pool.rows(rows, work, &mut inner, |range, inner| {
        let mut linear = vec![0.0; inner.len()];
        kernels.multiply(&gate.row_range(range.clone()), &inputs, inner);
        kernels.multiply(&up.row_range(range), &inputs, &mut linear);
        match activation {
            Activation::Silu => kernels.silu_product(inner, &linear),
            Activation::Situ { beta, linear_beta } => {
                kernels.situ_product(inner, &linear, beta, linear_beta);
            }
        }
    });
    let inner = if n == 1 { inner } else { transpose(&inner, rows, n) };
    compute.matmul(down, &inner, n)
}

#[cfg(test)]
mod tests {
    use super::top_k;

    #[test]
    fn top_k_takes_the_largest_in_ascending_order_of_index() {
        assert_eq!(top_k(&[0.1, 0.9, 0.5, 0.7], 2), [1, 3]);
        assert_eq!(top_k(&[0.1, 0.9], 2), [0, 1]);
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        assert_eq!(top_k(&[0.5, 0.7, 0.5, 0.5, 0.7], 3), [0, 1, 4]);
        assert_eq!(top_k(&[0.5; 100], 4), [0, 1, 2, 3]);
    }

    #[test]
    fn values_of_any_sign_and_size_are_ranked() {
        let ranked = [f32::INFINITY, 2.0, 1e-40, -0.0, -1e-40, -2.0, f32::NEG_INFINITY];
        for k in 0..=ranked.len() {
            let mut reversed = ranked;
            reversed.reverse();
            assert_eq!(top_k(&ranked, k), (0..k as u32).collect::<Vec<_>>());
            assert_eq!(top_k(&reversed, k), (7 - k as u32..7).collect::<Vec<_>>());
        }
        assert_eq!(top_k(&[0.0, -0.0, 0.0], 1), [0]);
        assert_eq!(top_k(&[-0.0, 0.0, 0.0], 2), [0, 1]);
    }

    #[test]
    fn nan_is_chosen_last() {
        assert_eq!(top_k(&[f32::NAN, -1.0, f32::NAN, -2.0], 2), [1, 3]);
        assert_eq!(top_k(&[f32::NAN; 3], 2), [0, 1]);
    }
}
