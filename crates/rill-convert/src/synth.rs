//! Synthetic containers: records and trunk of a real model's shape, filled with random weights
//! at the speed of the drive, so that streaming can be developed and measured without the model.
//!
//! Activations stay finite and varied, and routing is skewed and sticky as in recorded traces;
//! the words that come out mean nothing. The same seed gives the same bytes on any number of
//! threads. Trunk and router are the same in both formats, bit for bit; experts differ, because
//! the formats do.

mod coded;
mod direct;
mod noise;
mod shapes;
mod trellis;
mod vocabulary;
mod waste;

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rill_format::Dtype;
use rill_format::container::{
    ALIGN, Bank, Checksum, Codec as StoredCodec, CodecName, MANIFEST, Manifest, Matrix as Stored,
    PART_ALIGN, RecordLayout, Run, SmallFile, Stripe, Trunk, TrunkTensor, VERSION, checksum,
    fingerprint, hex,
};
use rill_kernels::{Codec, Matrix};

use crate::config;
use crate::convert::{Control, Progress};
use crate::disk::{OutFile, available_bytes, io_error};
use crate::error::ConvertError;
use crate::place::{Class, GROUP, RunKey, class, run_key, trellis_or_q8};
use crate::plan::{ExpertCodec, TrunkCodec, trellis_codec};
use crate::source::{Form as SourceForm, MXFP4, kernel_codec};
use coded::Coded;
pub use coded::synthetic_mxfp4z;
use direct::{DirectFile, Pages};
use noise::{Noise, key};
use shapes::{Shapes, Values};

/// A published model whose shape is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SynthModel {
    /// Kimi K3.
    KimiK3,
    /// Kimi-Linear-48B-A3B.
    KimiLinear48b,
}

impl SynthModel {
    /// All of them.
    pub const ALL: [SynthModel; 2] = [SynthModel::KimiK3, SynthModel::KimiLinear48b];

    /// Its published `config.json`.
    pub fn config(self) -> &'static [u8] {
        match self {
            SynthModel::KimiK3 => include_bytes!("../../../fixtures/configs/kimi-k3.json"),
            SynthModel::KimiLinear48b => {
                include_bytes!("../../../fixtures/configs/kimi-linear-48b.json")
            }
        }
    }
}

/// Kind of container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SynthFormat {
    /// `.rill`.
    #[default]
    Rill,
    /// `.waste`, version 0, with experts as `VQ3R`.
    Waste,
}

/// What to make of a configuration.
#[derive(Clone, Copy, Debug, Default)]
pub struct SynthOptions {
    /// Only the first layers.
    pub layers: Option<u32>,
    /// Kind of container.
    pub format: SynthFormat,
    /// Format of routed experts in a `.rill` container.
    pub experts: ExpertCodec,
    /// Format of the trunk's matrices. What `.waste` cannot hold packed it holds as f32.
    pub trunk: TrunkCodec,
    /// Other weights for every seed.
    pub seed: u64,
}

/// A synthetic container, planned but not written.
#[derive(Debug)]
pub struct Synth {
    seed: u64,
    config_json: Vec<u8>,
    trunk_file: &'static str,
    regions: Vec<Region>,
    /// Layer and file of each bank.
    banks: Vec<(u32, String)>,
    n_experts: u32,
    form: Form,
    small_files: Vec<(String, Vec<u8>)>,
}

/// What differs between the formats.
#[derive(Debug)]
enum Form {
    Rill { manifest: Box<Manifest>, layout: Box<RecordLayout>, coded: Option<Coded> },
    Waste { manifest: Vec<u8>, record: waste::Record },
}

/// A piece of the trunk's file that is made by one task.
#[derive(Debug)]
struct Region {
    offset: u64,
    bytes: u64,
    parts: Vec<Part>,
}

/// Bytes of a tensor within a region; what is between parts is zero.
#[derive(Clone, Copy, Debug)]
struct Part {
    offset: u64,
    bytes: u64,
    content: Content,
    noise: Noise,
    cols: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Codes,
    Scales,
    /// The weights as f32, whatever codes they come from.
    Plain,
}

