//! Products with 512-bit vectors: sixteen lanes are one register.
//!
//! No array of registers is mapped or iterated over: closures that need CPU features are not compiled
//! into functions that have none, and iterators of arrays put registers into memory.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;
use std::ops::Range;

use crate::codec::{PARTIALS, Vq, f16_at, f16_scales, join, mxfp4, q4, vq};
use crate::lanes::{
    Aligned, BLOCK, FEW, NEAR, PANEL, PANEL_ROWS, SCALES, SHARED, STEP, lanes, padded, products,
};
use crate::matrix::Matrix;
use crate::scalar;

pub(crate) type Part = __m512;
const WIDTH: usize = 16;
const ROWS: [usize; 4] = [4, 4, 2, 2];
const VQ_ROWS: usize = 4;
const TILE: (usize, usize) = (8, 3);
const SHORT_TILE: (usize, usize) = (4, 3);

#[target_feature(enable = "avx512f")]
#[inline]
fn part_splat(x: f32) -> Part {
    _mm512_set1_ps(x)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn part_add(a: Part, b: Part) -> Part {
    _mm512_add_ps(a, b)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn part_sub(a: Part, b: Part) -> Part {
    _mm512_sub_ps(a, b)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn part_mul(a: Part, b: Part) -> Part {
    _mm512_mul_ps(a, b)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn part_fma(a: Part, b: Part, c: Part) -> Part {
    _mm512_fmadd_ps(a, b, c)
}

/// Asks for a cache line that will be read soon; any address will do.
#[inline]
fn prefetch(line: *const u8) {
    // SAFETY: a prefetch of an address that cannot be read does nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}

/// # Safety
/// Sixteen values must be readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn part_load(x: *const f32) -> Part {
    // SAFETY: the caller's promise; any alignment will do.
    unsafe { _mm512_loadu_ps(x) }
}

/// # Safety
/// Sixteen values must be writable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn part_store(x: Part, to: *mut f32) {
    // SAFETY: the caller's promise; any alignment will do.
    unsafe { _mm512_storeu_ps(to, x) }
}

struct F32;

impl Format for F32 {
    const BYTES: usize = 128;
    const PAD: u8 = 0x3f;
    const SCALED: bool = false;

    #[target_feature(enable = "avx512f")]
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

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        let [a, b] =
            unsafe { [_mm256_loadu_si256(codes.cast()), _mm256_loadu_si256(codes.add(32).cast())] };
        [[widened(a)], [widened(b)]]
    }
}

/// Sixteen bf16 as f32.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn widened(halves: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

struct Q8;

impl Format for Q8 {
    const BYTES: usize = 32;
    const PAD: u8 = 1;
    const SCALED: bool = true;

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        let [a, b] =
            unsafe { [_mm_loadu_si128(codes.cast()), _mm_loadu_si128(codes.add(16).cast())] };
        [
            [_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a))],
            [_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))],
        ]
    }

    #[inline(always)]
    fn scales(row: &[u8], first: usize, out: &mut [f32]) {
        f16_scales(row, first, out);
    }
}

/// Looks up sixteen nibbles. A shift by 4k brings nibbles k and k + 8 to the low ends of the two
/// halves of a word of eight bytes, and the permutation sees four bits of each lane: two
/// instructions, when the lanes may hold inputs 0, 8, 1, 9, 2, 10, ….
///
/// # Safety
/// Eight bytes must be readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn nibbles(codes: *const u8, values: &[f32; 16]) -> Lanes {
    // SAFETY: the caller's promise; the table has sixteen values.
    let (word, values) =
        unsafe { (codes.cast::<i64>().read_unaligned(), _mm512_loadu_ps(values.as_ptr())) };
    let shifts = _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28);
    [_mm512_permutexvar_ps(_mm512_srlv_epi64(_mm512_set1_epi64(word), shifts), values)]
}

/// Inputs 0, 8, 1, 9, ….
#[target_feature(enable = "avx512f")]
#[inline]
fn interleaved([x]: Lanes) -> Lanes {
    let from = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    [_mm512_permutexvar_ps(from, x)]
}

/// Undoes [`interleaved`].
#[target_feature(enable = "avx512f")]
#[inline]
fn in_order([x]: Lanes) -> Lanes {
    let from = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    [_mm512_permutexvar_ps(from, x)]
}

struct Q4;

impl Format for Q4 {
    const BYTES: usize = 16;
    const PAD: u8 = 0x99;
    const SCALED: bool = true;

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe { [nibbles(codes, &q4::VALUES), nibbles(codes.add(8), &q4::VALUES)] }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn arranged(x: Lanes) -> Lanes {
        interleaved(x)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn natural(x: Lanes) -> Lanes {
        in_order(x)
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

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
        // SAFETY: the caller's promise.
        unsafe { [nibbles(codes, &mxfp4::VALUES), nibbles(codes.add(8), &mxfp4::VALUES)] }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn arranged(x: Lanes) -> Lanes {
        interleaved(x)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn natural(x: Lanes) -> Lanes {
        in_order(x)
    }

    #[inline(always)]
    fn scales(row: &[u8], first: usize, out: &mut [f32]) {
        mxfp4::scales(row, first, out);
    }
}

lanes!("avx512f,avx512bw,fma");
products!("avx512f,avx512bw,fma");
