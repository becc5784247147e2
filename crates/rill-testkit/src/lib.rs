//! Test material for the other crates: the tensor lists of the published models, checkpoints that
//! have headers but no weights, hand-made shards, and an allocator that remembers its peak.
//!
//! The lists are written from the description of the models, not from the engine's weight binder,
//! because they are what the binder is tested against. A development dependency: it panics on bad
//! arguments instead of returning errors.

mod alloc;
mod models;
mod write;

pub use alloc::PeakAlloc;
pub use models::{Dtype, Tensor, kimi_k3_tensors, kimi_linear_tensors, tensors};
pub use write::{
    HeaderOnly, shard_bytes, write_checkpoint, write_header_only, write_uneven_experts,
};
