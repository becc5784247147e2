//! A vocabulary: all bytes, then made-up words, then the reserved tokens that prompts need.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::json;

/// Reserved tokens, by distance from the first; the others have no names of their own.
const RESERVED: [(u64, &str); 10] = [
    (0, "[BOS]"),
    (1, "[EOS]"),
    (2, "<|end_of_msg|>"),
    (3, "<|open|>"),
    (4, "<|close|>"),
    (5, "<|sep|>"),
    (18, "<|media_begin|>"),
    (19, "<|media_content|>"),
    (20, "<|media_end|>"),
    (21, "<|media_pad|>"),
];

/// `tiktoken.model` of so many ranks: bytes, then words of letters with and without a space in
/// front, the shorter first, so that every word can be put together from those before it.
pub(super) fn model(n_ranks: u64) -> Vec<u8> {
    let mut out = String::new();
    let mut add = |rank: u64, token: &[u8]| {
        BASE64.encode_string(token, &mut out);
        out.push_str(&format!(" {rank}\n"));
    };
    let n_bytes = n_ranks.min(256);
    (0..n_bytes).for_each(|byte| add(byte, &[byte as u8]));
    let mut rank = n_bytes;
    for letters in 1.. {
        // " a" and "aa" are of one length.
        for (first, n) in [(&b" "[..], letters), (b"", letters + 1)] {
            for word in 0..26u64.pow(n) {
                if rank == n_ranks {
                    return out.into_bytes();
                }
                let letter = |place: u32| b'a' + (word / 26u64.pow(place) % 26) as u8;
                let token: Vec<u8> =
                    first.iter().copied().chain((0..n).rev().map(letter)).collect();
                add(rank, &token);
                rank += 1;
            }
        }
    }
    unreachable!("a configuration has fewer tokens than there are words of eight letters")
}

/// Ids and names of the reserved tokens.
pub(super) fn reserved(n_ranks: u64) -> impl Iterator<Item = (u64, &'static str)> {
    RESERVED.into_iter().map(move |(place, name)| (n_ranks + place, name))
}

/// `tokenizer_config.json`.
pub(super) fn config(n_ranks: u64) -> Vec<u8> {
    let token =
        |(id, name): (u64, _)| (id.to_string(), json!({ "content": name, "special": true }));
    let decoder: serde_json::Map<_, _> = reserved(n_ranks).map(token).collect();
    let config = json!({ "added_tokens_decoder": decoder });
    serde_json::to_vec_pretty(&config).expect("plain data serialises")
}

/// `specials.json`, what `.waste` containers have instead.
pub(super) fn specials(n_ranks: u64) -> Vec<u8> {
    let list: Vec<_> =
        reserved(n_ranks).map(|(id, text)| json!({ "id": id, "text": text })).collect();
    serde_json::to_vec_pretty(&list).expect("plain data serialises")
}
