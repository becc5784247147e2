//! MXFP4: four-bit floats with one power of two per 32 inputs. Codes are nibbles, the low one
//! the even input; scales are exponent bytes.

use super::{LayoutError, PARTIALS, first};

/// Inputs that share one scale.
pub(crate) const BLOCK: usize = 32;
/// The scale byte that means NaN.
const NAN_SCALE: u8 = 255;

/// What the sixteen nibbles mean: sign bit, then an index of the magnitude.
pub(crate) const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// 2^(e − 127) for e below 255.
#[inline(always)]
pub(crate) fn scale(e: u8) -> f32 {
    // 2^-127 is subnormal: its only set bit is the highest of the fraction.
    f32::from_bits((u32::from(e) << 23).max(1 << 22))
}

/// Consecutive scales, the first of them number `first`.
#[inline(always)]
pub(crate) fn scales(bytes: &[u8], first: usize, out: &mut [f32]) {
    let bytes = &bytes[first..][..out.len()];
    for (out, &e) in out.iter_mut().zip(bytes) {
        *out = scale(e);
    }
}

/// Refuses the scale that means NaN.
pub(crate) fn check_scales(scales: &[u8], cols: usize) -> Result<(), LayoutError> {
    match first(scales, |&e| e == NAN_SCALE) {
        None => Ok(()),
        Some(at) => {
            let blocks = cols / BLOCK;
            let (row, input) = (at / blocks, at % blocks * BLOCK);
            Err(LayoutError::Scale { row, first: input, scale: f32::NAN })
        }
    }
}

/// Weight `i` of a row.
#[inline(always)]
pub(crate) fn weight(codes: &[u8], scales: &[u8], i: usize) -> f32 {
    VALUES[usize::from(codes[i / 2] >> (4 * (i % 2)) & 15)] * scale(scales[i / BLOCK])
}

/// Dot product of one row: the scale is applied once per block and partial sum.
#[inline(always)]
pub(crate) fn dot(codes: &[u8], scales: &[u8], x: &[f32]) -> f32 {
    let mut p = [0.0f32; PARTIALS];
    let blocks = codes.chunks_exact(BLOCK / 2).zip(x.chunks_exact(BLOCK));
    for ((codes, x), &e) in blocks.zip(scales) {
        let v = |i: usize| VALUES[usize::from(codes[i / 2] >> (4 * (i % 2)) & 15)];
        let s = scale(e);
        for j in 0..PARTIALS {
            let t = v(j) * x[j];
            let t = v(PARTIALS + j).mul_add(x[PARTIALS + j], t);
            p[j] = t.mul_add(s, p[j]);
        }
    }
    join(p)
}

/// Joins a row's partial sums. What is added last makes +0 of −0, and changes nothing else: the sign of a weight that
/// is zero has no say in any result.
#[inline(always)]
pub(crate) fn join(p: [f32; PARTIALS]) -> f32 {
    super::join(p) + 0.0
}
