//! Large inputs finish. The bound only stops a hang from blocking the suite; times are printed, not judged.

mod common;

use std::time::{Duration, Instant};

use common::{Random, k3_nano, model_file, single_bytes};
use rill_text::Tokenizer;

const HANG: Duration = Duration::from_secs(if cfg!(debug_assertions) { 300 } else { 10 });
const MB: usize = 1_000_000;

#[test]
fn a_megabyte_of_anything_is_encoded_without_a_hang_and_without_loss() {
    let t = k3_nano();
    let prose = include_str!("../../../models/k3-nano/heldout.txt");
    let mut random = Random(7);
    let letters: String = (0..MB).map(|_| char::from(b'a' + random.below(26) as u8)).collect();
    let unicode: String =
        (0..MB / 4).filter_map(|_| char::from_u32(random.below(0x11_0000) as u32)).collect();
    let cases = [
        ("one letter", "a".repeat(MB)),
        ("one capital", "A".repeat(MB)),
        ("random letters", letters),
        ("prose", prose.repeat(MB / prose.len())),
        ("spaces", " ".repeat(MB)),
        ("spaces, then a letter", " ".repeat(MB) + "a"),
        ("line ends", "\n".repeat(MB)),
        ("mixed whitespace", "\t \u{3000}\u{2028}\r\n ".repeat(MB / 12)),
        ("one Han character", "中".repeat(MB / 3)),
        ("digits", "1".repeat(MB)),
        ("full stops", ".".repeat(MB)),
        ("combining marks", "\u{301}".repeat(MB / 2)),
        ("letters of both cases at once", "あA".repeat(MB / 4)),
        ("contractions", "it's'S".repeat(MB / 6)),
        ("reserved names", "<|open|>".repeat(MB / 8)),
        ("random characters", unicode),
    ];
    for (name, text) in cases {
        let start = Instant::now();
        let ids = t.encode_text(&text);
        let elapsed = start.elapsed();
        println!("{name}: {} bytes, {} tokens, {elapsed:.0?}", text.len(), ids.len());
        assert!(elapsed < HANG, "{name} took {elapsed:?}");
        assert_eq!(t.decode(&ids).unwrap(), text.as_bytes(), "{name}");
    }
}

#[test]
fn a_vocabulary_of_163584_ranks_loads_without_a_hang() {
    let mut random = Random(11);
    let mut tokens = single_bytes();
    let mut seen: std::collections::HashSet<Vec<u8>> = tokens.iter().cloned().collect();
    while tokens.len() < 163_584 {
        let token: Vec<u8> = (0..2 + random.below(11)).map(|_| random.next() as u8).collect();
        if seen.insert(token.clone()) {
            tokens.push(token);
        }
    }
    let model = model_file(&tokens);
    let start = Instant::now();
    let t = Tokenizer::from_bytes(model.as_bytes(), br#"{"added_tokens_decoder": {}}"#, 163_840)
        .unwrap();
    let elapsed = start.elapsed();
    println!("163,584 ranks, {} bytes, {elapsed:.0?}", model.len());
    assert!(elapsed < HANG, "loading took {elapsed:?}");
    for rank in [256, 80_000, 163_583] {
        assert_eq!(t.token_bytes(rank), Some(tokens[rank as usize].as_slice()));
    }
    assert_eq!(t.special_id("<|reserved_token_163839|>"), Some(163_839));
}
