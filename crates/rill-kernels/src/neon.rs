//! Products with 128-bit vectors: sixteen lanes are four registers.
//!
//! No array of registers is mapped or iterated over: closures that need CPU features are not compiled
//! into functions that have none, and iterators of arrays put registers into memory.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::aarch64::*;
use std::ops::Range;

use crate::codec::{PARTIALS, Vq, bf16_bytes, f16_at, f16_scales, join, mxfp4, q4, vq};
use crate::lanes::{
    Aligned, BLOCK, FEW, NEAR, PANEL, PANEL_ROWS, SCALES, SHARED, STEP, lanes, padded, products,
};
use crate::matrix::Matrix;
use crate::scalar;

pub(crate) type Part = float32x4_t;
const WIDTH: usize = 4;
const ROWS: [usize; 4] = [2, 2, 1, 1];
const VQ_ROWS: usize = 2;
const TILE: (usize, usize) = (8, 3);
const SHORT_TILE: (usize, usize) = (4, 3);

#[target_feature(enable = "neon")]
#[inline]
fn part_splat(x: f32) -> Part {
    vdupq_n_f32(x)
}

#[target_feature(enable = "neon")]
#[inline]
fn part_add(a: Part, b: Part) -> Part {
    vaddq_f32(a, b)
}

#[target_feature(enable = "neon")]
#[inline]
fn part_sub(a: Part, b: Part) -> Part {
    vsubq_f32(a, b)
}

#[target_feature(enable = "neon")]
#[inline]
fn part_mul(a: Part, b: Part) -> Part {
    vmulq_f32(a, b)
}

#[target_feature(enable = "neon")]
#[inline]
fn part_fma(a: Part, b: Part, c: Part) -> Part {
    vfmaq_f32(c, a, b)
}

/// Nothing yet: it has not been measured what asking for a cache line brings on such a machine.
#[inline]
fn prefetch(_line: *const u8) {}

/// # Safety
/// Four values must be readable.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn part_load(x: *const f32) -> Part {
    // SAFETY: the caller's promise; any alignment will do.
    unsafe { vld1q_f32(x) }
}

/// # Safety
/// Four values must be writable.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn part_store(x: Part, to: *mut f32) {
    // SAFETY: the caller's promise; any alignment will do.
    unsafe { vst1q_f32(to, x) }
}

struct F32;

impl Format for F32 {
    const BYTES: usize = 128;
    const PAD: u8 = 0x3f;
    const SCALED: bool = false;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe { [load_at(codes.cast()), load_at(codes.add(64).cast())] }
    }
}

struct Bf16;

impl Format for Bf16 {
    const BYTES: usize = 64;
    const PAD: u8 = 0x3f;
    const SCALED: bool = false;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe {
            [
                vld1q_u8(codes),
                vld1q_u8(codes.add(16)),
                vld1q_u8(codes.add(32)),
                vld1q_u8(codes.add(48)),
            ]
        };
        [widened(a, b), widened(c, d)]
    }
}

/// Sixteen bf16 as f32.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn widened(a: uint8x16_t, b: uint8x16_t) -> Lanes {
    let (a, b, zero) = (vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b), vdupq_n_u16(0));
    [
        vreinterpretq_f32_u16(vzip1q_u16(zero, a)),
        vreinterpretq_f32_u16(vzip2q_u16(zero, a)),
        vreinterpretq_f32_u16(vzip1q_u16(zero, b)),
        vreinterpretq_f32_u16(vzip2q_u16(zero, b)),
    ]
}

struct Q8;

impl Format for Q8 {
    const BYTES: usize = 32;
    const PAD: u8 = 1;
    const SCALED: bool = true;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        let [a, b] = unsafe { [vld1q_s8(codes.cast()), vld1q_s8(codes.add(16).cast())] };
        [signed(a), signed(b)]
    }

    #[inline(always)]
    fn scales(row: &[u8], first: usize, out: &mut [f32]) {
        f16_scales(row, first, out);
    }
}

/// Sixteen signed bytes as numbers.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn signed(bytes: int8x16_t) -> Lanes {
    let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
    [
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
        vcvtq_f32_s32(vmovl_high_s16(low)),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
        vcvtq_f32_s32(vmovl_high_s16(high)),
    ]
}

/// Looks up thirty-two nibbles. The values are bf16, in a table of low and one of high bytes.
///
/// # Safety
/// Sixteen bytes must be readable.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn nibbles(codes: *const u8, [low, high]: &[[u8; 16]; 2]) -> [Lanes; 2] {
    // SAFETY: the caller's promise; the tables have sixteen bytes.
    let [codes, low, high] =
        unsafe { [vld1q_u8(codes), vld1q_u8(low.as_ptr()), vld1q_u8(high.as_ptr())] };
    let (even, odd) = (vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes));
    let (a, b) = (vzip1q_u8(even, odd), vzip2q_u8(even, odd));
    let (a_low, a_high) = (vqtbl1q_u8(low, a), vqtbl1q_u8(high, a));
    let (b_low, b_high) = (vqtbl1q_u8(low, b), vqtbl1q_u8(high, b));
    [
        widened(vzip1q_u8(a_low, a_high), vzip2q_u8(a_low, a_high)),
        widened(vzip1q_u8(b_low, b_high), vzip2q_u8(b_low, b_high)),
    ]
}

struct Q4;

impl Format for Q4 {
    const BYTES: usize = 16;
    const PAD: u8 = 0x99;
    const SCALED: bool = true;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe { nibbles(codes, &const { bf16_bytes(q4::VALUES) }) }
    }

    #[inline(always)]
    fn scales(row: &[u8], first: usize, out: &mut [f32]) {
        f16_scales(row, first, out);
    }
}

struct Mxfp4;

impl Format for Mxfp4 {
    const BYTES: usize = 16;
    // No row ends within a block.
    const PAD: u8 = 0x22;
    const SCALED: bool = true;
    const GROUP: Option<usize> = Some(mxfp4::BLOCK);
    const START: f32 = -0.0;
    const END: f32 = 0.0;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe { nibbles(codes, &const { bf16_bytes(mxfp4::VALUES) }) }
    }

    #[inline(always)]
    fn scales(row: &[u8], first: usize, out: &mut [f32]) {
        mxfp4::scales(row, first, out);
    }
}

lanes!("neon");
products!("neon");
