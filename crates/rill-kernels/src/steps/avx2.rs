//! [`steps`] with 256-bit vectors: sixteen lanes are two registers.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use super::{HEADS, SCORED, steps};
use crate::ATTENTION_BLOCK;
use crate::avx2::{Lanes, add, fma, load, load_at, mul, splat, store, sub, to_array, widened};
use crate::codec::{Codec, f16_at, join};
use crate::latents::Latents;
use crate::matrix::Matrix;
use crate::scalar;

// Eight of sixteen registers are sums.
const SCORES: (usize, usize) = (2, 2);
const MIX: (usize, usize) = (2, 2);
const STATE: usize = 4;
const ROWS: usize = 4;

/// Four vectors of partial sums, joined.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn join4([a, b, c, d]: [Lanes; 4]) -> [f32; 4] {
    let (ab, cd) = (join_quarters(a, b), join_quarters(c, d));
    let t = _mm256_add_ps(
        _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd),
        _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd),
    );
    // a and c lie in the low half, b and d in the high one, two sums left of each.
    let t = _mm256_add_ps(t, _mm256_permute_ps::<0b10_11_00_01>(t));
    let t = to_array([t, t]);
    [t[0], t[4], t[2], t[6]]
}

/// Four sums left of `a`, then of `b`.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn join_quarters(a: Lanes, b: Lanes) -> __m256 {
    let (a, b) = (_mm256_add_ps(a[0], a[1]), _mm256_add_ps(b[0], b[1]));
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn f32s(bytes: &[u8; 64]) -> Lanes {
    // SAFETY: sixteen values are 64 bytes; any alignment will do.
    unsafe { load_at(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn bf16s(bytes: &[u8; 32]) -> Lanes {
    let at = bytes.as_ptr();
    // SAFETY: 32 bytes are readable.
    unsafe { [widened(at), widened(at.add(16))] }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn q8s(codes: &[u8; 16]) -> Lanes {
    // SAFETY: 16 bytes are readable; any alignment will do.
    signed(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) })
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn q4s(codes: &[u8; 8]) -> Lanes {
    // SAFETY: 8 bytes are readable; any alignment will do.
    let low = unsafe { _mm_loadl_epi64(codes.as_ptr().cast()) };
    // Nibbles in the order of their inputs.
    let nibbles = _mm_unpacklo_epi8(low, _mm_srli_epi16::<4>(low));
    let nibbles = _mm_and_si128(nibbles, _mm_set1_epi8(15));
    signed(_mm_sub_epi8(nibbles, _mm_set1_epi8(8)))
}

/// Sixteen signed bytes as numbers.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn signed(bytes: __m128i) -> Lanes {
    let high = _mm_unpackhi_epi64(bytes, bytes);
    [
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
    ]
}

steps!("avx2,fma");
