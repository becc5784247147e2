//! Matrix products over sixteen lanes, written once for every instruction set.
//!
//! The plain algorithm is `scalar.rs`: a row has sixteen partial sums, and lane j holds the j-th. So
//! there is nothing to rearrange, and the bits are those of the specification. What differs from it:
//!
//! - several rows are computed together, because one row's sums form a chain that the latency of the
//!   addition would hold up;
//! - several vectors are computed together, so that weights are decoded once for all of them;
//! - inputs beyond the last whole sixteen are left to plain code.
//!
//! A module that uses [`matmuls`] has in scope: `Lanes` (sixteen f32), `zero`, `splat`, `load`, `mul`,
//! `fma(a, b, c)` = a·b + c, `to_array`, `from_array`, and the decoders `f32s`, `bf16s`, `q8s`, `q4s`
//! (sixteen weights from a pointer) and `mxfp4s` (thirty-two).

/// Rows and vectors that are computed together.
#[derive(Clone, Copy)]
pub(crate) enum Tile {
    R2V4,
    R4V1,
    R1V4,
    R1V1,
}

/// Covers `rows` rows and `n` vectors with tiles: `f(tile, first row, first vector)`.
#[inline(always)]
pub(crate) fn over_tiles(rows: usize, n: usize, mut f: impl FnMut(Tile, usize, usize)) {
    let mut r = 0;
    while r < rows {
        let tall = rows - r >= 4;
        let mut t = 0;
        while t < n {
            let wide = n - t >= 4;
            match (tall, wide) {
                (true, true) => {
                    f(Tile::R2V4, r, t);
                    f(Tile::R2V4, r + 2, t);
                }
                (true, false) => f(Tile::R4V1, r, t),
                (false, true) => f(Tile::R1V4, r, t),
                (false, false) => f(Tile::R1V1, r, t),
            }
            t += if wide { 4 } else { 1 };
        }
        r += if tall { 4 } else { 1 };
    }
}

/// Defines `matmul_f32`, `matmul_bf16`, `matmul_q8`, `matmul_q4` and `matmul_mxfp4` with the scalar
/// kernels' signatures, for the given CPU features.
macro_rules! matmuls {
    ($features:literal) => {
        crate::lanes::plain_matmul!($features, matmul_f32, f32_tile, f32s, f32_at, 4);
        crate::lanes::plain_matmul!($features, matmul_bf16, bf16_tile, bf16s, bf16_at, 2);
        crate::lanes::grouped_matmul!($features, matmul_q8, q8_tile, q8s, q8::code, 16);
        crate::lanes::grouped_matmul!($features, matmul_q4, q4_tile, q4s, q4::code, 8);
        crate::lanes::mxfp4_matmul!($features);
    };
}

