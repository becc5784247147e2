//! What a conversion will write, decided from headers alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rill_format::container::{
    ALIGN, Bank, Codec, CodecName, Experts, MANIFEST, Manifest, Matrix, PART_ALIGN, RecordLayout,
    Run, SmallFile, Stripe, Trunk, TrunkTensor, checksum, hex,
};
use rill_format::{Checkpoint, Dtype, TensorId};
use rill_kernels::Codec as KernelCodec;
use serde::{Deserialize, Serialize};

use crate::error::ConvertError;
use crate::place::{ExpertKey, GROUP, RunKey, expert_key, run_key, trunk_codec};

/// Format of routed experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertCodec {
    /// As published, bit for bit.
    #[default]
    Source,
    /// Bytes with f16 scales.
    Q8,
    /// Four bits with f16 scales.
    Q4,
}

/// Format of the trunk's matrices; `place.rs` has the whole table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrunkCodec {
    /// As published, bit for bit.
    #[default]
    Source,
    /// Bytes with f16 scales.
    Q8,
    /// Four bits with f16 scales; embedding, head and vision at eight.
    Q4,
}

/// Files of the release that go along unchanged, where they exist.
const SMALL_FILES: [&str; 6] = [
    "config.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "chat_template.jinja",
];
const MAX_SMALL_BYTES: u64 = 256 << 20;

/// A conversion, decided but not begun.
#[derive(Debug)]
pub struct Plan {
    pub(crate) experts: ExpertCodec,
    pub(crate) trunk: TrunkCodec,
    /// The manifest, its checksums still empty.
    pub(crate) manifest: Manifest,
    pub(crate) layout: Option<RecordLayout>,
    /// Contents of the small files, in the manifest's order.
    pub(crate) small_files: Vec<Vec<u8>>,
    /// Source of each tensor of each run, in the manifest's order.
    pub(crate) run_sources: Vec<Vec<TensorId>>,
    /// Per bank and expert: gate, up, down; codes (or plain weights), scales.
    pub(crate) expert_sources: Vec<Vec<[[Option<TensorId>; 2]; 3]>>,
    /// Identifies source and options, so that only the same conversion is resumed.
    pub(crate) identity: String,
}

impl Plan {
    /// Plans the conversion of a checkpoint.
    ///
    /// # Errors
    /// When tensors are missing, of unequal shape across experts, or cannot have the format.
    pub fn new(
        checkpoint: &Checkpoint,
        experts: ExpertCodec,
        trunk: TrunkCodec,
    ) -> Result<Self, ConvertError> {
        let mut runs: BTreeMap<RunKey, Vec<TensorId>> = BTreeMap::new();
        let mut expert_tensors: BTreeMap<ExpertKey, TensorId> = BTreeMap::new();
        for tensor in checkpoint.iter() {
            match expert_key(tensor.name) {
                None => runs.entry(run_key(tensor.name)).or_default().push(tensor.id),
                Some(key) => {
                    expert_tensors.insert(key, tensor.id);
                }
            }
        }
        let (trunk_section, run_sources) = plan_trunk(checkpoint, trunk, runs)?;
        let (expert_section, layout, expert_sources) =
            plan_experts(checkpoint, experts, &expert_tensors)?;
        let mut files = Vec::new();
        let mut small_files = Vec::new();
        for name in SMALL_FILES.into_iter().filter(|name| checkpoint.folder().exists(name)) {
            let bytes = checkpoint.folder().read(name, MAX_SMALL_BYTES)?;
            files.push(SmallFile {
                name: name.to_owned(),
                bytes: bytes.len() as u64,
                checksum: hex(checksum(&bytes)),
            });
            small_files.push(bytes);
        }
        let manifest = Manifest {
            format: "rill".to_owned(),
            version: 0,
            fingerprint: String::new(),
            directories: vec![".".to_owned()],
            files,
            trunk: trunk_section,
            experts: expert_section,
            checksum: String::new(),
        };
        let identity = identity(checkpoint, &manifest);
        Ok(Self {
            experts,
            trunk,
            manifest,
            layout,
            small_files,
            run_sources,
            expert_sources,
            identity,
        })
    }

