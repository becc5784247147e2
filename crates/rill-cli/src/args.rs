//! What can be typed.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{ArgGroup, Parser, Subcommand, ValueEnum};
use rill::{KernelChoice, LatentFormat, Sampling};
use rill_convert::{ExpertCodec, TrunkCodec};
use rill_kernels::{Kernels, NoSuchKernels};

/// Run language models that are larger than memory.
#[derive(Debug, Parser)]
#[command(
    name = "rill",
    version,
    after_help = "Exit codes: 0 done, 1 failure, 2 wrong usage, 130 interrupted (Ctrl-C; what was \
                  generated so far has been printed)."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer a question, or continue a text with --raw
    Run(RunArgs),
    /// Show what the model expects next, dump logits or measure perplexity
    Eval(EvalArgs),
    /// Turn text into token ids
    Tokenize(TokenizeArgs),
    /// Turn token ids into text
    Detokenize(DetokenizeArgs),
    /// Describe a checkpoint or container from its headers
    Info(InfoArgs),
    /// Say what a model takes of memory and disk, and what a budget costs in reads
    Plan(PlanArgs),
    /// Prove this installation against the built-in reference values
    Selftest(SelftestArgs),
    /// Turn a published checkpoint, or a .rill or .waste container, into a .rill container
    Convert(ConvertArgs),
    /// Check every byte of a .rill container
    Verify(VerifyArgs),
    /// Make a container of a real model's shape and random weights, to measure with
    Synth(SynthArgs),
    /// Record which experts tokens use, and study it
    Trace(TraceArgs),
    /// Measure how fast a model runs, and what it waits for
    Bench(BenchArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// Folder of a Kimi checkpoint as published, or of a .rill or .waste container; without it,
    /// the built-in demo model
    #[arg(short, long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Memory that the process may take, such as 64M, 8G or 1.5G; 0 means what this machine can
    /// spare. Weights that do not fit are read when they are needed
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = memory_size)]
    pub(crate) budget: u64,

    /// Longest context, in tokens, for which memory is set aside; without it, what the command needs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ctx: Option<u32>,

    /// How latents of earlier positions are kept: bf16 and f16 take half the memory of f32, and round
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LatentChoice::F32)]
    pub(crate) latents: LatentChoice,

    /// Which experts stay in memory: those used last (lru), those used most of late (lfu), or those
    /// that are likely to be used next (scored)
    #[arg(long, value_enum, default_value_t = Cache::Scored)]
    pub(crate) cache: Cache,

    /// Experts of the next layer that are read before it has chosen, at most; 4 unless given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) lookahead: Option<u16>,

    /// Threads that read; 0 tries how many the drive likes, for models of 2 GiB and more
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=256))]
    pub(crate) readers: u16,

    /// Read first and compute then, layer by layer, with nothing read ahead; for measuring what reading
    /// and computing at once is worth
    #[arg(long)]
    pub(crate) no_overlap: bool,

    /// Read through the operating system's page cache, not past it
    #[arg(long)]
    pub(crate) no_direct: bool,

    /// Check the checksum of everything that enters memory, where the model has checksums; headers
    /// are always checked
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_value_t = Switch::On, default_missing_value = "on")]
    pub(crate) verify: Switch,

    /// Remember in this file which experts were used, and begin the next run with those that were used
    /// most (with --cache scored)
    #[arg(long, value_name = "FILE")]
    pub(crate) learn: Option<PathBuf>,

    /// Threads that compute; 0 means one for each of --cpus, or per core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) threads: u16,

    /// CPUs that those threads are tied to, one each, in turn, such as 0-3,6 (Linux only)
    #[arg(long, value_name = "LIST", value_parser = cpu_list)]
    pub(crate) cpus: Option<CpuList>,

    /// Most prompt tokens that pass through a layer together; the budget may allow fewer
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u16).range(1..=8192))]
    pub(crate) prefill_chunk: u16,

    /// Set of kernels to compute with: fastest, scalar, or another that this machine has; the result
    /// is the same
    #[arg(long, value_name = "SET", default_value = "fastest", value_parser = kernel_set)]
    pub(crate) kernels: KernelChoice,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LatentChoice {
    F32,
    F16,
    Bf16,
}

