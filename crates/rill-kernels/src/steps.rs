//! What is not a product of matrices, over sixteen lanes, written once for every instruction set.
//!
//! The plain algorithms are in `scalar.rs`; elementwise ones become vectors as they stand there. These
//! need more than a compiler does by itself:
//!
//! - `dot` and `sum`: lane j holds the j-th partial sum;
//! - `columns` and `kda_step`: lanes are columns, whose sums stay in registers over several rows, or
//!   all of them; the state is read twice and written once;
//! - `attend`: several heads and positions are scored together, so that each loaded vector is used
//!   several times; the weighted sum keeps its lanes in registers over a block's positions, and the
//!   cache comes from memory once for [`HEADS`] heads.
//!
//! Slices are gathered in loops, not by `array::from_fn`: a closure that needs CPU features cannot be
//! compiled into it, and what is known of the slices' lengths would be lost on the way.
//!
//! Rows that are not whole sixteens are left to the plain code: no published model has them.
//!
//! A module that uses [`steps`] has in scope: `Lanes` (sixteen f32), `splat`, `load`, `store`,
//! `add`, `sub`, `mul`, `fma(a, b, c)` = a·b + c, `to_array`, `join4` (the tree that joins partial sums,
//! for four at once), the decoders `f32s`, `bf16s`, `q8s`, `q4s`, and the tiles that its registers
//! hold: `SCORES` and `MIX` (heads, positions or lanes), `STATE` (lanes) and `ROWS`.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

/// Heads that attention takes through a block of positions before the next block.
pub(crate) const HEADS: usize = 32;
/// Heads whose queries stay in the first-level cache while a block's positions are scored.
pub(crate) const SCORED: usize = 8;

