//! Where a model's weights come from: a published checkpoint, a `.rill` container or a `.waste`
//! one. The engine sees names, shapes, formats and bytes, whatever the folder holds.

use std::fmt;
use std::sync::Arc;

use rill_format::container::{self, Container};
use rill_format::{
    Checkpoint, DataExtent, DataFile, Dtype, Folder, FormatError, Waste, WasteFormat,
};
use rill_kernels::{Codec, LayoutError};

use crate::config::{ExpertFormat, ModelConfig};
use crate::describe::StoredExperts;
use crate::error::Error;
use crate::experts::{self, ExpertRecords};
use crate::plan::{self, Footprint};

/// Opens whatever model a folder holds, without loading weights.
pub(crate) fn open(folder: Folder) -> Result<Arc<dyn WeightSource>, Error> {
    match container(&folder)? {
        Some(container) => Ok(container),
        None => Ok(Arc::new(Checkpoint::open(folder)?)),
    }
}

/// Opens the container in a folder, or `None` if there is none.
pub(crate) fn container(folder: &Folder) -> Result<Option<Arc<dyn WeightSource>>, Error> {
    let Folder::Disk(path) = folder else { return Ok(None) };
    Ok(if Container::is_container(path) {
        Some(Arc::new(Container::open(path.clone())?))
    } else if Waste::is_waste(path) {
        Some(Arc::new(Waste::open(path.clone())?))
    } else {
        None
    })
}

/// A model on disk.
pub(crate) trait WeightSource: Send + Sync + fmt::Debug {
    /// What kind of model folder it is.
    fn kind(&self) -> &'static str;

    /// The folder, for messages.
    fn folder(&self) -> String;

    /// A small file of the release, or `None` if there is none.
    fn small_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>, FormatError>;

    /// A tensor by its published name. Routed experts may be missing here.
    fn find(&self, name: &str) -> Option<Stored>;

    /// The file that holds a tensor, for messages.
    fn place(&self, name: &str) -> String;

    /// Names of all tensors that [`find`](Self::find) knows.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_>;

    /// Checks the bytes of what belongs to no layer, for folders that have checksums: the embedding
    /// is read row by row, and a wrong byte must not become a wrong token. Returns a checksum of each
    /// of these parts of it, taken of the bytes that were checked; `None` without checksums.
    fn verify_globals(&self, parts: &[DataExtent]) -> Result<Vec<Option<u64>>, FormatError> {
        Ok(vec![None; parts.len()])
    }

    /// Codes and scales of a tensor.
    fn read(&self, name: &str) -> Result<(Vec<u8>, Vec<u8>), FormatError>;

    /// One row of a tensor, as plain numbers.
    fn read_row(&self, name: &str, row: u64) -> Result<Vec<f32>, Error>;

    /// Names the weights, for folders that have such a name.
    fn fingerprint(&self) -> Option<String> {
        None
    }

    /// How the routed experts are stored, and in how many files everything is.
    fn stored_experts(&self, config: &ModelConfig) -> Result<StoredExperts, Error>;

    /// What its way of storing things takes, of headers that were checked.
    fn footprint(&self, config: &ModelConfig) -> Footprint;

    /// Checks the routed experts from headers alone.
    fn check_experts(&self, config: &ModelConfig, findings: &mut Findings);

    /// The routed experts, which [`check_experts`](Self::check_experts) has accepted.
    fn experts(self: Arc<Self>, config: &ModelConfig) -> Arc<dyn ExpertRecords>;

    /// The files that hold weights, to which extents refer.
    fn data_files(&self) -> Vec<DataFile>;

    /// Where a tensor's codes and scales lie, if they lie there as [`read`](Self::read) delivers
    /// them.
    fn extents(&self, name: &str) -> Option<[DataExtent; 2]>;

    /// Where all of a layer's trunk lies, for folders that read and check it as a whole.
    fn run(&self, _layer: usize) -> Option<DataExtent> {
        None
    }

    /// Checks the bytes of such a run.
    fn check_run(&self, _layer: usize, _bytes: &[u8]) -> Result<(), FormatError> {
        Ok(())
    }
}

