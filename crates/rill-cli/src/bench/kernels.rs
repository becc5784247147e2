//! `rill bench kernels`: every product at a model's shapes, beside what the machine can do at best,
//! and what a token would take at these rates.

use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rill::KernelChoice;
use rill::config::ModelConfig;
use rill::plan::TokenWeights;
use rill_convert::{SynthModel, TRELLIS_WIDTH, synthetic_mxfp4z};
use rill_kernels::{Codec, Inputs, Kernels, Matrix, Pool, Trellis, Vq, probe};
use serde_json::{Value, json};

use super::rest::{self, Rest};
use crate::args::{KernelsArgs, ModelShape};
use crate::output::{Outcome, print};

/// Vectors that a matrix is multiplied with.
const VECTORS: [usize; 4] = [1, 4, 16, 64];
/// Bytes of a matrix that stays in a core's own cache, at most.
const HOT_BYTES: usize = 1 << 20;
/// Multiply-adds of one timed call: between some microseconds and some tenths of a second on any core.
const CALL: std::ops::RangeInclusive<f64> = 1e6..=1.3e8;
/// Inputs that share a scale, and rows of an index block, as containers have them.
pub(super) const GROUP: usize = 128;
const INDEX_BLOCK: usize = 64;
/// Rows of an entropy-coded matrix: those of K3's gate. Making more takes seconds.
const CODED_ROWS: usize = 3072;

pub(crate) fn run(args: &KernelsArgs) -> Result<Outcome> {
    let model = Model::of(args.shape)?;
    let kernels = match &args.kernels {
        KernelChoice::Fastest => Kernels::detect(),
        KernelChoice::Named(name) => Kernels::named(name)?,
    };
    let threads = match args.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n.into(),
    };
    let mut pools = vec![Pool::new(1, &[])?];
    if threads > 1 {
        pools.push(Pool::new(threads, &[])?);
    }
    let cache = last_level_cache_bytes();
    // Twice the cache, or what is allowed: the same weight does not come again before it is gone.
    let wanted = cache.unwrap_or(256 << 20) * 2;
    let mut bytes = vec![0; wanted.min(args.budget).max(4 << 20) as usize];
    fill(&mut bytes, true);
    let machine: Vec<Machine> = pools.iter().map(|pool| Machine::measure(pool, &bytes)).collect();

    let codecs = codecs()?;
    let n_timings =
        codecs.len() * model.shapes.len() * VECTORS.len() * (pools.len() + 1) + rest::KERNELS;
    let slot = args.seconds / n_timings as f64;
    let mut rows = Vec::new();
    let mut numbers = true;
    for codec in codecs {
        if numbers && !matches!(codec, Codec::F32 | Codec::Bf16) {
            numbers = false;
            fill(&mut bytes, numbers);
        }
        for shape in &model.shapes {
            let weights = Weights::new(codec, shape, &mut bytes)?;
            for n in VECTORS {
                for (pool, machine) in pools.iter().zip(&machine) {
                    rows.push(weights.time(&kernels, pool, machine, n, false, slot)?);
                }
                rows.push(weights.time(&kernels, &pools[0], &machine[0], n, true, slot)?);
            }
        }
    }
    let walked = bytes.len();
    let positions = args.context as usize;
    let rest = rest::measure(&model.config, &kernels, positions, walked, slot)?;
    let steps: Vec<Step> = machine.iter().map(|m| model.step(&rows, &rest, m.threads)).collect();

    let walked = walked as u64;
    if args.json {
        let facts = json!({
            "model": model.name,
            "kernels": kernels.name(),
            "walked_bytes": walked,
            "last_level_cache_bytes": cache,
            "machine": machine.iter().map(Machine::json).collect::<Vec<_>>(),
            "results": rows.iter().map(|row| row.json(&kernels)).collect::<Vec<_>>(),
            "context": args.context,
            "rest": rest.iter().map(Rest::json).collect::<Vec<_>>(),
            "token": steps.iter().map(Step::json).collect::<Vec<_>>(),
        });
        print(format!("{facts:#}\n"))?;
    } else {
        let mut shown = text(&model, &kernels, walked, cache, &machine, &rows, &steps)?;
        rest_text(&mut shown, args.context, &rest)?;
        print(shown)?;
    }
    Ok(Outcome::Done)
}

