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

    /// A file that may not be deleted.
    #[error(
        "{file} {reason}, so it is not deleted while it is converted; convert without --reclaim, or \
         give the checkpoint a folder of its own"
    )]
    NotReclaimable {
        /// The shard or the folder.
        file: String,
        /// Why not.
        reason: &'static str,
    },

    /// Nothing shows that a shard is as published, and it was to be deleted.
    #[error(
        "{shard} has no published SHA-256 to be compared with before it is deleted; download it with \
         the Hugging Face client, put a SHA256SUMS file beside it, or say --trust-source"
    )]
    Unverified {
        /// The shard.
        shard: String,
    },

    /// A shard that is not as published.
    #[error(
        "{shard} has SHA-256 {found}, and {expected} as published; it is not deleted, download it \
         again and run the conversion again"
    )]
    WrongShard {
        /// The shard.
        shard: String,
        /// As published.
        expected: String,
        /// As it is.
        found: String,
    },

    /// A shard that was written to while it was converted.
    #[error(
        "{shard} has changed while it was converted and is not deleted; run the conversion again, it \
         makes anew what was made from it"
    )]
    ShardChanged {
        /// The shard.
        shard: String,
    },

    /// What was written is not what is read.
    #[error(
        "{folder}: {what} does not read back as it was written, so {shard} is not deleted; check the \
         disk and run the conversion again, it makes this anew"
    )]
    ReadBack {
        /// The destination.
        folder: String,
        /// Run or record.
        what: String,
        /// A shard it was made from.
        shard: String,
    },

    /// The kept headers of deleted shards cannot be read.
    #[error(
        "{file} is damaged at byte {byte}, and shards that it describes have been deleted; download \
         those again, remove {file} and run the conversion again"
    )]
    Headers {
        /// The file.
        file: String,
        /// Where.
        byte: u64,
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
