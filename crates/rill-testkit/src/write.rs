//! Writes checkpoints for tests: whole ones without weights, and single shards byte by byte.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use crate::Tensor;

/// What [`write_header_only`] wrote.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeaderOnly {
    /// Shards written.
    pub shards: usize,
    /// Bytes of all tensors together.
    pub payload_bytes: u64,
    /// Bytes of all shard files together: payload, headers and their length fields.
    pub shard_bytes: u64,
    /// Bytes of the index file.
    pub index_bytes: u64,
}

/// Writes a checkpoint whose shards have true headers and sizes but a hole where the weights
/// would be, so that terabytes of tensors take megabytes of disk. The file system must support
/// sparse files (NTFS does not make them this way).
///
/// Tensors are dealt to `n_shards` consecutive groups of about equal bytes; the index lists them
/// by name, as published ones do.
///
/// # Panics
///
/// If `n_shards` is zero or exceeds the number of tensors.
pub fn write_header_only(
    dir: &Path,
    tensors: &[Tensor],
    n_shards: usize,
) -> io::Result<HeaderOnly> {
    write_checkpoint(dir, tensors, n_shards, |_| Vec::new())
}

/// [`write_header_only`] with the bytes of tensors, as far as `bytes_of` gives them: what is short of
/// a tensor's size stays a hole.
///
/// # Panics
///
/// As `write_header_only`, and if there are more bytes than the tensor has.
pub fn write_checkpoint(
    dir: &Path,
    tensors: &[Tensor],
    n_shards: usize,
    bytes_of: impl Fn(&Tensor) -> Vec<u8>,
) -> io::Result<HeaderOnly> {
    assert!((1..=tensors.len()).contains(&n_shards));
    let mut written = HeaderOnly {
        shards: n_shards,
        payload_bytes: tensors.iter().map(Tensor::bytes).sum(),
        shard_bytes: 0,
        index_bytes: 0,
    };
    let mut shard_of: Vec<(&str, usize)> = Vec::with_capacity(tensors.len());
    let mut rest = tensors;
    let mut dealt_bytes = 0;
    for shard in 0..n_shards {
        // Leave at least one tensor for each later shard.
        let most = rest.len() - (n_shards - shard - 1);
        let target_bytes = (written.payload_bytes / n_shards as u64) * (shard as u64 + 1);
        let mut n = 0;
        while n < most && (n == 0 || dealt_bytes < target_bytes || shard + 1 == n_shards) {
            dealt_bytes += rest[n].bytes();
            n += 1;
        }
        let (group, later) = rest.split_at(n);
        rest = later;
        shard_of.extend(group.iter().map(|tensor| (tensor.name.as_str(), shard)));

        let header = header(group);
        let payload_bytes: u64 = group.iter().map(Tensor::bytes).sum();
        let file_bytes = 8 + header.len() as u64 + payload_bytes;
        let mut file = File::create(dir.join(shard_name(shard, n_shards)))?;
        file.write_all(&shard_bytes(&header, &[]))?;
        file.set_len(file_bytes)?;
        let mut at = 8 + header.len() as u64;
        for tensor in group {
            let bytes = bytes_of(tensor);
            assert!(bytes.len() as u64 <= tensor.bytes());
            file.seek(SeekFrom::Start(at))?;
            file.write_all(&bytes)?;
            at += tensor.bytes();
        }
        written.shard_bytes += file_bytes;
    }

    shard_of.sort_unstable();
    let path = dir.join("model.safetensors.index.json");
    let mut index = BufWriter::new(File::create(&path)?);
    write!(
        index,
        "{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{",
        written.payload_bytes
    )?;
    for (i, (name, shard)) in shard_of.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let shard = shard_name(*shard, n_shards);
        write!(index, "{comma}\n    \"{name}\": \"{shard}\"")?;
    }
    index.write_all(b"\n  }\n}\n")?;
    index.flush()?;
    written.index_bytes = fs::metadata(path)?.len();
    Ok(written)
}

/// A safetensors file of any header and payload, right or wrong: header length as a
/// little-endian u64, header, payload.
pub fn shard_bytes(header: &str, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

fn header(group: &[Tensor]) -> String {
    let mut header = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut begin = 0;
    for tensor in group {
        let end = begin + tensor.bytes();
        header.push_str(&format!(
            ",\"{}\":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{begin},{end}]}}",
            tensor.name,
            tensor.dtype.name(),
            format!("{:?}", tensor.shape).replace(' ', ""),
        ));
        begin = end;
    }
    header.push('}');
    // Writers pad the header with spaces so that the payload starts on eight bytes.
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    header
}

fn shard_name(shard: usize, n_shards: usize) -> String {
    format!("model-{:05}-of-{n_shards:06}.safetensors", shard + 1)
}
