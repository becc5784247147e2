//! Bytes on time within a budget. This crate sees keys, sizes and deadlines; it does not know what
//! the bytes mean.
//!
//! [`policy`] decides which expert records stay in memory.

mod error;
mod key;
pub mod policy;

pub use error::StreamError;
pub use key::{ExpertKey, Geometry};
pub use policy::Policy;
