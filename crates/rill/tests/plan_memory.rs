//! What a plan counts for activations, held against what a forward pass takes. Prints both:
//!
//! ```text
//! cargo test --release -p rill --test plan_memory -- --nocapture
//! ```

mod common;

use rill::plan::Sizes;
use rill::{Engine, EngineOptions, Logits};
use rill_testkit::PeakAlloc;

#[global_allocator]
static ALLOC: PeakAlloc = PeakAlloc::new();

#[test]
fn a_forward_pass_takes_no_more_than_the_plan_counts_for_it() {
    for folder in [common::demo(), common::k3_tiny(), common::kimi_linear_tiny()] {
        let sizes = Sizes::of_folder(folder.clone()).unwrap();
        for piece in [1, 64, 256] {
            let options = EngineOptions { threads: 1, prefill_chunk: piece, ..Default::default() };
            let engine = Engine::open(folder.clone(), &options).unwrap();
            let mut session = engine.new_session();
            let vocab = engine.config().vocab_size as u32;
            let tokens: Vec<u32> = (0..piece as u32).map(|i| i * 37 % vocab).collect();
            // Once before, so that the copy of the state and the like are there already.
            engine.forward(&mut session, &tokens, Logits::Last).unwrap();
            let before = ALLOC.restart_peak();
            engine.forward(&mut session, &tokens, Logits::Last).unwrap();
            let taken = (ALLOC.peak_bytes() - before) as u64;

            let n = piece as u64;
            let scratch = sizes.logits_bytes + n * sizes.scratch_bytes_per_token;
            // The cache doubles when it grows, and an expert is read into a buffer.
            let rest = 2 * n * 4 * sizes.cache_values_per_token + sizes.record_bytes;
            println!("{piece} tokens: {taken} bytes, planned {scratch} and {rest}");
            assert!(taken <= scratch + rest, "{piece}: {taken} of {scratch} and {rest}");
            // And a plan that counted several times too much would waste expert slots.
            assert!(piece == 1 || taken > scratch / 3, "{piece}: {taken} of {scratch}");
        }
    }
}
