//! Choosing the next token from logits. The same seed gives the same tokens on every machine.
//!
//! The steps, always in this order (`docs/arithmetic.md` has the arithmetic):
//!
//! 1. **bias**: what it makes of the logits is what the model is taken to have said;
//! 2. **penalties**: repetition, which looks at the sign of a logit, then frequency and presence;
//! 3. **temperature**: at 0 the greatest logit is taken; else logits are divided by it, so that the
//!    cuts below see the probabilities that tokens are drawn with;
//! 4. **top-k**: needs the order alone;
//! 5. **top-p**: a share of what top-k left;
//! 6. **min-p**: compares with the likeliest token, so what was cut before does not matter to it, and
//!    top-p has its usual meaning without it.
//!
//! A logit of −∞ forbids a token and stays −∞ through all steps, so a [`TokenFilter`] is applied
//! before the first.

mod draw;
mod logprobs;

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BTreeMap;

use rill_kernels::Kernels;
use serde::{Deserialize, Serialize};

use crate::error::Error;

pub use logprobs::Logprobs;

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the most likely tokens until their probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely, as a share of the likeliest token's probability; 0 keeps all.
    pub min_p: f32,
    /// Divides the logits above 0, and multiplies the others, of tokens that the context has, be they
    /// of the prompt or generated; 1 changes nothing (CTRL, arXiv:1909.05858, section 4.1, as it is
    /// used for logits of both signs).
    pub repetition_penalty: f32,
    /// Taken off the logits of tokens that were generated, once; tokens of the prompt do not count.
    pub presence_penalty: f32,
    /// Taken off the logits of tokens that were generated, as often as they were; tokens of the
    /// prompt do not count.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; −∞ forbids one. All are added if an id is there twice.
    pub logit_bias: Vec<(u32, f32)>,
    /// Start of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// All that a sampler remembers: saved and [resumed](Sampler::resume), it goes on with the same
/// tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// Of the random numbers.
    pub random: u64,
    /// The tokens of the context and how often each was generated: 0 for those of the prompt alone.
    pub counts: BTreeMap<u32, u32>,
}

/// Forbids tokens that must not come next, as a grammar does.
pub trait TokenFilter {
    /// Sets the logits of tokens that must not come next to −∞.
    fn mask(&mut self, logits: &mut [f32]);

    /// Is told of a token that became part of the text. Stop tokens do not.
    fn accept(&mut self, token: u32);
}

/// Draws tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: SamplerState,
    kernels: Kernels,
}

impl Sampler {
    /// A sampler at the start of its random numbers, for an empty context.
    ///
    /// # Errors
    /// When a parameter is out of its range or names a token outside the vocabulary.
    pub fn new(sampling: Sampling, vocab_size: usize) -> Result<Self, Error> {
        let state = SamplerState { random: sampling.seed, counts: BTreeMap::new() };
        Self::resume(sampling, vocab_size, state)
    }

    /// A sampler that goes on where another was; the seed has no say any more.
    ///
    /// # Errors
    /// As of [`new`](Self::new), and when the state has tokens outside the vocabulary.
    pub fn resume(
        sampling: Sampling,
        vocab_size: usize,
        state: SamplerState,
    ) -> Result<Self, Error> {
        check(&sampling, vocab_size)?;
        known("the sampler's state", state.counts.keys(), vocab_size)?;
        Ok(Self { sampling, state, kernels: Kernels::detect() })
    }

    /// The result is the same with all kernels.
    pub(crate) fn compute_with(&mut self, kernels: Kernels) {
        self.kernels = kernels;
    }

    /// What to save.
    pub fn state(&self) -> &SamplerState {
        &self.state
    }

    pub(crate) fn into_state(self) -> SamplerState {
        self.state
    }

