//! Random weights, made in the form in which they are stored.
//!
//! Every byte depends on a key and its position alone, so that any thread can make any part.
//! Large matrices take their codes straight from 64 random bits at a time: each format's codes
//! are all valid and of both signs, and the scales give them the size that was asked for. A mean
//! other than zero would add up over the inputs and drown everything else, so the scales of
//! formats whose codes have one are of either sign too. A trellis decodes any bits, and most of a
//! tile is such; `trellis.rs` has the rest of it.

use half::{bf16, f16};
use rill_format::container::checksum;
use rill_kernels::{Codec, Vq};

use super::shapes::Values;
use super::trellis;

/// A key for the bytes of one thing; different for every list of parts.
pub(super) fn key(seed: u64, parts: &[u64]) -> u64 {
    let bytes: Vec<u8> =
        std::iter::once(&seed).chain(parts).flat_map(|part| part.to_le_bytes()).collect();
    checksum(&bytes)
}

/// A matrix, or any other tensor as one row, of random weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise {
    pub(super) codec: Codec,
    pub(super) key: u64,
    pub(super) values: Values,
    /// Outputs.
    pub(super) rows: usize,
    /// Inputs of an output.
    pub(super) fan_in: usize,
}

impl Noise {
    /// Fills in codes from byte `start` of them.
    pub(super) fn codes(&self, start: u64, out: &mut [u8]) {
        let Some(size) = self.size() else { return self.listed(start, out) };
        match self.codec {
            Codec::F32 => {
                let exponent = exponent(size / FLOAT_SIZE) << 23;
                let base = exponent | exponent << 32;
                words(self.key, start, out, |w| (w & 0x80ff_ffff_80ff_ffff) + base);
            }
            Codec::Bf16 => {
                let base = (exponent(size / FLOAT_SIZE) << 7) * 0x0001_0001_0001_0001;
                words(self.key, start, out, |w| (w & 0x80ff_80ff_80ff_80ff) + base);
            }
            Codec::Q8 { .. } => {
                words(self.key, start, out, |w| w);
                // The code that the format does not use.
                out.iter_mut().for_each(|b| *b = if *b == 0x80 { 0x81 } else { *b });
            }
            // All nibbles and, with 256 entries to a table, all indices are valid.
            Codec::Q4 { .. } | Codec::Mxfp4 | Codec::Vq(_) => words(self.key, start, out, |w| w),
            Codec::Trellis(trellis) => trellis::codes(self, trellis, size, start, out),
            Codec::Mxfp4z => unreachable!("made as a whole"),
        }
    }

    /// Fills in scales from byte `start` of them.
    pub(super) fn scales(&self, start: u64, out: &mut [u8]) {
        let size = self.size().unwrap_or(1.0);
        let key = key(self.key, &[1]);
        let code_size = match self.codec {
            Codec::F32 | Codec::Bf16 => return,
            Codec::Mxfp4 => {
                // One of two neighbouring powers, the larger a quarter of the time.
                let base = exponent(size / MXFP4_SIZE) * 0x0101_0101_0101_0101;
                return words(key, start, out, |w| (w & w >> 1 & 0x0101_0101_0101_0101) + base);
            }
            Codec::Q8 { .. } => Q8_SIZE,
            Codec::Q4 { .. } => Q4_SIZE,
            Codec::Vq(_) => 1.0,
            Codec::Trellis(trellis) => return trellis::scales(self, trellis, key, start, out),
            Codec::Mxfp4z => unreachable!("made as a whole"),
        };
        let base = u64::from(f16::from_f32(size / code_size).to_bits() & 0x7f00);
        let base = base * 0x0001_0001_0001_0001;
        words(key, start, out, |w| w & 0x80ff_80ff_80ff_80ff | base);
    }

    /// What the weights' size is on average; `None` for other numbers than weights.
    pub(super) fn size(&self) -> Option<f32> {
        match self.values {
            Values::Matrix(gain) => Some(gain / (self.fan_in.max(1) as f32).sqrt()),
            Values::Sized(size) => Some(size),
            Values::Even(..) | Values::Zipf(_) => None,
        }
    }

