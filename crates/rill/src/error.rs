//! What can go wrong in the engine.

use std::path::PathBuf;
use std::sync::Arc;

use rill_format::FormatError;
use rill_kernels::{LayoutError, NoSuchKernels, PoolError};
use rill_stream::{OverBudget, ReadError, StreamError};
use rill_text::TextError;

use crate::config::ConfigError;
use crate::experts::{ExpertId, LayerIdx};
use crate::plan::Plan;

/// Why the engine could not open a model or take a step.
///
/// A failed step leaves its session at the last whole token; see [`Engine::forward`].
///
/// [`Engine::forward`]: crate::Engine::forward
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `config.json` is not the configuration of a model that can be run.
    #[error("{file}: {source}")]
    Config {
        /// Where the file is.
        file: String,
        /// All that is wrong with it.
        source: ConfigError,
    },

    /// `generation_config.json` is there but cannot be understood.
    #[error(
        "{file}: {reason}; eos_token_id must be a token id or a list of them. Correct the file or \
         remove it"
    )]
    GenerationConfig {
        /// Where the file is.
        file: String,
        /// What the parser said.
        reason: String,
    },

    /// A file of the checkpoint is missing, damaged or unreadable.
    #[error(transparent)]
    Format(#[from] FormatError),

    /// A file cannot be streamed from.
    #[error(transparent)]
    Stream(#[from] StreamError),

    /// A tokenizer file is damaged, or ids are not in the vocabulary.
    #[error(transparent)]
    Text(#[from] TextError),

    /// The checkpoint's tensors are not those its configuration promises.
    #[error(
        "the tensors in {folder} do not fit its config.json:\n  {}\n\
         The configuration and the weights must come from the same release; fetch both again.",
        problems.join("\n  ")
    )]
    Binding {
        /// Where the checkpoint is.
        folder: String,
        /// One line for each tensor, the first [`MAX_PROBLEMS`](Self::MAX_PROBLEMS) of them.
        problems: Vec<String>,
    },

    /// A tensor of the trunk is not a valid matrix.
    #[error("{tensor}: {source}; the file is damaged, fetch or convert it again")]
    Layout {
        /// Tensor.
        tensor: String,
        /// What is wrong.
        source: LayoutError,
    },

    /// Weights that every token needs did not come, or are not what they should be.
    #[error("{what}: {source}")]
    Trunk {
        /// Layer, or part of the head.
        what: String,
        /// What is wrong.
        source: Arc<ReadError>,
    },

    /// The system gave no memory that the plan had room for.
    #[error("no memory for {bytes} bytes of weights; choose a smaller budget")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },

    /// The bytes of a routed expert are not what they should be.
    #[error("expert {expert} of layer {layer}: {source}")]
    Expert {
        /// Layer.
        layer: LayerIdx,
        /// Expert.
        expert: ExpertId,
        /// What is wrong.
        source: Box<ExpertError>,
    },

    /// An observer chose experts that cannot be.
    #[error(
        "experts {ids:?} were chosen for layer {layer}; an observer must leave ids ascending and \
         below the number of experts"
    )]
    Routing {
        /// Layer.
        layer: LayerIdx,
        /// What was chosen.
        ids: Vec<u32>,
    },

    /// The memory budget is below the least that works.
    #[error(
        "a memory budget of {} bytes is below the floor of {} bytes; this is the least there is:\n\
         {plan}raise the budget, or ask for a shorter context",
        plan.options.budget_bytes,
        plan.floor_bytes
    )]
    BelowFloor {
        /// The plan of the floor, with the budget that was asked for.
        plan: Box<Plan>,
    },

    /// The budget has no room for another session, or for the logits that were asked for.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),

    /// A token id outside the vocabulary.
    #[error("token {token} at position {position} is not below the vocabulary size {vocab_size}")]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Its index among the tokens given.
        position: usize,
        /// Ids are below this.
        vocab_size: usize,
    },

    /// There is nothing to run.
    #[error("the prompt has no tokens; give at least one")]
    EmptyPrompt,

    /// The context is longer than the model was made for.
    #[error(
        "{positions} tokens do not fit a context of {max_positions}; shorten the prompt, or open the \
         model with a longer context (--ctx) if it was made for one"
    )]
    ContextFull {
        /// Tokens there would be.
        positions: usize,
        /// `max_position_embeddings`.
        max_positions: usize,
    },

    /// A session's file is not what it should be.
    #[error(
        "{}: {what} should be {expected}, found {found}; it can be loaded only whole, with the model, the \
         format of latents and the version of Rill that wrote it",
        file.display()
    )]
    SessionFile {
        /// The file.
        file: PathBuf,
        /// What of it.
        what: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },

    /// As many requests wait as may.
    #[error("{waiting} requests are waiting already; try again later, or allow a longer queue")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
    },

    /// A scheduler's options outside their range.
    #[error("{parameter} is {found}; it must be {expected}")]
    Scheduling {
        /// Which parameter.
        parameter: &'static str,
        /// What it was.
        found: f64,
        /// Its range.
        expected: &'static str,
    },

    /// The system gave no thread to take steps with, or to write beginnings of conversations.
    #[error("cannot start a thread of the scheduler: {reason}")]
    SchedulerThread {
        /// What it said.
        reason: String,
    },

    /// Code that the caller gave a request panicked; other requests go on.
    #[error(
        "the {what} of this request panicked; what it printed tells where, mend it and ask again"
    )]
    Panicked {
        /// What it was.
        what: &'static str,
    },

    /// The thread that takes steps has broken down; this is a fault of the program.
    #[error("the scheduler has broken down; open the model again, and report what it printed")]
    SchedulerGone,

    /// More tokens than there is memory for in one step.
    #[error(
        "{tokens} tokens in one step are more than the {most} that the budget has room for; take several steps"
    )]
    StepTooLarge {
        /// Tokens of all its sessions together.
        tokens: usize,
        /// Most tokens of a step.
        most: usize,
    },

    /// A session or snapshot was given to an engine that did not make it.
    #[error("the session belongs to another engine; use the engine that made it")]
    ForeignSession,

    /// Sampling parameters outside their range.
    #[error("{parameter} is {found}; it must be {expected}")]
    Sampling {
        /// Which parameter.
        parameter: &'static str,
        /// What it was.
        found: f32,
        /// Its range.
        expected: &'static str,
    },

    /// Sampling parameters, or a sampler's state, of another vocabulary.
    #[error("{place} names token {token}, which is not below the vocabulary size {vocab_size}")]
    UnknownToken {
        /// Where it is named.
        place: &'static str,
        /// The id.
        token: u32,
        /// Ids are below this.
        vocab_size: usize,
    },

    /// Two models that cannot be compared.
    #[error(
        "this model has {found:?} layers, hidden values and tokens, the one to compare with {expected:?}; \
         compare a container with what it was made from"
    )]
    OtherModel {
        /// Layers, hidden size and vocabulary.
        found: [usize; 3],
        /// Those of the other model.
        expected: [usize; 3],
    },

    /// Text too short to compute a perplexity over.
    #[error("the text has {found} tokens; one window takes {needed}")]
    TextTooShort {
        /// Tokens of the text.
        found: usize,
        /// Tokens of one window.
        needed: usize,
    },

    /// Threads could not be started.
    #[error(transparent)]
    Threads(#[from] PoolError),

    /// Kernels were asked for that this machine has not.
    #[error(transparent)]
    Kernels(#[from] NoSuchKernels),

    /// The caller's observer asked to stop.
    #[error("stopped on request")]
    Cancelled,
}

impl Error {
    /// Most problems a [`Error::Binding`] lists.
    pub const MAX_PROBLEMS: usize = 20;
}

/// What is wrong with a routed expert.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ExpertError {
    /// It is not what it should be.
    #[error(transparent)]
    Read(#[from] FormatError),

    /// It did not come.
    #[error(transparent)]
    Stream(Arc<ReadError>),

    /// Its bytes are not a valid matrix.
    #[error("{file}: {tensor}: {source}; the file is damaged, fetch it again")]
    Layout {
        /// The file it is in, or the folder.
        file: String,
        /// Tensor.
        tensor: String,
        /// What is wrong.
        source: LayoutError,
    },

    /// The source of experts left it out.
    #[error("the source of experts did not deliver it")]
    Missing,

    /// The source of experts delivered matrices of another model.
    #[error("the source of experts delivered matrices that do not fit the model")]
    Shape,
}
