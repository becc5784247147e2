//! Products in 256-bit vectors: a register is half a line, four rows of eight codes.
//!
//! The plain algorithm is [`TrellisMatrix::multiply`]. There is no shift of 16-bit lanes by counts of their
//! own, so the bytes of a window are put together from two byte-aligned pieces, multiplied up. Entries of sixteen inputs are then brought together, one row to a half of a register, because
//! a half then has one class: its table is four byte shuffles of sixteen entries, of which those that an
//! index lies below give zero. Shuffles hold the difference to the part below, so that XOR adds up to the
//! entry: no selections. Weights keep their bias of 64; products of it are taken off per block.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use super::{
    Activations, BLOCK, CLASSES, GROUP, LINE, TILE, Trellis, TrellisMatrix, TrellisTables, ZERO,
    side_bytes,
};

/// Vectors that share decoded weights.
const MANY: usize = 4;
/// Rows of a register.
const ROWS: usize = 4;

/// As [`TrellisMatrix::multiply`].
#[target_feature(enable = "avx2,fma")]
pub(super) fn multiply(m: &TrellisMatrix<'_>, x: &Activations, out: &mut [f32]) {
    let n = m.check(x, out);
    let (windows, tables) = (Windows::new(m.trellis), differences(&m.tables));
    for four in 0..m.rows.div_ceil(ROWS) {
        let mut v = 0;
        while v < n {
            if n - v >= MANY {
                let sums = multiply_four::<MANY>(m, &windows, &tables, x, four, v);
                put(m, four, v, n, &sums, out);
                v += MANY;
            } else {
                let sums = multiply_four::<1>(m, &windows, &tables, x, four, v);
                put(m, four, v, n, &sums, out);
                v += 1;
            }
        }
    }
}

/// Applies the rows' scales; `sums` (vectors, 4 rows).
fn put(
    m: &TrellisMatrix<'_>,
    four: usize,
    first: usize,
    n: usize,
    sums: &[[f32; ROWS]],
    out: &mut [f32],
) {
    for row in four * ROWS..m.rows.min((four + 1) * ROWS) {
        for (v, sums) in sums.iter().enumerate() {
            out[row * n + first + v] = sums[row % ROWS] * m.scale(row);
        }
    }
}

/// How windows are put together, for even and for odd inputs: of a window that begins at bit t of byte b,
/// the 16 bits from byte b on, times 2^(8 − t), have the lower byte as their upper one, and the 16 bits from byte
/// b + 1 on, times the same, have the upper byte.
struct Windows {
    multiplier: __m256i,
    lower: [__m256i; 2],
    upper: [__m256i; 2],
    up: [__m256i; 2],
}

impl Windows {
    // Never inlined: where compilers see that the factors are powers of two, they put shifts in the place
    // of multiplications, of lanes twice as wide, and products take twice as long.
    #[target_feature(enable = "avx2")]
    #[inline(never)]
    fn new(trellis: Trellis) -> Self {
        let zero = [_mm256_setzero_si256(); 2];
        let multiplier = _mm256_set1_epi16(trellis.multiplier() as i16);
        let mut all = Self { multiplier, lower: zero, upper: zero, up: zero };
        for odd in 0..2 {
            let (mut lower, mut upper, mut up) = ([0u8; 32], [0u8; 32], [0u16; 16]);
            for lane in 0..16 {
                let offset = trellis.offset(lane % 4 * 2 + odd);
                let byte = lane / 4 % 2 * 8 + offset / 8;
                for i in 0..2 {
                    lower[2 * lane + i] = (byte + i) as u8;
                    upper[2 * lane + i] = (byte + 1 + i) as u8;
                }
                up[lane] = 1 << (8 - offset % 8);
            }
            // SAFETY: 32 bytes each.
            unsafe {
                all.lower[odd] = _mm256_loadu_si256(lower.as_ptr().cast());
                all.upper[odd] = _mm256_loadu_si256(upper.as_ptr().cast());
                all.up[odd] = _mm256_loadu_si256(up.as_ptr().cast());
            }
        }
        all
    }

