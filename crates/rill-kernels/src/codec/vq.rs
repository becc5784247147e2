//! Vector quantisation as in `.waste` containers: eight weights are the sum of one entry from each
//! stage's table, times the row's f16 scale. Read, never written.
//!
//! Indices lie in blocks of rows, `[row_block][vector][row_in_block][stage]`, rows padded to whole
//! blocks, or row by row when there are no blocks. A stage's index is a byte, or four stages of
//! six bits share three bytes, the first stage lowest.

#![expect(unsafe_code, reason = "indices are checked once for a row")]

use std::ops::Range;

use super::{Layout, LayoutError, PARTIALS, Vq, f16_at, first, join};

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
        match first(codes, |&i| usize::from(i) >= self.entries) {
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

/// Tables of `S` stages with `E` entries each, of which none crosses a cache line: where allocations
/// usually begin, every second one would.
#[repr(align(32))]
pub(crate) struct Tables<const S: usize, const E: usize>([[[f32; VECTOR]; E]; S]);

impl<const S: usize, const E: usize> Tables<S, E> {
    /// A copy of a checked matrix's tables.
    #[inline(always)]
    pub(crate) fn new(tables: &[f32]) -> Self {
        Self(tables.as_chunks().0.as_chunks().0.as_chunks().0[0])
    }
}

/// Indices and tables of a matrix with `S` stages of `E` entries each: 256, an index being a byte, or
/// 64, packed. So known, an index needs no check, and compilers unroll the stages.
pub(crate) struct Entries<'a, const S: usize, const E: usize> {
    vq: Vq,
    codes: &'a [u8],
    tables: &'a [[[f32; VECTOR]; E]; S],
    /// Vectors of a row.
    vectors: usize,
}

impl<'a, const S: usize, const E: usize> Entries<'a, S, E> {
    /// Of a checked matrix's bytes.
    #[inline(always)]
    pub(crate) fn new(vq: Vq, codes: &'a [u8], tables: &'a Tables<S, E>, cols: usize) -> Self {
        assert!(vq.stages == S && vq.entries == E && vq.packed == (E == 64));
        Self { vq, codes, tables: &tables.0, vectors: cols / VECTOR }
    }

    /// Dot products of `R` rows, not scaled: see [`dot`].
    #[inline(always)]
    pub(crate) fn dots<const R: usize>(&self, row: usize, x: &[f32]) -> [f32; R] {
        let (pairs, last) = x.as_chunks::<PARTIALS>();
        let vectors = x.len() / VECTOR;
        let stride = self.stride();
        let rows: [&[u8]; R] = std::array::from_fn(|i| &self.codes[self.at(row + i, 0)..]);
        let fits = |row: &[u8]| vectors == 0 || (vectors - 1) * stride + Self::BYTES <= row.len();
        assert!(rows.iter().all(|row| fits(row)));
        let mut p = [[[0.0f32; VECTOR]; 2]; R];
        for (pair, x) in pairs.iter().enumerate() {
            for half in 0..2 {
                let at = (2 * pair + half) * stride;
                for i in 0..R {
                    // SAFETY: every vector's indices lie in the row, as asserted above.
                    let bytes = unsafe { rows[i].get_unchecked(at..at + Self::BYTES) };
                    let w = self.vector(bytes);
                    for j in 0..VECTOR {
                        p[i][half][j] = w[j].mul_add(x[half * VECTOR + j], p[i][half][j]);
                    }
                }
            }
        }
        let mut out = [0.0; R];
        for i in 0..R {
            if !last.is_empty() {
                let w = self.vector(&rows[i][(vectors - 1) * stride..][..Self::BYTES]);
                for j in 0..VECTOR {
                    p[i][0][j] = w[j].mul_add(last[j], p[i][0][j]);
                }
            }
            let mut sums = [0.0; PARTIALS];
            sums[..VECTOR].copy_from_slice(&p[i][0]);
            sums[VECTOR..].copy_from_slice(&p[i][1]);
            out[i] = join(sums);
        }
        out
    }

    /// Inputs of a row, not scaled, in whole vectors; the last sixteen are completed with ones.
    #[inline(always)]
    pub(crate) fn fill(&self, row: usize, inputs: Range<usize>, out: &mut [f32]) {
        let vectors = inputs.len() / VECTOR;
        let indices = &self.codes[self.at(row, inputs.start / VECTOR)..];
        let out = out.as_chunks_mut::<VECTOR>().0;
        for (vector, out) in out[..vectors].iter_mut().enumerate() {
            // This check also keeps compilers from gathering one weight of several vectors at a time,
            // which takes three times as long.
            *out = self.vector(&indices[vector * self.stride()..][..Self::BYTES]);
        }
        if vectors % 2 == 1 {
            out[vectors] = [1.0; VECTOR];
        }
    }

    /// Bytes of one vector's indices.
    const BYTES: usize = if E == 64 { 3 } else { S };

    /// Bytes from one vector's indices to the next ones of the same row.
    #[inline(always)]
    fn stride(&self) -> usize {
        self.vq.index_block.max(1) * Self::BYTES
    }

    /// Where the indices of one vector of one row begin.
    #[inline(always)]
    fn at(&self, row: usize, vector: usize) -> usize {
        self.vq.at(row, vector, self.vectors)
    }

    /// The eight unscaled weights that some indices mean: stages added in order.
    #[inline(always)]
    fn vector(&self, bytes: &[u8]) -> [f32; VECTOR] {
        let mut w = [0.0f32; VECTOR];
        for stage in 0..S {
            let entry = &self.tables[stage][self.vq.index(bytes, stage)];
            for j in 0..VECTOR {
                w[j] = if stage == 0 { entry[j] } else { w[j] + entry[j] };
            }
        }
        w
    }
}
