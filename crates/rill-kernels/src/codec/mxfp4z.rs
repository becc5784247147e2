//! MXFP4 without loss at about 3.6 bits a weight: nibbles and exponents are entropy-coded (rANS).
//!
//! **Lanes.** Sixteen rows are a tile, each row a lane with a coder of its own: a state of 32 bits, from 2^16
//! on. A tile's symbols stand one after another as a vector of lanes, so that one position of a single
//! stream of 16-bit words serves all rows and a tile is one sequential read.
//!
//! **Symbols.** All are below 16 and have frequencies that add up to 128. To read one, `slot = state mod 128`
//! is looked up: the symbol is the one whose range of slots, `first` to `first + frequency`, has it. Then
//! `state = frequency · ⌊state/128⌋ + slot − first`. After every one or two symbols, as said below, a state below 2^16
//! lets the next word in from below: `state = 2^16 · state + word`. Lanes take their words in ascending order. One word
//! is enough for two symbols, because states had 2^16 before them and symbols take seven bits at most.
//!
//! **Blocks.** For every 32 inputs a lane has one symbol i for the exponent, then 16 pairs of nibbles, inputs 0 and 16,
//! 1 and 17, … 15 and 31, which MXFP4's arithmetic adds first. Words come in after the exponent and after every pair.
//! The exponent is `palette[i]`; where a matrix has more than sixteen different ones, another symbol k follows at once
//! and it is `16·i + k`, 255 being read as 254. Nibbles have the frequencies of table 0 if `i < split` and of table 1
//! otherwise, because those of a block depend on its exponent.
//!
//! **Bytes.** A header of 96: palette (16 bytes, ascending, 254 at most), frequencies of i, of k (all 0 if there is a
//! palette), of nibbles by table 0 and by table 1 (16 each), the split, and 15 zeros. Then for every tile, where it ends, in
//! words after this directory, as a little-endian u32. Then the tiles: sixteen states and the words, little-endian. Then
//! 544 zeros: as much as a block can take, so that kernels ask once per block whether they are at the end. A block
//! begins at the end of the last tile at the latest, so any words can be read; damaged ones give other weights.
//! When a whole tile has been read, all states are 2^16 again, where the encoder began, and the position is the tile's end.
//!
//! **Padding.** Rows need not be a multiple of 16. Lanes of missing ones take no words, and their states are 0.
//!
//! **Zeros.** The encoder writes −0 as +0, which saves 0.116 bits (a ninth of K3's weights are zeros, half of them
//! negative). Products are still those of the published nibbles, to the last bit: the sign of a nibble that is zero decides the
//! sign of a product that is zero (or NaN), and no more, so the sums `t` and `p[j]` of `docs/arithmetic.md` are the same numbers, by
//! induction, differing at most in the sign of a zero; so does what the tree makes of them, and the last
//! addition makes every zero +0.

use super::LayoutError;

mod encode;
mod format;
mod product;
#[cfg(target_arch = "x86_64")]
mod product_avx2;
#[cfg(target_arch = "x86_64")]
mod product_avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod product_neon;
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
mod slots;
mod thin;

pub use format::Mxfp4zMatrix;
pub use product::Mxfp4zKernels;

/// Inputs that share an exponent.
const BLOCK: usize = super::mxfp4::BLOCK;
/// Rows of a tile.
pub(super) const TILE: usize = 16;
/// Symbols of every alphabet.
const SYMBOLS: usize = 16;
/// Bits of a slot: frequencies add up to 2^7.
const SLOT_BITS: u32 = 7;
/// Sum of the frequencies of an alphabet.
const SLOTS: usize = 1 << SLOT_BITS;
/// Where states begin, and what they are not below when a symbol has been read.
const LOWEST: u32 = 1 << 16;
/// Bytes of palette, frequencies and split.
const HEADER: usize = 96;
/// Bytes of a tile's states.
const STATES: usize = 4 * TILE;
/// Bytes after the last tile: those of a block of which the exponent and every pair take a word in every lane.
const SLACK: usize = (1 + BLOCK / 2) * 2 * TILE;

/// Bytes that a matrix takes at most: those of MXFP4 with a sixty-fourth for what frequencies out of 128
/// cannot express, and everything around the streams.
pub(super) fn most_bytes(rows: usize, cols: usize) -> Result<usize, LayoutError> {
    format::check_shape(rows, cols)?;
    let too_large = LayoutError::TooLarge { rows, cols };
    let streams = rows.checked_mul(cols / BLOCK * (BLOCK / 2 + 1)).ok_or(too_large)?;
    let tiles = rows.div_ceil(TILE).checked_mul(4 + STATES).ok_or(too_large)?;
    let all = [streams / 64, tiles, HEADER + SLACK];
    all.iter().try_fold(streams, |sum, &part| sum.checked_add(part)).ok_or(too_large)
}

/// What refused bytes are told.
fn refused(why: &'static str) -> LayoutError {
    LayoutError::Mxfp4z(why)
}
