//! The trellis format: 2.0 to 4.0 bits a weight, one more decision per weight than bits allow.
//!
//! A row is one stream of bits, least significant first, of which every input takes two to four. The
//! code of an input is not those bits alone but the 16-bit *window* that begins with them, so that
//! neighbours share most of their codes, and an encoder that looks ahead (`viterbi.rs`) finds streams
//! whose every window means a weight near the wanted one. Decoding looks at one window at a time.
//!
//! **Bits.** A rate is B bits per 8 inputs. Input c's window begins at bit `⌊c/8⌋·B + ⌊(c mod 8)·B/8⌋`.
//! After the `cols·B/8` bits of all inputs come 16 more, which complete the last windows.
//!
//! **Value.** `entry = (window · A mod 2^16) >> 8`, of which the lowest six bits count and are a number v with a
//! sign, from −32 to 31; the weight is `± magnitudes[class][|v|] · 2^−delta · scale`, with the sign of v. The magnitude of
//! index 0 is 0, and −32, which has no positive fellow, has that of index 16: all a shuffle of sixteen bytes sees of it.
//! A is a multiple of 2^(14 − width), so that an entry depends on the lowest `width` bits of its window: the
//! encoder then has 2^width states to search. Magnitudes are bytes of at most 63, which keeps four products with
//! signed bytes within 16 bits.
//!
//! **Side information.** A nibble per 32 inputs: `delta` in its low three bits, `class` above.
//!
//! **Tiles.** Eight rows are a tile of 64-byte lines: line i holds bits 64i to 64i + 63 of each row's
//! stream as eight little-endian words. So a window position is the same in every lane: one count
//! shifts all rows, whether a register holds eight of them (AVX-512), four (AVX2) or two (NEON), and a
//! tile is one sequential read. The scale, an f32, is the upper half of the word of the last line, which
//! has `lines = ⌈(cols·B/8 + 48)/64⌉`; bits between are zero. Because of those 48 bits no group of eight
//! inputs begins in the last line: a kernel may always read a line and the next.
//!
//! Side nibbles lie apart, so that lines stay aligned: per tile `⌈cols/64⌉ · 8` bytes; byte 8g + r has
//! the nibbles of row r for inputs 64g to 64g + 31 (low) and from 64g + 32 on (high).
//!
//! **Rotated profile.** The same without side nibbles, for weights of any kind: every delta and class is 0, and
//! the second table is not used (its bytes are zeros). A row's inputs are turned before they become bits
//! (`rotation.rs`): some change signs, which mixes well whatever the weights are, then each `span` of them becomes
//! sums and differences of all, times 1/√span, by a Hadamard transform; `span` is the largest power of two up to 512 that
//! divides the columns. That makes them near normal, so that one table and one scale per row, a sixteenth of
//! its root mean square, suit them all. The vector of a product is turned likewise, which leaves the product as it was.
//!
//! **Padding.** Columns are a multiple of 32; where they are not one of 64 the last high nibbles are 0.
//! Rows need not be a multiple of 8: the lanes of missing ones are zero. Neither
//! reaches a result. So `rows` × `cols` take `⌈rows/8⌉ · (64 · lines + 8 · ⌈cols/64⌉)` bytes, of which `rows · (cols·B/8 +
//! 48 + cols/8)` bits say something. An expert's 3072 × 3584 lose 0.0045 bits a weight by that; a row of 32 inputs by itself
//! at B = 24 takes 1,600 bits for 148, so matrices of a few rows or columns are better kept otherwise.

use super::{Layout, LayoutError};

mod activations;
mod encode;
mod format;
mod product;
#[cfg(target_arch = "x86_64")]
mod product_avx2;
#[cfg(target_arch = "x86_64")]
mod product_avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod product_neon;
mod rotation;
mod viterbi;
#[cfg(target_arch = "x86_64")]
mod viterbi_avx2;
#[cfg(target_arch = "x86_64")]
mod viterbi_avx512;

pub use activations::Activations;
pub use encode::TrellisEncoder;
pub use format::{TrellisMatrix, TrellisTables};
pub use product::TrellisKernels;

/// Inputs that share a nibble of side information.
const BLOCK: usize = 32;
/// Inputs over which a rate's bits are spread evenly.
const GROUP: usize = 8;
/// Rows of a tile.
pub(super) const TILE: usize = 8;
/// Bytes of a line: 64 bits of each row of a tile.
const LINE: usize = 64;
/// Bits of a window, and of the tail that completes a row's last windows.
const WINDOW: usize = 16;
/// Bits of a row's scale.
const SCALE: usize = 32;
/// Largest magnitude, in units of a block.
const LARGEST: u8 = 63;
/// Entries there are.
const ENTRIES: usize = 64;
/// Magnitudes of one class.
const MAGNITUDES: usize = ENTRIES / 2;
/// Classes of blocks.
const CLASSES: usize = 2;
/// Bytes of all tables.
pub(crate) const TABLE_BYTES: usize = CLASSES * MAGNITUDES;
/// Largest exponent delta.
const MAX_DELTA: u8 = 7;

/// Parameters of the trellis format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trellis {
    rate: usize,
    width: usize,
    rotated: bool,
}