    /// Spreads every record over further folders, each with a share of it in proportion to the
    /// container's own folder, which counts 1. Shares are rounded to whole multiples of 16 KiB.
    ///
    /// # Errors
    /// When a folder's path is not Unicode, or a share is not a positive number.
    pub fn spread(mut self, folders: &[(PathBuf, f64)]) -> Result<Self, ConvertError> {
        if folders.is_empty() {
            return Ok(self);
        }
        let refuse = |folder: &Path, reason: &str| ConvertError::Placement {
            folder: folder.display().to_string(),
            reason: reason.to_owned(),
        };
        for (folder, share) in folders {
            if !(share.is_finite() && *share > 0.0) {
                return Err(refuse(folder, "its share must be a positive number"));
            }
            // The manifest must find it from anywhere.
            let absolute = std::path::absolute(folder);
            let absolute = absolute.map_err(|_| refuse(folder, "its path cannot be resolved"))?;
            let Some(path) = absolute.to_str() else {
                return Err(refuse(folder, "its path is not Unicode, which the manifest needs"));
            };
            if self.manifest.directories.iter().any(|known| known == path) {
                return Err(refuse(folder, "it is named twice"));
            }
            self.manifest.directories.push(path.to_owned());
        }
        if let Some(experts) = &mut self.manifest.experts {
            let shares: Vec<f64> = [1.0].into_iter().chain(folders.iter().map(|f| f.1)).collect();
            let units = divide(experts.record_bytes / ALIGN as u64, &shares);
            for bank in &mut experts.banks {
                let file = bank.stripes[0].file.clone();
                let stripe = |(directory, &units): (usize, &u64)| Stripe {
                    directory,
                    file: file.clone(),
                    bytes: units * ALIGN as u64,
                };
                let stripes = units.iter().enumerate().map(stripe);
                bank.stripes = stripes.filter(|stripe| stripe.bytes > 0).collect();
            }
        }
        let placed = serde_json::to_string(&self.manifest).expect("plain data serialises");
        self.identity = hex(checksum(format!("{} {placed}", self.identity).as_bytes()));
        Ok(self)
    }

    /// Bytes that go into each of the manifest's directories, the manifest not counted.
    pub(crate) fn bytes_per_directory(&self) -> Vec<u64> {
        let mut bytes = vec![0; self.manifest.directories.len()];
        bytes[0] += self.container_bytes() - self.expert_bytes();
        for bank in self.banks() {
            for stripe in &bank.stripes {
                bytes[stripe.directory] += stripe.bytes * u64::from(bank.experts);
            }
        }
        bytes
    }

    /// Bytes of the container, the manifest not counted.
    pub fn container_bytes(&self) -> u64 {
        let small: u64 = self.manifest.files.iter().map(|file| file.bytes).sum();
        small + self.manifest.trunk.bytes + self.expert_bytes()
    }

    /// Bytes of the trunk.
    pub fn trunk_bytes(&self) -> u64 {
        self.manifest.trunk.bytes
    }

    /// Bytes of all routed experts.
    pub fn expert_bytes(&self) -> u64 {
        let record_bytes = self.layout.as_ref().map_or(0, |layout| layout.record_bytes as u64);
        record_bytes * self.n_experts()
    }

    /// Bytes of one expert.
    pub fn record_bytes(&self) -> u64 {
        self.layout.as_ref().map_or(0, |layout| layout.record_bytes as u64)
    }

    /// Routed experts in all.
    pub fn n_experts(&self) -> u64 {
        self.banks().iter().map(|bank| u64::from(bank.experts)).sum()
    }

    pub(crate) fn banks(&self) -> &[Bank] {
        self.manifest.experts.as_ref().map_or(&[], |experts| &experts.banks)
    }
}

/// A container's format in the kernels' words.
pub(crate) fn kernel_codec(codec: Codec) -> KernelCodec {
    KernelCodec::parse(codec.name.as_str(), codec.group as usize)
        .expect("kernels know every format")
}

/// Divides whole units by shares: rounded down, the rest to whom most is owed.
fn divide(units: u64, shares: &[f64]) -> Vec<u64> {
    let total: f64 = shares.iter().sum();
    let exact: Vec<f64> = shares.iter().map(|share| units as f64 * share / total).collect();
    let mut parts: Vec<u64> = exact.iter().map(|&part| part as u64).collect();
    while parts.iter().sum::<u64>() < units {
        let owed = |i: &usize| exact[*i] - parts[*i] as f64;
        let most = (0..parts.len()).max_by(|a, b| owed(a).total_cmp(&owed(b)).then(b.cmp(a)));
        parts[most.expect("there is at least one share")] += 1;
    }
    parts
}

