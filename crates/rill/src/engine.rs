//! A loaded model and its forward pass.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rill_format::{Checkpoint, Folder, FormatError};
use rill_kernels::{Kernels, LatentFormat, NoSuchKernels, Pool};
use rill_stream::machine::Pressure;
use rill_stream::policy::Learned;
use rill_stream::{
    CacheCounters, Lease, Ledger, MAX_PROBED_READERS, Occupancy, ReadTotals, Storage, StreamError,
};
use rill_text::Tokenizer;
use serde_json::value::RawValue;

use crate::compute::Compute;
use crate::config::{AttentionKind, FfnKind, ModelConfig};
use crate::counters::Paces;
use crate::error::Error;
use crate::experts::ExpertSource;
use crate::log::Log;
use crate::plan::{Budget, Plan, PlanOptions, Sizes};
use crate::relief::Relief;
use crate::routing;
use crate::session::{Home, Session, Snapshot};
use crate::source::{self, WeightSource};
use crate::streamed::{CachePolicy, DriveReport, ExpertOptions, Io, StreamedExperts};
use crate::trunk::{Trunk, TrunkCounters};
use crate::turns::Turns;
use crate::weights::{self, Weights};

/// Largest `config.json`, `tokenizer_config.json` and `generation_config.json` that make sense.
const MAX_JSON_BYTES: u64 = 16 << 20;
/// Largest `tiktoken.model` that makes sense (K3's has about 3 MB).
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// How an engine is set up. None of it changes a single bit of any result.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Bytes that the whole process may take; 0 chooses by what the machine can spare. Weights that
    /// do not fit are read when they are needed.
    pub budget_bytes: u64,
    /// Longest conversation, in tokens; more than the model was made for means as much as it was.
    pub context: usize,
    /// How the latents that attention remembers of every position are kept: in f32, or rounded, in half
    /// the memory. A session is one of the format that its engine was opened with.
    pub latents: LatentFormat,
    /// Sessions that memory is set aside for; more find room as far as the budget has any left.
    pub sessions: usize,
    /// Positions whose logits may be asked for at once, for which memory is set aside; more are
    /// given as far as the budget has room.
    pub logits: usize,
    /// Bytes set aside for snapshots: a [`Scheduler`](crate::Scheduler) keeps beginnings of
    /// conversations in them. 0 keeps none.
    pub snapshot_bytes: u64,
    /// Threads that compute; 0 means one for each of `cpus`, or per core.
    pub threads: usize,
    /// CPUs that those threads are tied to, one each, in turn; empty leaves them to the system.
    pub cpus: Vec<usize>,
    /// Most tokens of a prompt that pass through a layer together; the budget may allow fewer.
    pub prefill_chunk: usize,
    /// Which kernels to use.
    pub kernels: KernelChoice,
    /// Which experts stay in memory.
    pub cache: CachePolicy,
    /// Experts of the next layer that are read before its router has run, at most.
    pub lookahead: usize,
    /// Threads that read; 0 tries how many the drive likes, for models of 2 GiB and more.
    pub readers: usize,
    /// Compute while reading: experts as they come, a layer while the next one's matrices are on their
    /// way. Off, a step is first all reading, then all arithmetic, layer by layer, and nothing is read
    /// ahead; this is for measuring.
    pub overlap: bool,
    /// Read past the operating system's page cache.
    pub direct: bool,
    /// Check the checksum of everything that is read, for folders that have checksums.
    pub verify: bool,
    /// File of what earlier runs learned of the experts' use, for [`CachePolicy::Scored`]; it need
    /// not exist, and [`Engine::save_learned`] writes it. The experts that were used most are read
    /// in the background.
    pub learn: Option<PathBuf>,
    /// Hears what is worth knowing although nothing has failed.
    pub log: Log,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            budget_bytes: 0,
            context: 4096,
            latents: LatentFormat::F32,
            sessions: 1,
            logits: 1,
            snapshot_bytes: 0,
            threads: 0,
            cpus: Vec::new(),
            prefill_chunk: usize::MAX,
            kernels: KernelChoice::Fastest,
            cache: CachePolicy::Scored,
            lookahead: 4,
            readers: 0,
            overlap: true,
            direct: true,
            verify: true,
            learn: None,
            log: Log::default(),
        }
    }
}

impl EngineOptions {
    /// What an engine that is opened with these options plans with, but for a budget of 0, which it
    /// chooses, and a context that is longer than the model was made for.
    pub fn plan_options(&self) -> PlanOptions {
        let readers = if self.readers > 0 { self.readers } else { MAX_PROBED_READERS };
        PlanOptions {
            budget_bytes: self.budget_bytes,
            context: self.context.max(1),
            latents: self.latents,
            prefill_chunk: self.prefill_chunk.max(1),
            lookahead: self.lookahead,
            threads: self.computing_threads() + readers,
            sessions: self.sessions.max(1),
            // Sessions that share a step ask for one position each.
            logits: self.logits.max(self.sessions).max(1),
            snapshot_bytes: self.snapshot_bytes,
        }
    }

