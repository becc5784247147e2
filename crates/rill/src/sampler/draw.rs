//! Drawing a token from a whole vocabulary.
//!
//! Defined by the plain way: sort ids by [`likelier_first`], weigh each with
//! `exp((logit − greatest) / temperature)`, and sum the weights in f64 from the likeliest down, since
//! sums of another order would have other bits. Departures, none of which changes a bit:
//!
//! - Weights that are lost in any sum are left out, which is most of the vocabulary at usual
//!   temperatures.
//! - Logits are sorted as integers and without their ids. Equal logits weigh the same, and which of
//!   them is meant is counted out in the end.
//!
//! `docs/experiments.md` has what they bought.
//!
//! [`likelier_first`]: super::likelier_first

use rill_kernels::Kernels;

use super::Sampling;

/// The likeliest token weighs 1, so every sum is at least that. A weight of e^−37 is below the
/// 2^−53 that would change a 1 in f64.
const NEGLIGIBLE: f32 = -37.0;

/// The token that is `uniform` of the way, from 0 to 1, through the probabilities that temperature,
/// top-k, top-p and min-p leave. `likeliest` has the greatest logit.
pub(super) fn draw(
    kernels: &Kernels,
    sampling: &Sampling,
    logits: &[f32],
    likeliest: u32,
    uniform: f64,
) -> u32 {
    let Sampling { temperature, top_k, top_p, min_p, .. } = *sampling;
    let max = logits[likeliest as usize];
    let scaled = |l: f32| (l - max) / temperature;
    let weighty = logits.iter().filter(|&&l| scaled(l) >= NEGLIGIBLE);
    let mut keys: Vec<u32> = weighty.map(|&l| key(l)).collect();
    if top_k > 0 && top_k < keys.len() {
        keys.select_nth_unstable(top_k);
        keys.truncate(top_k);
    }
    keys.sort_unstable();
    let mut weights: Vec<f32> = keys.iter().map(|&key| scaled(logit(key))).collect();
    kernels.exp(&mut weights);

    let total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    let mut kept = 0.0;
    let mut n_kept = 0;
    for &w in &weights {
        if w < min_p {
            break;
        }
        kept += f64::from(w);
        n_kept += 1;
        if kept >= f64::from(top_p) * total {
            break;
        }
    }
    let mut left = uniform * kept;
    let drawn = weights[..n_kept].iter().position(|&w| {
        left -= f64::from(w);
        left < 0.0
    });
    // None where rounding left a rest, or where the greatest logit is +∞ or NaN.
    let Some(drawn) = drawn else { return likeliest };
    let equals_before = keys[..drawn].iter().rev().take_while(|&&k| k == keys[drawn]).count();
    let mut equals = (0..).zip(logits).filter(|&(_, &l)| key(l) == keys[drawn]);
    equals.nth(equals_before).map_or(likeliest, |(token, _)| token)
}

/// A number that rises as the logit falls; equal for both zeros, and greatest for NaN.
pub(super) fn key(logit: f32) -> u32 {
    if logit.is_nan() {
        return u32::MAX;
    }
    // Makes +0 of −0.
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 0 { !bits ^ SIGN } else { bits }
}

const SIGN: u32 = 1 << 31;

