//! Products in 512-bit vectors: a register has a 32-bit lane for each row of a tile.
//!
//! The plain algorithm is [`Mxfp4zMatrix::multiply`]. Symbols depend on one another, so several tiles are read at a time, some
//! blocks of each into a panel of f32 that stays in the nearest cache; then every vector is multiplied by it, and partial
//! sums are put down between panels, as they are. Lookups of slots ignore all but seven bits of a state and need no
//! mask. Symbols of table 1 are 16 more, which makes one lookup of frequencies for both tables.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::format::Alphabet;
use super::*;
use crate::codec::{PARTIALS, mxfp4};

/// Tiles that are read at a time.
const TILES: usize = 4;
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
        let mut table1 = [0; T];
        for u in 0..T {
            at[u] = streams[u].at.min(m.limit());
            states[u] = streams[u].states;
            // Known to compilers where it can be: mask registers are few.
            rows[u] = if T == 1 { streams[u].rows } else { u16::MAX };
            // SAFETY: at the limit at most, followed by slack for three symbols and more.
            let i =
                unsafe { step(&self.exponents, 0, m.bytes, &mut at[u], &mut states[u], rows[u]) };
            let i = _mm512_and_si512(i, _mm512_set1_epi32(SYMBOLS as i32 - 1));
            table1[u] = _mm512_cmpge_epi32_mask(i, self.split);
            let e = match &self.lower {
                None => _mm512_permutexvar_epi32(i, self.palette),
                Some(lower) => {
                    // SAFETY: as above.
                    let k = unsafe { step(lower, 0, m.bytes, &mut at[u], &mut states[u], rows[u]) };
                    let k = _mm512_and_si512(k, _mm512_set1_epi32(SYMBOLS as i32 - 1));
                    let e = _mm512_or_si512(_mm512_slli_epi32(i, 4), k);
                    _mm512_min_epi32(e, _mm512_set1_epi32(254))
                }
            };
            // 2^-127 is subnormal, its only set bit is the highest of the fraction.
            let scale = _mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(1 << 22));
            store(&mut panels[u].scales[block], _mm512_castsi512_ps(scale));
        }
        let values = load(&mxfp4::VALUES);
        for place in 0..BLOCK {
            for u in 0..T {
                // SAFETY: at the limit at most before the block, and its slack is for so many symbols.
                let symbol = unsafe {
                    step(&self.nibbles, table1[u], m.bytes, &mut at[u], &mut states[u], rows[u])
                };
                let weights = _mm512_permutexvar_ps(symbol, values);
                store(&mut panels[u].weights[block][place], weights);
            }
        }
        for u in 0..T {
            (streams[u].at, streams[u].states) = (at[u], states[u]);
        }
    }
}

/// The next symbol of every lane, 16 more in those of table 1; other bits than the lowest five have no meaning.
///
/// # Safety
/// 32 bytes must be readable at `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
#[inline]
unsafe fn step(
    tables: &Vectors,
    table1: __mmask16,
    bytes: &[u8],
    at: &mut usize,
    states: &mut __m512i,
    rows: __mmask16,
) -> __m512i {
    debug_assert!(*at + 2 * TILE <= bytes.len());
    let [[a, b], [c, d]] = tables.symbols;
    let of0 = _mm512_permutex2var_epi8(a, *states, b);
    let of1 = _mm512_permutex2var_epi8(c, *states, d);
    let symbol = _mm512_mask_mov_epi32(of0, table1, of1);
    let slot = _mm512_permutex2var_epi32(tables.slots[0], symbol, tables.slots[1]);
    // With y = state / 128: frequency · y + state mod 128 − first is state + (frequency − 128) · y − first.
    let more =
        _mm512_mullo_epi32(_mm512_srai_epi32(slot, 16), _mm512_srli_epi32(*states, SLOT_BITS));
    let less_first = _mm512_sub_epi32(*states, _mm512_and_si512(slot, _mm512_set1_epi32(0xffff)));
    let next = _mm512_add_epi32(less_first, more);
    let low = _mm512_mask_cmplt_epu32_mask(rows, next, _mm512_set1_epi32(LOWEST as i32));
    // SAFETY: the caller's promise.
    let words = unsafe { _mm256_loadu_si256(bytes.as_ptr().add(*at).cast()) };
    let words = _mm512_maskz_expand_epi32(low, _mm512_cvtepu16_epi32(words));
    *states = _mm512_mask_or_epi32(next, low, _mm512_slli_epi32(next, 16), words);
    *at += 2 * low.count_ones() as usize;
    symbol
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