impl Synth {
    /// Plans a container of a model with this `config.json`.
    ///
    /// # Errors
    /// When the configuration lacks a number that shapes depend on, has no such layers, or a
    /// shape cannot have the format.
    pub fn new(config: &[u8], options: &SynthOptions) -> Result<Self, ConvertError> {
        let config_json = match options.layers {
            Some(layers) => config::cut(config, layers)?,
            None => config.to_vec(),
        };
        let config = config::parse(&config_json)?;
        let shapes = Shapes::new(&config)?;
        if shapes.moe_layers.is_empty() {
            return Err(ConvertError::Config {
                field: "num_hidden_layers".to_owned(),
                expected: "more than first_k_dense_replace, so that a layer has experts".to_owned(),
                found: shapes.moe_layers.end.to_string(),
            });
        }
        if let (SynthFormat::Waste, TrunkCodec::Trellis { .. }) = (options.format, options.trunk) {
            let reason = "has no trellis form in .waste; choose --trunk source, q8 or q4";
            let (tensor, reason) = ("the trunk".to_owned(), reason.to_owned());
            return Err(ConvertError::Tensor { tensor, reason });
        }
        let runs = trunk_tensors(&shapes, options)?;
        let vocabulary = vocabulary::model(shapes.n_ranks);
        let name_banks = |name: fn(u32) -> String| -> Vec<(u32, String)> {
            shapes.moe_layers.clone().map(|layer| (layer, name(layer))).collect()
        };
        let (regions, banks, small_files, form, trunk_file);
        match options.format {
            SynthFormat::Rill => {
                small_files = vec![
                    ("config.json".to_owned(), config_json.clone()),
                    ("tiktoken.model".to_owned(), vocabulary),
                    ("tokenizer_config.json".to_owned(), vocabulary::config(shapes.n_ranks)),
                ];
                let layout = record_layout(&shapes, options.experts)?;
                let trunk = plan_trunk(&runs)?;
                regions = trunk.1;
                banks = name_banks(|layer| format!("experts-{layer:05}.rill"));
                let mut manifest =
                    Box::new(manifest(&shapes, &layout, trunk.0, &banks, &small_files));
                let mut coded = None;
                if layout.varies() {
                    let made = Coded::new(options.seed, &shapes)?;
                    made.place(&layout, &mut manifest)?;
                    coded = Some(made);
                }
                form = Form::Rill { manifest, layout: Box::new(layout), coded };
                trunk_file = "trunk.rill";
            }
            SynthFormat::Waste => {
                let record = waste::Record::new(&shapes)?;
                let tensors: Vec<_> = runs.into_values().flatten().collect();
                let (planned, list) = waste::trunk(&tensors)?;
                regions = planned;
                banks = name_banks(waste::bank_file);
                small_files = vec![
                    ("tokenizer.model".to_owned(), vocabulary),
                    ("specials.json".to_owned(), vocabulary::specials(shapes.n_ranks)),
                    ("codebooks.bin".to_owned(), waste::codebook_file(options.seed, banks.len())),
                ];
                let manifest = waste::manifest(config, &shapes, &record, list);
                form = Form::Waste { manifest, record };
                trunk_file = "trunk.bin";
            }
        }
        let (seed, n_experts) = (options.seed, shapes.experts.n);
        Ok(Self { seed, config_json, trunk_file, regions, banks, n_experts, form, small_files })
    }

    /// The model's `config.json`, cut to its layers.
    pub fn config_json(&self) -> &[u8] {
        &self.config_json
    }

    /// Bytes of the container, the manifest not counted.
    pub fn container_bytes(&self) -> u64 {
        let small: u64 = self.small_files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        small + self.trunk_bytes() + self.expert_bytes()
    }

    /// Bytes of the trunk.
    pub fn trunk_bytes(&self) -> u64 {
        self.regions.last().map_or(0, |last| last.offset + last.bytes)
    }

    /// Bytes of all routed experts.
    pub fn expert_bytes(&self) -> u64 {
        (0..self.banks.len()).map(|bank| self.bank_bytes(bank)).sum()
    }

    /// Bytes of one expert; where records differ in size, of the largest.
    pub fn record_bytes(&self) -> u64 {
        match &self.form {
            Form::Rill { manifest, .. } => manifest.experts.as_ref().map_or(0, |e| e.record_bytes),
            Form::Waste { record, .. } => record.bytes as u64,
        }
    }

