//! What is converted: a published checkpoint, or a container into another one (`waste.rs` has the
//! other kind of container).

use std::collections::BTreeMap;
use std::fmt;

use rill_format::container::{self, CodecName, Container};
use rill_format::{Checkpoint, Dtype, Folder, FormatError, TensorId};
use rill_kernels::{Codec, LayoutError, Matrix, Mxfp4zMatrix, Vq};

use crate::error::ConvertError;
use crate::place::{ExpertKey, expert_key};

/// Codes and scales of a matrix, or of some of its rows.
pub type StoredBytes = (Vec<u8>, Vec<u8>);

/// Where weights come from.
pub trait ConvertSource: Sync {
    /// The folder it is in.
    fn folder(&self) -> Folder;

    /// A small file of the release, or `None` if there is none.
    fn small_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>, FormatError> {
        let folder = self.folder();
        if folder.exists(name) { folder.read(name, max_bytes).map(Some) } else { Ok(None) }
    }

    /// A digest of what is there, so that only the same conversion is resumed.
    fn identity(&self) -> String;

    /// Checks the bytes that are not checked as they are read.
    fn check(&self) -> Result<(), FormatError>;

    /// Names of the files whose bytes have no checksums that [`identity`](Self::identity) covers,
    /// ascending.
    fn files(&self) -> Vec<String>;

    /// Every tensor that is not a routed expert.
    fn trunk(&self) -> Vec<SourceTensor>;

    /// Codes and scales of some rows of a tensor of the trunk.
    fn read_rows(
        &self,
        tensor: &SourceTensor,
        first: u64,
        n: u64,
    ) -> Result<StoredBytes, FormatError>;

    /// The routed experts, if there are any.
    fn experts(&self) -> Result<Option<SourceExperts>, ConvertError>;

    /// Which of [`files`](Self::files) one expert is read from, some of them more than once.
    fn expert_files(&self, experts: &SourceExperts, bank: usize, expert: u32) -> Vec<&str>;

    /// Codes and scales of gate, up and down of one expert.
    fn read_expert(
        &self,
        experts: &SourceExperts,
        bank: usize,
        expert: u32,
    ) -> Result<[StoredBytes; 3], FormatError>;
}

/// A tensor of the trunk as the source stores it.
#[derive(Clone, Debug)]
pub struct SourceTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) form: Form,
    /// The file it is in.
    pub(crate) file: String,
}

impl SourceTensor {
    /// Rows and columns as the kernels see them: a vector is one row.
    pub(crate) fn rows_and_cols(&self) -> (u64, u64) {
        match self.shape[..] {
            [rows, cols] => (rows, cols),
            // A product beyond 64 bits is too large for any format.
            _ => (1, self.shape.iter().fold(1, |n: u64, &dim| n.saturating_mul(dim))),
        }
    }
}

/// The routed experts as the source stores them.
#[derive(Clone, Debug)]
pub struct SourceExperts {
    /// Gate, up, down.
    pub(crate) matrices: [SourceMatrix; 3],
    /// Layer and number of experts, by ascending layer.
    pub(crate) banks: Vec<(u32, u32)>,
    /// For a checkpoint, per bank and expert: gate, up, down; codes or weights, and scales.
    tensors: Vec<Vec<[[Option<TensorId>; 2]; 3]>>,
}

impl SourceExperts {
    /// Experts of a container, which are found by layer and number.
    pub(crate) fn new(matrices: [SourceMatrix; 3], banks: Vec<(u32, u32)>) -> Self {
        Self { matrices, banks, tensors: Vec::new() }
    }

    /// Those of the layers below some number.
    pub(crate) fn below(mut self, layers: u32) -> Self {
        let n = self.banks.partition_point(|&(layer, _)| layer < layers);
        self.banks.truncate(n);
        self.tensors.truncate(n);
        self
    }

    /// What to call a matrix in messages.
    pub(crate) fn name(&self, bank: usize, expert: u32, matrix: usize) -> String {
        let layer = self.banks[bank].0;
        expert_name(ExpertKey { layer, expert, matrix, scales: false })
    }