/// A model's products.
struct Model {
    name: &'static str,
    config: ModelConfig,
    shapes: Vec<Shape>,
    weights: TokenWeights,
    expert_codec: Codec,
}

/// A matrix that the model has.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    rows: usize,
    cols: usize,
}

impl Model {
    fn of(shape: ModelShape) -> Result<Self> {
        let (name, model, expert_codec) = match shape {
            ModelShape::K3 => ("kimi-k3", SynthModel::KimiK3, Codec::Mxfp4),
            ModelShape::KimiLinear => {
                ("kimi-linear-48b", SynthModel::KimiLinear48b, Codec::Q4 { group: GROUP })
            }
        };
        let config = ModelConfig::from_json(model.config())?;
        let hidden = config.hidden_size;
        let width = config.moe.latent.map_or(hidden, |latent| latent.size);
        let inner = config.moe.intermediate_size;
        let heads = config.kda.n_heads * config.kda.head_dim;
        let shape = |name, rows, cols| Shape { name, rows, cols };
        Ok(Self {
            name,
            shapes: vec![
                shape("expert gate, up", inner, width),
                shape("expert down", width, inner),
                shape("projection in", heads, hidden),
                shape("projection out", hidden, heads),
                shape("head, a piece", 8192.min(config.vocab_size), hidden),
            ],
            weights: config.token_weights(),
            expert_codec,
            config,
        })
    }

    /// Time of one token, with every weight from memory.
    fn step(&self, rows: &[Timing], rest: &[Rest], threads: usize) -> Step {
        let timing = |shape: &str, codec: Codec| {
            let found = rows.iter().find(|row| {
                row.shape.name == shape
                    && row.codec == codec
                    && row.threads == threads
                    && (row.vectors, row.hot) == (1, false)
            });
            found.expect("every format was measured at every shape")
        };
        let rate = |shape: &str, codec| timing(shape, codec).multiply_adds_per_s;
        let third = self.weights.experts as f64 / 3.0;
        let experts = |codec: Codec| {
            let (gate, down) = (timing("expert gate, up", codec), timing("expert down", codec));
            Experts {
                codec,
                bytes: third * (2.0 * gate.bits + down.bits) / 8.0,
                seconds: third * (2.0 / gate.multiply_adds_per_s + 1.0 / down.multiply_adds_per_s),
            }
        };
        let mut codecs: Vec<Codec> = rows.iter().map(|row| row.codec).collect();
        codecs.dedup();
        let trunk = self.weights.trunk as f64 / 2.0;
        let (q4, q8) = (Codec::Q4 { group: GROUP }, Codec::Q8 { group: GROUP });
        Step {
            threads,
            experts: experts(self.expert_codec).seconds,
            formats: codecs.into_iter().map(experts).collect(),
            // Half of them read the hidden state, half of them make it.
            trunk: trunk / rate("projection in", q4) + trunk / rate("projection out", q4),
            head: self.weights.head as f64 / rate("head, a piece", q8),
            rest: (threads == 1).then(|| rest.iter().map(|rest| rest.seconds).sum()),
        }
    }
}

/// Predicted seconds of one token.
struct Step {
    threads: usize,
    /// In the model's usual format.
    experts: f64,
    /// In every format.
    formats: Vec<Experts>,
    trunk: f64,
    head: f64,
    /// What is not a product, which is measured on one thread only.
    rest: Option<f64>,
}

/// The experts of one token in one format.
struct Experts {
    codec: Codec,
    bytes: f64,
    seconds: f64,
}

impl Step {
    fn products(&self) -> f64 {
        self.products_with(self.experts)
    }

    fn products_with(&self, experts: f64) -> f64 {
        experts + self.trunk + self.head
    }

    /// Of the whole step.
    fn share_of_rest(&self) -> Option<f64> {
        self.rest.map(|rest| rest / (rest + self.products()))
    }

    fn json(&self) -> Value {
        let format = |experts: &Experts| {
            json!({
                "codec": experts.codec.name(),
                "bytes": experts.bytes.round() as u64,
                "experts_seconds": experts.seconds,
                "products_seconds": self.products_with(experts.seconds),
            })
        };
        json!({
            "threads": self.threads,
            "formats": self.formats.iter().map(format).collect::<Vec<_>>(),
            "experts_seconds": self.experts,
            "trunk_seconds": self.trunk,
            "head_seconds": self.head,
            "products_seconds": self.products(),
            "rest_seconds": self.rest,
            "share_of_rest": self.share_of_rest(),
        })
    }
}