    /// Whether records differ in size.
    pub fn varies(&self) -> bool {
        matches!(&self.form, Form::Rill { layout, .. } if layout.varies())
    }

    fn bank_bytes(&self, bank: usize) -> u64 {
        match &self.form {
            Form::Rill { manifest, .. } => {
                let experts = manifest.experts.as_ref().expect("planned with experts");
                experts.banks[bank].file_bytes().iter().sum()
            }
            Form::Waste { record, .. } => u64::from(self.n_experts) * record.bytes as u64,
        }
    }

    /// Where an expert's record begins in its bank.
    fn record_start(&self, bank: usize, expert: u32) -> u64 {
        let mut records = None;
        if let Form::Rill { manifest, .. } = &self.form {
            records = manifest.experts.as_ref().and_then(|e| e.banks[bank].records.as_ref());
        }
        match records {
            Some(records) => records[expert as usize][0] * ALIGN as u64,
            None => u64::from(expert) * self.record_bytes(),
        }
    }

    /// Routed experts in all.
    pub fn n_experts(&self) -> u64 {
        self.banks.len() as u64 * u64::from(self.n_experts)
    }

    /// Writes the container into `destination`, which is made if need be and must be empty. Peak
    /// memory is an expert's record or 16 MiB for each job.
    ///
    /// # Errors
    /// See [`ConvertError`]. After any of them the folder is no container and cannot be gone on
    /// with: remove it.
    pub fn write(&self, destination: &Path, control: &Control<'_>) -> Result<(), ConvertError> {
        self.write_files(destination, control).map_err(|error| match error {
            ConvertError::Io { file, doing, source } => {
                let folder = destination.display().to_string();
                ConvertError::Synth { folder, file, doing, source }
            }
            error => error,
        })
    }

    fn write_files(&self, folder: &Path, control: &Control<'_>) -> Result<(), ConvertError> {
        self.prepare(folder)?;
        let trunk = DirectFile::open(folder.join(self.trunk_file), self.trunk_bytes())?;
        let bank = |(bank, (_, file)): (usize, &(u32, String))| {
            DirectFile::open(folder.join(file), self.bank_bytes(bank))
        };
        let banks = self.banks.iter().enumerate().map(bank);
        let banks = banks.collect::<Result<Vec<_>, _>>()?;
        let job = Job {
            synth: self,
            trunk,
            banks,
            control,
            done_bytes: Mutex::new(0),
            stop: AtomicBool::new(false),
        };
        let sums = job.run()?;
        self.finish(folder, job, &sums)
    }

    /// Refuses to begin where something is, or what cannot be finished.
    fn prepare(&self, folder: &Path) -> Result<(), ConvertError> {
        fs::create_dir_all(folder).map_err(|e| io_error(folder, "making the folder", e))?;
        let mut entries = fs::read_dir(folder).map_err(|e| io_error(folder, "listing it", e))?;
        if entries.next().is_some() {
            let name = folder.display().to_string();
            return Err(match folder.join(MANIFEST).exists() {
                true => ConvertError::Exists { folder: name },
                false => ConvertError::NotEmpty { folder: name },
            });
        }
        match available_bytes(folder) {
            Some(available_bytes) if available_bytes < self.container_bytes() => {
                Err(ConvertError::NoSpace {
                    folder: folder.display().to_string(),
                    needed_bytes: self.container_bytes(),
                    available_bytes,
                })
            }
            _ => Ok(()),
        }
    }

    fn tasks(&self) -> Vec<Task> {
        let experts = |bank| (0..self.n_experts).map(move |expert| Task::Record { bank, expert });
        let regions = (0..self.regions.len()).map(Task::Region);
        regions.chain((0..self.banks.len()).flat_map(experts)).collect()
    }