    fn computing_threads(&self) -> usize {
        match self.threads {
            0 if !self.cpus.is_empty() => self.cpus.len(),
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }
}

/// Which set of kernels an engine uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KernelChoice {
    /// The fastest this machine can run.
    #[default]
    Fastest,
    /// One by its name, such as `scalar`, the specification; for tests and for finding faults.
    Named(String),
}

impl KernelChoice {
    fn kernels(&self) -> Result<Kernels, NoSuchKernels> {
        match self {
            Self::Fastest => Ok(Kernels::detect()),
            Self::Named(name) => Kernels::named(name),
        }
    }
}

/// Counts and sizes of an open model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSummary {
    /// Tensors the forward pass uses.
    pub bound_tensors: usize,
    /// Bytes of weights held in memory.
    pub trunk_bytes: u64,
    /// Bytes of state one session takes before its first token.
    pub session_bytes: u64,
}

/// A loaded model: immutable, shared between sessions and threads.
pub struct Engine {
    pub(crate) config: Arc<ModelConfig>,
    /// What its sessions have in common.
    pub(crate) home: Arc<Home>,
    pub(crate) source: Arc<dyn WeightSource>,
    pub(crate) weights: Weights,
    pub(crate) trunk: Trunk,
    pub(crate) experts: Box<dyn ExpertSource>,
    io: Io,
    pub(crate) compute: Compute,
    pub(crate) turns: Turns,
    pub(crate) relief: Relief,
    /// File and the model's identity in it.
    learn: Option<(PathBuf, String)>,
    learned_problem: Option<StreamError>,
    pub(crate) paces: Paces,
    pub(crate) open_time: Duration,
    /// What had been read when it was open.
    pub(crate) opening_reads: ReadTotals,
    /// Most experts to read ahead; 0 when there are no slots for them.
    pub(crate) lookahead: usize,
    pub(crate) plan: Plan,
    pub(crate) ledger: Ledger,
    /// Of what the engine itself holds.
    _leases: Vec<Lease>,
    stop_tokens: Vec<u32>,
    pub(crate) log: Log,
    summary: ModelSummary,
}

impl Engine {
    /// Opens the model in a folder, a published checkpoint or a container: reads and checks every
    /// header, then loads the weights that every token needs. Routed experts stay on disk.
    pub fn open(folder: Folder, options: &EngineOptions) -> Result<Self, Error> {
        Self::open_with_storage(folder, options, |storage| storage)
    }

    /// The same with a storage of the caller's between the engine and its files, for tests: all that
    /// is streamed comes through it. Headers, small tensors and rows of the embedding do not.
    pub fn open_with_storage(
        folder: Folder,
        options: &EngineOptions,
        wrap: impl FnOnce(Arc<dyn Storage>) -> Arc<dyn Storage>,
    ) -> Result<Self, Error> {
        let start = Instant::now();
        let kernels = options.kernels.kernels()?;
        let source = source::open(folder)?;
        let config = config_of(&*source)?;
        let bound = weights::check(&*source, &config)?;
        let summary = ModelSummary {
            bound_tensors: bound.tensors,
            trunk_bytes: bound.trunk_bytes,
            session_bytes: Session::recurrent_bytes(&config),
        };
        let threads = options.computing_threads();
        let readers = Some(options.readers).filter(|readers| *readers > 0);
        let mut planned = options.plan_options();
        planned.budget_bytes = Budget::new(options.budget_bytes).bytes();
        planned.context = planned.context.min(config.max_position_embeddings);
        let plan = Plan::new(&Sizes::of_source(&*source, &config), planned)?;
        let ledger = Ledger::new(planned.budget_bytes);
        let leases = plan.engine_lines().map(|(purpose, bytes)| ledger.lease(purpose, bytes));
        let mut leases = leases.collect::<Result<Vec<_>, _>>()?;
        let slots = leases.iter().position(|lease| lease.purpose() == "expert slots");
        let slots = slots.map(|index| leases.swap_remove(index));

        let stop_tokens = stop_tokens(&*source, &config)?;
        let io = Io::open(&source.data_files(), options.direct, readers, wrap)?;
        let loaded = weights::load(&*source, &config)?;
        let trunk = Trunk::open(
            source.clone(),
            loaded.layers,
            &loaded.lm_head,
            &plan,
            io.readers.clone(),
            options.verify,
            options.overlap,
        )?;
        let experts = ExpertOptions {
            policy: options.cache,
            slots: plan.expert_slots as usize,
            lookahead: options.lookahead,
            verify: options.verify,
            overlap: options.overlap,
        };
        let records = source.clone().experts(&config);
        let learn = options.learn.clone().map(|file| (file, source::identity(&*source)));
        let (learned, learned_problem) = match &learn {
            Some((file, identity)) if file.exists() => {
                match Learned::read(file, identity, routing::geometry(&config)) {
                    Ok(learned) => (Some(learned), None),
                    Err(problem) => {
                        options.log.say(|| problem.to_string());
                        (None, Some(problem))
                    }
                }
            }
            _ => (None, None),
        };
        let learned = learned.as_ref();
        let experts = StreamedExperts::new(&io, records, &config, experts, learned)?;
        options.log.say(|| {
            format!(
                "{} open in {:.2} s: {} of {} bytes planned, {} layers of {} held, {} expert slots",
                source.kind(),
                start.elapsed().as_secs_f64(),
                plan.shares.total(),
                plan.options.budget_bytes,
                plan.pinned.iter().filter(|pinned| **pinned).count(),
                plan.pinned.len(),
                plan.expert_slots,
            )
        });
        let config = Arc::new(config);
        let home = Arc::new(Home {
            config: config.clone(),
            ledger: ledger.clone(),
            latents: options.latents,
            lines: plan.session_lines().collect(),
        });
        Ok(Self {
            weights: loaded.weights,
            trunk,
            experts: Box::new(experts),
            source,
            compute: Compute { kernels, pool: Pool::new(threads, &options.cpus)? },
            learn,
            learned_problem,
            turns: Turns::default(),
            relief: Relief::new(slots, plan.record_bytes),
            paces: Paces::default(),
            open_time: start.elapsed(),
            opening_reads: io.totals(),
            io,
            lookahead: match options.overlap {
                true => options.lookahead.min(config.moe.n_experts),
                false => 0,
            },
            plan,
            ledger,
            _leases: leases,
            stop_tokens,
            log: options.log.clone(),
            summary,
            config,
            home,
        })
    }