    /// Tensors of a checkpoint that all experts together are made of.
    pub(crate) fn n_tensors(&self) -> usize {
        self.tensors.iter().flatten().flatten().flatten().flatten().count()
    }
}

/// One of the three matrices of every expert.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceMatrix {
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    pub(crate) form: Form,
}

impl SourceMatrix {
    /// Bytes that are read for it.
    pub(crate) fn bytes(&self) -> u64 {
        let (rows, cols) = (self.rows as usize, self.cols as usize);
        match self.form {
            Form::Plain(dtype) => self.rows * self.cols * dtype.size(),
            Form::Vq(_) => 4 * self.rows * self.cols,
            Form::Packed(codec) => {
                let layout = kernel_codec(codec).and_then(|codec| codec.layout(rows, cols));
                layout.map_or(0, |layout| (layout.codes + layout.scales) as u64)
            }
        }
    }
}

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Plain(Dtype),
    Packed(container::Codec),
    /// Vector-quantised in the source; what is read from there are f32.
    Vq(Vq),
}

impl Form {
    /// The container's format that holds this as it is, if there is one: f16 becomes f32, which
    /// holds it exactly; plain bytes have no meaning of their own, and nothing has codebooks.
    pub(crate) fn as_published(self) -> Option<container::Codec> {
        let plain = |name| Some(container::Codec::plain(name));
        match self {
            Form::Plain(Dtype::BF16) => plain(CodecName::Bf16),
            Form::Plain(Dtype::F32 | Dtype::F16) => plain(CodecName::F32),
            Form::Plain(Dtype::U8) | Form::Vq(_) => None,
            Form::Packed(codec) => Some(codec),
        }
    }

    /// Whether stored bytes are codes of `codec` already.
    pub(crate) fn is(self, codec: container::Codec) -> bool {
        self != Form::Plain(Dtype::F16) && self.as_published() == Some(codec)
    }

    /// Plain numbers of some rows, which must be exactly these.
    pub(crate) fn decode(
        self,
        rows: usize,
        cols: usize,
        codes: &[u8],
        scales: &[u8],
    ) -> Result<Vec<f32>, LayoutError> {
        match self {
            Form::Vq(_) => Form::Plain(Dtype::F32).decode(rows, cols, codes, scales),
            Form::Plain(dtype) => {
                let expected = rows * cols * dtype.size() as usize;
                if codes.len() != expected {
                    let (format, part, found) = ("plain", "weights", codes.len());
                    return Err(LayoutError::Length { format, part, rows, cols, expected, found });
                }
                Ok(dtype.decode(codes))
            }
            Form::Packed(codec) if codec.name == CodecName::Mxfp4z => {
                // Its rows can be had tile by tile only.
                let packed = Mxfp4zMatrix::new(rows, cols, codes)?;
                let layout = Codec::Mxfp4.layout(rows, cols)?;
                let (mut codes, mut scales) = (vec![0; layout.codes], vec![0; layout.scales]);
                packed.unpack(&mut codes, &mut scales)?;
                MXFP4.decode(rows, cols, &codes, &scales)
            }
            Form::Packed(codec) => {
                let matrix = Matrix::new(kernel_codec(codec)?, rows, cols, codes, scales)?;
                let mut weights = vec![0.0; rows * cols];
                for (r, row) in weights.chunks_exact_mut(cols.max(1)).enumerate() {
                    matrix.decode_row(r, row);
                }
                Ok(weights)
            }
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Form::Plain(dtype) => dtype.fmt(f),
            Form::Packed(codec) => codec.fmt(f),
            Form::Vq(vq) => f.write_str(Codec::Vq(*vq).name()),
        }
    }
}

/// A container's format in the kernels' words.
pub(crate) fn kernel_codec(codec: container::Codec) -> Result<Codec, LayoutError> {
    let container::Codec { name, group, rate, width } = codec;
    Codec::stored(name.as_str(), group as usize, rate as usize, width as usize)
}

impl ConvertSource for Checkpoint {
    fn folder(&self) -> Folder {
        Checkpoint::folder(self).clone()
    }

