//! Weight matrices as the bytes they are stored in.

use std::ops::Range;

use crate::codec::{
    Codec, LayoutError, Mxfp4zMatrix, TrellisMatrix, TrellisTables, check_f16_scales, mxfp4, plain,
    q4, q8, trellis, vq,
};

/// A matrix (rows, cols) over borrowed, checked bytes; it is never expanded.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(crate) codec: Codec,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) codes: &'a [u8],
    pub(crate) scales: &'a [u8],
    /// Tables of a vector-quantised format, (stages, entries, 8).
    pub(crate) tables: &'a [f32],
    /// Number of the first row within `codes` and `scales`; not 0 only for formats whose rows
    /// cannot be cut apart.
    pub(crate) first_row: usize,
    /// Rows that `codes` and `scales` hold.
    pub(crate) all_rows: usize,
}

impl<'a> Matrix<'a> {
    /// A matrix of a format without tables.
    ///
    /// # Errors
    /// When the bytes are not as many as the layout takes, or a scale is not finite.
    pub fn new(
        codec: Codec,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Self, LayoutError> {
        if let Codec::Vq(_) = codec {
            return Err(LayoutError::Vq("a vector-quantised matrix needs its tables"));
        }
        Self::with_tables(codec, rows, cols, codes, scales, &[])
    }

    /// A matrix of a vector-quantised format; `tables` (stages, entries, 8).
    ///
    /// # Errors
    /// As [`new`](Self::new), and when the tables have another size or an index lies beyond one.
    pub fn with_tables(
        codec: Codec,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        scales: &'a [u8],
        tables: &'a [f32],
    ) -> Result<Self, LayoutError> {
        let matrix = Self::accepted(codec, rows, cols, codes, scales, tables)?;
        match codec {
            Codec::F32 | Codec::Bf16 => {}
            Codec::Q8 { group } | Codec::Q4 { group } => {
                check_f16_scales(scales, cols.div_ceil(group).max(1), group)?;
            }
            Codec::Mxfp4 => mxfp4::check_scales(scales, cols)?,
            Codec::Vq(vq) => {
                check_f16_scales(scales, 1, 0)?;
                vq.check_indices(codes)?;
            }
            Codec::Trellis(trellis) => {
                let (tables, sides) = trellis_parts(scales)?;
                TrellisMatrix::new(trellis, rows, cols, codes, sides, &tables)?;
            }
            Codec::Mxfp4z => {
                Mxfp4zMatrix::new(rows, cols, codes)?;
            }
        }
        Ok(matrix)
    }

    /// A matrix over bytes that one of the above has accepted before: lengths are checked, values
    /// are not looked through again, which for a token's weights takes as long as reading them. Where
    /// that is not true, products may be NaN, or panic for an index beyond its table.
    ///
    /// # Errors
    /// When a length does not fit.
    pub fn accepted(
        codec: Codec,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        scales: &'a [u8],
        tables: &'a [f32],
    ) -> Result<Self, LayoutError> {
        let layout = codec.layout(rows, cols)?;
        let lengths = [("codes", layout.codes, codes), ("scales", layout.scales, scales)];
        for (part, expected, bytes) in lengths {
            // One of a length that differs is told by its own directory.
            if bytes.len() != expected && !(codec.is_variable() && part == "codes") {
                let (format, found) = (codec.name(), bytes.len());
                return Err(LayoutError::Length { format, part, rows, cols, expected, found });
            }
        }
        if let Codec::Vq(vq) = codec
            && tables.len() != vq.stages * vq.entries * vq::VECTOR
        {
            return Err(LayoutError::Vq("the tables do not have stages × entries × 8 values"));
        }
        Ok(Self { codec, rows, cols, codes, scales, tables, first_row: 0, all_rows: rows })
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number format.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Some of the rows, as a matrix.
    ///
    /// # Panics
    /// When the range lies outside the matrix.
    pub fn row_range(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        if let Codec::Vq(_) | Codec::Trellis(_) | Codec::Mxfp4z = self.codec {
            return Self { rows: rows.len(), first_row: self.first_row + rows.start, ..*self };
        }
        let part = |bytes: &'a [u8]| {
            let row_bytes = bytes.len() / self.rows.max(1);
            &bytes[rows.start * row_bytes..rows.end * row_bytes]
        };
        let (codes, scales) = (part(self.codes), part(self.scales));
        Self { rows: rows.len(), all_rows: rows.len(), codes, scales, ..*self }
    }

    /// Row `row` as plain numbers, each rounded once. For measuring errors; no product does this.
    ///
    /// # Panics
    /// When the row lies outside the matrix or `out` is not a row long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        if let Some((trellis, first)) = self.trellis() {
            return trellis.decode_row(first + row, out);
        }
        if let Some((mxfp4z, first)) = self.mxfp4z() {
            return mxfp4z.decode_row(first + row, out);
        }
        let row = self.row_range(row..row + 1);
        for (i, out) in out.iter_mut().enumerate() {
            *out = row.weight(i);
        }
    }

    /// All rows of a trellis matrix that this one is or is a part of, and the number of its first row there.
    pub(crate) fn trellis(&self) -> Option<(TrellisMatrix<'a>, usize)> {
        let Codec::Trellis(trellis) = self.codec else { return None };
        let (tables, sides) = trellis_parts(self.scales).expect("checked when it was made");
        let whole =
            TrellisMatrix::accepted(trellis, self.all_rows, self.cols, self.codes, sides, &tables);
        Some((whole.expect("checked when it was made"), self.first_row))
    }

    /// The same of an mxfp4z matrix.
    pub(crate) fn mxfp4z(&self) -> Option<(Mxfp4zMatrix<'a>, usize)> {
        if self.codec != Codec::Mxfp4z {
            return None;
        }
        let whole = Mxfp4zMatrix::new(self.all_rows, self.cols, self.codes);
        Some((whole.expect("checked when it was made"), self.first_row))
    }

    /// Weight `i` of the first row.
    #[inline(always)]
    pub(crate) fn weight(&self, i: usize) -> f32 {
        let (codes, scales) = (self.codes, self.scales);
        match self.codec {
            Codec::F32 => plain::f32_at(codes, i),
            Codec::Bf16 => plain::bf16_at(codes, i),
            Codec::Q8 { group } => q8::weight(codes, scales, group, i),
            Codec::Q4 { group } => q4::weight(codes, scales, group, i),
            Codec::Mxfp4 => mxfp4::weight(codes, scales, i),
            Codec::Vq(vq) => {
                vq::weight(vq, codes, scales, self.tables, self.first_row, i, self.cols)
            }
            Codec::Trellis(_) | Codec::Mxfp4z => unreachable!("decoded row by row"),
        }
    }
}

/// Tables and side nibbles of a trellis matrix.
fn trellis_parts(scales: &[u8]) -> Result<(TrellisTables, &[u8]), LayoutError> {
    let at = trellis::TABLE_BYTES.min(scales.len());
    let (tables, sides) = scales.split_at(at);
    Ok((TrellisTables::new(tables)?, sides))
}
