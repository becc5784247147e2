//! Matrix products over sixteen lanes, written once for every instruction set.
//!
//! The plain algorithm is `scalar.rs`: a row has sixteen partial sums, and lane j holds the j-th, so
//! that the bits are those of the specification. What differs from it:
//!
//! - for few vectors (`direct`) weights are decoded in registers, several rows together, because one
//!   row's sums form a chain that the latency of the addition would hold up;
//! - for many (`panels`) some rows are decoded into a panel that stays in the nearest cache, and
//!   every vector is multiplied by it. Only partial sums are put down between panels, as they are;
//! - lanes may have another order than inputs while a row is computed, where codes can be looked up
//!   faster that way;
//! - inputs beyond the last whole thirty-two of a group are computed by the same code, with positive
//!   weights and inputs of −0 for what is missing: adding −0 changes no sum, not even one of −0;
//! - a block of MXFP4 begins with −0, because its first term is a product and `fma(v, x, −0)` is that
//!   product, where it would lose the sign of zero with +0.
//!
//! A module that uses [`products`] has in scope: `Part` (a register) with `WIDTH`, `part_splat`,
//! `part_load`, `part_store` and `part_fma(a, b, c)` = a·b + c; `ROWS` that `direct` takes together,
//! `VECTORS` that `panels` does; and the formats, types that are `Format`.

/// Inputs that are decoded together.
pub(crate) const STEP: usize = 32;
/// Weights of a panel: 16 KiB of f32, half of the smallest first-level cache.
pub(crate) const PANEL: usize = 4096;
/// Rows of a panel, unless a group is so long that only half of them fit.
pub(crate) const PANEL_ROWS: usize = 8;
/// Groups whose scales are converted together.
pub(crate) const SCALES: usize = 32;
/// Vectors that share one decoding of a panel; their partial sums take 16 KiB.
pub(crate) const SHARED: usize = 32;
/// From this many vectors on panels pay.
pub(crate) const MANY: usize = 4;

/// Decoded weights, so aligned that no load crosses a cache line.
#[repr(align(64))]
pub(crate) struct Panel(pub(crate) [f32; PANEL]);

/// Inputs that are missing: −0, which adds nothing to any sum when its weight is positive.
#[inline(always)]
pub(crate) fn padded<const N: usize>(x: &[f32]) -> [f32; N] {
    let mut out = [-0.0; N];
    out[..x.len()].copy_from_slice(x);
    out
}