    /// Windows of even or odd inputs times the multiplier, from words that begin with their codes.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn products(&self, codes: __m256i, odd: usize) -> __m256i {
        let lower = _mm256_mullo_epi16(_mm256_shuffle_epi8(codes, self.lower[odd]), self.up[odd]);
        let upper = _mm256_mullo_epi16(_mm256_shuffle_epi8(codes, self.upper[odd]), self.up[odd]);
        let upper = _mm256_and_si256(upper, _mm256_set1_epi16(0xff00u16 as i16));
        _mm256_mullo_epi16(_mm256_or_si256(_mm256_srli_epi16(lower, 8), upper), self.multiplier)
    }

    /// Entries of eight inputs of four rows.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn entries(&self, codes: __m256i) -> __m256i {
        let even = _mm256_srli_epi16(self.products(codes, 0), 8);
        let odd = _mm256_and_si256(self.products(codes, 1), _mm256_set1_epi16(0x3f00));
        _mm256_or_si256(_mm256_and_si256(even, _mm256_set1_epi16(0x3f)), odd)
    }
}

/// The four parts of a table, each but the first as its difference to the one before, for both halves of a
/// register; by the class of the lower half and twice that of the upper.
type Differences = [[[u8; 32]; 4]; CLASSES * CLASSES];

fn differences(tables: &TrellisTables) -> Differences {
    std::array::from_fn(|classes| {
        std::array::from_fn(|part| {
            std::array::from_fn(|i| {
                let table = &tables.bytes[classes >> (i / 16) & 1];
                let before = if part == 0 { 0 } else { table[part * 16 - 16 + i % 16] };
                table[part * 16 + i % 16] ^ before
            })
        })
    })
}

/// Weights of entries.
#[target_feature(enable = "avx2")]
#[inline]
fn look_up(parts: &[[u8; 32]; 4], entry: __m256i) -> __m256i {
    let part = |i: usize| -> *const __m256i { parts[i].as_ptr().cast() };
    // SAFETY: 32 bytes each.
    let [a, b, c, d] = unsafe {
        [
            _mm256_loadu_si256(part(0)),
            _mm256_loadu_si256(part(1)),
            _mm256_loadu_si256(part(2)),
            _mm256_loadu_si256(part(3)),
        ]
    };
    let a = _mm256_shuffle_epi8(a, entry);
    let b = _mm256_shuffle_epi8(b, _mm256_sub_epi8(entry, _mm256_set1_epi8(16)));
    let c = _mm256_shuffle_epi8(c, _mm256_sub_epi8(entry, _mm256_set1_epi8(32)));
    let d = _mm256_shuffle_epi8(d, _mm256_sub_epi8(entry, _mm256_set1_epi8(48)));
    _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d))
}

