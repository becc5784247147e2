//! One timeline of tokens.

use std::sync::Arc;

use rill_kernels::{LatentCache, LatentFormat};
use rill_stream::{Lease, Ledger};

use crate::config::{AttentionKind, ModelConfig};
use crate::counters::RunCounters;
use crate::error::Error;
use crate::plan::SNAPSHOTS;

/// The state of one conversation: mutable, owned, and useful only with the engine that made it.
///
/// Its memory is counted from its first step on: the step of a session that finds no room in the
/// budget is refused.
///
/// K3's attention residuals run over layers, within a token, so nothing of them outlives a step.
///
/// ```
/// # use rill::{Engine, EngineOptions, Folder, Logits};
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
/// let options = EngineOptions { sessions: 2, ..EngineOptions::default() };
/// let engine = Engine::open(Folder::Disk("models/k3-nano".into()), &options)?;
/// let mut session = engine.new_session();
/// engine.forward(&mut session, &[5, 77, 3], Logits::None)?;
/// // Both go on from here, and neither sees the other.
/// let mut fork = session.fork()?;
/// engine.forward(&mut session, &[300], Logits::None)?;
/// engine.forward(&mut fork, &[12], Logits::None)?;
/// assert_eq!((session.tokens(), fork.tokens()), (&[5, 77, 3, 300][..], &[5, 77, 3, 12][..]));
/// // A file goes on where the session was, in this process or another.
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("talk");
/// engine.save_session(&fork, &path, "a note")?;
/// # drop(session);
/// let (loaded, note) = engine.load_session(&path)?;
/// assert_eq!((loaded.tokens(), note.as_str()), (fork.tokens(), "a note"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Session {
    home: Arc<Home>,
    /// What it has seen.
    tokens: Vec<u32>,
    pub(crate) layers: Vec<LayerState>,
    last_step: Arc<RunCounters>,
    /// Of its whole context; empty before the first step.
    leases: Vec<Lease>,
}

/// A session's state at some moment, unchanging: sessions can go back to it, or start from it.
///
/// It takes half of the recurrent memory of a session, and of the latent cache what its tokens take.
#[derive(Debug)]
pub struct Snapshot {
    home: Arc<Home>,
    tokens: Vec<u32>,
    pub(crate) layers: Vec<LayerState>,
    lease: Lease,
}

/// What all sessions of an engine have in common; also its identity, so that a foreign session is
/// noticed.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) ledger: Ledger,
    pub(crate) latents: LatentFormat,
    /// Purposes and bytes of what a session leases.
    pub(crate) lines: Vec<(&'static str, u64)>,
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
    /// After the last whole token.
    pub(crate) now: Recurrent,
    /// What a step writes; empty before the first. Keeping the two apart costs no copying: a step
    /// reads the one and writes the other.
    pub(crate) next: Recurrent,
}

/// What is carried from token to token.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recurrent {
    /// (heads, head_dim of keys, head_dim of values)
    pub(crate) heads: Vec<f32>,
    /// Previous inputs of the q, k and v convolutions, (kernel − 1, P) each, oldest first.
    pub(crate) conv: [Vec<f32>; 3],
}

/// An MLA layer's cache.
#[derive(Clone, Debug)]
pub(crate) struct MlaState {
    /// (positions, kv_lora + rope): latent, then the shared key part.
    pub(crate) cache: LatentCache,
}

impl Session {
    pub(crate) fn new(home: Arc<Home>) -> Self {
        let config = &home.config;
        let layers = config.layers.iter().map(|layer| match layer.attention {
            AttentionKind::Kda => LayerState::Kda(KdaState {
                now: Recurrent::new(config),
                next: Recurrent::default(),
            }),
            AttentionKind::Mla => {
                LayerState::Mla(MlaState { cache: LatentCache::new(home.latents) })
            }
        });
        Self {
            layers: layers.collect(),
            tokens: Vec::new(),
            last_step: Arc::default(),
            leases: Vec::new(),
            home,
        }
    }

    /// Tokens seen so far.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens seen so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// What its last step took, for all sessions that took part; nothing before the first.
    pub fn last_step(&self) -> &Arc<RunCounters> {
        &self.last_step
    }

    /// The recurrent state of a KDA layer, (heads, head_dim, head_dim) with keys before values;
    /// `None` for a full-attention layer or one that does not exist.
    pub fn kda_state(&self, layer: usize) -> Option<&[f32]> {
        match self.layers.get(layer)? {
            LayerState::Kda(state) => Some(&state.now.heads),
            LayerState::Mla(_) => None,
        }
    }

    /// A second session at the same position, which goes its own way from here.
    ///
    /// # Errors
    /// [`Error::OverBudget`] when there is no room for it.
    pub fn fork(&self) -> Result<Session, Error> {
        let mut fork = Session::new(self.home.clone());
        if !self.leases.is_empty() {
            fork.admit()?;
        }
        fork.copy_from(&self.tokens, &self.layers);
        Ok(fork)
    }