/// What some threads of this machine can do at best.
struct Machine {
    threads: usize,
    read_bytes_per_s: f64,
    multiply_adds_per_s: f64,
}

impl Machine {
    /// The fastest of many short measurements, as for products.
    fn measure(pool: &Pool, bytes: &[u8]) -> Self {
        /// Some hundred microseconds of either.
        const PIECE: usize = 1 << 20;
        const ROUNDS: usize = 1000;
        let threads = pool.threads();
        let (mut read, mut computed) = (0.0f64, 0.0f64);
        for piece in bytes.chunks(PIECE * threads) {
            let mut parts: Vec<&[u8]> = piece.chunks(PIECE / 8).collect();
            let start = Instant::now();
            pool.each(&mut parts, usize::MAX, |part| {
                black_box(probe::sum_words(part));
            });
            read = read.max(piece.len() as f64 / start.elapsed().as_secs_f64());
            let mut done = vec![0; 8 * threads];
            let start = Instant::now();
            pool.each(&mut done, usize::MAX, |done| *done = probe::multiply_add(ROUNDS));
            let multiply_adds = done.iter().sum::<u64>() as f64;
            computed = computed.max(multiply_adds / start.elapsed().as_secs_f64());
        }
        Self { threads, read_bytes_per_s: read, multiply_adds_per_s: computed }
    }

    fn json(&self) -> Value {
        json!({
            "threads": self.threads,
            "read_gb_per_s": self.read_bytes_per_s / 1e9,
            "gfma_per_s": self.multiply_adds_per_s / 1e9,
        })
    }
}

/// Weights of one format under one shape, as many as fit into the bytes there are.
struct Weights<'a> {
    shape: Shape,
    codec: Codec,
    row_bytes: f64,
    /// One of as many rows as there is room for, of which a call takes some; or, where rows do not lie one
    /// after another, copies of one.
    matrices: Vec<Tall<'a>>,
}

/// What a [`Matrix`] is made of.
struct Tall<'a> {
    rows: usize,
    codes: &'a [u8],
    scales: Vec<u8>,
    tables: Vec<f32>,
}

impl<'a> Weights<'a> {
    fn new(codec: Codec, shape: &Shape, bytes: &'a mut [u8]) -> Result<Self> {
        if codec == Codec::Mxfp4z {
            return Self::coded(shape, bytes);
        }
        // In whole index blocks, which take the same bytes each.
        let block = codec.layout(INDEX_BLOCK, shape.cols)?;
        let blocks = bytes.len() / block.codes;
        ensure!(blocks > 0, "--budget is too small for a piece of a matrix");
        let rows = blocks * INDEX_BLOCK;
        let codes = &mut bytes[..blocks * block.codes];
        // 2^-5 as f16, and 2^-7 as an exponent of mxfp4.
        let scales = match codec {
            Codec::Mxfp4 => vec![120; blocks * block.scales],
            Codec::Trellis(trellis) => trellis_scales(trellis, rows, shape.cols, codes)?,
            _ => [0x00, 0x28].repeat(blocks * block.scales / 2),
        };
        let codes = &*codes;
        let row_bytes = (block.codes + block.scales) as f64 / INDEX_BLOCK as f64;
        let tables = match codec {
            Codec::Vq(vq) => numbers(vq.stages * vq.entries * 8),
            _ => Vec::new(),
        };
        let matrices = vec![Tall { rows, codes, scales, tables }];
        Ok(Self { shape: *shape, codec, row_bytes, matrices })
    }

    /// Copies of an entropy-coded matrix, whose bytes cannot be any.
    fn coded(shape: &Shape, bytes: &'a mut [u8]) -> Result<Self> {
        let codec = Codec::Mxfp4z;
        let room = |rows: usize| -> Result<bool> {
            Ok(codec.layout(rows, shape.cols)?.codes <= bytes.len())
        };
        let mut rows = shape.rows.min(CODED_ROWS);
        while !room(rows)? {
            rows /= 2;
        }
        rows -= rows % INDEX_BLOCK;
        ensure!(rows > 0, "--budget is too small for a piece of a matrix");
        let one = synthetic_mxfp4z(rows, shape.cols, 0)?;
        let mut matrices = Vec::new();
        for codes in bytes.chunks_exact_mut(one.len()) {
            codes.copy_from_slice(&one);
            matrices.push(Tall { rows, codes, scales: Vec::new(), tables: Vec::new() });
        }
        let row_bytes = one.len() as f64 / rows as f64;
        Ok(Self { shape: *shape, codec, row_bytes, matrices })
    }

