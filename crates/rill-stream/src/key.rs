//! Names of expert records.

/// One expert of one layer: the record that a cache keeps or fetches. Ordered by layer, then expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertKey {
    /// Index among the layers that have experts, in the order they run.
    pub layer: u32,
    /// Index among the layer's experts.
    pub expert: u32,
}

/// How many expert records a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Layers that have experts.
    pub n_layers: u32,
    /// Experts of each of them.
    pub n_experts: u32,
}

impl Geometry {
    /// Records in all.
    #[must_use]
    pub fn n_records(self) -> usize {
        self.n_layers as usize * self.n_experts as usize
    }
}
