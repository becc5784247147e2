//! What a token costs besides its products: every other kernel at a model's widths, as often as one
//! token calls it, over as much memory as a token touches, as far as that is allowed.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;
use rill::config::{Activation, AttentionKind, DecayGate, FfnKind, ModelConfig};
use rill_kernels::{Codec, Kernels, Latents, Matrix};
use serde_json::{Value, json};

use super::kernels::{GROUP, numbers};

/// Heads that one call of attention gets, as in the engine.
const TOGETHER: usize = 32;
/// Parts of a token's calls, each timed alone, so that some are not interrupted.
const PARTS: usize = 72;
/// Kernels that are timed, at most.
pub(crate) const KERNELS: usize = 24;

/// One kernel's share of a token.
pub(crate) struct Rest {
    pub(crate) name: &'static str,
    /// Calls of a token.
    pub(crate) calls: usize,
    /// Of all of them, on one thread.
    pub(crate) seconds: f64,
}

impl Rest {
    pub(crate) fn json(&self) -> Value {
        json!({ "kernel": self.name, "calls": self.calls, "seconds": self.seconds })
    }
}

/// Measures what one token needs besides products at a context of `positions`, `slot` seconds for
/// each kernel, in no more than about `budget` bytes for states, caches and weights each.
///
/// # Errors
/// A configuration whose absorbed weights have no layout.
pub(crate) fn measure(
    config: &ModelConfig,
    kernels: &Kernels,
    positions: usize,
    budget: usize,
    slot: f64,
) -> Result<Vec<Rest>> {
    let mut timer = Timer { kernels, slot, budget, rest: Vec::new() };
    residuals(config, &mut timer);
    kda(config, &mut timer);
    mla(config, positions, &mut timer)?;
    feed_forward(config, &mut timer);
    Ok(timer.rest)
}

struct Timer<'a> {
    kernels: &'a Kernels,
    slot: f64,
    budget: usize,
    rest: Vec<Rest>,
}

impl Timer<'_> {
    /// Times `step(kernels, i)` for `i` in 0..`calls`; the fastest part of them counts for all.
    fn time(&mut self, name: &'static str, calls: usize, mut step: impl FnMut(&Kernels, usize)) {
        if calls == 0 {
            return;
        }
        let part = calls.div_ceil(PARTS);
        let (mut best, mut first, mut n) = (f64::INFINITY, 0, 0);
        let begun = Instant::now();
        // The first part brings code and data near.
        while n < 2 || begun.elapsed() < Duration::from_secs_f64(self.slot) {
            let start = Instant::now();
            (first..first + part).for_each(|i| step(self.kernels, i % calls));
            best = best.min(start.elapsed().as_secs_f64() / part as f64);
            first = (first + part) % calls;
            n += 1;
        }
        self.rest.push(Rest { name, calls, seconds: best * calls as f64 });
    }

    /// How many of `wanted` pieces of `n` f32 fit into the budget, at least one.
    fn pieces(&self, wanted: usize, n: usize) -> usize {
        (self.budget / (4 * n)).clamp(1, wanted.max(1))
    }
}

fn residuals(config: &ModelConfig, timer: &mut Timer<'_>) {
    let (hidden, layers, eps) = (config.hidden_size, config.layers.len(), config.rms_norm_eps);
    let (x, w, mut out) = (numbers(hidden), numbers(hidden), vec![0.0; hidden]);
    timer.time("rms_norm, hidden", 2 * layers + 1, |k, _| k.rms_norm(&x, &w, eps, &mut out));
    // Both halves of a layer and the shared expert; sums grow slowly enough.
    timer.time("add, hidden", 3 * layers, |k, _| k.add(&x, &mut out));
    let Some(size) = config.attn_res_block_size else { return };
    // A layer's first mix reads the sums stored before it, its second also the one stored in it.
    let before = |layer: usize| layer.div_ceil(size);
    let after = |layer: usize| layer / size + 1;
    let mixes: Vec<usize> = (0..layers)
        .flat_map(|layer| [before(layer), after(layer)])
        .chain([after(layers - 1)])
        .filter(|&stored| stored > 0)
        .map(|stored| stored + 1)
        .collect();
    let candidates: usize = mixes.iter().sum();
    let most = mixes.iter().copied().max().unwrap_or(1);
    let sums: Vec<Vec<f32>> = (0..most).map(|_| numbers(hidden)).collect();
    timer.time("mix: dot", candidates, |k, i| {
        black_box(k.dot(&sums[i % most], &w));
    });
    timer.time("mix: inverse_rms", candidates, |k, i| {
        black_box(k.inverse_rms(&sums[i % most], eps));
    });
    let mut scores = numbers(most);
    timer.time("mix: softmax", mixes.len(), |k, _| k.softmax(&mut scores));
    timer.time("mix: axpy", candidates, |k, i| k.axpy(0.1, &sums[i % most], &mut out));
}

