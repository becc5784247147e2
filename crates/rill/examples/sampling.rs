//! What drawing a token from a vocabulary of 163,840 takes, and its log-probabilities.
//!
//! `cargo run --release -p rill --example sampling`

use std::hint::black_box;
use std::time::Instant;

use rill::{Sampler, Sampling, likelier_first};

const VOCAB: usize = 163_840;
/// Of each case the fastest counts.
const CALLS: usize = 30;

fn main() -> Result<(), rill::Error> {
    let logits = logits();
    let usual = || Sampling { temperature: 1.0, ..Sampling::default() };
    let penalties = Sampling { repetition_penalty: 1.1, frequency_penalty: 0.1, ..usual() };
    for (what, sampling) in [
        ("likeliest", Sampling { temperature: 0.0, ..usual() }),
        ("temperature 1", usual()),
        ("temperature 1, top-p 0.95", Sampling { top_p: 0.95, ..usual() }),
        ("temperature 1, top-k 50", Sampling { top_k: 50, ..usual() }),
        ("temperature 1, min-p 0.05", Sampling { min_p: 0.05, ..usual() }),
        ("temperature 1, penalties, 4096 tokens seen", penalties),
        ("temperature 0.6, top-p 0.95", Sampling { temperature: 0.6, top_p: 0.95, ..usual() }),
    ] {
        let mut sampler = Sampler::new(sampling, VOCAB)?;
        sampler.accept_prompt(&(0..4096).map(|i| i * 40).collect::<Vec<u32>>());
        time(what, || sampler.sample(&logits));
    }
    let sampler = Sampler::new(usual(), VOCAB)?;
    time("log-probabilities, the likeliest 20", || sampler.logprobs(&logits, 7, 20));
    time("for comparison: all ids sorted", || {
        let mut order: Vec<u32> = (0..VOCAB as u32).collect();
        order.sort_unstable_by(|&a, &b| likelier_first(&logits, a, b));
        order
    });
    Ok(())
}

/// Most of them normal with a deviation of 3, twenty far above: as wide as those of a model that is
/// fairly sure, at 23 from the middle to the top.
fn logits() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let mut normal = || (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
    let mut logits: Vec<f32> = (0..VOCAB).map(|_| 3.0 * normal()).collect();
    for i in 0..20 {
        logits[i * 7919] = 10.0 + 0.7 * i as f32;
    }
    logits
}

fn time<R>(what: &str, mut work: impl FnMut() -> R) {
    let mut fastest = f64::INFINITY;
    for _ in 0..CALLS {
        let start = Instant::now();
        black_box(work());
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    println!("{what:<45} {:>7.3} ms", 1e3 * fastest);
}
