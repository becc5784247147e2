//! Products with 256-bit vectors: sixteen lanes are two registers.
//!
//! No array of registers is mapped or iterated over: closures that need CPU features are not compiled
//! into functions that have none, and iterators of arrays put registers into memory.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;
use std::ops::Range;

use crate::codec::{PARTIALS, Vq, bf16_bytes, f16_at, f16_scales, join, mxfp4, q4, vq};
use crate::lanes::{
    Aligned, BLOCK, FEW, NEAR, PANEL, PANEL_ROWS, SCALES, SHARED, STEP, lanes, padded, products,
};
use crate::matrix::Matrix;
use crate::scalar;

pub(crate) type Part = __m256;
const WIDTH: usize = 8;
const ROWS: [usize; 4] = [3, 2, 1, 1];
const VQ_ROWS: usize = 2;
const TILE: (usize, usize) = (4, 3);
const SHORT_TILE: (usize, usize) = (2, 3);

#[target_feature(enable = "avx2,fma")]
#[inline]
fn part_splat(x: f32) -> Part {
    _mm256_set1_ps(x)
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn part_add(a: Part, b: Part) -> Part {
    _mm256_add_ps(a, b)
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn part_sub(a: Part, b: Part) -> Part {
    _mm256_sub_ps(a, b)
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn part_mul(a: Part, b: Part) -> Part {
    _mm256_mul_ps(a, b)
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn part_fma(a: Part, b: Part, c: Part) -> Part {
    _mm256_fmadd_ps(a, b, c)
}

/// Asks for a cache line that will be read soon; any address will do.
#[inline]
fn prefetch(line: *const u8) {
    // SAFETY: a prefetch of an address that cannot be read does nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
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
        unsafe { [load_at(codes.cast()), load_at(codes.add(64).cast())] }
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
pub(crate) unsafe fn widened(codes: *const u8) -> __m256 {
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

/// Looks up thirty-two nibbles. The values are bf16, in a table of low and one of high bytes. Even
/// inputs are looked up in the lower 128 bits, odd ones, whose nibbles are the high ones, in the upper,
/// and lanes hold inputs as [`transposed`] puts them.
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
    let shifted = _mm256_srlv_epi32(codes, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    let nibbles = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
    let (low, high) = (_mm256_shuffle_epi8(low, nibbles), _mm256_shuffle_epi8(high, nibbles));
    [halves(_mm256_unpacklo_epi8(low, high)), halves(_mm256_unpackhi_epi8(low, high))]
}

/// Inputs 0, 4, 8, 12, 1, 5, 9, 13, then 2, 6, 10, 14, 3, 7, 11, 15: a square of four by four, whose
/// rows become columns. Done twice it is undone.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn transposed([a, b]: Lanes) -> Lanes {
    // 0 1 2 3, 8 9 10 11, then 4 5 6 7, 12 13 14 15.
    let (even, odd) = (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
    // 0 4 1 5, 8 12 9 13, then 2 6 3 7, 10 14 11 15.
    let (a, b) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
    let [a, b] = [_mm256_castps_pd(a), _mm256_castps_pd(b)];
    let [a, b] = [_mm256_permute4x64_pd::<0xd8>(a), _mm256_permute4x64_pd::<0xd8>(b)];
    [_mm256_castpd_ps(a), _mm256_castpd_ps(b)]
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

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn arranged(x: Lanes) -> Lanes {
        transposed(x)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn natural(x: Lanes) -> Lanes {
        transposed(x)
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

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe { nibbles(codes, &const { bf16_bytes(mxfp4::VALUES) }) }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn arranged(x: Lanes) -> Lanes {
        transposed(x)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn natural(x: Lanes) -> Lanes {
        transposed(x)
    }

    #[inline(always)]
    fn scales(row: &[u8], first: usize, out: &mut [f32]) {
        mxfp4::scales(row, first, out);
    }
}

lanes!("avx2,fma");
products!("avx2,fma");
