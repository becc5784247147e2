//! Matrix products over sixteen lanes, written once for every instruction set.
//!
//! The plain algorithm is `scalar.rs`: a row has sixteen partial sums, and lane j holds the j-th, so
//! that the bits are those of the specification. What differs from it:
//!
//! - for few vectors (`direct`) weights are decoded in registers, for up to four vectors at once and
//!   for several rows together, because one row's sums form a chain that the latency of the addition
//!   would hold up;
//! - for many (`panels`) some rows are decoded into a panel that stays in the nearest cache, and
//!   every vector is multiplied by it. Only partial sums are put down between panels, as they are;
//! - lanes may have another order than inputs while a row is computed, where codes can be looked up
//!   faster that way. Inputs are put into that order once for a block of rows;
//! - inputs beyond the last whole thirty-two of a group are computed by the same code, with positive
//!   weights and inputs of −0 for what is missing: adding −0 changes no sum, not even one of −0;
//! - a block of MXFP4 begins with −0, because its first term is a product and `fma(v, x, −0)` is that
//!   product, where it would lose the sign of zero with +0.
//!
//! A module that uses [`lanes`] has in scope: `Part` (a register) with `WIDTH`, `part_splat`, `part_load`,
//! `part_store`, `part_add`, `part_sub`, `part_mul` and `part_fma(a, b, c)` = a·b + c. One that uses
//! [`products`] has in scope what that defines; `prefetch`; `ROWS` that `direct` takes
//! together for one to four vectors, and `VQ_ROWS` for one where weights are table entries; rows and
//! vectors that `panels` takes together, so that their sums are registers: `TILE`, and `SHORT_TILE` where
//! groups are so short that those of their rows should be as well; and the formats, types that are `Format`.

use crate::codec::GROUP_RANGE;

/// Inputs that are decoded together.
pub(crate) const STEP: usize = 32;
/// Inputs or weights that stay in the nearest cache: 16 KiB of f32, half of the smallest one.
pub(crate) const NEAR: usize = 4096;
/// Rows of a panel.
pub(crate) const PANEL_ROWS: usize = 8;
/// Weights of a panel whose groups are as long as groups may be; others have [`NEAR`].
pub(crate) const PANEL: usize = PANEL_ROWS * *GROUP_RANGE.end();
/// Groups whose scales are converted together.
pub(crate) const SCALES: usize = 32;
/// Vectors that share one decoding of a panel; their partial sums take 32 KiB.
pub(crate) const SHARED: usize = 64;
/// Up to this many vectors, panels do not pay.
pub(crate) const FEW: usize = 10;
/// Rows that few vectors are multiplied by before the next ones.
pub(crate) const BLOCK: usize = 64;

/// Arrays of f32, so aligned that no register's load or store crosses a cache line.
#[repr(align(64))]
pub(crate) struct Aligned<T>(pub(crate) T);

/// Inputs that are missing: −0, which adds nothing to any sum when its weight is positive.
#[inline(always)]
pub(crate) fn padded<const N: usize>(x: &[f32]) -> [f32; N] {
    let mut out = [-0.0; N];
    out[..x.len()].copy_from_slice(x);
    out
}

/// Defines `Lanes`, sixteen f32, and the operations on them that products and `steps` share, for the given
/// CPU features.
macro_rules! lanes {
    ($features:literal) => {
        const PARTS: usize = PARTIALS / WIDTH;

        /// Sixteen f32.
        pub(crate) type Lanes = [Part; PARTS];

        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) fn splat(x: f32) -> Lanes {
            [part_splat(x); PARTS]
        }

        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) fn add(a: Lanes, b: Lanes) -> Lanes {
            let mut out = a;
            for i in 0..PARTS {
                out[i] = part_add(a[i], b[i]);
            }
            out
        }

        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) fn sub(a: Lanes, b: Lanes) -> Lanes {
            let mut out = a;
            for i in 0..PARTS {
                out[i] = part_sub(a[i], b[i]);
            }
            out
        }

        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) fn mul(a: Lanes, b: Lanes) -> Lanes {
            let mut out = a;
            for i in 0..PARTS {
                out[i] = part_mul(a[i], b[i]);
            }
            out
        }

        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
            let mut out = c;
            for i in 0..PARTS {
                out[i] = part_fma(a[i], b[i], c[i]);
            }
            out
        }

        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) fn load(x: &[f32; PARTIALS]) -> Lanes {
            // SAFETY: the array has sixteen values.
            unsafe { load_at(x.as_ptr()) }
        }

        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) fn store(x: Lanes, to: &mut [f32; PARTIALS]) {
            // SAFETY: the array has sixteen values.
            unsafe { store_at(x, to.as_mut_ptr()) };
        }

        /// # Safety
        /// Sixteen values must be readable.
        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) unsafe fn load_at(x: *const f32) -> Lanes {
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
        unsafe fn store_at(x: Lanes, to: *mut f32) {
            for i in 0..PARTS {
                // SAFETY: the caller's promise.
                unsafe { part_store(x[i], to.add(i * WIDTH)) };
            }
        }

        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) fn to_array(x: Lanes) -> [f32; PARTIALS] {
            let mut out = [0.0; PARTIALS];
            store(x, &mut out);
            out
        }
    };
}

