//! Checked matrices of the format, and decoding, which is its specification.

use std::ops::Range;

use super::*;
use crate::codec::{PARTIALS, mxfp4};

/// An MXFP4 matrix (rows, cols), entropy-coded, over borrowed, checked bytes.
#[derive(Clone, Debug)]
pub struct Mxfp4zMatrix<'a> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) bytes: &'a [u8],
    /// Where the tiles' streams begin in `bytes`.
    streams: usize,
    first_tile: usize,
    pub(super) palette: [u8; SYMBOLS],
    /// First symbol of a block whose nibbles have table 1.
    pub(super) split: u8,
    /// Of the exponent, or its upper half.
    pub(super) exponents: Alphabet,
    /// Of the lower half of the exponent, where there is no palette.
    pub(super) lower: Option<Alphabet>,
    pub(super) nibbles: [Alphabet; 2],
}

/// Sixteen symbols and the slots that they have.
#[derive(Clone, Debug)]
pub(super) struct Alphabet {
    pub(super) frequency: [u8; SYMBOLS],
    /// First slot of each symbol.
    pub(super) first: [u8; SYMBOLS],
    pub(super) symbol: [u8; SLOTS],
}

impl Alphabet {
    /// The alphabet of these frequencies, if they add up to all slots.
    pub(super) fn new(frequency: [u8; SYMBOLS]) -> Option<Self> {
        if frequency.iter().map(|&f| usize::from(f)).sum::<usize>() != SLOTS {
            return None;
        }
        let (mut first, mut symbol) = ([0; SYMBOLS], [0; SLOTS]);
        let mut slot = 0;
        for (s, &f) in frequency.iter().enumerate() {
            first[s] = slot as u8;
            symbol[slot..slot + usize::from(f)].fill(s as u8);
            slot += usize::from(f);
        }
        Some(Self { frequency, first, symbol })
    }

    /// The symbol that a state begins with, which is taken from it. No word comes in yet.
    fn read(&self, state: &mut u32) -> u8 {
        let slot = *state % SLOTS as u32;
        let symbol = self.symbol[slot as usize];
        let of = |list: &[u8; SYMBOLS]| u32::from(list[usize::from(symbol)]);
        *state = of(&self.frequency) * (*state >> SLOT_BITS) + slot - of(&self.first);
        symbol
    }
}

/// One block of a tile's rows.
pub(super) struct Block {
    pub(super) exponents: [u8; TILE],
    /// By input and row.
    pub(super) nibbles: [[u8; TILE]; BLOCK],
}

