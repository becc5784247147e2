//! The generated tensor lists against what is known of the published checkpoints and against the
//! headers of the small ones.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use rill_testkit::{Tensor, kimi_k3_tensors, kimi_linear_tensors, tensors, write_header_only};
use serde_json::Value;

#[test]
fn kimi_k3_has_the_published_number_of_tensors() {
    let list = kimi_k3_tensors();
    assert_eq!(list.len(), 497_220);
    let vision = |t: &&Tensor| !t.name.starts_with("language_model.");
    assert_eq!(list.iter().filter(vision).count(), 168);
}

#[test]
fn kimi_k3_experts_have_the_published_size() {
    let expert = "language_model.model.layers.1.block_sparse_moe.experts.0.";
    let list = kimi_k3_tensors();
    let expert: Vec<_> =
        list.iter().filter(|t| t.name.starts_with(expert)).map(Tensor::bytes).collect();
    assert_eq!(expert.len(), 6);
    assert_eq!(expert.iter().sum::<u64>(), 17_547_264);
}

#[test]
fn kimi_linear_has_about_the_published_bytes() {
    let bytes: u64 = kimi_linear_tensors().iter().map(Tensor::bytes).sum();
    assert!((97e9..99e9).contains(&(bytes as f64)), "{bytes}");
}

#[test]
fn generated_lists_equal_the_small_checkpoints_tensor_for_tensor() {
    for folder in ["fixtures/k3-tiny", "fixtures/kimi-linear-tiny", "models/k3-nano"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
        let config = fs::read(folder.join("config.json")).unwrap();
        let made: BTreeMap<String, (String, Vec<u64>)> =
            tensors(&serde_json::from_slice(&config).unwrap())
                .into_iter()
                .map(|t| (t.name, (t.dtype.name().to_owned(), t.shape)))
                .collect();
        assert_eq!(made, shipped(&folder), "{}", folder.display());
    }
}

#[test]
fn header_only_checkpoint_has_the_sizes_its_headers_claim() {
    let config = fs::read(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/k3-tiny/config.json"),
    )
    .unwrap();
    let list = tensors(&serde_json::from_slice(&config).unwrap());
    for n_shards in [1, 3, list.len()] {
        let dir = tempfile::tempdir().unwrap();
        let written = write_header_only(dir.path(), &list, n_shards).unwrap();
        let on_disk = shipped(dir.path());
        assert_eq!(on_disk.len(), list.len());
        assert_eq!(written.payload_bytes, list.iter().map(Tensor::bytes).sum::<u64>());
        let files: u64 = shards(dir.path()).iter().map(|p| p.metadata().unwrap().len()).sum();
        assert_eq!(written.shard_bytes, files);
        assert_eq!(shards(dir.path()).len(), n_shards);
    }
}

/// Name → (dtype, shape) of every tensor in a folder's shards.
fn shipped(folder: &Path) -> BTreeMap<String, (String, Vec<u64>)> {
    let mut all = BTreeMap::new();
    for shard in shards(folder) {
        let bytes = fs::read(shard).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        for (name, entry) in header.as_object().unwrap() {
            if name == "__metadata__" {
                continue;
            }
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            let shape = entry["shape"].as_array().unwrap();
            let shape = shape.iter().map(|d| d.as_u64().unwrap()).collect();
            assert!(all.insert(name.clone(), (dtype, shape)).is_none());
        }
    }
    all
}

fn shards(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with("model-") && name.ends_with(".safetensors")
        })
        .collect()
}