impl From<LatentChoice> for LatentFormat {
    fn from(choice: LatentChoice) -> Self {
        match choice {
            LatentChoice::F32 => Self::F32,
            LatentChoice::F16 => Self::F16,
            LatentChoice::Bf16 => Self::Bf16,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Cache {
    Lru,
    Lfu,
    Scored,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// Numbers of CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CpuList(pub(crate) Vec<usize>);

/// Text from an argument, a file or a pipe.
#[derive(Debug, clap::Args)]
pub(crate) struct TextArgs {
    /// The text; `-`, or nothing when input is piped, reads standard input
    #[arg(value_name = "TEXT")]
    pub(crate) text: Option<String>,

    /// Read the text from a file
    #[arg(long, value_name = "PATH", conflicts_with = "text")]
    pub(crate) file: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) prompt: TextArgs,
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Continue the text as it is, without the model's chat format
    #[arg(long)]
    pub(crate) raw: bool,

    /// Let the model reason first, and show the reasoning between <think> lines
    #[arg(long, conflicts_with = "raw")]
    pub(crate) think: bool,

    /// Most tokens to generate
    #[arg(short = 'n', long, value_name = "N", default_value_t = 512, value_parser = whole_number)]
    pub(crate) max_tokens: usize,

    /// End at this text, which is not printed; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) stop: Vec<String>,

    /// Keep the answer in this file as it grows, so that it survives a crash or a power cut; go on
    /// later with --resume
    #[arg(long, value_name = "FILE")]
    pub(crate) autosave: Option<PathBuf>,

    /// Seconds between two saves, with --autosave or --resume
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    pub(crate) autosave_every: f64,

    /// Go on with an answer that --autosave kept, with its prompt and all its settings; it is kept in the
    /// same file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "file", "raw", "think", "max_tokens", "stop", "SamplingArgs"])]
    pub(crate) resume: Option<PathBuf>,

    /// Print JSON when all is done: the text, why it ended, and its tokens
    #[arg(long)]
    pub(crate) json: bool,

    /// Give every token its log-probability, and this many of the likeliest tokens with theirs; as the
    /// model has them, whatever the sampling
    #[arg(long, value_name = "N", requires = "json", value_parser = whole_number)]
    pub(crate) logprobs: Option<usize>,

    /// Print no statistics and no progress
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// Write what was read, waited for and computed to a file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) stats_json: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Randomness; 0 always takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    pub(crate) temp: f32,

    /// Sample from this many of the most likely tokens; 0 means all
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = whole_number)]
    pub(crate) top_k: usize,

    /// Sample from the most likely tokens whose probabilities add up to this
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = probability)]
    pub(crate) top_p: f32,

    /// Sample from tokens at least this likely, as a share of the most likely one's probability; 0
    /// means all
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = part)]
    pub(crate) min_p: f32,

    /// Weaken tokens of the prompt and of the reply: logits above 0 are divided by this, others
    /// multiplied; 1 changes nothing
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = factor)]
    pub(crate) repetition_penalty: f32,

    /// Weaken tokens of the reply: taken off their logits once
    #[arg(long, value_name = "A", default_value_t = 0.0, value_parser = finite)]
    pub(crate) presence_penalty: f32,

    /// Weaken tokens of the reply: taken off their logits as often as they were written
    #[arg(long, value_name = "A", default_value_t = 0.0, value_parser = finite)]
    pub(crate) frequency_penalty: f32,

    /// Add to the logit of a token, such as 42=-1.5; -inf forbids it. May be given several times
    #[arg(long, value_name = "ID=VALUE", value_parser = bias)]
    pub(crate) logit_bias: Vec<(u32, f32)>,

    /// Start of the random numbers: the same seed gives the same text
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
}