    /// Syncs everything and writes the manifest, which makes the folder a container.
    fn finish(&self, folder: &Path, job: Job<'_>, sums: &[u64]) -> Result<(), ConvertError> {
        for (name, bytes) in &self.small_files {
            let out = OutFile::open(folder.join(name), 0)?;
            out.write_at(bytes, 0)?;
            out.sync()?;
        }
        job.trunk.sync()?;
        job.banks.iter().try_for_each(DirectFile::sync)?;
        let bytes = match &self.form {
            Form::Waste { manifest, .. } => manifest.clone(),
            Form::Rill { manifest, .. } => {
                let mut manifest = Manifest::clone(manifest);
                for (run, &sum) in manifest.trunk.runs.iter_mut().zip(sums) {
                    run.checksum = hex(sum);
                }
                let files = self.small_files.iter().map(|(_, bytes)| checksum(bytes));
                manifest.fingerprint = fingerprint(files.chain(sums.iter().copied()));
                manifest.to_bytes()
            }
        };
        let aside = OutFile::open(folder.join("manifest.json.part"), 0)?;
        aside.write_at(&bytes, 0)?;
        aside.move_into_place(&folder.join(MANIFEST))
    }
}

#[derive(Clone, Copy, Debug)]
enum Task {
    Region(usize),
    Record { bank: usize, expert: u32 },
}

/// What the workers share.
struct Job<'a> {
    synth: &'a Synth,
    trunk: DirectFile,
    /// Per bank.
    banks: Vec<DirectFile>,
    control: &'a Control<'a>,
    done_bytes: Mutex<u64>,
    stop: AtomicBool,
}

/// Bytes that are made before they are written together. A multiple of all alignments.
const PIECE_BYTES: usize = 16 << 20;

impl Job<'_> {
    /// Does everything; returns the checksums of the regions, then of the records.
    fn run(&self) -> Result<Vec<u64>, ConvertError> {
        let tasks = self.synth.tasks();
        let next = AtomicUsize::new(0);
        let work = || -> Result<Vec<(usize, u64)>, ConvertError> {
            let mut sums = Vec::new();
            // Parts are overwritten by those of the next, and what is between stays zero.
            let mut record = Pages::new(self.synth.record_bytes() as usize);
            while !self.stop.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(&task) = tasks.get(index) else { break };
                let sum = match task {
                    Task::Region(region) => self.write_region(&self.synth.regions[region]),
                    Task::Record { bank, expert } => self.write_record(bank, expert, record.all()),
                };
                let sum = sum.inspect_err(|_| self.stop.store(true, Ordering::Relaxed))?;
                sums.push((index, sum));
            }
            Ok(sums)
        };
        let parts = std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..self.control.jobs.max(1)).map(|_| scope.spawn(work)).collect();
            let results = workers.into_iter().map(|w| w.join().expect("workers do not panic"));
            results.collect::<Result<Vec<_>, _>>()
        })?;
        let mut sums = vec![0; tasks.len()];
        parts.into_iter().flatten().for_each(|(index, sum)| sums[index] = sum);
        Ok(sums)
    }

    fn write_region(&self, region: &Region) -> Result<u64, ConvertError> {
        let mut out = RegionWriter {
            job: self,
            at: region.offset,
            piece: Pages::new(PIECE_BYTES),
            filled: 0,
            sum: Checksum::default(),
        };
        let mut end = 0;
        for part in &region.parts {
            out.add(part.offset - end, |_, _| {})?;
            out.add(part.bytes, |start, bytes| part.fill(start, bytes))?;
            end = part.offset + part.bytes;
        }
        out.add(region.bytes - end, |_, _| {})?;
        out.flush()?;
        Ok(out.sum.finish())
    }

    fn write_record(
        &self,
        bank: usize,
        expert: u32,
        record: &mut [u8],
    ) -> Result<u64, ConvertError> {
        let (layer, seed) = (self.synth.banks[bank].0, self.synth.seed);
        let mut record = record;
        let sum = match &self.synth.form {
            Form::Waste { record: layout, .. } => {
                layout.fill(seed, layer, bank, expert, record);
                0
            }
            Form::Rill { layout, coded: Some(coded), .. } => {
                let (own, parts) = coded.expert(layout, layer, expert)?;
                record = &mut record[..own.record_bytes];
                record.fill(0);
                for (matrix, part) in parts.iter().enumerate() {
                    own.matrix_mut(record, matrix).0.copy_from_slice(part);
                }
                own.seal(record, layer, expert);
                own.check(record, layer, expert, false)
                    .expect("a record that was just sealed is right")
            }
            Form::Rill { layout, .. } => {
                for (matrix, stored) in layout.matrices.iter().enumerate() {
                    let place = (layer, expert, matrix);
                    let codec = kernel_codec(stored.codec).expect("planned before");
                    let noise = expert_noise(seed, codec, place, (stored.rows, stored.cols));
                    let (codes, scales) = layout.matrix_mut(record, matrix);
                    noise.codes(0, codes);
                    noise.scales(0, scales);
                }
                layout.seal(record, layer, expert);
                layout
                    .check(record, layer, expert, false)
                    .expect("a record that was just sealed is right")
            }
        };
        self.banks[bank].write_at(record, self.synth.record_start(bank, expert))?;
        self.done(record.len() as u64)?;
        Ok(sum)
    }

    fn done(&self, bytes: u64) -> Result<(), ConvertError> {
        let done_bytes = {
            let mut done = self.done_bytes.lock().expect("no worker panicked");
            *done += bytes;
            *done
        };
        let total_bytes = self.synth.container_bytes();
        let progress = Progress { done_bytes, resumed_bytes: 0, total_bytes, layer: None };
        match (self.control.progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ConvertError::Cancelled),
        }
    }
}

