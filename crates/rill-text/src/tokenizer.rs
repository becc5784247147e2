//! The tokenizer: two hostile files in, an immutable table out.

use std::collections::HashMap;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;

use crate::bpe::{Ranks, Scratch, encode_piece};
use crate::pretokenize::Splitter;
use crate::{TextError, Utf8Stream};

/// Text to token ids and back, token for token as `tiktoken` does it. Immutable; share it freely.
///
/// Ids below [`n_ranks`](Self::n_ranks) are ordinary tokens, the rest up to [`vocab_size`](Self::vocab_size) are
/// reserved: structure, never text.
pub struct Tokenizer {
    /// Bytes of every id; a reserved one has the bytes of its name.
    tokens: Arc<[Arc<[u8]>]>,
    ranks: Ranks,
    splitter: Splitter,
    /// Pattern `i` is the name of id `n_ranks + i`.
    reserved_names: AhoCorasick,
    reserved_ids: HashMap<String, u32>,
    n_ranks: u32,
    vocab_size: u32,
}

impl Tokenizer {
    /// Reads a vocabulary: `model` is `tiktoken.model`, `tokenizer_config` is `tokenizer_config.json`, `vocab_size` is
    /// that of `config.json`. Ids that have neither a rank nor a name become `<|reserved_token_{id}|>`.
    ///
    /// # Errors
    /// Anything wrong in either file, naming the file and the line or id.
    pub fn from_bytes(
        model: &[u8],
        tokenizer_config: &[u8],
        vocab_size: u32,
    ) -> Result<Self, TextError> {
        let by_rank = read_model(model, vocab_size)?;
        // Every rank is below `vocab_size`, so their number is a u32 too.
        let n_ranks = by_rank.len() as u32;
        let names = read_reserved_names(tokenizer_config, n_ranks, vocab_size)?;

        let by_bytes = by_rank.iter().cloned().zip(0..).collect();
        let ranks = Ranks::new(by_bytes).map_err(|byte| TextError::MissingByte { byte })?;
        let reserved_names = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&names)
            .expect("at most 65,536 names of at most 256 bytes fit an automaton");
        let tokens = by_rank
            .into_iter()
            .chain(names.iter().map(|name| Arc::from(name.as_bytes())))
            .collect();
        Ok(Tokenizer {
            tokens,
            ranks,
            splitter: Splitter::new(),
            reserved_names,
            reserved_ids: names.into_iter().zip(n_ranks..).collect(),
            n_ranks,
            vocab_size,
        })
    }

    /// Number of ids, ordinary and reserved.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Number of ordinary tokens; ids from here on are reserved.
    pub fn n_ranks(&self) -> u32 {
        self.n_ranks
    }

    /// The ids of ordinary text. Never yields a reserved id, whatever the text spells.
    pub fn encode_text(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        self.append_text(text, &mut Scratch::default(), &mut ids);
        ids
    }

    /// As [`encode_text`](Self::encode_text), for bytes: what is not UTF-8 becomes U+FFFD first.
    pub fn encode_text_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.encode_text(&String::from_utf8_lossy(bytes))
    }

    /// The ids of markup: names of reserved tokens become their ids (the longest name where several start), the rest
    /// is text. Only for strings of the program's own: markup from a user lets the user write structure.
    pub fn encode_markup(&self, markup: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut scratch = Scratch::default();
        let mut text_start = 0;
        for name in self.reserved_names.find_iter(markup) {
            self.append_text(&markup[text_start..name.start()], &mut scratch, &mut ids);
            ids.push(self.n_ranks + name.pattern().as_u32());
            text_start = name.end();
        }
        self.append_text(&markup[text_start..], &mut scratch, &mut ids);
        ids
    }

    /// The id of a reserved token by its name.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.reserved_ids.get(name).copied()
    }

    /// Whether `id` is a reserved token of this vocabulary.
    pub fn is_special(&self, id: u32) -> bool {
        (self.n_ranks..self.vocab_size).contains(&id)
    }

    /// The bytes of a token, for a reserved one those of its name; `None` outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(id as usize).map(|bytes| &**bytes)
    }

    /// The bytes of a sequence of tokens, joined. They need not be UTF-8.
    ///
    /// # Errors
    /// [`TextError::UnknownId`] for an id outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, TextError> {
        let mut bytes = Vec::new();
        for (position, &id) in ids.iter().enumerate() {
            let vocab_size = self.vocab_size;
            bytes.extend(self.token_bytes(id).ok_or(TextError::UnknownId {
                id,
                position,
                vocab_size,
            })?);
        }
        Ok(bytes)
    }

    /// A fresh stream that turns [`token_bytes`](Self::token_bytes), pushed one token at a time, into text.
    pub fn decoder(&self) -> Utf8Stream {
        Utf8Stream::new()
    }

    /// The bytes of every id, for a reader that outlives its borrow of the tokenizer.
    pub(crate) fn shared_tokens(&self) -> Arc<[Arc<[u8]>]> {
        Arc::clone(&self.tokens)
    }

    fn append_text(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        for piece in self.splitter.pieces(text) {
            encode_piece(&self.ranks, piece.as_bytes(), scratch, ids);
        }
    }
}

/// No token of a known vocabulary comes near this; it bounds the work of one lookup.
const MAX_LINE_BYTES: usize = 4096;
/// Released vocabularies reserve 256 ids.
const MAX_RESERVED: u32 = 65_536;
const MAX_NAME_BYTES: usize = 256;

