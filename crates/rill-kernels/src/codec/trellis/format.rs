//! Checked matrices of the trellis format, and the scalar product, which is its specification.

use std::ops::Range;

use super::*;

/// The tables of magnitudes, one for each class, that matrices refer to; many may share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrellisTables {
    /// Of each class and index, the magnitude in its block's unit. The first is 0.
    pub(super) magnitudes: [[u8; MAGNITUDES]; CLASSES],
}

impl TrellisTables {
    /// Tables from their 64 bytes: class 0, then class 1, which the rotated profile has not (zeros).
    ///
    /// # Errors
    /// When there are not 64, one is above 63, or a table does not begin with 0.
    pub fn new(bytes: &[u8]) -> Result<Self, LayoutError> {
        let (tables, rest) = bytes.as_chunks::<MAGNITUDES>();
        let (&[first, second], []) = (tables, rest) else {
            return Err(LayoutError::Trellis("trellis tables are 64 bytes"));
        };
        let most = |byte: usize| if byte.is_multiple_of(MAGNITUDES) { 0 } else { LARGEST };
        match bytes.iter().enumerate().find(|&(byte, &found)| found > most(byte)) {
            None => Ok(Self { magnitudes: [first, second] }),
            Some((byte, &found)) => Err(LayoutError::TableByte { byte, most: most(byte), found }),
        }
    }

    /// The 64 bytes.
    pub fn bytes(&self) -> &[u8] {
        self.magnitudes.as_flattened()
    }

    /// Weight of an entry, in the unit of the row's scale.
    pub(super) fn units(&self, class: usize, entry: u8) -> i8 {
        let units = self.magnitudes[class][magnitude(entry)] as i8;
        if is_negative(entry) { -units } else { units }
    }

    /// Weights of a class's entries, in the unit of the row's scale.
    pub(super) fn weights(&self, class: usize) -> [i8; ENTRIES] {
        std::array::from_fn(|entry| self.units(class, entry as u8))
    }
}

/// Whether an entry, a number of six bits with a sign, is below 0.
pub(super) fn is_negative(entry: u8) -> bool {
    entry >= ENTRIES as u8 / 2
}

/// Index of an entry's magnitude.
pub(super) fn magnitude(entry: u8) -> usize {
    let entry = usize::from(entry);
    match entry.min(ENTRIES - entry) {
        // −32 has no positive fellow.
        MAGNITUDES => MAGNITUDES / 2,
        index => index,
    }
}

/// A matrix (rows, cols) of the trellis format over borrowed, checked bytes.
#[derive(Clone, Copy, Debug)]
pub struct TrellisMatrix<'a> {
    pub(super) trellis: Trellis,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) codes: &'a [u8],
    pub(super) sides: &'a [u8],
    pub(super) tables: TrellisTables,
}

impl<'a> TrellisMatrix<'a> {
    /// A matrix over `codes` and `sides`, as [`Trellis::layout`] counts them.
    ///
    /// # Errors
    /// When the bytes are not as many as the layout takes, or a row's scale is not finite. Every other
    /// byte is possible.
    pub fn new(
        trellis: Trellis,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        sides: &'a [u8],
        tables: &TrellisTables,
    ) -> Result<Self, LayoutError> {
        let matrix = Self::accepted(trellis, rows, cols, codes, sides, tables)?;
        for row in 0..rows {
            let scale = matrix.scale(row);
            if !scale.is_finite() {
                return Err(LayoutError::Scale { row, first: 0, scale });
            }
        }
        Ok(matrix)
    }

    /// A matrix over bytes that [`new`](Self::new) has accepted before: scales are not looked through
    /// again. Where that is not true, products may be NaN.
    ///
    /// # Errors
    /// When the bytes are not as many as the layout takes.
    pub fn accepted(
        trellis: Trellis,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        sides: &'a [u8],
        tables: &TrellisTables,
    ) -> Result<Self, LayoutError> {
        let layout = trellis.layout(rows, cols)?;
        let lengths = [("codes", layout.codes, codes), ("sides", layout.scales, sides)];
        for (part, expected, bytes) in lengths {
            if bytes.len() != expected {
                let (format, found) = ("trellis", bytes.len());
                return Err(LayoutError::Length { format, part, rows, cols, expected, found });
            }
        }
        Ok(Self { trellis, rows, cols, codes, sides, tables: *tables })
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Some of the rows, as a matrix.
    ///
    /// # Panics
    /// When the range lies outside the matrix, does not start at a multiple of 8, or ends neither at one
    /// nor with the matrix.
    pub fn row_range(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        assert!(rows.start.is_multiple_of(TILE));
        assert!(rows.end.is_multiple_of(TILE) || rows.end == self.rows);
        let tiles = rows.start / TILE..rows.end.div_ceil(TILE);
        let part = |bytes: &'a [u8], tile: usize| &bytes[tiles.start * tile..tiles.end * tile];
        Self {
            rows: rows.len(),
            codes: part(self.codes, self.trellis.tile_bytes(self.cols)),
            sides: part(self.sides, self.trellis.side_bytes(self.cols)),
            ..*self
        }
    }

    /// Row `row` as plain numbers, in the basis of the inputs, each rounded once; of the rotated profile from
    /// f64, in which it is turned back. For measuring errors; no product does this.
    ///
    /// # Panics
    /// When the row lies outside the matrix or `out` is not a row long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        let scale = f64::from(self.scale(row));
        let weight = |col: usize| {
            let (units, power) = (self.units(row, col), power(self.side(row, col / BLOCK)));
            // Exact in f64: 7 bits, a power of two and 24 bits.
            f64::from(units) * f64::from(power) * scale
        };
        let mut weights: Vec<f64> = (0..self.cols).map(weight).collect();
        if self.trellis.rotated {
            rotation::rotate_back(&mut weights);
        }
        out.iter_mut().zip(weights).for_each(|(out, weight)| *out = weight as f32);
    }