    /// Takes note of tokens that are in the context but were not generated.
    pub fn accept_prompt(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.state.counts.entry(token).or_insert(0);
        }
    }

    /// Takes note of a generated token.
    pub fn accept(&mut self, token: u32) {
        let count = self.state.counts.entry(token).or_insert(0);
        *count = count.saturating_add(1);
    }

    /// The next token, given the logits of the vocabulary; [`accept`](Self::accept) it if it becomes
    /// part of the text. Equal logits go to the lower id, and NaN is never preferred to a number. A
    /// token whose logit is −∞ is forbidden; `None` when all are.
    pub fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        let adjusted = self.adjusted(logits);
        let likeliest = likeliest(&adjusted)?;
        if self.sampling.temperature == 0.0 {
            return Some(likeliest);
        }
        let uniform = uniform(&mut self.state.random);
        Some(draw::draw(&self.kernels, &self.sampling, &adjusted, likeliest, uniform))
    }

    /// The log-probability of `token` and the `n` likeliest tokens with theirs, of the model's own
    /// distribution: before bias, filter, penalties and temperature.
    pub fn logprobs(&self, logits: &[f32], token: u32, n: usize) -> Logprobs {
        Logprobs::of(&self.kernels, logits, token, n)
    }

    /// Logits after bias and penalties.
    fn adjusted<'a>(&self, logits: &'a [f32]) -> Cow<'a, [f32]> {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.sampling;
        let penalises =
            repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
        if self.sampling.logit_bias.is_empty() && !penalises {
            return Cow::Borrowed(logits);
        }
        let mut logits = logits.to_vec();
        let allowed = |l: &&mut f32| **l != f32::NEG_INFINITY;
        // Only a bias of −∞ forbids: an overflow does not.
        let finite = |x: f32| x.clamp(f32::MIN, f32::MAX);
        for &(token, bias) in &self.sampling.logit_bias {
            if let Some(l) = logits.get_mut(token as usize).filter(allowed) {
                *l = if bias == f32::NEG_INFINITY { bias } else { finite(*l + bias) };
            }
        }
        if penalises {
            for (&token, &n_generated) in &self.state.counts {
                let Some(l) = logits.get_mut(token as usize).filter(allowed) else { continue };
                let r = repetition_penalty;
                *l = finite(if *l > 0.0 { *l / r } else { *l * r });
                if n_generated > 0 {
                    let by_count = finite(n_generated as f32 * frequency_penalty);
                    *l = finite(finite(*l - by_count) - presence_penalty);
                }
            }
        }
        Cow::Owned(logits)
    }
}

/// Orders ids by falling logit, then by rising id; NaN comes last.
pub fn likelier_first(logits: &[f32], a: u32, b: u32) -> Ordering {
    let (x, y) = (logits[a as usize], logits[b as usize]);
    let by_logit = y.partial_cmp(&x).unwrap_or_else(|| x.is_nan().cmp(&y.is_nan()));
    by_logit.then(a.cmp(&b))
}

/// The first in [`likelier_first`]'s order that is not forbidden.
fn likeliest(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (token, &l) in logits.iter().enumerate() {
        let better = |(_, best): (usize, f32)| l > best || (best.is_nan() && !l.is_nan());
        if l != f32::NEG_INFINITY && best.is_none_or(better) {
            best = Some((token, l));
        }
    }
    best.map(|(token, _)| token as u32)
}

/// Uniform in [0, 1): SplitMix64, whose sequence is fixed for ever.
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 11) as f64 / (1u64 << 53) as f64
}

