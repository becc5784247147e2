use super::Policy;
use super::ranking::Ranking;
use crate::{ExpertKey, Geometry};

/// Gives up what was used longest ago, and keeps everything that was fetched.
///
/// A cache smaller than what one token uses then hits nothing at all: it is here to compare with.
#[derive(Clone, Debug)]
pub struct Lru {
    ranking: Ranking,
    n_events: u64,
}

impl Lru {
    /// A policy that has seen nothing yet.
    #[must_use]
    pub fn new(geometry: Geometry) -> Self {
        Self { ranking: Ranking::new(geometry, 0.0), n_events: 0 }
    }
}

impl Policy for Lru {
    fn used(&mut self, layer: u32, experts: &[u32]) {
        self.n_events += 1;
        let last_use = self.n_events as f64;
        let scores = self.ranking.layer_mut(layer);
        for &expert in experts {
            scores[expert as usize] = last_use;
        }
    }

    fn victim(&mut self, pinned: &dyn Fn(ExpertKey) -> bool) -> Option<ExpertKey> {
        self.ranking.victim(pinned, |_| 0.0)
    }

    fn admit(&mut self, _key: ExpertKey, _victim: ExpertKey) -> bool {
        true
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
