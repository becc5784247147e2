//! Rill runs mixture-of-experts language models that are larger than memory.
//!
//! An [`Engine`] is a loaded model: immutable, shared, and independent of every other engine in
//! the process. A [`Session`] is one timeline of tokens: mutable and owned by its user.
//!
//! ```
//! use rill::{Engine, EngineOptions, Folder, GenerateOptions};
//!
//! # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
//! let folder = Folder::Disk("models/k3-nano".into());
//! let engine = Engine::open(folder, &EngineOptions::default())?;
//! let tokenizer = engine.open_tokenizer()?;
//! let prompt = tokenizer.encode_text("Once upon a time");
//! let mut session = engine.new_session();
//! let mut text = tokenizer.decoder();
//! let options = GenerateOptions { max_tokens: 20, ..GenerateOptions::default() };
//! for token in engine.generate(&mut session, &prompt, options)? {
//!     let token = token?;
//!     let bytes = tokenizer.token_bytes(token.id).unwrap_or_default();
//!     print!("{}", text.push(bytes));
//!     eprintln!(" ({:?}, {} bytes read)", token.step.pace().time, token.step.reads.bytes);
//! }
//! # assert!(session.position() > prompt.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Many requests share an engine through a [`Scheduler`]; a [`Log`] hears what is worth knowing. The
//! library prints nothing, handles no signals, and has no globals: two engines do not notice each other.
//!
//! # Versions
//!
//! Until 1.0 a minor version may change the interface, and a patch never does. Enumerations that are
//! `#[non_exhaustive]` may grow in a patch. The same tokens give the same bits in every version, unless
//! `docs/arithmetic.md` says which one changed them; files that a version wrote are read by later ones
//! or refused with both versions named.

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub mod config;

mod comparison;
mod compute;
mod counters;
mod describe;
mod engine;
mod error;
mod experts;
mod generate;
mod kda;
mod log;
mod mla;
mod moe;
mod perplexity;
pub mod plan;
mod prefix;
pub mod reference;
mod relief;
mod residual;
mod routing;
mod sampler;
mod saved;
mod scheduler;
mod session;
mod source;
mod step;
mod streamed;
mod trunk;
mod turns;
mod weights;

pub use comparison::Comparison;
pub use counters::{Bound, Pace, RunCounters};
pub use describe::{Description, FormatShare, describe};
pub use engine::{Engine, EngineOptions, KernelChoice, ModelSummary, open_tokenizer, read_config};
pub use error::{Error, ExpertError};
pub use experts::{Expert, ExpertId, ExpertSource, LayerIdx};
pub use generate::{FinishReason, GenerateOptions, Generation, Token};
pub use log::Log;
pub use perplexity::Perplexity;
pub use prefix::PrefixDisk;
pub use rill_format::{Checkpoint, Folder, FormatError};
pub use rill_kernels::LatentFormat;
pub use rill_stream::machine::Pressure;
pub use rill_stream::policy::Learned;
pub use rill_stream::{
    CacheCounters, DirectReads, Occupancy, ReadError, ReadTotals, Storage, StreamError, Trace,
};
pub use rill_text::{StopMatcher, StopStep, TextError, Tokenizer, Utf8Stream, chat};
pub use routing::{ForcedRouting, RoutingRecorder};
pub use sampler::{Logprobs, Sampler, SamplerState, Sampling, TokenFilter, likelier_first};
pub use saved::read_session_note;
pub use scheduler::{
    Answer, Canceller, Ended, Event, Prefix, Request, RequestStatistics, Scheduler,
    SchedulerOptions,
};
pub use session::{Session, Snapshot};
pub use step::{Logits, Observer, Part};
pub use streamed::{CachePolicy, DriveReport};
pub use trunk::TrunkCounters;
