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

/// Writes k3-tiny with eight times wider experts, whose weights are made up so that some need more bits
/// than others: entropy-coded, their records have from two to five units of 16 KiB. `tiny` is k3-tiny's
/// folder.
///
/// # Errors
/// When a file cannot be read or written.
pub fn write_uneven_experts(dir: &Path, tiny: &Path, n_shards: usize) -> io::Result<()> {
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(tiny.join("config.json"))?)?;
    config["text_config"]["moe_intermediate_size"] = 768.into();
    config.as_object_mut().ok_or(io::ErrorKind::InvalidData)?.remove("vision_config");
    std::fs::write(dir.join("config.json"), config.to_string())?;
    for name in ["tiktoken.model", "tokenizer_config.json"] {
        std::fs::copy(tiny.join(name), dir.join(name))?;
    }
    let bytes_of = |t: &Tensor| {
        let mut random =
            t.name.bytes().fold(1u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let mask = [0x11, 0x33, 0x77, 0xff][random as usize >> 7 & 3];
        let mut byte = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 56) as u8
        };
        let bytes = 0..t.bytes();
        match () {
            () if t.name.ends_with("weight_packed") => bytes.map(|_| byte() & mask).collect(),
            () if t.name.ends_with("weight_scale") => bytes.map(|_| 118 + byte() % 3).collect(),
            // Of bf16 and of f32 the last byte has most of the exponent: about 0.01.
            () => bytes.map(|i| if i % 2 == 1 { 0x3c | byte() & 0x80 } else { byte() }).collect(),
        }
    };
    write_checkpoint(dir, &crate::tensors(&config), n_shards, bytes_of).map(|_| ())
}