    /// Parts of `rows` rows each, as they follow one another in memory.
    fn pieces(&self, rows: usize) -> Result<Vec<Matrix<'_>>> {
        let mut pieces = Vec::new();
        for Tall { rows: all, codes, scales, tables } in &self.matrices {
            let cols = self.shape.cols;
            let matrix = Matrix::with_tables(self.codec, *all, cols, codes, scales, tables)?;
            let firsts = (0..all + 1 - rows).step_by(rows);
            pieces.extend(firsts.map(|first| matrix.row_range(first..first + rows)));
        }
        Ok(pieces)
    }

    /// Multiplies for `slot` seconds and takes the fastest call, because machines are noisy. `hot`
    /// takes the same rows every time, few enough for the core's own cache; otherwise one piece
    /// follows the other through memory.
    fn time(
        &self,
        kernels: &Kernels,
        pool: &Pool,
        machine: &Machine,
        n: usize,
        hot: bool,
        slot: f64,
    ) -> Result<Timing> {
        let (cols, row_bytes) = (self.shape.cols, self.row_bytes);
        let work = (slot * 1e9).clamp(*CALL.start(), *CALL.end());
        let affordable = work * machine.threads as f64 / (cols * n) as f64;
        let fitting = if hot { HOT_BYTES as f64 / row_bytes } else { f64::INFINITY };
        let affordable = affordable.min(fitting) as usize;
        let step = if affordable < INDEX_BLOCK { 16 } else { INDEX_BLOCK };
        let rows = affordable.next_multiple_of(step);
        let rows = rows.min(self.shape.rows).min(self.matrices[0].rows);
        let pieces = self.pieces(rows)?;

        let x = numbers(n * cols);
        let mut out = vec![0.0; rows * n];
        let (mut best, mut piece) = (f64::INFINITY, &pieces[0]);
        let start = Instant::now();
        let mut calls = 0;
        while calls < 2 || start.elapsed() < Duration::from_secs_f64(slot) {
            piece = &pieces[if hot { 0 } else { calls % pieces.len() }];
            let call = Instant::now();
            // As the engine does it.
            let inputs = Inputs::new(&[self.codec], &x, n, cols);
            pool.rows(rows, rows * cols * n, &mut out, |range, out| {
                kernels.multiply(&piece.row_range(range), &inputs, out);
            });
            best = best.min(call.elapsed().as_secs_f64());
            calls += 1;
        }
        check(piece, &x, n, &out).with_context(|| {
            format!("{} kernels, {}, {}", kernels.name(), self.codec.name(), self.shape.name)
        })?;
        let bytes_per_s = rows as f64 * row_bytes / best;
        let multiply_adds_per_s = (rows * cols * n) as f64 / best;
        Ok(Timing {
            codec: self.codec,
            shape: self.shape,
            vectors: n,
            threads: machine.threads,
            hot,
            bits: 8.0 * row_bytes / cols as f64,
            multiply_adds_per_s,
            bytes_per_s,
            share_of_bandwidth: (!hot).then_some(bytes_per_s / machine.read_bytes_per_s),
            share_of_fma: multiply_adds_per_s / machine.multiply_adds_per_s,
        })
    }
}

/// A measured product.
struct Timing {
    codec: Codec,
    shape: Shape,
    vectors: usize,
    threads: usize,
    hot: bool,
    /// Of a weight, as stored.
    bits: f64,
    multiply_adds_per_s: f64,
    bytes_per_s: f64,
    /// Of what is read from memory.
    share_of_bandwidth: Option<f64>,
    share_of_fma: f64,
}

impl Timing {
    fn json(&self, kernels: &Kernels) -> Value {
        json!({
            "codec": self.codec.name(),
            "bits_per_weight": self.bits,
            "isa": kernels.name(),
            "shape": self.shape.name,
            "rows": self.shape.rows,
            "cols": self.shape.cols,
            "vectors": self.vectors,
            "threads": self.threads,
            "from": if self.hot { "cache" } else { "memory" },
            "gweights_per_s": self.multiply_adds_per_s / 1e9,
            "gb_per_s": self.bytes_per_s / 1e9,
            "share_of_bandwidth": self.share_of_bandwidth,
            "share_of_fma_peak": self.share_of_fma,
        })
    }
}

