//! The table of kernels an engine computes with, and the checks in front of it.

use std::fmt;
use std::ops::Range;

use crate::codec::{Codec, Mxfp4zKernels, TrellisKernels, Vq};
use crate::inputs::Inputs;
use crate::latents::Latents;
use crate::matrix::Matrix;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
use crate::neon;
use crate::scalar;
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
use crate::steps;
#[cfg(target_arch = "x86_64")]
use crate::{avx2, avx512};

/// Declares the table, its scalar entries and, for x86-64, the same source compiled with
/// fused multiply-add and 256-bit or 512-bit vectors.
macro_rules! table {
    ($( $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?; )*) => {
        #[derive(Clone, Copy)]
        struct Table { $( $name: unsafe fn($($ty),*) $(-> $ret)?, )* }

        const SCALAR: Table = Table { $( $name: scalar::$name, )* };

        #[cfg(target_arch = "x86_64")]
        mod fused {
            use crate::codec::Vq;
            use crate::latents::Latents;
            use crate::matrix::Matrix;

            $(
                #[allow(clippy::too_many_arguments, reason = "the scalar kernel's signature")]
                #[target_feature(enable = "avx2,fma")]
                pub(super) fn $name($($arg: $ty),*) $(-> $ret)? {
                    super::scalar::$name($($arg),*)
                }
            )*
        }

        #[cfg(target_arch = "x86_64")]
        const FUSED: Table = Table { $( $name: fused::$name, )* };

        #[cfg(target_arch = "x86_64")]
        mod wide {
            use crate::codec::Vq;
            use crate::latents::Latents;
            use crate::matrix::Matrix;

            $(
                #[allow(clippy::too_many_arguments, reason = "the scalar kernel's signature")]
                #[target_feature(enable = "avx512f,avx512bw,fma")]
                pub(super) fn $name($($arg: $ty),*) $(-> $ret)? {
                    super::scalar::$name($($arg),*)
                }
            )*
        }

        #[cfg(target_arch = "x86_64")]
        const WIDE: Table = Table { $( $name: wide::$name, )* };
    };
}

table! {
    dot(w: &[f32], x: &[f32]) -> f32;
    matmul_f32(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]);
    matmul_bf16(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]);
    matmul_q8(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]);
    matmul_q4(m: &Matrix<'_>, group: usize, x: &[f32], n: usize, out: &mut [f32]);
    matmul_mxfp4(m: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]);
    matmul_vq(m: &Matrix<'_>, vq: Vq, x: &[f32], n: usize, out: &mut [f32]);
    columns_f32(w: &[u8], a: &[f32], out: &mut [f32]);
    columns_bf16(w: &[u8], a: &[f32], out: &mut [f32]);
    columns_packed(m: &Matrix<'_>, a: &[f32], out: &mut [f32]);
    inverse_rms(x: &[f32], eps: f32) -> f32;
    rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]);
    l2_normalise(x: &mut [f32], factor: f32);
    short_conv(x: &mut [f32], history: &mut [f32], taps: &[f32]);
    decay_bounded(z: &[f32], bias: &[f32], rate: f32, lower_bound: f32, out: &mut [f32]);
    decay_unbounded(z: &[f32], bias: &[f32], rate: f32, out: &mut [f32]);
    kda_step(state: &mut [f32], decay: &[f32], q: &[f32], k: &[f32], v: &mut [f32], beta: f32, out: &mut [f32]);
    attend(q: &[f32], width: usize, cache: Latents<'_>, scale: f32, out: &mut [f32]);
    sigmoid_gate(x: &mut [f32], gate: &[f32]);
    silu_product(gate: &mut [f32], up: &[f32]);
    situ_product(gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32);
    exp(x: &mut [f32]);
    sigmoid(x: &mut [f32]);
    softmax(x: &mut [f32]);
    axpy(a: f32, x: &[f32], y: &mut [f32]);
    add(x: &[f32], y: &mut [f32]);
    sum(x: &[f32]) -> f32;
}

/// The fused table with its products written in 256-bit vectors.
#[cfg(target_arch = "x86_64")]
const AVX2: Table = Table {
    matmul_f32: avx2::matmul_f32,
    matmul_bf16: avx2::matmul_bf16,
    matmul_q8: avx2::matmul_q8,
    matmul_q4: avx2::matmul_q4,
    matmul_mxfp4: avx2::matmul_mxfp4,
    matmul_vq: avx2::matmul_vq,
    dot: steps::avx2::dot,
    sum: steps::avx2::sum,
    inverse_rms: steps::avx2::inverse_rms,
    rms_norm: steps::avx2::rms_norm,
    l2_normalise: steps::avx2::l2_normalise,
    columns_f32: steps::avx2::columns_f32,
    columns_bf16: steps::avx2::columns_bf16,
    columns_packed: steps::avx2::columns_packed,
    kda_step: steps::avx2::kda_step,
    attend: steps::avx2::attend,
    ..FUSED
};

