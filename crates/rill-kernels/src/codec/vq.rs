//! Vector quantisation as in `.waste` containers: eight weights are the sum of one entry from each
//! stage's table, times the row's f16 scale. Read, never written.
//!
//! Indices lie in blocks of rows, `[row_block][vector][row_in_block][stage]`, rows padded to whole
//! blocks, or row by row when there are no blocks. A stage's index is a byte, or four stages of
//! six bits share three bytes, the first stage lowest.

use super::{Layout, LayoutError, PARTIALS, Vq, f16_at, join};

/// Weights of one table entry.
pub(crate) const VECTOR: usize = 8;

impl Vq {
    /// Bytes of one vector's indices.
    #[inline(always)]
    fn index_bytes(&self) -> usize {
        if self.packed { 3 } else { self.stages }
    }

    pub(super) fn layout(&self, rows: usize, cols: usize) -> Result<Layout, LayoutError> {
        if !cols.is_multiple_of(VECTOR) {
            return Err(LayoutError::Columns { format: "vq", of: VECTOR, cols });
        }
        let sound = matches!(
            (self.packed, self.stages, self.entries),
            (true, 4, 64) | (false, 1..=4, 1..=256)
        );
        if !sound {
            return Err(LayoutError::Vq(
                "indices are bytes of 1 to 4 stages with up to 256 entries, or packed from 4 \
                 stages of 64 entries",
            ));
        }
        let padded = match self.index_block {
            0 => Some(rows),
            block => rows.checked_next_multiple_of(block),
        };
        let codes = padded
            .and_then(|rows| rows.checked_mul(cols / VECTOR))
            .and_then(|n| n.checked_mul(self.index_bytes()));
        match (codes, rows.checked_mul(2)) {
            (Some(codes), Some(scales)) => Ok(Layout { codes, scales }),
            _ => Err(LayoutError::TooLarge { rows, cols }),
        }
    }

    /// Refuses an index beyond its table; packed ones cannot be.
    pub(crate) fn check_indices(&self, codes: &[u8]) -> Result<(), LayoutError> {
        if self.packed || self.entries == 256 {
            return Ok(());
        }
        match codes.iter().position(|&i| usize::from(i) >= self.entries) {
            None => Ok(()),
            Some(byte) => {
                let found = usize::from(codes[byte]);
                Err(LayoutError::Index { byte, found, entries: self.entries })
            }
        }
    }

    /// Where the indices of one vector of one row begin; `vectors` is the row's count.
    #[inline(always)]
    fn at(&self, row: usize, vector: usize, vectors: usize) -> usize {
        let place = match self.index_block {
            0 => row * vectors + vector,
            block => (row / block * vectors + vector) * block + row % block,
        };
        place * self.index_bytes()
    }

    /// Index of one stage, from the bytes of a vector's indices.
    #[inline(always)]
    fn index(&self, bytes: &[u8], stage: usize) -> usize {
        if self.packed {
            let word = u32::from(bytes[0]) | u32::from(bytes[1]) << 8 | u32::from(bytes[2]) << 16;
            (word >> (6 * stage) & 63) as usize
        } else {
            usize::from(bytes[stage])
        }
    }

    /// The eight unscaled weights of one vector: stages added in order.
    #[inline(always)]
    fn vector(&self, codes: &[u8], tables: &[f32], at: usize) -> [f32; VECTOR] {
        let bytes = &codes[at..at + self.index_bytes()];
        let mut w = [0.0f32; VECTOR];
        for stage in 0..self.stages {
            let entry = (stage * self.entries + self.index(bytes, stage)) * VECTOR;
            for (w, &v) in w.iter_mut().zip(&tables[entry..entry + VECTOR]) {
                *w = if stage == 0 { v } else { *w + v };
            }
        }
        w
    }
}

/// Weight `i` of row `row`.
pub(crate) fn weight(
    vq: Vq,
    codes: &[u8],
    scales: &[u8],
    tables: &[f32],
    row: usize,
    i: usize,
    cols: usize,
) -> f32 {
    let at = vq.at(row, i / VECTOR, cols / VECTOR);
    vq.vector(codes, tables, at)[i % VECTOR] * f16_at(scales, row)
}

/// Dot product of row `row`: unscaled, then times the row's scale.
#[inline(always)]
pub(crate) fn dot(
    vq: Vq,
    codes: &[u8],
    scales: &[u8],
    tables: &[f32],
    row: usize,
    x: &[f32],
) -> f32 {
    let vectors = x.len() / VECTOR;
    let mut p = [0.0f32; PARTIALS];
    for (v, x) in x.chunks_exact(VECTOR).enumerate() {
        let w = vq.vector(codes, tables, vq.at(row, v, vectors));
        let half = &mut p[v % 2 * VECTOR..][..VECTOR];
        for ((p, w), &x) in half.iter_mut().zip(w).zip(x) {
            *p = w.mul_add(x, *p);
        }
    }
    join(p) * f16_at(scales, row)
}