/// Compares some results, `out` (rows, n), with the specification's.
fn check(m: &Matrix<'_>, x: &[f32], n: usize, out: &[f32]) -> Result<()> {
    let (rows, cols) = (m.rows(), m.cols());
    for row in [0, rows / 2, rows - 1] {
        for t in [0, n - 1] {
            let mut expected = [0.0];
            let x = &x[t * cols..][..cols];
            Kernels::SCALAR.matmul(&m.row_range(row..row + 1), x, 1, &mut expected);
            let (expected, found) = (expected[0], out[row * n + t]);
            ensure!(expected.is_finite(), "the weights are unfit to measure with");
            if found.to_bits() != expected.to_bits() {
                bail!("row {row} times vector {t} is {found:e}, should be {expected:e}");
            }
        }
    }
    Ok(())
}

/// Tables and side nibbles of a matrix whose lines are any, and scales at the ends of these.
fn trellis_scales(trellis: Trellis, rows: usize, cols: usize, codes: &mut [u8]) -> Result<Vec<u8>> {
    let codec = Codec::Trellis(trellis);
    /// Rows of a tile, and bytes of a line, of which a row has eight.
    const TILE: usize = 8;
    /// Magnitudes of a table.
    const ENTRIES: usize = 32;
    let tile_bytes = codec.layout(TILE, cols)?.codes;
    for tile in codes.chunks_exact_mut(tile_bytes) {
        for word in tile[tile_bytes - 8 * TILE..].as_chunks_mut::<8>().0 {
            word[4..].copy_from_slice(&(1.0f32 / 1024.0).to_le_bytes());
        }
    }
    // Both classes, and of two powers of two.
    let mut scales = vec![0x19; codec.layout(rows, cols)?.scales];
    for (i, byte) in scales[..codec.table_bytes()].iter_mut().enumerate() {
        // Magnitudes from 0 on; a rotated matrix has no second table.
        *byte = if trellis.is_rotated() && i >= ENTRIES { 0 } else { 2 * (i % ENTRIES) as u8 };
    }
    Ok(scales)
}

/// The entropy-coded format is the last, since its matrices take the place of random bytes.
fn codecs() -> Result<Vec<Codec>> {
    let vq = |stages, entries, packed| {
        Codec::Vq(Vq { stages, entries, index_block: INDEX_BLOCK, packed })
    };
    Ok(vec![
        Codec::F32,
        Codec::Bf16,
        Codec::Q8 { group: GROUP },
        Codec::Q4 { group: GROUP },
        Codec::Mxfp4,
        vq(3, 256, false),
        vq(2, 256, false),
        vq(4, 64, true),
        Codec::Trellis(Trellis::new(24, TRELLIS_WIDTH as usize)?),
        Codec::Trellis(Trellis::rotated(28, TRELLIS_WIDTH as usize)?),
        Codec::Mxfp4z,
    ])
}

/// Numbers around zero, different from each other.
pub(super) fn numbers(n: usize) -> Vec<f32> {
    let spread = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0;
    (0..n as u32).map(spread).collect()
}

/// Random bytes: any, which will do as codes, or those of numbers between 2^-15 and 1, as f32 and as
/// bf16.
fn fill(bytes: &mut [u8], numbers: bool) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for bytes in bytes.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = match numbers {
            true => state & 0x87ff_87ff_87ff_87ff | 0x3800_3800_3800_3800,
            false => state,
        };
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// Bytes of the largest cache, if the system says.
fn last_level_cache_bytes() -> Option<u64> {
    let sizes = (0..8).filter_map(|index| {
        let file = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = std::fs::read_to_string(file).ok()?;
        let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
        Some(kib << 10)
    });
    sizes.max()
}

