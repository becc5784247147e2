//! How far packed experts are from the source's, by a few rows of each matrix: told while a conversion
//! runs, when nothing is too late. `verify.rs` compares every weight.

use rill_kernels::{LayoutError, Matrix};

use crate::source::{Form, StoredBytes, kernel_codec};

/// Rows of a matrix that are compared, evenly over it.
const ROWS: usize = 16;

/// The error of the experts of one layer, ‖w − w′‖ / ‖w‖ over some rows of every matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerError {
    /// Index of the layer.
    pub layer: u32,
    /// Experts that it was measured on: those that were made since the conversion was begun or resumed.
    pub experts: u32,
    /// 0 for the published weights.
    pub error: f64,
}

/// Sums of squares of some experts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Distance {
    lost: f64,
    all: f64,
}

impl Distance {
    pub(crate) fn add(&mut self, other: Self) {
        self.lost += other.lost;
        self.all += other.all;
    }

    pub(crate) fn relative(&self) -> f64 {
        if self.lost == 0.0 { 0.0 } else { (self.lost / self.all).sqrt() }
    }
}

/// Some rows of a matrix of the source, as plain numbers.
pub(crate) struct Sample {
    /// One after another.
    weights: Vec<f32>,
}

impl Sample {
    pub(crate) fn of(
        form: Form,
        (rows, cols): (usize, usize),
        (codes, scales): &StoredBytes,
    ) -> Result<Self, LayoutError> {
        let mut weights = Vec::new();
        match form {
            Form::Packed(codec) => {
                let matrix = Matrix::new(kernel_codec(codec)?, rows, cols, codes, scales)?;
                weights = decoded(&matrix);
            }
            Form::Plain(_) | Form::Vq(_) => {
                let row_bytes = codes.len() / rows.max(1);
                for row in chosen(rows) {
                    let row = codes.get(row * row_bytes..(row + 1) * row_bytes).unwrap_or_default();
                    weights.extend(form.decode(1, cols, row, &[])?);
                }
            }
        }
        Ok(Self { weights })
    }

    /// How far a packed matrix of the same shape is from the source's.
    pub(crate) fn distance(&self, packed: &Matrix<'_>) -> Distance {
        let mut distance = Distance::default();
        for (&wanted, found) in self.weights.iter().zip(decoded(packed)) {
            distance.lost += f64::from(wanted - found).powi(2);
            distance.all += f64::from(wanted).powi(2);
        }
        distance
    }
}

/// The chosen rows of a matrix.
fn decoded(matrix: &Matrix<'_>) -> Vec<f32> {
    let mut weights = vec![0.0; chosen(matrix.rows()).count() * matrix.cols()];
    let rows = weights.chunks_exact_mut(matrix.cols().max(1));
    rows.zip(chosen(matrix.rows())).for_each(|(out, row)| matrix.decode_row(row, out));
    weights
}

fn chosen(rows: usize) -> impl Iterator<Item = usize> {
    let n = ROWS.min(rows);
    (0..n).map(move |i| i * rows / n)
}

#[cfg(test)]
mod tests {
    use rill_format::container::{Codec, CodecName};

    use super::*;

    #[test]
    fn a_sample_of_any_form_is_near_its_packed_form_by_its_error() {
        let (rows, cols) = (37, 32);
        let weights: Vec<f32> = (0..rows * cols).map(|i| ((i * 7) % 23) as f32 - 11.0).collect();
        let plain: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        let stored = (plain, Vec::new());
        let f32s = Form::Packed(Codec::plain(CodecName::F32));
        for form in [Form::Plain(rill_format::Dtype::F32), f32s] {
            let sample = Sample::of(form, (rows, cols), &stored).unwrap();
            assert_eq!(sample.weights.len(), ROWS * cols);
            assert_eq!(sample.weights[cols..2 * cols], weights[2 * cols..3 * cols]);
            let same = Matrix::new(rill_kernels::Codec::F32, rows, cols, &stored.0, &[]).unwrap();
            assert_eq!(sample.distance(&same).relative(), 0.0);
            // Every weight a quarter larger.
            let larger: Vec<u8> = weights.iter().flat_map(|w| (1.25 * w).to_le_bytes()).collect();
            let larger = Matrix::new(rill_kernels::Codec::F32, rows, cols, &larger, &[]).unwrap();
            assert_eq!(sample.distance(&larger).relative(), 0.25);
        }
    }
}
