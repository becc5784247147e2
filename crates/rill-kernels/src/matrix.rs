//! Weight matrices as the bytes they are stored in.

use std::ops::Range;

/// Inputs that share one MXFP4 scale.
pub const MXFP4_BLOCK: usize = 32;
/// The scale byte that means NaN.
const MXFP4_NAN: u8 = 255;

/// What the sixteen MXFP4 nibbles mean: sign bit, then an index of the magnitude.
pub const MXFP4_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// 2^(e − 127) of an MXFP4 scale byte below 255.
#[inline(always)]
pub fn mxfp4_scale(e: u8) -> f32 {
    // 2^-127 is subnormal: its only set bit is the highest of the fraction.
    f32::from_bits(if e == 0 { 1 << 22 } else { u32::from(e) << 23 })
}

/// Why bytes are not the matrix they are said to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The byte count does not fit the shape.
    #[error("a {rows} × {cols} {format} matrix takes {expected} bytes of {part}, found {found}")]
    Length {
        /// Number format.
        format: &'static str,
        /// Which bytes.
        part: &'static str,
        /// Output rows.
        rows: usize,
        /// Input columns.
        cols: usize,
        /// Bytes the shape takes; `usize::MAX` when that does not fit a `usize`.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A packed row must be whole blocks.
    #[error("MXFP4 packs {MXFP4_BLOCK} inputs to a block, which does not divide {cols} columns")]
    Columns {
        /// Input columns.
        cols: usize,
    },
    /// A scale of NaN would poison every result.
    #[error(
        "the scale of row {row}, inputs {first}..{} is NaN (byte 255)",
        first + MXFP4_BLOCK
    )]
    NanScale {
        /// Output row.
        row: usize,
        /// First input of the block.
        first: usize,
    },
}

/// A matrix (rows, cols) over borrowed, checked bytes; it is never expanded.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    rows: usize,
    cols: usize,
    data: Data<'a>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Data<'a> {
    F32(&'a [u8]),
    Bf16(&'a [u8]),
    Mxfp4 { packed: &'a [u8], scales: &'a [u8] },
}

impl<'a> Matrix<'a> {
    /// Little-endian f32, row-major.
    pub fn f32(rows: usize, cols: usize, bytes: &'a [u8]) -> Result<Self, LayoutError> {
        check_length("f32", "data", rows, cols, cols.checked_mul(4), bytes)?;
        Ok(Self { rows, cols, data: Data::F32(bytes) })
    }

    /// Little-endian bf16, row-major.
    pub fn bf16(rows: usize, cols: usize, bytes: &'a [u8]) -> Result<Self, LayoutError> {
        check_length("bf16", "data", rows, cols, cols.checked_mul(2), bytes)?;
        Ok(Self { rows, cols, data: Data::Bf16(bytes) })
    }

    /// MXFP4: `packed` (rows, cols/2), low nibble first; `scales` (rows, cols/32), none of
    /// them NaN.
    pub fn mxfp4(
        rows: usize,
        cols: usize,
        packed: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Self, LayoutError> {
        if !cols.is_multiple_of(MXFP4_BLOCK) {
            return Err(LayoutError::Columns { cols });
        }
        check_length("MXFP4", "nibbles", rows, cols, Some(cols / 2), packed)?;
        check_length("MXFP4", "scales", rows, cols, Some(cols / MXFP4_BLOCK), scales)?;
        if let Some(at) = scales.iter().position(|&e| e == MXFP4_NAN) {
            let blocks = cols / MXFP4_BLOCK;
            return Err(LayoutError::NanScale {
                row: at / blocks,
                first: at % blocks * MXFP4_BLOCK,
            });
        }
        Ok(Self { rows, cols, data: Data::Mxfp4 { packed, scales } })
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        match self.data {
            Data::F32(b) | Data::Bf16(b) => b.len(),
            Data::Mxfp4 { packed, scales } => packed.len() + scales.len(),
        }
    }

    /// Some of the rows, as a matrix.
    ///
    /// # Panics
    /// When the range lies outside the matrix.
    pub fn row_range(&self, rows: Range<usize>) -> Self {
        let part = |bytes: &'a [u8], row_bytes: usize| {
            &bytes[rows.start * row_bytes..rows.end * row_bytes]
        };
        let cols = self.cols;
        let data = match self.data {
            Data::F32(b) => Data::F32(part(b, 4 * cols)),
            Data::Bf16(b) => Data::Bf16(part(b, 2 * cols)),
            Data::Mxfp4 { packed, scales } => Data::Mxfp4 {
                packed: part(packed, cols / 2),
                scales: part(scales, cols / MXFP4_BLOCK),
            },
        };
        Self { rows: rows.len(), cols, data }
    }

    pub(crate) fn data(&self) -> Data<'a> {
        self.data
    }
}

fn check_length(
    format: &'static str,
    part: &'static str,
    rows: usize,
    cols: usize,
    row_bytes: Option<usize>,
    bytes: &[u8],
) -> Result<(), LayoutError> {
    let expected = row_bytes.and_then(|b| b.checked_mul(rows));
    if expected == Some(bytes.len()) {
        return Ok(());
    }
    let expected = expected.unwrap_or(usize::MAX);
    Err(LayoutError::Length { format, part, rows, cols, expected, found: bytes.len() })
}