/// A tensor as stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored {
    pub(crate) form: Form,
    pub(crate) shape: rill_format::Shape,
}

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// In a format that kernels multiply.
    Codec(Codec),
    /// Plain f16.
    F16,
    /// Bytes without a meaning of their own.
    U8,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Form::Codec(Codec::F32) => "F32",
            Form::Codec(Codec::Bf16) => "BF16",
            Form::Codec(codec) => codec.name(),
            Form::F16 => "F16",
            Form::U8 => "U8",
        })
    }
}

/// What a check has found: problems, and the tensors that were asked for.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// The first [`Error::MAX_PROBLEMS`].
    problems: Vec<String>,
    n_problems: usize,
    /// Tensors that were found, whatever was wrong with them: their names' keyed hashes, because
    /// half a million names are a lot to keep.
    asked: std::collections::HashSet<u64>,
    hasher: std::hash::RandomState,
}

impl Findings {
    /// Problems after which no more experts are looked for. A small file can ask for 400 million
    /// tensors; no model has half a million.
    const MAX_COUNTED: usize = 1 << 20;

    pub(crate) fn problem(&mut self, problem: String) {
        self.n_problems += 1;
        if self.problems.len() < Error::MAX_PROBLEMS {
            self.problems.push(problem);
        }
    }

    /// Whether there are so many problems that more would tell nobody anything.
    pub(crate) fn enough(&self) -> bool {
        self.n_problems > Self::MAX_COUNTED
    }

    /// Looks a tensor up and checks it; what is wrong goes on the list.
    pub(crate) fn tensor(
        &mut self,
        source: &(impl WeightSource + ?Sized),
        name: &str,
        forms: Forms,
        shapes: &[&[usize]],
    ) -> Option<Stored> {
        let Some(stored) = source.find(name) else {
            self.problem(format!("{name}: missing"));
            return None;
        };
        self.asked.insert(self.hash(name));
        if !forms.accept(stored.form) {
            self.problem(format!(
                "{name} in {}: stored as {}, expected {}",
                source.place(name),
                stored.form,
                forms.describe()
            ));
            return None;
        }
        let fits = |shape: &&[usize]| {
            shape.len() == stored.shape.len()
                && shape.iter().zip(stored.shape.iter()).all(|(&a, &b)| a as u64 == b)
        };
        if !shapes.iter().any(fits) {
            let expected: Vec<String> = shapes.iter().map(|s| format!("{s:?}")).collect();
            self.problem(format!(
                "{name} in {}: has shape {}, expected {}",
                source.place(name),
                stored.shape,
                expected.join(" or ")
            ));
            return None;
        }
        Some(stored)
    }

    /// Complains of the text model's tensors that nothing has asked for.
    pub(crate) fn leftovers(&mut self, source: &dyn WeightSource, prefix: &str) {
        for name in source.names() {
            let is_text = name
                .strip_prefix(prefix)
                .is_some_and(|name| name.starts_with("model.") || name.starts_with("lm_head."));
            if is_text && !self.asked.contains(&self.hash(name)) {
                let place = source.place(name);
                self.problem(format!("{name} in {place}: config.json has no place for it"));
            }
        }
    }

    /// The number of tensors that were found, or everything that is wrong.
    pub(crate) fn finish(mut self, folder: String) -> Result<usize, Error> {
        if self.n_problems == 0 {
            return Ok(self.asked.len());
        }
        let rest = self.n_problems - self.problems.len();
        if rest > 0 {
            let at_least = if self.enough() { "at least " } else { "" };
            self.problems.push(format!("… and {at_least}{rest} more"));
        }
        Err(Error::Binding { folder, problems: self.problems })
    }

    fn hash(&self, name: &str) -> u64 {
        std::hash::BuildHasher::hash_one(&self.hasher, name)
    }
}

/// Which formats a tensor may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forms {
    /// A small tensor that becomes plain numbers.
    Vector,
    /// A matrix that kernels multiply.
    Matrix,
    /// bf16 alone.
    Bf16,
    /// Bytes that a packed expert is made of.
    Bytes,
}

impl Forms {
    fn accept(self, form: Form) -> bool {
        match self {
            Forms::Vector => {
                matches!(form, Form::Codec(Codec::F32 | Codec::Bf16) | Form::F16)
            }
            Forms::Matrix => matches!(form, Form::Codec(_)),
            Forms::Bf16 => form == Form::Codec(Codec::Bf16),
            Forms::Bytes => form == Form::U8,
        }
    }