/// Refuses what is out of its range; NaN is in none.
fn check(sampling: &Sampling, vocab_size: usize) -> Result<(), Error> {
    let require = |fits, parameter, found, expected| match fits {
        true => Ok(()),
        false => Err(Error::Sampling { parameter, found, expected }),
    };
    let s = sampling;
    let not_negative = (0.0..=f32::MAX).contains(&s.temperature);
    require(not_negative, "temperature", s.temperature, "finite and not negative")?;
    require(s.top_p > 0.0 && s.top_p <= 1.0, "top_p", s.top_p, "above 0 and at most 1")?;
    require((0.0..=1.0).contains(&s.min_p), "min_p", s.min_p, "from 0 to 1")?;
    let r = s.repetition_penalty;
    require(r > 0.0 && r.is_finite(), "repetition_penalty", r, "finite and above 0")?;
    for (parameter, penalty) in
        [("presence_penalty", s.presence_penalty), ("frequency_penalty", s.frequency_penalty)]
    {
        require(penalty.is_finite(), parameter, penalty, "finite")?;
    }
    for &(_, bias) in &s.logit_bias {
        require(bias < f32::INFINITY, "logit_bias", bias, "a number below infinity")?;
    }
    known("logit_bias", s.logit_bias.iter().map(|(token, _)| token), vocab_size)
}

/// Refuses ids that are not of the vocabulary.
fn known<'a>(
    place: &'static str,
    tokens: impl IntoIterator<Item = &'a u32>,
    vocab_size: usize,
) -> Result<(), Error> {
    match tokens.into_iter().find(|&&token| token as usize >= vocab_size) {
        Some(&token) => Err(Error::UnknownToken { place, token, vocab_size }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_p: f32, top_k: usize, seed: u64) -> Sampler {
        let sampling = Sampling { temperature, top_p, top_k, seed, ..Sampling::default() };
        Sampler::new(sampling, 1000).unwrap()
    }

    #[test]
    fn greedy_takes_the_largest_and_ties_go_to_the_lower_id() {
        let mut s = sampler(0.0, 1.0, 0, 1);
        assert_eq!(s.sample(&[0.0, 3.0, 3.0, 1.0]), Some(1));
        assert_eq!(s.sample(&[f32::NAN, -1.0, f32::NAN]), Some(1));
        assert_eq!(s.sample(&[f32::NAN, f32::NAN]), Some(0));
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [1.0f32, 0.0, 2.0, -1.0];
        let mut s = sampler(0.7, 1.0, 0, 42);
        let mut counts = [0.0f64; 4];
        let n = 40_000;
        for _ in 0..n {
            counts[s.sample(&logits).unwrap() as usize] += 1.0 / f64::from(n);
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
            let mut ids: Vec<u32> = (0..500).map(|_| s.sample(&logits).unwrap()).collect();
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
            (0..12).map(|_| s.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        // Committed, so that a change of algorithm or machine is noticed.
        assert_eq!(draw(7), [35, 11, 40, 33, 48, 9, 7, 22, 24, 48, 24, 10]);
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        let usual = Sampling::default;
        for sampling in [
            Sampling { temperature: -1.0, ..usual() },
            Sampling { temperature: f32::NAN, ..usual() },
            Sampling { temperature: f32::INFINITY, ..usual() },
            Sampling { top_p: 0.0, ..usual() },
            Sampling { top_p: 1.1, ..usual() },
            Sampling { top_p: f32::NAN, ..usual() },
            Sampling { min_p: -0.1, ..usual() },
            Sampling { min_p: 1.1, ..usual() },
            Sampling { min_p: f32::NAN, ..usual() },
            Sampling { repetition_penalty: 0.0, ..usual() },
            Sampling { repetition_penalty: -1.0, ..usual() },
            Sampling { repetition_penalty: f32::INFINITY, ..usual() },
            Sampling { repetition_penalty: f32::NAN, ..usual() },
            Sampling { presence_penalty: f32::NEG_INFINITY, ..usual() },
            Sampling { presence_penalty: f32::NAN, ..usual() },
            Sampling { frequency_penalty: f32::INFINITY, ..usual() },
            Sampling { frequency_penalty: f32::NAN, ..usual() },
            Sampling { logit_bias: vec![(1, 0.0), (2, f32::INFINITY)], ..usual() },
            Sampling { logit_bias: vec![(1, f32::NAN)], ..usual() },
        ] {
            let what = format!("{sampling:?}");
            let refused = Sampler::new(sampling, 3);
            assert!(matches!(refused, Err(Error::Sampling { .. })), "{what}");
        }
    }
}