    /// Checks a checkpoint against its configuration from headers alone, without loading it.
    pub fn check(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<ModelSummary, Error> {
        let bound = weights::check(checkpoint, config)?;
        Ok(ModelSummary {
            bound_tensors: bound.tensors,
            trunk_bytes: bound.trunk_bytes,
            session_bytes: Session::recurrent_bytes(config),
        })
    }

    /// The same engine with its experts from elsewhere.
    pub fn with_experts(
        mut self,
        wrap: impl FnOnce(Box<dyn ExpertSource>) -> Box<dyn ExpertSource>,
    ) -> Self {
        self.experts = wrap(self.experts);
        self
    }

    /// The same engine, told by this whether the system pages, before every step; for tests.
    pub fn with_pressure(self, look: impl FnMut() -> Pressure + Send + 'static) -> Self {
        self.relief.ask(Box::new(look));
        self
    }

    /// Slots of experts that were given back because the system paged.
    pub fn given_slots(&self) -> u64 {
        self.relief.given_slots()
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What kind of folder the model was opened from.
    pub fn source_kind(&self) -> &'static str {
        self.source.kind()
    }

    /// Counts and sizes.
    pub fn summary(&self) -> ModelSummary {
        self.summary
    }

    /// Tokens that end a reply.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// Name of the kernels in use.
    pub fn kernels(&self) -> &'static str {
        self.compute.kernels.name()
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.compute.pool.threads()
    }

    /// What has been asked for, found and read of the routed experts since the engine was opened.
    pub fn expert_counters(&self) -> CacheCounters {
        self.experts.counters()
    }

    /// What the slots of experts are in use for at this moment.
    pub fn expert_slots(&self) -> Occupancy {
        self.experts.occupancy()
    }

    /// All that has been streamed since the engine was opened.
    pub fn reads(&self) -> ReadTotals {
        self.io.totals()
    }

    /// What has been read of the trunk since the engine was opened.
    pub fn trunk_counters(&self) -> TrunkCounters {
        self.trunk.counters()
    }

    /// How the budget is divided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Who holds how much of the budget.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// How the model's files are read, and how fast the drive is.
    pub fn drive(&self) -> DriveReport {
        self.io.report()
    }

    /// Why the file of [`EngineOptions::learn`] was there and of no use.
    pub fn learned_problem(&self) -> Option<&StreamError> {
        self.learned_problem.as_ref()
    }

    /// What is known of the experts' use by now; `None` if the cache does not learn.
    pub fn learned(&self) -> Option<Learned> {
        self.experts.learned()
    }