    /// `out[r][v] = w[r] · x[v]`: `x` of n vectors → `out` (rows, n).
    ///
    /// Per block of 32 inputs the products of integers are added up exactly, as `total`; in the order of
    /// the columns, from +0, `f = fma(f32(total), 2^−delta · scale of x's block, f)`; then `f · row scale`.
    /// A rotated matrix takes rotated vectors, and has no other step.
    ///
    /// # Panics
    /// When the lengths disagree, or only one of matrix and vectors is rotated.
    pub fn multiply(&self, x: &Activations, out: &mut [f32]) {
        let n = self.check(x, out);
        for (row, out) in out.chunks_exact_mut(n.max(1)).enumerate() {
            for (v, out) in out.iter_mut().enumerate() {
                *out = self.dot(row, x, v);
            }
        }
    }

    /// The number of vectors, if everything fits together.
    pub(super) fn check(&self, x: &Activations, out: &[f32]) -> usize {
        assert_eq!(self.cols, x.cols());
        assert!(self.trellis.rotated == x.rotated, "matrix and vectors are in different bases");
        assert_eq!(out.len(), self.rows * x.vectors());
        x.vectors()
    }

    /// Product of one row with vector `v`.
    fn dot(&self, row: usize, x: &Activations, v: usize) -> f32 {
        let mut f = 0.0f32;
        for block in 0..self.cols / BLOCK {
            let inputs = block * BLOCK..(block + 1) * BLOCK;
            let total: i32 =
                inputs.map(|col| self.units(row, col) * x.whole(v * self.cols + col)).sum();
            let scale = x.scales[v * (self.cols / BLOCK) + block];
            f = (total as f32).mul_add(power(self.side(row, block)) * scale, f);
        }
        f * self.scale(row)
    }

    /// Weight in its block's unit.
    fn units(&self, row: usize, col: usize) -> i32 {
        let class = usize::from(self.side(row, col / BLOCK) >> 3);
        i32::from(self.tables.units(class, self.trellis.entry(self.window(row, col))))
    }

    /// The 16 bits that begin with an input's.
    fn window(&self, row: usize, col: usize) -> u16 {
        let bit = self.trellis.first_bit(col);
        let low = self.word(row, bit / 64) >> (bit % 64);
        if bit % 64 <= 64 - WINDOW {
            return low as u16;
        }
        (low | self.word(row, bit / 64 + 1) << (64 - bit % 64)) as u16
    }

    /// Bits 64·line and up of a row's stream.
    fn word(&self, row: usize, line: usize) -> u64 {
        let at = row / TILE * self.trellis.tile_bytes(self.cols) + line * LINE + row % TILE * 8;
        u64::from_le_bytes(self.codes[at..at + 8].try_into().expect("eight bytes"))
    }

    /// Side nibble of a block.
    pub(super) fn side(&self, row: usize, block: usize) -> u8 {
        self.tile_sides(row / TILE, block / 2)[row % TILE] >> (block % 2 * 4) & 15
    }

    /// Side nibbles of two blocks of a tile's rows: byte r has those of row r, the first in its low bits. Where
    /// none are stored they are 0.
    #[inline(always)]
    pub(super) fn tile_sides(&self, tile: usize, two_blocks: usize) -> &[u8; TILE] {
        if self.trellis.rotated {
            return &[0; TILE];
        }
        let at = tile * self.trellis.side_bytes(self.cols) + two_blocks * TILE;
        self.sides[at..].first_chunk().expect("a side per row")
    }

    /// Scale of a row: the unit of its weights where delta is 0.
    pub(super) fn scale(&self, row: usize) -> f32 {
        f32::from_bits((self.word(row, self.trellis.lines(self.cols) - 1) >> 32) as u32)
    }
}

/// 2^−delta of a side nibble.
pub(super) fn power(side: u8) -> f32 {
    f32::from_bits((127 - u32::from(side & MAX_DELTA)) << 23)
}
