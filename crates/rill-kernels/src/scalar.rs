//! The specification: every kernel in plain Rust, following `docs/arithmetic.md` line by line.
//!
//! Kept forever. Faster kernels have the same names and signatures and must give the same
//! bits. Lengths are the caller's duty here: [`crate::Kernels`] checks them once for all.
//! Everything is `inline(always)` so that the table can also compile it with the machine's
//! fused multiply-add, where plain builds would call a routine for each one.

use crate::matrix::{MXFP4_BLOCK, MXFP4_VALUES, mxfp4_scale};
use crate::{ATTENTION_BLOCK, math};

/// Partial sums of one reduction.
const PARTIALS: usize = 16;

/// The fixed tree that joins partial sums.
#[inline(always)]
fn join(mut p: [f32; PARTIALS]) -> f32 {
    for width in [8, 4, 2, 1] {
        for j in 0..width {
            p[j] += p[j + width];
        }
    }
    p[0]
}

/// Dot product of `w(i)` and `x[i]`.
#[inline(always)]
fn dot_with(x: &[f32], w: impl Fn(usize) -> f32) -> f32 {
    let mut p = [0.0f32; PARTIALS];
    let whole = x.len() / PARTIALS * PARTIALS;
    for start in (0..whole).step_by(PARTIALS) {
        for j in 0..PARTIALS {
            p[j] = w(start + j).mul_add(x[start + j], p[j]);
        }
    }
    for i in whole..x.len() {
        p[i - whole] = w(i).mul_add(x[i], p[i - whole]);
    }
    join(p)
}

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

#[inline(always)]
fn f32_at(bytes: &[u8], i: usize) -> f32 {
    let b = &bytes[4 * i..4 * i + 4];
    f32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

#[inline(always)]
fn bf16_at(bytes: &[u8], i: usize) -> f32 {
    let b = &bytes[2 * i..2 * i + 2];
    f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)
}

/// `out[r][t] = w[r] · x[t]` for `n` vectors: `w` (rows, cols) little-endian f32, `x` (n, cols),
/// `out` (rows, n).
#[inline(always)]
pub(crate) fn matmul_f32(w: &[u8], cols: usize, x: &[f32], n: usize, out: &mut [f32]) {
    for (row, out) in w.chunks_exact(4 * cols).zip(out.chunks_exact_mut(n)) {
        for (x, out) in x.chunks_exact(cols).zip(out) {
            *out = dot_with(x, |i| f32_at(row, i));
        }
    }
}

/// [`matmul_f32`] for bf16 weights.
#[inline(always)]
pub(crate) fn matmul_bf16(w: &[u8], cols: usize, x: &[f32], n: usize, out: &mut [f32]) {
    for (row, out) in w.chunks_exact(2 * cols).zip(out.chunks_exact_mut(n)) {
        for (x, out) in x.chunks_exact(cols).zip(out) {
            *out = dot_with(x, |i| bf16_at(row, i));
        }
    }
}

/// [`matmul_f32`] for MXFP4 weights: `packed` (rows, cols/2), `scales` (rows, cols/32).
#[inline(always)]
pub(crate) fn matmul_mxfp4(
    packed: &[u8],
    scales: &[u8],
    cols: usize,
    x: &[f32],
    n: usize,
    out: &mut [f32],
) {
    let rows = packed.chunks_exact(cols / 2).zip(scales.chunks_exact(cols / MXFP4_BLOCK));
    for ((packed, scales), out) in rows.zip(out.chunks_exact_mut(n)) {
        for (x, out) in x.chunks_exact(cols).zip(out) {
            *out = dot_mxfp4(packed, scales, x);
        }
    }
}

#[inline(always)]
fn dot_mxfp4(packed: &[u8], scales: &[u8], x: &[f32]) -> f32 {
    let mut p = [0.0f32; PARTIALS];
    let blocks = packed.chunks_exact(MXFP4_BLOCK / 2).zip(x.chunks_exact(MXFP4_BLOCK));
    for ((packed, x), &scale) in blocks.zip(scales) {
        // The low nibble is the even input.
        let v = |i: usize| MXFP4_VALUES[usize::from(packed[i / 2] >> (4 * (i % 2)) & 15)];
        let scale = mxfp4_scale(scale);
        for j in 0..PARTIALS {
            let t = v(j) * x[j];
            let t = v(PARTIALS + j).mul_add(x[PARTIALS + j], t);
            p[j] = t.mul_add(scale, p[j]);
        }
    }
    join(p)
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

/// `1 / sqrt(mean(x²) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// RMSNorm: `out = w · x / sqrt(mean(x²) + eps)`.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let inv = inverse_rms(x, eps);
    for ((out, &x), &w) in out.iter_mut().zip(x).zip(w) {
        *out = (x * inv) * w;
    }
}

/// L2 normalisation in place, then a factor: `x · 1/sqrt(Σx² + 1e-6) · factor`. The 1e-6 is
/// the reference kernels' guard against a zero vector.
#[inline(always)]
pub(crate) fn l2_normalise(x: &mut [f32], factor: f32) {
    let inv = 1.0 / (dot(x, x) + 1e-6).sqrt();
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
    for c in 0..channels {
        let mut acc = 0.0f32;
        for tap in 0..past {
            acc = taps[tap * channels + c].mul_add(history[tap * channels + c], acc);
        }
        acc = taps[past * channels + c].mul_add(x[c], acc);
        for tap in 1..past {
            history[(tap - 1) * channels + c] = history[tap * channels + c];
        }
        if past > 0 {
            history[(past - 1) * channels + c] = x[c];
        }
        x[c] = math::silu(acc);
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

/// Attention of one query over the latent cache of its positions: `q` (width), `cache`
/// (positions, width), `out` (≤ width) is the weighted mean of each row's first `out.len()`
/// values.
#[inline(always)]
pub(crate) fn attend(q: &[f32], cache: &[f32], scale: f32, out: &mut [f32]) {
    let width = q.len();
    let rank = out.len();
    let mut running_max = f32::NEG_INFINITY;
    let mut total = 0.0f32;
    let mut weights = [0.0f32; ATTENTION_BLOCK];
    out.fill(0.0);
    for (index, block) in cache.chunks(ATTENTION_BLOCK * width).enumerate() {
        let weights = &mut weights[..block.len() / width];
        for (w, row) in weights.iter_mut().zip(block.chunks_exact(width)) {
            *w = dot(q, row) * scale;
        }
        let block_max = max(weights);
        let new_max = if block_max > running_max { block_max } else { running_max };
        let correction = if index == 0 { 0.0 } else { math::exp(running_max - new_max) };
        for w in weights.iter_mut() {
            *w = math::exp(*w - new_max);
        }
        running_max = new_max;
        total = total.mul_add(correction, sum(weights));
        for out in out.iter_mut() {
            *out *= correction;
        }
        for (&w, row) in weights.iter().zip(block.chunks_exact(width)) {
            for (out, &c) in out.iter_mut().zip(&row[..rank]) {
                *out = w.mul_add(c, *out);
            }
        }
    }
    for out in out {
        *out /= total;
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