/// Writes a region in order, piece by piece, and sums it up.
struct RegionWriter<'a> {
    job: &'a Job<'a>,
    /// Where the piece goes in the file.
    at: u64,
    piece: Pages,
    filled: usize,
    sum: Checksum,
}

impl RegionWriter<'_> {
    /// Adds bytes that `fill` makes of zeros, given the first one's number.
    fn add(&mut self, bytes: u64, fill: impl Fn(u64, &mut [u8])) -> Result<(), ConvertError> {
        let mut made = 0;
        while made < bytes {
            let n = (bytes - made).min((PIECE_BYTES - self.filled) as u64);
            let place = &mut self.piece.all()[self.filled..self.filled + n as usize];
            place.fill(0);
            fill(made, place);
            made += n;
            self.filled += n as usize;
            if self.filled == PIECE_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), ConvertError> {
        let piece = &self.piece.all()[..self.filled];
        self.job.trunk.write_at(piece, self.at)?;
        self.sum.update(piece);
        let n = piece.len() as u64;
        self.at += n;
        self.filled = 0;
        self.job.done(n)
    }
}

impl Part {
    fn fill(&self, start: u64, out: &mut [u8]) {
        match self.content {
            Content::Codes => self.noise.codes(start, out),
            Content::Scales => self.noise.scales(start, out),
            Content::Plain => self.fill_plain(start, out),
        }
    }

    /// Rows as f32, those that `out` covers from byte `start` of all.
    fn fill_plain(&self, start: u64, out: &mut [u8]) {
        let layout = self.noise.codec.layout(1, self.cols).expect("planned before");
        let (mut codes, mut scales) = (vec![0; layout.codes], vec![0; layout.scales]);
        let mut row = vec![0.0; self.cols];
        let row_bytes = 4 * self.cols as u64;
        let mut made = 0;
        while made < out.len() {
            let at = start + made as u64;
            let number = at / row_bytes;
            self.noise.codes(number * layout.codes as u64, &mut codes);
            self.noise.scales(number * layout.scales as u64, &mut scales);
            let matrix = Matrix::new(self.noise.codec, 1, self.cols, &codes, &scales);
            matrix.expect("noise is valid in its format").decode_row(0, &mut row);
            // Pieces begin and end between numbers.
            let weights = &row[(at % row_bytes) as usize / 4..];
            let places = out[made..].chunks_exact_mut(4);
            places.zip(weights).for_each(|(place, w)| place.copy_from_slice(&w.to_le_bytes()));
            made += (4 * weights.len()).min(out.len() - made);
        }
    }
}

/// A tensor as a matrix: what is not one is a single row.
fn rows_and_cols(shape: &[u64]) -> (u64, u64) {
    match shape {
        [rows, cols] => (*rows, *cols),
        shape => (1, shape.iter().product()),
    }
}

/// Name, shape, numbers.
type Named = (String, Vec<u64>, Noise);