fn kda(config: &ModelConfig, timer: &mut Timer<'_>) {
    let layers = config.layers.iter().filter(|l| l.attention == AttentionKind::Kda).count();
    let (kda, eps) = (&config.kda, config.rms_norm_eps);
    let (dim, heads) = (kda.head_dim, layers * kda.n_heads);
    let (p, taps) = (kda.n_heads * dim, kda.conv_kernel_size);
    let (mut x, weights) = (numbers(p), numbers(taps * p));
    let kept = (taps - 1) * p;
    let n = timer.pieces(3 * layers, kept.max(1));
    let mut history = numbers(n * kept);
    timer.time("short_conv", 3 * layers, |k, i| {
        x.fill(0.5);
        k.short_conv(&mut x, &mut history[i % n * kept..][..kept], &weights);
    });
    let (mut beta, z, bias) = (numbers(kda.n_heads), numbers(p), numbers(dim));
    timer.time("sigmoid, beta", layers, |k, _| k.sigmoid(&mut beta));
    let [mut q, mut key, mut decay, mut out] = [(); 4].map(|()| numbers(dim));
    timer.time("l2_normalise", 2 * heads, |k, _| k.l2_normalise(&mut q, 1.0));
    let z = |i: usize| &z[i % kda.n_heads * dim..][..dim];
    timer.time("decay", heads, |k, i| match kda.decay_gate {
        DecayGate::Bounded { lower_bound } => {
            k.decay_bounded(z(i), &bias, 0.5, lower_bound, &mut decay);
        }
        DecayGate::Unbounded => k.decay_unbounded(z(i), &bias, 0.5, &mut decay),
    });
    let n = timer.pieces(heads, dim * dim);
    let (mut states, mut v) = (numbers(n * dim * dim), numbers(dim));
    Kernels::SCALAR.l2_normalise(&mut key, 1.0);
    decay.fill(0.99);
    timer.time("kda_step", heads, |k, i| {
        v.fill(0.5);
        let state = &mut states[i % n * dim * dim..][..dim * dim];
        k.kda_step(state, &decay, &q, &key, &mut v, 0.7, &mut out);
    });
    let norm = numbers(dim);
    timer.time("rms_norm, head", heads, |k, i| k.rms_norm(z(i), &norm, eps, &mut out));
    timer.time("sigmoid_gate, head", heads, |k, i| {
        out.fill(0.5);
        k.sigmoid_gate(&mut out, z(i));
    });
}

fn mla(config: &ModelConfig, positions: usize, timer: &mut Timer<'_>) -> Result<()> {
    let layers = config.layers.iter().filter(|l| l.attention == AttentionKind::Mla).count();
    let (mla, eps) = (&config.mla, config.rms_norm_eps);
    let (heads, rank, nope) = (mla.n_heads, mla.kv_lora_rank, mla.qk_nope_head_dim);
    for (name, n) in [("rms_norm, query", mla.q_lora_rank), ("rms_norm, latent", Some(rank))] {
        let Some(n) = n else { continue };
        let (x, w, mut out) = (numbers(n), numbers(n), vec![0.0; n]);
        timer.time(name, layers, |k, _| k.rms_norm(&x, &w, eps, &mut out));
    }
    // The keys' half of kv_b_proj of every layer, in q8; zeros take as long as anything.
    let codec = Codec::Q8 { group: GROUP };
    let n = timer.pieces(layers * heads, nope * rank / 4);
    let layout = codec.layout(n * nope, rank)?;
    let (codes, scales) = (vec![1; layout.codes], [0x00, 0x28].repeat(layout.scales / 2));
    let matrix = Matrix::new(codec, n * nope, rank, &codes, &scales)?;
    let (query, mut out) = (numbers(nope), vec![0.0; rank]);
    timer.time("columns", layers * heads, |k, i| {
        let i = i % n;
        k.columns(&matrix.row_range(i * nope..(i + 1) * nope), &query, &mut out);
    });
    let width = rank + mla.qk_rope_head_dim;
    let parts = heads.div_ceil(TOGETHER);
    let together = heads.div_ceil(parts);
    let n = timer.pieces(layers, positions * width);
    let cache = numbers(n * positions * width);
    let (query, mut latents) = (numbers(together * width), numbers(together * rank));
    timer.time("attend, some heads", layers * parts, |k, i| {
        let cache = &cache[i / parts % n * positions * width..][..positions * width];
        k.attend(&query, width, Latents::F32(cache), 0.07, &mut latents);
    });
    if mla.output_gate {
        let n = heads * mla.v_head_dim;
        let (mut x, gate) = (numbers(n), numbers(n));
        timer.time("sigmoid_gate, heads", layers, |k, _| {
            x.fill(0.5);
            k.sigmoid_gate(&mut x, &gate);
        });
    }
    Ok(())
}

fn feed_forward(config: &ModelConfig, timer: &mut Timer<'_>) {
    let layers = config.layers.iter().filter(|l| l.ffn == FfnKind::Moe).count();
    let moe = &config.moe;
    let mut scores = numbers(moe.n_experts);
    timer.time("sigmoid, router", layers, |k, _| k.sigmoid(&mut scores));
    let inner = moe.intermediate_size;
    for (name, calls, n) in [
        ("activation, routed", layers * moe.top_k, inner),
        ("activation, shared", layers, moe.n_shared_experts * inner),
        ("activation, dense", config.layers.len() - layers, config.dense_intermediate_size),
    ] {
        let (fresh, mut gate, up) = (numbers(n), numbers(n), numbers(n));
        timer.time(name, calls, |k, _| {
            // Results as inputs would shrink until they are subnormal, and slow.
            gate.copy_from_slice(&fresh);
            match config.activation {
                Activation::Situ { beta, linear_beta } => {
                    k.situ_product(&mut gate, &up, beta, linear_beta);
                }
                Activation::Silu => k.silu_product(&mut gate, &up),
            }
        });
    }
    let width = moe.latent.as_ref().map_or(config.hidden_size, |latent| latent.size);
    let (x, mut y, norm) = (numbers(width), numbers(width), numbers(width));
    timer.time("axpy, experts", layers * moe.top_k, |k, _| k.axpy(0.1, &x, &mut y));
    if moe.latent.as_ref().is_some_and(|latent| latent.norm) {
        let mut out = numbers(width);
        let eps = config.rms_norm_eps;
        timer.time("rms_norm, experts", layers, |k, _| k.rms_norm(&x, &norm, eps, &mut out));
    }
}