/// Defines the kernels above with the scalar kernels' signatures, for the given CPU features.
macro_rules! steps {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        pub(crate) fn dot(w: &[f32], x: &[f32]) -> f32 {
            let ((ws, w_rest), (xs, x_rest)) = (w.as_chunks(), x.as_chunks());
            let mut p = splat(0.0);
            for (w, x) in ws.iter().zip(xs) {
                p = fma(load(w), load(x), p);
            }
            let mut p = to_array(p);
            for ((p, &w), &x) in p.iter_mut().zip(w_rest).zip(x_rest) {
                *p = w.mul_add(x, *p);
            }
            join(p)
        }

        #[target_feature(enable = $features)]
        pub(crate) fn sum(x: &[f32]) -> f32 {
            let (xs, rest) = x.as_chunks();
            let mut p = splat(0.0);
            for x in xs {
                p = add(p, load(x));
            }
            let mut p = to_array(p);
            for (p, &x) in p.iter_mut().zip(rest) {
                *p += x;
            }
            join(p)
        }

        #[target_feature(enable = $features)]
        pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
            scalar::inverse_root_mean(dot(x, x), x.len(), eps)
        }

        #[target_feature(enable = $features)]
        pub(crate) fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
            scalar::scale_by(x, inverse_rms(x, eps), w, out);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn l2_normalise(x: &mut [f32], factor: f32) {
            scalar::normalise_by(x, dot(x, x), factor);
        }

        crate::steps::plain_columns!($features, columns_f32, f32_rows, f32s, 64);
        crate::steps::plain_columns!($features, columns_bf16, bf16_rows, bf16s, 32);
        crate::steps::grouped_columns!($features, columns_q8, q8_rows, q8s, 16);
        crate::steps::grouped_columns!($features, columns_q4, q4_rows, q4s, 8);

        #[target_feature(enable = $features)]
        pub(crate) fn columns_packed(m: &Matrix<'_>, a: &[f32], out: &mut [f32]) {
            match m.codec {
                _ if !out.len().is_multiple_of(16) => scalar::columns_packed(m, a, out),
                Codec::Q8 { group } => columns_q8(m, group, a, out),
                Codec::Q4 { group } => columns_q4(m, group, a, out),
                _ => scalar::columns_packed(m, a, out),
            }
        }

        #[target_feature(enable = $features)]
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
            if !width.is_multiple_of(16) {
                return scalar::kda_step(state, decay, q, k, v, beta, out);
            }
            let mut first = 0;
            while width - first >= 16 * STATE {
                kda_columns::<STATE>(state, first, decay, q, k, v, beta, out);
                first += 16 * STATE;
            }
            for first in (first..width).step_by(16) {
                kda_columns::<1>(state, first, decay, q, k, v, beta, out);
            }
        }

        /// The step of `16 * L` columns from `first` on.
        #[target_feature(enable = $features)]
        #[inline]
        #[expect(clippy::too_many_arguments, reason = "the recurrence has this many operands")]
        fn kda_columns<const L: usize>(
            state: &mut [f32],
            first: usize,
            decay: &[f32],
            q: &[f32],
            k: &[f32],
            v: &mut [f32],
            beta: f32,
            out: &mut [f32],
        ) {
            let width = v.len();
            let part = first..first + 16 * L;
            let mut u = [splat(0.0); L];
            for ((row, &a), &k) in state.chunks_exact(width).zip(decay).zip(k) {
                let (row, _) = row[part.clone()].as_chunks();
                for j in 0..L {
                    u[j] = fma(splat(k), mul(splat(a), load(&row[j])), u[j]);
                }
            }
            let (v, _) = v[part.clone()].as_chunks_mut();
            let mut d = [splat(0.0); L];
            for j in 0..L {
                d[j] = mul(splat(beta), sub(load(&v[j]), u[j]));
                store(d[j], &mut v[j]);
            }
            let mut o = [splat(0.0); L];
            for (i, row) in state.chunks_exact_mut(width).enumerate() {
                let (a, k, q) = (splat(decay[i]), splat(k[i]), splat(q[i]));
                let (row, _) = row[part.clone()].as_chunks_mut();
                for j in 0..L {
                    // Decayed once more rather than stored in between: it is the same product.
                    let s = fma(k, d[j], mul(a, load(&row[j])));
                    store(s, &mut row[j]);
                    o[j] = fma(q, s, o[j]);
                }
            }
            let (out, _) = out[part].as_chunks_mut();
            for j in 0..L {
                store(o[j], &mut out[j]);
            }
        }

        #[target_feature(enable = $features)]
        pub(crate) fn attend(
            q: &[f32],
            width: usize,
            cache: Latents<'_>,
            scale: f32,
            out: &mut [f32],
        ) {
            let rank = out.len() / (q.len() / width);
            if !width.is_multiple_of(16) || !rank.is_multiple_of(16) {
                return scalar::attend(q, width, cache, scale, out);
            }
            for (q, out) in q.chunks(HEADS * width).zip(out.chunks_mut(HEADS * rank)) {
                attend_heads(q, width, cache, scale, rank, out);
            }
        }

        /// At most [`HEADS`] heads.
        #[target_feature(enable = $features)]
        #[inline]
        fn attend_heads(
            q: &[f32],
            width: usize,
            cache: Latents<'_>,
            scale: f32,
            rank: usize,
            out: &mut [f32],
        ) {
            let heads = q.len() / width;
            let mut softmax = [scalar::Softmax::EMPTY; HEADS];
            let mut weights = [[0.0; ATTENTION_BLOCK]; HEADS];
            let mut corrections = [0.0; HEADS];
            let mut scratch = Vec::new();
            out.fill(0.0);
            for block in cache.blocks(width) {
                let block = cache.decoded(block, &mut scratch);
                let positions = block.len() / width;
                score_block(q, width, block, scale, &mut weights);
                for h in 0..heads {
                    corrections[h] = softmax[h].take(&mut weights[h][..positions]);
                }
                mix_block(&weights, &corrections, width, block, rank, out);
            }
            for (out, softmax) in out.chunks_exact_mut(rank).zip(&softmax) {
                for out in out {
                    *out /= softmax.total;
                }
            }
        }

        /// Scores of a block's positions for every head.
        #[target_feature(enable = $features)]
        #[inline]
        fn score_block(
            q: &[f32],
            width: usize,
            block: &[f32],
            scale: f32,
            scores: &mut [[f32; ATTENTION_BLOCK]; HEADS],
        ) {
            const R: usize = SCORES.0;
            const V: usize = SCORES.1;
            let (heads, positions) = (q.len() / width, block.len() / width);
            for first in (0..heads).step_by(SCORED) {
                let end = heads.min(first + SCORED);
                let mut t = 0;
                while t < positions {
                    let wide = positions - t >= V;
                    let mut h = first;
                    while h < end {
                        let tall = end - h >= R;
                        match (tall, wide) {
                            (true, true) => score::<R, V>(q, width, block, scale, h, t, scores),
                            (true, false) => score::<R, 1>(q, width, block, scale, h, t, scores),
                            (false, true) => score::<1, V>(q, width, block, scale, h, t, scores),
                            (false, false) => score::<1, 1>(q, width, block, scale, h, t, scores),
                        }
                        h += if tall { R } else { 1 };
                    }
                    t += if wide { V } else { 1 };
                }
            }
        }

        /// Scores of `R` heads from `h` on and `V` positions from `t` on.
        #[target_feature(enable = $features)]
        #[inline]
        fn score<const R: usize, const V: usize>(
            q: &[f32],
            width: usize,
            block: &[f32],
            scale: f32,
            h: usize,
            t: usize,
            scores: &mut [[f32; ATTENTION_BLOCK]; HEADS],
        ) {
            let n = width / 16;
            let (mut qs, mut rows): ([&[[f32; 16]]; R], [&[[f32; 16]]; V]) = ([&[]; R], [&[]; V]);
            for i in 0..R {
                qs[i] = &q[(h + i) * width..].as_chunks().0[..n];
            }
            for v in 0..V {
                rows[v] = &block[(t + v) * width..].as_chunks().0[..n];
            }
            let mut p = [[splat(0.0); V]; R];
            for at in 0..n {
                let mut row = [splat(0.0); V];
                for v in 0..V {
                    row[v] = load(&rows[v][at]);
                }
                for i in 0..R {
                    let q = load(&qs[i][at]);
                    for v in 0..V {
                        p[i][v] = fma(q, row[v], p[i][v]);
                    }
                }
            }
            for first in (0..R * V).step_by(4) {
                let count = 4.min(R * V - first);
                let mut four = [splat(0.0); 4];
                for j in 0..count {
                    four[j] = p[(first + j) / V][(first + j) % V];
                }
                let sums = join4(four);
                for j in 0..count {
                    scores[h + (first + j) / V][t + (first + j) % V] = sums[j] * scale;
                }
            }
        }

        /// Moves the heads' sums on by a block: `out = out · correction`, then every position's latent
        /// times its weight.
        #[target_feature(enable = $features)]
        #[inline]
        fn mix_block(
            weights: &[[f32; ATTENTION_BLOCK]; HEADS],
            corrections: &[f32; HEADS],
            width: usize,
            block: &[f32],
            rank: usize,
            out: &mut [f32],
        ) {
            const R: usize = MIX.0;
            const L: usize = MIX.1;
            let heads = out.len() / rank;
            let mut c = 0;
            while c < rank {
                let wide = rank - c >= 16 * L;
                let mut h = 0;
                while h < heads {
                    let tall = heads - h >= R;
                    let (w, by) = (&weights[h..], &corrections[h..]);
                    let out = &mut out[h * rank..];
                    match (tall, wide) {
                        (true, true) => mix::<R, L>(w, by, width, block, rank, c, out),
                        (true, false) => mix::<R, 1>(w, by, width, block, rank, c, out),
                        (false, true) => mix::<1, L>(w, by, width, block, rank, c, out),
                        (false, false) => mix::<1, 1>(w, by, width, block, rank, c, out),
                    }
                    h += if tall { R } else { 1 };
                }
                c += if wide { 16 * L } else { 16 };
            }
        }

        /// [`mix_block`] of the first `R` heads and `16 * L` columns from `c` on.
        #[target_feature(enable = $features)]
        #[inline]
        fn mix<const R: usize, const L: usize>(
            weights: &[[f32; ATTENTION_BLOCK]],
            corrections: &[f32],
            width: usize,
            block: &[f32],
            rank: usize,
            c: usize,
            out: &mut [f32],
        ) {
            let weights: &[[f32; ATTENTION_BLOCK]; R] = weights.first_chunk().expect("R heads");
            let mut acc = [[splat(0.0); L]; R];
            for i in 0..R {
                let (out, _) = out[i * rank + c..][..16 * L].as_chunks();
                for j in 0..L {
                    acc[i][j] = mul(load(&out[j]), splat(corrections[i]));
                }
            }
            for (t, row) in block.chunks_exact(width).enumerate().take(ATTENTION_BLOCK) {
                let (row, _) = row[c..][..16 * L].as_chunks();
                let mut latent = [splat(0.0); L];
                for j in 0..L {
                    latent[j] = load(&row[j]);
                }
                for i in 0..R {
                    let w = splat(weights[i][t]);
                    for j in 0..L {
                        acc[i][j] = fma(w, latent[j], acc[i][j]);
                    }
                }
            }
            for i in 0..R {
                let (out, _) = out[i * rank + c..][..16 * L].as_chunks_mut();
                for j in 0..L {
                    store(acc[i][j], &mut out[j]);
                }
            }
        }
    };
}

