//! What a core can do at best, to measure kernels against: reading, and multiplying and adding.

/// The sum of little-endian words, modulo 2^64, read with the widest loads there are; bytes after the
/// last whole word do not count.
pub fn sum_words(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[expect(unsafe_code, reason = "functions that need CPU features")]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: this CPU has the feature.
            return unsafe { x86::sum_words_512(bytes) };
        } else if is_x86_feature_detected!("avx2") {
            // SAFETY: this CPU has the feature.
            return unsafe { x86::sum_words_256(bytes) };
        }
    }
    sum_lanes(bytes)
}

/// Multiplies and adds in registers alone, `rounds` times as many as there are lanes in flight.
/// Returns how many multiply-adds that were.
pub fn multiply_add(rounds: usize) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[expect(unsafe_code, reason = "functions that need CPU features")]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: this CPU has the feature.
            return unsafe { x86::multiply_add_512(rounds) };
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: this CPU has the features.
            return unsafe { x86::multiply_add_256(rounds) };
        }
    }
    // Four lanes in each of twelve registers, where the compiler sees it that way.
    let mut sums = [[0.0f32; 4]; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for sum in sum {
                *sum = std::hint::black_box(0.5f32).mul_add(0.5, *sum);
            }
        }
    }
    std::hint::black_box(sums);
    (rounds * CHAINS * 4) as u64
}

/// Independent sums: more than the latency of an addition times the units that add.
const CHAINS: usize = 12;

/// Places that are read in turns: a core has more reads of memory under way for several than for one,
/// and products read several rows at once.
const STREAMS: usize = 8;

/// In chains enough for several of the widest registers.
#[inline(always)]
fn sum_lanes(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    let (lines, rest) = words.as_chunks::<32>();
    let (streams, over) = lines.split_at(lines.len() / STREAMS * STREAMS);
    let mut sums = [0u64; 32];
    let mut add = |words: &[[u8; 8]; 32]| {
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    };
    let each = streams.len() / STREAMS;
    for i in 0..each {
        for stream in 0..STREAMS {
            add(&streams[stream * each + i]);
        }
    }
    over.iter().for_each(add);
    let rest = rest.iter().map(|word| u64::from_le_bytes(*word));
    sums.into_iter().chain(rest).fold(0, u64::wrapping_add)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::CHAINS;

    #[target_feature(enable = "avx512f")]
    pub(super) fn sum_words_512(bytes: &[u8]) -> u64 {
        super::sum_lanes(bytes)
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn sum_words_256(bytes: &[u8]) -> u64 {
        super::sum_lanes(bytes)
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn multiply_add_512(rounds: usize) -> u64 {
        let [a, b] = black_box([0.5, 0.25]);
        let (a, b) = (_mm512_set1_ps(a), _mm512_set1_ps(b));
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
        (rounds * CHAINS * 16) as u64
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn multiply_add_256(rounds: usize) -> u64 {
        let [a, b] = black_box([0.5, 0.25]);
        let (a, b) = (_mm256_set1_ps(a), _mm256_set1_ps(b));
        let mut sums = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
        (rounds * CHAINS * 8) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::{multiply_add, sum_words};

    #[test]
    fn every_word_is_read() {
        for n in [0, 1, 63, 64, 65, 1000] {
            let words: Vec<u64> = (0..n).map(|i| u64::MAX - (i << 40 | i)).collect();
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.extend([1; 7]);
            let sum = words.iter().fold(0, |sum: u64, word| sum.wrapping_add(*word));
            assert_eq!(sum_words(&bytes), sum, "{n}");
        }
    }

    #[test]
    fn work_is_in_proportion_to_rounds() {
        assert_eq!(multiply_add(30), 3 * multiply_add(10));
        assert!(multiply_add(1) >= 48);
    }
}
