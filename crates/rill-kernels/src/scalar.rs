//! The specification: every kernel in plain Rust, following `docs/arithmetic.md` line by line.
//!
//! Kept forever. Faster kernels have the same names and signatures and must give the same
//! bits. Lengths are the caller's duty here: [`crate::Kernels`] checks them once for all.
//! Everything is `inline(always)` so that the table can also compile it with the machine's
//! fused multiply-add, where plain builds would call a routine for each one.

use crate::codec::plain::{bf16_at, dot_with, f32_at};
use crate::codec::{Codec, PARTIALS, Vq, join, mxfp4, q4, q8, vq};
use crate::latents::Latents;
use crate::matrix::Matrix;
use crate::{ATTENTION_BLOCK, math};

/// Dot product of two vectors of equal length.
#[inline(always)]
pub(crate) fn dot(w: &[f32], x: &[f32]) -> f32 {
    let w = &w[..x.len()];
    dot_with(x, |i| w[i])
}

/// Sum of a vector.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut p = [0.0f32; PARTIALS];
    for chunk in x.chunks(PARTIALS) {
        for (p, x) in p.iter_mut().zip(chunk) {
            *p += x;
        }
    }
    join(p)
}

/// Largest element; NaN never wins and an empty slice gives −∞.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    x.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}

/// `out[r][t] = dot(codes[r], scales[r], x[t])` for `n` vectors: `x` (n, cols), `out` (rows, n).
#[inline(always)]
fn matmul_rows(
    m: &Matrix<'_>,
    x: &[f32],
    n: usize,
    out: &mut [f32],
    dot: impl Fn(&[u8], &[u8], &[f32]) -> f32,
) {
    let (code_bytes, scale_bytes) = (m.codes.len() / m.rows, m.scales.len() / m.rows);
    for (r, out) in out.chunks_exact_mut(n).enumerate() {
        let codes = &m.codes[r * code_bytes..][..code_bytes];
        let scales = &m.scales[r * scale_bytes..][..scale_bytes];
        for (x, out) in x.chunks_exact(m.cols).zip(out) {
            *out = dot(codes, scales, x);
        }
    }
}

/// Product with `n` vectors, f32 weights.
#[inline(always)]
pub(crate) fn matmul_f32(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
    matmul_rows(m, x, n, out, |codes, _, x| dot_with(x, |i| f32_at(codes, i)));
}

/// Product with `n` vectors, bf16 weights.
#[inline(always)]
pub(crate) fn matmul_bf16(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
    matmul_rows(m, x, n, out, |codes, _, x| dot_with(x, |i| bf16_at(codes, i)));
}

/// Product with `n` vectors, q8 weights.
#[inline(always)]
pub(crate) fn matmul_q8(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]) {
    matmul_rows(m, x, n, out, |codes, scales, x| q8::dot(codes, scales, group, x));
}

/// Product with `n` vectors, q4 weights.
#[inline(always)]
pub(crate) fn matmul_q4(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]) {
    matmul_rows(m, x, n, out, |codes, scales, x| q4::dot(codes, scales, group, x));
}

/// Product with `n` vectors, MXFP4 weights.
#[inline(always)]
pub(crate) fn matmul_mxfp4(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
    matmul_rows(m, x, n, out, mxfp4::dot);
}

/// Product with `n` vectors, vector-quantised weights, whose rows are interleaved.
#[inline(always)]
pub(crate) fn matmul_vq(m: &Matrix<'_>, vq: Vq, x: &[f32], n: usize, out: &mut [f32]) {
    for (r, out) in out.chunks_exact_mut(n).enumerate() {
        for (x, out) in x.chunks_exact(m.cols).zip(out) {
            *out = vq::dot(vq, m.codes, m.scales, m.tables, m.first_row + r, x);
        }
    }
}

/// `out[c] = Σ_r a[r]·w[r][c]`, one chain per column: `w` (a.len(), cols) little-endian f32.
#[inline(always)]
pub(crate) fn columns_f32(w: &[u8], a: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (row, &a) in w.chunks_exact(4 * out.len()).zip(a) {
        for (c, out) in out.iter_mut().enumerate() {
            *out = a.mul_add(f32_at(row, c), *out);
        }
    }
}

/// [`columns_f32`] for bf16 weights.
#[inline(always)]
pub(crate) fn columns_bf16(w: &[u8], a: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (row, &a) in w.chunks_exact(2 * out.len()).zip(a) {
        for (c, out) in out.iter_mut().enumerate() {
            *out = a.mul_add(bf16_at(row, c), *out);
        }
    }
}

