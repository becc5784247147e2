use super::Policy;
use super::ranking::Ranking;
use crate::{ExpertKey, Geometry};

/// Ranks by how likely a record is to be used at the next token, judged from how often it was used
/// lately, at several meanings of "lately"; a newcomer below everything resident is not kept.
///
/// Each record has one decayed use count per half-life, moved on when its layer runs. The score is
/// Σ weight·ln(count + 0.001), with weights from a logistic fit of "used at the next token" on the
/// first half of a recorded Kimi-Linear run.
#[derive(Clone, Debug)]
pub struct Scored {
    geometry: Geometry,
    /// `(n_layers, n_experts)`
    counts: Vec<[f32; N_HALF_LIVES]>,
    ranking: Ranking,
}

impl Scored {
    /// A policy that has seen nothing yet.
    #[must_use]
    pub fn new(geometry: Geometry) -> Self {
        let unused = [0.0; N_HALF_LIVES];
        Self {
            geometry,
            counts: vec![unused; geometry.n_records()],
            ranking: Ranking::new(geometry, f64::from(score_of(&unused))),
        }
    }
}

impl Policy for Scored {
    fn used(&mut self, layer: u32, experts: &[u32]) {
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
        for (score, counts) in self.ranking.layer_mut(layer).iter_mut().zip(counts) {
            *score = f64::from(score_of(counts));
        }
    }

    fn victim(&mut self, pinned: &dyn Fn(ExpertKey) -> bool) -> Option<ExpertKey> {
        self.ranking.victim(pinned)
    }

    fn score(&self, key: ExpertKey) -> f64 {
        self.ranking.score(key)
    }

    fn inserted(&mut self, key: ExpertKey) {
        self.ranking.inserted(key);
    }

    fn removed(&mut self, key: ExpertKey) {
        self.ranking.removed(key);
    }
}

fn score_of(counts: &[f32; N_HALF_LIVES]) -> f32 {
    let mut score = 0.0;
    for (&count, weight) in counts.iter().zip(WEIGHTS) {
        score += weight * ln(count + 0.001);
    }
    score
}

/// The natural logarithm of a positive normal number to about 1e-5: the same on every machine,
/// which the system's need not be, and plain enough for the compiler to vectorise.
fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) as i32 - 127;
    let mantissa = f32::from_bits((bits & 0x007f_ffff) | 0x3f80_0000);
    // ln(m) = 2·artanh((m - 1)/(m + 1)), four terms of its series: at most 1.2e-5 off for m < 2.
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let z2 = z * z;
    let artanh = z * (1.0 + z2 * (1.0 / 3.0 + z2 * (1.0 / 5.0 + z2 * (1.0 / 7.0))));
    exponent as f32 * std::f32::consts::LN_2 + 2.0 * artanh
}

const N_HALF_LIVES: usize = 5;

/// 2^(-1/h) for half-lives of 0.5, 2, 8, 40 and 1,000 tokens.
const DECAYS: [f32; N_HALF_LIVES] = [0.25, 0.707_106_77, 0.917_004_05, 0.982_820_6, 0.999_307_1];
const WEIGHTS: [f32; N_HALF_LIVES] = [0.32, -0.09, 0.33, -0.08, 0.61];
