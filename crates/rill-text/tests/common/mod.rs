//! The demo model's vocabulary, and small ones made on the spot.
#![allow(dead_code, reason = "each test program uses a part")]

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rill_text::Tokenizer;

pub(crate) const MODEL: &[u8] = include_bytes!("../../../../models/k3-nano/tiktoken.model");
pub(crate) const CONFIG: &[u8] = include_bytes!("../../../../models/k3-nano/tokenizer_config.json");
pub(crate) const VOCAB_SIZE: u32 = 4096;

pub(crate) fn k3_nano() -> Tokenizer {
    Tokenizer::from_bytes(MODEL, CONFIG, VOCAB_SIZE).expect("the demo model is valid")
}

/// A `tiktoken.model` in which token `i` has rank `i`.
pub(crate) fn model_file(tokens: &[Vec<u8>]) -> String {
    tokens
        .iter()
        .enumerate()
        .map(|(rank, token)| format!("{} {rank}\n", STANDARD.encode(token)))
        .collect()
}

pub(crate) fn single_bytes() -> Vec<Vec<u8>> {
    (0..=255u8).map(|byte| vec![byte]).collect()
}

/// SplitMix64: small, seeded, the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}
