//! What a conversion will write, decided from headers alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rill_format::container::{
    ALIGN, Bank, Codec, CodecName, Experts, Manifest, Matrix, PART_ALIGN, RecordLayout, Run,
    SmallFile, Stripe, TRUNK, Trunk, TrunkTensor, VERSION, checksum, fingerprint, hex,
};
use rill_kernels::{Layout, LayoutError};
use serde::{Deserialize, Serialize};

use crate::convert::PIECE_BYTES;
use crate::error::ConvertError;
use crate::place::{GROUP, RunKey, run_key, trunk_codec};
use crate::source::{
    ConvertSource, Form, MXFP4, SourceExperts, SourceMatrix, SourceTensor, kernel_codec,
};

/// Bits of a trellis window that count in what is converted: one more doubles the time that packing takes
/// and takes about 1 % off the error.
pub const TRELLIS_WIDTH: u32 = 12;

/// Format of routed experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertCodec {
    /// As published, bit for bit.
    #[default]
    Source,
    /// Plain numbers, for comparing with: what any other format decodes to, as it is.
    F32,
    /// Bytes with f16 scales.
    Q8,
    /// Four bits with f16 scales.
    Q4,
    /// Windows into a stream of `rate` bits per 8 weights: 16 to 28 and 0.14 bits a weight of side information for
    /// weights in MXFP4, 16 to 32 for others, which are rotated.
    Trellis {
        /// Bits per 8 weights.
        rate: u8,
    },
    /// MXFP4 without loss in fewer bytes; the source must have MXFP4.
    Mxfp4z,
    /// The same with a little loss in fewer bytes still: some blocks of weights get coarser.
    Mxfp4zThinned {
        /// Hundredths of bits that a weight shall take; from about 362 on nothing of K3's weights is lost.
        hundredths: u16,
    },
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
    /// Windows into a stream of `rate` bits per 8 weights, 16 to 32, in a rotated basis; embedding, head and
    /// vision at eight.
    Trellis {
        /// Bits per 8 weights.
        rate: u8,
    },
}

/// Files of the release that go along unchanged, where they exist.
pub(crate) const SMALL_FILES: [&str; 6] = [
    "config.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "chat_template.jinja",
];
pub(crate) const MAX_SMALL_BYTES: u64 = 256 << 20;

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
    pub(crate) run_sources: Vec<Vec<SourceTensor>>,
    /// Where the routed experts come from.
    pub(crate) expert_sources: Option<SourceExperts>,
    /// Identifies source and options, so that only the same conversion is resumed.
    pub(crate) identity: String,
}