impl<'a> Mxfp4zMatrix<'a> {
    /// A matrix over bytes that [`encode`](Self::encode) has made.
    ///
    /// # Errors
    /// When the columns are not a multiple of 32, or header and directory are not those of such a matrix. Streams are
    /// not looked through: damaged ones give other weights, and [`unpack`](Self::unpack) refuses them.
    pub fn new(rows: usize, cols: usize, bytes: &'a [u8]) -> Result<Self, LayoutError> {
        check_shape(rows, cols)?;
        let tiles = rows.div_ceil(TILE);
        let streams = tiles.checked_mul(4).and_then(|n| n.checked_add(HEADER));
        let streams = streams.ok_or(LayoutError::TooLarge { rows, cols })?;
        let stream_bytes = bytes.len().checked_sub(SLACK).and_then(|n| n.checked_sub(streams));
        let Some(stream_bytes) = stream_bytes else {
            return Err(refused("mxfp4z bytes end before the first tile"));
        };
        let list = |at: usize| -> [u8; SYMBOLS] {
            bytes[at..at + SYMBOLS].try_into().expect("sixteen bytes of a header")
        };
        let (palette, split) = (list(0), bytes[80]);
        if palette.contains(&255) || usize::from(split) > SYMBOLS {
            return Err(refused("an mxfp4z palette has 255, or its split is above 16"));
        }
        let alphabet = |at: usize| {
            Alphabet::new(list(at)).ok_or(refused("mxfp4z frequencies do not add up to 128"))
        };
        let lower = if list(32) == [0; SYMBOLS] { None } else { Some(alphabet(32)?) };
        let matrix = Self {
            rows,
            cols,
            bytes,
            streams,
            first_tile: 0,
            palette,
            split,
            exponents: alphabet(16)?,
            lower,
            nibbles: [alphabet(48)?, alphabet(64)?],
        };
        let mut end = streams;
        for tile in 0..tiles {
            let next = matrix.tile_end(tile);
            if next.is_none_or(|next| next < end.saturating_add(STATES)) {
                return Err(refused("an mxfp4z directory has a tile without room for its states"));
            }
            end = next.unwrap_or(end);
        }
        if end != streams + stream_bytes {
            return Err(refused("an mxfp4z directory does not end with the last tile"));
        }
        Ok(matrix)
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bits that say something about weights: states of rows and words. A matrix of row ranges counts its tiles.
    pub fn payload_bits(&self) -> u64 {
        let tiles = self.rows.div_ceil(TILE);
        let words: usize = (0..tiles).map(|t| self.tile_range(t).len() - STATES).sum();
        8 * words as u64 + 32 * self.rows as u64
    }

    /// All bits of the matrix that this one is, or is a part of: header, directory and zeros at the end as well.
    pub fn stored_bits(&self) -> u64 {
        8 * self.bytes.len() as u64
    }

    /// Some of the rows, as a matrix.
    ///
    /// # Panics
    /// When the range lies outside the matrix, does not start at a multiple of 16, or ends neither at one
    /// nor with the matrix.
    pub fn row_range(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        assert!(rows.start.is_multiple_of(TILE));
        assert!(rows.end.is_multiple_of(TILE) || rows.end == self.rows);
        let first_tile = self.first_tile + rows.start / TILE;
        Self { rows: rows.len(), first_tile, ..self.clone() }
    }

    /// The matrix as MXFP4, with +0 for −0: `codes` (rows, cols / 2) and `scales` (rows, cols / 32).
    ///
    /// # Errors
    /// When a tile's stream is damaged so that it does not end as it must. Some damage cannot be seen.
    ///
    /// # Panics
    /// When the lengths are others.
    pub fn unpack(&self, codes: &mut [u8], scales: &mut [u8]) -> Result<(), LayoutError> {
        let (rows, code_bytes, scale_bytes) = (self.rows, self.cols / 2, self.cols / BLOCK);
        assert_eq!((codes.len(), scales.len()), (rows * code_bytes, rows * scale_bytes));
        for tile in 0..rows.div_ceil(TILE) {
            let whole = self.decode_tile(tile, |at, block| {
                for lane in 0..self.tile_rows(tile) {
                    let row = tile * TILE + lane;
                    scales[row * scale_bytes + at] = block.exponents[lane];
                    let codes = &mut codes[row * code_bytes + at * BLOCK / 2..][..BLOCK / 2];
                    for (code, pair) in codes.iter_mut().zip(block.nibbles.as_chunks::<2>().0) {
                        *code = pair[0][lane] | pair[1][lane] << 4;
                    }
                }
            });
            if !whole {
                return Err(refused("the stream of an mxfp4z tile is damaged"));
            }
        }
        Ok(())
    }

    /// Row `row` as plain numbers, exactly. It takes as long as all rows of its tile.
    ///
    /// # Panics
    /// When the row lies outside the matrix or `out` is not a row long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        let lane = row % TILE;
        self.decode_tile(row / TILE, |at, block| {
            let scale = mxfp4::scale(block.exponents[lane]);
            for (nibbles, out) in block.nibbles.iter().zip(&mut out[at * BLOCK..][..BLOCK]) {
                *out = mxfp4::VALUES[usize::from(nibbles[lane])] * scale;
            }
        });
    }

    /// `out[r][v] = w[r] · x[v]`: `x` (n, cols) → `out` (rows, n), with MXFP4's arithmetic.
    ///
    /// # Panics
    /// When the lengths disagree.
    pub fn multiply(&self, x: &[f32], n: usize, out: &mut [f32]) {
        self.check(x, n, out);
        for v in 0..n {
            let x = &x[v * self.cols..][..self.cols];
            for tile in 0..self.rows.div_ceil(TILE) {
                let mut p = [[0.0f32; PARTIALS]; TILE];
                self.decode_tile(tile, |at, block| {
                    let x = &x[at * BLOCK..][..BLOCK];
                    for (lane, p) in p.iter_mut().enumerate() {
                        let w = |i: usize| mxfp4::VALUES[usize::from(block.nibbles[i][lane])];
                        let scale = mxfp4::scale(block.exponents[lane]);
                        for (j, p) in p.iter_mut().enumerate() {
                            let t = w(j) * x[j];
                            let t = w(PARTIALS + j).mul_add(x[PARTIALS + j], t);
                            *p = t.mul_add(scale, *p);
                        }
                    }
                });
                for (lane, p) in p.iter().take(self.tile_rows(tile)).enumerate() {
                    out[(tile * TILE + lane) * n + v] = mxfp4::join(*p);
                }
            }
        }
    }

