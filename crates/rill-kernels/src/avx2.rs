//! Products with 256-bit vectors: sixteen lanes are two registers.
//!
//! No array is mapped here: a closure that needs CPU features cannot be compiled into `map`, which
//! has none.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use crate::codec::plain::{bf16_at, f32_at};
use crate::codec::{f16_at, join, mxfp4, q4, q8};
use crate::lanes::{Tile, matmuls, over_tiles};
use crate::matrix::Matrix;

#[derive(Clone, Copy)]
struct Lanes(__m256, __m256);

#[target_feature(enable = "avx2")]
#[inline]
fn zero() -> Lanes {
    Lanes(_mm256_setzero_ps(), _mm256_setzero_ps())
}

#[target_feature(enable = "avx2")]
#[inline]
fn splat(x: f32) -> Lanes {
    Lanes(_mm256_set1_ps(x), _mm256_set1_ps(x))
}

#[target_feature(enable = "avx2")]
#[inline]
fn mul(a: Lanes, b: Lanes) -> Lanes {
    Lanes(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1))
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    Lanes(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1))
}

/// # Safety
/// Sixteen values must be readable.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(x: *const f32) -> Lanes {
    // SAFETY: the caller's promise; any alignment will do.
    unsafe { Lanes(_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(8))) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn to_array(x: Lanes) -> [f32; 16] {
    let mut out = [0.0; 16];
    // SAFETY: the array has sixteen values.
    unsafe {
        _mm256_storeu_ps(out.as_mut_ptr(), x.0);
        _mm256_storeu_ps(out.as_mut_ptr().add(8), x.1);
    }
    out
}

#[target_feature(enable = "avx2")]
#[inline]
fn from_array(x: [f32; 16]) -> Lanes {
    // SAFETY: the array has sixteen values.
    unsafe { load(x.as_ptr()) }
}

/// # Safety
/// 64 bytes must be readable.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn f32s(codes: *const u8) -> Lanes {
    // SAFETY: the caller's promise.
    unsafe { load(codes.cast()) }
}

/// # Safety
/// 32 bytes must be readable.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn bf16s(codes: *const u8) -> Lanes {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (_mm_loadu_si128(codes.cast()), _mm_loadu_si128(codes.add(16).cast())) };
    Lanes(widened(a), widened(b))
}

/// Eight bf16 as f32.
#[target_feature(enable = "avx2")]
#[inline]
fn widened(halves: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

/// Sixteen signed bytes as numbers.
#[target_feature(enable = "avx2")]
#[inline]
fn signed(bytes: __m128i) -> Lanes {
    let high = _mm_unpackhi_epi64(bytes, bytes);
    Lanes(
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
    )
}

/// # Safety
/// 16 bytes must be readable.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn q8s(codes: *const u8) -> Lanes {
    // SAFETY: the caller's promise.
    signed(unsafe { _mm_loadu_si128(codes.cast()) })
}

/// Nibbles of eight bytes in the order of their inputs, each in the low bits of its byte; the high
/// bits of even ones are left over.
#[target_feature(enable = "avx2")]
#[inline]
fn spread(bytes: __m128i) -> __m128i {
    _mm_unpacklo_epi8(bytes, _mm_srli_epi16::<4>(bytes))
}

/// # Safety
/// 8 bytes must be readable.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn q4s(codes: *const u8) -> Lanes {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadl_epi64(codes.cast()) };
    let nibbles = _mm_and_si128(spread(bytes), _mm_set1_epi8(15));
    signed(_mm_sub_epi8(nibbles, _mm_set1_epi8(8)))
}

/// # Safety
/// 16 bytes must be readable.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn mxfp4s(codes: *const u8) -> [Lanes; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadu_si128(codes.cast()) };
    let (low, high) = (spread(bytes), spread(_mm_unpackhi_epi64(bytes, bytes)));
    [sixteen(low), sixteen(high)]
}

/// Values of sixteen nibbles, each in the low bits of its byte.
#[target_feature(enable = "avx2")]
#[inline]
fn sixteen(nibbles: __m128i) -> Lanes {
    Lanes(magnitudes(nibbles), magnitudes(_mm_unpackhi_epi64(nibbles, nibbles)))
}

/// Values of eight nibbles, which lie in the low bits of the low eight bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn magnitudes(nibbles: __m128i) -> __m256 {
    let v = mxfp4::VALUES;
    let values = _mm256_setr_ps(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]);
    let index = _mm256_cvtepu8_epi32(nibbles);
    // The permutation looks at three bits of each index; the fourth is the sign, also of zero.
    let magnitude = _mm256_permutevar8x32_ps(values, index);
    let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(index), _mm256_set1_epi32(i32::MIN));
    _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))
}

matmuls!("avx2,fma");