/// The trunk's tensors by run and name, each with the numbers that it gets.
fn trunk_tensors(
    shapes: &Shapes,
    options: &SynthOptions,
) -> Result<BTreeMap<RunKey, Vec<Named>>, ConvertError> {
    let mut runs: BTreeMap<RunKey, Vec<Named>> = BTreeMap::new();
    for tensor in &shapes.trunk {
        let group = GROUP as usize;
        let codec = match (class(&tensor.name, &tensor.shape), options.trunk, tensor.dtype) {
            (Class::Matrix, TrunkCodec::Q4, _) => Codec::Q4 { group },
            (Class::Matrix, TrunkCodec::Q8, _)
            | (
                Class::Ends | Class::Vision,
                TrunkCodec::Q8 | TrunkCodec::Q4 | TrunkCodec::Trellis { .. },
                _,
            ) => Codec::Q8 { group },
            (Class::Matrix, TrunkCodec::Trellis { rate }, _) => {
                let codec = kernel_codec(trellis_or_q8(&tensor.name, tensor.shape[1], rate));
                codec.map_err(|source| ConvertError::Layout {
                    tensor: tensor.name.clone(),
                    source,
                })?
            }
            (_, _, Dtype::F32) => Codec::F32,
            _ => Codec::Bf16,
        };
        let key = key(options.seed, &[checksum(tensor.name.as_bytes())]);
        let rows = tensor.shape[0] as usize;
        let fan_in = tensor.shape[1..].iter().product::<u64>() as usize;
        let noise = Noise { codec, key, values: tensor.values, rows, fan_in };
        let named = (tensor.name.clone(), tensor.shape.clone(), noise);
        runs.entry(run_key(&tensor.name)).or_default().push(named);
    }
    runs.values_mut().for_each(|run| run.sort_by(|a, b| a.0.cmp(&b.0)));
    Ok(runs)
}

/// The trunk of a `.rill` container: its manifest entry and the bytes to make.
fn plan_trunk(runs: &BTreeMap<RunKey, Vec<Named>>) -> Result<(Trunk, Vec<Region>), ConvertError> {
    let mut trunk =
        Trunk { directory: 0, file: "trunk.rill".to_owned(), bytes: 0, runs: Vec::new() };
    let mut regions = Vec::new();
    for (key, run) in runs {
        let (mut end, mut tensors, mut parts) = (0u64, Vec::new(), Vec::new());
        for (name, shape, noise) in run {
            let (rows, cols) = rows_and_cols(shape);
            let (rows, cols) = (rows as usize, cols as usize);
            let layout = noise.codec.layout(rows, cols);
            let layout =
                layout.map_err(|source| ConvertError::Layout { tensor: name.clone(), source })?;
            let tensor = TrunkTensor {
                name: name.clone(),
                shape: shape.clone(),
                codec: stored_codec(noise.codec),
                offset: end.next_multiple_of(PART_ALIGN as u64),
                code_bytes: layout.codes as u64,
                scale_bytes: layout.scales as u64,
            };
            let places = [
                (tensor.offset, tensor.code_bytes, Content::Codes),
                (tensor.scale_offset(), tensor.scale_bytes, Content::Scales),
            ];
            for (offset, bytes, content) in places.into_iter().filter(|place| place.1 > 0) {
                parts.push(Part { offset, bytes, content, noise: *noise, cols });
                end = offset + bytes;
            }
            tensors.push(tensor);
        }
        let bytes = end.next_multiple_of(ALIGN as u64);
        let (offset, checksum) = (trunk.bytes, String::new());
        trunk.runs.push(Run { name: key.name(), offset, bytes, checksum, tensors });
        trunk.bytes += bytes;
        regions.push(Region { offset, bytes, parts });
    }
    Ok((trunk, regions))
}

/// Rows and columns of an expert's gate, up and down.
fn matrix_shapes(experts: &shapes::Experts) -> [(u64, u64); 3] {
    let (inter, width) = (experts.inter, experts.width);
    [(inter, width), (inter, width), (width, inter)]
}

