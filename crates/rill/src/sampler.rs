//! Choosing the next token from logits. The same seed gives the same tokens on every machine.

use std::cmp::Ordering;

use rill_kernels::math;

use crate::error::Error;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// Keep the most likely tokens until their probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Start of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }
}

/// Draws tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    /// A sampler at the start of its random numbers.
    pub fn new(sampling: Sampling) -> Result<Self, Error> {
        let wrong = |parameter, found, expected| Error::Sampling { parameter, found, expected };
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            return Err(wrong("temperature", sampling.temperature, "finite and not negative"));
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return Err(wrong("top_p", sampling.top_p, "above 0 and at most 1"));
        }
        Ok(Self { sampling, state: sampling.seed })
    }

    /// The next token, given the logits of the vocabulary. Equal logits go to the lower id and
    /// NaN is never preferred to a number.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_p, top_k, .. } = self.sampling;
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let likelier = |a: &u32, b: &u32| likelier_first(logits, *a, *b);
        if temperature == 0.0 {
            return order.into_iter().min_by(likelier).unwrap_or(0);
        }
        if top_k > 0 && top_k < order.len() {
            order.select_nth_unstable_by(top_k, likelier);
            order.truncate(top_k);
        }
        order.sort_unstable_by(likelier);
        let Some(&best) = order.first() else { return 0 };
        let max = logits[best as usize];
        let weight = |&id: &u32| {
            let w = math::exp((logits[id as usize] - max) / temperature);
            if w.is_nan() { 0.0 } else { f64::from(w) }
        };
        // Sums run from the most likely token down, one after another.
        let total: f64 = order.iter().map(weight).sum();
        let mut kept = 0.0;
        let mut n_kept = 0;
        for id in &order {
            kept += weight(id);
            n_kept += 1;
            if kept >= f64::from(top_p) * total {
                break;
            }
        }
        let mut left = self.uniform() * kept;
        for id in &order[..n_kept] {
            left -= weight(id);
            if left < 0.0 {
                return *id;
            }
        }
        best
    }

    /// Uniform in [0, 1): SplitMix64, whose sequence is fixed for ever.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Orders ids by falling logit, then by rising id; NaN comes last.
pub fn likelier_first(logits: &[f32], a: u32, b: u32) -> Ordering {
    let (x, y) = (logits[a as usize], logits[b as usize]);
    let by_logit = y.partial_cmp(&x).unwrap_or_else(|| x.is_nan().cmp(&y.is_nan()));
    by_logit.then(a.cmp(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_p: f32, top_k: usize, seed: u64) -> Sampler {
        Sampler::new(Sampling { temperature, top_p, top_k, seed }).unwrap()
    }

    #[test]
    fn greedy_takes_the_largest_and_ties_go_to_the_lower_id() {
        let mut s = sampler(0.0, 1.0, 0, 1);
        assert_eq!(s.sample(&[0.0, 3.0, 3.0, 1.0]), 1);
        assert_eq!(s.sample(&[f32::NAN, -1.0, f32::NAN]), 1);
        assert_eq!(s.sample(&[f32::NAN, f32::NEG_INFINITY]), 1);
        assert_eq!(s.sample(&[f32::NAN, f32::NAN]), 0);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [1.0f32, 0.0, 2.0, -1.0];
        let mut s = sampler(0.7, 1.0, 0, 42);
        let mut counts = [0.0f64; 4];
        let n = 40_000;
        for _ in 0..n {
            counts[s.sample(&logits) as usize] += 1.0 / f64::from(n);
        }
        let total: f64 = logits.iter().map(|&l| (f64::from(l) / 0.7).exp()).sum();
        for (count, &l) in counts.iter().zip(&logits) {
            let p = (f64::from(l) / 0.7).exp() / total;
            // Five standard deviations of the count.
            let tolerance = 5.0 * (p * (1.0 - p) / f64::from(n)).sqrt();
            assert!((count - p).abs() < tolerance, "{count} for {p}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [0.0, 1.0, 2.0, 3.0];
        let drawn = |mut s: Sampler| -> Vec<u32> {
            let mut ids: Vec<u32> = (0..500).map(|_| s.sample(&logits)).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        assert_eq!(drawn(sampler(5.0, 1.0, 2, 1)), [2, 3]);
        assert_eq!(drawn(sampler(1.0, 0.6, 0, 1)), [3]);
        assert_eq!(drawn(sampler(1.0, 0.8, 0, 1)), [2, 3]);
        assert_eq!(drawn(sampler(1.0, 1.0, 0, 1)), [0, 1, 2, 3]);
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens_for_ever() {
        let logits: Vec<f32> = (0..50).map(|i| (i * 7 % 13) as f32 * 0.3).collect();
        let draw = |seed| {
            let mut s = sampler(1.0, 0.95, 40, seed);
            (0..12).map(|_| s.sample(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        // Committed, so that a change of algorithm or machine is noticed.
        assert_eq!(draw(7), [35, 11, 40, 33, 48, 9, 7, 22, 24, 48, 24, 10]);
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        for (temperature, top_p) in [
            (-1.0, 1.0),
            (f32::NAN, 1.0),
            (f32::INFINITY, 1.0),
            (1.0, 0.0),
            (1.0, 1.1),
            (1.0, f32::NAN),
        ] {
            let sampling = Sampling { temperature, top_p, top_k: 0, seed: 0 };
            assert!(matches!(Sampler::new(sampling), Err(Error::Sampling { .. })));
        }
    }
}
