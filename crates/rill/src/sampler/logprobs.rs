//! Log-probabilities, with the same bits on every machine.

use rill_kernels::Kernels;

use super::draw::key;
use super::likelier_first;

/// How likely the model itself thought a token and its rivals: bias, filter, penalties and
/// temperature have no say.
///
/// Natural logarithms, within 1e-6 of the exact values and then rounded; −∞ for a probability of 0.
/// Logits of NaN have no probability, and none has one beside a logit of +∞: those are NaN.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token that was chosen.
    pub chosen: f32,
    /// The likeliest tokens with theirs, by [`likelier_first`].
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    pub(super) fn of(kernels: &Kernels, logits: &[f32], chosen: u32, n: usize) -> Self {
        // NaN never wins.
        let max = logits.iter().fold(f32::NEG_INFINITY, |max, &l| if l > max { l } else { max });
        let mut weights: Vec<f32> = logits.iter().map(|l| l - max).collect();
        kernels.exp(&mut weights);
        // In f64 and by rising id, one after another.
        let total = weights.iter().filter(|w| !w.is_nan()).fold(0.0, |sum, &w| sum + f64::from(w));
        // Without a number among the logits, or with +∞, there is no distribution.
        let ln_total = if total >= 1.0 { ln(total) } else { f64::NAN };
        let of = |l: f32| (f64::from(l) - f64::from(max) - ln_total) as f32;
        let top = likeliest(logits, n).into_iter().map(|id| (id, of(logits[id as usize])));
        Self {
            chosen: logits.get(chosen as usize).map_or(f32::NAN, |&l| of(l)),
            top: top.collect(),
        }
    }
}

/// The first `n` ids by [`likelier_first`], without sorting all.
fn likeliest(logits: &[f32], n: usize) -> Vec<u32> {
    let n = n.min(logits.len());
    if n == 0 {
        return Vec::new();
    }
    let mut keys: Vec<u32> = logits.iter().map(|&l| key(l)).collect();
    let last = *keys.select_nth_unstable(n - 1).1;
    let ids = || (0..).zip(logits);
    let mut likeliest: Vec<u32> =
        ids().filter(|&(_, &l)| key(l) < last).map(|(id, _)| id).collect();
    let equal = ids().filter(|&(_, &l)| key(l) == last).map(|(id, _)| id);
    likeliest.extend(equal.take(n - likeliest.len()));
    likeliest.sort_unstable_by(|&a, &b| likelier_first(logits, a, b));
    likeliest
}

/// Natural logarithm of a number from 1 on, within 4.5e-16 times the larger of 1 and the result. The
/// system's would have other bits on other machines.
fn ln(x: f64) -> f64 {
    // x = m · 2^k with m from √½ to √2: ln x = k · ln 2 + 2 · atanh((m − 1) / (m + 1)).
    let bits = x.to_bits();
    let mut k = (bits >> 52) as i32 - 1023;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    // atanh s = s · (1 + z/3 + z²/5 + …); z is below 0.03, so what eleven terms leave out is below 1e-18.
    let series = (0..11).rev().fold(0.0, |sum, i| sum * z + 1.0 / f64::from(2 * i + 1));
    f64::from(k) * std::f64::consts::LN_2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(logits: &[f32], chosen: u32, n: usize) -> Logprobs {
        Logprobs::of(&Kernels::detect(), logits, chosen, n)
    }

    proptest! {
        #[test]
        fn log_probabilities_are_near_exact_and_the_likeliest_come_first(
            logits in prop::collection::vec(
                prop_oneof![-40.0f32..40.0, (-9i8..9).prop_map(f32::from)],
                1..400,
            ),
            chosen: prop::sample::Index,
            n in 0usize..500,
        ) {
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let total: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
            let exact = |id: u32| f64::from(logits[id as usize]) - f64::from(max) - total.ln();
            let near = |id: u32, found: f32| {
                let rounding = exact(id).abs() * f64::from(f32::EPSILON / 2.0);
                (f64::from(found) - exact(id)).abs() <= 1e-6 + rounding
            };
            let chosen = chosen.index(logits.len()) as u32;
            let found = of(&logits, chosen, n);
            prop_assert!(near(chosen, found.chosen));
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            order.sort_by(|&a, &b| likelier_first(&logits, a, b));
            order.truncate(n);
            prop_assert_eq!(found.top.iter().map(|&(id, _)| id).collect::<Vec<_>>(), order);
            for (id, logprob) in found.top {
                prop_assert!(near(id, logprob));
            }
        }
    }

    #[test]
    fn log_probabilities_have_the_same_bits_for_ever() {
        let logits: Vec<f32> = (0..5000).map(|i| (i * 7 % 131) as f32 * 0.17 - 9.0).collect();
        let found = of(&logits, 17, 3);
        let bits: Vec<(u32, u32)> = found.top.iter().map(|&(id, l)| (id, l.to_bits())).collect();
        // Committed, so that a change of algorithm or machine is noticed.
        let top = 0xc0af_e1ef;
        assert_eq!(found.chosen.to_bits(), 0xc0eb_b8fb);
        assert_eq!(bits, [(56, top), (187, top), (318, top)]);
    }

    #[test]
    fn logits_that_are_no_numbers_have_no_probability() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let found = of(&[nan, 1.0, -inf, 1.0], 0, 9);
        assert!(found.chosen.is_nan());
        assert_eq!(found.top[..2], [(1, -std::f32::consts::LN_2), (3, -std::f32::consts::LN_2)]);
        assert_eq!(found.top[2], (2, -inf));
        assert!(found.top[3].0 == 0 && found.top[3].1.is_nan());
        for logits in [&[inf, 0.0][..], &[nan, nan], &[-inf, -inf], &[]] {
            let found = of(logits, 1, 9);
            assert!(found.chosen.is_nan(), "{logits:?}");
            assert_eq!(found.top.len(), logits.len());
            assert!(found.top.iter().all(|(_, l)| l.is_nan()), "{logits:?}");
        }
    }

    #[test]
    fn the_logarithm_is_that_of_the_system_but_for_the_last_bits() {
        // To 2^18: no vocabulary has a larger total.
        let mut worst = 0.0f64;
        for i in 0..1_800_000 {
            let x = (f64::from(i) * 1e-5).exp2();
            worst = worst.max((ln(x) - x.ln()).abs() / x.ln().max(1.0));
        }
        assert!(worst < 4.5e-16, "{worst:e}");
        assert_eq!(ln(1.0), 0.0);
    }
}