impl SamplingArgs {
    pub(crate) fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
        }
    }
}

#[derive(Debug, clap::Args)]
#[command(allow_negative_numbers = true)]
#[command(group = ArgGroup::new("input").args(["text", "file", "ids", "perplexity"]))]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) text: TextArgs,
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Token ids instead of text, taken as they are: no BOS is put in front
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', num_args = 1, value_parser = token_id)]
    pub(crate) ids: Option<Vec<u32>>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// How many of the most likely tokens to list
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = whole_number, conflicts_with = "perplexity")]
    pub(crate) top: usize,

    /// Write `input_ids` and the `logits` of every position to a safetensors file
    #[arg(long, value_name = "FILE", conflicts_with = "perplexity")]
    pub(crate) dump_logits: Option<PathBuf>,

    /// Measure the perplexity of a text file instead
    #[arg(long, value_name = "FILE")]
    pub(crate) perplexity: Option<PathBuf>,

    /// Also compare with this model, from which the other was made: how far what is expected next and each
    /// layer's output are from the original's, whose latents are f32 whatever --latents says
    #[arg(long, value_name = "PATH", requires = "perplexity", conflicts_with_all = ["text", "file", "ids"])]
    pub(crate) against: Option<PathBuf>,

    /// Tokens of one perplexity window, each started with BOS and fresh state
    #[arg(long, value_name = "N", default_value_t = 255, requires = "perplexity", conflicts_with_all = ["text", "file", "ids"], value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) window: u32,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TokenizeArgs {
    #[command(flatten)]
    pub(crate) text: TextArgs,
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Let names of reserved tokens become those tokens
    #[arg(long)]
    pub(crate) markup: bool,

    /// Print ids and pieces as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DetokenizeArgs {
    /// Token ids, separated by commas or spaces; `-`, or nothing when input is piped, reads
    /// standard input
    #[arg(value_name = "IDS")]
    pub(crate) ids: Vec<String>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct InfoArgs {
    /// Folder of a Kimi checkpoint as published, or of a .rill or .waste container; without it,
    /// the built-in demo model
    #[arg(value_name = "PATH")]
    pub(crate) path: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SelftestArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

fn whole_number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected a whole number, such as 100".to_owned())
}

/// A token id, with spaces around it if need be.
pub(crate) fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| format!("{text:?} is not a token id"))
}

#[derive(Debug, clap::Args)]
pub(crate) struct ConvertArgs {
    /// Folder of a Kimi checkpoint as published, or of a .rill or .waste container
    #[arg(value_name = "SRC")]
    pub(crate) source: PathBuf,

    /// Folder to write; after an interruption the same command goes on where it stopped
    #[arg(value_name = "DST")]
    pub(crate) destination: Option<PathBuf>,

    /// How much of the model to keep: every bit (lossless), or experts of 3.4 bits a weight (high), 3.0
    /// (standard) or 2.5 (small), for which the other matrices get 4 bits; --trunk decides otherwise
    #[arg(long, value_enum, conflicts_with = "experts")]
    pub(crate) quality: Option<Quality>,

    /// Format of routed experts: source, f32, q8, q4, trellis:BITS with 2 to 3.5 bits in steps of an eighth,
    /// mxfp4z, which is mxfp4 without loss in fewer bytes, or mxfp4z:BITS, which is the same with a little loss
    /// in 3.2 to 3.6 bits; `source` keeps them bit for bit, which those of .waste cannot be
    #[arg(long, value_name = "FORMAT", default_value = "source", value_parser = experts)]
    pub(crate) experts: ExpertCodec,

    /// Format of the other matrices: source, q8, q4 or trellis:BITS; with the last two, embedding and head
    /// get eight bits. `source`, which keeps them bit for bit, unless --quality says otherwise
    #[arg(long, value_name = "FORMAT", value_parser = trunk)]
    pub(crate) trunk: Option<TrunkCodec>,

