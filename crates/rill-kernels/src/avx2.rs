//! Products with 256-bit vectors: sixteen lanes are two registers.
//!
//! No array of registers is mapped or iterated over: closures that need CPU features are not compiled
//! into functions that have none, and iterators of arrays put registers into memory.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;
use std::ops::Range;

use crate::codec::{PARTIALS, Vq, bf16_bytes, f16_at, f16_scales, join, mxfp4, q4, vq};
use crate::lanes::{MANY, PANEL, PANEL_ROWS, Panel, SCALES, SHARED, STEP, padded, products};
use crate::matrix::Matrix;
use crate::scalar;

type Part = __m256;
const WIDTH: usize = 8;
const ROWS: usize = 2;
const VECTORS: usize = 2;

#[target_feature(enable = "avx2,fma")]
#[inline]
fn part_splat(x: f32) -> Part {
    _mm256_set1_ps(x)
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn part_fma(a: Part, b: Part, c: Part) -> Part {
    _mm256_fmadd_ps(a, b, c)
}

/// # Safety
/// Eight values must be readable.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn part_load(x: *const f32) -> Part {
    // SAFETY: the caller's promise; any alignment will do.
    unsafe { _mm256_loadu_ps(x) }
}

/// # Safety
/// Eight values must be writable.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn part_store(x: Part, to: *mut f32) {
    // SAFETY: the caller's promise; any alignment will do.
    unsafe { _mm256_storeu_ps(to, x) }
}

struct F32;

impl Format for F32 {
    const BYTES: usize = 128;
    const PAD: u8 = 0x3f;
    const SCALED: bool = false;

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe { [load(codes.cast()), load(codes.add(64).cast())] }
    }
}

struct Bf16;

impl Format for Bf16 {
    const BYTES: usize = 64;
    const PAD: u8 = 0x3f;
    const SCALED: bool = false;

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            [
                [widened(codes), widened(codes.add(16))],
                [widened(codes.add(32)), widened(codes.add(48))],
            ]
        }
    }
}

/// Eight bf16 as f32.
///
/// # Safety
/// Sixteen bytes must be readable.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn widened(codes: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    let halves = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(codes.cast()) });
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
}

struct Q8;

impl Format for Q8 {
    const BYTES: usize = 32;
    const PAD: u8 = 1;
    const SCALED: bool = true;

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            [[signed(codes), signed(codes.add(8))], [signed(codes.add(16)), signed(codes.add(24))]]
        }
    }

    #[inline(always)]
    fn scales(row: &[u8], first: usize, out: &mut [f32]) {
        f16_scales(row, first, out);
    }
}

/// Eight signed bytes as numbers.
///
/// # Safety
/// Eight bytes must be readable.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn signed(codes: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadl_epi64(codes.cast()) };
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
}

/// Looks up thirty-two nibbles. The values are bf16, in a table of low and one of high bytes. Bytes
/// are first laid out so that a lane of 32 bits comes to hold the values of inputs j and j + 8.
///
/// # Safety
/// Sixteen bytes must be readable.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn nibbles(codes: *const u8, [low, high]: &[[u8; 16]; 2]) -> [Lanes; 2] {
    // SAFETY: the caller's promise; the tables have sixteen bytes.
    let [codes, low, high] = unsafe {
        [
            _mm_loadu_si128(codes.cast()),
            _mm_loadu_si128(low.as_ptr().cast()),
            _mm_loadu_si128(high.as_ptr().cast()),
        ]
    };
    let (codes, low, high) =
        (_mm256_set_m128i(codes, codes), _mm256_set_m128i(low, low), _mm256_set_m128i(high, high));
    #[rustfmt::skip]
    let from = _mm256_setr_epi8(
        0, 4, 0, 4, 1, 5, 1, 5, 8, 12, 8, 12, 9, 13, 9, 13,
        2, 6, 2, 6, 3, 7, 3, 7, 10, 14, 10, 14, 11, 15, 11, 15,
    );
    // Pairs of bytes alternate between even inputs, whose nibble is the low one, and odd ones.
    let even = _mm256_shuffle_epi8(codes, from);
    let either = _mm256_blend_epi16::<0xaa>(even, _mm256_srli_epi16::<4>(even));
    let nibbles = _mm256_and_si256(either, _mm256_set1_epi8(15));
    let (low, high) = (_mm256_shuffle_epi8(low, nibbles), _mm256_shuffle_epi8(high, nibbles));
    [halves(_mm256_unpacklo_epi8(low, high)), halves(_mm256_unpackhi_epi8(low, high))]
}

/// The bf16 in the lower halves of lanes, then those in the upper halves.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn halves(pairs: __m256i) -> Lanes {
    let upper = _mm256_and_si256(pairs, _mm256_set1_epi32(!0xffff));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(upper)]
}

struct Q4;

impl Format for Q4 {
    const BYTES: usize = 16;
    const PAD: u8 = 0x99;
    const SCALED: bool = true;

    #[target_feature(enable = "avx2,fma")]
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

    #[target_feature(enable = "avx2,fma")]
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

products!("avx2,fma");