    /// Fills in numbers one by one; they are few.
    fn listed(&self, start: u64, out: &mut [u8]) {
        let bytes = if self.codec == Codec::F32 { 4 } else { 2 };
        for (i, out) in (start / bytes as u64..).zip(out.chunks_exact_mut(bytes)) {
            let u = unit(word(self.key, i));
            let value = match self.values {
                Values::Even(from, to, n) if i < n => from + (to - from) * u,
                Values::Zipf(median) => median * (0.5 + ZIPF_SHIFT) / (u + ZIPF_SHIFT),
                _ => 0.0,
            };
            match self.codec {
                Codec::F32 => out.copy_from_slice(&value.to_le_bytes()),
                _ => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            }
        }
    }
}

/// The tables of one matrix kind of a layer's vector-quantised experts, f16, (stages, entries, 8):
/// bell-shaped, each stage smaller than the one before, entries in pairs of opposite sign, and
/// together of size 1.
pub(super) fn codebooks(key: u64, vq: Vq) -> Vec<u8> {
    let half = vq.entries * 8 / 2;
    let mut out = Vec::new();
    for stage in 0..vq.stages {
        let size = STAGE_SIZES[stage.min(STAGE_SIZES.len() - 1)];
        let values: Vec<f16> = (0..half as u64)
            .map(|i| {
                let at = ((stage * half) as u64 + i) * 3;
                // Of size 1/2.
                let sum: f32 = (at..at + 3).map(|i| unit(word(key, i)) - 0.5).sum();
                f16::from_f32(2.0 * size * sum)
            })
            .collect();
        out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        out.extend(values.iter().flat_map(|&v| (-v).to_le_bytes()));
    }
    out
}

/// Root mean square of all codes of a format, or of floats whose lowest exponent is 0: from 1 to
/// 4, evenly within each power of two.
const FLOAT_SIZE: f32 = 2.415;
const Q8_SIZE: f32 = 73.6;
const Q4_SIZE: f32 = 4.637;
/// Both powers of the scale counted in.
const MXFP4_SIZE: f32 = 3.87;

/// Sizes of a table's stages; their squares add up to 1.
const STAGE_SIZES: [f32; 3] = [0.81, 0.48, 0.337];

/// Keeps the largest of Zipf's numbers at some 26 medians.
const ZIPF_SHIFT: f32 = 0.02;

/// The biased exponent of the power of two nearest to a positive number.
pub(super) fn exponent(x: f32) -> u64 {
    u64::from((x * std::f32::consts::SQRT_2).to_bits() >> 23).clamp(1, 250)
}

/// From 0 up to 1.
fn unit(word: u64) -> f32 {
    (word >> 40) as f32 / (1 << 24) as f32
}