    /// Writes that to the file of [`EngineOptions::learn`], which appears whole or not at all. Does
    /// nothing without such a file.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub fn save_learned(&self) -> Result<(), Error> {
        if let (Some((file, identity)), Some(learned)) = (&self.learn, self.learned()) {
            learned.write(file, identity)?;
        }
        Ok(())
    }

    /// Opens the tokenizer that lies beside the weights.
    pub fn open_tokenizer(&self) -> Result<Tokenizer, Error> {
        tokenizer_of(&*self.source, &self.config)
    }

    /// A session at position 0.
    pub fn new_session(&self) -> Session {
        Session::new(self.home.clone())
    }

    /// A session that goes on from a snapshot.
    ///
    /// # Errors
    /// As for [`Session::restore`].
    pub fn session_from(&self, snapshot: &Snapshot) -> Result<Session, Error> {
        let mut session = self.new_session();
        session.restore(snapshot)?;
        Ok(session)
    }
}

/// Reads and checks the configuration of the model in a folder.
pub fn read_config(folder: &Folder) -> Result<ModelConfig, Error> {
    match source::container(folder)? {
        Some(source) => config_of(&*source),
        None => {
            let bytes = folder.read(CONFIG, MAX_JSON_BYTES)?;
            parse_config(&bytes, folder.describe(CONFIG))
        }
    }
}

/// Opens the tokenizer of the model in a folder.
pub fn open_tokenizer(folder: &Folder, config: &ModelConfig) -> Result<Tokenizer, Error> {
    match source::container(folder)? {
        Some(source) => tokenizer_of(&*source, config),
        None => {
            let model = folder.read(TOKENIZER, MAX_TOKENIZER_BYTES)?;
            let names = folder.read(TOKEN_NAMES, MAX_JSON_BYTES)?;
            Ok(Tokenizer::from_bytes(&model, &names, config.vocab_size as u32)?)
        }
    }
}

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tiktoken.model";
const TOKEN_NAMES: &str = "tokenizer_config.json";

pub(crate) fn config_of(source: &dyn WeightSource) -> Result<ModelConfig, Error> {
    let bytes = required_file(source, CONFIG, MAX_JSON_BYTES)?;
    parse_config(&bytes, format!("{}{CONFIG}", source.folder()))
}

pub(crate) fn parse_config(bytes: &[u8], file: String) -> Result<ModelConfig, Error> {
    ModelConfig::from_json(bytes).map_err(|source| Error::Config { file, source })
}

fn tokenizer_of(source: &dyn WeightSource, config: &ModelConfig) -> Result<Tokenizer, Error> {
    let model = required_file(source, TOKENIZER, MAX_TOKENIZER_BYTES)?;
    let names = required_file(source, TOKEN_NAMES, MAX_JSON_BYTES)?;
    Ok(Tokenizer::from_bytes(&model, &names, config.vocab_size as u32)?)
}

fn required_file(source: &dyn WeightSource, name: &str, max: u64) -> Result<Vec<u8>, Error> {
    let missing = || FormatError::MissingFile { file: format!("{}{name}", source.folder()) };
    Ok(source.small_file(name, max)?.ok_or_else(missing)?)
}

impl ModelConfig {
    /// Layers of each kind: KDA, MLA, dense, mixture of experts.
    pub fn layer_counts(&self) -> [usize; 4] {
        let count = |f: &dyn Fn(&crate::config::LayerConfig) -> bool| {
            self.layers.iter().filter(|layer| f(layer)).count()
        };
        [
            count(&|l| l.attention == AttentionKind::Kda),
            count(&|l| l.attention == AttentionKind::Mla),
            count(&|l| l.ffn == FfnKind::Dense),
            count(&|l| l.ffn == FfnKind::Moe),
        ]
    }
}

/// The configuration's end token and those `generation_config.json` adds, if there is one.
fn stop_tokens(source: &dyn WeightSource, config: &ModelConfig) -> Result<Vec<u32>, Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(u32),
        Many(Vec<u32>),
    }
    const FILE: &str = "generation_config.json";
    let mut stop = vec![config.eos_token_id];
    if let Some(bytes) = source.small_file(FILE, MAX_JSON_BYTES)? {
        let file = format!("{}{FILE}", source.folder());
        let refused = |reason| Error::GenerationConfig { file, reason };
        // A map, because a struct would take a list for its fields in order.
        let mut keys: BTreeMap<String, Box<RawValue>> = match serde_json::from_slice(&bytes) {
            Ok(keys) => keys,
            Err(error) => return Err(refused(error.to_string())),
        };
        let Some(value) = keys.remove("eos_token_id") else { return Ok(stop) };
        match serde_json::from_str(value.get()) {
            Ok(None) => {}
            Ok(Some(OneOrMany::One(id))) => stop.push(id),
            Ok(Some(OneOrMany::Many(ids))) => stop.extend(ids),
            Err(_) => {
                let found = value.get().replace(char::is_control, "\u{fffd}");
                return Err(refused(format!("eos_token_id is {found:.60}")));
            }
        }
    }
    stop.sort_unstable();
    stop.dedup();
    Ok(stop)
}
