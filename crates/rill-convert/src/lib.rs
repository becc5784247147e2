//! Published checkpoints, or `.rill` and `.waste` containers, to `.rill` containers.
//!
//! [`Plan::new`] decides from headers alone what goes where and how large it gets; [`convert`]
//! carries a plan out. A conversion can be killed at any moment and run again: it goes on where
//! it stopped and ends with the same bytes, on any number of threads. The manifest is written
//! last and makes the folder a container.

mod banks;
mod config;
mod convert;
mod disk;
mod error;
mod layers;
mod note;
mod place;
mod plan;
mod quality;
mod reclaim;
mod sample;
mod source;
mod synth;
mod trellis;
mod verify;
mod waste;

pub use convert::{Control, Progress, convert, convert_and_reclaim, deletions};
pub use error::ConvertError;
pub use layers::FirstLayers;
pub use plan::{ExpertCodec, Plan, TRELLIS_WIDTH, TrunkCodec};
pub use quality::Quality;
pub use reclaim::{Deletion, Reclaim, Reclaimed, open_checkpoint};
pub use sample::LayerError;
pub use source::{ConvertSource, SourceExperts, SourceTensor, StoredBytes};
pub use synth::{Synth, SynthFormat, SynthModel, SynthOptions, synthetic_mxfp4z};
pub use verify::{WeightError, differing_files, verify, weight_errors};
