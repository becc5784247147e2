use super::Policy;
use super::ranking::Ranking;
use crate::{ExpertKey, Geometry};

/// Keeps what was used most, where a use counts half after 20 tokens; a newcomer that was used
/// less than everything resident is not kept.
#[derive(Clone, Debug)]
pub struct DecayedLfu {
    ranking: Ranking,
}

impl DecayedLfu {
    /// A policy that has seen nothing yet.
    #[must_use]
    pub fn new(geometry: Geometry) -> Self {
        Self { ranking: Ranking::new(geometry, 0.0) }
    }
}

impl Policy for DecayedLfu {
    fn used(&mut self, layer: u32, experts: &[u32]) {
        let counts = self.ranking.layer_mut(layer);
        for count in counts.iter_mut() {
            *count *= DECAY;
        }
        for &expert in experts {
            counts[expert as usize] += 1.0;
        }
    }

    fn victim(&mut self, pinned: &dyn Fn(ExpertKey) -> bool) -> Option<ExpertKey> {
        self.ranking.victim(pinned, |_| 0.0)
    }

    fn score(&mut self, key: ExpertKey) -> f64 {
        self.ranking.score(key)
    }

    fn inserted(&mut self, key: ExpertKey) {
        self.ranking.inserted(key);
    }

    fn removed(&mut self, key: ExpertKey) {
        self.ranking.removed(key);
    }
}

/// 2^(-1/20); a literal, because powers from the system's maths library differ between machines.
const DECAY: f64 = 0.965_936_328_924_845_5;
