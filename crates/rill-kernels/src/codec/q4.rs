//! `q4`: four bits, row-major, two inputs to a byte with the low nibble first, and one f16 scale
//! per group of inputs; the last group of a row may be short. A weight is (nibble − 8) times scale.

use half::f16;

use super::{EncodeError, PARTIALS, f16_at, join, largest};

/// Divisors of the weight of largest magnitude that are tried as scales. Codes reach from −8 to
/// 7, so a negative divisor gives that weight the longer side.
const DIVISORS: [f32; 6] = [-8.5, -8.0, -7.5, -7.0, -6.5, -6.0];

/// Of the scales tried, takes the one with the smallest squared error, the first of equals; codes
/// are rounded to the nearest, ties to even.
pub(super) fn encode_row(
    weights: &[f32],
    group: usize,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), EncodeError> {
    let groups = weights.chunks(group).zip(codes.chunks_mut(group / 2));
    for (g, ((weights, codes), stored)) in groups.zip(scales.chunks_exact_mut(2)).enumerate() {
        let largest = largest(weights);
        let mut best = (f64::INFINITY, f16::ZERO);
        for divisor in DIVISORS {
            let scale = f16::from_f32(largest / divisor);
            if scale.is_infinite() {
                let largest = largest.abs();
                return Err(EncodeError::ScaleOverflow { first: g * group, largest });
            }
            let error = squared_error(weights, scale.to_f32());
            if error < best.0 {
                best = (error, scale);
            }
        }
        stored.copy_from_slice(&best.1.to_le_bytes());
        let scale = best.1.to_f32();
        let nibble = |w: Option<&f32>| (w.map_or(0.0, |&w| quantise(w, scale)) + 8.0) as u8;
        for (code, pair) in codes.iter_mut().zip(weights.chunks(2)) {
            *code = nibble(pair.first()) | nibble(pair.get(1)) << 4;
        }
    }
    Ok(())
}

fn quantise(w: f32, scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { (w / scale).round_ties_even().clamp(-8.0, 7.0) }
}

fn squared_error(weights: &[f32], scale: f32) -> f64 {
    let error = |&w: &f32| f64::from(w) - f64::from(quantise(w, scale)) * f64::from(scale);
    weights.iter().map(error).map(|e| e * e).sum()
}

/// What the sixteen nibbles mean.
pub(crate) const VALUES: [f32; 16] =
    [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

/// Code `i` of a row, −8 to 7.
#[inline(always)]
pub(crate) fn code(codes: &[u8], i: usize) -> f32 {
    f32::from(codes[i / 2] >> (4 * (i % 2)) & 15) - 8.0
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
    for (g, (codes, x)) in codes.chunks(group / 2).zip(x.chunks(group)).enumerate() {
        let scale = f16_at(scales, g);
        let mut t = [0.0f32; PARTIALS];
        for (codes, x) in codes.chunks(PARTIALS / 2).zip(x.chunks(PARTIALS)) {
            for (j, (t, &x)) in t.iter_mut().zip(x).enumerate() {
                *t = code(codes, j).mul_add(x, *t);
            }
        }
        for (p, t) in p.iter_mut().zip(t) {
            *p = t.mul_add(scale, *p);
        }
    }
    join(p)
}
