use super::history::History;
use super::ranking::Ranking;
use super::{Learned, Policy};
use crate::{ExpertKey, Geometry};

/// Ranks by how likely a record is to be used at the next token; a newcomer below everything
/// resident is not kept.
///
/// Three things are known of a record:
/// - how often it was used lately, at several meanings of "lately": one decayed count per half-life;
/// - whether it came next when earlier tokens were routed like this one (`History`);
/// - how soon its layer runs again: of two records that are equally likely, the one whose turn
///   comes later is given up.
///
/// The score is Σ weight·ln(count + ε) + weight·ln(expected + ε) − weight·tokens until the layer's
/// turn. All constants were searched for on the first half of a recorded Kimi-Linear run, for most
/// hits at four sizes; `docs/experiments.md` has what they do for the second half and other models.
#[derive(Clone, Debug)]
pub struct Scored {
    geometry: Geometry,
    /// `(n_layers, n_experts)`
    counts: Vec<[f32; N_HALF_LIVES]>,
    history: History,
    /// Without the turn.
    ranking: Ranking,
    /// The layer that ran last.
    layer: u32,
    /// Whether that layer's scores are out of date: a prompt's tokens are noted one by one, and
    /// scored once.
    is_stale: bool,
    /// Room for what history expects of one layer, `(n_experts)`
    expected: Vec<f32>,
}

impl Scored {
    /// A policy that has seen nothing yet.
    #[must_use]
    pub fn new(geometry: Geometry) -> Self {
        let unused = [0.0; N_HALF_LIVES];
        Self {
            geometry,
            counts: vec![unused; geometry.n_records()],
            history: History::new(geometry),
            ranking: Ranking::new(geometry, f64::from(score_of(&unused, 0.0, 0.0))),
            layer: geometry.n_layers.saturating_sub(1),
            is_stale: false,
            expected: vec![0.0; geometry.n_experts as usize],
        }
    }

    /// A policy that knows what was used in earlier runs, and nothing else yet.
    #[must_use]
    pub fn from_learned(learned: &Learned) -> Self {
        let geometry = learned.geometry();
        let mut policy = Self::new(geometry);
        for (counts, &uses) in policy.counts.iter_mut().zip(learned.counts()) {
            counts[LONG_RUN] = uses;
        }
        for layer in 0..geometry.n_layers {
            let counts = &policy.counts[geometry.layer_range(layer)];
            for (score, counts) in policy.ranking.layer_mut(layer).iter_mut().zip(counts) {
                *score = f64::from(score_of(counts, 0.0, 0.0));
            }
        }
        policy
    }

    /// Brings the scores of the layer that ran last up to date.
    fn settle(&mut self) {
        if !self.is_stale {
            return;
        }
        self.is_stale = false;
        self.history.expect(self.layer, &mut self.expected);
        let n_earlier = self.history.n_earlier(self.layer) as f32;
        let trust = n_earlier / (n_earlier + TRUST_TOKENS);
        let counts = &self.counts[self.geometry.layer_range(self.layer)];
        let known = counts.iter().zip(&self.expected);
        for (score, (counts, &expected)) in self.ranking.layer_mut(self.layer).iter_mut().zip(known)
        {
            *score = f64::from(score_of(counts, expected, trust));
        }
    }
}

impl Policy for Scored {
    fn used(&mut self, layer: u32, experts: &[u32]) {
        if layer != self.layer {
            self.settle();
        }
        let counts = &mut self.counts[self.geometry.layer_range(layer)];
        for counts in counts.iter_mut() {
            for (count, decay) in counts.iter_mut().zip(DECAYS) {
                *count *= decay;
            }
        }
        for &expert in experts {
            for count in &mut counts[expert as usize] {
                *count += 1.0;
            }
        }
        self.history.push(layer, experts);
        self.layer = layer;
        self.is_stale = true;
    }

    fn victim(&mut self, pinned: &dyn Fn(ExpertKey) -> bool) -> Option<ExpertKey> {
        self.settle();
        let (n_layers, now) = (self.geometry.n_layers, self.layer);
        self.ranking.victim(pinned, |layer| -wait(n_layers, now, layer))
    }

    fn score(&mut self, key: ExpertKey) -> f64 {
        self.settle();
        self.ranking.score(key) - wait(self.geometry.n_layers, self.layer, key.layer)
    }

    fn inserted(&mut self, key: ExpertKey) {
        self.ranking.inserted(key);
    }

    fn removed(&mut self, key: ExpertKey) {
        self.ranking.removed(key);
    }

    fn learned(&self) -> Option<Learned> {
        let counts = self.counts.iter().map(|counts| counts[LONG_RUN]).collect();
        Some(Learned::new(self.geometry, counts))
    }
}

fn score_of(counts: &[f32; N_HALF_LIVES], expected: f32, trust: f32) -> f32 {
    let mut score = trust * EXPECTED_WEIGHT * ln(expected + EXPECTED_FLOOR);
    for (&count, weight) in counts.iter().zip(COUNT_WEIGHTS) {
        score += weight * ln(count + COUNT_FLOOR);
    }
    score
}

/// A layer that has just run has its next turn in one token, the layer after it almost at once.
fn wait(n_layers: u32, now: u32, layer: u32) -> f64 {
    let layers = if layer > now { layer - now } else { layer + n_layers - now };
    WAIT_WEIGHT * f64::from(layers) / f64::from(n_layers)
}

/// The natural logarithm of a positive normal number to about 1e-5: the same on every machine,
/// which the system's need not be, and plain enough for the compiler to vectorise.
fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) as i32 - 127;
    let mantissa = f32::from_bits((bits & 0x007f_ffff) | 0x3f80_0000);
    // ln(m) = 2·artanh((m - 1)/(m + 1)): the first terms of its series, for m from 1 to 2.
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let z2 = z * z;
    let artanh = z * (1.0 + z2 * (1.0 / 3.0 + z2 * (1.0 / 5.0 + z2 * (1.0 / 7.0))));
    exponent as f32 * std::f32::consts::LN_2 + 2.0 * artanh
}

const N_HALF_LIVES: usize = 3;
/// Which of them outlasts a run.
const LONG_RUN: usize = 2;
/// 2^(-1/h) for half-lives of 0.5, 8 and 1,000 tokens; literals, because powers from the system's
/// maths library differ between machines. Half-lives of 2 and 40 tokens add nothing to these.
const DECAYS: [f32; N_HALF_LIVES] = [0.25, 0.917_004_05, 0.999_307_1];
const COUNT_WEIGHTS: [f32; N_HALF_LIVES] = [0.17, 0.4, 0.15];
const COUNT_FLOOR: f32 = 0.007_3;
const EXPECTED_WEIGHT: f32 = 0.42;
const EXPECTED_FLOOR: f32 = 0.002_4;
/// After this many tokens history has half its say.
const TRUST_TOKENS: f32 = 38.0;
/// Per token.
const WAIT_WEIGHT: f64 = 0.9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ln_is_close_to_the_systems() {
        for i in 0..100_000 {
            let x = 0.001 + i as f32 * 0.013;
            let error = (f64::from(ln(x)) - f64::from(x).ln()).abs();
            assert!(error < 3e-5, "ln({x}): {} instead of {}", ln(x), f64::from(x).ln());
        }
    }

    #[test]
    fn the_layer_that_runs_next_waits_least() {
        let waits = [4, 0, 1, 2, 3].map(|layer| wait(5, 3, layer));
        assert!(waits.is_sorted(), "{waits:?}");
        assert_eq!(wait(5, 3, 3), WAIT_WEIGHT);
    }
}