    /// Threads that work; 0 means one per core. The result is the same
    #[arg(short, long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) jobs: u16,

    /// Spread every record over another drive as well: FOLDER=SHARE, where DST's share is 1; may be
    /// given several times
    #[arg(long, value_name = "FOLDER=SHARE", value_parser = share)]
    pub(crate) spread: Vec<(PathBuf, f64)>,

    /// Convert the first layers only, as a smaller model to try things out with: it runs, its layers
    /// compute what they do in the whole model, and its answers are nonsense
    #[arg(long, value_name = "N", conflicts_with = "reclaim")]
    pub(crate) layers: Option<u32>,

    /// Delete each shard of the checkpoint once everything in it has been converted, synced and read
    /// back; `dry` only says what would be deleted and when, and converts nothing
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        requires = "destination",
        conflicts_with = "estimate"
    )]
    pub(crate) reclaim: Option<When>,

    /// With --reclaim: do not compare shards with their published SHA-256 (from a SHA256SUMS file
    /// beside them, or from what the Hugging Face client noted) before deleting them
    #[arg(long, requires = "reclaim")]
    pub(crate) trust_source: bool,

    /// Only say how large it gets, from headers alone
    #[arg(long)]
    pub(crate) estimate: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    Dry,
    On,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// Folder of a checkpoint or container; without it, the built-in demo model
    #[arg(value_name = "PATH", conflicts_with = "config")]
    pub(crate) path: Option<PathBuf>,

    /// A published config.json alone, with the formats that a container made of it would have
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Format of routed experts: source (as published), f32, q8, q4 or trellis:BITS
    #[arg(long, value_name = "FORMAT", default_value = "source", value_parser = experts, requires = "config")]
    pub(crate) experts: ExpertCodec,

    /// Format of the other matrices: source, q8, q4 or trellis:BITS; with the last two, embedding and head
    /// get eight bits
    #[arg(long, value_name = "FORMAT", default_value = "source", value_parser = trunk, requires = "config")]
    pub(crate) trunk: TrunkCodec,

    /// Memory that the process may take, such as 64M, 8G or 1.5G; 0 means what this machine can
    /// spare
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = memory_size)]
    pub(crate) budget: u64,

    /// Longest context, in tokens
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ctx: u32,

    /// How latents of earlier positions are kept: bf16 and f16 take half the memory of f32, and round
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LatentChoice::F32)]
    pub(crate) latents: LatentChoice,

    /// Print JSON
    #[arg(long, conflicts_with = "table")]
    pub(crate) json: bool,

    /// Print bytes read per token for budgets from 4 to 256 GB and contexts from 4K to 1M
    #[arg(long, conflicts_with_all = ["budget", "ctx"])]
    pub(crate) table: bool,

    /// Experts of the next layer that are read before it has chosen, at most; 4 unless given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) lookahead: Option<u16>,

    /// Threads that compute; 0 means one per core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) threads: u16,

    /// Most prompt tokens that pass through a layer together; the budget may allow fewer
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u16).range(1..=8192))]
    pub(crate) prefill_chunk: u16,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Quality {
    Lossless,
    High,
    Standard,
    Small,
}

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// Folder of a .rill container
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,

    /// Folder of the checkpoint or container it was made from: also measure how far the weights are
    /// from that
    #[arg(long, value_name = "SRC")]
    pub(crate) source: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Threads that work; 0 means one per core
    #[arg(short, long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) jobs: u16,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SynthArgs {
    /// Folder to write; it must be empty, and after an interruption it must be removed
    #[arg(value_name = "OUT", required_unless_present = "estimate")]
    pub(crate) destination: Option<PathBuf>,

    /// Whose shape
    #[arg(long, value_enum)]
    pub(crate) like: Like,

    /// Only the first layers
    #[arg(long, value_name = "N")]
    pub(crate) layers: Option<u32>,

    /// Kind of container
    #[arg(long, value_enum, default_value_t = Format::Rill)]
    pub(crate) format: Format,

    /// Format of routed experts: source, f32, q8, q4, trellis:BITS or mxfp4z; without it, as published for
    /// Kimi K3 and q4 for Kimi-Linear. In .waste they are always vector-quantised
    #[arg(long, value_name = "FORMAT", value_parser = experts)]
    pub(crate) experts: Option<ExpertCodec>,

    /// Format of the other matrices: source, q8, q4 or trellis:BITS; with the last two, embedding and head
    /// get eight bits
    #[arg(long, value_name = "FORMAT", default_value = "q4", value_parser = trunk)]
    pub(crate) trunk: TrunkCodec,

    /// Start of the random numbers: the same seed gives the same bytes
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Threads that work; 0 means one per core. The result is the same
    #[arg(short, long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) jobs: u16,

    /// Only say how large it gets
    #[arg(long)]
    pub(crate) estimate: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Like {
    KimiK3,
    #[value(name = "kimi-linear-48b")]
    KimiLinear48b,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Rill,
    Waste,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    pub(crate) command: TraceCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Run a text and what the model continues it with, and record the experts of every token
    Record(RecordArgs),
    /// Replay recorded routing against an expert cache on paper: what share of uses needs no read
    #[command(visible_alias = "simulate")]
    Replay(ReplayArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    pub(crate) text: TextArgs,
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// File to write, for `rill trace replay` and `rill bench --routing`
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,

    /// Most tokens to generate after the text; the last of them is not run, so it is not recorded
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64, value_parser = whole_number)]
    pub(crate) max_tokens: usize,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Tokens one by one, as an answer is written
    Decode(DecodeArgs),
    /// A prompt, all at once
    Prefill(PrefillArgs),
    /// Several sessions at once, each writing: what sharing steps is worth
    Serve(ServeArgs),
    /// Matrix products at a model's shapes, beside what this machine can do at best
    Kernels(KernelsArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct DecodeArgs {
    /// Tokens to measure
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tokens: u32,

    /// Tokens of a prompt before them, which is not measured
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) prompt: u32,

    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PrefillArgs {
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prompt: u32,

    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// Numbers of sessions to measure, one after the other
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) sessions: Vec<u16>,

    /// Tokens that each session writes while it is measured
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tokens: u32,

    /// Tokens that each has written before that
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) warm: u32,

    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct KernelsArgs {
    /// Whose shapes
    #[arg(long, value_enum, default_value_t = ModelShape::K3)]
    pub(crate) shape: ModelShape,

    /// Threads of the second measurement, after one of a single thread; 0 means one per core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) threads: u16,

    /// Set of kernels: fastest, scalar, or another that this machine has
    #[arg(long, value_name = "SET", default_value = "fastest", value_parser = kernel_set)]
    pub(crate) kernels: KernelChoice,

    /// Positions that attention sees where the rest of a token is measured
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) context: u32,

    /// About how long to measure; a few seconds give an impression
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    pub(crate) seconds: f64,

    /// Memory for weights to walk over, at most: twice the last-level cache is used if it may be
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = memory_size)]
    pub(crate) budget: u64,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ModelShape {
    K3,
    KimiLinear,
}

