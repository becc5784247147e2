//! [`steps`] with 128-bit vectors: sixteen lanes are four registers.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::aarch64::*;

use super::{HEADS, SCORED, steps};
use crate::ATTENTION_BLOCK;
use crate::codec::{Codec, f16_at, join};
use crate::latents::Latents;
use crate::matrix::Matrix;
use crate::scalar;

type Lanes = [float32x4_t; 4];

// Sixteen of 32 registers are sums.
const SCORES: (usize, usize) = (2, 2);
const MIX: (usize, usize) = (2, 2);
const STATE: usize = 4;
const ROWS: usize = 4;

#[target_feature(enable = "neon")]
#[inline]
fn zero() -> Lanes {
    splat(0.0)
}

#[target_feature(enable = "neon")]
#[inline]
fn splat(x: f32) -> Lanes {
    [vdupq_n_f32(x); 4]
}

#[target_feature(enable = "neon")]
#[inline]
fn add(a: Lanes, b: Lanes) -> Lanes {
    [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1]), vaddq_f32(a[2], b[2]), vaddq_f32(a[3], b[3])]
}

#[target_feature(enable = "neon")]
#[inline]
fn sub(a: Lanes, b: Lanes) -> Lanes {
    [vsubq_f32(a[0], b[0]), vsubq_f32(a[1], b[1]), vsubq_f32(a[2], b[2]), vsubq_f32(a[3], b[3])]
}

#[target_feature(enable = "neon")]
#[inline]
fn mul(a: Lanes, b: Lanes) -> Lanes {
    [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1]), vmulq_f32(a[2], b[2]), vmulq_f32(a[3], b[3])]
}

#[target_feature(enable = "neon")]
#[inline]
fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    [
        vfmaq_f32(c[0], a[0], b[0]),
        vfmaq_f32(c[1], a[1], b[1]),
        vfmaq_f32(c[2], a[2], b[2]),
        vfmaq_f32(c[3], a[3], b[3]),
    ]
}

#[target_feature(enable = "neon")]
#[inline]
fn load(x: &[f32; 16]) -> Lanes {
    let at = x.as_ptr();
    // SAFETY: the array has sixteen values; any alignment will do.
    unsafe { [vld1q_f32(at), vld1q_f32(at.add(4)), vld1q_f32(at.add(8)), vld1q_f32(at.add(12))] }
}

#[target_feature(enable = "neon")]
#[inline]
fn store(x: Lanes, to: &mut [f32; 16]) {
    let at = to.as_mut_ptr();
    // SAFETY: the array has sixteen values; any alignment will do.
    unsafe {
        vst1q_f32(at, x[0]);
        vst1q_f32(at.add(4), x[1]);
        vst1q_f32(at.add(8), x[2]);
        vst1q_f32(at.add(12), x[3]);
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn to_array(x: Lanes) -> [f32; 16] {
    let mut out = [0.0; 16];
    store(x, &mut out);
    out
}

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
    let at = bytes.as_ptr();
    // SAFETY: the array has 64 bytes; any alignment will do.
    let quarter = |i: usize| unsafe { vreinterpretq_f32_u8(vld1q_u8(at.add(16 * i))) };
    [quarter(0), quarter(1), quarter(2), quarter(3)]
}

#[target_feature(enable = "neon")]
#[inline]
fn bf16s(bytes: &[u8; 32]) -> Lanes {
    let at = bytes.as_ptr();
    // SAFETY: the array has 32 bytes; any alignment will do.
    let half = |i: usize| unsafe { vreinterpretq_u16_u8(vld1q_u8(at.add(16 * i))) };
    let widened = |x| vreinterpretq_f32_u32(vshll_n_u16::<16>(x));
    let (a, b) = (half(0), half(1));
    [
        widened(vget_low_u16(a)),
        widened(vget_high_u16(a)),
        widened(vget_low_u16(b)),
        widened(vget_high_u16(b)),
    ]
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

/// Sixteen signed bytes as numbers.
#[target_feature(enable = "neon")]
#[inline]
fn signed(bytes: int8x16_t) -> Lanes {
    let (a, b) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
    [
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))),
        vcvtq_f32_s32(vmovl_s16(vget_high_s16(a))),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))),
        vcvtq_f32_s32(vmovl_s16(vget_high_s16(b))),
    ]
}

steps!("neon");
