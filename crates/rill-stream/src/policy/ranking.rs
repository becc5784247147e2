use crate::{ExpertKey, Geometry};

/// A score for every record, and which records are resident: what every policy here is built on.
///
/// Scores change a layer at a time, when its router has chosen, so the lowest resident of every
/// other layer stays known and the lowest of all is found among `n_layers` candidates.
#[derive(Clone, Debug)]
pub(super) struct Ranking {
    geometry: Geometry,
    /// `(n_layers, n_experts)`
    scores: Vec<f64>,
    /// `(n_layers, n_experts)`
    resident: Vec<bool>,
    /// Of each layer, `(n_layers)`
    lowest: Vec<Lowest>,
}

#[derive(Clone, Copy, Debug)]
enum Lowest {
    /// Has to be looked for.
    Stale,
    /// The layer has no residents.
    Absent,
    Expert(u32),
}

impl Ranking {
    /// `unused` is the score of a record that no router has chosen yet.
    pub(super) fn new(geometry: Geometry, unused: f64) -> Self {
        Self {
            geometry,
            scores: vec![unused; geometry.n_records()],
            resident: vec![false; geometry.n_records()],
            lowest: vec![Lowest::Absent; geometry.n_layers as usize],
        }
    }

    pub(super) fn score(&self, key: ExpertKey) -> f64 {
        self.scores[self.geometry.index(key)]
    }

    /// The scores of a layer, to be changed: `(n_experts)`
    pub(super) fn layer_mut(&mut self, layer: u32) -> &mut [f64] {
        self.lowest[layer as usize] = Lowest::Stale;
        let range = self.geometry.layer_range(layer);
        &mut self.scores[range]
    }

    pub(super) fn inserted(&mut self, key: ExpertKey) {
        self.resident[self.geometry.index(key)] = true;
        self.lowest[key.layer as usize] = Lowest::Stale;
    }

    pub(super) fn removed(&mut self, key: ExpertKey) {
        self.resident[self.geometry.index(key)] = false;
        self.lowest[key.layer as usize] = Lowest::Stale;
    }

    /// The resident with the lowest score, after what `handicap` adds to those of its layer, that is
    /// not pinned; of equals, the first by key.
    pub(super) fn victim(
        &mut self,
        pinned: &dyn Fn(ExpertKey) -> bool,
        handicap: impl Fn(u32) -> f64,
    ) -> Option<ExpertKey> {
        let mut victim: Option<(f64, ExpertKey)> = None;
        for layer in 0..self.geometry.n_layers {
            let candidate = match self.lowest_of(layer) {
                // Pins come and go without a word, so what is found around them is not remembered.
                Some(key) if pinned(key) => self.find_lowest(layer, pinned),
                candidate => candidate,
            };
            let Some(key) = candidate else { continue };
            let score = self.score(key) + handicap(layer);
            if victim.is_none_or(|(lowest, _)| score < lowest) {
                victim = Some((score, key));
            }
        }
        victim.map(|(_, key)| key)
    }

    fn lowest_of(&mut self, layer: u32) -> Option<ExpertKey> {
        if let Lowest::Stale = self.lowest[layer as usize] {
            let found = self.find_lowest(layer, &|_| false);
            self.lowest[layer as usize] =
                found.map_or(Lowest::Absent, |k| Lowest::Expert(k.expert));
        }
        match self.lowest[layer as usize] {
            Lowest::Expert(expert) => Some(ExpertKey { layer, expert }),
            Lowest::Stale | Lowest::Absent => None,
        }
    }

    fn find_lowest(&self, layer: u32, pinned: &dyn Fn(ExpertKey) -> bool) -> Option<ExpertKey> {
        let range = self.geometry.layer_range(layer);
        let records = self.scores[range.clone()].iter().zip(&self.resident[range]);
        let mut lowest: Option<(f64, ExpertKey)> = None;
        for (expert, (&score, &resident)) in (0..).zip(records) {
            let key = ExpertKey { layer, expert };
            if resident && lowest.is_none_or(|(least, _)| score < least) && !pinned(key) {
                lowest = Some((score, key));
            }
        }
        lowest.map(|(_, key)| key)
    }
}
