//! One routed expert as one aligned record.

use super::manifest::{Codec, Matrix};
use super::{ALIGN, PART_ALIGN, VERSION, checksum};

const MAGIC: &[u8; 8] = b"RILLXPRT";
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 128;
/// The part of the header that its own checksum covers.
const COVERED_BYTES: usize = 120;

/// Gate, up and down of an expert and where their bytes lie in a record. Where formats' lengths
/// differ, the layout of a container's records is that of the largest there can be, and every record
/// has one of its own: [`own`](Self::own).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    /// Gate, up, down.
    pub matrices: [Matrix; 3],
    /// First byte and number of bytes of the codes of gate, up and down, then of their scales.
    parts: [(usize, usize); 6],
    /// One past the last byte of the last part.
    end: usize,
    /// Bytes of a record; of the largest, where they differ.
    pub record_bytes: usize,
}

impl RecordLayout {
    /// The layout of three matrices; `None` when a record of them cannot be addressed.
    pub fn new(matrices: [Matrix; 3]) -> Option<Self> {
        // The header has 32 bits for a length that differs.
        let fits = |m: &Matrix| !m.codec.name.varies() || m.code_bytes <= u64::from(u32::MAX);
        matrices.iter().all(fits).then_some(())?;
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

    /// Whether records differ in size.
    pub fn varies(&self) -> bool {
        self.matrices.iter().any(|matrix| matrix.codec.name.varies())
    }

    /// The same, of records of which the largest has so many bytes; `None` when that is none, or more
    /// than three matrices can take.
    pub(super) fn with_largest(self, record_bytes: u64) -> Option<Self> {
        let record_bytes = usize::try_from(record_bytes).ok()?;
        let fits = record_bytes > 0 && record_bytes <= self.record_bytes;
        fits.then_some(Self { record_bytes, ..self })
    }

    /// The layout of a record whose matrices have so many bytes of codes; `None` when a matrix or the
    /// record would have more than there can be, or one whose length is known has another.
    pub fn with_code_bytes(&self, code_bytes: [u64; 3]) -> Option<Self> {
        let mut matrices = self.matrices.clone();
        for (matrix, bytes) in matrices.iter_mut().zip(code_bytes) {
            let fits = match matrix.codec.name.varies() {
                true => bytes <= matrix.code_bytes,
                false => bytes == matrix.code_bytes,
            };
            fits.then_some(())?;
            matrix.code_bytes = bytes;
        }
        Self::new(matrices).filter(|own| own.record_bytes <= self.record_bytes)
    }

    /// The layout of the record that begins with `header`, and the checksum of its payload as it says. With
    /// that layout the record's parts can be taken from it.
    ///
    /// # Errors
    /// When this is not the whole header of such a record.
    pub fn own(&self, header: &[u8], layer: u32, expert: u32) -> Result<(Self, u64), Mismatch> {
        let Some((header, _)) = header.split_first_chunk::<HEADER_BYTES>() else {
            let expected = format!("at least {HEADER_BYTES}");
            return Err(Mismatch::new("its length", expected, header.len()));
        };
        if &header[..8] != MAGIC {
            let found = header[..8].escape_ascii();
            return Err(Mismatch::new("its magic at byte 0", "RILLXPRT", found));
        }
        let place = (u32_at(header, 12), u32_at(header, 16));
        if place != (layer, expert) {
            return Err(Mismatch::new(
                "its place at byte 12",
                format!("layer {layer}, expert {expert}"),
                format!("layer {}, expert {}", place.0, place.1),
            ));
        }
        let own = match self.varies() {
            false => self.clone(),
            true => {
                let stated = |i: usize| match self.matrices[i].codec.name.varies() {
                    true => u64::from(u32_at(header, 44 + 8 * i)),
                    false => self.matrices[i].code_bytes,
                };
                let code_bytes = [stated(0), stated(1), stated(2)];
                self.with_code_bytes(code_bytes).ok_or_else(|| {
                    let most = self.matrices.each_ref().map(|matrix| matrix.code_bytes);
                    let most = format!("at most {most:?} in {} bytes", self.record_bytes);
                    Mismatch::new("its bytes of codes", most, format!("{code_bytes:?}"))
                })?
            }
        };
        let checksum = u64_at(header, 64);
        let expected = own.header(layer, expert, checksum);
        if let Some(byte) = header.iter().zip(&expected).position(|(a, b)| a != b) {
            let what = format!("its header at byte {byte}");
            return Err(Mismatch::new(what, expected[byte], header[byte]));
        }
        Ok((own, checksum))
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
        h[8..10].copy_from_slice(&(VERSION as u16).to_le_bytes());
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
            if name.varies() {
                // `new` has seen to it that this fits.
                h[at + 4..at + 8].copy_from_slice(&(matrix.code_bytes as u32).to_le_bytes());
            }
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
        let (own, stored) = self.own(record, layer, expert)?;
        if record.len() != own.record_bytes {
            return Err(Mismatch::new("its length", own.record_bytes, record.len()));
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

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |n, &b| n << 8 | u32::from(b))
}