/// Defines `matmul_f32`, `matmul_bf16`, `matmul_q8`, `matmul_q4` and `matmul_mxfp4` with the scalar
/// kernels' signatures, for the given CPU features.
macro_rules! products {
    ($features:literal) => {
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
            /// What is added to a row's sum at last: −0 changes nothing, +0 makes +0 of −0.
            const END: f32 = -0.0;

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

        /// A format in groups of thirty-two, none of them short: a group is one step, as in MXFP4.
        struct Short<F>(std::marker::PhantomData<F>);

        impl<F: Format> Format for Short<F> {
            const BYTES: usize = F::BYTES;
            const PAD: u8 = F::PAD;
            const SCALED: bool = F::SCALED;
            const GROUP: Option<usize> = Some(STEP);
            const START: f32 = F::START;
            const END: f32 = F::END;

            #[target_feature(enable = $features)]
            #[inline]
            unsafe fn decode(codes: *const u8) -> [Lanes; 2] {
                // SAFETY: the caller's promise.
                unsafe { F::decode(codes) }
            }

            #[target_feature(enable = $features)]
            #[inline]
            unsafe fn arranged(x: Lanes) -> Lanes {
                // SAFETY: this function has the module's features.
                unsafe { F::arranged(x) }
            }

            #[target_feature(enable = $features)]
            #[inline]
            unsafe fn natural(x: Lanes) -> Lanes {
                // SAFETY: this function has the module's features.
                unsafe { F::natural(x) }
            }

            #[inline(always)]
            fn scales(row: &[u8], first: usize, out: &mut [f32]) {
                F::scales(row, first, out);
            }
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
            if group == STEP && m.cols.is_multiple_of(STEP) {
                product::<Short<Q4>>(m, group, x, n, out);
            } else {
                product::<Q4>(m, group, x, n, out);
            }
        }

        #[target_feature(enable = $features)]
        pub(crate) fn matmul_mxfp4(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
            product::<Mxfp4>(m, mxfp4::BLOCK, x, n, out);
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn product<F: Format>(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]) {
            if n <= FEW {
                direct::<F>(m, group, x, n, out);
            } else if F::GROUP.is_some() {
                const T: usize = SHORT_TILE.0;
                const V: usize = SHORT_TILE.1;
                panels::<F, T, V>(m, group, x, n, out, |r, inputs, out| {
                    fill::<F>(m, r, inputs, out);
                });
            } else {
                panels::<F, { TILE.0 }, { TILE.1 }>(m, group, x, n, out, |r, inputs, out| {
                    fill::<F>(m, r, inputs, out);
                });
            }
        }

        /// Few vectors: some rows at a time, which stay in a near cache, by all vectors.
        #[target_feature(enable = $features)]
        fn direct<F: Format>(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]) {
            let mut room = Aligned([0.0; NEAR]);
            for first in (0..m.rows).step_by(BLOCK) {
                let rows = first..m.rows.min(first + BLOCK);
                let mut t = 0;
                while t < n {
                    let rows = rows.clone();
                    t += match n - t {
                        1 => block::<F, { ROWS[0] }, 1>(m, group, rows, x, t, n, &mut room, out),
                        2 => block::<F, { ROWS[1] }, 2>(m, group, rows, x, t, n, &mut room, out),
                        3 => block::<F, { ROWS[2] }, 3>(m, group, rows, x, t, n, &mut room, out),
                        _ => block::<F, { ROWS[3] }, 4>(m, group, rows, x, t, n, &mut room, out),
                    };
                }
            }
        }

        /// Some rows times `V` vectors, from number `t` of `n` on. Returns `V`.
        #[target_feature(enable = $features)]
        #[inline]
        #[expect(clippy::too_many_arguments, reason = "a product and a part of it")]
        fn block<F: Format, const R: usize, const V: usize>(
            m: &Matrix<'_>,
            group: usize,
            rows: Range<usize>,
            x: &[f32],
            t: usize,
            n: usize,
            room: &mut Aligned<[f32; NEAR]>,
            out: &mut [f32],
        ) -> usize {
            let cols = m.cols;
            let whole = F::GROUP.unwrap_or(if F::SCALED { group } else { STEP });
            let width = NEAR / V / whole * whole;
            let mut sums = [[splat(0.0); V]; BLOCK];
            for first in (0..cols).step_by(width) {
                let end = cols.min(first + width);
                let inputs: [&[f32]; V] = std::array::from_fn(|v| &x[(t + v) * cols..][first..end]);
                // Copied even where lanes have the order of inputs: several vectors do not fit the nearest
                // cache together, and these cross no cache lines.
                let mut arranged: [&[f32]; V] = [&[]; V];
                for (room, v) in room.0.chunks_exact_mut(NEAR / V).zip(0..V) {
                    arrange::<F>(inputs[v], room);
                    arranged[v] = room;
                }
                let mut r = rows.start;
                while r + R <= rows.end {
                    let sums = &mut sums[r - rows.start..][..R];
                    tile::<F, R, V>(m, group, r, first, inputs, arranged, sums);
                    r += R;
                }
                for r in r..rows.end {
                    let sums = &mut sums[r - rows.start..][..1];
                    tile::<F, 1, V>(m, group, r, first, inputs, arranged, sums);
                }
            }
            for r in rows.clone() {
                for v in 0..V {
                    // SAFETY: this function has the module's features.
                    let sums = unsafe { F::natural(sums[r - rows.start][v]) };
                    out[r * n + t + v] = join(to_array(sums)) + F::END;
                }
            }
            V
        }

        /// Puts whole sixteens of inputs into the order of the format's lanes.
        #[target_feature(enable = $features)]
        #[inline]
        fn arrange<F: Format>(x: &[f32], out: &mut [f32]) {
            let (x, out) = (x.as_chunks::<PARTIALS>().0, out.as_chunks_mut::<PARTIALS>().0);
            for (x, out) in x.iter().zip(out) {
                // SAFETY: both have sixteen values.
                unsafe { store_at(F::arranged(load_at(x.as_ptr())), out.as_mut_ptr()) };
            }
        }

        /// `R` rows from `r` on times as many inputs of `V` vectors, the first of them number `first`,
        /// added to their partial sums. `arranged` has whole sixteens in the order of lanes.
        #[target_feature(enable = $features)]
        #[inline]
        fn tile<F: Format, const R: usize, const V: usize>(
            m: &Matrix<'_>,
            group: usize,
            r: usize,
            first: usize,
            x: [&[f32]; V],
            arranged: [&[f32]; V],
            sums: &mut [[Lanes; V]],
        ) {
            let len = x[0].len();
            let group = F::GROUP.unwrap_or(if F::SCALED { group } else { len });
            let (code_bytes, scale_bytes) = (m.codes.len() / m.rows, m.scales.len() / m.rows);
            // A group is whole sixteens, except where it is the row, so that every one begins with
            // a whole byte.
            assert!(code_bytes >= (first + len) / 16 * (F::BYTES / 2));
            assert!(F::GROUP.is_none_or(|group| len.is_multiple_of(group)));
            for v in 0..V {
                assert!(x[v].len() == len && arranged[v].len() >= len / 16 * 16);
            }
            let rows: [&[u8]; R] = std::array::from_fn(|i| {
                &m.codes[(r + i) * code_bytes..][..code_bytes][first / 16 * (F::BYTES / 2)..]
            });
            let mut p = [[splat(0.0); V]; R];
            for i in 0..R {
                p[i] = sums[i];
            }
            let groups = len.div_ceil(group);
            let group_bytes = group / 16 * (F::BYTES / 2);
            for first_group in (0..groups).step_by(SCALES) {
                let mut scales = [[0.0; SCALES]; R];
                let some = SCALES.min(groups - first_group);
                for i in 0..R {
                    let row = &m.scales[(r + i) * scale_bytes..][..scale_bytes];
                    F::scales(row, first / group + first_group, &mut scales[i][..some]);
                }
                for g in 0..some {
                    let first = (first_group + g) * group;
                    // Where groups have one size, no row ends within one.
                    let end =
                        if F::GROUP.is_some() { first + group } else { len.min(first + group) };
                    let whole = (end - first) / STEP;
                    let mut t = if F::SCALED { [[splat(F::START); V]; R] } else { p };
                    for step in 0..whole {
                        let at = first + step * STEP;
                        let code = (first_group + g) * group_bytes + step * F::BYTES;
                        // The same place in the rows that come next: the hardware does not see that short
                        // rows follow one another, so that weights from memory would come at half the rate.
                        for line in (0..F::BYTES).step_by(64) {
                            for i in 0..R {
                                let next = R * code_bytes + code + line;
                                prefetch(rows[i].as_ptr().wrapping_add(next));
                            }
                        }
                        // SAFETY: thirty-two values from `at` on lie in the vectors, at + 32 <= len,
                        // and their codes in each row, as asserted above.
                        unsafe { stepped::<F, R, V>(rows, code, arranged, at, &mut t) };
                    }
                    let at = first + whole * STEP;
                    if F::GROUP.is_none() && at < end {
                        let (codes, x) = ragged::<F, R, V>(rows, x, at, end);
                        // SAFETY: all arrays are as long as a step.
                        unsafe {
                            let mut ordered = [[0.0; STEP]; V];
                            for v in 0..V {
                                arrange::<F>(&x[v], &mut ordered[v]);
                            }
                            let x = std::array::from_fn(|v| &ordered[v][..]);
                            let codes = std::array::from_fn(|i| &codes[i][..]);
                            stepped::<F, R, V>(codes, 0, x, 0, &mut t);
                        }
                    }
                    for i in 0..R {
                        for v in 0..V {
                            p[i][v] = match F::SCALED {
                                true => fma(t[i][v], splat(scales[i][g]), p[i][v]),
                                false => t[i][v],
                            };
                        }
                    }
                }
            }
            for i in 0..R {
                sums[i] = p[i];
            }
        }

        /// Adds the products of thirty-two weights of each row, whose codes begin at byte `code`, and
        /// inputs of each vector, from `at` on.
        ///
        /// # Safety
        /// So many must be readable.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn stepped<F: Format, const R: usize, const V: usize>(
            rows: [&[u8]; R],
            code: usize,
            x: [&[f32]; V],
            at: usize,
            sums: &mut [[Lanes; V]; R],
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                let mut xs = [[splat(0.0); 2]; V];
                for v in 0..V {
                    let x = x[v].as_ptr().add(at);
                    xs[v] = [load_at(x), load_at(x.add(16))];
                }
                for i in 0..R {
                    let w = F::decode(rows[i].as_ptr().add(code));
                    for v in 0..V {
                        sums[i][v] = fma(w[1], xs[v][1], fma(w[0], xs[v][0], sums[i][v]));
                    }
                }
            }
        }

        /// What is left of a group, made a step. Apart, so that whole steps keep their registers.
        #[cold]
        #[inline(never)]
        fn ragged<F: Format, const R: usize, const V: usize>(
            rows: [&[u8]; R],
            x: [&[f32]; V],
            at: usize,
            end: usize,
        ) -> ([[u8; 4 * STEP]; R], [[f32; STEP]; V]) {
            (
                std::array::from_fn(|i| padded_codes::<F>(rows[i], at, end)),
                std::array::from_fn(|v| padded(&x[v][at..end])),
            )
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
            let tables = vq::Tables::<S, E>::new(m.tables);
            let entries = vq::Entries::new(vq, m.codes, &tables, m.cols);
            if n == 1 {
                let mut r = 0;
                while r + VQ_ROWS <= m.rows {
                    let sums = entries.dots::<VQ_ROWS>(m.first_row + r, x);
                    out[r..][..VQ_ROWS].copy_from_slice(&sums);
                    r += VQ_ROWS;
                }
                for r in r..m.rows {
                    [out[r]] = entries.dots::<1>(m.first_row + r, x);
                }
            } else {
                panels::<F32, { TILE.0 }, { TILE.1 }>(m, m.cols, x, n, out, |r, inputs, out| {
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
        fn panels<F: Format, const T: usize, const V: usize>(
            m: &Matrix<'_>,
            group: usize,
            x: &[f32],
            n: usize,
            out: &mut [f32],
            fill: impl Fn(usize, Range<usize>, &mut [f32]),
        ) {
            let cols = m.cols;
            let group = F::GROUP.unwrap_or(group);
            let width = match (F::SCALED, NEAR / PANEL_ROWS) {
                (true, usual) if group <= usual => usual / group * group,
                (true, _) => group,
                (false, usual) => usual,
            };
            let stride = width.next_multiple_of(STEP);
            let scale_bytes = m.scales.len() / m.rows;
            let mut panel = Aligned([0.0; PANEL]);
            let panel = &mut panel.0;
            for t in (0..n).step_by(SHARED) {
                let vectors = SHARED.min(n - t);
                for r in (0..m.rows).step_by(PANEL_ROWS) {
                    let rows = PANEL_ROWS.min(m.rows - r);
                    let mut sums = Aligned([[[0.0; PARTIALS]; SHARED]; PANEL_ROWS]);
                    let sums = &mut sums.0;
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
                        // Vectors outside: their inputs come from a farther cache once for the panel.
                        for v in (0..vectors).step_by(V) {
                            let x = |k: usize| &x[(t + v + k) * cols..][first..end];
                            for i in (0..rows).step_by(T) {
                                let panel = &panel[i * stride..][..T * stride];
                                let (scales, sums) = (&scales[i..i + T], &mut sums[i..i + T]);
                                match vectors - v {
                                    1 => {
                                        let x = [x(0)];
                                        micro::<F, T, 1>(panel, stride, scales, group, x, sums, v);
                                    }
                                    2 => {
                                        let x = [x(0), x(1)];
                                        micro::<F, T, 2>(panel, stride, scales, group, x, sums, v);
                                    }
                                    3 => {
                                        let x = [x(0), x(1), x(2)];
                                        micro::<F, T, 3>(panel, stride, scales, group, x, sums, v);
                                    }
                                    _ => {
                                        let x = std::array::from_fn(x);
                                        micro::<F, T, V>(panel, stride, scales, group, x, sums, v);
                                    }
                                }
                            }
                        }
                    }
                    for i in 0..rows {
                        for v in 0..vectors {
                            out[(r + i) * n + t + v] = join(sums[i][v]) + F::END;
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
                store_at(F::natural(w[0]), out);
                store_at(F::natural(w[1]), out.add(16));
            }
        }

        /// `T` rows of a panel times `V` vectors, added to their partial sums.
        #[target_feature(enable = $features)]
        fn micro<F: Format, const T: usize, const V: usize>(
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
                if whole < len {
                    tails[v] = padded(&x[v][whole..]);
                }
            }
            assert!(F::GROUP.is_none_or(|group| len.is_multiple_of(group)));
            assert!(panel.len() >= T * stride && stride >= len.next_multiple_of(16));
            assert!(scales.len() == T && sums.len() == T && v0 <= SHARED - V);
            for part in (0..PARTIALS).step_by(WIDTH) {
                let mut p = [[part_splat(0.0); V]; T];
                for i in 0..T {
                    for v in 0..V {
                        // SAFETY: a part of sixteen values.
                        p[i][v] = unsafe { part_load(sums[i][v0 + v].as_ptr().add(part)) };
                    }
                }
                for (g, first) in (0..len).step_by(group).enumerate() {
                    let end =
                        if F::GROUP.is_some() { first + group } else { len.min(first + group) };
                    let mut s = match F::SCALED {
                        true => [[part_splat(F::START); V]; T],
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
                    for i in 0..T {
                        let scale = part_splat(scales[i][g]);
                        for v in 0..V {
                            p[i][v] = match F::SCALED {
                                true => part_fma(s[i][v], scale, p[i][v]),
                                false => s[i][v],
                            };
                        }
                    }
                }
                for i in 0..T {
                    for v in 0..V {
                        // SAFETY: a part of sixteen values.
                        unsafe { part_store(p[i][v], sums[i][v0 + v].as_mut_ptr().add(part)) };
                    }
                }
            }
        }

        /// `T` rows of a panel, `stride` apart, times `V` vectors, added to sums.
        ///
        /// # Safety
        /// A part must be readable of each row.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn multiplied<const T: usize, const V: usize>(
            panel: *const f32,
            stride: usize,
            x: [Part; V],
            sums: &mut [[Part; V]; T],
        ) {
            for i in 0..T {
                // SAFETY: the caller's promise.
                let w = unsafe { part_load(panel.add(i * stride)) };
                for v in 0..V {
                    sums[i][v] = part_fma(w, x[v], sums[i][v]);
                }
            }
        }
    };
}

pub(crate) use {lanes, products};
