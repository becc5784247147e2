//! Bytes on time within a budget. This crate sees keys, sizes and deadlines; it does not know what
//! the bytes mean.
//!
//! - [`ExpertCache`] delivers expert records; [`Readers`] read them from a [`Storage`], past the page
//!   cache if they can.
//! - [`policy`] decides which expert records stay in memory.
//! - [`Trace`] is recorded routing, and [`replay()`] judges a policy by it.
//! - [`Ledger`] holds everybody to the budget; [`machine`] says how large it may be, and when to give
//!   some of it back.
//! - [`WholeFile`] appears whole or not at all.

mod buffer;
mod cache;
mod error;
mod files;
mod key;
mod ledger;
pub mod machine;
mod place;
pub mod policy;
mod probe;
mod readers;
mod replay;
mod storage;
mod trace;

pub use buffer::{AlignedBuf, BUFFER_ALIGN};
pub use cache::{CacheCounters, CacheOptions, ExpertCache, FetchError, Occupancy, Records};
pub use error::StreamError;
pub use files::{Access, WholeFile, remove_leftovers, write_whole};
pub use key::{ExpertKey, Geometry};
pub use ledger::{Lease, Ledger, OverBudget};
pub use place::{Extent, Placement, Record};
pub use policy::Policy;
pub use probe::{DriveSpeed, MAX_PROBED_READERS, probe};
pub use readers::{Done, Priority, ReadOptions, ReadTotals, Readers, Ticket};
pub use replay::{Report, optimal, replay};
pub use storage::{DirectReads, Drive, FileSpec, Place, READ_ALIGN, ReadError, Storage};
pub use trace::Trace;