    fn describe(self) -> &'static str {
        match self {
            Forms::Vector => "BF16 or F32 or F16",
            Forms::Matrix => "BF16 or F32",
            Forms::Bf16 => "BF16",
            Forms::Bytes => "U8",
        }
    }
}

/// Plain numbers of a small tensor, exactly; `None` for formats that have none.
pub(crate) fn to_f32(form: Form, codes: &[u8]) -> Option<Vec<f32>> {
    let dtype = match form {
        Form::Codec(Codec::F32) => Dtype::F32,
        Form::Codec(Codec::Bf16) => Dtype::BF16,
        Form::F16 => Dtype::F16,
        _ => return None,
    };
    Some(dtype.decode(codes))
}

impl WeightSource for Checkpoint {
    fn kind(&self) -> &'static str {
        "published checkpoint"
    }

    fn folder(&self) -> String {
        Checkpoint::folder(self).describe("")
    }

    fn small_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>, FormatError> {
        small_file(Checkpoint::folder(self), name, max_bytes)
    }

    fn find(&self, name: &str) -> Option<Stored> {
        let info = Checkpoint::find(self, name)?;
        let form = match info.dtype {
            Dtype::F32 => Form::Codec(Codec::F32),
            Dtype::BF16 => Form::Codec(Codec::Bf16),
            Dtype::F16 => Form::F16,
            Dtype::U8 => Form::U8,
        };
        Some(Stored { form, shape: info.shape })
    }

    fn place(&self, name: &str) -> String {
        Checkpoint::find(self, name).map_or_else(String::new, |info| info.shard.to_owned())
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.iter().map(|info| info.name))
    }

    fn read(&self, name: &str) -> Result<(Vec<u8>, Vec<u8>), FormatError> {
        Ok((Checkpoint::read(self, self.require(name)?.id)?, Vec::new()))
    }

    fn read_row(&self, name: &str, row: u64) -> Result<Vec<f32>, Error> {
        let info = self.require(name)?;
        let cols = info.shape.last().copied().unwrap_or(1);
        let mut bytes = vec![0; (cols * info.dtype.size()) as usize];
        self.read_range_into(info.id, row * bytes.len() as u64, &mut bytes)?;
        let form = WeightSource::find(self, name).map_or(Form::U8, |stored| stored.form);
        decode_row(name, form, cols as usize, &bytes, &[])
    }

    fn stored_experts(&self, config: &ModelConfig) -> Result<StoredExperts, Error> {
        let mut stored = StoredExperts { files: self.shards().count(), ..Default::default() };
        let format = match config.moe.expert_format {
            ExpertFormat::Bf16 => "bf16",
            ExpertFormat::Mxfp4 => "mxfp4",
        };
        for info in self.iter().filter(|t| t.name.contains(".block_sparse_moe.experts.")) {
            let elements = info.bytes / info.dtype.size();
            let weights = match info.name {
                name if name.ends_with(".weight_packed") => 2 * elements,
                name if name.ends_with(".weight_scale") => 0,
                _ => elements,
            };
            stored.add(format, weights, info.bytes);
            stored.expert_file_bytes += info.bytes;
        }
        Ok(stored)
    }

    fn footprint(&self, config: &ModelConfig) -> Footprint {
        let (tensors, bytes) = self.iter().fold((0, 0), |(n, sum), t| (n + 1, sum + t.bytes));
        let record_bytes = plan::checkpoint_record_bytes(config);
        Footprint {
            record_bytes,
            mean_record_bytes: record_bytes,
            run_bytes: Vec::new(),
            index_bytes: tensors * plan::INDEX_BYTES_PER_TENSOR,
            disk_bytes: bytes,
        }
    }

    fn check_experts(&self, config: &ModelConfig, findings: &mut Findings) {
        experts::check_checkpoint(self, config, findings);
    }

    fn experts(self: Arc<Self>, config: &ModelConfig) -> Arc<dyn ExpertRecords> {
        Arc::new(experts::CheckpointExperts::new(self, config))
    }

    fn data_files(&self) -> Vec<DataFile> {
        Checkpoint::data_files(self)
    }

    fn extents(&self, name: &str) -> Option<[DataExtent; 2]> {
        let codes = self.extent(Checkpoint::find(self, name)?.id);
        Some([codes, DataExtent { bytes: 0, ..codes }])
    }
}