/// The same in 512-bit vectors.
#[cfg(target_arch = "x86_64")]
const AVX512: Table = Table {
    matmul_f32: avx512::matmul_f32,
    matmul_bf16: avx512::matmul_bf16,
    matmul_q8: avx512::matmul_q8,
    matmul_q4: avx512::matmul_q4,
    matmul_mxfp4: avx512::matmul_mxfp4,
    matmul_vq: avx512::matmul_vq,
    dot: steps::avx512::dot,
    sum: steps::avx512::sum,
    inverse_rms: steps::avx512::inverse_rms,
    rms_norm: steps::avx512::rms_norm,
    l2_normalise: steps::avx512::l2_normalise,
    columns_f32: steps::avx512::columns_f32,
    columns_bf16: steps::avx512::columns_bf16,
    columns_packed: steps::avx512::columns_packed,
    kda_step: steps::avx512::kda_step,
    attend: steps::avx512::attend,
    ..WIDE
};

/// The specification, which compilers vectorise for every 64-bit Arm where it is elementwise, and the
/// rest in 128-bit vectors.
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
const NEON: Table = Table {
    matmul_f32: neon::matmul_f32,
    matmul_bf16: neon::matmul_bf16,
    matmul_q8: neon::matmul_q8,
    matmul_q4: neon::matmul_q4,
    matmul_mxfp4: neon::matmul_mxfp4,
    matmul_vq: neon::matmul_vq,
    dot: steps::neon::dot,
    sum: steps::neon::sum,
    inverse_rms: steps::neon::inverse_rms,
    rms_norm: steps::neon::rms_norm,
    l2_normalise: steps::neon::l2_normalise,
    columns_f32: steps::neon::columns_f32,
    columns_bf16: steps::neon::columns_bf16,
    columns_packed: steps::neon::columns_packed,
    kda_step: steps::neon::kda_step,
    attend: steps::neon::attend,
    ..SCALAR
};

/// A set of kernels, chosen once. Every set gives the same bits.
///
/// Each method checks its lengths in release builds too and panics when they disagree: that
/// is a fault of the caller, never of a file.
#[derive(Clone, Copy)]
pub struct Kernels {
    name: &'static str,
    table: Table,
    trellis: TrellisKernels,
    mxfp4z: Mxfp4zKernels,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels({})", self.name)
    }
}

/// A set of kernels that cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this machine has no kernels named {name:?}; it has {}", names.join(", "))]
pub struct NoSuchKernels {
    /// What was asked for.
    pub name: String,
    /// What there is.
    pub names: Vec<&'static str>,
}

/// Calls a table entry. The one place where the table's `unsafe` lives.
macro_rules! call {
    ($self:ident.$name:ident($($arg:expr),* $(,)?)) => {{
        #[expect(unsafe_code, reason = "table entries may need CPU features")]
        // SAFETY: entries are safe functions whose only requirement is the CPU features they
        // were compiled for; a table that needs features is stored by `all` alone, which has
        // checked that this CPU has them.
        unsafe { ($self.table.$name)($($arg),*) }
    }};
}

impl Kernels {
    /// The specification, compiled for any CPU.
    pub const SCALAR: Kernels = Kernels {
        name: "scalar",
        table: SCALAR,
        trellis: TrellisKernels::SCALAR,
        mxfp4z: Mxfp4zKernels::SCALAR,
    };

