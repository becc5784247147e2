//! Products in 128-bit vectors: four registers have the sixteen rows of a tile, a 32-bit lane for each.
//!
//! The plain algorithm is [`Mxfp4zMatrix::multiply`]. There is no instruction that gathers, so streams are read lane by lane: a slot's
//! frequency, place and weight stand in one word of a table, words come in without a branch, and sixteen lanes that hardly depend
//! on one another keep a core busy. A block that is read is multiplied by every vector.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::aarch64::*;
use std::ops::Range;

use super::slots::{Slots, Tables};
use super::*;
use crate::codec::{PARTIALS, mxfp4};

/// Vectors that share decoded weights; their partial sums take 16 KiB.
const VECTORS: usize = 16;
/// Lanes of a register.
const LANES: usize = 4;

/// A value for every row of a tile.
type Rows = [f32; TILE];

/// As [`Mxfp4zMatrix::multiply`].
#[target_feature(enable = "neon")]
pub(super) fn multiply(m: &Mxfp4zMatrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
    m.check(x, n, out);
    let tables = Tables::new(m);
    for v in (0..n).step_by(VECTORS) {
        for tile in 0..m.rows.div_ceil(TILE) {
            multiply_tile(m, &tables, x, n, tile, v..n.min(v + VECTORS), out);
        }
    }
}

/// A tile times some of the vectors.
#[target_feature(enable = "neon")]
fn multiply_tile(
    m: &Mxfp4zMatrix<'_>,
    tables: &Tables,
    x: &[f32],
    n: usize,
    tile: usize,
    vectors: Range<usize>,
    out: &mut [f32],
) {
    let mut stream = Stream::new(m, tile);
    let mut block = Block { weights: [[0.0; TILE]; BLOCK], scales: [0.0; TILE] };
    let mut sums = [[[0.0; TILE]; PARTIALS]; VECTORS];
    for number in 0..m.cols / BLOCK {
        stream.read(m, tables, &mut block);
        for (v, sums) in vectors.clone().zip(&mut sums) {
            let x = &x[v * m.cols + number * BLOCK..];
            add(&block, x.first_chunk().expect("a block of inputs"), sums);
        }
    }
    for (v, sums) in vectors.zip(&sums) {
        let rows = out[tile * TILE * n..].chunks_exact_mut(n);
        for (lane, out) in rows.take(stream.rows).enumerate() {
            out[v] = mxfp4::join(std::array::from_fn(|j| sums[j][lane]));
        }
    }
}

/// A decoded block of a tile.
struct Block {
    /// By place: inputs 0, 16, 1, 17, ….
    weights: [Rows; BLOCK],
    scales: Rows,
}

/// Adds the products of a block with `x` to the partial sums.
#[target_feature(enable = "neon")]
#[inline]
fn add(block: &Block, x: &[f32; BLOCK], sums: &mut [Rows; PARTIALS]) {
    for part in 0..TILE / LANES {
        let scale = load(&block.scales, part);
        for (j, sums) in sums.iter_mut().enumerate() {
            let low = load(&block.weights[2 * j], part);
            let high = load(&block.weights[2 * j + 1], part);
            let t = vmulq_n_f32(low, x[j]);
            let t = vfmaq_n_f32(t, high, x[PARTIALS + j]);
            let p = vfmaq_f32(load(sums, part), t, scale);
            store(sums, part, p);
        }
    }
}

/// Where a tile is being read.
struct Stream {
    at: usize,
    states: [u32; TILE],
    /// Lanes that have a row.
    rows: usize,
}

impl Stream {
    fn new(m: &Mxfp4zMatrix<'_>, tile: usize) -> Self {
        let range = m.tile_range(tile);
        let states = m.bytes[range.clone()].as_chunks().0;
        let states = std::array::from_fn(|lane| u32::from_le_bytes(states[lane]));
        Self { at: range.start + STATES, states, rows: m.tile_rows(tile) }
    }

    /// Reads the next block.
    #[inline]
    fn read(&mut self, m: &Mxfp4zMatrix<'_>, tables: &Tables, block: &mut Block) {
        let mut at = self.at.min(m.limit());
        let states = &mut self.states[..self.rows];
        let mut table1 = [0; TILE];
        for (lane, state) in states.iter_mut().enumerate() {
            let i = step(&tables.exponents, 0, state) >> 16;
            table1[lane] = if i >= u32::from(m.split) { SLOTS as u32 } else { 0 };
            let e = match &tables.lower {
                None => m.palette[i as usize % SYMBOLS],
                Some(lower) => (16 * i + (step(lower, 0, state) >> 16)).min(254) as u8,
            };
            block.scales[lane] = mxfp4::scale(e);
            // SAFETY: at the limit at most, followed by slack for the words of a block.
            unsafe { fill(m.bytes, &mut at, state) };
        }
        for pair in block.weights.as_chunks_mut::<2>().0 {
            let [low, high] = pair;
            for (lane, state) in states.iter_mut().enumerate() {
                for weights in [&mut *low, &mut *high] {
                    let word = step(&tables.nibbles, table1[lane], state);
                    weights[lane] = f32::from_bits(word & 0xffff_0000);
                }
                // SAFETY: at the limit at most before the block, whose words the slack has room for.
                unsafe { fill(m.bytes, &mut at, state) };
            }
        }
        self.at = at;
    }
}

/// The word of the next slot, which is taken from the state. `table1` is 128 or 0.
#[inline(always)]
fn step(slots: &Slots, table1: u32, state: &mut u32) -> u32 {
    let slot = (*state % SLOTS as u32) | table1;
    let word = slots[slot as usize % (2 * SLOTS)];
    *state = (word & 0xff) * (*state >> SLOT_BITS) + (word >> 8 & 0xff);
    word
}

/// Lets a word into a state below 2^16.
///
/// # Safety
/// Two bytes must be readable at `at`.
#[inline(always)]
unsafe fn fill(bytes: &[u8], at: &mut usize, state: &mut u32) {
    debug_assert!(*at + 2 <= bytes.len());
    // SAFETY: the caller's promise.
    let word = unsafe { bytes.as_ptr().add(*at).cast::<u16>().read_unaligned() };
    let low = *state < LOWEST;
    let filled = *state << 16 | u32::from(word.to_le());
    *state = if low { filled } else { *state };
    *at += 2 * usize::from(low);
}

#[target_feature(enable = "neon")]
#[inline]
fn load(rows: &Rows, part: usize) -> float32x4_t {
    // SAFETY: a slice of four values.
    unsafe { vld1q_f32(rows[part * LANES..][..LANES].as_ptr()) }
}

#[target_feature(enable = "neon")]
#[inline]
fn store(rows: &mut Rows, part: usize, x: float32x4_t) {
    // SAFETY: a slice of four values.
    unsafe { vst1q_f32(rows[part * LANES..][..LANES].as_mut_ptr(), x) }
}
