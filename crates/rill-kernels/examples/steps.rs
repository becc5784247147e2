//! What a token costs on one core besides its matrix products, kernel by kernel:
//!
//! ```text
//! cargo run --release -p rill-kernels --example steps [k3|kimi-linear [POSITIONS [FORMAT [KERNELS...]]]]
//! ```
//!
//! Every kernel runs at the model's widths as often as one token calls it, over as much data as a
//! token touches where that is what limits it: recurrent states, the latents of POSITIONS (4096)
//! positions, and the absorbed weights in FORMAT (q8). The portable set calls a routine for each
//! fused multiply-add and takes minutes; name others to leave it out. Prints nanoseconds a call, milliseconds a
//! token and their sum for every set of kernels; the best of several runs, because machines are
//! noisy.

use std::hint::black_box;
use std::time::Instant;

use rill_kernels::{Codec, Kernels, LatentCache, LatentFormat, Matrix};

/// Widths and counts of a model.
struct Model {
    hidden: usize,
    kda_layers: usize,
    mla_layers: usize,
    heads: usize,
    /// Of the factorised query; 0 without one.
    q_rank: usize,
    experts: usize,
    top_k: usize,
    /// What a routed expert reads, its inner width, and that of the shared one.
    expert: [usize; 3],
    dense: usize,
    /// SiTU, attention residuals and the bounded gate, which came together.
    k3: bool,
}

const K3: Model = Model {
    hidden: 7168,
    kda_layers: 69,
    mla_layers: 24,
    heads: 96,
    q_rank: 1536,
    experts: 896,
    top_k: 16,
    expert: [3584, 3072, 6144],
    dense: 33792,
    k3: true,
};

const KIMI_LINEAR: Model = Model {
    hidden: 2304,
    kda_layers: 20,
    mla_layers: 7,
    heads: 32,
    q_rank: 0,
    experts: 256,
    top_k: 8,
    expert: [2304, 1024, 1024],
    dense: 9216,
    k3: false,
};

/// Width of a KDA head, of an MLA head's keys and values without the shared part, of a latent, and
/// of a cached position; taps of the short convolution. Both models have these.
const HEAD: usize = 128;
const RANK: usize = 512;
const WIDTH: usize = RANK + 64;
const TAPS: usize = 4;
/// Heads that one call of attention gets.
const TOGETHER: usize = 32;

/// Repetitions, and parts of each.
const RUNS: usize = 5;
const PARTS: usize = 72;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let (name, model) = match arg(0) {
        None | Some("k3") => ("Kimi K3", K3),
        Some("kimi-linear") => ("Kimi-Linear", KIMI_LINEAR),
        Some(other) => panic!("no model {other}"),
    };
    let positions: usize = arg(1).map_or(4096, |n| n.parse().expect("a number of positions"));
    let codec = Codec::parse(arg(2).unwrap_or("q8"), 128).expect("a format that can be written");
    println!("{name}, {positions} positions, absorbed weights in {}", codec.name());
    println!("{:<22} {:>8}  ns a call, ms a token, each of:", "", "calls");
    let named = |set: &Kernels| args.len() < 4 || args[3..].iter().any(|name| name == set.name());
    let sets: Vec<Kernels> = Kernels::all().into_iter().filter(named).collect();
    print!("{:<31}", "");
    sets.iter().for_each(|set| print!(" {:>18}", set.name()));
    println!();
    let mut report = Report { totals: vec![0.0; sets.len()], sets };
    norms(&model, &mut report);
    kda(&model, &mut report);
    mla(&model, positions, codec, &mut report);
    feed_forward(&model, &mut report);
    print!("{:<31}", "sum");
    report.totals.iter().for_each(|ms| print!(" {:>9} {ms:>8.2}", ""));
    println!();
}

struct Report {
    sets: Vec<Kernels>,
    totals: Vec<f64>,
}

