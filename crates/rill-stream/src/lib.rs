//! Bytes on time within a budget. This crate sees keys, sizes and deadlines; it does not know what
//! the bytes mean.
//!
//! - [`policy`] decides which expert records stay in memory.
//! - [`Trace`] is recorded routing, and [`replay()`] judges a policy by it.
//! - [`Ledger`] holds everybody to the budget.

mod error;
mod key;
mod ledger;
pub mod policy;
mod replay;
mod trace;

pub use error::StreamError;
pub use key::{ExpertKey, Geometry};
pub use ledger::{Lease, Ledger, OverBudget};
pub use policy::Policy;
pub use replay::{Report, optimal, replay};
pub use trace::Trace;
