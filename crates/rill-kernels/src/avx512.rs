//! Products with 512-bit vectors: sixteen lanes are one register.
//!
//! No array is mapped here: a closure that needs CPU features cannot be compiled into `map`, which
//! has none.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use crate::codec::plain::{bf16_at, f32_at};
use crate::codec::{f16_at, join, mxfp4, q4, q8};
use crate::lanes::{Tile, matmuls, over_tiles};
use crate::matrix::Matrix;

type Lanes = __m512;

#[target_feature(enable = "avx512f")]
#[inline]
fn zero() -> Lanes {
    _mm512_setzero_ps()
}

#[target_feature(enable = "avx512f")]
#[inline]
fn splat(x: f32) -> Lanes {
    _mm512_set1_ps(x)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn mul(a: Lanes, b: Lanes) -> Lanes {
    _mm512_mul_ps(a, b)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    _mm512_fmadd_ps(a, b, c)
}

/// # Safety
/// Sixteen values must be readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load(x: *const f32) -> Lanes {
    // SAFETY: the caller's promise; any alignment will do.
    unsafe { _mm512_loadu_ps(x) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn to_array(x: Lanes) -> [f32; 16] {
    let mut out = [0.0; 16];
    // SAFETY: the array has sixteen values.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) };
    out
}

#[target_feature(enable = "avx512f")]
#[inline]
fn from_array(x: [f32; 16]) -> Lanes {
    // SAFETY: the array has sixteen values.
    unsafe { load(x.as_ptr()) }
}

/// # Safety
/// 64 bytes must be readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn f32s(codes: *const u8) -> Lanes {
    // SAFETY: the caller's promise.
    unsafe { load(codes.cast()) }
}

/// # Safety
/// 32 bytes must be readable.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn bf16s(codes: *const u8) -> Lanes {
    // SAFETY: the caller's promise.
    let halves = unsafe { _mm256_loadu_si256(codes.cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

/// # Safety
/// 16 bytes must be readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn q8s(codes: *const u8) -> Lanes {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadu_si128(codes.cast()) };
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
}

/// Nibbles in the order of their inputs, each in the low bits of its lane; other bits are left over.
#[target_feature(enable = "avx512f")]
#[inline]
fn spread(bytes: __m128i) -> __m512i {
    let low = bytes;
    let high = _mm_srli_epi16::<4>(bytes);
    _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high))
}

/// # Safety
/// 8 bytes must be readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn q4s(codes: *const u8) -> Lanes {
    let values = _mm512_setr_ps(
        -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
    );
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadl_epi64(codes.cast()) };
    // The permutation looks at four bits of each index.
    _mm512_permutexvar_ps(spread(bytes), values)
}

/// # Safety
/// 16 bytes must be readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn mxfp4s(codes: *const u8) -> [Lanes; 2] {
    let v = mxfp4::VALUES;
    let values = _mm512_setr_ps(
        v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13],
        v[14], v[15],
    );
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadu_si128(codes.cast()) };
    let high = _mm_unpackhi_epi64(bytes, bytes);
    [_mm512_permutexvar_ps(spread(bytes), values), _mm512_permutexvar_ps(spread(high), values)]
}

matmuls!("avx512f,avx512bw,fma");
