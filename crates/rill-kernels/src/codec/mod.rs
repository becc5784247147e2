//! Packed number formats.
//!
//! Each format is one module with its layout, its encoder and its scalar product, which is its
//! specification; `table.rs` has one line for each. A matrix of any format is two runs of bytes,
//! codes and scales, and the vector-quantised ones also refer to tables that many matrices share.

use half::f16;

pub(crate) mod mxfp4;
pub(crate) mod mxfp4z;
pub(crate) mod plain;
pub(crate) mod q4;
pub(crate) mod q8;
pub(crate) mod trellis;
pub(crate) mod vq;

pub use mxfp4z::{Mxfp4zKernels, Mxfp4zMatrix};
pub use trellis::{
    Activations, Trellis, TrellisEncoder, TrellisKernels, TrellisMatrix, TrellisTables,
};

/// Partial sums of one reduction.
pub(crate) const PARTIALS: usize = 16;

/// A packed number format, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// Little-endian f32.
    F32,
    /// Little-endian bf16.
    Bf16,
    /// Signed bytes with one f16 scale per group of inputs.
    Q8 {
        /// Inputs that share a scale.
        group: usize,
    },
    /// Four bits with one f16 scale per group of inputs.
    Q4 {
        /// Inputs that share a scale.
        group: usize,
    },
    /// Four-bit floats with one power of two per 32 inputs, as K3's experts are published.
    Mxfp4,
    /// Sums of table entries of eight weights, with one f16 scale per row. Read, never written.
    Vq(Vq),
    /// Windows into a stream of bits; `scales` are the tables, then the side nibbles.
    Trellis(Trellis),
    /// The third of [`Mxfp4`](Self::Mxfp4), entropy-coded: `codes` of a length that differs, no `scales`.
    Mxfp4z,
}

/// Parameters of a vector-quantised format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vq {
    /// Table entries that are added up.
    pub stages: usize,
    /// Entries of one stage's table.
    pub entries: usize,
    /// Rows whose indices are interleaved; 0 for none.
    pub index_block: usize,
    /// Whether four indices of six bits are packed into three bytes.
    pub packed: bool,
}

/// Inputs that a group may hold.
pub const GROUP_RANGE: std::ops::RangeInclusive<usize> = 16..=1024;

/// Bytes of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of codes.
    pub codes: usize,
    /// Bytes of scales; 0 for formats without.
    pub scales: usize,
}

