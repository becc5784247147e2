//! [`steps`] with 512-bit vectors: sixteen lanes are one register.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use super::{HEADS, SCORED, steps};
use crate::ATTENTION_BLOCK;
use crate::avx512::{Lanes, add, fma, load, load_at, mul, splat, store, sub, to_array, widened};
use crate::codec::{Codec, f16_at, join, q4};
use crate::latents::Latents;
use crate::matrix::Matrix;
use crate::scalar;

// Sixteen sums, four vectors of each side, and some to spare of 32 registers.
const SCORES: (usize, usize) = (4, 4);
const MIX: (usize, usize) = (4, 4);
const STATE: usize = 8;
const ROWS: usize = 8;

/// Four vectors of partial sums, joined.
#[target_feature(enable = "avx512f,avx512bw,fma")]
#[inline]
fn join4([[a], [b], [c], [d]]: [Lanes; 4]) -> [f32; 4] {
    // Halves of two vectors, then quarters of four: each quarter of `t` is one of them.
    let (ab, cd) = (join_halves(a, b), join_halves(c, d));
    let t = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
    );
    let t = _mm512_add_ps(t, _mm512_permute_ps::<0b01_00_11_10>(t));
    let t = to_array([_mm512_add_ps(t, _mm512_permute_ps::<0b10_11_00_01>(t))]);
    [t[0], t[4], t[8], t[12]]
}

/// The sums of `a`'s halves, then of `b`'s.
#[target_feature(enable = "avx512f,avx512bw,fma")]
#[inline]
fn join_halves(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
    )
}

#[target_feature(enable = "avx512f,avx512bw,fma")]
#[inline]
fn f32s(bytes: &[u8; 64]) -> Lanes {
    // SAFETY: sixteen values are 64 bytes; any alignment will do.
    unsafe { load_at(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw,fma")]
#[inline]
fn bf16s(bytes: &[u8; 32]) -> Lanes {
    // SAFETY: 32 bytes are readable; any alignment will do.
    let halves = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    [widened(halves)]
}

#[target_feature(enable = "avx512f,avx512bw,fma")]
#[inline]
fn q8s(codes: &[u8; 16]) -> Lanes {
    // SAFETY: 16 bytes are readable; any alignment will do.
    let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
    [_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))]
}

#[target_feature(enable = "avx512f,avx512bw,fma")]
#[inline]
fn q4s(codes: &[u8; 8]) -> Lanes {
    let [values] = load(&q4::VALUES);
    // SAFETY: 8 bytes are readable; any alignment will do.
    let low = unsafe { _mm_loadl_epi64(codes.as_ptr().cast()) };
    // Nibbles in the order of their inputs; the permutation looks at four bits of each index.
    let nibbles = _mm_unpacklo_epi8(low, _mm_srli_epi16::<4>(low));
    [_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(nibbles), values)]
}

steps!("avx512f,avx512bw,fma");
