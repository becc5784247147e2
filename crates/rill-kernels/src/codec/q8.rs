//! `q8`: signed bytes, row-major, with one f16 scale per group of inputs; the last group of a row
//! may be short. A weight is code times scale.

use half::f16;

use super::{EncodeError, PARTIALS, f16_at, join, largest};

/// Largest code; −128 is not used, so that the range is symmetric.
const MAX_CODE: f32 = 127.0;

/// The scale is the largest magnitude over 127, rounded to f16; codes are rounded to the nearest,
/// ties to even.
pub(super) fn encode_row(
    weights: &[f32],
    group: usize,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), EncodeError> {
    let groups = weights.chunks(group).zip(codes.chunks_mut(group));
    for (g, ((weights, codes), stored)) in groups.zip(scales.chunks_exact_mut(2)).enumerate() {
        let largest = largest(weights).abs();
        let scale = f16::from_f32(largest / MAX_CODE);
        if scale.is_infinite() {
            return Err(EncodeError::ScaleOverflow { first: g * group, largest });
        }
        stored.copy_from_slice(&scale.to_le_bytes());
        let scale = scale.to_f32();
        for (code, &w) in codes.iter_mut().zip(weights) {
            let q = if scale == 0.0 { 0.0 } else { (w / scale).round_ties_even() };
            *code = (q.clamp(-MAX_CODE, MAX_CODE) as i8) as u8;
        }
    }
    Ok(())
}

/// Code `i` of a row.
#[inline(always)]
pub(crate) fn code(codes: &[u8], i: usize) -> f32 {
    f32::from(codes[i] as i8)
}

/// Weight `i` of a row.
#[inline(always)]
pub(crate) fn weight(codes: &[u8], scales: &[u8], group: usize, i: usize) -> f32 {
    code(codes, i) * f16_at(scales, i / group)
}

/// Dot product of one row: sixteen partial sums of codes per group, scaled once each.
#[inline(always)]
pub(crate) fn dot(codes: &[u8], scales: &[u8], group: usize, x: &[f32]) -> f32 {
    let mut p = [0.0f32; PARTIALS];
    for (g, (codes, x)) in codes.chunks(group).zip(x.chunks(group)).enumerate() {
        let scale = f16_at(scales, g);
        let mut t = [0.0f32; PARTIALS];
        for (codes, x) in codes.chunks(PARTIALS).zip(x.chunks(PARTIALS)) {
            for ((t, &code), &x) in t.iter_mut().zip(codes).zip(x) {
                *t = f32::from(code as i8).mul_add(x, *t);
            }
        }
        for (p, t) in p.iter_mut().zip(t) {
            *p = t.mul_add(scale, *p);
        }
    }
    join(p)
}