/// Unscaled products of four rows with `V` vectors from `first` on.
#[target_feature(enable = "avx2,fma")]
fn multiply_four<const V: usize>(
    m: &TrellisMatrix<'_>,
    windows: &Windows,
    tables: &Differences,
    x: &Activations,
    four: usize,
    first: usize,
) -> [[f32; ROWS]; V] {
    let (rate, blocks) = (m.trellis.rate, m.cols / BLOCK);
    let (tile, half) = (four / 2, four % 2);
    let lines = &m.codes[tile * m.trellis.tile_bytes(m.cols)..][..m.trellis.tile_bytes(m.cols)];
    let sides = &m.sides[tile * side_bytes(m.cols)..][..side_bytes(m.cols)];
    let (high, low) = (&x.high[first * m.cols..], &x.low[first * m.cols..]);
    assert!(high.len() >= V * m.cols && low.len() >= V * m.cols);
    let (scales, sums) = (&x.scales[first * blocks..], &x.sums[first * blocks..]);

    let mut f = [_mm256_setzero_ps(); V];
    let mut bit = 0;
    let (mut shift, step) = (_mm256_setzero_si256(), _mm256_set1_epi64x(rate as i64));
    for block in 0..blocks {
        let at = block / 2 * TILE + half * ROWS;
        let side: &[u8; ROWS] = sides[at..].first_chunk().expect("a side per row");
        let side = u32::from_le_bytes(*side) >> (block % 2 * 4);
        let classes =
            |a: u32, b: u32| (side >> (8 * a + 3) & 1 | (side >> (8 * b + 3) & 1) << 1) as usize;
        let (tables02, tables13) = (&tables[classes(0, 2)], &tables[classes(1, 3)]);
        // All rows' entries of eight inputs after eight.
        let mut entries = [_mm256_setzero_si256(); BLOCK / GROUP];
        for entries in &mut entries {
            debug_assert!(bit / 64 * LINE + 2 * LINE <= lines.len());
            // SAFETY: `lines` are those of the tile, and no group of inputs begins in the last.
            let (this, next) = unsafe {
                let line = lines.as_ptr().add(bit / 64 * LINE + half * 32);
                (_mm256_loadu_si256(line.cast()), _mm256_loadu_si256(line.add(LINE).cast()))
            };
            // Counts of 64 and more make zero.
            let codes = _mm256_or_si256(
                _mm256_srlv_epi64(this, shift),
                _mm256_sllv_epi64(next, _mm256_sub_epi64(_mm256_set1_epi64x(64), shift)),
            );
            *entries = windows.entries(codes);
            bit += rate;
            shift = _mm256_add_epi64(shift, step);
            shift = _mm256_and_si256(shift, _mm256_set1_epi64x(63));
        }
        let [a, b, c, d] = entries;
        // Rows 0 and 2, then rows 1 and 3, each of sixteen inputs and the other sixteen.
        let w = [
            look_up(tables02, _mm256_unpacklo_epi64(a, b)),
            look_up(tables02, _mm256_unpacklo_epi64(c, d)),
            look_up(tables13, _mm256_unpackhi_epi64(a, b)),
            look_up(tables13, _mm256_unpackhi_epi64(c, d)),
        ];
        // In the order of the lanes below: rows 0, 1, 0, 1, 2, 3, 2, 3.
        let nibbles = _mm256_srlv_epi32(
            _mm256_set1_epi32(side as i32),
            _mm256_setr_epi32(0, 8, 0, 8, 16, 24, 16, 24),
        );
        let deltas = _mm256_and_si256(nibbles, _mm256_set1_epi32(7));
        let exponents = _mm256_sub_epi32(_mm256_set1_epi32(127), deltas);
        let power = _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23));
        for (v, f) in f.iter_mut().enumerate() {
            let mut rows02 = _mm256_setzero_si256();
            let mut rows13 = _mm256_setzero_si256();
            for pair in 0..2 {
                let at = v * m.cols + block * BLOCK + pair * 2 * GROUP;
                // SAFETY: there are V · cols bytes of each, as asserted above.
                let (high, low) = unsafe {
                    let high = _mm_loadu_si128(high.as_ptr().add(at).cast());
                    (high, _mm_loadu_si128(low.as_ptr().add(at).cast()))
                };
                let high = _mm256_broadcastsi128_si256(high);
                let low = _mm256_broadcastsi128_si256(low);
                rows02 = _mm256_add_epi32(rows02, dot(w[pair], high, low));
                rows13 = _mm256_add_epi32(rows13, dot(w[2 + pair], high, low));
            }
            let halves = _mm256_hadd_epi32(rows02, rows13);
            let bias = _mm256_set1_epi32(i32::from(ZERO) * sums[v * blocks + block]);
            let total = _mm256_sub_epi32(_mm256_hadd_epi32(halves, halves), bias);
            let scale = _mm256_mul_ps(power, _mm256_set1_ps(scales[v * blocks + block]));
            *f = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, *f);
        }
    }
    let mut out = [[0.0; ROWS]; V];
    for (out, f) in out.iter_mut().zip(f) {
        let mut lanes = [0.0f32; 8];
        // SAFETY: eight values.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), f) };
        *out = [lanes[0], lanes[1], lanes[4], lanes[5]];
    }
    out
}

/// Sums of four products each. No pair of products of bytes leaves 16 bits: weights are at most 127.
#[target_feature(enable = "avx2")]
#[inline]
fn dot(w: __m256i, high: __m256i, low: __m256i) -> __m256i {
    let high = _mm256_madd_epi16(_mm256_maddubs_epi16(w, high), _mm256_set1_epi16(128));
    let low = _mm256_madd_epi16(_mm256_maddubs_epi16(w, low), _mm256_set1_epi16(1));
    _mm256_add_epi32(high, low)
}