/// Weights that are numbers: `$bytes` bytes each, sixteen decoded by `$decode`, one by `$at`.
macro_rules! plain_matmul {
    ($features:literal, $name:ident, $tile:ident, $decode:ident, $at:path, $bytes:literal) => {
        #[target_feature(enable = $features)]
        pub(crate) fn $name(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
            over_tiles(m.rows, n, |tile, r, t| match tile {
                Tile::R2V4 => $tile::<2, 4>(m, r, x, t, n, out),
                Tile::R4V1 => $tile::<4, 1>(m, r, x, t, n, out),
                Tile::R1V4 => $tile::<1, 4>(m, r, x, t, n, out),
                Tile::R1V1 => $tile::<1, 1>(m, r, x, t, n, out),
            });
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn $tile<const R: usize, const V: usize>(
            m: &Matrix<'_>,
            r: usize,
            x: &[f32],
            t: usize,
            n: usize,
            out: &mut [f32],
        ) {
            let cols = m.cols;
            let rows: [&[u8]; R] =
                std::array::from_fn(|i| &m.codes[(r + i) * $bytes * cols..][..$bytes * cols]);
            let xs: [&[f32]; V] = std::array::from_fn(|v| &x[(t + v) * cols..][..cols]);
            let whole = cols / 16 * 16;
            let mut p = [[zero(); V]; R];
            for at in (0..whole).step_by(16) {
                let mut x = [zero(); V];
                for v in 0..V {
                    // SAFETY: sixteen values from `at` on lie in the vector: at + 16 <= whole.
                    x[v] = unsafe { load(xs[v].as_ptr().add(at)) };
                }
                for i in 0..R {
                    // SAFETY: likewise in the row, of `$bytes` bytes each.
                    let w = unsafe { $decode(rows[i].as_ptr().add($bytes * at)) };
                    for v in 0..V {
                        p[i][v] = fma(w, x[v], p[i][v]);
                    }
                }
            }
            for i in 0..R {
                for v in 0..V {
                    let mut sums = to_array(p[i][v]);
                    for at in whole..cols {
                        let sum = &mut sums[at - whole];
                        *sum = $at(rows[i], at).mul_add(xs[v][at], *sum);
                    }
                    out[(r + i) * n + t + v] = join(sums);
                }
            }
        }
    };
}

/// Codes in groups with an f16 scale each: sixteen in `$bytes` bytes decoded by `$decode`, one by
/// `$code`.
macro_rules! grouped_matmul {
    ($features:literal, $name:ident, $tile:ident, $decode:ident, $code:path, $bytes:literal) => {
        #[target_feature(enable = $features)]
        pub(crate) fn $name(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]) {
            over_tiles(m.rows, n, |tile, r, t| match tile {
                Tile::R2V4 => $tile::<2, 4>(m, group, r, x, t, n, out),
                Tile::R4V1 => $tile::<4, 1>(m, group, r, x, t, n, out),
                Tile::R1V4 => $tile::<1, 4>(m, group, r, x, t, n, out),
                Tile::R1V1 => $tile::<1, 1>(m, group, r, x, t, n, out),
            });
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn $tile<const R: usize, const V: usize>(
            m: &Matrix<'_>,
            group: usize,
            r: usize,
            x: &[f32],
            t: usize,
            n: usize,
            out: &mut [f32],
        ) {
            let cols = m.cols;
            let (code_bytes, scale_bytes) = (m.codes.len() / m.rows, m.scales.len() / m.rows);
            // Sixteen codes in so many bytes, and a group is whole sixteens.
            assert!(code_bytes >= cols / 16 * $bytes && group.is_multiple_of(16));
            let rows: [&[u8]; R] =
                std::array::from_fn(|i| &m.codes[(r + i) * code_bytes..][..code_bytes]);
            let scales: [&[u8]; R] =
                std::array::from_fn(|i| &m.scales[(r + i) * scale_bytes..][..scale_bytes]);
            let xs: [&[f32]; V] = std::array::from_fn(|v| &x[(t + v) * cols..][..cols]);
            let mut p = [[zero(); V]; R];
            for (g, first) in (0..cols).step_by(group).enumerate() {
                let end = cols.min(first + group);
                let whole = first + (end - first) / 16 * 16;
                let mut sums = [[zero(); V]; R];
                for at in (first..whole).step_by(16) {
                    let mut x = [zero(); V];
                    for v in 0..V {
                        // SAFETY: sixteen values from `at` on lie in the vector: at + 16 <= whole,
                        // which is at most cols.
                        x[v] = unsafe { load(xs[v].as_ptr().add(at)) };
                    }
                    for i in 0..R {
                        // SAFETY: likewise in the row, whose length is asserted above.
                        let w = unsafe { $decode(rows[i].as_ptr().add(at / 16 * $bytes)) };
                        for v in 0..V {
                            sums[i][v] = fma(w, x[v], sums[i][v]);
                        }
                    }
                }
                for i in 0..R {
                    let scale = f16_at(scales[i], g);
                    for v in 0..V {
                        if whole < end {
                            let mut last = to_array(sums[i][v]);
                            for at in whole..end {
                                let sum = &mut last[at - whole];
                                *sum = $code(rows[i], at).mul_add(xs[v][at], *sum);
                            }
                            sums[i][v] = from_array(last);
                        }
                        p[i][v] = fma(sums[i][v], splat(scale), p[i][v]);
                    }
                }
            }
            for i in 0..R {
                for v in 0..V {
                    out[(r + i) * n + t + v] = join(to_array(p[i][v]));
                }
            }
        }
    };
}

/// MXFP4: blocks of thirty-two, whose halves are joined before the scale is applied.
macro_rules! mxfp4_matmul {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        pub(crate) fn matmul_mxfp4(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
            over_tiles(m.rows, n, |tile, r, t| match tile {
                Tile::R2V4 => mxfp4_tile::<2, 4>(m, r, x, t, n, out),
                Tile::R4V1 => mxfp4_tile::<4, 1>(m, r, x, t, n, out),
                Tile::R1V4 => mxfp4_tile::<1, 4>(m, r, x, t, n, out),
                Tile::R1V1 => mxfp4_tile::<1, 1>(m, r, x, t, n, out),
            });
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn mxfp4_tile<const R: usize, const V: usize>(
            m: &Matrix<'_>,
            r: usize,
            x: &[f32],
            t: usize,
            n: usize,
            out: &mut [f32],
        ) {
            let (cols, blocks) = (m.cols, m.cols / mxfp4::BLOCK);
            let rows: [&[u8]; R] =
                std::array::from_fn(|i| &m.codes[(r + i) * 16 * blocks..][..16 * blocks]);
            let scales: [&[u8]; R] =
                std::array::from_fn(|i| &m.scales[(r + i) * blocks..][..blocks]);
            let xs: [&[f32]; V] = std::array::from_fn(|v| &x[(t + v) * cols..][..cols]);
            let mut p = [[zero(); V]; R];
            for b in 0..blocks {
                let mut x = [[zero(); 2]; V];
                for v in 0..V {
                    // SAFETY: thirty-two values from 32·b on lie in the vector: a row is whole
                    // blocks.
                    unsafe {
                        let at = xs[v].as_ptr().add(mxfp4::BLOCK * b);
                        x[v] = [load(at), load(at.add(16))];
                    }
                }
                for i in 0..R {
                    // SAFETY: sixteen bytes from 16·b on lie in the row.
                    let [low, high] = unsafe { mxfp4s(rows[i].as_ptr().add(16 * b)) };
                    let scale = splat(mxfp4::scale(scales[i][b]));
                    for v in 0..V {
                        let sum = fma(high, x[v][1], mul(low, x[v][0]));
                        p[i][v] = fma(sum, scale, p[i][v]);
                    }
                }
            }
            for i in 0..R {
                for v in 0..V {
                    out[(r + i) * n + t + v] = join(to_array(p[i][v]));
                }
            }
        }
    };
}

pub(crate) use {grouped_matmul, matmuls, mxfp4_matmul, plain_matmul};
