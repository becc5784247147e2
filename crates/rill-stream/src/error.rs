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

    /// A recording of routing is not what it should be.
    #[error(
        "{file}: {what} should be {expected}, found {found}; record it again or name another file"
    )]
    Trace {
        /// The file.
        file: String,
        /// Which part of it.
        what: String,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },

    /// A directory, pipe or device where a file was expected.
    #[error("{} is not a regular file; name another", file.display())]
    NotAFile {
        /// The file.
        file: PathBuf,
    },

    /// A file larger than anything it could usefully hold.
    #[error("{} has more than the {max_bytes} bytes that make sense; check that it is the right file", file.display())]
    FileTooLarge {
        /// The file.
        file: PathBuf,
        /// The most that are accepted.
        max_bytes: u64,
    },

    /// A file is not the one that was checked.
    #[error(
        "{}: has {found} bytes, but had {expected} when it was checked; open the model again",
        file.display()
    )]
    Replaced {
        /// The file.
        file: PathBuf,
        /// Bytes it had.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },
    /// No threads to read with.
    #[error("cannot start reading threads: {source}; ask for fewer")]
    Threads {
        /// The operating system's reason.
        source: io::Error,
    },
    /// No memory for the cache.
    #[error("cannot have {buffers} buffers of {bytes} bytes for experts; ask for a smaller budget")]
    OutOfMemory {
        /// Buffers asked for.
        buffers: usize,
        /// Bytes of each.
        bytes: usize,
    },

    /// What was learned in earlier runs is damaged or about another model.
    #[error("{}: {what} should be {expected}, found {found}; it only spares reads, so go on without it or delete it", file.display())]
    Hint {
        /// The file.
        file: PathBuf,
        /// Which part of it.
        what: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
}
