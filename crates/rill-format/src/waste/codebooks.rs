//! `codebooks.bin`: the tables whose entries add up to the weights of experts.

use std::collections::HashMap;

use half::f16;

use super::manifest::VEC_DIM;
use crate::FormatError;

/// The codebooks of a container, decoded.
#[derive(Debug)]
pub(super) struct Codebooks {
    /// Values of one codebook.
    size: usize,
    values: Vec<f32>,
    /// Where in `values` each codebook begins.
    starts: HashMap<u16, usize>,
}

impl Codebooks {
    /// Decodes the whole file; each codebook must have `entries` entries.
    ///
    /// # Errors
    ///
    /// [`FormatError::BadCodebook`], with the byte.
    pub(super) fn parse(file: &str, bytes: &[u8], entries: usize) -> Result<Self, FormatError> {
        let size = entries * VEC_DIM;
        let mut books = Self { size, values: Vec::new(), starts: HashMap::new() };
        let mut rest = bytes;
        while !rest.is_empty() {
            let at = bytes.len() - rest.len();
            let bad = |byte: usize, field, expected: String, found: String| {
                let (file, byte) = (file.to_owned(), (at + byte) as u64);
                Err(FormatError::BadCodebook { file, byte, field, expected, found })
            };
            let record_bytes = HEADER_BYTES + 2 * size;
            let Some((record, after)) = rest.split_at_checked(record_bytes) else {
                return bad(
                    0,
                    "a codebook",
                    format!("{record_bytes} bytes long"),
                    format!("{} bytes long", rest.len()),
                );
            };
            rest = after;

            let word = |i: usize| u32::from_le_bytes([0, 1, 2, 3].map(|j| record[i + j]));
            let id = u16::from_le_bytes([record[4], record[5]]);
            for (byte, field, expected, found) in [
                (0, "the magic number", MAGIC, word(0)),
                (7, "vec_dim", VEC_DIM as u32, u32::from(record[7])),
                (8, "the number of entries", entries as u32, word(8)),
                (12, "a reserved field", 0, word(12)),
            ] {
                if found != expected {
                    return bad(byte, field, expected.to_string(), found.to_string());
                }
            }
            // Which of the three is not stated for codebooks: their indices are in the records.
            if !matches!(record[6], 4 | 5 | 8) {
                return bad(6, "fmt", "4, 5 or 8".to_owned(), record[6].to_string());
            }
            if books.starts.insert(id, books.values.len()).is_some() {
                return bad(4, "the id", "one not seen before".to_owned(), id.to_string());
            }
            for (i, pair) in record[HEADER_BYTES..].chunks_exact(2).enumerate() {
                let value = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
                if !value.is_finite() {
                    let byte = HEADER_BYTES + 2 * i;
                    return bad(byte, "a value", "finite".to_owned(), value.to_string());
                }
                books.values.push(value);
            }
        }
        Ok(books)
    }

    /// Values of one codebook, (entries, 8).
    pub(super) fn get(&self, number: u16) -> Option<&[f32]> {
        let start = *self.starts.get(&number)?;
        Some(&self.values[start..start + self.size])
    }
}

/// "WCBK" in ASCII.
const MAGIC: u32 = 0x4b42_4357;
const HEADER_BYTES: usize = 16;
