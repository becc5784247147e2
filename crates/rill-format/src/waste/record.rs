//! One expert's record: where its three matrices lie, and the header that has to say the same.

use std::ops::Range;

use super::manifest::{VEC_DIM, WasteExperts};

/// Sizes of an expert's matrices, which the container does not say: gate and up are
/// (inter, width), down is (width, inter).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertDims {
    /// Rows of gate and up.
    pub inter: usize,
    /// Columns of gate and up.
    pub width: usize,
}

/// One matrix of an expert.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WasteMatrix {
    /// Bytes of its indices, within the record.
    pub codes: Range<usize>,
    /// Bytes of its f16 scales, one per row, within the record.
    pub scales: Range<usize>,
    /// Number of its first stage's codebook; the other stages' follow.
    pub first_codebook: u16,
}

/// Where an expert's matrices lie within its record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WasteExpert {
    /// (inter, width)
    pub gate: WasteMatrix,
    /// (inter, width)
    pub up: WasteMatrix,
    /// (width, inter)
    pub down: WasteMatrix,
}

/// A record's layout, which follows from the shape alone.
pub(super) struct RecordLayout {
    /// Where gate's, up's and down's indices and the scales begin.
    starts: [usize; 4],
    dims: ExpertDims,
    /// End of the scales.
    end: usize,
}

impl RecordLayout {
    /// `None` for shapes that cannot be split into vectors, or that no header can describe.
    pub(super) fn new(dims: ExpertDims, experts: WasteExperts) -> Option<Self> {
        let ExpertDims { inter, width } = dims;
        if inter == 0 || width == 0 || inter % VEC_DIM != 0 || width % VEC_DIM != 0 {
            return None;
        }
        let vector_bytes = if experts.packed { 3 } else { experts.stages };
        let codes = |rows: usize, cols: usize| {
            let rows = match experts.index_block {
                0 => rows,
                block => rows.checked_next_multiple_of(block)?,
            };
            rows.checked_mul(cols / VEC_DIM)?.checked_mul(vector_bytes)
        };
        let up = HEADER_BYTES.checked_add(codes(inter, width)?)?;
        let down = up.checked_add(codes(inter, width)?)?;
        let scales = down.checked_add(codes(width, inter)?)?;
        let end = inter.checked_mul(2)?.checked_add(width)?.checked_mul(2)?.checked_add(scales)?;
        // Offsets have 32 bits on disk, and the padded size must not overflow either.
        u32::try_from(end.checked_next_multiple_of(PAGE_BYTES as usize)?).ok()?;
        Some(Self { starts: [HEADER_BYTES, up, down, scales], dims, end })
    }

    /// Bytes of the record with its padding.
    pub(super) fn record_bytes(&self) -> u64 {
        (self.end as u64).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes that the checksum covers.
    pub(super) fn checked(&self) -> Range<usize> {
        HEADER_BYTES..self.end
    }

    /// Where the matrices are. `codebook_base` is the layer's.
    pub(super) fn expert(&self, codebook_base: u16, stages: usize) -> WasteExpert {
        let [gate, up, down, scales] = self.starts;
        let ExpertDims { inter, width } = self.dims;
        let up_scales = scales + 2 * inter;
        let down_scales = up_scales + 2 * inter;
        let matrix = |kind, codes, scales, rows| WasteMatrix {
            codes,
            scales: scales..scales + 2 * rows,
            // The manifest's check leaves room for three kinds of codebooks.
            first_codebook: codebook_base + kind * stages as u16,
        };
        WasteExpert {
            gate: matrix(0, gate..up, scales, inter),
            up: matrix(1, up..down, up_scales, inter),
            down: matrix(2, down..scales, down_scales, width),
        }
    }

    /// The first field of a header that is not what it must be: (name, byte, expected, found).
    /// Everything but the checksum is known before the record is read.
    pub(super) fn wrong_field(
        &self,
        record: &[u8],
        layer: u32,
        expert: u32,
        codebook_base: u16,
        experts: WasteExperts,
    ) -> Option<(&'static str, usize, u64, u64)> {
        let fmt = match (experts.packed, experts.stages) {
            (true, _) => 8,
            (false, 2) => 5,
            (false, _) => 4,
        };
        let [gate, up, down, scales] = self.starts.map(|start| start as u64);
        let blocks = self.record_bytes() / PAGE_BYTES;
        // Name, bytes, value. No flag is defined, so none can be honoured.
        let fields = [
            ("the magic number", 0..4, u64::from(MAGIC)),
            ("the layer", 4..6, u64::from(layer)),
            ("the expert", 6..8, u64::from(expert)),
            ("fmt", 8..9, fmt),
            ("flags", 9..10, 0),
            ("codebook_id", 10..12, u64::from(codebook_base)),
            ("lowrank_id", 12..14, 0),
            ("a reserved field", 14..16, 0),
            ("blocks_4k", 16..20, blocks),
            ("gate_off", 20..24, gate),
            ("up_off", 24..28, up),
            ("down_off", 28..32, down),
            ("scale_off", 32..36, scales),
            ("a reserved field", 40..44, 0),
            ("a reserved field", 44..48, 0),
        ];
        fields.into_iter().find_map(|(name, bytes, expected)| {
            let byte = bytes.start;
            let found = record[bytes].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
            (found != expected).then_some((name, byte, expected, found))
        })
    }
}

/// The CRC-32 in a record's header.
pub(super) fn stored_crc(record: &[u8]) -> u32 {
    u32::from_le_bytes([36, 37, 38, 39].map(|i| record[i]))
}

/// What records are aligned to and padded to.
pub(super) const PAGE_BYTES: u64 = 4096;

/// "WEXP" in ASCII.
const MAGIC: u32 = 0x5058_4557;
const HEADER_BYTES: usize = 48;
