//! Products in 256-bit vectors: two registers have the sixteen rows of a tile, a 32-bit lane for each.
//!
//! The plain algorithm is [`Mxfp4zMatrix::multiply`]. A slot's frequency, place and weight stand in one word of a table, and are
//! gathered together. Words that come in are put where they belong by a table of permutations, because there is no
//! instruction that expands. Two tiles are read at a time, a block of each; then every vector is multiplied by it.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::slots::{Slots, Tables};
use super::*;
use crate::codec::{PARTIALS, mxfp4};

/// Tiles that are read at a time.
const TILES: usize = 2;
/// Vectors that share decoded weights; their partial sums take 16 KiB for each tile.
const VECTORS: usize = 16;
/// Lanes of a register.
const LANES: usize = 8;
/// For every set of lanes, which of the next words is each lane's.
const EXPAND: [[u8; LANES]; 256] = {
    let mut all = [[0; LANES]; 256];
    let mut set = 0;
    while set < all.len() {
        let (mut lane, mut word) = (0, 0);
        while lane < LANES {
            if set >> lane & 1 == 1 {
                all[set][lane] = word;
                word += 1;
            }
            lane += 1;
        }
        set += 1;
    }
    all
};

/// A value for every row of a tile.
type Rows = [f32; TILE];
/// Partial sums of a tile for every vector.
type Sums = [[Rows; PARTIALS]; VECTORS];

/// As [`Mxfp4zMatrix::multiply`].
#[target_feature(enable = "avx2,fma,popcnt")]
pub(super) fn multiply(m: &Mxfp4zMatrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
    m.check(x, n, out);
    let (tiles, whole, tables) = (m.rows.div_ceil(TILE), m.rows / TILE, Tables::new(m));
    for v in (0..n).step_by(VECTORS) {
        let vectors = v..n.min(v + VECTORS);
        let mut tile = 0;
        while tile + TILES <= whole {
            multiply_tiles::<TILES>(m, &tables, x, n, tile, vectors.clone(), out);
            tile += TILES;
        }
        for tile in tile..tiles {
            multiply_tiles::<1>(m, &tables, x, n, tile, vectors.clone(), out);
        }
    }
}

/// `T` tiles from `tile` on times some of the vectors.
#[target_feature(enable = "avx2,fma,popcnt")]
fn multiply_tiles<const T: usize>(
    m: &Mxfp4zMatrix<'_>,
    tables: &Tables,
    x: &[f32],
    n: usize,
    tile: usize,
    vectors: Range<usize>,
    out: &mut [f32],
) {
    let mut streams: [Stream; T] = std::array::from_fn(|u| Stream::new(m, tile + u));
    let mut blocks = [Block { weights: [[0.0; TILE]; BLOCK], scales: [0.0; TILE] }; T];
    let mut sums: [Sums; T] = [[[[0.0; TILE]; PARTIALS]; VECTORS]; T];
    for number in 0..m.cols / BLOCK {
        read(tables, m, &mut streams, &mut blocks);
        for (block, sums) in blocks.iter().zip(&mut sums) {
            for (v, sums) in vectors.clone().zip(sums) {
                let x = &x[v * m.cols + number * BLOCK..];
                add(block, x.first_chunk().expect("a block of inputs"), sums);
            }
        }
    }
    for (u, sums) in sums.iter().enumerate() {
        for (v, sums) in vectors.clone().zip(sums) {
            let rows = out[(tile + u) * TILE * n..].chunks_exact_mut(n);
            for (lane, out) in rows.take(m.tile_rows(tile + u)).enumerate() {
                out[v] = mxfp4::join(std::array::from_fn(|j| sums[j][lane]));
            }
        }
    }
}

/// A decoded block of a tile.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Block {
    /// By place: inputs 0, 16, 1, 17, ….
    weights: [Rows; BLOCK],
    scales: Rows,
}

/// Adds the products of a block with `x` to the partial sums.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn add(block: &Block, x: &[f32; BLOCK], sums: &mut [Rows; PARTIALS]) {
    for half in 0..2 {
        let scale = load(&block.scales, half);
        for (j, sums) in sums.iter_mut().enumerate() {
            let low = load(&block.weights[2 * j], half);
            let high = load(&block.weights[2 * j + 1], half);
            let t = _mm256_mul_ps(low, _mm256_set1_ps(x[j]));
            let t = _mm256_fmadd_ps(high, _mm256_set1_ps(x[PARTIALS + j]), t);
            let p = _mm256_fmadd_ps(t, scale, load(sums, half));
            store(sums, half, p);
        }
    }
}

/// Where a tile is being read.
struct Stream {
    at: usize,
    states: [__m256i; 2],
    /// Ones in lanes that have a row.
    rows: [__m256i; 2],
}

impl Stream {
    #[target_feature(enable = "avx2")]
    fn new(m: &Mxfp4zMatrix<'_>, tile: usize) -> Self {
        let range = m.tile_range(tile);
        let states: &[u8; STATES] = m.bytes[range.clone()].first_chunk().expect("room for states");
        let rows: [i32; TILE] = std::array::from_fn(|lane| -i32::from(lane < m.tile_rows(tile)));
        // SAFETY: twice 32 bytes of 64 each.
        unsafe {
            let (states, rows) =
                (states.as_ptr().cast::<__m256i>(), rows.as_ptr().cast::<__m256i>());
            Self {
                at: range.start + STATES,
                states: [_mm256_loadu_si256(states), _mm256_loadu_si256(states.add(1))],
                rows: [_mm256_loadu_si256(rows), _mm256_loadu_si256(rows.add(1))],
            }
        }
    }
}

