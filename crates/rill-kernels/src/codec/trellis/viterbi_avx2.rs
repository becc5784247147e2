//! A step of the search in 256-bit vectors: 32 groups at a time.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use super::viterbi::Step;

/// As [`super::viterbi::step`].
#[target_feature(enable = "avx2")]
pub(super) fn step(s: Step<'_>) -> u8 {
    match (s.next_bits, s.bits) {
        (2, 2) => run::<2, 2>(s),
        (2, 3) => run::<2, 3>(s),
        (3, 2) => run::<3, 2>(s),
        (3, 3) => run::<3, 3>(s),
        (3, 4) => run::<3, 4>(s),
        (4, 3) => run::<4, 3>(s),
        (4, 4) => run::<4, 4>(s),
        _ => super::viterbi::step(s),
    }
}

#[target_feature(enable = "avx2")]
fn run<const NEXT: u32, const BITS: u32>(s: Step<'_>) -> u8 {
    assert!(s.next_bits == NEXT && s.bits == BITS);
    let groups = s.groups();
    // Thirty-two neighbouring states are in 32 >> NEXT groups: which of those, for each byte.
    let spread: [u8; 32] = std::array::from_fn(|i| (i >> NEXT) as u8);
    // SAFETY: 32 bytes.
    let spread = unsafe { _mm256_loadu_si256(spread.as_ptr().cast()) };
    let floor = _mm256_set1_epi8(s.floor as i8);
    let mut smallest = _mm256_set1_epi8(-1);
    for first in (0..groups).step_by(32) {
        let mut best = _mm256_set1_epi8(-1);
        let mut choice = _mm256_setzero_si256();
        for j in 0..1usize << BITS {
            let state = first + j * groups;
            // SAFETY: `groups()` has checked that there are groups << BITS costs and as many >> NEXT
            // ways; states are read from a multiple of 32 on, below groups << BITS.
            let sum = unsafe {
                let ways = s.ways.as_ptr().add(state >> NEXT);
                let ways = match NEXT {
                    2 => _mm256_set1_epi64x(ways.cast::<i64>().read_unaligned()),
                    3 => _mm256_set1_epi32(ways.cast::<i32>().read_unaligned()),
                    _ => _mm256_set1_epi16(ways.cast::<i16>().read_unaligned()),
                };
                let costs = _mm256_loadu_si256(s.costs.as_ptr().add(state).cast());
                _mm256_adds_epu8(_mm256_shuffle_epi8(ways, spread), costs)
            };
            let lower = _mm256_min_epu8(sum, best);
            let same = _mm256_cmpeq_epi8(lower, best);
            best = lower;
            // j only grows, so the largest is the last that was strictly cheaper.
            let new = _mm256_andnot_si256(same, _mm256_set1_epi8(j as i8));
            choice = _mm256_max_epu8(choice, new);
        }
        let best = _mm256_sub_epi8(best, floor);
        smallest = _mm256_min_epu8(smallest, best);
        // SAFETY: `first` is a multiple of 32 below `groups`, a multiple of 64.
        unsafe { _mm256_storeu_si256(s.out.as_mut_ptr().add(first).cast(), best) };
        let planes = &mut s.choices[first / 64 * BITS as usize..][..BITS as usize];
        for (bit, plane) in planes.iter_mut().enumerate() {
            // The wanted bit of each byte is brought to its top; shifts go over bytes, but only upwards.
            let top = _mm256_sll_epi16(choice, _mm_cvtsi32_si128(7 - bit as i32));
            let half = u64::from(_mm256_movemask_epi8(top) as u32);
            *plane = if first % 64 == 0 { half } else { *plane | half << 32 };
        }
    }
    let mut bytes = [0u8; 32];
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), smallest) };
    bytes.into_iter().fold(u8::MAX, u8::min)
}