/// What all measurements take.
#[derive(Debug, clap::Args)]
pub(crate) struct MeasureArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Have tokens use the experts of a recording (see `rill trace record`) instead of the router's,
    /// so that reads are realistic whatever the weights; experts are then not read ahead unless
    /// --lookahead says so
    #[arg(long, value_name = "FILE")]
    pub(crate) routing: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    /// Recording: a safetensors file with expert_ids of (tokens, layers, experts per token)
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// What the cache keeps: what was used last (lru), what was used most of late (lfu), or what is
    /// likely to be used next (scored)
    #[arg(long, value_enum, default_value_t = CachePolicy::All)]
    pub(crate) cache: CachePolicy,

    /// Sizes of the cache in percent of all experts
    #[arg(long, value_name = "PERCENT,..", value_delimiter = ',', num_args = 1, default_value = "1.5,3,6,12", value_parser = percent)]
    pub(crate) share: Vec<f64>,

    /// Sizes of the cache in experts instead
    #[arg(long, value_name = "N,..", value_delimiter = ',', num_args = 1, conflicts_with = "share", value_parser = whole_number)]
    pub(crate) slots: Vec<usize>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CachePolicy {
    Lru,
    Lfu,
    Scored,
    All,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(p) if (0.0..=100.0).contains(&p) => Ok(p),
        _ => Err("expected a number from 0 to 100, such as 1.5".to_owned()),
    }
}