impl WeightSource for Container {
    fn kind(&self) -> &'static str {
        ".rill container"
    }

    fn folder(&self) -> String {
        Container::folder(self).describe("")
    }

    fn small_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>, FormatError> {
        small_file(&Container::folder(self), name, max_bytes)
    }

    fn find(&self, name: &str) -> Option<Stored> {
        let tensor = Container::find(self, name)?;
        let shape = rill_format::Shape::new(&tensor.shape)?;
        Some(Stored { form: Form::Codec(codec(tensor.codec).ok()?), shape })
    }

    fn place(&self, _name: &str) -> String {
        self.manifest().trunk.file.clone()
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        let tensors = self.manifest().trunk.runs.iter().flat_map(|run| &run.tensors);
        Box::new(tensors.map(|tensor| tensor.name.as_str()))
    }

    fn verify_globals(&self, parts: &[DataExtent]) -> Result<Vec<Option<u64>>, FormatError> {
        let mut sums = vec![None; parts.len()];
        let runs = self.manifest().trunk.runs.iter();
        // Layers are checked when they are read; the vision tower is not used.
        for run in runs.filter(|run| run.name == "global") {
            let end = run.offset + run.bytes;
            let of_run = |p: &DataExtent| p.offset >= run.offset && p.offset + p.bytes <= end;
            let (which, within): (Vec<usize>, Vec<_>) = (0..)
                .zip(parts)
                .filter(|(_, part)| of_run(part))
                .map(|(i, part)| (i, part.offset - run.offset))
                .map(|(i, start)| (i, start..start + parts[i].bytes))
                .unzip();
            for (i, sum) in which.into_iter().zip(self.verify_run_parts(run, &within)?) {
                sums[i] = Some(sum);
            }
        }
        Ok(sums)
    }

    fn read(&self, name: &str) -> Result<(Vec<u8>, Vec<u8>), FormatError> {
        self.read_tensor(name)
    }

    fn read_row(&self, name: &str, row: u64) -> Result<Vec<f32>, Error> {
        let missing = || missing(name, WeightSource::folder(self));
        let stored = WeightSource::find(self, name).ok_or_else(missing)?;
        let tensor = Container::find(self, name).ok_or_else(missing)?;
        let (rows, cols) = (stored.shape[0], stored.shape.last().copied().unwrap_or(1));
        let mut codes = vec![0; (tensor.code_bytes / rows.max(1)) as usize];
        let mut scales = vec![0; (tensor.scale_bytes / rows.max(1)) as usize];
        self.read_part(name, false, row * codes.len() as u64, &mut codes)?;
        self.read_part(name, true, row * scales.len() as u64, &mut scales)?;
        decode_row(name, stored.form, cols as usize, &codes, &scales)
    }

    fn fingerprint(&self) -> Option<String> {
        Some(self.manifest().fingerprint.clone())
    }

    fn stored_experts(&self, _config: &ModelConfig) -> Result<StoredExperts, Error> {
        let mut stored = StoredExperts {
            trunk_file_bytes: Some(self.manifest().trunk.bytes),
            files: 1 + self.bank_list().iter().map(|bank| bank.stripes.len()).sum::<usize>(),
            ..Default::default()
        };
        let Some(layout) = self.layout() else { return Ok(stored) };
        let n = n_records(self);
        stored.expert_file_bytes = expert_file_bytes(self);
        // Only a record itself knows how much of it is padding.
        let mut known = vec![layout.clone()];
        if layout.varies() {
            let places = self
                .bank_list()
                .iter()
                .flat_map(|bank| (0..bank.experts).map(move |expert| (bank.layer, expert)));
            let step = n.div_ceil(HEADERS).max(1);
            known = places
                .step_by(step as usize)
                .map(|(layer, expert)| self.read_layout(layer, expert))
                .collect::<Result<_, _>>()?;
            stored.headers_read = (step > 1).then_some(known.len() as u64);
        }
        for (i, m) in layout.matrices.iter().enumerate() {
            let of_matrix = known.iter().map(|own| &own.matrices[i]);
            let bytes: u64 = of_matrix.map(|m| m.code_bytes + m.scale_bytes).sum();
            let all = u128::from(bytes) * u128::from(n) / known.len().max(1) as u128;
            stored.add(m.codec.name.as_str(), n * m.rows * m.cols, all as u64);
        }
        Ok(stored)
    }

    fn footprint(&self, config: &ModelConfig) -> Footprint {
        let run = |layer| layer_run(self, layer).map_or(0, |run| run.bytes);
        let small: u64 = self.manifest().files.iter().map(|file| file.bytes).sum();
        let experts = expert_file_bytes(self);
        // A place and a size of each record, and where its parts begin.
        let records =
            self.bank_list().iter().filter_map(|bank| Some((bank, bank.records.as_ref()?)));
        let index_bytes =
            records.map(|(bank, r)| (r.len() * (16 + 8 * bank.stripes.len())) as u64).sum();
        Footprint {
            record_bytes: self.layout().map_or(0, |layout| layout.record_bytes as u64),
            mean_record_bytes: experts.div_ceil(n_records(self).max(1)),
            run_bytes: (0..config.layers.len()).map(run).collect(),
            index_bytes,
            disk_bytes: self.manifest().trunk.bytes + experts + small,
        }
    }

    fn check_experts(&self, config: &ModelConfig, findings: &mut Findings) {
        experts::check_container(self, config, findings);
    }

    fn experts(self: Arc<Self>, _config: &ModelConfig) -> Arc<dyn ExpertRecords> {
        Arc::new(experts::ContainerExperts::new(self))
    }

    fn data_files(&self) -> Vec<DataFile> {
        Container::data_files(self)
    }

    fn extents(&self, name: &str) -> Option<[DataExtent; 2]> {
        self.tensor_extents(name)
    }

    fn run(&self, layer: usize) -> Option<DataExtent> {
        let run = layer_run(self, layer)?;
        Some(DataExtent { file: 0, offset: run.offset, bytes: run.bytes })
    }

    fn check_run(&self, layer: usize, bytes: &[u8]) -> Result<(), FormatError> {
        layer_run(self, layer).map_or(Ok(()), |run| Container::check_run(self, run, bytes))
    }
}