fn text(
    model: &Model,
    kernels: &Kernels,
    walked: u64,
    cache: Option<u64>,
    machine: &[Machine],
    rows: &[Timing],
    steps: &[Step],
) -> Result<String> {
    let mut out = String::new();
    let cache = cache.map_or("of unknown size".to_owned(), |b| format!("of {} MB", b / 1_000_000));
    writeln!(
        out,
        "{}, {} kernels; {} MB of weights, last-level cache {cache}",
        model.name,
        kernels.name(),
        walked / 1_000_000,
    )?;
    for m in machine {
        writeln!(
            out,
            "{} read {:.1} GB/s and did {:.1} G multiply-adds/s at most",
            threads(m.threads),
            m.read_bytes_per_s / 1e9,
            m.multiply_adds_per_s / 1e9,
        )?;
    }
    writeln!(
        out,
        "\nformat           bits shape            vectors threads from    Gweights/s   GB/s  of reading  \
         of FMA"
    )?;
    for row in rows {
        writeln!(
            out,
            "{:<15} {:>5.2} {:<16} {:>7} {:>7} {:<7} {:>10.2} {:>6.2} {:>11} {:>5.0} %",
            row.codec.name(),
            row.bits,
            row.shape.name,
            row.vectors,
            row.threads,
            if row.hot { "cache" } else { "memory" },
            row.multiply_adds_per_s / 1e9,
            row.bytes_per_s / 1e9,
            row.share_of_bandwidth.map_or(String::new(), |share| format!("{:.0} %", 100.0 * share)),
            100.0 * row.share_of_fma,
        )?;
    }
    writeln!(
        out,
        "\nA token's products at these rates: {:.1} G weights of experts in {}, {:.1} G of the trunk in q4, \
         {:.1} G of the head in q8",
        model.weights.experts as f64 / 1e9,
        model.expert_codec.name(),
        model.weights.trunk as f64 / 1e9,
        model.weights.head as f64 / 1e9,
    )?;
    for step in steps {
        writeln!(
            out,
            "{}: {:.2} s (experts {:.2}, trunk {:.2}, head {:.2})",
            threads(step.threads),
            step.products(),
            step.experts,
            step.trunk,
            step.head,
        )?;
        if let (Some(rest), Some(share)) = (step.rest, step.share_of_rest()) {
            writeln!(
                out,
                "          and {rest:.2} s besides products, {:.1} % of both",
                100.0 * share
            )?;
        }
    }
    writeln!(out, "\nThe same with experts in other formats: GB of them, seconds of all products")?;
    let Some(first) = steps.first() else { return Ok(out) };
    for (i, experts) in first.formats.iter().enumerate() {
        write!(out, "{:<15} {:>6.1} GB", experts.codec.name(), experts.bytes / 1e9)?;
        for step in steps {
            let seconds = step.products_with(step.formats[i].seconds);
            write!(out, ", {seconds:.2} s on {}", threads(step.threads))?;
        }
        writeln!(out)?;
    }
    Ok(out)
}

/// What a token takes besides products, kernel by kernel.
fn rest_text(out: &mut String, positions: u32, rest: &[Rest]) -> Result<()> {
    writeln!(
        out,
        "\nBesides products, at {positions} positions on one thread: calls, ns a call, ms a token"
    )?;
    for Rest { name, calls, seconds } in rest {
        let ns = 1e9 * seconds / *calls as f64;
        writeln!(out, "{name:<22} {calls:>8} {ns:>10.0} {:>9.2}", 1e3 * seconds)?;
    }
    Ok(())
}

fn threads(n: usize) -> String {
    if n == 1 { "1 thread".to_owned() } else { format!("{n} threads") }
}

#[cfg(test)]
mod tests {
    use rill_kernels::{Codec, Kernels};

    use super::{Shape, Weights, check, fill, numbers};

    #[test]
    fn one_wrong_bit_in_a_result_fails_the_check() {
        let mut bytes = vec![0; 1 << 16];
        fill(&mut bytes, true);
        let shape = Shape { name: "test", rows: 64, cols: 96 };
        let weights = Weights::new(Codec::Bf16, &shape, &mut bytes).unwrap();
        let matrix = weights.pieces(64).unwrap()[0];
        let (x, n) = (numbers(4 * 96), 4);
        let mut out = vec![0.0; 64 * n];
        Kernels::detect().matmul(&matrix, &x, n, &mut out);
        check(&matrix, &x, n, &out).unwrap();
        for at in [0, 3, 32 * n, 63 * n, 63 * n + 3] {
            let right = out[at];
            out[at] = f32::from_bits(right.to_bits() ^ 1);
            let error = check(&matrix, &x, n, &out).unwrap_err().to_string();
            assert!(error.contains(&format!("row {} times vector {}", at / n, at % n)), "{error}");
            out[at] = right;
        }
    }
}
