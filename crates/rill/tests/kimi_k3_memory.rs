//! Kimi K3 at its real size on a machine that is far too small: 111 GB of weights that every
//! token needs, none of them touched. Prints what it cost:
//!
//! ```text
//! cargo test --release -p rill --test kimi_k3_memory -- --nocapture
//! ```
//!
//! Not on Windows, where files that only claim their size take the disk for real.
#![cfg(not(windows))]

use std::fs;
use std::path::Path;
use std::time::Instant;

use rill::config::ModelConfig;
use rill::{Checkpoint, Engine, EngineOptions, Error, Folder};
use rill_testkit::{PeakAlloc, kimi_k3_tensors, write_header_only};
use serde_json::{Value, json};

#[global_allocator]
static ALLOC: PeakAlloc = PeakAlloc::new();

/// Headers of half a million tensors take 52 MB, finding all the experts 2 MB.
const CEILING_BYTES: usize = 120_000_000;

/// Runs `f` and demands that it stays below the ceiling.
fn within_ceiling<T>(what: &str, f: impl FnOnce() -> T) -> T {
    let before_bytes = ALLOC.restart_peak();
    let start = Instant::now();
    let result = f();
    let peak_bytes = ALLOC.peak_bytes() - before_bytes;
    println!("{what}: {} ms, {peak_bytes} bytes at most", start.elapsed().as_millis());
    assert!(peak_bytes < CEILING_BYTES, "{what} took {peak_bytes} bytes");
    result
}

#[test]
fn kimi_k3_is_refused_with_the_numbers_before_anything_is_loaded() {
    let config_path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/configs/kimi-k3.json");
    let config_bytes = fs::read(config_path).unwrap();
    let dir = tempfile::tempdir().unwrap();
    write_header_only(dir.path(), &kimi_k3_tensors(), 96).unwrap();
    fs::write(dir.path().join("config.json"), &config_bytes).unwrap();
    let folder = Folder::Disk(dir.path().to_owned());

    let config = ModelConfig::from_json(&config_bytes).unwrap();
    let checkpoint = Checkpoint::open(folder.clone()).unwrap();
    let summary =
        within_ceiling("checking", || Engine::check(&checkpoint, &config).expect("all is there"));
    assert!(summary.trunk_bytes > 100_000_000_000);

    // A configuration of 3 kB that asks for 36 million tensors, nearly all of them missing.
    let mut tree: Value = serde_json::from_slice(&config_bytes).unwrap();
    tree["text_config"]["num_experts"] = json!(65_536);
    let config = ModelConfig::from_json(tree.to_string().as_bytes()).unwrap();
    let absurd = within_ceiling("checking 65,536 experts a layer", || {
        Engine::check(&checkpoint, &config).map(|_| ())
    });
    let Err(Error::Binding { problems, .. }) = absurd else { panic!("{absurd:?}") };
    assert_eq!(problems.len(), Error::MAX_PROBLEMS + 1);
    assert!(problems[Error::MAX_PROBLEMS].starts_with("… and at least 10"), "{problems:?}");
    drop(checkpoint);

    // However much the machine has.
    let options = EngineOptions { budget_bytes: 2 << 30, ..Default::default() };
    let opened = within_ceiling("refusing", || Engine::open(folder, &options).map(|_| ()));
    let Err(error) = opened else { panic!("a layer alone takes more than the budget") };
    let message = error.to_string();
    let Error::BelowFloor { plan } = error else { panic!("{message}") };
    assert!(plan.floor_bytes > 2 << 30);
    for number in [(2u64 << 30).to_string(), plan.floor_bytes.to_string()] {
        assert!(message.contains(&number), "{number} not in: {message}");
    }
}
