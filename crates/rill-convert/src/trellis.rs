//! Trellis matrices from those of a source.

use rill_format::FormatError;
use rill_kernels::{Codec, LayoutError, Matrix, Mxfp4zMatrix, Trellis, TrellisEncoder};

use crate::error::ConvertError;
use crate::source::{Form, SourceTensor, StoredBytes, kernel_codec};

/// Weights that a matrix's tables are made for, in whole rows from all over it. On the real rows of Kimi K3
/// seven thousand give the errors that a hundred thousand do (13.04 and 13.01 %).
const SAMPLE_WEIGHTS: usize = 1 << 14;

/// Packs a whole matrix (rows, cols), of MXFP4 if the trellis is the native one: its codes, and its tables and
/// side nibbles. The same bytes on every machine.
pub(crate) fn pack(
    trellis: Trellis,
    form: Form,
    (rows, cols): (usize, usize),
    stored: StoredBytes,
) -> Result<StoredBytes, LayoutError> {
    let (codec, codes, scales) = by_rows(form, (rows, cols), stored)?;
    let source = Matrix::new(codec, rows, cols, &codes, &scales)?;
    let n = sample_rows(rows, cols);
    let sampled = |bytes: &[u8]| -> Vec<u8> {
        let row_bytes = bytes.len() / rows.max(1);
        (0..n).flat_map(|i| &bytes[i * rows / n * row_bytes..][..row_bytes]).copied().collect()
    };
    let (sample_codes, sample_scales) = (sampled(&codes), sampled(&scales));
    let sample = Matrix::accepted(codec, n, cols, &sample_codes, &sample_scales, &[])?;
    encode(Codec::Trellis(trellis), &TrellisEncoder::train(trellis, &sample)?, &source)
}

/// An encoder for a tensor of the trunk, of which `read` gives one row.
pub(crate) fn encoder(
    trellis: Trellis,
    tensor: &SourceTensor,
    read: &dyn Fn(u64) -> Result<StoredBytes, FormatError>,
) -> Result<TrellisEncoder, ConvertError> {
    let layout_error = |source| ConvertError::Layout { tensor: tensor.name.clone(), source };
    let (rows, cols) = tensor.rows_and_cols();
    let n = sample_rows(rows as usize, cols as usize) as u64;
    let mut bytes = Vec::new();
    for i in 0..n {
        let (codes, scales) = read(i * rows / n)?;
        let row = tensor.form.decode(1, cols as usize, &codes, &scales).map_err(layout_error)?;
        bytes.extend(row.iter().flat_map(|w| w.to_le_bytes()));
    }
    let sample = Matrix::new(Codec::F32, n as usize, cols as usize, &bytes, &[]);
    sample.and_then(|sample| TrellisEncoder::train(trellis, &sample)).map_err(layout_error)
}

/// Packs some rows of a tensor, whole tiles or the last ones.
pub(crate) fn pack_rows(
    target: Codec,
    encoder: &TrellisEncoder,
    form: Form,
    (rows, cols): (usize, usize),
    stored: StoredBytes,
) -> Result<StoredBytes, LayoutError> {
    let (codec, codes, scales) = by_rows(form, (rows, cols), stored)?;
    encode(target, encoder, &Matrix::new(codec, rows, cols, &codes, &scales)?)
}

fn encode(
    target: Codec,
    encoder: &TrellisEncoder,
    source: &Matrix<'_>,
) -> Result<StoredBytes, LayoutError> {
    let layout = target.layout(source.rows(), source.cols())?;
    let (mut codes, mut scales) = (vec![0; layout.codes], encoder.tables().bytes().to_vec());
    let tables = scales.len();
    scales.resize(layout.scales, 0);
    encoder.encode(source, &mut codes, &mut scales[tables..])?;
    Ok((codes, scales))
}

/// Rows of a matrix that its tables are made for.
fn sample_rows(rows: usize, cols: usize) -> usize {
    SAMPLE_WEIGHTS.div_ceil(cols.max(1)).min(rows)
}

/// The bytes of a matrix in a format whose rows lie one after another.
pub(crate) fn by_rows(
    form: Form,
    (rows, cols): (usize, usize),
    (codes, scales): StoredBytes,
) -> Result<(Codec, Vec<u8>, Vec<u8>), LayoutError> {
    if let Some(codec) = form.as_published().filter(|&codec| form.is(codec)) {
        let codec = kernel_codec(codec)?;
        if codec == Codec::Mxfp4z {
            let packed = Mxfp4zMatrix::new(rows, cols, &codes)?;
            let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / 32]);
            packed.unpack(&mut codes, &mut scales)?;
            return Ok((Codec::Mxfp4, codes, scales));
        }
        if codec.tile_rows() == 1 {
            return Ok((codec, codes, scales));
        }
    }
    let weights = form.decode(rows, cols, &codes, &scales)?;
    drop(codes);
    Ok((Codec::F32, weights.iter().flat_map(|w| w.to_le_bytes()).collect(), Vec::new()))
}
