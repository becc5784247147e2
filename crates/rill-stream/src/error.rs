//! Everything that can go wrong with files that this crate reads and writes, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Why a record, a trace or a hint could not be read or written.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The operating system refused.
    #[error("{}: {doing} failed: {source}; check permissions and the disk, then try again", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What was attempted.
        doing: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },
}