fn record_layout(shapes: &Shapes, option: ExpertCodec) -> Result<RecordLayout, ConvertError> {
    let group = GROUP as usize;
    let tensor = || "the experts".to_owned();
    let layout_error = |source| ConvertError::Layout { tensor: tensor(), source };
    let codec = match option {
        ExpertCodec::F32 => Codec::F32,
        ExpertCodec::Q8 => Codec::Q8 { group },
        ExpertCodec::Q4 => Codec::Q4 { group },
        ExpertCodec::Trellis { rate } => {
            let published = match shapes.experts.mxfp4 {
                true => MXFP4,
                false => SourceForm::Plain(Dtype::BF16),
            };
            kernel_codec(trellis_codec(published, rate, tensor)?).map_err(layout_error)?
        }
        // Random weights have no loss to choose by: they are made as without any.
        ExpertCodec::Mxfp4z | ExpertCodec::Mxfp4zThinned { .. } => Codec::Mxfp4z,
        ExpertCodec::Source if shapes.experts.mxfp4 => Codec::Mxfp4,
        ExpertCodec::Source => Codec::Bf16,
    };
    let matrix = |(rows, cols): (u64, u64)| -> Result<Stored, ConvertError> {
        let layout = codec.layout(rows as usize, cols as usize);
        let layout = layout.map_err(layout_error)?;
        let (code_bytes, scale_bytes) = (layout.codes as u64, layout.scales as u64);
        Ok(Stored { rows, cols, codec: stored_codec(codec), code_bytes, scale_bytes })
    };
    let [gate, up, down] = matrix_shapes(&shapes.experts);
    RecordLayout::new([matrix(gate)?, matrix(up)?, matrix(down)?]).ok_or_else(|| {
        let reason = "a record is larger than can be addressed".to_owned();
        ConvertError::Tensor { tensor: tensor(), reason }
    })
}

/// The manifest, its checksums still empty.
fn manifest(
    shapes: &Shapes,
    layout: &RecordLayout,
    trunk: Trunk,
    banks: &[(u32, String)],
    small_files: &[(String, Vec<u8>)],
) -> Manifest {
    let record_bytes = layout.record_bytes as u64;
    let bank = |(layer, file): &(u32, String)| {
        let stripes = vec![Stripe { directory: 0, file: file.clone(), bytes: record_bytes }];
        Bank { layer: *layer, experts: shapes.experts.n, records: None, stripes }
    };
    let file = |(name, bytes): &(String, Vec<u8>)| SmallFile {
        name: name.clone(),
        bytes: bytes.len() as u64,
        checksum: hex(checksum(bytes)),
    };
    let [gate, up, down] = layout.matrices.clone();
    let banks = banks.iter().map(bank).collect();
    Manifest {
        format: "rill".to_owned(),
        version: VERSION,
        fingerprint: String::new(),
        directories: vec![".".to_owned()],
        files: small_files.iter().map(file).collect(),
        trunk,
        experts: Some(rill_format::container::Experts { gate, up, down, record_bytes, banks }),
        checksum: String::new(),
    }
}

/// A kernels' format as a container names it.
fn stored_codec(codec: Codec) -> StoredCodec {
    match codec {
        Codec::F32 => StoredCodec::plain(CodecName::F32),
        Codec::Bf16 => StoredCodec::plain(CodecName::Bf16),
        Codec::Q8 { .. } => StoredCodec::grouped(CodecName::Q8, GROUP),
        Codec::Q4 { .. } => StoredCodec::grouped(CodecName::Q4, GROUP),
        Codec::Trellis(trellis) => {
            let (rate, width) = (trellis.rate() as u32, trellis.width() as u32);
            match trellis.is_rotated() {
                true => StoredCodec::rotated(rate, width),
                false => StoredCodec::trellis(rate, width),
            }
        }
        Codec::Mxfp4z => StoredCodec::plain(CodecName::Mxfp4z),
        // Only `.waste` has the second, which is not asked for here.
        Codec::Mxfp4 | Codec::Vq(_) => StoredCodec::plain(CodecName::Mxfp4),
    }
}

/// The weights of one matrix of an expert: of `(layer, expert, matrix)`.
fn expert_noise(
    seed: u64,
    codec: Codec,
    place: (u32, u32, usize),
    (rows, cols): (u64, u64),
) -> Noise {
    let (layer, expert, matrix) = place;
    let key = key(seed, &[layer.into(), expert.into(), matrix as u64]);
    let gain = if matrix == 2 { shapes::EXPERT_DOWN } else { 1.0 };
    let values = Values::Matrix(gain);
    Noise { codec, key, values, rows: rows as usize, fan_in: cols as usize }
}