/// Reads the next block of every tile.
#[expect(clippy::needless_range_loop, reason = "iterators of arrays put registers into memory")]
#[target_feature(enable = "avx2,popcnt")]
#[inline]
fn read<const T: usize>(
    tables: &Tables,
    m: &Mxfp4zMatrix<'_>,
    streams: &mut [Stream; T],
    blocks: &mut [Block; T],
) {
    let none = _mm256_setzero_si256();
    let mut table1 = [[none; 2]; T];
    let palette = m.palette.map(u32::from);
    let split = _mm256_set1_epi32(i32::from(m.split) - 1);
    for u in 0..T {
        let stream = &mut streams[u];
        stream.at = stream.at.min(m.limit());
        for half in 0..2 {
            let states = &mut stream.states[half];
            let i = _mm256_srli_epi32::<16>(step(&tables.exponents, none, states));
            let second = _mm256_cmpgt_epi32(i, split);
            table1[u][half] = _mm256_and_si256(second, _mm256_set1_epi32(SLOTS as i32));
            let e = match &tables.lower {
                // SAFETY: symbols are below 16.
                None => unsafe { _mm256_i32gather_epi32::<4>(palette.as_ptr().cast(), i) },
                Some(lower) => {
                    let k = _mm256_srli_epi32::<16>(step(lower, none, states));
                    let e = _mm256_or_si256(_mm256_slli_epi32::<4>(i), k);
                    _mm256_min_epi32(e, _mm256_set1_epi32(254))
                }
            };
            // 2^-127 is subnormal, its only set bit is the highest of the fraction.
            let scale = _mm256_max_epi32(_mm256_slli_epi32::<23>(e), _mm256_set1_epi32(1 << 22));
            store(&mut blocks[u].scales, half, _mm256_castsi256_ps(scale));
            // SAFETY: at the limit at most, followed by slack for the words of a block.
            unsafe { fill(m.bytes, &mut stream.at, states, stream.rows[half]) };
        }
    }
    let upper = _mm256_set1_epi32(!0xffff);
    for pair in 0..BLOCK / 2 {
        for half in 0..2 {
            for u in 0..T {
                let stream = &mut streams[u];
                let states = &mut stream.states[half];
                for second in 0..2 {
                    let word = step(&tables.nibbles, table1[u][half], states);
                    let weights = _mm256_castsi256_ps(_mm256_and_si256(word, upper));
                    store(&mut blocks[u].weights[2 * pair + second], half, weights);
                }
                // SAFETY: at the limit at most before the block, whose words the slack has room for.
                unsafe { fill(m.bytes, &mut stream.at, states, stream.rows[half]) };
            }
        }
    }
}

/// The words of the next slots, which are taken from the states. `table1` is 128 in lanes of table 1, and 0.
#[target_feature(enable = "avx2")]
#[inline]
fn step(slots: &Slots, table1: __m256i, states: &mut __m256i) -> __m256i {
    let slot = _mm256_and_si256(*states, _mm256_set1_epi32(SLOTS as i32 - 1));
    // SAFETY: slots are below 128, and 128 more are in the table.
    let word = unsafe {
        _mm256_i32gather_epi32::<4>(slots.as_ptr().cast(), _mm256_or_si256(slot, table1))
    };
    let byte = _mm256_set1_epi32(0xff);
    let frequency = _mm256_and_si256(word, byte);
    let rest = _mm256_and_si256(_mm256_srli_epi32::<8>(word), byte);
    let more = _mm256_mullo_epi32(frequency, _mm256_srli_epi32::<{ SLOT_BITS as i32 }>(*states));
    *states = _mm256_add_epi32(more, rest);
    word
}

/// Lets words into the states below 2^16 of lanes that have a row.
///
/// # Safety
/// 16 bytes must be readable at `at`.
#[target_feature(enable = "avx2,popcnt")]
#[inline]
unsafe fn fill(bytes: &[u8], at: &mut usize, states: &mut __m256i, rows: __m256i) {
    debug_assert!(*at + 2 * LANES <= bytes.len());
    let high = _mm256_srli_epi32::<16>(*states);
    let low = _mm256_and_si256(_mm256_cmpeq_epi32(high, _mm256_setzero_si256()), rows);
    let set = _mm256_movemask_ps(_mm256_castsi256_ps(low)) as u8;
    // SAFETY: the caller's promise, and eight bytes of the table.
    let (words, from) = unsafe {
        (
            _mm_loadu_si128(bytes.as_ptr().add(*at).cast()),
            _mm_loadl_epi64(EXPAND[usize::from(set)].as_ptr().cast()),
        )
    };
    let words =
        _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(words), _mm256_cvtepu8_epi32(from));
    let filled = _mm256_or_si256(_mm256_slli_epi32::<16>(*states), words);
    *states = _mm256_blendv_epi8(*states, filled, low);
    *at += 2 * set.count_ones() as usize;
}

#[target_feature(enable = "avx2")]
#[inline]
fn load(rows: &Rows, half: usize) -> __m256 {
    // SAFETY: a slice of eight values.
    unsafe { _mm256_loadu_ps(rows[half * LANES..][..LANES].as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store(rows: &mut Rows, half: usize, x: __m256) {
    // SAFETY: a slice of eight values.
    unsafe { _mm256_storeu_ps(rows[half * LANES..][..LANES].as_mut_ptr(), x) }
}