/// Weights that are numbers, sixteen in `$bytes` bytes.
macro_rules! plain_columns {
    ($features:literal, $name:ident, $rows:ident, $decode:ident, $bytes:literal) => {
        #[target_feature(enable = $features)]
        pub(crate) fn $name(w: &[u8], a: &[f32], out: &mut [f32]) {
            let n = out.len() / 16;
            if !out.len().is_multiple_of(16) {
                return scalar::$name(w, a, out);
            }
            out.fill(0.0);
            let whole = a.len() / ROWS * ROWS;
            for r in (0..whole).step_by(ROWS) {
                $rows::<ROWS>(&w[r * n * $bytes..], &a[r..], out);
            }
            for r in whole..a.len() {
                $rows::<1>(&w[r * n * $bytes..], &a[r..], out);
            }
        }

        /// Adds the first `R` rows.
        #[target_feature(enable = $features)]
        #[inline]
        fn $rows<const R: usize>(w: &[u8], a: &[f32], out: &mut [f32]) {
            let (out, _) = out.as_chunks_mut();
            let n = out.len();
            let mut rows: [&[[u8; $bytes]]; R] = [&[]; R];
            for i in 0..R {
                rows[i] = &w[i * n * $bytes..].as_chunks().0[..n];
            }
            let a: &[f32; R] = a.first_chunk().expect("R rows");
            for (at, out) in out.iter_mut().enumerate() {
                let mut sum = load(out);
                for i in 0..R {
                    sum = fma(splat(a[i]), $decode(&rows[i][at]), sum);
                }
                store(sum, out);
            }
        }
    };
}