/// The logit of a key.
fn logit(key: u32) -> f32 {
    f32::from_bits(if key & SIGN == 0 { !key ^ SIGN } else { key })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sampler::{likelier_first, likeliest};

    /// The definition.
    fn plainly(sampling: &Sampling, logits: &[f32], likeliest: u32, uniform: f64) -> u32 {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| likelier_first(logits, a, b));
        if sampling.top_k > 0 {
            order.truncate(sampling.top_k);
        }
        let max = logits[likeliest as usize];
        let weight = |&id: &u32| {
            let w = rill_kernels::math::exp((logits[id as usize] - max) / sampling.temperature);
            if w.is_nan() { 0.0 } else { w }
        };
        let total: f64 = order.iter().map(|id| f64::from(weight(id))).sum();
        let mut kept = 0.0;
        let mut n_kept = 0;
        for id in &order {
            if weight(id) < sampling.min_p {
                break;
            }
            kept += f64::from(weight(id));
            n_kept += 1;
            if kept >= f64::from(sampling.top_p) * total {
                break;
            }
        }
        let mut left = uniform * kept;
        for id in &order[..n_kept] {
            left -= f64::from(weight(id));
            if left < 0.0 {
                return *id;
            }
        }
        likeliest
    }

    fn logit() -> impl Strategy<Value = f32> {
        prop_oneof![
            8 => -60.0f32..30.0,
            // Equal ones.
            6 => (-20i8..20).prop_map(|n| f32::from(n) * 0.5),
            1 => prop::sample::select(vec![
                -0.0, f32::MIN, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY,
            ]),
        ]
    }

    fn sampling() -> impl Strategy<Value = Sampling> {
        let share = || prop_oneof![Just(1.0f32), 0.001f32..1.0];
        let temperature = prop_oneof![0.05f32..3.0, prop::sample::select(vec![1e-45, 1.0, 1e38])];
        (temperature, 0usize..60, share(), share()).prop_map(
            |(temperature, top_k, top_p, min_p)| {
                let min_p = if min_p == 1.0 { 0.0 } else { min_p * min_p };
                let top_k = top_k.saturating_sub(20);
                Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() }
            },
        )
    }

    proptest! {
        #[test]
        fn every_draw_is_that_of_the_definition(
            logits in prop::collection::vec(logit(), 1..200),
            sampling in sampling(),
            uniforms in prop::collection::vec(0.0f64..1.0, 8),
        ) {
            let Some(likeliest) = likeliest(&logits) else { return Ok(()) };
            // The ends too: rounding may leave a rest.
            for uniform in uniforms.into_iter().chain([0.0, 1.0 - f64::EPSILON / 2.0]) {
                let drawn = draw(&Kernels::detect(), &sampling, &logits, likeliest, uniform);
                prop_assert_eq!(drawn, plainly(&sampling, &logits, likeliest, uniform));
            }
        }

        #[test]
        fn min_p_keeps_exactly_the_tokens_of_its_definition(
            logits in prop::collection::vec(-6.0f64..0.0, 1..12),
            min_p in 0.01f32..1.0,
        ) {
            // Not so near the edge that f32 could see it on the other side.
            let edge = f64::from(min_p).ln();
            let max = logits.iter().copied().fold(f64::MIN, f64::max);
            prop_assume!(logits.iter().all(|l| (l - max - edge).abs() > 1e-4));
            let expected = (0u32..).zip(&logits).filter(|&(_, l)| l - max > edge);
            let expected: Vec<u32> = expected.map(|(id, _)| id).collect();

            let logits: Vec<f32> = logits.iter().map(|&l| l as f32).collect();
            let sampling = Sampling { temperature: 1.0, min_p, ..Sampling::default() };
            let likeliest = likeliest(&logits).unwrap();
            // Finer than any token that is kept: 0.01 of at most 12.
            let draws = (0..2000).map(|i| f64::from(i) / 2000.0);
            let mut drawn: Vec<u32> = draws
                .map(|uniform| draw(&Kernels::detect(), &sampling, &logits, likeliest, uniform))
                .collect();
            drawn.sort_unstable();
            drawn.dedup();
            prop_assert_eq!(drawn, expected);
        }
    }

    #[test]
    fn draws_from_a_large_vocabulary_are_those_of_the_definition() {
        let mut state = 1;
        // Sums of twelve: near enough to normal, from about -18 to 18.
        let mut logit = || (0..12).map(|_| crate::sampler::uniform(&mut state)).sum::<f64>() - 6.0;
        let logits: Vec<f32> = (0..40_000).map(|_| (3.0 * logit()) as f32).collect();
        let likeliest = likeliest(&logits).unwrap();
        for (temperature, top_k, top_p) in
            [(1.0, 0, 1.0), (1.0, 0, 0.95), (2.5, 0, 0.99), (0.3, 0, 1.0), (1.0, 500, 0.9)]
        {
            let sampling = Sampling { temperature, top_k, top_p, ..Sampling::default() };
            for i in 0..8 {
                let uniform = f64::from(i) / 7.5 + 0.01;
                let drawn = draw(&Kernels::detect(), &sampling, &logits, likeliest, uniform);
                assert_eq!(drawn, plainly(&sampling, &logits, likeliest, uniform), "{sampling:?}");
            }
        }
    }
}
