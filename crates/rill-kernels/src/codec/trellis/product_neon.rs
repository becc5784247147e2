//! Products in 128-bit vectors: sixteen inputs of one row.
//!
//! The plain algorithm is [`TrellisMatrix::multiply`]. A word that begins with the codes of eight inputs
//! is moved down by the place of each, two to a register; the lower halves of all eight are their windows, one
//! multiplication hashes them, and a table of 64 bytes is one look-up. Tables have lost their bias, so that
//! products are of signed bytes.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::aarch64::*;

use super::format::power;
use super::{Activations, BLOCK, GROUP, LINE, TILE, TrellisMatrix};

/// Vectors that share decoded weights.
const MANY: usize = 4;
/// Inputs of a register.
const INPUTS: usize = 16;

/// As [`TrellisMatrix::multiply`].
#[target_feature(enable = "neon")]
pub(super) fn multiply(m: &TrellisMatrix<'_>, x: &Activations, out: &mut [f32]) {
    let n = m.check(x, out);
    let decoder = Decoder::new(m);
    for row in 0..m.rows {
        let out = &mut out[row * n..][..n];
        let mut v = 0;
        while v < n {
            if n - v >= MANY {
                let sums = multiply_row::<MANY>(m, &decoder, x, row, v);
                for (i, sum) in sums.iter().enumerate() {
                    out[v + i] = sum * m.scale(row);
                }
                v += MANY;
            } else {
                let [sum] = multiply_row::<1>(m, &decoder, x, row, v);
                out[v] = sum * m.scale(row);
                v += 1;
            }
        }
    }
}

/// How words become weights.
struct Decoder {
    /// What moves a word down to the windows of inputs 0 and 1, 2 and 3, 4 and 5, 6 and 7.
    down: [int64x2_t; GROUP / 2],
    multiplier: u16,
    /// Weights of each class, in the unit of the scale.
    tables: [int8x16x4_t; 2],
}

impl Decoder {
    #[target_feature(enable = "neon")]
    fn new(m: &TrellisMatrix<'_>) -> Self {
        let mut down = [vdupq_n_s64(0); GROUP / 2];
        for (pair, down) in down.iter_mut().enumerate() {
            let count = |i: usize| -(m.trellis.offset(2 * pair + i) as i64);
            *down = vcombine_s64(vcreate_s64(count(0) as u64), vcreate_s64(count(1) as u64));
        }
        let mut tables =
            [int8x16x4_t(vdupq_n_s8(0), vdupq_n_s8(0), vdupq_n_s8(0), vdupq_n_s8(0)); 2];
        for (class, table) in tables.iter_mut().enumerate() {
            let units = m.tables.weights(class);
            let at = units.as_ptr();
            // SAFETY: 64 bytes.
            *table = unsafe {
                int8x16x4_t(
                    vld1q_s8(at),
                    vld1q_s8(at.add(16)),
                    vld1q_s8(at.add(32)),
                    vld1q_s8(at.add(48)),
                )
            };
        }
        Self { down, multiplier: m.trellis.multiplier(), tables }
    }

    /// Windows of eight inputs, whose codes `word` begins with, times the multiplier: upper bytes.
    #[target_feature(enable = "neon")]
    #[inline]
    fn hashed(&self, word: u64) -> uint8x8_t {
        let word = vdupq_n_u64(word);
        let [a, b, c, d] = self.down;
        let (a, b) = (vshlq_u64(word, a), vshlq_u64(word, b));
        let (c, d) = (vshlq_u64(word, c), vshlq_u64(word, d));
        // The lowest sixteen bits of every lane, in the order of the inputs.
        let ab = vuzp1q_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b));
        let cd = vuzp1q_u32(vreinterpretq_u32_u64(c), vreinterpretq_u32_u64(d));
        let windows = vuzp1q_u16(vreinterpretq_u16_u32(ab), vreinterpretq_u16_u32(cd));
        vshrn_n_u16::<8>(vmulq_n_u16(windows, self.multiplier))
    }

    /// Weights of sixteen inputs, of which each eight have a word that begins with their codes.
    #[target_feature(enable = "neon")]
    #[inline]
    fn weights(&self, class: usize, first: u64, second: u64) -> int8x16_t {
        let hashed = vcombine_u8(self.hashed(first), self.hashed(second));
        vqtbl4q_s8(self.tables[class], vandq_u8(hashed, vdupq_n_u8(63)))
    }
}

/// Unscaled products of a row with `V` vectors from `first` on.
#[target_feature(enable = "neon")]
fn multiply_row<const V: usize>(
    m: &TrellisMatrix<'_>,
    decoder: &Decoder,
    x: &Activations,
    row: usize,
    first: usize,
) -> [f32; V] {
    let (rate, blocks) = (m.trellis.rate, m.cols / BLOCK);
    let tile_bytes = m.trellis.tile_bytes(m.cols);
    let lines = &m.codes[row / TILE * tile_bytes..][..tile_bytes];
    let word = |line: usize| -> u64 {
        let word = lines[line * LINE + row % TILE * 8..].first_chunk().expect("a whole line");
        u64::from_le_bytes(*word)
    };
    // The codes of a group of inputs and what follows them. None begins in the last line.
    let codes = |group: usize| {
        let (line, bit) = (group * rate / 64, group * rate % 64);
        word(line) >> bit | word(line + 1) << 1 << (63 - bit)
    };
    let (high, low) = (&x.high[first * m.cols..], &x.low[first * m.cols..]);
    assert!(high.len() >= V * m.cols && low.len() >= V * m.cols);
    let scales = &x.scales[first * blocks..];

    let mut f = [0.0f32; V];
    for block in 0..blocks {
        let side = m.side(row, block);
        let (class, group) = (usize::from(side >> 3), block * (BLOCK / GROUP));
        let a = decoder.weights(class, codes(group), codes(group + 1));
        let b = decoder.weights(class, codes(group + 2), codes(group + 3));
        for (v, f) in f.iter_mut().enumerate() {
            let at = v * m.cols + block * BLOCK;
            let inputs = |plane: &[i8], i: usize| {
                // SAFETY: there are V · cols bytes of each plane, as asserted above.
                unsafe { vld1q_s8(plane.as_ptr().add(at + i * INPUTS)) }
            };
            let of_high = dot(a, inputs(high, 0), b, inputs(high, 1));
            let of_low = dot(a, inputs(low, 0), b, inputs(low, 1));
            let total = vaddvq_s32(vaddq_s32(vshlq_n_s32::<7>(of_high), of_low));
            let scale = power(side) * scales[v * blocks + block];
            *f = (total as f32).mul_add(scale, *f);
        }
    }
    f
}

/// Sums of eight products each. Weights are −63 to 63 and inputs −127 to 127, so that two products stay
/// within 16 bits.
#[target_feature(enable = "neon")]
#[inline]
fn dot(a: int8x16_t, x: int8x16_t, b: int8x16_t, y: int8x16_t) -> int32x4_t {
    let pairs =
        |a: int8x16_t, x: int8x16_t| vmlal_high_s8(vmull_s8(vget_low_s8(a), vget_low_s8(x)), a, x);
    vpadalq_s16(vpaddlq_s16(pairs(a, x)), pairs(b, y))
}