impl Report {
    /// Times `step(kernels, i)` for `i` in 0..`calls`, as one token does, in parts so short that
    /// some are not interrupted; the fastest part counts for all.
    fn time(&mut self, name: &str, calls: usize, mut step: impl FnMut(&Kernels, usize)) {
        let part = calls.div_ceil(PARTS);
        let mut best = vec![f64::INFINITY; self.sets.len()];
        for _ in 0..RUNS {
            for (set, best) in self.sets.iter().zip(&mut best) {
                for first in (0..=calls - part).step_by(part) {
                    let start = Instant::now();
                    (first..first + part).for_each(|i| step(set, i));
                    *best = best.min(start.elapsed().as_secs_f64() / part as f64);
                }
            }
        }
        print!("{name:<22} {calls:>8}");
        for (seconds, total) in best.iter().zip(&mut self.totals) {
            let (ns, ms) = (seconds * 1e9, seconds * 1e3 * calls as f64);
            print!(" {ns:>9.0} {ms:>8.2}");
            *total += ms;
        }
        println!();
    }
}

/// Numbers around zero, different from each other.
fn numbers(n: usize) -> Vec<f32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0).collect()
}

fn norms(model: &Model, report: &mut Report) {
    let hidden = model.hidden;
    let layers = model.kda_layers + model.mla_layers;
    let (x, w) = (numbers(hidden), numbers(hidden));
    let mut out = vec![0.0; hidden];
    report.time("rms_norm, hidden", 2 * layers + 1, |k, _| k.rms_norm(&x, &w, 1e-5, &mut out));
    report.time("add, hidden", 3 * layers, |k, _| k.add(&x, &mut out));
    if model.k3 {
        // Two mixes a layer; stored sums and the live one are 1,002 candidates in all.
        let candidates: Vec<Vec<f32>> = (0..9).map(|_| numbers(hidden)).collect();
        report.time("mix: dot", 1002, |k, i| {
            black_box(k.dot(&candidates[i % 9], &w));
        });
        report.time("mix: inverse_rms", 1002, |k, i| {
            black_box(k.inverse_rms(&candidates[i % 9], 1e-5));
        });
        let mut scores = numbers(9);
        report.time("mix: softmax", 186, |k, _| k.softmax(&mut scores));
        report.time("mix: axpy", 1002, |k, i| k.axpy(0.1, &candidates[i % 9], &mut out));
    }
}

fn kda(model: &Model, report: &mut Report) {
    let (layers, p) = (model.kda_layers, model.heads * HEAD);
    let heads = layers * model.heads;
    let (mut x, taps) = (numbers(p), numbers(TAPS * p));
    let mut history = numbers(3 * layers * (TAPS - 1) * p);
    report.time("short_conv", 3 * layers, |k, i| {
        x.fill(0.5);
        k.short_conv(&mut x, &mut history[i * (TAPS - 1) * p..][..(TAPS - 1) * p], &taps);
    });
    let (mut beta, z, bias) = (numbers(model.heads), numbers(p), numbers(HEAD));
    report.time("sigmoid, beta", layers, |k, _| k.sigmoid(&mut beta));
    let [mut q, mut k_h, mut decay, mut out] = [(); 4].map(|()| numbers(HEAD));
    report.time("l2_normalise", 2 * heads, |k, _| k.l2_normalise(&mut q, 1.0));
    let z = |i: usize| &z[i % model.heads * HEAD..][..HEAD];
    if model.k3 {
        report.time("decay_bounded", heads, |k, i| {
            k.decay_bounded(z(i), &bias, 0.5, -5.0, &mut decay);
        });
    } else {
        report.time("decay_unbounded", heads, |k, i| {
            k.decay_unbounded(z(i), &bias, 0.5, &mut decay);
        });
    }
    let mut states = numbers(heads * HEAD * HEAD);
    let mut v = numbers(HEAD);
    Kernels::SCALAR.l2_normalise(&mut k_h, 1.0);
    decay.fill(0.99);
    report.time("kda_step", heads, |k, i| {
        let state = &mut states[i * HEAD * HEAD..][..HEAD * HEAD];
        v.fill(0.5);
        k.kda_step(state, &decay, &q, &k_h, &mut v, 0.7, &mut out);
    });
    let norm = numbers(HEAD);
    report.time("rms_norm, head", heads, |k, i| k.rms_norm(z(i), &norm, 1e-5, &mut out));
    report.time("sigmoid_gate, head", heads, |k, i| {
        out.fill(0.5);
        k.sigmoid_gate(&mut out, z(i));
    });
}

