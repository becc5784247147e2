//! Products in 512-bit vectors: a register has a 32-bit lane for each row of a tile.
//!
//! The plain algorithm is [`Mxfp4zMatrix::multiply`]. Symbols depend on one another, so several tiles are read at a time, some
//! blocks of each into a panel of f32 that stays in the nearest cache; then every vector is multiplied by it, and partial
//! sums are put down between panels, as they are. Four tiles have their slots looked up at once, one in each byte of the
//! lanes, because looking up 64 bytes in a table of 128 costs as much as three other instructions. Lookups ignore all but the
//! seven bits of a slot, and the five of a symbol, and need no mask. Symbols of table 1 are 16 more, which makes one
//! lookup of frequencies for both tables.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::format::Alphabet;
use super::*;
use crate::codec::{PARTIALS, mxfp4};

/// Tiles that are read at a time.
const TILES: usize = 8;
/// Tiles whose slots are looked up at once, one in each byte of a lane.
const GROUP: usize = 4;
/// Blocks of a panel: 9 KiB with their scales for each tile.
const BLOCKS: usize = 4;
/// Vectors that share decoded weights; their partial sums take 16 KiB for each tile.
const VECTORS: usize = 16;
/// Partial sums that are computed at a time, because one chain would wait for its additions.
const CHAINS: usize = 4;

type Lanes = [f32; TILE];

/// Decoded blocks of a tile.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Panel {
    /// By block and place: inputs 0, 16, 1, 17, ….
    weights: [[Lanes; BLOCK]; BLOCKS],
    scales: [Lanes; BLOCKS],
}

/// Partial sums of a tile for every vector.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sums([[Lanes; PARTIALS]; VECTORS]);

/// As [`Mxfp4zMatrix::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(super) fn multiply(m: &Mxfp4zMatrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
    m.check(x, n, out);
    let (tiles, whole, reader) = (m.rows.div_ceil(TILE), m.rows / TILE, Reader::new(m));
    for v in (0..n).step_by(VECTORS) {
        let vectors = v..n.min(v + VECTORS);
        let mut tile = 0;
        while tile + TILES <= whole {
            multiply_tiles::<TILES>(m, &reader, x, n, tile, vectors.clone(), out);
            tile += TILES;
        }
        for tile in tile..tiles {
            multiply_tiles::<1>(m, &reader, x, n, tile, vectors.clone(), out);
        }
    }
}

/// `T` tiles from `tile` on, which are whole if they are several, times some of the vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
fn multiply_tiles<const T: usize>(
    m: &Mxfp4zMatrix<'_>,
    reader: &Reader,
    x: &[f32],
    n: usize,
    tile: usize,
    vectors: Range<usize>,
    out: &mut [f32],
) {
    let mut streams: [Stream; T] = std::array::from_fn(|u| Stream::new(m, tile + u));
    let mut panels =
        [Panel { weights: [[[0.0; TILE]; BLOCK]; BLOCKS], scales: [[0.0; TILE]; BLOCKS] }; T];
    let mut sums = [Sums([[[0.0; TILE]; PARTIALS]; VECTORS]); T];
    let blocks = m.cols / BLOCK;
    for first in (0..blocks).step_by(BLOCKS) {
        let some = BLOCKS.min(blocks - first);
        for block in 0..some {
            reader.read(m, &mut streams, &mut panels, block);
        }
        for (panel, sums) in panels.iter().zip(&mut sums) {
            for (v, sums) in vectors.clone().zip(&mut sums.0) {
                let x = &x[v * m.cols + first * BLOCK..][..some * BLOCK];
                for j in (0..PARTIALS).step_by(CHAINS) {
                    add(panel, x, j, sums);
                }
            }
        }
    }
    for (u, sums) in sums.iter().enumerate() {
        for (v, sums) in vectors.clone().zip(&sums.0) {
            let rows = out[(tile + u) * TILE * n..].chunks_exact_mut(n);
            for (lane, out) in rows.take(m.tile_rows(tile + u)).enumerate() {
                out[v] = mxfp4::join(std::array::from_fn(|j| sums[j][lane]));
            }
        }
    }
}

/// Adds the products of a panel's blocks with `x`, as many, to `CHAINS` partial sums from `j` on.
#[target_feature(enable = "avx512f")]
#[inline]
fn add(panel: &Panel, x: &[f32], j: usize, sums: &mut [Lanes; PARTIALS]) {
    let mut p = [_mm512_setzero_ps(); CHAINS];
    for c in 0..CHAINS {
        p[c] = load(&sums[j + c]);
    }
    let (blocks, _) = x.as_chunks::<BLOCK>();
    for (b, x) in blocks.iter().enumerate() {
        let (weights, scale) = (&panel.weights[b], load(&panel.scales[b]));
        for c in 0..CHAINS {
            let (low, high) = (load(&weights[2 * (j + c)]), load(&weights[2 * (j + c) + 1]));
            let t = _mm512_mul_ps(low, _mm512_set1_ps(x[j + c]));
            let t = _mm512_fmadd_ps(high, _mm512_set1_ps(x[PARTIALS + j + c]), t);
            p[c] = _mm512_fmadd_ps(t, scale, p[c]);
        }
    }
    for c in 0..CHAINS {
        store(&mut sums[j + c], p[c]);
    }
}