/// Rows and columns of a tensor as the kernels see it: a vector is one row.
pub(crate) fn rows_and_cols(shape: &[u64]) -> (u64, u64) {
    match shape {
        [rows, cols] => (*rows, *cols),
        shape => (1, shape.iter().product()),
    }
}

fn plan_trunk(
    checkpoint: &Checkpoint,
    option: TrunkCodec,
    runs: BTreeMap<RunKey, Vec<TensorId>>,
) -> Result<(Trunk, Vec<Vec<TensorId>>), ConvertError> {
    let mut trunk =
        Trunk { directory: 0, file: "trunk.rill".to_owned(), bytes: 0, runs: Vec::new() };
    let mut sources = Vec::new();
    for (key, mut ids) in runs {
        // By name, so that the order does not depend on how the source is cut into shards.
        ids.sort_by_key(|&id| checkpoint.info(id).name);
        let mut end = 0u64;
        let mut tensors = Vec::new();
        for &id in &ids {
            let info = checkpoint.info(id);
            let codec = trunk_codec(&info, option)?;
            let (rows, cols) = rows_and_cols(&info.shape);
            let layout = kernel_codec(codec).layout(rows as usize, cols as usize);
            let layout = layout
                .map_err(|source| ConvertError::Layout { tensor: info.name.to_owned(), source })?;
            let tensor = TrunkTensor {
                name: info.name.to_owned(),
                shape: info.shape.to_vec(),
                codec,
                offset: end.next_multiple_of(PART_ALIGN as u64),
                code_bytes: layout.codes as u64,
                scale_bytes: layout.scales as u64,
            };
            end = match tensor.scale_bytes {
                0 => tensor.offset + tensor.code_bytes,
                n => tensor.scale_offset() + n,
            };
            tensors.push(tensor);
        }
        let bytes = end.next_multiple_of(ALIGN as u64);
        trunk.runs.push(Run {
            name: key.name(),
            offset: trunk.bytes,
            bytes,
            checksum: String::new(),
            tensors,
        });
        trunk.bytes += bytes;
        sources.push(ids);
    }
    Ok((trunk, sources))
}

type ExpertSources = Vec<Vec<[[Option<TensorId>; 2]; 3]>>;