    fn identity(&self) -> String {
        let mut digest = container::Checksum::default();
        for t in self.iter() {
            let line = format!("{} {} {} {}\n", t.name, t.dtype, t.shape, t.shard);
            digest.update(line.as_bytes());
        }
        container::hex(digest.finish())
    }

    fn check(&self) -> Result<(), FormatError> {
        // A published checkpoint has no checksums.
        Ok(())
    }

    fn files(&self) -> Vec<String> {
        let mut files: Vec<String> = self.shards().map(str::to_owned).collect();
        files.sort();
        files
    }

    fn trunk(&self) -> Vec<SourceTensor> {
        let trunk = self.iter().filter(|tensor| expert_key(tensor.name).is_none());
        let tensor = |t: rill_format::TensorInfo<'_>| SourceTensor {
            name: t.name.to_owned(),
            shape: t.shape.to_vec(),
            form: Form::Plain(t.dtype),
            file: t.shard.to_owned(),
        };
        trunk.map(tensor).collect()
    }

    fn read_rows(
        &self,
        tensor: &SourceTensor,
        first: u64,
        n: u64,
    ) -> Result<StoredBytes, FormatError> {
        let info = self.require(&tensor.name)?;
        let row_bytes = info.bytes / tensor.rows_and_cols().0.max(1);
        let mut bytes = vec![0; (n * row_bytes) as usize];
        self.read_range_into(info.id, first * row_bytes, &mut bytes)?;
        Ok((bytes, Vec::new()))
    }

    fn experts(&self) -> Result<Option<SourceExperts>, ConvertError> {
        let keys = self.iter().filter_map(|t| Some((expert_key(t.name)?, t.id)));
        let tensors: BTreeMap<ExpertKey, TensorId> = keys.collect();
        let Some((&first, _)) = tensors.first_key_value() else { return Ok(None) };
        let mut matrices = Vec::new();
        for matrix in 0..3 {
            let key = ExpertKey { matrix, scales: false, ..first };
            let info = tensors.get(&key).map(|&id| self.info(id)).ok_or_else(|| missing(key))?;
            let [rows, cols] = info.shape[..] else {
                return Err(misfit(&info, "which is not a matrix"));
            };
            matrices.push(match info.dtype {
                // Two codes to a byte.
                Dtype::U8 => SourceMatrix { rows, cols: 2 * cols, form: MXFP4 },
                dtype => SourceMatrix { rows, cols, form: Form::Plain(dtype) },
            });
        }
        let matrices: [SourceMatrix; 3] = matrices.try_into().expect("three were made");
        let mut experts = SourceExperts::new(matrices, Vec::new());
        for (&key, &id) in &tensors {
            if experts.banks.last().is_none_or(|bank| bank.0 != key.layer) {
                experts.banks.push((key.layer, 0));
                experts.tensors.push(Vec::new());
            }
            let bank = experts.tensors.last_mut().expect("just made");
            if key.expert as usize > bank.len() {
                let expert = bank.len() as u32;
                return Err(missing(ExpertKey { expert, matrix: 0, scales: false, ..key }));
            }
            if key.expert as usize == bank.len() {
                bank.push([[None; 2]; 3]);
                experts.banks.last_mut().expect("just made").1 += 1;
            }
            bank[key.expert as usize][key.matrix][usize::from(key.scales)] = Some(id);
            let matrix = &experts.matrices[key.matrix];
            check_expert_tensor(&self.info(id), matrix, key.scales)?;
        }
        for (bank, &(layer, _)) in experts.tensors.iter().zip(&experts.banks) {
            for (expert, parts) in bank.iter().enumerate() {
                for (matrix, [codes, scales]) in parts.iter().enumerate() {
                    let key = |scales| ExpertKey { layer, expert: expert as u32, matrix, scales };
                    if codes.is_none() {
                        return Err(missing(key(false)));
                    }
                    if experts.matrices[matrix].form == MXFP4 && scales.is_none() {
                        return Err(missing(key(true)));
                    }
                }
            }
        }
        Ok(Some(experts))
    }

    fn expert_files(&self, experts: &SourceExperts, bank: usize, expert: u32) -> Vec<&str> {
        let tensors = experts.tensors[bank][expert as usize].iter().flatten().flatten();
        tensors.map(|&id| self.info(id).shard).collect()
    }

    fn read_expert(
        &self,
        experts: &SourceExperts,
        bank: usize,
        expert: u32,
    ) -> Result<[StoredBytes; 3], FormatError> {
        let mut parts = <[StoredBytes; 3]>::default();
        let tensors = experts.tensors[bank][expert as usize];
        for ([codes, scales], part) in tensors.into_iter().zip(&mut parts) {
            part.0 = self.read(codes.expect("checked to be there"))?;
            if let Some(scales) = scales {
                part.1 = self.read(scales)?;
            }
        }
        Ok(parts)
    }
}