/// Codes in groups with an f16 scale each, sixteen codes in `$bytes` bytes.
macro_rules! grouped_columns {
    ($features:literal, $name:ident, $rows:ident, $decode:ident, $bytes:literal) => {
        #[target_feature(enable = $features)]
        fn $name(m: &Matrix<'_>, group: usize, a: &[f32], out: &mut [f32]) {
            out.fill(0.0);
            let whole = a.len() / ROWS * ROWS;
            for r in (0..whole).step_by(ROWS) {
                $rows::<ROWS>(m, group, r, a, out);
            }
            for r in whole..a.len() {
                $rows::<1>(m, group, r, a, out);
            }
        }

        /// Adds `R` rows from `r` on.
        #[target_feature(enable = $features)]
        #[inline]
        fn $rows<const R: usize>(
            m: &Matrix<'_>,
            group: usize,
            r: usize,
            a: &[f32],
            out: &mut [f32],
        ) {
            let (out, _) = out.as_chunks_mut();
            let (code_bytes, scale_bytes) = (m.codes.len() / m.rows, m.scales.len() / m.rows);
            let a: &[f32; R] = a[r..].first_chunk().expect("R rows");
            for (g, out) in out.chunks_mut(group / 16).enumerate() {
                let n = out.len();
                let first = g * (group / 16) * $bytes;
                let mut codes: [&[[u8; $bytes]]; R] = [&[]; R];
                let mut scales = [splat(0.0); R];
                for i in 0..R {
                    codes[i] = &m.codes[(r + i) * code_bytes + first..].as_chunks().0[..n];
                    scales[i] = splat(f16_at(&m.scales[(r + i) * scale_bytes..], g));
                }
                for (at, out) in out.iter_mut().enumerate() {
                    let mut sum = load(out);
                    for i in 0..R {
                        let w = mul($decode(&codes[i][at]), scales[i]);
                        sum = fma(splat(a[i]), w, sum);
                    }
                    store(sum, out);
                }
            }
        }
    };
}

pub(crate) use {grouped_columns, plain_columns, steps};
