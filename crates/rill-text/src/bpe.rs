//! Byte-pair merges over ranks: the token list any tiktoken vocabulary gives for one pre-tokenised piece.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

/// Ordinary tokens by their bytes. Ids are ranks: the lower, the earlier a pair merges.
pub(crate) struct Ranks {
    by_bytes: HashMap<Arc<[u8]>, u32>,
    by_byte: [u32; 256],
    longest_bytes: usize,
}

impl Ranks {
    /// `None` names the first single byte that has no token.
    pub(crate) fn new(by_bytes: HashMap<Arc<[u8]>, u32>) -> Result<Self, u8> {
        let mut by_byte = [0; 256];
        for byte in 0..=255u8 {
            by_byte[usize::from(byte)] = *by_bytes.get([byte].as_slice()).ok_or(byte)?;
        }
        let longest_bytes = by_bytes.keys().map(|token| token.len()).max().unwrap_or(0);
        Ok(Ranks { by_bytes, by_byte, longest_bytes })
    }

    fn get(&self, bytes: &[u8]) -> Option<u32> {
        // A long piece is looked up whole and in growing parts: never hash more than a token can hold.
        if bytes.len() > self.longest_bytes {
            return None;
        }
        self.by_bytes.get(bytes).copied()
    }
}

/// Working memory of [`encode_piece`], kept between pieces so that short ones do not allocate.
#[derive(Default)]
pub(crate) struct Scratch {
    parts: Vec<Part>,
    merges: BinaryHeap<Reverse<(u32, usize)>>,
}

/// Appends the ids of `piece` (not empty) to `out`.
///
/// The plain algorithm: if the whole piece is a token, that is it. Otherwise start from single bytes and keep joining
/// the two neighbours whose joined bytes have the lowest rank, the leftmost such pair first, until no pair is a token.
/// The departure: parts form a linked list and candidate pairs wait in a heap, so n bytes cost O(n log n), not O(n²).
pub(crate) fn encode_piece(ranks: &Ranks, piece: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
    if let Some(id) = ranks.get(piece) {
        out.push(id);
        return;
    }
    let Scratch { parts, merges } = scratch;
    parts.clear();
    merges.clear();
    parts.extend(piece.iter().enumerate().map(|(start, &byte)| Part {
        id: ranks.by_byte[usize::from(byte)],
        end: start + 1,
        previous: start.wrapping_sub(1),
        pair_rank: None,
    }));
    for start in 0..piece.len() {
        propose(ranks, piece, parts, merges, start);
    }
    while let Some(Reverse((rank, start))) = merges.pop() {
        // A neighbour changed since this pair was proposed; its present proposal, if any, is in the heap as well.
        if parts[start].pair_rank != Some(rank) {
            continue;
        }
        let right = parts[start].end;
        let end = parts[right].end;
        parts[right].pair_rank = None;
        parts[start].id = rank;
        parts[start].end = end;
        if end < piece.len() {
            parts[end].previous = start;
        }
        propose(ranks, piece, parts, merges, start);
        if start > 0 {
            let previous = parts[start].previous;
            propose(ranks, piece, parts, merges, previous);
        }
    }
    let mut start = 0;
    while start < piece.len() {
        out.push(parts[start].id);
        start = parts[start].end;
    }
}

/// One token of the piece so far, kept at the index of its first byte.
struct Part {
    id: u32,
    /// Where the next part starts.
    end: usize,
    /// Where the part before starts; meaningless for the first.
    previous: usize,
    /// Rank of this part joined with the next, `None` when that is not a token or this part was swallowed.
    pair_rank: Option<u32>,
}

/// Finds the rank of the pair that starts at `start` and queues it.
fn propose(
    ranks: &Ranks,
    piece: &[u8],
    parts: &mut [Part],
    merges: &mut BinaryHeap<Reverse<(u32, usize)>>,
    start: usize,
) {
    let right = parts[start].end;
    let rank = match parts.get(right) {
        Some(right) => ranks.get(&piece[start..right.end]),
        None => None,
    };
    parts[start].pair_rank = rank;
    if let Some(rank) = rank {
        merges.push(Reverse((rank, start)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(multi_byte: &[(&str, u32)], piece: &str) -> Vec<u32> {
        let mut by_bytes: HashMap<Arc<[u8]>, u32> =
            (0..=255u8).map(|b| (Arc::from([b].as_slice()), 1000 + u32::from(b))).collect();
        for (token, rank) in multi_byte {
            by_bytes.insert(Arc::from(token.as_bytes()), *rank);
        }
        let ranks = Ranks::new(by_bytes).expect("all bytes are there");
        let mut out = Vec::new();
        encode_piece(&ranks, piece.as_bytes(), &mut Scratch::default(), &mut out);
        out
    }

    #[test]
    fn lowest_rank_wins_over_longest_match() {
        let b = |byte: u8| 1000 + u32::from(byte);
        assert_eq!(encode(&[("bc", 1), ("ab", 2), ("abc", 9), ("cd", 0)], "abcd"), [2, 0]);
        assert_eq!(encode(&[("bc", 1), ("ab", 2), ("abb", 3)], "abcd"), [b(b'a'), 1, b(b'd')]);
    }

    #[test]
    fn equal_pairs_merge_from_the_left() {
        assert_eq!(encode(&[("aa", 0)], "aaaaa"), [0, 0, 1000 + u32::from(b'a')]);
        assert_eq!(encode(&[("aa", 1), ("aaa", 0)], "aaaaa"), [0, 1]);
    }

    #[test]
    fn a_whole_piece_that_no_merge_reaches_is_still_one_token() {
        assert_eq!(encode(&[("xyz", 0)], "xyz"), [0]);
        assert_eq!(encode(&[("xyz", 0)], "xyzz").len(), 4);
    }

    #[test]
    fn a_missing_single_byte_is_named() {
        let by_bytes = (0..=254u8).map(|b| (Arc::from([b].as_slice()), u32::from(b))).collect();
        assert_eq!(Ranks::new(by_bytes).err(), Some(255));
    }
}