pub(crate) const MXFP4: Form = Form::Packed(container::Codec::plain(CodecName::Mxfp4));

/// Every expert must have the types and shapes of the first.
fn check_expert_tensor(
    info: &rill_format::TensorInfo<'_>,
    matrix: &SourceMatrix,
    scales: bool,
) -> Result<(), ConvertError> {
    let (dtype, cols) = match (matrix.form, scales) {
        // One scale for 32 inputs, two codes to a byte.
        (Form::Packed(_), true) => (Dtype::U8, matrix.cols / 32),
        (Form::Packed(_), false) => (Dtype::U8, matrix.cols / 2),
        (Form::Plain(dtype), false) => (dtype, matrix.cols),
        (Form::Vq(_), _) => unreachable!("no checkpoint has codebooks"),
        (Form::Plain(_), true) => return Err(misfit(info, "but the experts have no scales")),
    };
    if info.dtype == dtype && *info.shape == [matrix.rows, cols] {
        return Ok(());
    }
    Err(misfit(info, "which does not go with the other experts"))
}

impl ConvertSource for Container {
    fn folder(&self) -> Folder {
        Container::folder(self)
    }

    fn identity(&self) -> String {
        self.manifest().fingerprint.clone()
    }

    fn check(&self) -> Result<(), FormatError> {
        // Records are checked when they are read.
        self.manifest().trunk.runs.iter().try_for_each(|run| self.verify_run(run))
    }

    fn files(&self) -> Vec<String> {
        // The fingerprint is over all checksums.
        Vec::new()
    }

    fn trunk(&self) -> Vec<SourceTensor> {
        let tensors = self.manifest().trunk.runs.iter().flat_map(|run| &run.tensors);
        let tensor = |t: &container::TrunkTensor| SourceTensor {
            name: t.name.clone(),
            shape: t.shape.clone(),
            form: Form::Packed(t.codec),
            file: self.manifest().trunk.file.clone(),
        };
        tensors.map(tensor).collect()
    }

    fn read_rows(
        &self,
        tensor: &SourceTensor,
        first: u64,
        n: u64,
    ) -> Result<StoredBytes, FormatError> {
        let rows = tensor.rows_and_cols().0.max(1);
        if let Some(codec) = tile_codec(tensor) {
            return read_tiles(self, tensor, codec, first, n);
        }
        let part = |scales: bool, bytes: u64| {
            if !bytes.is_multiple_of(rows) {
                return Err(FormatError::Container {
                    file: self.folder().describe(container::MANIFEST),
                    what: format!("the bytes of tensor {:?}", tensor.name),
                    expected: format!("a multiple of its {rows} rows"),
                    found: bytes.to_string(),
                });
            }
            let row_bytes = bytes / rows;
            let mut out = vec![0; (n * row_bytes) as usize];
            self.read_part(&tensor.name, scales, first * row_bytes, &mut out)?;
            Ok(out)
        };
        let stored = self.find(&tensor.name);
        let (codes, scales) = stored.map_or((0, 0), |t| (t.code_bytes, t.scale_bytes));
        Ok((part(false, codes)?, part(true, scales)?))
    }