    /// Every set this CPU can run, the specification first.
    pub fn all() -> Vec<Kernels> {
        #[allow(unused_mut, reason = "only some machines have more")]
        let mut sets = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            sets.push(Kernels { name: "scalar+fma", table: FUSED, ..Self::SCALAR });
            sets.push(Self::of("avx2", AVX2));
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
                sets.push(Self::of("avx512", AVX512));
            }
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        if std::arch::is_aarch64_feature_detected!("neon") {
            sets.push(Self::of("neon", NEON));
        }
        sets
    }

    /// A set of vector kernels with the best of the others that need no more than it. Tables are of plain
    /// AVX-512, entropy-coded and trellis products of parts of it that some CPUs lack.
    #[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
    fn of(name: &'static str, table: Table) -> Kernels {
        let fits = |other: &str| name != "avx2" || !other.starts_with("avx512");
        let trellis = TrellisKernels::all().into_iter().rfind(|set| fits(set.name()));
        let mxfp4z = Mxfp4zKernels::all().into_iter().rfind(|set| fits(set.name()));
        Kernels {
            name,
            table,
            trellis: trellis.unwrap_or(TrellisKernels::SCALAR),
            mxfp4z: mxfp4z.unwrap_or(Mxfp4zKernels::SCALAR),
        }
    }

    /// The fastest set this CPU can run.
    pub fn detect() -> Kernels {
        Self::all().pop().unwrap_or(Self::SCALAR)
    }

    /// The set of this name.
    ///
    /// # Errors
    /// When this CPU cannot run it, or there is none.
    pub fn named(name: &str) -> Result<Kernels, NoSuchKernels> {
        let sets = Self::all();
        let found = sets.iter().find(|set| set.name == name);
        found.copied().ok_or_else(|| NoSuchKernels {
            name: name.to_owned(),
            names: sets.iter().map(|set| set.name).collect(),
        })
    }

    /// Short name for reports, and to choose it by.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Dot product of two vectors.
    pub fn dot(&self, w: &[f32], x: &[f32]) -> f32 {
        assert_eq!(w.len(), x.len());
        call!(self.dot(w, x))
    }

    /// Sum of a vector.
    pub fn sum(&self, x: &[f32]) -> f32 {
        call!(self.sum(x))
    }

    /// `out[r][t] = w[r] · x[t]`: `x` (n, cols) → `out` (rows, n).
    pub fn matmul(&self, w: &Matrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
        self.multiply(w, &Inputs::new(&[w.codec], x, n, w.cols()), out);
    }

    /// [`matmul`](Self::matmul) with vectors that are prepared for the matrix's format.
    pub fn multiply(&self, w: &Matrix<'_>, inputs: &Inputs<'_>, out: &mut [f32]) {
        let Inputs { x, n, cols, .. } = *inputs;
        assert_eq!(cols, w.cols());
        assert_eq!(out.len(), w.rows() * n);
        if out.is_empty() || cols == 0 {
            out.fill(0.0);
            return;
        }
        match w.codec {
            Codec::F32 => call!(self.matmul_f32(w, x, n, out)),
            Codec::Bf16 => call!(self.matmul_bf16(w, x, n, out)),
            Codec::Q8 { group } => call!(self.matmul_q8(w, group, x, n, out)),
            Codec::Q4 { group } => call!(self.matmul_q4(w, group, x, n, out)),
            Codec::Mxfp4 => call!(self.matmul_mxfp4(w, x, n, out)),
            Codec::Vq(vq) => call!(self.matmul_vq(w, vq, x, n, out)),
            Codec::Trellis(trellis) => {
                let integers = inputs.integers(trellis);
                let (whole, _) = w.trellis().expect("of this format");
                whole_tiles(w, n, out, |rows, out| {
                    self.trellis.multiply(&whole.row_range(rows), integers, out);
                });
            }
            Codec::Mxfp4z => {
                let (whole, _) = w.mxfp4z().expect("of this format");
                whole_tiles(w, n, out, |rows, out| {
                    self.mxfp4z.multiply(&whole.row_range(rows), x, n, out);
                });
            }
        }
    }

    /// `out[c] = Σ_r a[r]·w[r][c]`: `a` (rows) → `out` (cols).
    pub fn columns(&self, w: &Matrix<'_>, a: &[f32], out: &mut [f32]) {
        assert_eq!(a.len(), w.rows());
        assert_eq!(out.len(), w.cols());
        if out.is_empty() {
            return;
        }
        match w.codec {
            Codec::F32 => call!(self.columns_f32(w.codes, a, out)),
            Codec::Bf16 => call!(self.columns_bf16(w.codes, a, out)),
            _ => call!(self.columns_packed(w, a, out)),
        }
    }

    /// `1 / sqrt(mean(x²) + eps)`.
    pub fn inverse_rms(&self, x: &[f32], eps: f32) -> f32 {
        call!(self.inverse_rms(x, eps))
    }

    /// RMSNorm of each row: `x` and `out` (n, w.len()).
    pub fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        assert!(!w.is_empty() && x.len().is_multiple_of(w.len()));
        for (x, out) in x.chunks_exact(w.len()).zip(out.chunks_exact_mut(w.len())) {
            call!(self.rms_norm(x, w, eps, out));
        }
    }

    /// `x · 1/sqrt(Σx² + 1e-6) · factor`, in place.
    pub fn l2_normalise(&self, x: &mut [f32], factor: f32) {
        call!(self.l2_normalise(x, factor));
    }

    /// One step of the short convolution and SiLU, in place; `history` (kernel − 1, channels)
    /// moves on by one, `taps` (kernel, channels), both oldest first.
    pub fn short_conv(&self, x: &mut [f32], history: &mut [f32], taps: &[f32]) {
        assert!(!x.is_empty() && history.len().is_multiple_of(x.len()));
        assert_eq!(taps.len(), history.len() + x.len());
        call!(self.short_conv(x, history, taps));
    }

    /// Decay factors of one head from the bounded gate.
    pub fn decay_bounded(
        &self,
        z: &[f32],
        bias: &[f32],
        rate: f32,
        lower_bound: f32,
        out: &mut [f32],
    ) {
        assert!(z.len() == bias.len() && z.len() == out.len());
        call!(self.decay_bounded(z, bias, rate, lower_bound, out));
    }

    /// Decay factors of one head from the unbounded gate.
    pub fn decay_unbounded(&self, z: &[f32], bias: &[f32], rate: f32, out: &mut [f32]) {
        assert!(z.len() == bias.len() && z.len() == out.len());
        call!(self.decay_unbounded(z, bias, rate, out));
    }

    /// One step of Kimi Delta Attention for one head: `state` (k.len(), v.len()) moves on,
    /// `v` is overwritten.
    #[allow(clippy::too_many_arguments, reason = "the recurrence has this many operands")]
    pub fn kda_step(
        &self,
        state: &mut [f32],
        decay: &[f32],
        q: &[f32],
        k: &[f32],
        v: &mut [f32],
        beta: f32,
        out: &mut [f32],
    ) {
        assert!(decay.len() == q.len() && k.len() == q.len());
        assert!(v.len() == out.len() && !v.is_empty());
        assert_eq!(state.len(), k.len() * v.len());
        call!(self.kda_step(state, decay, q, k, v, beta, out));
    }

    /// Attention of every head's query in `q` (heads, width) over `cache` (positions ≥ 1, width);
    /// `out` (heads, rank ≤ width) becomes the weighted mean of the rows' first values.
    pub fn attend(&self, q: &[f32], width: usize, cache: Latents<'_>, scale: f32, out: &mut [f32]) {
        assert!(width > 0 && !q.is_empty() && q.len().is_multiple_of(width));
        let heads = q.len() / width;
        assert!(out.len().is_multiple_of(heads) && out.len() <= q.len());
        assert!(!cache.is_empty() && cache.len().is_multiple_of(width));
        if !out.is_empty() {
            call!(self.attend(q, width, cache, scale, out));
        }
    }

    /// `x = x · sigmoid(gate)`.
    pub fn sigmoid_gate(&self, x: &mut [f32], gate: &[f32]) {
        assert_eq!(x.len(), gate.len());
        call!(self.sigmoid_gate(x, gate));
    }

    /// `gate = silu(gate) · up`.
    pub fn silu_product(&self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len());
        call!(self.silu_product(gate, up));
    }

    /// `gate = situ(gate, up)`.
    pub fn situ_product(&self, gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
        assert_eq!(gate.len(), up.len());
        call!(self.situ_product(gate, up, beta, linear_beta));
    }

    /// `x = e^x`.
    pub fn exp(&self, x: &mut [f32]) {
        call!(self.exp(x));
    }

    /// `x = sigmoid(x)`.
    pub fn sigmoid(&self, x: &mut [f32]) {
        call!(self.sigmoid(x));
    }

    /// Softmax in place.
    pub fn softmax(&self, x: &mut [f32]) {
        call!(self.softmax(x));
    }

    /// `y = a·x + y`, fused.
    pub fn axpy(&self, a: f32, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len());
        call!(self.axpy(a, x, y));
    }

    /// `y = y + x`.
    pub fn add(&self, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len());
        call!(self.add(x, y));
    }
}

/// Gives `product` the rows of `w` in the matrix that it is a part of, and their part of `out` (rows, n);
/// where they are not whole tiles, all rows of these tiles.
fn whole_tiles(
    w: &Matrix<'_>,
    n: usize,
    out: &mut [f32],
    product: impl Fn(Range<usize>, &mut [f32]),
) {
    let tile = w.codec.tile_rows();
    let (first, end) = (w.first_row, w.first_row + w.rows);
    let tiles = first / tile * tile..end.next_multiple_of(tile).min(w.all_rows);
    if tiles == (first..end) {
        return product(tiles, out);
    }
    let mut all = vec![0.0; tiles.len() * n];
    let before = first - tiles.start;
    product(tiles, &mut all);
    out.copy_from_slice(&all[before * n..][..out.len()]);
}
