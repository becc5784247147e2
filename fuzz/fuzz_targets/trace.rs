//! Recorded routing: read, and replayed if it is small.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rill_stream::policy::Scored;
use rill_stream::{Trace, optimal, replay};

fuzz_target!(|data: &[u8]| {
    match Trace::parse("trace", data) {
        Ok(trace) => {
            let geometry = trace.geometry();
            assert!(trace.n_tokens() > 0);
            for token in 0..trace.n_tokens() {
                for layer in 0..geometry.n_layers {
                    let chosen = trace.chosen(token, layer);
                    assert!(chosen.iter().all(|&id| u32::from(id) < geometry.n_experts));
                }
            }
            if data.len() < 2000 && geometry.n_records() < 4000 {
                let capacity = geometry.n_records() / 4;
                let report = replay(&trace, &mut Scored::new(geometry), capacity);
                assert!(report.hits() <= optimal(&trace, capacity).hits());
                assert!(report.misses() >= report.n_distinct);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