fn experts(text: &str) -> Result<ExpertCodec, String> {
    let codec = match text {
        "source" => Some(ExpertCodec::Source),
        "f32" => Some(ExpertCodec::F32),
        "q8" => Some(ExpertCodec::Q8),
        "q4" => Some(ExpertCodec::Q4),
        "mxfp4z" => Some(ExpertCodec::Mxfp4z),
        _ => trellis(text).map(|rate| ExpertCodec::Trellis { rate }),
    };
    codec.or_else(|| thinned(text)).ok_or_else(|| {
        format!("expected source, f32, q8, q4, mxfp4z, mxfp4z:BITS (3.2 to 3.6) or {TRELLIS}")
    })
}

fn trunk(text: &str) -> Result<TrunkCodec, String> {
    let codec = match text {
        "source" => Some(TrunkCodec::Source),
        "q8" => Some(TrunkCodec::Q8),
        "q4" => Some(TrunkCodec::Q4),
        _ => trellis(text).map(|rate| TrunkCodec::Trellis { rate }),
    };
    codec.ok_or_else(|| format!("expected source, q8, q4 or {TRELLIS}"))
}

const TRELLIS: &str = "trellis:BITS, 2 to 4 bits in steps of 0.125 (up to 3.5 for experts in mxfp4), such as trellis:2.875";

/// The rate of `trellis:BITS`, in bits per 8 weights.
fn trellis(text: &str) -> Option<u8> {
    let rate = text.strip_prefix("trellis:")?.parse::<f64>().ok()? * 8.0;
    let fits = (16.0..=32.0).contains(&rate) && rate.fract() == 0.0;
    fits.then_some(rate as u8)
}

/// The format of `mxfp4z:BITS`.
fn thinned(text: &str) -> Option<ExpertCodec> {
    let bits = text.strip_prefix("mxfp4z:")?.parse::<f64>().ok()?;
    let hundredths = (bits * 100.0).round();
    let fits = (320.0..=360.0).contains(&hundredths) && (bits * 100.0 - hundredths).abs() < 1e-6;
    fits.then_some(ExpertCodec::Mxfp4zThinned { hundredths: hundredths as u16 })
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 86_400.0 => Ok(s),
        _ => Err("expected seconds, above 0 and at most a day, such as 2.5".to_owned()),
    }
}

fn share(text: &str) -> Result<(PathBuf, f64), String> {
    let parts = text.rsplit_once('=').and_then(|(folder, share)| {
        let share = share.parse().ok().filter(|s: &f64| s.is_finite() && *s > 0.0)?;
        (!folder.is_empty()).then(|| (PathBuf::from(folder), share))
    });
    parts.ok_or_else(|| "expected a folder, = and a positive number, such as /mnt/b=0.5".to_owned())
}

/// Bytes from a size as people write it: powers of 1,000, or of 1,024 with an `i`.
pub(crate) fn memory_size(text: &str) -> Result<u64, String> {
    parse_size(text).ok_or_else(|| {
        "expected a size such as 64M, 8G or 1.5G (8Gi for a power of 1,024), or 0".to_owned()
    })
}

/// Numbers and ranges of numbers between commas, each number once.
fn kernel_set(text: &str) -> Result<KernelChoice, NoSuchKernels> {
    match text {
        "fastest" => Ok(KernelChoice::Fastest),
        name => Kernels::named(name).map(|_| KernelChoice::Named(name.to_owned())),
    }
}

