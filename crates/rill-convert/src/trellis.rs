//! Trellis matrices from those of a source.

use rill_kernels::{Codec, LayoutError, Matrix, Trellis, TrellisEncoder};

use crate::source::StoredBytes;

/// Weights that a matrix's tables are made for, in whole rows from all over it. On the real rows of Kimi K3
/// seven thousand give the errors that a hundred thousand do (13.04 and 13.01 %).
const SAMPLE_WEIGHTS: usize = 1 << 14;

/// Packs a whole MXFP4 matrix (rows, cols): its codes, and its tables and side nibbles. The same bytes on
/// every machine.
pub(crate) fn pack(
    trellis: Trellis,
    (rows, cols): (usize, usize),
    codes: &[u8],
    scales: &[u8],
) -> Result<StoredBytes, LayoutError> {
    let source = Matrix::new(Codec::Mxfp4, rows, cols, codes, scales)?;
    let layout = Codec::Trellis(trellis).layout(rows, cols)?;
    let n = SAMPLE_WEIGHTS.div_ceil(cols.max(1)).min(rows);
    let sampled = |bytes: &[u8]| -> Vec<u8> {
        let row_bytes = bytes.len() / rows.max(1);
        (0..n).flat_map(|i| &bytes[i * rows / n * row_bytes..][..row_bytes]).copied().collect()
    };
    let (sample_codes, sample_scales) = (sampled(codes), sampled(scales));
    let sample = Matrix::accepted(Codec::Mxfp4, n, cols, &sample_codes, &sample_scales, &[])?;
    let encoder = TrellisEncoder::train(trellis, &sample)?;
    let (mut codes, mut scales) = (vec![0; layout.codes], encoder.tables().bytes().to_vec());
    let tables = scales.len();
    scales.resize(layout.scales, 0);
    encoder.encode(&source, &mut codes, &mut scales[tables..])?;
    Ok((codes, scales))
}
