//! Routing that is recorded, and routing that is played back.

use std::sync::Arc;

use rill_stream::{Geometry, StreamError, Trace};

use crate::config::ModelConfig;
use crate::experts::{LayerIdx, moe_layers};
use crate::step::Observer;

/// Notes which experts every token uses.
#[derive(Clone, Debug)]
pub struct RoutingRecorder {
    geometry: Geometry,
    top_k: usize,
    ranks: Vec<Option<usize>>,
    /// Of each mixture layer, (tokens, top_k).
    ids: Vec<Vec<u16>>,
}

impl RoutingRecorder {
    /// For one session of a model.
    pub fn new(config: &ModelConfig) -> Self {
        let geometry = geometry(config);
        Self {
            geometry,
            top_k: config.moe.top_k,
            ranks: ranks(config),
            ids: vec![Vec::new(); geometry.n_layers as usize],
        }
    }

    /// What has been noted, up to the last token that has been through all layers.
    ///
    /// # Errors
    /// When that is nothing, or the model is too large for a recording.
    pub fn trace(&self) -> Result<Trace, StreamError> {
        let n_tokens = self.ids.iter().map(|ids| ids.len() / self.top_k).min().unwrap_or(0);
        let mut ids = Vec::with_capacity(n_tokens * self.ids.len() * self.top_k);
        for token in 0..n_tokens {
            for layer in &self.ids {
                ids.extend_from_slice(&layer[token * self.top_k..][..self.top_k]);
            }
        }
        Trace::new("the recording", self.geometry, self.top_k, ids)
    }
}

impl Observer for RoutingRecorder {
    fn routed(&mut self, layer: LayerIdx, ids: &[u32], _weights: &[f32]) {
        if let Some(rank) = self.ranks[layer.0] {
            // A trace has no larger ids, and refuses a model that has.
            self.ids[rank].extend(ids.iter().map(|&id| id as u16));
        }
    }
}

/// Has tokens use the experts of a recording instead of their own: reads are then those of the
/// recorded text, whatever the weights are. Answers are nonsense.
///
/// Token n gets what the n-th recorded token used, from the beginning again after the last. Layers
/// that the recording lacks get those of its first ones.
#[derive(Clone, Debug)]
pub struct ForcedRouting {
    trace: Arc<Trace>,
    /// Token of the recording that the first one gets.
    start: usize,
    ranks: Vec<Option<usize>>,
    /// Of each mixture layer, tokens that have been through it.
    seen: Vec<usize>,
}

impl ForcedRouting {
    /// For one session of a model.
    ///
    /// # Errors
    /// When the model has another number of experts, or uses another number of them.
    pub fn new(trace: Arc<Trace>, config: &ModelConfig) -> Result<Self, StreamError> {
        let wrong = |what: &str, expected: usize, found: usize| StreamError::Trace {
            file: "the routing".to_owned(),
            what: what.to_owned(),
            expected: format!("{expected}, as the model has"),
            found: found.to_string(),
        };
        let n_experts = trace.geometry().n_experts as usize;
        if n_experts != config.moe.n_experts {
            return Err(wrong("number of experts", config.moe.n_experts, n_experts));
        }
        if trace.top_k() != config.moe.top_k {
            return Err(wrong("experts per choice", config.moe.top_k, trace.top_k()));
        }
        let n_layers = geometry(config).n_layers as usize;
        Ok(Self { trace, start: 0, ranks: ranks(config), seen: vec![0; n_layers] })
    }

    /// The same from another token of the recording on.
    pub fn starting_at(self, token: usize) -> Self {
        Self { start: token, ..self }
    }
}

impl Observer for ForcedRouting {
    fn choose(&mut self, layer: LayerIdx, ids: &mut [u32]) {
        let Some(rank) = self.ranks[layer.0] else { return };
        let token = (self.start + self.seen[rank]) % self.trace.n_tokens();
        self.seen[rank] += 1;
        let chosen = self.trace.chosen(token, rank as u32 % self.trace.geometry().n_layers);
        for (id, &chosen) in ids.iter_mut().zip(chosen) {
            *id = chosen.into();
        }
        ids.sort_unstable();
    }
}

/// Mixture layers, and experts of each.
pub(crate) fn geometry(config: &ModelConfig) -> Geometry {
    let n_layers = moe_layers(config).count() as u32;
    Geometry { n_layers, n_experts: config.moe.n_experts as u32 }
}

/// Of each layer, its place among those with experts.
fn ranks(config: &ModelConfig) -> Vec<Option<usize>> {
    let mut ranks = vec![None; config.layers.len()];
    for (rank, layer) in moe_layers(config).enumerate() {
        ranks[layer] = Some(rank);
    }
    ranks
}