fn cpu_list(text: &str) -> Result<CpuList, String> {
    let parse = |text: &str| {
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            // As many as any system has.
            let number = |n: &str| n.parse::<usize>().ok().filter(|&n| n < 1024);
            let range = number(first)?..=number(last)?;
            if range.is_empty() || range.clone().any(|cpu| cpus.contains(&cpu)) {
                return None;
            }
            cpus.extend(range);
        }
        Some(CpuList(cpus))
    };
    parse(text).ok_or_else(|| {
        "expected CPUs below 1024 and ranges of them, each once, such as 0-3,6".to_owned()
    })
}

fn parse_size(text: &str) -> Option<u64> {
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(number_end);
    let unit = unit.trim_start().to_ascii_lowercase();
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let base: u128 = if unit.ends_with('i') { 1024 } else { 1000 };
    let power = match unit.strip_suffix('i').unwrap_or(unit) {
        // "i" alone is no unit.
        "" if base == 1000 => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    // Longer ones are not sizes, and would not fit below.
    if whole.is_empty() || fraction.is_empty() || whole.len() > 20 || fraction.len() > 12 {
        return None;
    }
    let unit_bytes = base.pow(power);
    let scale = 10u128.pow(fraction.len() as u32);
    let bytes = whole.parse::<u128>().ok()? * unit_bytes
        + fraction.parse::<u128>().ok()? * unit_bytes / scale;
    u64::try_from(bytes).ok()
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(t) if t.is_finite() && t >= 0.0 => Ok(t),
        _ => Err("expected a number that is not negative, such as 0.7".to_owned()),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("expected a number above 0 and at most 1, such as 0.95".to_owned()),
    }
}

fn part(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("expected a number from 0 to 1, such as 0.05".to_owned()),
    }
}

fn factor(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(f) if f.is_finite() && f > 0.0 => Ok(f),
        _ => Err("expected a number above 0, such as 1.1".to_owned()),
    }
}

fn finite(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() => Ok(x),
        _ => Err("expected a number, such as 0.5".to_owned()),
    }
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let parts = text.split_once('=').and_then(|(token, bias)| {
        let bias = bias.parse().ok().filter(|&b: &f32| b < f32::INFINITY)?;
        Some((token.parse().ok()?, bias))
    });
    parts.ok_or_else(|| {
        "expected a token id, = and a number, such as 42=-1.5, or 42=-inf to forbid the token; `rill \
         tokenize` tells ids"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::{CpuList, cpu_list, memory_size};

    #[test]
    fn cpus_are_numbers_and_ranges() {
        for (text, cpus) in [("0", &[0][..]), ("0-3,6", &[0, 1, 2, 3, 6]), ("5,2-2", &[5, 2])] {
            assert_eq!(cpu_list(text), Ok(CpuList(cpus.to_vec())), "{text}");
        }
        for text in ["", ",", "0,", "-1", "1-", "3-1", "0-3,2", "1,1", "a", "0 1", "0-1-2", "1024"]
        {
            assert!(cpu_list(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_powers_of_a_thousand_unless_they_say_otherwise() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64M", 64_000_000),
            ("8G", 8_000_000_000),
            ("8 GB", 8_000_000_000),
            ("1.5g", 1_500_000_000),
            ("0.25T", 250_000_000_000),
            ("8Gi", 8 << 30),
            ("1.5KiB", 1536),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(memory_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "",
            "G",
            "-1",
            "-1G",
            "1e9",
            "1..5G",
            ".5G",
            "5.G",
            "8X",
            "8i",
            "8GG",
            "8GiBB",
            "NaN",
            "18446744073709551616",
            "99999999999999999999T",
            "1.0000000000001G",
            "8Gï",
            "１G",
        ] {
            assert!(memory_size(text).is_err(), "{text}");
        }
    }
}