    /// Its present state, to go back to.
    ///
    /// # Errors
    /// [`Error::OverBudget`] when there is no room for it.
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        let lease = self.home.ledger.lease(SNAPSHOTS, self.snapshot_bytes())?;
        let layers = self.layers.iter().map(LayerState::at_rest).collect();
        Ok(Snapshot { home: self.home.clone(), tokens: self.tokens.clone(), layers, lease })
    }

    /// Bytes that a snapshot of its present state takes.
    pub fn snapshot_bytes(&self) -> u64 {
        self.layers.iter().map(LayerState::bytes).sum()
    }

    /// Goes to a snapshot, which may be of another session of the same engine.
    ///
    /// # Errors
    /// [`Error::ForeignSession`] when it is of another engine, [`Error::OverBudget`] when this session
    /// has taken no step yet and there is no room for it.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), Error> {
        if !Arc::ptr_eq(&self.home, &snapshot.home) {
            return Err(Error::ForeignSession);
        }
        self.admit()?;
        self.copy_from(&snapshot.tokens, &snapshot.layers);
        Ok(())
    }

    fn copy_from(&mut self, tokens: &[u32], layers: &[LayerState]) {
        for (own, other) in self.layers.iter_mut().zip(layers) {
            match (own, other) {
                (LayerState::Kda(own), LayerState::Kda(other)) => own.now.clone_from(&other.now),
                // All of it: after an observer's changes, latents of the same tokens may differ.
                (LayerState::Mla(own), LayerState::Mla(other)) => {
                    own.cache.clone_from(&other.cache)
                }
                _ => unreachable!("both are made from one list of layers"),
            }
        }
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
    }

    pub(crate) fn belongs_to(&self, home: &Arc<Home>) -> bool {
        Arc::ptr_eq(&self.home, home)
    }

    /// Takes its part of the budget, once.
    pub(crate) fn admit(&mut self) -> Result<(), Error> {
        if self.leases.is_empty() {
            let lines = self.home.lines.iter();
            let leases = lines.map(|&(purpose, bytes)| self.home.ledger.lease(purpose, bytes));
            self.leases = leases.collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    /// Bytes a fresh session takes, before any position is cached.
    pub(crate) fn recurrent_bytes(config: &ModelConfig) -> u64 {
        let layers = config.layers.iter().filter(|l| l.attention == AttentionKind::Kda).count();
        let state = 4 * (Recurrent::head_values(config) + 3 * Recurrent::conv_values(config));
        // Twice: what a step reads and what it writes.
        (2 * layers * state) as u64
    }

    /// Makes room for what a file holds of a session with so many tokens, where a step would write it.
    pub(crate) fn resize(&mut self, tokens: usize) {
        let home = &self.home;
        let width = home.config.mla.kv_lora_rank + home.config.mla.qk_rope_head_dim;
        for layer in &mut self.layers {
            match layer {
                LayerState::Kda(state) => state.next = Recurrent::new(&home.config),
                LayerState::Mla(state) => {
                    state.cache = LatentCache::zeros(home.latents, tokens * width)
                }
            }
        }
    }

    /// A step that took `step` has ended well: what it wrote counts from now on.
    pub(crate) fn commit(&mut self, tokens: &[u32], step: Arc<RunCounters>) {
        self.last_step = step;
        for layer in &mut self.layers {
            if let LayerState::Kda(state) = layer {
                std::mem::swap(&mut state.now, &mut state.next);
            }
        }
        self.tokens.extend_from_slice(tokens);
    }

    /// A step has failed or was stopped: the session is where it was.
    pub(crate) fn roll_back(&mut self) {
        let width = self.home.config.mla.kv_lora_rank + self.home.config.mla.qk_rope_head_dim;
        let positions = self.tokens.len();
        for layer in &mut self.layers {
            if let LayerState::Mla(state) = layer {
                state.cache.truncate(positions * width);
            }
        }
    }
}

impl Snapshot {
    /// Tokens it has seen.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> u64 {
        self.lease.bytes()
    }
}

impl LayerState {
    pub(crate) fn kda(&mut self) -> &mut KdaState {
        match self {
            Self::Kda(state) => state,
            Self::Mla(_) => unreachable!("weights and state are made from one list of layers"),
        }
    }

    pub(crate) fn mla(&mut self) -> &mut MlaState {
        match self {
            Self::Mla(state) => state,
            Self::Kda(_) => unreachable!("weights and state are made from one list of layers"),
        }
    }

    /// A copy without what only a step needs.
    fn at_rest(&self) -> Self {
        match self {
            Self::Kda(state) => {
                Self::Kda(KdaState { now: state.now.clone(), next: Recurrent::default() })
            }
            Self::Mla(state) => Self::Mla(state.clone()),
        }
    }

    /// Bytes of such a copy.
    fn bytes(&self) -> u64 {
        let bytes = match self {
            Self::Kda(state) => {
                4 * (state.now.heads.len() + state.now.conv.iter().map(Vec::len).sum::<usize>())
            }
            Self::Mla(state) => state.cache.len() * state.cache.format().bytes(),
        };
        bytes as u64
    }
}

impl Recurrent {
    fn new(config: &ModelConfig) -> Self {
        Self {
            heads: vec![0.0; Self::head_values(config)],
            conv: [(); 3].map(|()| vec![0.0; Self::conv_values(config)]),
        }
    }

    fn head_values(config: &ModelConfig) -> usize {
        config.kda.n_heads * config.kda.head_dim * config.kda.head_dim
    }

    fn conv_values(config: &ModelConfig) -> usize {
        (config.kda.conv_kernel_size - 1) * config.kda.n_heads * config.kda.head_dim
    }
}
