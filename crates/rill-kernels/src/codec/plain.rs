//! `f32` and `bf16`: one number after another, without scales.

use half::bf16;

use super::{PARTIALS, join};

#[inline(always)]
pub(crate) fn f32_at(bytes: &[u8], i: usize) -> f32 {
    let b = &bytes[4 * i..4 * i + 4];
    f32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

#[inline(always)]
pub(crate) fn bf16_at(bytes: &[u8], i: usize) -> f32 {
    let b = &bytes[2 * i..2 * i + 2];
    f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)
}

pub(super) fn encode_f32(weights: &[f32], codes: &mut [u8]) {
    for (code, w) in codes.chunks_exact_mut(4).zip(weights) {
        code.copy_from_slice(&w.to_le_bytes());
    }
}

/// Rounds to the nearest bf16, ties to even.
pub(super) fn encode_bf16(weights: &[f32], codes: &mut [u8]) {
    for (code, &w) in codes.chunks_exact_mut(2).zip(weights) {
        code.copy_from_slice(&bf16::from_f32(w).to_le_bytes());
    }
}

/// Dot product of `w(i)` and `x[i]`.
#[inline(always)]
pub(crate) fn dot_with(x: &[f32], w: impl Fn(usize) -> f32) -> f32 {
    let mut p = [0.0f32; PARTIALS];
    let whole = x.len() / PARTIALS * PARTIALS;
    for start in (0..whole).step_by(PARTIALS) {
        for j in 0..PARTIALS {
            p[j] = w(start + j).mul_add(x[start + j], p[j]);
        }
    }
    for i in whole..x.len() {
        p[i - whole] = w(i).mul_add(x[i], p[i - whole]);
    }
    join(p)
}
