//! What attention remembers of past positions, as it lies in memory.

use std::fmt;
use std::ops::Range;

use half::{bf16, f16};

use crate::ATTENTION_BLOCK;

/// The number format of cached latents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LatentFormat {
    /// As they were computed.
    #[default]
    F32,
    /// Eleven significant bits, up to ±65,504.
    F16,
    /// Eight significant bits, any size.
    Bf16,
}

impl LatentFormat {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// As it is written in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for LatentFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Values that are kept in one of the formats: rounded when they come, exact from then on.
#[derive(Clone, Debug)]
pub enum LatentCache {
    /// As they came.
    F32(Vec<f32>),
    /// Bits of f16.
    F16(Vec<u16>),
    /// Bits of bf16.
    Bf16(Vec<u16>),
}

impl LatentCache {
    /// An empty one.
    pub fn new(format: LatentFormat) -> Self {
        Self::zeros(format, 0)
    }

    /// One with `len` zeros, to be overwritten.
    pub fn zeros(format: LatentFormat, len: usize) -> Self {
        match format {
            LatentFormat::F32 => Self::F32(vec![0.0; len]),
            LatentFormat::F16 => Self::F16(vec![0; len]),
            LatentFormat::Bf16 => Self::Bf16(vec![0; len]),
        }
    }

    /// How its values are kept.
    pub fn format(&self) -> LatentFormat {
        match self {
            Self::F32(_) => LatentFormat::F32,
            Self::F16(_) => LatentFormat::F16,
            Self::Bf16(_) => LatentFormat::Bf16,
        }
    }

    /// Adds values: rounded to the nearest, ties to even; for f16 those beyond ±65,504 become that.
    pub fn extend_from_slice(&mut self, values: &[f32]) {
        const MAX: f32 = f16::MAX.to_f32_const();
        match self {
            Self::F32(cache) => cache.extend_from_slice(values),
            Self::F16(cache) => {
                // A NaN stays one.
                cache.extend(values.iter().map(|x| f16::from_f32(x.clamp(-MAX, MAX)).to_bits()));
            }
            Self::Bf16(cache) => cache.extend(values.iter().map(|x| bf16::from_f32(*x).to_bits())),
        }
    }

    /// Values in it.
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keeps the first `len` values.
    pub fn truncate(&mut self, len: usize) {
        match self {
            Self::F32(cache) => cache.truncate(len),
            Self::F16(cache) | Self::Bf16(cache) => cache.truncate(len),
        }
    }

    /// Its values, to be read.
    pub fn view(&self) -> Latents<'_> {
        match self {
            Self::F32(cache) => Latents::F32(cache),
            Self::F16(cache) => Latents::F16(cache),
            Self::Bf16(cache) => Latents::Bf16(cache),
        }
    }
}

/// Rows of cached latents in one of the formats.
#[derive(Clone, Copy, Debug)]
pub enum Latents<'a> {
    /// As they came.
    F32(&'a [f32]),
    /// Bits of f16.
    F16(&'a [u16]),
    /// Bits of bf16.
    Bf16(&'a [u16]),
}

impl<'a> Latents<'a> {
    /// Values in them.
    pub fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(bits) | Self::Bf16(bits) => bits.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The first `len` values.
    pub fn first(self, len: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[..len]),
            Self::F16(bits) => Self::F16(&bits[..len]),
            Self::Bf16(bits) => Self::Bf16(&bits[..len]),
        }
    }

    /// The ranges of rows, `width` values each, that attention takes one after another.
    #[inline(always)]
    pub(crate) fn blocks(self, width: usize) -> impl Iterator<Item = Range<usize>> {
        let (len, block) = (self.len(), ATTENTION_BLOCK * width);
        (0..len).step_by(block).map(move |first| first..len.min(first + block))
    }

    /// Some of the values as f32, in `scratch` where they lie otherwise.
    #[inline(always)]
    pub(crate) fn decoded<'s>(self, range: Range<usize>, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        scratch.clear();
        match self {
            Self::F32(values) => return &values[range],
            Self::F16(bits) => scratch.extend(bits[range].iter().map(|&bits| f16_value(bits))),
            Self::Bf16(bits) => {
                scratch
                    .extend(bits[range].iter().map(|&bits| f32::from_bits(u32::from(bits) << 16)));
            }
        }
        scratch
    }
}

/// A half as f32, without branches, so that compilers make vectors of it.
#[inline(always)]
fn f16_value(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // An exponent that is too small by the difference of the two biases; subnormals come right as well.
    let scaled = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let infinite = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | infinite | (bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_halves_have_their_values() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (f16_value(bits), f16::from_bits(bits).to_f32_const());
            let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
            assert!(same, "{bits:04x}: {got} instead of {expected}");
        }
    }

    #[test]
    fn values_are_rounded_once_and_stay_in_range() {
        let values =
            [1.0, -0.0, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 1e6, -1e30, 1e-8, f32::NAN];
        let read = |format| {
            let mut cache = LatentCache::new(format);
            cache.extend_from_slice(&values[..3]);
            cache.extend_from_slice(&values[3..]);
            assert_eq!(cache.len(), values.len());
            cache.view().decoded(0..values.len(), &mut Vec::new()).to_vec()
        };
        assert_eq!(read(LatentFormat::F32)[..7], values[..7]);
        let f16 = read(LatentFormat::F16);
        assert_eq!(f16[..7], [1.0, 0.0, 1.0, 1.0 + 4.0 / 2048.0, 65504.0, -65504.0, 0.0]);
        assert!(f16[1].is_sign_negative() && f16[7].is_nan());
        let bf16 = read(LatentFormat::Bf16);
        assert_eq!(bf16[..4], [1.0, 0.0, 1.0, 1.0]);
        assert!((bf16[5] / -1e30 - 1.0).abs() < 1.0 / 256.0 && bf16[7].is_nan());
    }
}
