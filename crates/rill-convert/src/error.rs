//! What can go wrong while converting.

use std::io;

use rill_format::FormatError;
use rill_kernels::{EncodeError, LayoutError};

/// Why a conversion cannot start or go on.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source cannot be read.
    #[error(transparent)]
    Source(#[from] FormatError),

    /// A tensor of the source is not what a conversion can take.
    #[error("{tensor}: {reason}")]
    Tensor {
        /// Tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },

    /// A configuration that says too little, or what no model can be.
    #[error("config.json: {field}: expected {expected}, found {found}; correct it")]
    Config {
        /// Key.
        field: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },

    /// Weights that the chosen format cannot express.
    #[error("{tensor}, row {row}: {source}; choose another format for it")]
    Encode {
        /// Tensor.
        tensor: String,
        /// Output row.
        row: u64,
        /// What is wrong.
        source: EncodeError,
    },

    /// A shape that the chosen format cannot have, or damaged source bytes.
    #[error("{tensor}: {source}")]
    Layout {
        /// Tensor.
        tensor: String,
        /// What is wrong.
        source: LayoutError,
    },

    /// The destination cannot be written.
    #[error("{file}: {doing} failed: {source}{}", advice(source))]
    Io {
        /// The file.
        file: String,
        /// What was attempted.
        doing: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },

    /// A synthetic container cannot be written to its end.
    #[error(
        "{file}: {doing} failed: {source}; check the disk and permissions, remove {folder} and run \
         it again from the start"
    )]
    Synth {
        /// The destination.
        folder: String,
        /// The file.
        file: String,
        /// What was attempted.
        doing: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },

    /// The disk is too small.
    #[error(
        "{folder} has {available_bytes} bytes free and the container needs {needed_bytes} more; \
         free some, or choose another folder or smaller formats"
    )]
    NoSpace {
        /// The destination.
        folder: String,
        /// Bytes still to be written.
        needed_bytes: u64,
        /// Bytes free.
        available_bytes: u64,
    },

    /// A folder that records cannot be spread over.
    #[error("{folder}: {reason}")]
    Placement {
        /// The folder.
        folder: String,
        /// What is wrong with it.
        reason: String,
    },

    /// The destination is the source, or inside it.
    #[error(
        "{folder} is in the source's own folder {source_folder}, which is never written to; name \
         another folder"
    )]
    InSource {
        /// The destination.
        folder: String,
        /// The source's folder.
        source_folder: String,
    },

    /// The destination holds a finished container.
    #[error("{folder} is a container already; name another folder, or remove it first")]
    Exists {
        /// The destination.
        folder: String,
    },

    /// The destination holds something else.
    #[error("{folder} is not empty and no conversion was begun there; name another folder")]
    NotEmpty {
        /// The destination.
        folder: String,
    },

    /// The destination holds the beginning of another conversion.
    #[error(
        "{folder} holds the beginning of a conversion of another source or with other options; \
         run it with those, or remove the folder"
    )]
    OtherPlan {
        /// The destination.
        folder: String,
    },

    /// Another process is at work there.
    #[error("another conversion is writing to {folder}; wait for it")]
    Busy {
        /// The destination.
        folder: String,
    },

    /// The caller asked to stop; what has been written is kept.
    #[error("stopped on request; run it again to go on")]
    Cancelled,
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => {
            "; free some space and run it again, it goes on where it stopped"
        }
        _ => "; check the disk and permissions, then run it again: it goes on where it stopped",
    }
}
