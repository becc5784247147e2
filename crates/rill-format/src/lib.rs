//! Reads Hugging Face checkpoints (sharded safetensors with an index, or one file without),
//! `.rill` containers, and `.waste` containers of version 0.
//!
//! [`Checkpoint::open`] reads headers only and checks every byte of them; afterwards a tensor's
//! place in its file is known to be true, and reading it can fail only because the disk or the
//! file changed. The crate knows names, types, shapes and bytes, and nothing about what the
//! weights are for.

mod checkpoint;
pub mod container;
mod error;
mod extent;
mod folder;
mod header;
mod index;
mod read_at;
mod tensor;
mod waste;

pub use checkpoint::{Checkpoint, ShardHeader};
pub use error::FormatError;
pub use extent::{DataExtent, DataFile, DataPlace};
pub use folder::Folder;
pub use header::{HeaderEntry, parse_header};
pub use tensor::{Dtype, MAX_RANK, Shape, TensorId, TensorInfo};
pub use waste::{
    ExpertDims, Waste, WasteData, WasteExpert, WasteExperts, WasteFormat, WasteLayer,
    WasteManifest, WasteMatrix, WasteTensor, parse_waste_manifest,
};