fn plan_experts(
    checkpoint: &Checkpoint,
    option: ExpertCodec,
    tensors: &BTreeMap<ExpertKey, TensorId>,
) -> Result<(Option<Experts>, Option<RecordLayout>, ExpertSources), ConvertError> {
    let Some((&first, _)) = tensors.first_key_value() else {
        return Ok((None, None, Vec::new()));
    };
    // Every expert must have the matrices of the first.
    let find = |key: ExpertKey| tensors.get(&key).map(|&id| checkpoint.info(id));
    let mut matrices = Vec::new();
    for matrix in 0..3 {
        let codes = find(ExpertKey { matrix, scales: false, ..first });
        let codes = codes.ok_or_else(|| missing(first, matrix))?;
        let packed = codes.dtype == Dtype::U8;
        let (rows, mut cols) = rows_and_cols(&codes.shape);
        if packed {
            cols *= 2;
        }
        let grouped = |name| Codec { name, group: GROUP };
        let codec = match (option, codes.dtype) {
            (ExpertCodec::Source, Dtype::U8) => Codec { name: CodecName::Mxfp4, group: 0 },
            (ExpertCodec::Source, Dtype::BF16) => Codec { name: CodecName::Bf16, group: 0 },
            (ExpertCodec::Source, _) => Codec { name: CodecName::F32, group: 0 },
            (ExpertCodec::Q8, _) => grouped(CodecName::Q8),
            (ExpertCodec::Q4, _) => grouped(CodecName::Q4),
        };
        let layout = kernel_codec(codec).layout(rows as usize, cols as usize);
        let layout = layout
            .map_err(|source| ConvertError::Layout { tensor: codes.name.to_owned(), source })?;
        matrices.push(Matrix {
            rows,
            cols,
            codec,
            code_bytes: layout.codes as u64,
            scale_bytes: layout.scales as u64,
        });
    }
    let matrices: [Matrix; 3] = matrices.try_into().expect("three were made");
    let layout = RecordLayout::new(matrices.clone()).ok_or_else(|| ConvertError::Tensor {
        tensor: expert_name(first),
        reason: "its record is larger than can be addressed".to_owned(),
    })?;

    let mut banks: Vec<Bank> = Vec::new();
    let mut sources: ExpertSources = Vec::new();
    for (&key, &id) in tensors {
        if banks.last().is_none_or(|bank| bank.layer != key.layer) {
            banks.push(Bank {
                layer: key.layer,
                experts: 0,
                stripes: vec![Stripe {
                    directory: 0,
                    file: format!("experts-{:05}.rill", key.layer),
                    bytes: layout.record_bytes as u64,
                }],
            });
            sources.push(Vec::new());
        }
        let (bank, experts) =
            (banks.last_mut().expect("just made"), sources.last_mut().expect("just made"));
        if key.expert as usize > experts.len() {
            return Err(missing(ExpertKey { expert: experts.len() as u32, ..key }, 0));
        }
        if key.expert as usize == experts.len() {
            experts.push([[None; 2]; 3]);
            bank.experts += 1;
        }
        experts[key.expert as usize][key.matrix][usize::from(key.scales)] = Some(id);
        check_shape(checkpoint, key, id, &matrices[key.matrix], first, tensors)?;
    }
    for (bank, experts) in banks.iter().zip(&sources) {
        for (expert, parts) in experts.iter().enumerate() {
            for (matrix, [codes, scales]) in parts.iter().enumerate() {
                let packed = codes.is_some_and(|id| checkpoint.info(id).dtype == Dtype::U8);
                if codes.is_none() || (packed && scales.is_none()) {
                    let key = ExpertKey {
                        layer: bank.layer,
                        expert: expert as u32,
                        matrix,
                        scales: codes.is_some(),
                    };
                    return Err(missing(key, matrix));
                }
            }
        }
    }
    let [gate, up, down] = matrices;
    let record_bytes = layout.record_bytes as u64;
    Ok((Some(Experts { gate, up, down, record_bytes, banks }), Some(layout), sources))
}

/// Every expert must have the type and shape of the first.
fn check_shape(
    checkpoint: &Checkpoint,
    key: ExpertKey,
    id: TensorId,
    matrix: &Matrix,
    first: ExpertKey,
    tensors: &BTreeMap<ExpertKey, TensorId>,
) -> Result<(), ConvertError> {
    let info = checkpoint.info(id);
    let model = tensors.get(&ExpertKey { matrix: key.matrix, scales: key.scales, ..first });
    let model = model.map(|&id| checkpoint.info(id));
    let same = model.is_some_and(|m| m.dtype == info.dtype && m.shape == info.shape);
    // Scales are one byte for 32 inputs.
    let fits =
        !key.scales || (info.dtype == Dtype::U8 && *info.shape == [matrix.rows, matrix.cols / 32]);
    if same && fits {
        return Ok(());
    }
    Err(ConvertError::Tensor {
        tensor: info.name.to_owned(),
        reason: format!(
            "has shape {} of {} in {}, which does not go with the other experts; fetch the \
             checkpoint again",
            info.shape, info.dtype, info.shard
        ),
    })
}

fn missing(key: ExpertKey, matrix: usize) -> ConvertError {
    ConvertError::Tensor {
        tensor: expert_name(ExpertKey { matrix, ..key }),
        reason: "missing; the checkpoint is incomplete, fetch it again".to_owned(),
    }
}

fn expert_name(key: ExpertKey) -> String {
    let matrix = ["w1", "w3", "w2"][key.matrix];
    format!(
        "model.layers.{}.block_sparse_moe.experts.{}.{matrix}{}",
        key.layer,
        key.expert,
        if key.scales { ".weight_scale" } else { "" }
    )
}

/// A digest of everything in the source's headers and of what will be made of it.
fn identity(checkpoint: &Checkpoint, manifest: &Manifest) -> String {
    let mut digest = rill_format::container::Checksum::default();
    for tensor in checkpoint.iter() {
        digest.update(
            format!("{} {} {} {}\n", tensor.name, tensor.dtype, tensor.shape, tensor.shard)
                .as_bytes(),
        );
    }
    let manifest = serde_json::to_string(manifest).expect("plain data serialises");
    digest.update(manifest.as_bytes());
    debug_assert_ne!(MANIFEST, "");
    hex(digest.finish())
}