/// [`columns_f32`] for every other format: each weight is decoded, rounded once.
#[inline(always)]
pub(crate) fn columns_packed(m: &Matrix<'_>, a: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    if let Codec::Trellis(_) | Codec::Mxfp4z = m.codec {
        let mut row = vec![0.0; out.len()];
        for (r, &a) in a.iter().enumerate() {
            m.decode_row(r, &mut row);
            for (&w, out) in row.iter().zip(&mut *out) {
                *out = a.mul_add(w, *out);
            }
        }
        return;
    }
    for (r, &a) in a.iter().enumerate() {
        let row = m.row_range(r..r + 1);
        for (c, out) in out.iter_mut().enumerate() {
            *out = a.mul_add(row.weight(c), *out);
        }
    }
}

/// `1 / sqrt(mean(x²) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    inverse_root_mean(dot(x, x), x.len(), eps)
}

/// The same from the sum of `n` squares.
#[inline(always)]
pub(crate) fn inverse_root_mean(squares: f32, n: usize, eps: f32) -> f32 {
    1.0 / (squares / n as f32 + eps).sqrt()
}

/// RMSNorm: `out = w · x / sqrt(mean(x²) + eps)`.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    scale_by(x, inverse_rms(x, eps), w, out);
}

/// `out = (x · inv) · w`.
#[inline(always)]
pub(crate) fn scale_by(x: &[f32], inv: f32, w: &[f32], out: &mut [f32]) {
    for ((out, &x), &w) in out.iter_mut().zip(x).zip(w) {
        *out = (x * inv) * w;
    }
}

/// L2 normalisation in place, then a factor: `x · 1/sqrt(Σx² + 1e-6) · factor`.
#[inline(always)]
pub(crate) fn l2_normalise(x: &mut [f32], factor: f32) {
    normalise_by(x, dot(x, x), factor);
}

/// The same with the sum of squares given. The 1e-6 is the reference kernels' guard against a zero
/// vector.
#[inline(always)]
pub(crate) fn normalise_by(x: &mut [f32], squares: f32, factor: f32) {
    let inv = 1.0 / (squares + 1e-6).sqrt();
    for x in x {
        *x = (*x * inv) * factor;
    }
}

/// Depthwise causal convolution of one step, then SiLU. `x` (channels) is replaced by the
/// result; `history` (kernel − 1, channels), oldest first, is moved on by one; `taps`
/// (kernel, channels), oldest first.
#[inline(always)]
pub(crate) fn short_conv(x: &mut [f32], history: &mut [f32], taps: &[f32]) {
    let channels = x.len();
    let past = history.len() / channels;
    // So many channels at a time that compilers turn the loops into vectors; channels do not
    // meet.
    let mut acc = [0.0f32; CONV_BLOCK];
    for first in (0..channels).step_by(CONV_BLOCK) {
        let part = first..channels.min(first + CONV_BLOCK);
        let at = |tap: usize| tap * channels + part.start..tap * channels + part.end;
        let (x, acc) = (&mut x[part.clone()], &mut acc[..part.len()]);
        acc.fill(0.0);
        for tap in 0..past {
            multiply_add(&taps[at(tap)], &history[at(tap)], acc);
        }
        multiply_add(&taps[at(past)], x, acc);
        for tap in 1..past {
            history.copy_within(at(tap), at(tap - 1).start);
        }
        if past > 0 {
            history[at(past - 1)].copy_from_slice(x);
        }
        for (x, &acc) in x.iter_mut().zip(acc.iter()) {
            *x = math::silu(acc);
        }
    }
}

/// `acc = fma(tap, input, acc)`, elementwise.
#[inline(always)]
fn multiply_add(taps: &[f32], inputs: &[f32], acc: &mut [f32]) {
    for ((acc, &tap), &input) in acc.iter_mut().zip(taps).zip(inputs) {
        *acc = tap.mul_add(input, *acc);
    }
}

/// Decay factors of one head from the bounded gate:
/// `out = exp(lower_bound · sigmoid(rate · (z + bias)))`.
#[inline(always)]
pub(crate) fn decay_bounded(z: &[f32], bias: &[f32], rate: f32, lower_bound: f32, out: &mut [f32]) {
    for ((out, &z), &bias) in out.iter_mut().zip(z).zip(bias) {
        *out = math::exp(lower_bound * math::sigmoid(rate * (z + bias)));
    }
}

/// Decay factors of one head from the unbounded gate: `out = exp(−rate · softplus(z + bias))`.
#[inline(always)]
pub(crate) fn decay_unbounded(z: &[f32], bias: &[f32], rate: f32, out: &mut [f32]) {
    for ((out, &z), &bias) in out.iter_mut().zip(z).zip(bias) {
        *out = math::exp(-rate * math::softplus(z + bias));
    }
}

