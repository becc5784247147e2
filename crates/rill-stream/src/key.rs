//! Names of expert records.

use std::ops::Range;

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

    /// Where a record stands in an array of `(n_layers, n_experts)`.
    pub(crate) fn index(self, key: ExpertKey) -> usize {
        assert!(key.layer < self.n_layers && key.expert < self.n_experts, "{key:?}");
        key.layer as usize * self.n_experts as usize + key.expert as usize
    }

    /// Where a layer's records stand in an array of `(n_layers, n_experts)`.
    pub(crate) fn layer_range(self, layer: u32) -> Range<usize> {
        let start = layer as usize * self.n_experts as usize;
        start..start + self.n_experts as usize
    }
}