impl Trellis {
    /// The native profile: `rate` bits per 8 inputs, from 16 to 28, and `width` bits of a window that count,
    /// from 10 to 14: each one more halves the encoder's speed and takes about 1 % off the error.
    ///
    /// # Errors
    /// When either is out of its range.
    pub fn new(rate: usize, width: usize) -> Result<Self, LayoutError> {
        if !(16..=28).contains(&rate) || !(10..=14).contains(&width) {
            return Err(LayoutError::Trellis(
                "trellis rates are 16 to 28 bits per 8 inputs, widths are 10 to 14 bits",
            ));
        }
        Ok(Self { rate, width, rotated: false })
    }

    /// The rotated profile, with rates from 16 to 32.
    ///
    /// # Errors
    /// When either is out of its range.
    pub fn rotated(rate: usize, width: usize) -> Result<Self, LayoutError> {
        if !(16..=32).contains(&rate) || !(10..=14).contains(&width) {
            return Err(LayoutError::Trellis(
                "rotated trellis rates are 16 to 32 bits per 8 inputs, widths are 10 to 14 bits",
            ));
        }
        Ok(Self { rate, width, rotated: true })
    }

    /// Whether this is the rotated profile.
    pub fn is_rotated(&self) -> bool {
        self.rotated
    }

    /// Bits per 8 inputs.
    pub fn rate(&self) -> usize {
        self.rate
    }

    /// Bits of a window that count.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes that a matrix (rows, cols) takes: `codes` are the lines, `scales` the side nibbles.
    ///
    /// # Errors
    /// When the columns are not a multiple of 32, or the bytes cannot be counted.
    pub fn layout(&self, rows: usize, cols: usize) -> Result<Layout, LayoutError> {
        if !cols.is_multiple_of(BLOCK) {
            return Err(LayoutError::Columns { format: "trellis", of: BLOCK, cols });
        }
        let too_large = LayoutError::TooLarge { rows, cols };
        // Far from overflow in everything that is computed from a column or a bit.
        if cols > usize::MAX >> 8 {
            return Err(too_large);
        }
        let tiles = rows.div_ceil(TILE);
        let codes = tiles.checked_mul(self.tile_bytes(cols)).ok_or(too_large)?;
        let scales = tiles.checked_mul(self.side_bytes(cols)).ok_or(too_large)?;
        Ok(Layout { codes, scales })
    }

    /// Bits that say something: windows, tails, side nibbles and row scales. Not the tables, 512 bits
    /// that many matrices may share, nor padding. The bytes on disk are those of the [`layout`](Self::layout).
    pub fn payload_bits(&self, rows: usize, cols: usize) -> u64 {
        let sides = if self.rotated { 0 } else { cols / BLOCK * 4 };
        let row = self.stream_bits(cols) + WINDOW + SCALE + sides;
        rows as u64 * row as u64
    }

    /// Bits of a row's inputs, without its tail.
    fn stream_bits(&self, cols: usize) -> usize {
        cols / GROUP * self.rate
    }

    /// Lines of a tile.
    fn lines(&self, cols: usize) -> usize {
        (self.stream_bits(cols) + WINDOW + SCALE).div_ceil(64)
    }

    fn tile_bytes(&self, cols: usize) -> usize {
        self.lines(cols) * LINE
    }

    /// Bytes of a tile's side nibbles.
    fn side_bytes(&self, cols: usize) -> usize {
        if self.rotated { 0 } else { cols.div_ceil(2 * BLOCK) * TILE }
    }

    /// First bit of an input within its group of eight.
    fn offset(&self, input: usize) -> usize {
        input * self.rate / GROUP
    }

    /// Bits of its own of an input within its group of eight.
    fn bits(&self, input: usize) -> usize {
        self.offset(input + 1) - self.offset(input)
    }

    /// First bit of an input's window.
    fn first_bit(&self, col: usize) -> usize {
        col / GROUP * self.rate + self.offset(col % GROUP)
    }

    /// What windows are multiplied by. Of each width the best of a dozen or more odd multiples of
    /// 2^(14 − width), by the error of modelled weights at 2.5 and 3 bits; of the rotated
    /// profile's low rates at width 12 another one has 1 % less of it.
    fn multiplier(&self) -> u16 {
        if self.rotated && self.rate <= 21 && self.width == 12 {
            return 4316;
        }
        [6736, 10184, 10044, 10058, 11513][self.width - 10]
    }

    /// Entry of a window: six bits, of which the highest is the sign.
    fn entry(&self, window: u16) -> u8 {
        (window.wrapping_mul(self.multiplier()) >> 8) as u8 & 63
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_width_of_a_window_counts() {
        for width in 10..=14 {
            let trellis = Trellis::new(23, width).unwrap();
            let (all, mut reached) = ((1u32 << width) - 1, [false; ENTRIES]);
            for window in 0..=u16::MAX {
                let entry = trellis.entry(window);
                assert_eq!(entry, trellis.entry((u32::from(window) & all) as u16));
                reached[usize::from(entry)] = true;
            }
            assert!(reached.iter().all(|&r| r));
        }
    }

    #[test]
    fn no_group_of_inputs_begins_in_the_last_line_and_every_window_is_inside() {
        for rate in 16..=32 {
            let trellis = Trellis::rotated(rate, 12).unwrap();
            for cols in (BLOCK..BLOCK * 200).step_by(BLOCK) {
                let last = trellis.lines(cols) - 1;
                assert!(trellis.first_bit(cols - GROUP) / 64 < last);
                let scale_bit = trellis.lines(cols) * 64 - SCALE;
                assert!(trellis.first_bit(cols - 1) + WINDOW <= scale_bit);
            }
        }
    }
}