/// One step of Kimi Delta Attention for one head. `state` (k.len(), v.len()) is updated in
/// place; `decay` and `q`, `k` have the key width, `v` and `out` the value width.
/// The delta sees the decayed state, the output the updated one.
#[inline(always)]
pub(crate) fn kda_step(
    state: &mut [f32],
    decay: &[f32],
    q: &[f32],
    k: &[f32],
    v: &mut [f32],
    beta: f32,
    out: &mut [f32],
) {
    let width = v.len();
    // `out` holds u = Sᵀk first.
    out.fill(0.0);
    for ((row, &a), &k) in state.chunks_exact_mut(width).zip(decay).zip(k) {
        for (s, u) in row.iter_mut().zip(out.iter_mut()) {
            *s *= a;
            *u = k.mul_add(*s, *u);
        }
    }
    for (v, u) in v.iter_mut().zip(out.iter()) {
        *v = beta * (*v - u);
    }
    out.fill(0.0);
    for ((row, &q), &k) in state.chunks_exact_mut(width).zip(q).zip(k) {
        for ((s, d), o) in row.iter_mut().zip(v.iter()).zip(out.iter_mut()) {
            *s = k.mul_add(*d, *s);
            *o = q.mul_add(*s, *o);
        }
    }
}

/// Attention of some heads' queries over the latent cache of their positions: `q` (heads, width),
/// `cache` (positions, width), `out` (heads, rank ≤ width) is the weighted mean of each row's first
/// rank values.
#[inline(always)]
pub(crate) fn attend(q: &[f32], width: usize, cache: Latents<'_>, scale: f32, out: &mut [f32]) {
    let rank = out.len() / (q.len() / width);
    let mut scratch = Vec::new();
    for (q, out) in q.chunks_exact(width).zip(out.chunks_exact_mut(rank)) {
        let mut softmax = Softmax::EMPTY;
        let mut weights = [0.0f32; ATTENTION_BLOCK];
        out.fill(0.0);
        for block in cache.blocks(width) {
            let block = cache.decoded(block, &mut scratch);
            let weights = &mut weights[..block.len() / width];
            for (w, row) in weights.iter_mut().zip(block.chunks_exact(width)) {
                *w = dot(q, row) * scale;
            }
            let correction = softmax.take(weights);
            for out in out.iter_mut() {
                *out *= correction;
            }
            for (&w, row) in weights.iter().zip(block.chunks_exact(width)) {
                axpy(w, &row[..rank], out);
            }
        }
        for out in out {
            *out /= softmax.total;
        }
    }
}

/// A softmax over blocks of scores, one after another.
#[derive(Clone, Copy)]
pub(crate) struct Softmax {
    max: f32,
    /// Of the weights so far.
    pub(crate) total: f32,
    begun: bool,
}

impl Softmax {
    /// Before the first block.
    pub(crate) const EMPTY: Self = Self { max: f32::NEG_INFINITY, total: 0.0, begun: false };

    /// Turns a block's scores into weights; what was weighed before is to be multiplied by the
    /// result.
    #[inline(always)]
    pub(crate) fn take(&mut self, scores: &mut [f32]) -> f32 {
        let block_max = max(scores);
        let new_max = if block_max > self.max { block_max } else { self.max };
        let correction = if self.begun { math::exp(self.max - new_max) } else { 0.0 };
        for s in scores.iter_mut() {
            *s = math::exp(*s - new_max);
        }
        self.total = self.total.mul_add(correction, sum(scores));
        self.max = new_max;
        self.begun = true;
        correction
    }
}

/// `x = x · sigmoid(gate)`.
#[inline(always)]
pub(crate) fn sigmoid_gate(x: &mut [f32], gate: &[f32]) {
    for (x, &g) in x.iter_mut().zip(gate) {
        *x *= math::sigmoid(g);
    }
}

/// `gate = silu(gate) · up`.
#[inline(always)]
pub(crate) fn silu_product(gate: &mut [f32], up: &[f32]) {
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = math::silu(*g) * u;
    }
}

/// `gate = situ(gate, up)`.
#[inline(always)]
pub(crate) fn situ_product(gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = math::situ(*g, u, beta, linear_beta);
    }
}

/// `x = e^x`.
#[inline(always)]
pub(crate) fn exp(x: &mut [f32]) {
    for x in x {
        *x = math::exp(*x);
    }
}

/// `x = sigmoid(x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: &mut [f32]) {
    for x in x {
        *x = math::sigmoid(*x);
    }
}

/// Softmax in place.
#[inline(always)]
pub(crate) fn softmax(x: &mut [f32]) {
    let m = max(x);
    for x in x.iter_mut() {
        *x = math::exp(*x - m);
    }
    let total = sum(x);
    for x in x {
        *x /= total;
    }
}

/// `y = a·x + y`, fused.
#[inline(always)]
pub(crate) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = a.mul_add(x, *y);
    }
}

/// `y = y + x`.
#[inline(always)]
pub(crate) fn add(x: &[f32], y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

/// Channels of the short convolution that are computed together.
const CONV_BLOCK: usize = 64;
