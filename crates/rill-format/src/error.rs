//! Everything that can be wrong with a checkpoint or a container, and what to do about it.

use std::io;

use crate::{Dtype, MAX_RANK};

/// Why a checkpoint or a container could not be opened or read.
///
/// `file` and `shard` say where to look: a path, or a name inside the built-in demo. Names that
/// come from the files are printed quoted and escaped.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// A `.rill` container is not what it says it is.
    #[error(
        "{file}: {what} should be {expected}, found {found}; the container is damaged or still \
         being written, convert or copy it again"
    )]
    Container {
        /// The file.
        file: String,
        /// Which field, record or run, and where.
        what: String,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },

    /// A `.rill` container of another version.
    #[error(
        "{file} is of a container of version {found}, and this program reads version {expected}; convert the \
         checkpoint again with this program{}",
        if found > &u64::from(*expected) { ", or use the newer one that wrote it" } else { "" }
    )]
    ContainerVersion {
        /// The manifest.
        file: String,
        /// The version that is read.
        expected: u32,
        /// The version as written.
        found: u64,
    },

    /// The folder has neither an index nor a lone shard.
    #[error(
        "{folder} holds neither model.safetensors.index.json nor model.safetensors; name the \
         folder a Hugging Face checkpoint was downloaded to"
    )]
    NoCheckpoint {
        /// The folder.
        folder: String,
    },

    /// A file that was asked for by name is absent.
    #[error("{file} does not exist; download the checkpoint again or name another folder")]
    MissingFile {
        /// The file.
        file: String,
    },

    /// A directory, pipe or device where a file was expected.
    #[error("{file} is not a regular file; replace it with the one from the checkpoint")]
    NotAFile {
        /// The file.
        file: String,
    },

    /// A file larger than anything it could usefully hold.
    #[error(
        "{file} has {found} bytes but at most {max_bytes} make sense; check that it is the \
         right file"
    )]
    FileTooLarge {
        /// The file.
        file: String,
        /// Its bytes.
        found: u64,
        /// The most that are accepted.
        max_bytes: u64,
    },

    /// The operating system refused.
    #[error("{file}: {doing} failed: {source}; check permissions and the disk, then try again")]
    Io {
        /// The file.
        file: String,
        /// What was attempted.
        doing: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },

    /// The index is not the JSON it should be.
    #[error("{index} is not a valid checkpoint index: {reason}; download it again")]
    BadIndex {
        /// The index file.
        index: String,
        /// What is wrong, with line and column.
        reason: String,
    },

    /// The index refers to a shard by something other than a plain file name.
    #[error(
        "{index} places tensor {tensor:?} in {shard:?}, which is not a plain file name; do not \
         use this checkpoint, its index reaches outside its folder"
    )]
    BadShardName {
        /// The index file.
        index: String,
        /// The first tensor placed there.
        tensor: String,
        /// The name as written.
        shard: String,
    },

    /// The index names a shard that the folder lacks.
    #[error(
        "{shard} does not exist, but {index} places tensor {tensor:?} in it; download the shard"
    )]
    MissingShard {
        /// The index file.
        index: String,
        /// The shard.
        shard: String,
        /// The first tensor placed there.
        tensor: String,
    },

    /// A shard that was deleted, or closed to be deleted, because it was no longer needed.
    #[error(
        "{shard} was deleted after it had been converted, and tensor {tensor:?} in it is needed \
         again; download the shard once more, then run the conversion again"
    )]
    ShardGone {
        /// The shard.
        shard: String,
        /// The tensor that was to be read.
        tensor: String,
    },

    /// The index names a tensor twice.
    #[error("{index} names tensor {tensor:?} twice; download the index again")]
    IndexedTwice {
        /// The index file.
        index: String,
        /// The tensor.
        tensor: String,
    },

    /// The index names a tensor that no shard holds.
    #[error(
        "{index} places tensor {tensor:?} in {shard}, which does not hold it; the two are from \
         different downloads, fetch both again"
    )]
    IndexedTensorMissing {
        /// The index file.
        index: String,
        /// The tensor.
        tensor: String,
        /// Where it should be.
        shard: String,
    },

    /// The index places a tensor in one shard and another holds it.
    #[error(
        "{index} places tensor {tensor:?} in {shard}, but {found} holds it; the index and the \
         shards are from different downloads, fetch them again"
    )]
    WrongShard {
        /// The index file.
        index: String,
        /// The tensor.
        tensor: String,
        /// Where it should be.
        shard: String,
        /// Where it is.
        found: String,
    },

    /// A shard holds a tensor that the index does not name.
    #[error(
        "{shard} holds tensor {tensor:?}, which {index} does not name; the two are from \
         different downloads, fetch both again"
    )]
    UnindexedTensor {
        /// The index file.
        index: String,
        /// The tensor.
        tensor: String,
        /// Where it is.
        shard: String,
    },

    /// A shard too short to hold its header.
    #[error(
        "{shard} is cut off: {expected} bytes are needed up to the end of its header and the \
         file has {found}; download it again"
    )]
    HeaderCutOff {
        /// The shard.
        shard: String,
        /// Bytes up to the end of the header.
        expected: u64,
        /// Bytes in the file.
        found: u64,
    },

    /// A header length beyond what the format allows.
    #[error(
        "{shard} claims a header of {found} bytes at byte 0, the format allows {max_bytes}; \
         this is not a safetensors file, download it again"
    )]
    HeaderTooLarge {
        /// The shard.
        shard: String,
        /// The claimed header length.
        found: u64,
        /// The format's bound.
        max_bytes: u64,
    },

    /// A header that is not the JSON it should be.
    #[error("the header of {shard} is not valid{}: {reason}; download the shard again", at(tensor))]
    BadHeader {
        /// The shard.
        shard: String,
        /// The last tensor whose name could be read.
        tensor: Option<String>,
        /// What is wrong, with line and column.
        reason: String,
    },

    /// A name longer than any real one.
    #[error(
        "{shard} has a tensor name of {found} bytes, at most {max_bytes} make sense: it starts \
         {tensor:?}; download the shard again"
    )]
    NameTooLong {
        /// The shard.
        shard: String,
        /// How the name starts.
        tensor: String,
        /// Its bytes.
        found: usize,
        /// The most that are accepted.
        max_bytes: usize,
    },

    /// An element type this crate does not read.
    #[error(
        "{shard}: tensor {tensor:?} has dtype {found:?}; supported are F32, F16, BF16 and U8, \
         so look for another release of this model"
    )]
    UnknownDtype {
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
        /// The type as written.
        found: String,
    },

    /// More dimensions than any weight has.
    #[error(
        "{shard}: tensor {tensor:?} has more than {MAX_RANK} dimensions; download the shard \
         again"
    )]
    RankTooLarge {
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
    },

    /// A shape whose size does not fit in 64 bits.
    #[error(
        "{shard}: the size of tensor {tensor:?}, {shape:?} of {dtype}, overflows; download the shard again"
    )]
    SizeOverflow {
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: Dtype,
    },

    /// Shape and offsets disagree.
    #[error(
        "{shard}: tensor {tensor:?}, {shape:?} of {dtype}, needs {expected} bytes but its offsets \
         are {begin} to {end}; download the shard again"
    )]
    SizeMismatch {
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: Dtype,
        /// Bytes its shape and type need.
        expected: u64,
        /// First byte in the payload, as written.
        begin: u64,
        /// One past the last byte in the payload, as written.
        end: u64,
    },

    /// Two tensors share bytes.
    #[error(
        "{shard}: tensor {tensor:?} starts at payload byte {byte}, inside tensor {other:?}; \
         download the shard again"
    )]
    Overlap {
        /// The shard.
        shard: String,
        /// The tensor that starts too early.
        tensor: String,
        /// The tensor it starts in.
        other: String,
        /// Where it starts in the payload.
        byte: u64,
    },

    /// Payload bytes that belong to no tensor.
    #[error(
        "{shard}: {}payload bytes {begin} to {end} belong to no tensor; download the shard again",
        before(tensor)
    )]
    Gap {
        /// The shard.
        shard: String,
        /// The tensor that follows the gap, none at the end of the file.
        tensor: Option<String>,
        /// First byte of the gap in the payload.
        begin: u64,
        /// One past its last byte.
        end: u64,
    },

    /// A file that ends before its tensors do.
    #[error(
        "{shard} is cut off: tensor {tensor:?} ends at payload byte {expected} and the payload \
         has {found} bytes; download the shard again"
    )]
    PayloadCutOff {
        /// The shard.
        shard: String,
        /// The first tensor, by position, that is not all there.
        tensor: String,
        /// Where it ends in the payload.
        expected: u64,
        /// Payload bytes in the file.
        found: u64,
    },

    /// One name for two tensors.
    #[error("tensor {tensor:?} is in {shard} and again in {other}; download both again")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// The shard that was read first.
        shard: String,
        /// The shard that repeats it; may be the same.
        other: String,
    },

    /// More tensors than can be numbered.
    #[error("{shard} brings the checkpoint to more than {max} tensors; use fewer shards")]
    TooManyTensors {
        /// The shard that exceeds the limit.
        shard: String,
        /// The limit.
        max: u32,
    },

    /// A tensor that the model needs is absent.
    #[error(
        "tensor {tensor:?} is not among the {tensors} in {folder}; check that config.json and \
         the weights belong to the same model"
    )]
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// Where it was looked for.
        folder: String,
        /// How many tensors are there.
        tensors: usize,
    },

    /// A read outside the tensor, or into a buffer of the wrong size.
    #[error(
        "{shard}: bytes {start} to {start} + {found} of tensor {tensor:?} were asked for and it \
         has {bytes}; ask for what its info says"
    )]
    BadRange {
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
        /// First byte asked for, within the tensor.
        start: u64,
        /// Bytes asked for.
        found: u64,
        /// Bytes the tensor has.
        bytes: u64,
    },

    /// No memory for a tensor's bytes.
    #[error(
        "{shard}: no memory for the {bytes} bytes of tensor {tensor:?}; close other programs or \
         read it in parts"
    )]
    OutOfMemory {
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Bytes that were needed.
        bytes: u64,
    },

    /// A shard that became shorter after it was opened.
    #[error(
        "{shard} ends at byte {byte}, inside tensor {tensor:?}: {expected} bytes were asked for \
         and {found} came; the file shrank while it was open, restore it and open it again"
    )]
    ShortRead {
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Where in the file the bytes stopped.
        byte: u64,
        /// Bytes asked for.
        expected: u64,
        /// Bytes that came.
        found: u64,
    },

    /// The disk failed under a tensor.
    #[error(
        "{shard}: reading tensor {tensor:?} failed at byte {byte}: {source}; check the disk, \
         then try again"
    )]
    ReadFailed {
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Where in the file the read failed.
        byte: u64,
        /// The operating system's reason.
        source: io::Error,
    },

    /// The manifest of a `.waste` container is not the JSON it should be.
    #[error("{manifest} is not a valid .waste manifest: {reason}; copy the container again")]
    BadManifest {
        /// The manifest.
        manifest: String,
        /// What is wrong, with line and column.
        reason: String,
    },

    /// A `.waste` container of another version, or none that says so.
    #[error(
        "{manifest} has format_version {found} and only 0 is read; name the checkpoint that the \
         container was made from, or convert it to version 0"
    )]
    WasteVersion {
        /// The manifest.
        manifest: String,
        /// The version as written, shortened.
        found: String,
    },

    /// A value in a `.waste` manifest that cannot be true or is not supported.
    #[error(
        "{manifest}: {field}{} is {found}, expected {expected}; copy the container again or \
         convert the model again",
        at(tensor)
    )]
    ManifestField {
        /// The manifest.
        manifest: String,
        /// The tensor it is about, if any.
        tensor: Option<String>,
        /// The field.
        field: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },

    /// A file of a `.waste` container that is not as long as the manifest says.
    #[error("{file} has {found} bytes, the manifest says {expected}; copy the file again")]
    WasteFileSize {
        /// The file.
        file: String,
        /// Bytes according to the manifest.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },

    /// A tensor of a `.waste` container that its trunk is too short for.
    #[error(
        "{manifest}: tensor {tensor:?} ends at byte {expected} of trunk.bin, which has {found} bytes; \
         copy trunk.bin again"
    )]
    WasteTrunkCutOff {
        /// The manifest.
        manifest: String,
        /// The tensor.
        tensor: String,
        /// Where it ends.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },

    /// A codebook that cannot be used.
    #[error("{file}: {field} at byte {byte} is {found}, expected {expected}; copy the file again")]
    BadCodebook {
        /// The file of codebooks.
        file: String,
        /// Where.
        byte: u64,
        /// What is wrong.
        field: &'static str,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },

    /// A layer refers to a codebook that is not there.
    #[error(
        "{file} lacks codebook {number}, which the experts of layer {layer} need; copy the \
         container again"
    )]
    MissingCodebook {
        /// The file of codebooks.
        file: String,
        /// The codebook.
        number: u32,
        /// The layer.
        layer: u32,
    },

    /// The special tokens of a `.waste` container are not the JSON they should be.
    #[error("{file} is not a list of special tokens: {reason}; copy the file again")]
    BadSpecials {
        /// The file.
        file: String,
        /// What is wrong, with line and column.
        reason: String,
    },

    /// Rows that a tensor does not have.
    #[error(
        "{file}: {n} rows from row {first} of tensor {tensor:?} were asked for and it has {rows}; \
         ask for what its shape says"
    )]
    BadRows {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// First row asked for.
        first: u64,
        /// Rows asked for.
        n: u64,
        /// Rows it has.
        rows: u64,
    },

    /// An expert that the container does not hold.
    #[error(
        "{folder} does not hold expert {expert} of layer {layer}; check that the configuration \
         and the weights belong to the same model"
    )]
    MissingExpert {
        /// The container.
        folder: String,
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
    },

    /// Records that do not have the size of the model's experts.
    #[error(
        "{file}: records of layer {layer} have {found} bytes, but experts of {inter} × {width} \
         {}; check that the configuration and the weights belong to the same model",
        takes(expected)
    )]
    RecordShape {
        /// The bank.
        file: String,
        /// The layer.
        layer: u32,
        /// Rows of an expert's gate.
        inter: usize,
        /// Columns of an expert's gate.
        width: usize,
        /// Bytes such a record takes; none if no record can hold the shape.
        expected: Option<u64>,
        /// Bytes of a record.
        found: u64,
    },

    /// A record whose header is not the one of this expert.
    #[error(
        "{file}: expert {expert} of layer {layer}: {field} at byte {byte} is {found}, expected \
         {expected}; copy the file again"
    )]
    BadRecord {
        /// The bank.
        file: String,
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// Where in the file.
        byte: u64,
        /// The field of the header.
        field: &'static str,
        /// What it must be.
        expected: u64,
        /// What it is.
        found: u64,
    },

    /// A record that was damaged after it was written.
    #[error(
        "{file}: expert {expert} of layer {layer}, the record at byte {byte}, has checksum \
         {found:08x} and should have {expected:08x}; copy the file again and check the disk"
    )]
    RecordChecksum {
        /// The bank.
        file: String,
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// Where in the file the record starts.
        byte: u64,
        /// The CRC-32 in its header.
        expected: u32,
        /// The CRC-32 of its bytes.
        found: u32,
    },
}

fn takes(expected: &Option<u64>) -> String {
    match expected {
        Some(bytes) => format!("take {bytes}"),
        None => "cannot be split into vectors of 8".to_owned(),
    }
}

fn at(tensor: &Option<String>) -> String {
    match tensor {
        Some(tensor) => format!(" at tensor {tensor:?}"),
        None => String::new(),
    }
}

fn before(tensor: &Option<String>) -> String {
    match tensor {
        Some(tensor) => format!("before tensor {tensor:?} "),
        None => String::new(),
    }
}