    fn experts(&self) -> Result<Option<SourceExperts>, ConvertError> {
        let Some(layout) = self.layout() else { return Ok(None) };
        let matrices = layout.matrices.each_ref().map(|m| SourceMatrix {
            rows: m.rows,
            cols: m.cols,
            form: Form::Packed(m.codec),
        });
        let banks = self.bank_list().iter().map(|bank| (bank.layer, bank.experts)).collect();
        Ok(Some(SourceExperts::new(matrices, banks)))
    }

    fn expert_files(&self, _: &SourceExperts, _: usize, _: u32) -> Vec<&str> {
        Vec::new()
    }

    fn read_expert(
        &self,
        experts: &SourceExperts,
        bank: usize,
        expert: u32,
    ) -> Result<[StoredBytes; 3], FormatError> {
        let mut parts = <[StoredBytes; 3]>::default();
        let layer = experts.banks[bank].0;
        let mut record = vec![0; self.record_bytes(layer, expert)];
        self.read_record(layer, expert, true, &mut record)?;
        let own = self.record_layout(layer, expert, &record)?;
        for (i, part) in parts.iter_mut().enumerate() {
            let (codes, scales) = own.matrix(&record, i);
            *part = (codes.to_vec(), scales.to_vec());
        }
        Ok(parts)
    }
}

/// The format of a tensor that is laid out in tiles of rows.
fn tile_codec(tensor: &SourceTensor) -> Option<Codec> {
    let Form::Packed(codec) = tensor.form else { return None };
    kernel_codec(codec).ok().filter(|codec| codec.tile_rows() > 1)
}

/// Rows of such a tensor, from the start of a tile on: its tiles, and the tables with their part of the rest.
fn read_tiles(
    container: &Container,
    tensor: &SourceTensor,
    codec: Codec,
    first: u64,
    n: u64,
) -> Result<StoredBytes, FormatError> {
    let (rows, tile) = (tensor.rows_and_cols().0, codec.tile_rows() as u64);
    let tables = codec.table_bytes() as u64;
    let stored = Container::find(container, &tensor.name);
    let (codes, scales) = stored.map_or((0, tables), |t| (t.code_bytes, t.scale_bytes));
    let tiles = rows.div_ceil(tile).max(1);
    let sides = scales.checked_sub(tables).filter(|sides| sides.is_multiple_of(tiles));
    let (Some(sides), true, true) =
        (sides, codes.is_multiple_of(tiles), first.is_multiple_of(tile))
    else {
        return Err(FormatError::Container {
            file: container.folder().describe(container::MANIFEST),
            what: format!("the bytes of tensor {:?}", tensor.name),
            expected: format!("those of {tiles} tiles"),
            found: format!("{codes} and {scales} from row {first} on"),
        });
    };
    let (from, to) = (first / tile, (first + n).div_ceil(tile).min(tiles));
    let part = |scales: bool, start: u64, bytes: u64| {
        let mut out = vec![0; bytes as usize];
        container.read_part(&tensor.name, scales, start, &mut out)?;
        Ok(out)
    };
    let of = |all: u64| (from * (all / tiles), (to - from) * (all / tiles));
    let (start, bytes) = of(codes);
    let codes = part(false, start, bytes)?;
    let mut scales = part(true, 0, tables)?;
    let (start, bytes) = of(sides);
    scales.extend(part(true, tables + start, bytes)?);
    Ok((codes, scales))
}

fn misfit(info: &rill_format::TensorInfo<'_>, why: &str) -> ConvertError {
    ConvertError::Tensor {
        tensor: info.name.to_owned(),
        reason: format!(
            "has shape {} of {} in {}, {why}; fetch the checkpoint again",
            info.shape, info.dtype, info.shard
        ),
    }
}

fn missing(key: ExpertKey) -> ConvertError {
    ConvertError::Tensor {
        tensor: expert_name(key),
        reason: "missing; the checkpoint is incomplete, fetch it again".to_owned(),
    }
}

fn expert_name(key: ExpertKey) -> String {
    let matrix = ["w1", "w3", "w2"][key.matrix];
    let scales = if key.scales { ".weight_scale" } else { "" };
    format!("model.layers.{}.block_sparse_moe.experts.{}.{matrix}{scales}", key.layer, key.expert)
}
