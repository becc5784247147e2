//! Entropy-coded experts: their bytes depend on one another, so a few matrices are packed and every expert is
//! put together of these.

use rill_format::container::{ALIGN, Manifest, RecordLayout};
use rill_kernels::{Codec, Matrix, Mxfp4zMatrix};

use super::noise::{Noise, exponent, key, word};
use super::shapes::{Shapes, Values};
use super::{expert_noise, matrix_shapes};
use crate::error::ConvertError;

/// Different matrices of each shape: any of them is an expert's gate, any its up, any of the others its down.
const MATRICES: usize = 4;
/// Inputs that share an exponent.
const BLOCK: usize = 32;

/// An mxfp4z matrix (rows, cols) of random weights, which takes as many bytes as one of a real model: to
/// measure with.
///
/// # Errors
/// When no such matrix can have this shape.
pub fn synthetic_mxfp4z(rows: usize, cols: usize, seed: u64) -> Result<Vec<u8>, ConvertError> {
    let (key, values) = (key(seed, &[]), Values::Matrix(1.0));
    pack(&Noise { codec: Codec::Mxfp4, key, values, rows, fan_in: cols })
}

/// The packed matrices: those of gate and up, then those of down.
#[derive(Debug)]
pub(super) struct Coded {
    seed: u64,
    matrices: [Vec<Vec<u8>>; 2],
}

impl Coded {
    pub(super) fn new(seed: u64, shapes: &Shapes) -> Result<Self, ConvertError> {
        let packed = |matrix: usize| -> Result<Vec<Vec<u8>>, ConvertError> {
            let shape = matrix_shapes(&shapes.experts)[matrix];
            let noise =
                |i: usize| expert_noise(seed, Codec::Mxfp4, (u32::MAX, i as u32, matrix), shape);
            (0..MATRICES).map(|i| pack(&noise(i))).collect()
        };
        Ok(Self { seed, matrices: [packed(0)?, packed(2)?] })
    }

    /// The layout of an expert's record, and the codes of its gate, up and down. `largest` is that of the largest
    /// record there can be.
    pub(super) fn expert(
        &self,
        largest: &RecordLayout,
        layer: u32,
        expert: u32,
    ) -> Result<(RecordLayout, [&[u8]; 3]), ConvertError> {
        let choice = key(self.seed, &[layer.into(), expert.into()]);
        let parts = std::array::from_fn(|matrix| {
            let number = choice >> (16 * matrix) & 0xffff;
            &self.matrices[matrix / 2][number as usize % MATRICES][..]
        });
        let own = largest.with_code_bytes(parts.map(|part| part.len() as u64));
        let own = own.ok_or_else(|| ConvertError::Tensor {
            tensor: format!("layer {layer}, expert {expert}"),
            reason: "takes more bytes as mxfp4z than a record can have".to_owned(),
        })?;
        Ok((own, parts))
    }

    /// Says in the manifest where every record lies: in the order of the experts.
    pub(super) fn place(
        &self,
        largest: &RecordLayout,
        manifest: &mut Manifest,
    ) -> Result<(), ConvertError> {
        let Some(experts) = &mut manifest.experts else { return Ok(()) };
        let (mut most, mut most_bytes) = ([0; 3], 0);
        for bank in &mut experts.banks {
            let (mut records, mut end) = (Vec::new(), 0);
            for expert in 0..bank.experts {
                let (own, parts) = self.expert(largest, bank.layer, expert)?;
                let bytes = own.record_bytes as u64;
                let units = bytes / ALIGN as u64;
                records.push([end, units]);
                end += units;
                most_bytes = most_bytes.max(bytes);
                most.iter_mut().zip(parts).for_each(|(n, part)| *n = part.len().max(*n));
            }
            bank.records = Some(records);
        }
        let matrices = [&mut experts.gate, &mut experts.up, &mut experts.down];
        for (matrix, most) in matrices.into_iter().zip(most) {
            matrix.code_bytes = most as u64;
        }
        experts.record_bytes = most_bytes;
        experts.banks.iter_mut().for_each(|bank| bank.stripes[0].bytes = most_bytes);
        Ok(())
    }
}

/// An MXFP4 matrix of bell-shaped weights, entropy-coded: random nibbles could not be.
fn pack(noise: &Noise) -> Result<Vec<u8>, ConvertError> {
    let (rows, cols) = (noise.rows, noise.fan_in);
    let layout_error = |source| ConvertError::Layout { tensor: "the experts".to_owned(), source };
    let layout = noise.codec.layout(rows, cols).map_err(layout_error)?;
    let (mut codes, mut scales) = (vec![0; layout.codes], vec![0; layout.scales]);
    // The power of two that makes the weights as large as they should be.
    let unit = exponent(noise.size().unwrap_or(1.0) / SUM_SIZE);
    let mut first = 0;
    for (codes, scale) in codes.as_chunks_mut::<{ BLOCK / 2 }>().0.iter_mut().zip(&mut scales) {
        let sums: [i32; BLOCK] = std::array::from_fn(|i| sum(word(noise.key, first + i as u64)));
        first += BLOCK as u64;
        // The largest then lies from 3 up to 6, which is the largest there is.
        let largest = sums.iter().map(|sum| sum.unsigned_abs()).max().unwrap_or(0);
        let shift = (8 * largest.max(4) / 6).ilog2() - 2;
        *scale = (unit + u64::from(shift)).min(254) as u8;
        for (i, &sum) in sums.iter().enumerate() {
            codes[i / 2] |= nibble(sum, shift) << (i % 2 * 4);
        }
    }
    let source = Matrix::new(noise.codec, rows, cols, &codes, &scales).map_err(layout_error)?;
    Mxfp4zMatrix::encode(&source).map_err(layout_error)
}

/// Root mean square of [`sum`].
const SUM_SIZE: f32 = 209.0;

/// A bell-shaped number of mean 0: the sum of eight bytes.
fn sum(word: u64) -> i32 {
    word.to_le_bytes().iter().map(|&byte| 2 * i32::from(byte) - 255).sum::<i32>() / 2
}

/// The nibble that is nearest to `sum` times 2^−shift.
fn nibble(sum: i32, shift: u32) -> u8 {
    /// Four times the midpoints between 0, 1/2, 1, 3/2, 2, 3, 4 and 6.
    const MIDPOINTS: [u32; 7] = [1, 3, 5, 7, 10, 14, 20];
    let magnitude = 4 * sum.unsigned_abs();
    let above = MIDPOINTS.iter().filter(|&&midpoint| magnitude > midpoint << shift).count();
    if sum < 0 { 8 | above as u8 } else { above as u8 }
}
