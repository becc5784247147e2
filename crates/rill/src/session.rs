//! One timeline of tokens.

use std::sync::Arc;

use rill_stream::{Lease, Ledger, OverBudget};

use crate::config::{AttentionKind, ModelConfig};
use crate::plan::Plan;

/// The state of one conversation: mutable, owned, and useful only with the engine that made it.
///
/// Its memory is counted from its first step on: the step of a session that finds no room in the
/// budget is refused. A clone is counted anew.
#[derive(Debug)]
pub struct Session {
    /// Identity of the engine's configuration, so that a foreign session is noticed.
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) position: usize,
    pub(crate) layers: Vec<LayerState>,
    /// The recurrent part as it was before the step under way.
    saved: Vec<KdaState>,
    /// Of its whole context; empty before the first step.
    leases: Vec<Lease>,
}

impl Clone for Session {
    fn clone(&self) -> Self {
        Self {
            config: self.config.clone(),
            position: self.position,
            layers: self.layers.clone(),
            saved: self.saved.clone(),
            leases: Vec::new(),
        }
    }
}

/// What a layer remembers.
#[derive(Clone, Debug)]
pub(crate) enum LayerState {
    Kda(KdaState),
    Mla(MlaState),
}

/// A KDA layer's state; its size does not depend on the position.
#[derive(Clone, Debug, Default)]
pub(crate) struct KdaState {
    /// (heads, head_dim of keys, head_dim of values)
    pub(crate) heads: Vec<f32>,
    /// Previous inputs of the q, k and v convolutions, (kernel − 1, P) each, oldest first.
    pub(crate) conv: [Vec<f32>; 3],
}

/// An MLA layer's cache.
#[derive(Clone, Debug, Default)]
pub(crate) struct MlaState {
    /// (positions, kv_lora + rope): latent, then the shared key part.
    pub(crate) cache: Vec<f32>,
}

impl Session {
    pub(crate) fn new(config: Arc<ModelConfig>) -> Self {
        let kda = config.kda;
        let p = kda.n_heads * kda.head_dim;
        let layers = config.layers.iter().map(|layer| match layer.attention {
            AttentionKind::Kda => LayerState::Kda(KdaState {
                heads: vec![0.0; p * kda.head_dim],
                conv: [(); 3].map(|()| vec![0.0; (kda.conv_kernel_size - 1) * p]),
            }),
            AttentionKind::Mla => LayerState::Mla(MlaState::default()),
        });
        Self {
            layers: layers.collect(),
            config,
            position: 0,
            saved: Vec::new(),
            leases: Vec::new(),
        }
    }

    /// Takes its part of the budget, once.
    pub(crate) fn admit(&mut self, ledger: &Ledger, plan: &Plan) -> Result<(), OverBudget> {
        if self.leases.is_empty() {
            let leases = plan.session_lines().map(|(purpose, bytes)| ledger.lease(purpose, bytes));
            self.leases = leases.collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    /// Tokens seen so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The recurrent state of a KDA layer, (heads, head_dim, head_dim) with keys before values;
    /// `None` for a full-attention layer or one that does not exist.
    pub fn kda_state(&self, layer: usize) -> Option<&[f32]> {
        match self.layers.get(layer)? {
            LayerState::Kda(state) => Some(&state.heads),
            LayerState::Mla(_) => None,
        }
    }

    /// Bytes a fresh session takes, before any position is cached.
    pub(crate) fn recurrent_bytes(config: &ModelConfig) -> u64 {
        let kda = config.kda;
        let p = kda.n_heads * kda.head_dim;
        let layers = config.layers.iter().filter(|l| l.attention == AttentionKind::Kda).count();
        // Twice: the state and its copy for going back.
        (2 * 4 * layers * (p * kda.head_dim + 3 * (kda.conv_kernel_size - 1) * p)) as u64
    }

    /// Remembers the present state, to go back to if the next step fails.
    pub(crate) fn save(&mut self) {
        let recurrent = self.layers.iter().filter_map(|layer| match layer {
            LayerState::Kda(state) => Some(state),
            LayerState::Mla(_) => None,
        });
        if self.saved.is_empty() {
            self.saved = recurrent.cloned().collect();
        } else {
            for (saved, state) in self.saved.iter_mut().zip(recurrent) {
                saved.heads.copy_from_slice(&state.heads);
                for (saved, conv) in saved.conv.iter_mut().zip(&state.conv) {
                    saved.copy_from_slice(conv);
                }
            }
        }
    }

    /// Goes back to what [`save`](Self::save) remembered.
    pub(crate) fn roll_back(&mut self) {
        let width = self.config.mla.kv_lora_rank + self.config.mla.qk_rope_head_dim;
        let mut saved = self.saved.iter();
        for layer in &mut self.layers {
            match layer {
                LayerState::Kda(state) => {
                    state.clone_from(saved.next().expect("saved before every step"));
                }
                LayerState::Mla(state) => state.cache.truncate(self.position * width),
            }
        }
    }
}
