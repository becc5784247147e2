//! What a conversion takes, held to what `Plan::job_bytes` says. Prints what it cost:
//!
//! ```text
//! cargo test --release -p rill-convert --test memory -- --nocapture
//! ```
//!
//! Not on Windows, where files that only claim their size take the disk for real.
#![cfg(not(windows))]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::ops::ControlFlow;
use std::path::Path;

use rill_convert::{Control, ExpertCodec, Plan, SynthModel, TrunkCodec, convert};
use rill_format::{Checkpoint, Folder};
use rill_testkit::{
    PeakAlloc, Tensor, kimi_k3_tensors, tensors, write_checkpoint, write_header_only,
};
use serde_json::Value;

#[global_allocator]
static ALLOC: PeakAlloc = PeakAlloc::new();

/// For everything that does not grow with the number of jobs: paths, tasks, the manifest.
const REST_BYTES: usize = 2 << 20;
/// Half a million tensors: 52 MB for the headers, the rest for the plan.
const K3_PLAN_BYTES: usize = 300_000_000;

fn checkpoint(dir: &Path, config: &[u8], tensors: &[Tensor], n_shards: usize) -> Checkpoint {
    std::fs::write(dir.join("config.json"), config).unwrap();
    write_checkpoint(dir, tensors, n_shards, weights).unwrap();
    Checkpoint::open(Folder::Disk(dir.to_owned())).unwrap()
}

/// Nibbles of experts that no entropy code makes smaller, with scales of one size; holes elsewhere.
fn weights(tensor: &Tensor) -> Vec<u8> {
    let n = if tensor.name.contains(".experts.") { tensor.bytes() as usize } else { 0 };
    if tensor.name.ends_with("_scale") {
        return vec![120; n];
    }
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..n).map(|_| random()).collect()
}

#[test]
fn a_conversion_takes_what_its_plan_says_for_each_job() {
    // Experts of true size, three of them in one layer; the rest small.
    let mut config: Value = serde_json::from_slice(SynthModel::KimiK3.config()).unwrap();
    config.as_object_mut().unwrap().remove("vision_config");
    let text = &mut config["text_config"];
    text["num_hidden_layers"] = 2.into();
    for (key, size) in [
        ("num_experts", 3),
        ("hidden_size", 512),
        ("num_attention_heads", 4),
        ("vocab_size", 1024),
        ("intermediate_size", 1024),
        ("num_shared_experts", 1),
    ] {
        text[key] = size.into();
    }
    text["linear_attn_config"]["num_heads"] = 4.into();
    let list = tensors(&config);
    let dir = tempfile::tempdir().unwrap();
    let source = checkpoint(dir.path(), config.to_string().as_bytes(), &list, 3);
    for (experts, trunk, jobs) in [
        (ExpertCodec::Source, TrunkCodec::Source, &[1, 3][..]),
        (ExpertCodec::Q4, TrunkCodec::Q4, &[2]),
        (ExpertCodec::Q8, TrunkCodec::Q8, &[1]),
        (ExpertCodec::Mxfp4z, TrunkCodec::Source, &[1, 3]),
        (ExpertCodec::Trellis { rate: 24 }, TrunkCodec::Trellis { rate: 28 }, &[2]),
    ] {
        for &jobs in jobs {
            let to = tempfile::tempdir().unwrap();
            let plan = Plan::new(&source, experts, trunk).unwrap();
            let control = Control { jobs, progress: &|_| ControlFlow::Continue(()) };
            let before = ALLOC.restart_peak();
            convert(&source, &plan, to.path(), &control).unwrap();
            let peak = ALLOC.peak_bytes() - before;
            let stated = jobs * plan.job_bytes() as usize + REST_BYTES;
            println!("experts {experts:?}, {jobs} jobs: {peak} bytes, at most {stated} stated");
            assert!(peak <= stated, "experts {experts:?}, {jobs} jobs: {peak} > {stated}");
            assert!(peak * 4 > stated, "the statement says nothing: {peak} of {stated}");
        }
    }
    drop(source);

    // And K3 whole, planned from its headers.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), SynthModel::KimiK3.config()).unwrap();
    write_header_only(dir.path(), &kimi_k3_tensors(), 96).unwrap();
    let source = Checkpoint::open(Folder::Disk(dir.path().to_owned())).unwrap();
    let before = ALLOC.restart_peak();
    let plan = Plan::new(&source, ExpertCodec::Source, TrunkCodec::Source).unwrap();
    let (peak, kept) = (ALLOC.peak_bytes() - before, ALLOC.live_bytes() - before);
    println!(
        "K3: {} bytes of container; planning took {peak} bytes, the plan has {kept}; a job takes {}",
        plan.container_bytes(),
        plan.job_bytes()
    );
    assert_eq!(plan.n_experts(), 92 * 896);
    assert!(peak < K3_PLAN_BYTES, "{peak}");
}