impl Codec {
    /// Short name, as used on the command line and on disk.
    pub fn name(&self) -> &'static str {
        match self {
            Codec::F32 => "f32",
            Codec::Bf16 => "bf16",
            Codec::Q8 { .. } => "q8",
            Codec::Q4 { .. } => "q4",
            Codec::Mxfp4 => "mxfp4",
            Codec::Vq(Vq { stages: 2, .. }) => "vq2r",
            Codec::Vq(Vq { packed: true, .. }) => "vq4p",
            Codec::Vq(_) => "vq3r",
            Codec::Trellis(trellis) if trellis.is_rotated() => "trellis-rotated",
            Codec::Trellis(_) => "trellis",
            Codec::Mxfp4z => "mxfp4z",
        }
    }

    /// The format of this name, of those that can be written and have no other parameter than `group`,
    /// which counts for grouped ones.
    pub fn parse(name: &str, group: usize) -> Option<Self> {
        let grouped = [Codec::Q8 { group }, Codec::Q4 { group }];
        let formats =
            [Codec::F32, Codec::Bf16, grouped[0], grouped[1], Codec::Mxfp4, Codec::Mxfp4z];
        formats.into_iter().find(|codec| codec.name() == name)
    }

    /// The format that a container calls so, with its parameters; those that it does not have count nothing.
    ///
    /// # Errors
    /// When there is no such format, or a trellis cannot have such parameters.
    pub fn stored(
        name: &str,
        group: usize,
        rate: usize,
        width: usize,
    ) -> Result<Self, LayoutError> {
        match name {
            "trellis" => Ok(Codec::Trellis(Trellis::new(rate, width)?)),
            "trellis-rotated" => Ok(Codec::Trellis(Trellis::rotated(rate, width)?)),
            _ => Self::parse(name, group).ok_or(LayoutError::UnknownFormat),
        }
    }

    /// Whether matrices of one shape take different numbers of bytes, those of the layout at most.
    pub fn is_variable(&self) -> bool {
        *self == Codec::Mxfp4z
    }

    /// Bytes at the start of the scales that all rows share.
    pub fn table_bytes(&self) -> usize {
        if let Codec::Trellis(_) = self { trellis::TABLE_BYTES } else { 0 }
    }

    /// Rows that can only be multiplied together: cut elsewhere, products cost more.
    pub fn tile_rows(&self) -> usize {
        match self {
            Codec::Trellis(_) => trellis::TILE,
            Codec::Mxfp4z => mxfp4z::TILE,
            _ => 1,
        }
    }

    /// Bytes that a matrix (rows, cols) takes, or why it cannot have this format.
    pub fn layout(&self, rows: usize, cols: usize) -> Result<Layout, LayoutError> {
        let too_large = LayoutError::TooLarge { rows, cols };
        let (code_bytes, scale_bytes) = match *self {
            Codec::F32 => (cols.checked_mul(4).ok_or(too_large)?, 0),
            Codec::Bf16 => (cols.checked_mul(2).ok_or(too_large)?, 0),
            Codec::Q8 { group } => (cols, 2 * cols.div_ceil(checked_group(group)?)),
            Codec::Q4 { group } => (cols.div_ceil(2), 2 * cols.div_ceil(checked_group(group)?)),
            Codec::Mxfp4 => {
                if !cols.is_multiple_of(mxfp4::BLOCK) {
                    return Err(LayoutError::Columns { format: "mxfp4", of: mxfp4::BLOCK, cols });
                }
                (cols / 2, cols / mxfp4::BLOCK)
            }
            Codec::Vq(vq) => return vq.layout(rows, cols),
            Codec::Trellis(trellis) => {
                let Layout { codes, scales } = trellis.layout(rows, cols)?;
                let scales = scales.checked_add(trellis::TABLE_BYTES).ok_or(too_large)?;
                return Ok(Layout { codes, scales });
            }
            Codec::Mxfp4z => {
                return Ok(Layout { codes: mxfp4z::most_bytes(rows, cols)?, scales: 0 });
            }
        };
        let all = |row_bytes: usize| rows.checked_mul(row_bytes).ok_or(too_large);
        Ok(Layout { codes: all(code_bytes)?, scales: all(scale_bytes)? })
    }

    /// Packs one row; `codes` and `scales` have the layout's bytes for one row.
    ///
    /// # Errors
    /// When a weight is not finite, a scale is out of the format's range, or the format cannot
    /// be written.
    ///
    /// # Panics
    /// When the lengths are not those of the layout.
    pub fn encode_row(
        &self,
        weights: &[f32],
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), EncodeError> {
        if let Some(input) = weights.iter().position(|w| !w.is_finite()) {
            return Err(EncodeError::NotFinite { input, weight: weights[input] });
        }
        let layout = self.layout(1, weights.len()).map_err(EncodeError::Layout)?;
        assert_eq!((codes.len(), scales.len()), (layout.codes, layout.scales));
        match *self {
            Codec::F32 => plain::encode_f32(weights, codes),
            Codec::Bf16 => plain::encode_bf16(weights, codes),
            Codec::Q8 { group } => q8::encode_row(weights, group, codes, scales)?,
            Codec::Q4 { group } => q4::encode_row(weights, group, codes, scales)?,
            Codec::Mxfp4 | Codec::Vq(_) | Codec::Trellis(_) | Codec::Mxfp4z => {
                return Err(EncodeError::ReadOnly(self.name()));
            }
        }
        Ok(())
    }
}

fn checked_group(group: usize) -> Result<usize, LayoutError> {
    let fits = GROUP_RANGE.contains(&group) && group.is_multiple_of(PARTIALS);
    if fits { Ok(group) } else { Err(LayoutError::Group { group }) }
}