impl WeightSource for Waste {
    fn kind(&self) -> &'static str {
        ".waste container, version 0"
    }

    fn folder(&self) -> String {
        Waste::folder(self).describe("")
    }

    fn small_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>, FormatError> {
        Ok(match name {
            "config.json" => Some(self.config_json()),
            "tiktoken.model" => Some(self.tokenizer_model()?),
            "tokenizer_config.json" => Some(self.tokenizer_config_json()?),
            // The container keeps no generation settings of its own.
            _ => return small_file(Waste::folder(self), name, max_bytes),
        })
    }

    fn find(&self, name: &str) -> Option<Stored> {
        let tensor = Waste::find(self, name)?;
        let group = tensor.group as usize;
        let codec = match tensor.format {
            WasteFormat::F32 => Codec::F32,
            // Three-bit codes are read as bytes, exactly.
            WasteFormat::Q8 | WasteFormat::Q3 => Codec::Q8 { group },
            WasteFormat::Q4 => Codec::Q4 { group },
        };
        let shape = rill_format::Shape::new(&tensor.shape)?;
        Some(Stored { form: Form::Codec(codec), shape })
    }

    fn place(&self, _name: &str) -> String {
        "trunk.bin".to_owned()
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.trunk().map(|tensor| tensor.name.as_str()))
    }

    fn read(&self, name: &str) -> Result<(Vec<u8>, Vec<u8>), FormatError> {
        let tensor = Waste::find(self, name);
        let tensor = tensor.ok_or_else(|| missing(name, WeightSource::folder(self)))?;
        let data = self.read_trunk(tensor)?;
        Ok((data.codes, data.scales))
    }

    fn read_row(&self, name: &str, row: u64) -> Result<Vec<f32>, Error> {
        let tensor = Waste::find(self, name);
        let tensor = tensor.ok_or_else(|| missing(name, WeightSource::folder(self)))?;
        let data = self.read_trunk_rows(tensor, row, 1)?;
        let cols = tensor.shape.last().copied().unwrap_or(1) as usize;
        let form = WeightSource::find(self, name).map_or(Form::U8, |stored| stored.form);
        decode_row(name, form, cols, &data.codes, &data.scales)
    }

    fn stored_experts(&self, config: &ModelConfig) -> Result<StoredExperts, Error> {
        Ok(experts::stored_in_waste(self, config))
    }

    fn footprint(&self, _config: &ModelConfig) -> Footprint {
        let record = self.layers().values().map(|bank| bank.record_bytes).max();
        let format = self.expert_format();
        // Entries of eight weights as f32; the engine keeps its own copy beside the container's.
        let tables = (3 * self.layers().len() * format.stages * format.entries * 8 * 4) as u64;
        let record_bytes = plan::widened(record.unwrap_or(0));
        Footprint {
            record_bytes,
            mean_record_bytes: record_bytes,
            run_bytes: Vec::new(),
            index_bytes: 2 * tables,
            disk_bytes: self.payload_bytes(),
        }
    }

    fn check_experts(&self, config: &ModelConfig, findings: &mut Findings) {
        experts::check_waste(self, config, findings);
    }

    fn experts(self: Arc<Self>, config: &ModelConfig) -> Arc<dyn ExpertRecords> {
        Arc::new(experts::WasteRecords::new(self, config))
    }

    fn data_files(&self) -> Vec<DataFile> {
        Waste::data_files(self)
    }

    fn extents(&self, name: &str) -> Option<[DataExtent; 2]> {
        self.tensor_extents(Waste::find(self, name)?)
    }
}

