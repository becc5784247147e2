//! The rotated profile's change of basis: signs, then an orthonormal Hadamard transform.

use std::ops::{Add, Mul, Neg, Sub};

/// Most inputs that are mixed with each other, a power of two.
const MOST: usize = 512;

/// Whether input i changes its sign, by i mod 512: the lowest bit of a hash of that, the 32-bit
/// finaliser of MurmurHash3.
const NEGATIVE: [bool; MOST] = {
    let mut negative = [false; MOST];
    let mut i = 0;
    while i < MOST {
        let mut hash = i as u32;
        hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
        hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
        negative[i] = (hash ^ hash >> 16) & 1 == 1;
        i += 1;
    }
    negative
};

/// Rotates a row of f32; see [`rotate`].
pub(super) fn rotate_f32(row: &mut [f32]) {
    rotate(row, 1.0 / (span(row.len()) as f32).sqrt());
}

/// Rotates a row of f64; see [`rotate`].
pub(super) fn rotate_f64(row: &mut [f64]) {
    rotate(row, 1.0 / (span(row.len()) as f64).sqrt());
}

/// The inverse of [`rotate_f64`] but for rounding.
pub(super) fn rotate_back(row: &mut [f64]) {
    let span = span(row.len());
    row.chunks_exact_mut(span).for_each(|inputs| mix(inputs, 1.0 / (span as f64).sqrt()));
    change_signs(row);
}

/// Inputs that are mixed with each other: the largest power of two up to 512 that divides the columns.
fn span(cols: usize) -> usize {
    1 << cols.trailing_zeros().min(MOST.trailing_zeros())
}

/// Signs, sums and differences, one factor, in this order. Every operation is rounded by itself and none
/// is a fused one, so that the same bits come out however a compiler uses vectors.
fn rotate<T: Real>(row: &mut [T], factor: T) {
    change_signs(row);
    row.chunks_exact_mut(span(row.len())).for_each(|inputs| mix(inputs, factor));
}

fn change_signs<T: Real>(row: &mut [T]) {
    for inputs in row.chunks_mut(MOST) {
        for (x, &negative) in inputs.iter_mut().zip(&NEGATIVE) {
            *x = if negative { -*x } else { *x };
        }
    }
}

/// A Hadamard transform: sums and differences of neighbours, then of those two apart, four, and so on; then
/// everything times the factor.
fn mix<T: Real>(inputs: &mut [T], factor: T) {
    let mut apart = 1;
    while apart < inputs.len() {
        for both in inputs.chunks_exact_mut(2 * apart) {
            let (first, second) = both.split_at_mut(apart);
            for (a, b) in first.iter_mut().zip(second) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        apart *= 2;
    }
    inputs.iter_mut().for_each(|x| *x = *x * factor);
}

/// f32 or f64.
trait Real:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Neg<Output = Self>
{
}
impl Real for f32 {}
impl Real for f64 {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_the_largest_power_of_two_that_divides_the_columns_up_to_512() {
        let spans = [32, 64, 96, 3584, 7168, 4096, 2304].map(span);
        assert_eq!(spans, [32, 64, 32, 512, 512, 512, 256]);
    }

    #[test]
    fn a_rotation_is_the_signed_matrix_of_parities_and_rotating_back_undoes_it() {
        let cols = 192;
        for input in [0, 1, 63, 64, 130, 191] {
            let mut row = vec![0.0; cols];
            row[input] = 8.0;
            rotate_f64(&mut row);
            let sign = if NEGATIVE[input] { -1.0 } else { 1.0 };
            for (i, &x) in row.iter().enumerate() {
                let parity = ((i % 64) & (input % 64)).count_ones() % 2;
                let wanted = if parity == 1 { -sign } else { sign };
                assert_eq!(x, if i / 64 == input / 64 { wanted } else { 0.0 }, "{input} {i}");
            }
            let mut narrow: Vec<f32> =
                (0..cols).map(|i| if i == input { 8.0 } else { 0.0 }).collect();
            rotate_f32(&mut narrow);
            assert!(narrow.iter().zip(&row).all(|(&f, &d)| f64::from(f) == d));
            rotate_back(&mut row);
            assert!((0..cols).all(|i| row[i] == if i == input { 8.0 } else { 0.0 }));
        }
    }

    #[test]
    fn signs_are_the_committed_ones() {
        let word = |bits: u32, &negative: &bool| bits << 1 | u32::from(negative);
        let first = NEGATIVE[..32].iter().fold(0, word);
        let negative = NEGATIVE.iter().filter(|&&n| n).count();
        assert_eq!((first, negative), (0b0101_1100_1100_1011_0010_1100_1010_0011, 256));
    }
}