/// Random bits number `i` of a key: a counter through a mixer (the finaliser of SplitMix64).
pub(super) fn word(key: u64, i: u64) -> u64 {
    let mut z = key.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Writes random words, each changed by `f`, from byte `start` of an endless row of them.
pub(super) fn words(key: u64, start: u64, out: &mut [u8], f: impl Fn(u64) -> u64) {
    let make = |i: u64| f(word(key, i)).to_le_bytes();
    let skip = (start % 8) as usize;
    let (head, out) = out.split_at_mut(((8 - skip) % 8).min(out.len()));
    head.copy_from_slice(&make(start / 8)[skip..skip + head.len()]);
    let first = start.div_ceil(8);
    let mut whole = out.chunks_exact_mut(8);
    let mut i = first;
    for chunk in &mut whole {
        chunk.copy_from_slice(&make(i));
        i += 1;
    }
    let tail = whole.into_remainder();
    tail.copy_from_slice(&make(i)[..tail.len()]);
}

#[cfg(test)]
mod tests {
    use rill_kernels::{Matrix, Trellis};

    use super::*;

    const VQ: Vq = Vq { stages: 3, entries: 256, index_block: 64, packed: false };

    fn cases() -> Vec<Codec> {
        let group = 128;
        let trellis = [16, 23, 28].map(|rate| Codec::Trellis(Trellis::new(rate, 12).unwrap()));
        let rotated = [19, 32].map(|rate| Codec::Trellis(Trellis::rotated(rate, 12).unwrap()));
        let mut all = vec![Codec::F32, Codec::Bf16, Codec::Q8 { group }, Codec::Q4 { group }];
        all.extend([Codec::Mxfp4, Codec::Vq(VQ)]);
        all.extend(trellis);
        all.extend(rotated);
        all
    }

    fn decoded(codec: Codec, rows: usize, cols: usize) -> Vec<f32> {
        let noise = Noise { codec, key: 7, values: Values::Matrix(1.0), rows, fan_in: cols };
        let layout = codec.layout(rows, cols).unwrap();
        let (mut codes, mut scales) = (vec![0; layout.codes], vec![0; layout.scales]);
        noise.codes(0, &mut codes);
        noise.scales(0, &mut scales);
        let tables: Vec<f32> = match codec {
            Codec::Vq(vq) => codebooks(9, vq)
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            _ => Vec::new(),
        };
        let matrix = Matrix::with_tables(codec, rows, cols, &codes, &scales, &tables).unwrap();
        let mut all = vec![0.0; rows * cols];
        all.chunks_exact_mut(cols).enumerate().for_each(|(r, row)| matrix.decode_row(r, row));
        all
    }

    #[test]
    fn weights_of_every_format_have_the_size_asked_for_and_no_mean() {
        for codec in cases() {
            for cols in [256, 1024, 7168] {
                let all = decoded(codec, 128, cols);
                let n = all.len() as f64;
                let mean = all.iter().map(|&w| f64::from(w)).sum::<f64>() / n;
                let square = all.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / n;
                let gain = (square * cols as f64).sqrt();
                // Powers of two are up to √2 off.
                assert!((0.65..1.5).contains(&gain), "{codec:?}, {cols} columns: {gain}");
                // Sixteen standard errors: groups and entries are not independent weights.
                assert!(mean.abs() < 16.0 * (square / n).sqrt(), "{codec:?}, {cols}: {mean}");
            }
        }
    }

    #[test]
    fn parts_are_the_whole() {
        for values in [Values::Matrix(1.0), Values::Even(0.0, 1.0, 100), Values::Zipf(0.1)] {
            for codec in cases() {
                if values != Values::Matrix(1.0) && !matches!(codec, Codec::F32 | Codec::Bf16) {
                    continue;
                }
                let noise = Noise { codec, key: 3, values, rows: 64, fan_in: 64 };
                let (mut whole, mut whole_scales) = (vec![0; 512], vec![0; 512]);
                noise.codes(0, &mut whole);
                noise.scales(0, &mut whole_scales);
                for (start, end) in [(0, 512), (4, 12), (12, 20), (4, 8), (252, 512), (8, 8)] {
                    let (mut part, mut scales) = (vec![0; end - start], vec![0; end - start]);
                    noise.codes(start as u64, &mut part);
                    noise.scales(start as u64, &mut scales);
                    assert_eq!(part, whole[start..end], "{codec:?} {start}..{end}");
                    assert_eq!(scales, whole_scales[start..end], "{codec:?} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn keys_differ_by_seed_and_by_every_part() {
        let all = [key(0, &[]), key(1, &[]), key(0, &[0]), key(0, &[1]), key(0, &[0, 0])];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "{i}");
        }
    }

    #[test]
    fn zipf_has_few_large_numbers() {
        let values = Values::Zipf(1.0);
        let noise = Noise { codec: Codec::F32, key: 5, values, rows: 1, fan_in: 1 };
        let mut bytes = vec![0; 4 * 1000];
        noise.codes(0, &mut bytes);
        let mut values: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        values.sort_by(f32::total_cmp);
        assert!((0.9..1.1).contains(&values[500]), "{}", values[500]);
        assert!(values[990] > 10.0 && values[0] > 0.4, "{} {}", values[990], values[0]);
    }
}