/// Defines `matmul_f32`, `matmul_bf16`, `matmul_q8`, `matmul_q4` and `matmul_mxfp4` with the scalar
/// kernels' signatures, for the given CPU features.
macro_rules! products {
    ($features:literal) => {
        const PARTS: usize = PARTIALS / WIDTH;

        /// Sixteen f32.
        type Lanes = [Part; PARTS];

        /// How the weights of a format are stored, and brought into lanes.
        trait Format {
            /// Bytes of thirty-two codes.
            const BYTES: usize;
            /// A byte whose codes are positive weights.
            const PAD: u8;
            /// Whether groups have scales; without, a row is one group.
            const SCALED: bool;
            /// Inputs of a group where all matrices have the same.
            const GROUP: Option<usize> = None;
            /// What a group's sums begin with.
            const START: f32 = 0.0;

            /// Thirty-two weights without their scale, in this format's order of lanes.
            ///
            /// # Safety
            /// `BYTES` bytes must be readable, and the CPU must have the module's features.
            unsafe fn decode(codes: *const u8) -> [Lanes; 2];

            /// Sixteen values in the format's order of lanes.
            ///
            /// # Safety
            /// The CPU must have the module's features.
            #[inline(always)]
            unsafe fn arranged(x: Lanes) -> Lanes {
                x
            }

            /// The same values in order.
            ///
            /// # Safety
            /// The CPU must have the module's features.
            #[inline(always)]
            unsafe fn natural(x: Lanes) -> Lanes {
                x
            }

            /// Scales of consecutive groups, the first of them number `first` of a row.
            #[inline(always)]
            fn scales(_row: &[u8], _first: usize, _out: &mut [f32]) {}
        }

        #[target_feature(enable = $features)]
        pub(crate) fn matmul_f32(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
            product::<F32>(m, m.cols, x, n, out);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn matmul_bf16(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
            product::<Bf16>(m, m.cols, x, n, out);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn matmul_q8(
            m: &Matrix<'_>,
            group: usize,
            x: &[f32],
            n: usize,
            out: &mut [f32],
        ) {
            product::<Q8>(m, group, x, n, out);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn matmul_q4(
            m: &Matrix<'_>,
            group: usize,
            x: &[f32],
            n: usize,
            out: &mut [f32],
        ) {
            product::<Q4>(m, group, x, n, out);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn matmul_mxfp4(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
            product::<Mxfp4>(m, mxfp4::BLOCK, x, n, out);
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn product<F: Format>(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]) {
            if n < MANY {
                direct::<F>(m, group, x, n, out);
            } else {
                panels::<F>(m, group, x, n, out, |r, inputs, out| fill::<F>(m, r, inputs, out));
            }
        }

        /// Few vectors, one after another.
        #[target_feature(enable = $features)]
        fn direct<F: Format>(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]) {
            for (t, x) in x.chunks_exact(m.cols).enumerate() {
                let mut r = 0;
                while r + ROWS <= m.rows {
                    let sums = tile::<F, ROWS>(m, group, r, x);
                    for i in 0..ROWS {
                        out[(r + i) * n + t] = sums[i];
                    }
                    r += ROWS;
                }
                for r in r..m.rows {
                    [out[r * n + t]] = tile::<F, 1>(m, group, r, x);
                }
            }
        }

        /// Rows from `r` on times one vector.
        #[target_feature(enable = $features)]
        #[inline]
        fn tile<F: Format, const R: usize>(
            m: &Matrix<'_>,
            group: usize,
            r: usize,
            x: &[f32],
        ) -> [f32; R] {
            let cols = x.len();
            let group = F::GROUP.unwrap_or(group);
            let (code_bytes, scale_bytes) = (m.codes.len() / m.rows, m.scales.len() / m.rows);
            // A group is whole sixteens, except where it is the row, so that every one begins with
            // a whole byte.
            assert!(code_bytes >= cols / 16 * (F::BYTES / 2));
            assert!(F::GROUP.is_none_or(|group| cols.is_multiple_of(group)));
            let rows: [&[u8]; R] =
                std::array::from_fn(|i| &m.codes[(r + i) * code_bytes..][..code_bytes]);
            let mut p = [splat(0.0); R];
            let groups = cols.div_ceil(group);
            for first_group in (0..groups).step_by(SCALES) {
                let mut scales = [[0.0; SCALES]; R];
                let some = SCALES.min(groups - first_group);
                for i in 0..R {
                    let row = &m.scales[(r + i) * scale_bytes..][..scale_bytes];
                    F::scales(row, first_group, &mut scales[i][..some]);
                }
                for g in 0..some {
                    let first = (first_group + g) * group;
                    // Where groups have one size, no row ends within one.
                    let end =
                        if F::GROUP.is_some() { first + group } else { cols.min(first + group) };
                    let whole = (end - first) / STEP;
                    let mut sums = [splat(F::START); R];
                    for step in 0..whole {
                        let at = first + step * STEP;
                        // SAFETY: thirty-two values from `at` on lie in the vector, at + 32 <= cols,
                        // and their codes in each row, as asserted above.
                        unsafe {
                            let x = step_of::<F>(x.as_ptr().add(at));
                            for i in 0..R {
                                let codes = rows[i].as_ptr().add(at / 16 * (F::BYTES / 2));
                                sums[i] = added::<F>(codes, x, sums[i]);
                            }
                        }
                    }
                    let at = first + whole * STEP;
                    if F::GROUP.is_none() && at < end {
                        let (codes, x) = ragged::<F, R>(rows, x, at, end);
                        for i in 0..R {
                            // SAFETY: both arrays are as long as a step.
                            unsafe {
                                let x = step_of::<F>(x.as_ptr());
                                sums[i] = added::<F>(codes[i].as_ptr(), x, sums[i]);
                            }
                        }
                    }
                    for i in 0..R {
                        p[i] = match F::SCALED {
                            true => fma(sums[i], splat(scales[i][g]), p[i]),
                            false => sums[i],
                        };
                    }
                }
            }
            let mut out = [0.0; R];
            for i in 0..R {
                // SAFETY: this function has the module's features.
                out[i] = join(to_array(unsafe { F::natural(p[i]) }));
            }
            out
        }

        /// Thirty-two inputs in the order of the format's lanes.
        ///
        /// # Safety
        /// So many must be readable.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn step_of<F: Format>(x: *const f32) -> [Lanes; 2] {
            // SAFETY: the caller's promise.
            unsafe { [F::arranged(load(x)), F::arranged(load(x.add(16)))] }
        }

        /// Sums with the products of thirty-two weights added.
        ///
        /// # Safety
        /// Their codes must be readable.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn added<F: Format>(codes: *const u8, x: [Lanes; 2], sums: Lanes) -> Lanes {
            // SAFETY: the caller's promise.
            let w = unsafe { F::decode(codes) };
            fma(w[1], x[1], fma(w[0], x[0], sums))
        }

        /// What is left of a group, made a step. Apart, so that whole steps keep their registers.
        #[cold]
        #[inline(never)]
        fn ragged<F: Format, const R: usize>(
            rows: [&[u8]; R],
            x: &[f32],
            at: usize,
            end: usize,
        ) -> ([[u8; 4 * STEP]; R], [f32; STEP]) {
            (std::array::from_fn(|i| padded_codes::<F>(rows[i], at, end)), padded(&x[at..end]))
        }

        /// The codes of inputs `at` to `end`, fewer than thirty-two, and positive weights after them.
        fn padded_codes<F: Format>(row: &[u8], at: usize, end: usize) -> [u8; 4 * STEP] {
            let mut out = [F::PAD; 4 * STEP];
            let bytes = ((end - at) * F::BYTES).div_ceil(STEP);
            out[..bytes].copy_from_slice(&row[at / 16 * (F::BYTES / 2)..][..bytes]);
            if F::BYTES < STEP && (end - at) % 2 == 1 {
                out[bytes - 1] = out[bytes - 1] & 0x0f | F::PAD & 0xf0;
            }
            out
        }

        #[target_feature(enable = $features)]
        pub(crate) fn matmul_vq(m: &Matrix<'_>, vq: Vq, x: &[f32], n: usize, out: &mut [f32]) {
            match vq {
                Vq { stages: 2, entries: 256, .. } => vq_product::<2, 256>(m, vq, x, n, out),
                Vq { stages: 3, entries: 256, .. } => vq_product::<3, 256>(m, vq, x, n, out),
                Vq { packed: true, .. } => vq_product::<4, 64>(m, vq, x, n, out),
                _ => scalar::matmul_vq(m, vq, x, n, out),
            }
        }

        /// Sums of table entries: the codec's own code, for several rows at once.
        #[target_feature(enable = $features)]
        fn vq_product<const S: usize, const E: usize>(
            m: &Matrix<'_>,
            vq: Vq,
            x: &[f32],
            n: usize,
            out: &mut [f32],
        ) {
            let entries = vq::Entries::<S, E>::new(vq, m.codes, m.tables, m.cols);
            if n < MANY {
                for (t, x) in x.chunks_exact(m.cols).enumerate() {
                    let mut r = 0;
                    while r + ROWS <= m.rows {
                        let sums = entries.dots::<ROWS>(m.first_row + r, x);
                        for i in 0..ROWS {
                            out[(r + i) * n + t] = sums[i];
                        }
                        r += ROWS;
                    }
                    for r in r..m.rows {
                        [out[r * n + t]] = entries.dots::<1>(m.first_row + r, x);
                    }
                }
            } else {
                panels::<F32>(m, m.cols, x, n, out, |r, inputs, out| {
                    entries.fill(m.first_row + r, inputs, out);
                });
            }
            for (r, out) in out.chunks_exact_mut(n).enumerate() {
                let scale = f16_at(m.scales, m.first_row + r);
                for out in out {
                    *out *= scale;
                }
            }
        }

        /// Many vectors: panels of some rows and columns, in which no group is cut.
        #[target_feature(enable = $features)]
        fn panels<F: Format>(
            m: &Matrix<'_>,
            group: usize,
            x: &[f32],
            n: usize,
            out: &mut [f32],
            fill: impl Fn(usize, Range<usize>, &mut [f32]),
        ) {
            let cols = m.cols;
            let group = F::GROUP.unwrap_or(group);
            let width = match (F::SCALED, PANEL / PANEL_ROWS) {
                (true, usual) if group <= usual => usual / group * group,
                (true, _) => group,
                (false, usual) => usual,
            };
            let stride = width.next_multiple_of(STEP);
            let tall = PANEL_ROWS.min(PANEL / stride / 4 * 4);
            let scale_bytes = m.scales.len() / m.rows;
            let mut panel = Panel([0.0; PANEL]);
            let panel = &mut panel.0;
            for t in (0..n).step_by(SHARED) {
                let vectors = SHARED.min(n - t);
                for r in (0..m.rows).step_by(tall) {
                    let rows = tall.min(m.rows - r);
                    let mut sums = [[[0.0; PARTIALS]; SHARED]; PANEL_ROWS];
                    for first in (0..cols).step_by(width) {
                        let end = cols.min(first + width);
                        let mut scales = [[0.0; SCALES]; PANEL_ROWS];
                        for i in 0..rows {
                            fill(r + i, first..end, &mut panel[i * stride..][..stride]);
                            if F::SCALED {
                                let row = &m.scales[(r + i) * scale_bytes..][..scale_bytes];
                                let groups = (end - first).div_ceil(group);
                                F::scales(row, first / group, &mut scales[i][..groups]);
                            }
                        }
                        for i in (0..rows).step_by(4) {
                            let panel = &panel[i * stride..][..4 * stride];
                            let (scales, sums) = (&scales[i..i + 4], &mut sums[i..i + 4]);
                            let mut v = 0;
                            while v < vectors {
                                let x = |k: usize| &x[(t + v + k) * cols..][first..end];
                                if VECTORS <= vectors - v {
                                    let x: [&[f32]; VECTORS] = std::array::from_fn(x);
                                    micro::<F, VECTORS>(panel, stride, scales, group, x, sums, v);
                                    v += VECTORS;
                                } else {
                                    micro::<F, 1>(panel, stride, scales, group, [x(0)], sums, v);
                                    v += 1;
                                }
                            }
                        }
                    }
                    for i in 0..rows {
                        for v in 0..vectors {
                            out[(r + i) * n + t + v] = join(sums[i][v]);
                        }
                    }
                }
            }
        }

        /// Decodes inputs of a row: whole groups, or all that are left. Missing ones become positive.
        #[target_feature(enable = $features)]
        #[inline]
        fn fill<F: Format>(m: &Matrix<'_>, r: usize, inputs: Range<usize>, out: &mut [f32]) {
            let Range { start: first, end } = inputs;
            let code_bytes = m.codes.len() / m.rows;
            let row = &m.codes[r * code_bytes..][..code_bytes];
            assert!(code_bytes >= m.cols / 16 * (F::BYTES / 2) && end <= m.cols);
            let whole = (end - first) / STEP;
            assert!(out.len() >= (end - first).next_multiple_of(STEP));
            for step in 0..whole {
                // SAFETY: the step's codes lie in the row, and its values in `out`.
                unsafe {
                    let codes = row.as_ptr().add((first / 16 + step * 2) * (F::BYTES / 2));
                    decode_to::<F>(codes, out.as_mut_ptr().add(step * STEP));
                }
            }
            let at = first + whole * STEP;
            if F::GROUP.is_none() && at < end {
                let codes = padded_codes::<F>(row, at, end);
                // SAFETY: the array is as long as a step's codes, and `out` as a step more.
                unsafe { decode_to::<F>(codes.as_ptr(), out.as_mut_ptr().add(whole * STEP)) };
            }
        }

        /// # Safety
        /// Thirty-two codes must be readable, and as many values writable.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn decode_to<F: Format>(codes: *const u8, out: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe {
                let w = F::decode(codes);
                store(F::natural(w[0]), out);
                store(F::natural(w[1]), out.add(16));
            }
        }

        /// Four rows of a panel times `V` vectors, added to their partial sums.
        #[target_feature(enable = $features)]
        fn micro<F: Format, const V: usize>(
            panel: &[f32],
            stride: usize,
            scales: &[[f32; SCALES]],
            group: usize,
            x: [&[f32]; V],
            sums: &mut [[[f32; PARTIALS]; SHARED]],
            v0: usize,
        ) {
            let len = x[0].len();
            let group = F::GROUP.unwrap_or(if F::SCALED { group } else { len });
            let whole = len / 16 * 16;
            let mut tails = [[0.0f32; 16]; V];
            for v in 0..V {
                assert!(x[v].len() == len);
                tails[v] = padded(&x[v][whole..]);
            }
            assert!(F::GROUP.is_none_or(|group| len.is_multiple_of(group)));
            assert!(panel.len() >= 4 * stride && stride >= len.next_multiple_of(16));
            assert!(scales.len() == 4 && sums.len() == 4 && v0 + V <= SHARED);
            for part in (0..PARTIALS).step_by(WIDTH) {
                let mut p = [[part_splat(0.0); V]; 4];
                for i in 0..4 {
                    for v in 0..V {
                        // SAFETY: a part of sixteen values.
                        p[i][v] = unsafe { part_load(sums[i][v0 + v].as_ptr().add(part)) };
                    }
                }
                for (g, first) in (0..len).step_by(group).enumerate() {
                    let end =
                        if F::GROUP.is_some() { first + group } else { len.min(first + group) };
                    let mut s = match F::SCALED {
                        true => [[part_splat(F::START); V]; 4],
                        false => p,
                    };
                    let steps = (end - first) / 16;
                    for step in 0..steps {
                        let at = first + step * 16 + part;
                        // SAFETY: a part of sixteen values, which lie in each vector and each row.
                        unsafe {
                            let mut xs = [part_splat(0.0); V];
                            for v in 0..V {
                                xs[v] = part_load(x[v].as_ptr().add(at));
                            }
                            multiplied(panel.as_ptr().add(at), stride, xs, &mut s);
                        }
                    }
                    if F::GROUP.is_none() && first + steps * 16 < end {
                        // SAFETY: a part of sixteen values in each array, and the panel has as many.
                        unsafe {
                            let mut xs = [part_splat(0.0); V];
                            for v in 0..V {
                                xs[v] = part_load(tails[v].as_ptr().add(part));
                            }
                            multiplied(panel.as_ptr().add(whole + part), stride, xs, &mut s);
                        }
                    }
                    for i in 0..4 {
                        let scale = part_splat(scales[i][g]);
                        for v in 0..V {
                            p[i][v] = match F::SCALED {
                                true => part_fma(s[i][v], scale, p[i][v]),
                                false => s[i][v],
                            };
                        }
                    }
                }
                for i in 0..4 {
                    for v in 0..V {
                        // SAFETY: a part of sixteen values.
                        unsafe { part_store(p[i][v], sums[i][v0 + v].as_mut_ptr().add(part)) };
                    }
                }
            }
        }

        /// Four rows of a panel, `stride` apart, times `V` vectors, added to sums.
        ///
        /// # Safety
        /// A part must be readable of each row.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn multiplied<const V: usize>(
            panel: *const f32,
            stride: usize,
            x: [Part; V],
            sums: &mut [[Part; V]; 4],
        ) {
            for i in 0..4 {
                // SAFETY: the caller's promise.
                let w = unsafe { part_load(panel.add(i * stride)) };
                for v in 0..V {
                    sums[i][v] = part_fma(w, x[v], sums[i][v]);
                }
            }
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn splat(x: f32) -> Lanes {
            [part_splat(x); PARTS]
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
            let mut out = c;
            for i in 0..PARTS {
                out[i] = part_fma(a[i], b[i], c[i]);
            }
            out
        }

        /// # Safety
        /// Sixteen values must be readable.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn load(x: *const f32) -> Lanes {
            let mut out = splat(0.0);
            for i in 0..PARTS {
                // SAFETY: the caller's promise.
                out[i] = unsafe { part_load(x.add(i * WIDTH)) };
            }
            out
        }

        /// # Safety
        /// Sixteen values must be writable.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn store(x: Lanes, to: *mut f32) {
            for i in 0..PARTS {
                // SAFETY: the caller's promise.
                unsafe { part_store(x[i], to.add(i * WIDTH)) };
            }
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn to_array(x: Lanes) -> [f32; PARTIALS] {
            let mut out = [0.0; PARTIALS];
            // SAFETY: the array has sixteen values.
            unsafe { store(x, out.as_mut_ptr()) };
            out
        }
    };
}

pub(crate) use products;
