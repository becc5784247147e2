//! Opening a checkpoint with K3's 497,220 tensors and its 1.56 TB, all of them a hole in a sparse
//! file. Prints what it cost:
//!
//! ```text
//! cargo test --release -p rill-format --test kimi_k3_size -- --nocapture
//! ```
//!
//! Not on Windows, where growing a file reserves its disk space.
#![cfg(not(windows))]

use std::time::Instant;

use rill_format::{Checkpoint, Folder};
use rill_testkit::{PeakAlloc, kimi_k3_tensors, write_header_only};

#[global_allocator]
static ALLOC: PeakAlloc = PeakAlloc::new();

#[test]
fn kimi_k3_opens_within_100_mb_of_memory() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = kimi_k3_tensors();
    let written = write_header_only(dir.path(), &tensors, 96).unwrap();

    let before_bytes = ALLOC.restart_peak();
    let start = Instant::now();
    let checkpoint = Checkpoint::open(Folder::Disk(dir.path().to_owned())).unwrap();
    let open_ms = start.elapsed().as_millis();
    let peak_bytes = ALLOC.peak_bytes() - before_bytes;
    let kept_bytes = ALLOC.live_bytes() - before_bytes;

    let start = Instant::now();
    for tensor in &tensors {
        let info = checkpoint.require(&tensor.name).unwrap();
        assert_eq!(info.name, tensor.name);
        assert_eq!(info.dtype.to_string(), tensor.dtype.name());
        assert_eq!(*info.shape, tensor.shape);
        assert_eq!(info.bytes, tensor.bytes());
    }
    let find_ns = start.elapsed().as_nanos() / tensors.len() as u128;

    println!("tensors         {:>17}", checkpoint.len());
    println!("payload         {:>17} bytes", checkpoint.payload_bytes());
    println!("shard files     {:>17} bytes", written.shard_bytes);
    println!("index           {:>17} bytes", written.index_bytes);
    println!("open            {open_ms:>17} ms");
    println!("peak memory     {peak_bytes:>17} bytes");
    println!("kept memory     {kept_bytes:>17} bytes");
    println!("find and check  {find_ns:>17} ns per tensor");

    assert_eq!(checkpoint.len(), 497_220);
    assert_eq!(checkpoint.shards().count(), 96);
    assert_eq!(checkpoint.payload_bytes(), written.payload_bytes);
    assert!(peak_bytes < 100_000_000, "opening took {peak_bytes} bytes");
}