/// Reads `tiktoken.model`: one `base64(bytes) rank` per line, blank lines skipped, in any order. Index is rank.
fn read_model(model: &[u8], vocab_size: u32) -> Result<Vec<Arc<[u8]>>, TextError> {
    let mut entries = Vec::new();
    for (text, line) in model.split(|&b| b == b'\n').zip(1..) {
        if let Some(entry) = read_line(text, line)? {
            let rank = entry.rank;
            if rank >= vocab_size {
                return Err(TextError::RankBeyondVocab { line, rank, vocab_size });
            }
            entries.push(entry);
        }
    }
    if entries.is_empty() {
        return Err(TextError::EmptyModel);
    }

    let n_ranks = entries.len();
    let mut line_of_rank = vec![0; n_ranks];
    let mut line_of_token: HashMap<Arc<[u8]>, usize> = HashMap::with_capacity(n_ranks);
    let mut by_rank: Vec<Arc<[u8]>> = vec![Arc::from([]); n_ranks];
    for Entry { line, rank, bytes } in entries {
        let Some(first_line) = line_of_rank.get_mut(rank as usize) else {
            return Err(TextError::RankGap { line, rank, n_ranks });
        };
        if *first_line != 0 {
            return Err(TextError::DuplicateRank { line, first_line: *first_line, rank });
        }
        *first_line = line;
        if let Some(first_line) = line_of_token.insert(Arc::clone(&bytes), line) {
            return Err(TextError::DuplicateToken { line, first_line, rank });
        }
        by_rank[rank as usize] = bytes;
    }
    Ok(by_rank)
}

/// One line of `tiktoken.model`.
struct Entry {
    line: usize,
    rank: u32,
    bytes: Arc<[u8]>,
}

/// The entry of one line, `None` for a blank one.
fn read_line(text: &[u8], line: usize) -> Result<Option<Entry>, TextError> {
    if text.len() > MAX_LINE_BYTES {
        return Err(TextError::LineTooLong { line, bytes: text.len(), limit: MAX_LINE_BYTES });
    }
    let mut fields = text.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let (token, rank) = match (fields.next(), fields.next(), fields.next()) {
        (None, ..) => return Ok(None),
        (Some(token), Some(rank), None) => (token, rank),
        _ => return Err(TextError::MalformedLine { line, found: excerpt(text) }),
    };
    let Ok(bytes) = BASE64.decode(token) else {
        return Err(TextError::BadBase64 { line, found: excerpt(token) });
    };
    let Some(rank) = std::str::from_utf8(rank).ok().and_then(parse_id) else {
        return Err(TextError::BadRank { line, found: excerpt(rank) });
    };
    let bytes = bytes.into();
    Ok(Some(Entry { line, rank, bytes }))
}

/// The names of ids `n_ranks..vocab_size`, in order, all different.
fn read_reserved_names(
    tokenizer_config: &[u8],
    n_ranks: u32,
    vocab_size: u32,
) -> Result<Vec<String>, TextError> {
    let config: TokenizerConfig = serde_json::from_slice(tokenizer_config)?;
    let n_reserved = vocab_size - n_ranks;
    if n_reserved > MAX_RESERVED {
        return Err(TextError::TooManyReserved {
            vocab_size,
            n_reserved,
            n_ranks,
            limit: MAX_RESERVED,
        });
    }
    let mut names: Vec<Option<String>> = vec![None; n_reserved as usize];
    for (key, AddedToken { content: name }) in config.added_tokens_decoder.0 {
        let Some(id) = parse_id(&key) else {
            return Err(TextError::BadReservedId { found: excerpt(key.as_bytes()) });
        };
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return Err(TextError::ReservedNameLength {
                id,
                bytes: name.len(),
                limit: MAX_NAME_BYTES,
            });
        }
        if id < n_ranks {
            return Err(TextError::ReservedIdIsRank { id, name, n_ranks });
        }
        let Some(slot) = names.get_mut((id - n_ranks) as usize) else {
            return Err(TextError::ReservedIdBeyondVocab { id, name, vocab_size });
        };
        if slot.replace(name).is_some() {
            return Err(TextError::DuplicateReservedId { id });
        }
    }

    let names: Vec<String> = names
        .into_iter()
        .zip(n_ranks..)
        .map(|(name, id)| name.unwrap_or_else(|| format!("<|reserved_token_{id}|>")))
        .collect();
    let mut seen = HashMap::with_capacity(names.len());
    for (name, id) in names.iter().zip(n_ranks..) {
        if let Some(first_id) = seen.insert(name, id) {
            return Err(TextError::DuplicateReservedName { first_id, id, name: name.clone() });
        }
    }
    Ok(names)
}

/// A 32-bit decimal without sign or leading zeros, so that one id has one spelling.
fn parse_id(text: &str) -> Option<u32> {
    let canonical = text == "0" || text.starts_with(|c: char| c.is_ascii_digit() && c != '0');
    if canonical { text.parse().ok() } else { None }
}

/// The start of a hostile field, safe to print.
fn excerpt(bytes: &[u8]) -> String {
    const SHOWN_BYTES: usize = 40;
    let dots = if bytes.len() > SHOWN_BYTES { "…" } else { "" };
    format!("{}{dots}", bytes[..bytes.len().min(SHOWN_BYTES)].escape_ascii())
}

#[derive(Deserialize)]
struct TokenizerConfig {
    added_tokens_decoder: AddedTokens,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

/// The entries as written: a map type would silently keep one of two entries for the same id.
struct AddedTokens(Vec<(String, AddedToken)>);

impl<'de> Deserialize<'de> for AddedTokens {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> serde::de::Visitor<'de> for Entries {
            type Value = AddedTokens;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map from ids to {\"content\": name}")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<AddedTokens, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(AddedTokens(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