impl Plan {
    /// Plans the conversion of a checkpoint or of another container.
    ///
    /// # Errors
    /// When tensors are missing, of unequal shape across experts, or cannot have the format.
    pub fn new(
        source: &dyn ConvertSource,
        experts: ExpertCodec,
        trunk: TrunkCodec,
    ) -> Result<Self, ConvertError> {
        let (trunk_section, run_sources) = plan_trunk(source.trunk(), trunk)?;
        let expert_sources = source.experts()?;
        let planned = expert_sources.as_ref().map(|s| plan_experts(s, experts)).transpose()?;
        let (expert_section, layout) = planned.unzip();
        let mut files = Vec::new();
        let mut small_files = Vec::new();
        for name in SMALL_FILES {
            let Some(bytes) = source.small_file(name, MAX_SMALL_BYTES)? else { continue };
            files.push(SmallFile {
                name: name.to_owned(),
                bytes: bytes.len() as u64,
                checksum: hex(checksum(&bytes)),
            });
            small_files.push(bytes);
        }
        let manifest = Manifest {
            format: "rill".to_owned(),
            version: VERSION,
            fingerprint: String::new(),
            directories: vec![".".to_owned()],
            files,
            trunk: trunk_section,
            experts: expert_section,
            checksum: String::new(),
        };
        let planned = serde_json::to_string(&manifest).expect("plain data serialises");
        let identity = hex(checksum(format!("{} {planned}", source.identity()).as_bytes()));
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

    /// Bytes that go into each of the manifest's directories.
    pub(crate) fn bytes_per_directory(&self) -> Vec<u64> {
        let mut bytes = vec![0; self.manifest.directories.len()];
        bytes[0] += self.container_bytes() - self.expert_bytes() + self.manifest_bytes();
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

    /// The most bytes that a job holds at a time while the plan is carried out: an expert as the
    /// source has it, its record, and one of its matrices as plain numbers and packed; or pieces of a
    /// tensor of the trunk, and all of its scales.
    pub fn job_bytes(&self) -> u64 {
        let scales = self.manifest.trunk.runs.iter().flat_map(|run| &run.tensors);
        let scales = scales.map(|tensor| tensor.scale_bytes).max().unwrap_or(0);
        // As stored, as plain numbers and packed. A row is never divided.
        let rows = self.run_sources.iter().flatten().map(|tensor| 4 * tensor.rows_and_cols().1);
        let piece = rows.max().unwrap_or(0).max(PIECE_BYTES);
        // A vector of scales that grows has twice its size for a moment.
        let trunk = 3 * piece + 3 * scales;
        let (Some(layout), Some(source)) = (&self.layout, &self.expert_sources) else {
            return trunk;
        };
        let stored: u64 = source.matrices.iter().map(SourceMatrix::bytes).sum();
        let packed = layout.matrices.iter().zip(&source.matrices).map(|(matrix, source)| {
            match source.form.is(matrix.codec) {
                true => 0,
                // A vector that grows has three times its bytes for a moment.
                false if matrix.codec.name.varies() => 3 * matrix.code_bytes,
                false => 4 * matrix.rows * matrix.cols + matrix.code_bytes + matrix.scale_bytes,
            }
        });
        trunk.max(stored + self.record_bytes() + packed.max().unwrap_or(0))
    }

    /// Bytes of the manifest.
    pub fn manifest_bytes(&self) -> u64 {
        let mut manifest = self.manifest.clone();
        manifest.fingerprint = fingerprint([]);
        manifest.trunk.runs.iter_mut().for_each(|run| run.checksum = hex(0));
        if let (Some(experts), true) = (&mut manifest.experts, self.varies()) {
            for bank in &mut experts.banks {
                // As many digits as the largest have.
                let end = u64::from(bank.experts) * experts.record_bytes / ALIGN as u64;
                bank.records = Some(vec![[end, end]; bank.experts as usize]);
            }
        }
        manifest.to_bytes().len() as u64
    }

    /// Tensors of a checkpoint that the plan reads.
    pub(crate) fn n_source_tensors(&self) -> usize {
        let experts = self.expert_sources.as_ref().map_or(0, SourceExperts::n_tensors);
        self.run_sources.iter().map(Vec::len).sum::<usize>() + experts
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

    /// Bytes of one expert; where records differ in size, at most.
    pub fn record_bytes(&self) -> u64 {
        self.layout.as_ref().map_or(0, |layout| layout.record_bytes as u64)
    }

    /// Whether sizes are the most that records can take, because they differ and are not known before.
    pub fn is_upper_bound(&self) -> bool {
        self.layout.as_ref().is_some_and(RecordLayout::varies)
    }

    /// Routed experts in all.
    pub fn n_experts(&self) -> u64 {
        self.banks().iter().map(|bank| u64::from(bank.experts)).sum()
    }

    /// Whether records differ in size, so that sizes of experts and container are what they are at most.
    pub fn varies(&self) -> bool {
        self.layout.as_ref().is_some_and(RecordLayout::varies)
    }

    pub(crate) fn banks(&self) -> &[Bank] {
        self.manifest.experts.as_ref().map_or(&[], |experts| &experts.banks)
    }
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

/// Most weights of a tensor of the trunk and of an expert's matrix that make sense; with these, the
/// largest container that a manifest can describe still has a size below 2^64 bytes.
const MAX_TENSOR_WEIGHTS: u64 = 1 << 40;
const MAX_EXPERT_WEIGHTS: u64 = 1 << 32;

/// Bytes of a matrix, which a container that lies may say is of any shape.
fn layout(
    codec: Codec,
    (rows, cols): (u64, u64),
    max_weights: u64,
    tensor: &str,
) -> Result<Layout, ConvertError> {
    let layout_error = |source| ConvertError::Layout { tensor: tensor.to_owned(), source };
    let (n, m) = (rows as usize, cols as usize);
    if rows.max(1).checked_mul(cols.max(1)).is_none_or(|weights| weights > max_weights) {
        return Err(layout_error(LayoutError::TooLarge { rows: n, cols: m }));
    }
    kernel_codec(codec).and_then(|codec| codec.layout(n, m)).map_err(layout_error)
}

fn plan_trunk(
    tensors: Vec<SourceTensor>,
    option: TrunkCodec,
) -> Result<(Trunk, Vec<Vec<SourceTensor>>), ConvertError> {
    let mut runs: BTreeMap<RunKey, Vec<SourceTensor>> = BTreeMap::new();
    for tensor in tensors {
        runs.entry(run_key(&tensor.name)).or_default().push(tensor);
    }
    let mut trunk = Trunk { directory: 0, file: TRUNK.to_owned(), bytes: 0, runs: Vec::new() };
    let mut sources = Vec::new();
    for (key, mut run) in runs {
        // By name, so that the order does not depend on how the source is cut into files.
        run.sort_by(|a, b| a.name.cmp(&b.name));
        let mut end = 0u64;
        let mut tensors = Vec::new();
        for source in &run {
            let codec = trunk_codec(source, option)?;
            let (rows, cols) = source.rows_and_cols();
            let layout = layout(codec, (rows, cols), MAX_TENSOR_WEIGHTS, &source.name)?;
            let tensor = TrunkTensor {
                name: source.name.clone(),
                shape: source.shape.clone(),
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
        sources.push(run);
    }
    Ok((trunk, sources))
}

/// The trellis format for an expert's matrix: the native profile for MXFP4, the rotated one for others.
pub(crate) fn trellis_codec(
    form: Form,
    rate: u8,
    name: impl Fn() -> String,
) -> Result<Codec, ConvertError> {
    let [native, rotated] = [Codec::trellis, Codec::rotated].map(|f| f(rate.into(), TRELLIS_WIDTH));
    let refused = |why: &str| {
        let reason = format!("is stored as {form}, {why}");
        Err(ConvertError::Tensor { tensor: name(), reason })
    };
    match form {
        _ if form.is(native) => Ok(native),
        _ if form.is(rotated) => Ok(rotated),
        Form::Packed(Codec { name: CodecName::Mxfp4 | CodecName::Mxfp4z, .. }) => match rate {
            ..=28 => Ok(native),
            _ => {
                refused("of which a trellis keeps 2 to 3.5 bits; choose fewer, or --experts source")
            }
        },
        Form::Packed(Codec { name: CodecName::Trellis | CodecName::Rotated, .. }) => refused(
            "and a trellis of a trellis would add up the errors of both; choose --experts source",
        ),
        _ => Ok(rotated),
    }
}

fn plan_experts(
    source: &SourceExperts,
    option: ExpertCodec,
) -> Result<(Experts, RecordLayout), ConvertError> {
    let mut matrices = Vec::new();
    for (index, matrix) in source.matrices.iter().enumerate() {
        let name = || source.name(0, 0, index);
        let codec = match option {
            ExpertCodec::Source => {
                matrix.form.as_published().ok_or_else(|| ConvertError::Tensor {
                    tensor: name(),
                    reason: format!(
                        "is stored as {}, which a .rill container cannot hold as it is; choose \
                         --experts q8, or q4 for half of the bytes",
                        matrix.form
                    ),
                })?
            }
            ExpertCodec::F32 => Codec::plain(CodecName::F32),
            ExpertCodec::Q8 => Codec::grouped(CodecName::Q8, GROUP),
            ExpertCodec::Q4 => Codec::grouped(CodecName::Q4, GROUP),
            ExpertCodec::Trellis { rate } => trellis_codec(matrix.form, rate, name)?,
            ExpertCodec::Mxfp4z | ExpertCodec::Mxfp4zThinned { .. } => {
                let codec = Codec::plain(CodecName::Mxfp4z);
                if matrix.form != MXFP4 && !matrix.form.is(codec) {
                    return Err(ConvertError::Tensor {
                        tensor: name(),
                        reason: format!(
                            "is stored as {}, and only mxfp4 experts, which K3 is published with, become \
                             mxfp4z; choose --experts source",
                            matrix.form
                        ),
                    });
                }
                codec
            }
        };
        let shape = (matrix.rows, matrix.cols);
        let layout = layout(codec, shape, MAX_EXPERT_WEIGHTS, &name())?;
        matrices.push(Matrix {
            rows: matrix.rows,
            cols: matrix.cols,
            codec,
            code_bytes: layout.codes as u64,
            scale_bytes: layout.scales as u64,
        });
    }
    let matrices: [Matrix; 3] = matrices.try_into().expect("three were made");
    let layout = RecordLayout::new(matrices.clone()).ok_or_else(|| ConvertError::Tensor {
        tensor: source.name(0, 0, 0),
        reason: "its record is larger than can be addressed".to_owned(),
    })?;
    let record_bytes = layout.record_bytes as u64;
    let bank = |&(layer, experts): &(u32, u32)| Bank {
        layer,
        experts,
        records: None,
        stripes: vec![Stripe {
            directory: 0,
            file: format!("experts-{layer:05}.rill"),
            bytes: record_bytes,
        }],
    };
    let banks = source.banks.iter().map(bank).collect();
    let [gate, up, down] = matrices;
    Ok((Experts { gate, up, down, record_bytes, banks }, layout))
}