/// Where a tile is being read.
struct Stream {
    at: usize,
    states: __m512i,
    /// Lanes that have a row.
    rows: __mmask16,
}

impl Stream {
    #[target_feature(enable = "avx512f")]
    fn new(m: &Mxfp4zMatrix<'_>, tile: usize) -> Self {
        let range = m.tile_range(tile);
        let states: &[u8; STATES] = m.bytes[range.clone()].first_chunk().expect("room for states");
        Self {
            at: range.start + STATES,
            // SAFETY: 64 bytes.
            states: unsafe { _mm512_loadu_si512(states.as_ptr().cast()) },
            rows: u16::MAX >> (TILE - m.tile_rows(tile)),
        }
    }
}

/// Alphabets in registers.
#[derive(Clone, Copy)]
struct Vectors {
    /// Symbols of slots, by table.
    symbols: [[__m512i; 2]; 2],
    /// First slot in the lower half, frequency less 128 in the upper one; table 1 from 16 on.
    slots: [__m512i; 2],
}

impl Vectors {
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn new(tables: [&Alphabet; 2]) -> Self {
        let (mut symbols, mut slots) =
            ([[_mm512_setzero_si512(); 2]; 2], [_mm512_setzero_si512(); 2]);
        for (t, table) in tables.into_iter().enumerate() {
            let of_slots = table.symbol.map(|s| s + SYMBOLS as u8 * t as u8);
            for (half, symbols) in of_slots.as_chunks::<64>().0.iter().zip(&mut symbols[t]) {
                // SAFETY: 64 bytes.
                *symbols = unsafe { _mm512_loadu_si512(half.as_ptr().cast()) };
            }
            let packed: [i32; SYMBOLS] = std::array::from_fn(|s| {
                (i32::from(table.frequency[s]) - SLOTS as i32) << 16 | i32::from(table.first[s])
            });
            // SAFETY: sixteen lanes.
            slots[t] = unsafe { _mm512_loadu_si512(packed.as_ptr().cast()) };
        }
        Self { symbols, slots }
    }
}

/// What reads blocks of a matrix.
struct Reader {
    nibbles: Vectors,
    exponents: Vectors,
    lower: Option<Vectors>,
    palette: __m512i,
    split: __m512i,
}

impl Reader {
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn new(m: &Mxfp4zMatrix<'_>) -> Self {
        let palette = m.palette.map(i32::from);
        let [first, second] = &m.nibbles;
        let mut lower = None;
        if let Some(table) = &m.lower {
            lower = Some(Vectors::new([table; 2]));
        }
        Self {
            nibbles: Vectors::new([first, second]),
            exponents: Vectors::new([&m.exponents; 2]),
            lower,
            // SAFETY: sixteen lanes.
            palette: unsafe { _mm512_loadu_si512(palette.as_ptr().cast()) },
            split: _mm512_set1_epi32(i32::from(m.split)),
        }
    }

    /// Reads the next block of every tile into the panels' block number `block`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
    #[inline]
    fn read<const T: usize>(
        &self,
        m: &Mxfp4zMatrix<'_>,
        streams: &mut [Stream; T],
        panels: &mut [Panel; T],
        block: usize,
    ) {
        let (mut at, mut states, mut rows) = ([0; T], [_mm512_setzero_si512(); T], [0; T]);
        for u in 0..T {
            at[u] = streams[u].at.min(m.limit());
            states[u] = streams[u].states;
            // Known to compilers where it can be: mask registers are few.
            rows[u] = if T == 1 { streams[u].rows } else { u16::MAX };
        }
        let none = [_mm512_setzero_si512(); T];
        let low_four = _mm512_set1_epi32(SYMBOLS as i32 - 1);
        let mut e = step(&self.exponents, &none, &mut states);
        let mut table1 = none;
        for u in 0..T {
            let i = _mm512_and_si512(e[u], low_four);
            let second = _mm512_cmpge_epi32_mask(i, self.split);
            // Of the byte that the tile's slots are looked up in.
            let byte = _mm512_set1_epi32(0xff << (u % GROUP * 8));
            table1[u / GROUP] =
                _mm512_mask_or_epi32(table1[u / GROUP], second, table1[u / GROUP], byte);
            e[u] = match self.lower {
                None => _mm512_permutexvar_epi32(i, self.palette),
                Some(_) => _mm512_slli_epi32(i, 4),
            };
        }
        if let Some(lower) = &self.lower {
            let k = step(lower, &none, &mut states);
            for u in 0..T {
                let whole = _mm512_or_si512(e[u], _mm512_and_si512(k[u], low_four));
                e[u] = _mm512_min_epi32(whole, _mm512_set1_epi32(254));
            }
        }
        for u in 0..T {
            // SAFETY: at the limit at most, followed by slack for the words of a block.
            unsafe { fill(m.bytes, &mut at[u], &mut states[u], rows[u]) };
            // 2^-127 is subnormal, its only set bit is the highest of the fraction.
            let scale = _mm512_max_epi32(_mm512_slli_epi32(e[u], 23), _mm512_set1_epi32(1 << 22));
            store(&mut panels[u].scales[block], _mm512_castsi512_ps(scale));
        }
        let values = load(&mxfp4::VALUES);
        for pair in 0..BLOCK / 2 {
            for half in 0..2 {
                let symbols = step(&self.nibbles, &table1, &mut states);
                for u in 0..T {
                    let weights = _mm512_permutexvar_ps(symbols[u], values);
                    store(&mut panels[u].weights[block][2 * pair + half], weights);
                }
            }
            for u in 0..T {
                // SAFETY: at the limit at most before the block, whose words the slack has room for.
                unsafe { fill(m.bytes, &mut at[u], &mut states[u], rows[u]) };
            }
        }
        for u in 0..T {
            (streams[u].at, streams[u].states) = (at[u], states[u]);
        }
    }
}