/// Why bytes are not the matrix they are said to be.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
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
        /// Bytes the shape takes.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A packed row must be whole blocks.
    #[error("{format} packs {of} inputs together, which does not divide {cols} columns")]
    Columns {
        /// Number format.
        format: &'static str,
        /// Inputs packed together.
        of: usize,
        /// Input columns.
        cols: usize,
    },
    /// The bytes of such a matrix cannot be counted.
    #[error("a matrix of {rows} × {cols} is too large")]
    TooLarge {
        /// Output rows.
        rows: usize,
        /// Input columns.
        cols: usize,
    },
    /// A group of inputs that kernels cannot take.
    #[error("groups of {group} inputs are not a multiple of 16 from 16 to 1024")]
    Group {
        /// Inputs that share a scale.
        group: usize,
    },
    /// A name that no format has.
    #[error("there is no number format of this name")]
    UnknownFormat,
    /// A scale of NaN or infinity would poison every result.
    #[error("the scale of row {row}, inputs from {first} on, is {scale}")]
    Scale {
        /// Output row.
        row: usize,
        /// First input it applies to.
        first: usize,
        /// What it is.
        scale: f32,
    },
    /// Parameters of a vector-quantised format that do not belong together.
    #[error("{0}")]
    Vq(&'static str),
    /// Parameters or tables of the trellis format that it does not have.
    #[error("{0}")]
    Trellis(&'static str),
    /// A matrix that mxfp4z does not have, or bytes that are none.
    #[error("{0}")]
    Mxfp4z(&'static str),
    /// A table byte that products cannot take.
    #[error("byte {byte} of the trellis tables is {found}, at most {most} is possible")]
    TableByte {
        /// Where.
        byte: usize,
        /// The largest that may be there.
        most: u8,
        /// What it is.
        found: u8,
    },
    /// A weight that no code means.
    #[error("the weight of row {row}, input {input}, is {weight}: repair or leave out the tensor")]
    Weight {
        /// Output row.
        row: usize,
        /// Input column.
        input: usize,
        /// What it is.
        weight: f32,
    },
    /// An index beyond its table.
    #[error("byte {byte} of the indices is {found}, the table has {entries} entries")]
    Index {
        /// Where.
        byte: usize,
        /// The index.
        found: usize,
        /// Entries of a table.
        entries: usize,
    },
}

/// Why weights cannot be packed.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// NaN and infinity have no code.
    #[error("the weight of input {input} is {weight}")]
    NotFinite {
        /// Input column.
        input: usize,
        /// What it is.
        weight: f32,
    },
    /// The largest weight of a group is beyond what an f16 scale can express.
    #[error("the group of inputs from {first} on reaches {largest}, too large for an f16 scale")]
    ScaleOverflow {
        /// First input of the group.
        first: usize,
        /// Largest magnitude in it.
        largest: f32,
    },
    /// The format is only read, or made from whole matrices.
    #[error("{0} is not made row by row from plain weights")]
    ReadOnly(&'static str),
    /// The shape cannot have the format.
    #[error(transparent)]
    Layout(LayoutError),
}

/// The `i`-th f16 of some bytes.
#[inline(always)]
pub(crate) fn f16_at(bytes: &[u8], i: usize) -> f32 {
    let b = &bytes[2 * i..2 * i + 2];
    f16::from_le_bytes([b[0], b[1]]).to_f32_const()
}

/// Consecutive f16 scales, the first of them number `first`; all are finite. The same values as
/// [`f16_at`], without branches, so that compilers do several at once.
#[inline(always)]
pub(crate) fn f16_scales(bytes: &[u8], first: usize, out: &mut [f32]) {
    let bytes = &bytes[2 * first..][..2 * out.len()];
    for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        let half = u32::from(u16::from_le_bytes([b[0], b[1]]));
        // The exponent moves from a bias of 15 to one of 127. A subnormal's fraction is completed to
        // a normal number of exponent −14 and the 2^−14 that this added is taken away, exactly.
        let normal = ((half & 0x7fff) << 13) + (112 << 23);
        let subnormal = f32::from_bits(normal + (1 << 23)) - f32::from_bits(113 << 23);
        let magnitude = if half & 0x7c00 == 0 { subnormal.to_bits() } else { normal };
        *out = f32::from_bits(magnitude | (half & 0x8000) << 16);
    }
}

/// The first of some f16 scales, `per_row` to a row, that is not finite.
pub(crate) fn check_f16_scales(
    scales: &[u8],
    per_row: usize,
    inputs_per_scale: usize,
) -> Result<(), LayoutError> {
    // Exponent bits all set: infinity or NaN.
    let bad = |b: &[u8; 2]| b[1] & 0x7c == 0x7c;
    match first(scales.as_chunks().0, bad) {
        None => Ok(()),
        Some(at) => Err(LayoutError::Scale {
            row: at / per_row,
            first: at % per_row * inputs_per_scale,
            scale: f16_at(scales, at),
        }),
    }
}

/// Low and high bytes of values that are exact as bf16.
pub(crate) const fn bf16_bytes(values: [f32; 16]) -> [[u8; 16]; 2] {
    let mut out = [[0; 16]; 2];
    let mut i = 0;
    while i < values.len() {
        let [.., low, high] = values[i].to_le_bytes();
        (out[0][i], out[1][i]) = (low, high);
        i += 1;
    }
    out
}

/// The first item that is bad. Weights are looked through for every token and almost never bad, so
/// this counts in vectors where a search would go item by item.
#[inline(always)]
pub(crate) fn first<T>(items: &[T], bad: impl Fn(&T) -> bool) -> Option<usize> {
    let any = items.iter().fold(0, |any, item| any | u8::from(bad(item)));
    if any == 0 { None } else { items.iter().position(bad) }
}

/// The fixed tree that joins partial sums.
#[inline(always)]
pub(crate) fn join(p: [f32; PARTIALS]) -> f32 {
    // An array for each level, because compilers keep those in registers.
    let (mut eight, mut four) = ([0.0; 8], [0.0; 4]);
    for j in 0..8 {
        eight[j] = p[j] + p[j + 8];
    }
    for j in 0..4 {
        four[j] = eight[j] + eight[j + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// The element of largest magnitude, the first of equals; 0 for none.
pub(crate) fn largest(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0, |m: f32, &w| if w.abs() > m.abs() { w } else { m })
}