/// Tells models apart: a container's fingerprint, or a digest of all names, formats and shapes.
pub(crate) fn identity(source: &dyn WeightSource) -> String {
    source.fingerprint().unwrap_or_else(|| {
        // A sum, because names come in any order.
        let digest = source.names().fold(0u64, |sum, name| {
            let stored = source.find(name);
            let shape = stored.map(|stored| format!("{:?} {}", stored.form, stored.shape));
            let mut line = container::Checksum::default();
            line.update(format!("{name} {}", shape.unwrap_or_default()).as_bytes());
            sum.wrapping_add(line.finish())
        });
        container::hex(digest)
    })
}

/// A container's format in the kernels' words.
pub(crate) fn codec(codec: container::Codec) -> Result<Codec, LayoutError> {
    let container::Codec { name, group, rate, width } = codec;
    Codec::stored(name.as_str(), group as usize, rate as usize, width as usize)
}

/// Headers that are read at most to know how large the parts of records are: some tenths of a second.
const HEADERS: u64 = 1024;

fn n_records(container: &Container) -> u64 {
    container.bank_list().iter().map(|bank| u64::from(bank.experts)).sum()
}

/// Padding and headers included.
fn expert_file_bytes(container: &Container) -> u64 {
    container.bank_list().iter().flat_map(|bank| bank.file_bytes()).sum()
}

/// The run that holds a layer.
fn layer_run(container: &Container, layer: usize) -> Option<&container::Run> {
    let name = format!("layer {layer}");
    container.manifest().trunk.runs.iter().find(|run| run.name == name)
}

fn missing(name: &str, folder: String) -> FormatError {
    FormatError::MissingTensor { tensor: name.to_owned(), folder, tensors: 0 }
}

fn small_file(folder: &Folder, name: &str, max: u64) -> Result<Option<Vec<u8>>, FormatError> {
    if folder.exists(name) { folder.read(name, max).map(Some) } else { Ok(None) }
}

fn decode_row(
    name: &str,
    form: Form,
    cols: usize,
    codes: &[u8],
    scales: &[u8],
) -> Result<Vec<f32>, Error> {
    if let Some(row) = to_f32(form, codes) {
        return Ok(row);
    }
    let Form::Codec(codec) = form else {
        unreachable!("the binder refused a tensor of bytes");
    };
    let row = rill_kernels::Matrix::new(codec, 1, cols, codes, scales);
    let row = row.map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
    let mut out = vec![0.0; cols];
    row.decode_row(0, &mut out);
    Ok(out)
}
