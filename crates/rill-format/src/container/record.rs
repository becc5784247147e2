//! One routed expert as one aligned record.

use super::manifest::{Codec, Matrix};
use super::{ALIGN, PART_ALIGN, checksum};

const MAGIC: &[u8; 8] = b"RILLXPRT";
const VERSION: u16 = 0;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 128;
/// The part of the header that its own checksum covers.
const COVERED_BYTES: usize = 120;

/// Gate, up and down of an expert and where their bytes lie in a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    /// Gate, up, down.
    pub matrices: [Matrix; 3],
    /// First byte and number of bytes of the codes of gate, up and down, then of their scales.
    parts: [(usize, usize); 6],
    /// One past the last byte of the last part.
    end: usize,
    /// Bytes of a record.
    pub record_bytes: usize,
}

impl RecordLayout {
    /// The layout of three matrices; `None` when a record of them cannot be addressed.
    pub fn new(matrices: [Matrix; 3]) -> Option<Self> {
        let mut end = HEADER_BYTES;
        let mut parts = [(0, 0); 6];
        let [gate, up, down] = &matrices;
        let sizes = [
            gate.code_bytes,
            up.code_bytes,
            down.code_bytes,
            gate.scale_bytes,
            up.scale_bytes,
            down.scale_bytes,
        ];
        for (part, bytes) in parts.iter_mut().zip(sizes) {
            let bytes = usize::try_from(bytes).ok()?;
            let start = end.checked_next_multiple_of(PART_ALIGN)?;
            *part = (start, bytes);
            if bytes > 0 {
                end = start.checked_add(bytes)?;
            }
        }
        let record_bytes = end.checked_next_multiple_of(ALIGN)?;
        // Room for arithmetic on offsets within a bank.
        (record_bytes < isize::MAX as usize / 2).then_some(())?;
        Some(Self { matrices, parts, end, record_bytes })
    }

    /// Codes and scales of gate (0), up (1) or down (2).
    ///
    /// # Panics
    /// When the record is shorter than the layout says.
    pub fn matrix<'a>(&self, record: &'a [u8], index: usize) -> (&'a [u8], &'a [u8]) {
        let part = |(start, bytes): (usize, usize)| &record[start..start + bytes];
        (part(self.parts[index]), part(self.parts[3 + index]))
    }

    /// [`matrix`](Self::matrix), to write.
    ///
    /// # Panics
    /// When the record is shorter than the layout says.
    pub fn matrix_mut<'a>(
        &self,
        record: &'a mut [u8],
        index: usize,
    ) -> (&'a mut [u8], &'a mut [u8]) {
        let ((code_start, code_bytes), (scale_start, scale_bytes)) =
            (self.parts[index], self.parts[3 + index]);
        // Scales always lie behind all codes.
        let (codes, scales) = record.split_at_mut(code_start + code_bytes);
        let scales =
            &mut scales[scale_start.max(code_start + code_bytes) - code_start - code_bytes..];
        (&mut codes[code_start..], &mut scales[..scale_bytes])
    }

    /// Writes the header of a record whose parts are filled and whose other bytes are zero.
    ///
    /// # Panics
    /// When the record does not have the layout's size.
    pub fn seal(&self, record: &mut [u8], layer: u32, expert: u32) {
        assert_eq!(record.len(), self.record_bytes);
        let payload_checksum = checksum(&record[HEADER_BYTES..]);
        record[..HEADER_BYTES].copy_from_slice(&self.header(layer, expert, payload_checksum));
    }

    /// What the header must be for a payload with this checksum.
    fn header(&self, layer: u32, expert: u32, payload_checksum: u64) -> [u8; HEADER_BYTES] {
        let mut h = [0; HEADER_BYTES];
        h[..8].copy_from_slice(MAGIC);
        h[8..10].copy_from_slice(&VERSION.to_le_bytes());
        h[10..12].copy_from_slice(&(HEADER_BYTES as u16).to_le_bytes());
        h[12..16].copy_from_slice(&layer.to_le_bytes());
        h[16..20].copy_from_slice(&expert.to_le_bytes());
        h[24..32].copy_from_slice(&(self.record_bytes as u64).to_le_bytes());
        h[32..40].copy_from_slice(&((self.end - HEADER_BYTES) as u64).to_le_bytes());
        for (i, matrix) in self.matrices.iter().enumerate() {
            let at = 40 + 8 * i;
            let Codec { name, group, rate, width } = matrix.codec;
            h[at] = name.id();
            // Those of a manifest fit, and one of group and rate is 0.
            h[at + 1] = width as u8;
            h[at + 2..at + 4].copy_from_slice(&((group | rate) as u16).to_le_bytes());
        }
        h[64..72].copy_from_slice(&payload_checksum.to_le_bytes());
        let own = checksum(&h[..COVERED_BYTES]);
        h[COVERED_BYTES..].copy_from_slice(&own.to_le_bytes());
        h
    }

    /// Checks the header, and the payload when asked; returns the payload's checksum.
    pub fn check(
        &self,
        record: &[u8],
        layer: u32,
        expert: u32,
        payload: bool,
    ) -> Result<u64, Mismatch> {
        if record.len() != self.record_bytes {
            return Err(Mismatch::new("its length", self.record_bytes, record.len()));
        }
        let stored = u64_at(record, 64);
        let expected = self.header(layer, expert, stored);
        if record[..HEADER_BYTES] != expected {
            return Err(self.explain(&record[..HEADER_BYTES], &expected, layer, expert));
        }
        if payload {
            let found = checksum(&record[HEADER_BYTES..]);
            if found != stored {
                return Err(Mismatch::new(
                    "the checksum of its payload",
                    format!("{stored:016x}"),
                    format!("{found:016x}"),
                ));
            }
        }
        Ok(stored)
    }

    /// Says which field of a header is wrong.
    fn explain(&self, found: &[u8], expected: &[u8], layer: u32, expert: u32) -> Mismatch {
        let u32_at =
            |h: &[u8], at: usize| u32::from_le_bytes([h[at], h[at + 1], h[at + 2], h[at + 3]]);
        if &found[..8] != MAGIC {
            let text = found[..8].escape_ascii().to_string();
            return Mismatch::new("its magic at byte 0", "RILLXPRT", text);
        }
        if u32_at(found, 12) != layer || u32_at(found, 16) != expert {
            return Mismatch::new(
                "its place at byte 12",
                format!("layer {layer}, expert {expert}"),
                format!("layer {}, expert {}", u32_at(found, 12), u32_at(found, 16)),
            );
        }
        let byte = found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(0);
        Mismatch::new(format!("its header at byte {byte}"), expected[byte], found[byte])
    }
}

/// Where a record is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Which field.
    pub what: String,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

impl Mismatch {
    fn new(what: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self { what: what.into(), expected: expected.to_string(), found: found.to_string() }
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}