fn mla(model: &Model, positions: usize, codec: Codec, report: &mut Report) {
    let (layers, heads) = (model.mla_layers, model.heads);
    let (x, w) = (numbers(model.q_rank), numbers(model.q_rank));
    let mut out = vec![0.0; model.q_rank];
    if model.q_rank > 0 {
        report.time("rms_norm, query", layers, |k, _| k.rms_norm(&x, &w, 1e-5, &mut out));
    }
    let (x, w) = (numbers(RANK), numbers(RANK));
    let mut out = vec![0.0; RANK];
    report.time("rms_norm, latent", layers, |k, _| k.rms_norm(&x, &w, 1e-5, &mut out));

    // The keys' half of kv_b_proj of every layer.
    let rows = layers * heads * HEAD;
    let layout = codec.layout(rows, RANK).expect("whole blocks");
    let (mut codes, mut scales) = (vec![0; layout.codes], vec![0; layout.scales]);
    let (code_bytes, scale_bytes) = (layout.codes / rows, layout.scales / rows);
    let row = numbers(RANK);
    for r in 0..rows {
        let codes = &mut codes[r * code_bytes..][..code_bytes];
        let scales = &mut scales[r * scale_bytes..][..scale_bytes];
        codec.encode_row(&row, codes, scales).expect("finite");
    }
    let matrix = Matrix::new(codec, rows, RANK, &codes, &scales).expect("as encoded");
    let query = numbers(heads * HEAD);
    report.time("columns", layers * heads, |k, i| {
        let query = &query[i % heads * HEAD..][..HEAD];
        k.columns(&matrix.row_range(i * HEAD..(i + 1) * HEAD), query, &mut out);
    });
    let values = numbers(layers * positions * WIDTH);
    let query = numbers(TOGETHER * WIDTH);
    let mut latents = numbers(TOGETHER * RANK);
    let parts = heads / TOGETHER;
    for format in LatentFormat::ALL {
        let caches = values.chunks(positions * WIDTH).map(|values| {
            let mut cache = LatentCache::new(format);
            cache.extend_from_slice(values);
            cache
        });
        let caches: Vec<_> = caches.collect();
        report.time(&format!("attend, 32 heads, {format}"), layers * parts, |k, i| {
            k.attend(&query, WIDTH, caches[i / parts].view(), 0.07, &mut latents);
        });
    }
    if model.k3 {
        let (mut x, gate) = (numbers(heads * HEAD), numbers(heads * HEAD));
        report.time("sigmoid_gate, heads", layers, |k, _| {
            x.fill(0.5);
            k.sigmoid_gate(&mut x, &gate);
        });
    }
}

fn feed_forward(model: &Model, report: &mut Report) {
    let layers = model.kda_layers + model.mla_layers - 1;
    let mut scores = numbers(model.experts);
    report.time("sigmoid, router", layers, |k, _| k.sigmoid(&mut scores));
    let [width, inner, shared] = model.expert;
    for (name, calls, n) in [
        ("activation, routed", layers * model.top_k, inner),
        ("activation, shared", layers, shared),
        ("activation, dense", 1, model.dense),
    ] {
        let (fresh, mut gate, up) = (numbers(n), numbers(n), numbers(n));
        report.time(name, calls, |k, _| {
            // Results as inputs would shrink until they are subnormal, and slow.
            gate.copy_from_slice(&fresh);
            match model.k3 {
                true => k.situ_product(&mut gate, &up, 4.0, 25.0),
                false => k.silu_product(&mut gate, &up),
            }
        });
    }
    let (x, mut y, norm) = (numbers(width), numbers(width), numbers(width));
    report.time("axpy, experts", layers * model.top_k, |k, _| k.axpy(0.1, &x, &mut y));
    if model.k3 {
        let mut out = numbers(width);
        report.time("rms_norm, experts", layers, |k, _| k.rms_norm(&x, &norm, 1e-5, &mut out));
    }
}