    /// Panics when the lengths disagree.
    pub(super) fn check(&self, x: &[f32], n: usize, out: &[f32]) {
        assert_eq!(Some(x.len()), n.checked_mul(self.cols));
        assert_eq!(Some(out.len()), n.checked_mul(self.rows));
    }

    /// Rows that a tile has.
    pub(super) fn tile_rows(&self, tile: usize) -> usize {
        TILE.min(self.rows - tile * TILE)
    }

    /// Where a tile's states and words lie in `bytes`.
    pub(super) fn tile_range(&self, tile: usize) -> Range<usize> {
        let tile = self.first_tile + tile;
        let end = |tile| self.tile_end(tile).expect("the directory is checked");
        let start = if tile == 0 { self.streams } else { end(tile - 1) };
        start..end(tile)
    }

    /// Where a block begins at the latest: what a block can take follows.
    pub(super) fn limit(&self) -> usize {
        self.bytes.len() - SLACK
    }

    /// Where a tile of the whole matrix ends in `bytes`, if that can be counted.
    fn tile_end(&self, tile: usize) -> Option<usize> {
        let end = self.bytes[HEADER + 4 * tile..].first_chunk().expect("the directory is there");
        let words = usize::try_from(u32::from_le_bytes(*end)).ok()?;
        words.checked_mul(2)?.checked_add(self.streams)
    }

    /// Gives every block of a tile and its number to `put`, and says whether the stream ends as it must. What `put` gets for
    /// lanes without a row has no meaning.
    pub(super) fn decode_tile(&self, tile: usize, mut put: impl FnMut(usize, &Block)) -> bool {
        let (range, rows) = (self.tile_range(tile), self.tile_rows(tile));
        let mut states = [0; TILE];
        for (state, bytes) in states.iter_mut().zip(self.bytes[range.clone()].as_chunks().0) {
            *state = u32::from_le_bytes(*bytes);
        }
        let mut stream = Stream { bytes: self.bytes, at: range.start + STATES };
        let mut block = Block { exponents: [0; TILE], nibbles: [[0; TILE]; BLOCK] };
        let states = &mut states[..rows];
        for number in 0..self.cols / BLOCK {
            stream.at = stream.at.min(self.limit());
            let mut tables = [&self.nibbles[0]; TILE];
            for (lane, state) in states.iter_mut().enumerate() {
                let i = self.exponents.read(state);
                block.exponents[lane] = match &self.lower {
                    None => self.palette[usize::from(i)],
                    Some(lower) => (16 * i + lower.read(state)).min(254),
                };
                tables[lane] = &self.nibbles[usize::from(i >= self.split)];
                stream.fill(state);
            }
            for input in 0..BLOCK / 2 {
                for (lane, state) in states.iter_mut().enumerate() {
                    block.nibbles[input][lane] = tables[lane].read(state);
                    block.nibbles[BLOCK / 2 + input][lane] = tables[lane].read(state);
                    stream.fill(state);
                }
            }
            put(number, &block);
        }
        stream.at == range.end && states.iter().all(|&state| state == LOWEST)
    }
}

/// Words that are read one after another.
struct Stream<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Stream<'_> {
    /// Lets a word into the state of a lane, if it needs one.
    fn fill(&mut self, state: &mut u32) {
        if *state < LOWEST {
            let word = self.bytes[self.at..].first_chunk().expect("less than a block's slack used");
            *state = *state << 16 | u32::from(u16::from_le_bytes(*word));
            self.at += 2;
        }
    }
}

/// Refuses shapes that MXFP4 does not have.
pub(super) fn check_shape(rows: usize, cols: usize) -> Result<(), LayoutError> {
    if !cols.is_multiple_of(BLOCK) {
        return Err(LayoutError::Columns { format: "mxfp4z", of: BLOCK, cols });
    }
    match rows.checked_mul(cols) {
        Some(_) => Ok(()),
        None => Err(LayoutError::TooLarge { rows, cols }),
    }
}
