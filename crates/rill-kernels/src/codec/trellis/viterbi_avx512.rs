//! A step of the search in 512-bit vectors: 64 groups at a time.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use super::viterbi::Step;

/// As [`super::viterbi::step`].
#[target_feature(enable = "avx512f,avx512bw")]
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

#[target_feature(enable = "avx512f,avx512bw")]
fn run<const NEXT: u32, const BITS: u32>(s: Step<'_>) -> u8 {
    assert!(s.next_bits == NEXT && s.bits == BITS);
    let groups = s.groups();
    // Sixty-four neighbouring states are in 64 >> NEXT groups: which of those, for each byte.
    let spread: [u8; 64] = std::array::from_fn(|i| (i >> NEXT) as u8);
    // SAFETY: 64 bytes.
    let spread = unsafe { _mm512_loadu_si512(spread.as_ptr().cast()) };
    let floor = _mm512_set1_epi8(s.floor as i8);
    let mut smallest = _mm512_set1_epi8(-1);
    for first in (0..groups).step_by(64) {
        let mut best = _mm512_set1_epi8(-1);
        let mut choice = _mm512_setzero_si512();
        for j in 0..1usize << BITS {
            let state = first + j * groups;
            // SAFETY: `groups()` has checked that there are groups << BITS costs and as many >> NEXT
            // ways; states are read from a multiple of 64 on, below groups << BITS.
            let sum = unsafe {
                let ways = s.ways.as_ptr().add(state >> NEXT);
                let ways = match NEXT {
                    2 => _mm512_broadcast_i32x4(_mm_loadu_si128(ways.cast())),
                    3 => _mm512_set1_epi64(ways.cast::<i64>().read_unaligned()),
                    _ => _mm512_set1_epi32(ways.cast::<i32>().read_unaligned()),
                };
                let costs = _mm512_loadu_si512(s.costs.as_ptr().add(state).cast());
                _mm512_adds_epu8(_mm512_shuffle_epi8(ways, spread), costs)
            };
            let less = _mm512_cmplt_epu8_mask(sum, best);
            best = _mm512_min_epu8(sum, best);
            choice = _mm512_mask_mov_epi8(choice, less, _mm512_set1_epi8(j as i8));
        }
        let best = _mm512_sub_epi8(best, floor);
        smallest = _mm512_min_epu8(smallest, best);
        // SAFETY: `first` is a multiple of 64 below `groups`, itself a multiple of 64.
        unsafe { _mm512_storeu_si512(s.out.as_mut_ptr().add(first).cast(), best) };
        let planes = &mut s.choices[first / 64 * BITS as usize..][..BITS as usize];
        for (bit, plane) in planes.iter_mut().enumerate() {
            *plane = _mm512_test_epi8_mask(choice, _mm512_set1_epi8(1 << bit));
        }
    }
    let mut bytes = [0u8; 64];
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), smallest) };
    bytes.into_iter().fold(u8::MAX, u8::min)
}
