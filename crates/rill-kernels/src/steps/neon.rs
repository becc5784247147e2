//! [`steps`] with 128-bit vectors: sixteen lanes are four registers.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::aarch64::*;

use super::{HEADS, SCORED, steps};
use crate::ATTENTION_BLOCK;
use crate::codec::{Codec, f16_at, join};
use crate::latents::Latents;
use crate::matrix::Matrix;
use crate::neon::{
    Lanes, add, fma, load, load_at, mul, signed, splat, store, sub, to_array, widened,
};
use crate::scalar;

// Sixteen of 32 registers are sums.
const SCORES: (usize, usize) = (2, 2);
const MIX: (usize, usize) = (2, 2);
const STATE: usize = 4;
const ROWS: usize = 4;

/// Four vectors of partial sums, joined.
#[target_feature(enable = "neon")]
#[inline]
fn join4([a, b, c, d]: [Lanes; 4]) -> [f32; 4] {
    [join1(a), join1(b), join1(c), join1(d)]
}

#[target_feature(enable = "neon")]
#[inline]
fn join1(x: Lanes) -> f32 {
    let t = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
    // Of two values it adds the pair.
    vaddv_f32(vadd_f32(vget_low_f32(t), vget_high_f32(t)))
}

#[target_feature(enable = "neon")]
#[inline]
fn f32s(bytes: &[u8; 64]) -> Lanes {
    // SAFETY: sixteen values are 64 bytes; any alignment will do.
    unsafe { load_at(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "neon")]
#[inline]
fn bf16s(bytes: &[u8; 32]) -> Lanes {
    let at = bytes.as_ptr();
    // SAFETY: the array has 32 bytes; any alignment will do.
    let (a, b) = unsafe { (vld1q_u8(at), vld1q_u8(at.add(16))) };
    widened(a, b)
}

#[target_feature(enable = "neon")]
#[inline]
fn q8s(codes: &[u8; 16]) -> Lanes {
    // SAFETY: the array has 16 bytes; any alignment will do.
    signed(unsafe { vreinterpretq_s8_u8(vld1q_u8(codes.as_ptr())) })
}

#[target_feature(enable = "neon")]
#[inline]
fn q4s(codes: &[u8; 8]) -> Lanes {
    // SAFETY: the array has 8 bytes; any alignment will do.
    let bytes = unsafe { vld1_u8(codes.as_ptr()) };
    let (low, high) = (vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
    // Nibbles in the order of their inputs.
    let nibbles = vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
    signed(vsubq_s8(vreinterpretq_s8_u8(nibbles), vdupq_n_s8(8)))
}

steps!("neon");
