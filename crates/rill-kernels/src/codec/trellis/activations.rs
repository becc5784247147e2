//! Activations of 15 bits: what a trellis matrix is multiplied by.

use super::{BLOCK, rotation};

/// Largest magnitude of an integer: 127 · 128 + 63.
const LARGEST: f32 = 16319.0;
/// Blocks that stay below this, 2^−100, count as zero: then no scale is subnormal, and neither is
/// one times 2^−7.
const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);

/// Vectors (n, cols) as integers of 15 bits, with an f32 scale per 32 inputs.
///
/// Of a block, let m be its largest magnitude. If any input is not finite, the scale is NaN and so
/// is every product with the vector. Below 2^−100 the block is zero. Else `scale = m / 16319` and an
/// input's integer is `x · (16319 / m)` rounded to nearest, ties to even; all in f32. An integer is kept
/// as `128 · high + low`, low from −64 to 63, because bytes are what processors multiply fastest.
#[derive(Clone, Debug)]
pub struct Activations {
    pub(super) cols: usize,
    /// Whether these are the numbers of a rotated basis.
    pub(super) rotated: bool,
    /// (n, cols)
    pub(super) high: Vec<i8>,
    /// (n, cols)
    pub(super) low: Vec<i8>,
    /// (n, cols / 32)
    pub(super) scales: Vec<f32>,
    /// Sums of a block's integers, (n, cols / 32): what kernels multiply a bias of the weights with.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "other kernels take the bias from the tables")
    )]
    pub(super) sums: Vec<i32>,
}

impl Activations {
    /// Quantises `x` (n, cols), for matrices of the native profile.
    ///
    /// # Panics
    /// When the columns are not a positive multiple of 32, or `x` is not whole vectors.
    pub fn new(x: &[f32], cols: usize) -> Self {
        assert!(cols > 0 && cols.is_multiple_of(BLOCK) && x.len().is_multiple_of(cols));
        let mut high = Vec::with_capacity(x.len());
        let mut low = Vec::with_capacity(x.len());
        let mut scales = Vec::with_capacity(x.len() / BLOCK);
        let mut sums = Vec::with_capacity(x.len() / BLOCK);
        for block in x.chunks_exact(BLOCK) {
            let largest = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let finite = block.iter().all(|x| x.is_finite());
            let (scale, inverse) = if !finite {
                (f32::NAN, 0.0)
            } else if largest < SMALLEST {
                (0.0, 0.0)
            } else {
                (largest / LARGEST, LARGEST / largest)
            };
            scales.push(scale);
            let mut sum = 0;
            for x in block {
                // Sums of this size are whole numbers, rounded to nearest, ties to even, and their bits count
                // up one by one. Rounding itself would be a call where not every CPU has an instruction.
                const WHOLE: f32 = 12_582_912.0;
                let rounded = (x * inverse + WHOLE).to_bits() as i32 - WHOLE.to_bits() as i32;
                // Infinity times 0 is NaN.
                let whole = if finite { rounded } else { 0 };
                let top = (whole + 64) >> 7;
                high.push(top as i8);
                low.push((whole - (top << 7)) as i8);
                sum += whole;
            }
            sums.push(sum);
        }
        Self { cols, rotated: false, high, low, scales, sums }
    }

    /// Turns `x` (n, cols) into the basis of the rotated profile, in f32, then quantises it. Each number is
    /// up to 23 times the largest of up to 512 inputs, and one of those that is not finite
    /// reaches them all; sums that overflow count as such.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn rotated(x: &[f32], cols: usize) -> Self {
        assert!(cols > 0);
        let mut turned = x.to_vec();
        turned.chunks_exact_mut(cols).for_each(rotation::rotate_f32);
        Self { rotated: true, ..Self::new(&turned, cols) }
    }

    /// Inputs of a vector.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number of vectors.
    pub fn vectors(&self) -> usize {
        self.high.len() / self.cols
    }

    /// Vector `v` as the numbers that products see, in the basis that they are in.
    ///
    /// # Panics
    /// When there is no such vector.
    pub fn decode(&self, v: usize) -> Vec<f32> {
        let inputs = v * self.cols..(v + 1) * self.cols;
        inputs.map(|i| self.whole(i) as f32 * self.scales[i / BLOCK]).collect()
    }

    /// Integer `i` of all vectors.
    pub(super) fn whole(&self, i: usize) -> i32 {
        128 * i32::from(self.high[i]) + i32::from(self.low[i])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_a_block_becomes_16319_and_halves_go_to_even() {
        let mut x = [0.0f32; BLOCK];
        x[..5].copy_from_slice(&[16319.0, -16319.0, 0.5, 1.5, -2.5]);
        let a = Activations::new(&x, BLOCK);
        assert_eq!(a.scales, [1.0]);
        assert_eq!([0, 1, 2, 3, 4, 5].map(|i| a.whole(i)), [16319, -16319, 0, 2, -2, 0]);
        assert_eq!((a.high[0], a.low[0], a.high[1], a.low[1]), (127, 63, -127, -63));
    }

    #[test]
    fn integers_are_the_nearest_ones_and_of_two_the_even_one() {
        for first in -65276..65276i32 {
            // A scale of one, and every quarter there is.
            let mut x = [first as f32 / 4.0; BLOCK];
            x[1] = 16319.0;
            let a = Activations::new(&x, BLOCK);
            assert_eq!(a.whole(0), x[0].round_ties_even() as i32, "{}", x[0]);
        }
    }

    #[test]
    fn every_magnitude_of_a_block_stays_within_the_bytes() {
        // Mantissas of all kinds, from the smallest block that counts to the largest there is.
        for exponent in 27..255u32 {
            for step in 0..512u32 {
                let largest = f32::from_bits(exponent << 23 | step.wrapping_mul(0x9e37_79b1) >> 9);
                let mut x = [0.0f32; BLOCK];
                (x[0], x[1]) = (largest, -largest);
                let a = Activations::new(&x, BLOCK);
                assert!(a.scales[0].is_normal());
                assert_eq!((a.whole(0), a.whole(1)), (16319, -16319), "{largest:e}");
            }
        }
    }

    #[test]
    fn a_tiny_block_is_zero_and_one_that_is_not_finite_has_a_nan_scale() {
        let mut x = [f32::from_bits(SMALLEST.to_bits() - 1); 3 * BLOCK];
        x[BLOCK] = f32::INFINITY;
        x[2 * BLOCK] = f32::NAN;
        let a = Activations::new(&x, 3 * BLOCK);
        assert_eq!(a.scales[0], 0.0);
        assert!(a.scales[1].is_nan() && a.scales[2].is_nan());
        assert!((0..3 * BLOCK).all(|i| a.whole(i) == 0));
    }
}