/// The next symbol of every lane of every tile, 16 more in those of table 1; other bits than the lowest five have no meaning.
/// `table1`, of every group of tiles, has ones in the bytes of lanes of table 1.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
#[inline]
fn step<const T: usize>(
    tables: &Vectors,
    table1: &[__m512i; T],
    states: &mut [__m512i; T],
) -> [__m512i; T] {
    let mut symbols = [_mm512_setzero_si512(); T];
    let [[a, b], [c, d]] = tables.symbols;
    for first in (0..T).step_by(GROUP) {
        let mut slots = states[first];
        if T > 1 {
            let low = _mm512_set1_epi16(0xff);
            let pair = |a, b| select(low, a, _mm512_slli_epi32::<8>(b));
            let (pair0, pair1) = (
                pair(states[first], states[first + 1]),
                pair(states[first + 2], states[first + 3]),
            );
            slots = select(_mm512_set1_epi32(0xffff), pair0, _mm512_slli_epi32::<16>(pair1));
        }
        let of0 = _mm512_permutex2var_epi8(a, slots, b);
        let of1 = _mm512_permutex2var_epi8(c, slots, d);
        let all = select(table1[first / GROUP], of1, of0);
        symbols[first] = all;
        if T > 1 {
            symbols[first + 1] = _mm512_srli_epi32::<8>(all);
            symbols[first + 2] = _mm512_srli_epi32::<16>(all);
            symbols[first + 3] = _mm512_srli_epi32::<24>(all);
        }
    }
    for u in 0..T {
        let slot = _mm512_permutex2var_epi32(tables.slots[0], symbols[u], tables.slots[1]);
        // With y = state / 128: frequency · y + state mod 128 − first is state + (frequency − 128) · y − first.
        let y = _mm512_srli_epi32(states[u], SLOT_BITS);
        let more = _mm512_mullo_epi32(_mm512_srai_epi32(slot, 16), y);
        let first = _mm512_and_si512(slot, _mm512_set1_epi32(0xffff));
        states[u] = _mm512_add_epi32(_mm512_sub_epi32(states[u], first), more);
    }
    symbols
}

/// Lets words into the states below 2^16.
///
/// # Safety
/// 32 bytes must be readable at `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
#[inline]
unsafe fn fill(bytes: &[u8], at: &mut usize, states: &mut __m512i, rows: __mmask16) {
    debug_assert!(*at + 2 * TILE <= bytes.len());
    let low = _mm512_mask_cmplt_epu32_mask(rows, *states, _mm512_set1_epi32(LOWEST as i32));
    // SAFETY: the caller's promise.
    let words = unsafe { _mm256_loadu_si256(bytes.as_ptr().add(*at).cast()) };
    let words = _mm512_maskz_expand_epi32(low, _mm512_cvtepu16_epi32(words));
    *states = _mm512_mask_or_epi32(*states, low, _mm512_slli_epi32(*states, 16), words);
    *at += 2 * low.count_ones() as usize;
}

/// Bits of `a` where `mask` has ones, of `b` elsewhere.
#[target_feature(enable = "avx512f")]
#[inline]
fn select(mask: __m512i, a: __m512i, b: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0xca>(mask, a, b)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load(lanes: &Lanes) -> __m512 {
    // SAFETY: sixteen values.
    unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store(lanes: &mut Lanes, x: __m512) {
    // SAFETY: sixteen values.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), x) }
}
