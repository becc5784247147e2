//! Rill's kernels: packed number formats, the arithmetic on them, and the threads that run it.
//!
//! Every result is defined, bit for bit, by `docs/arithmetic.md`; [`Kernels::SCALAR`] is that
//! page in code. Nothing here knows of files, models or tokens.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod codec;
mod inputs;
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
mod lanes;
mod latents;
pub mod math;
mod matrix;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
mod pool;
pub mod probe;
mod scalar;
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
mod steps;
mod table;

pub use codec::{
    Activations, Codec, EncodeError, GROUP_RANGE, Layout, LayoutError, Mxfp4zKernels, Mxfp4zMatrix,
    Trellis, TrellisEncoder, TrellisKernels, TrellisMatrix, TrellisTables, Vq,
};
pub use inputs::Inputs;
pub use latents::{LatentCache, LatentFormat, Latents};
pub use matrix::Matrix;
pub use pool::{Pool, PoolError};
pub use table::{Kernels, NoSuchKernels};

/// Cached positions that attention takes at a time, at absolute positions.
pub const ATTENTION_BLOCK: usize = 64;

/// Distance between a computed value and the exact one, in units in the last place of the
/// exact one rounded to f32. Infinite when exactly one of them is infinite or NaN.
pub fn ulp_error(computed: f32, exact: f64) -> f64 {
    let rounded = exact as f32;
    if !rounded.is_finite() || !computed.is_finite() {
        let same =
            rounded.to_bits() == computed.to_bits() || (rounded.is_nan() && computed.is_nan());
        return if same { 0.0 } else { f64::INFINITY };
    }
    let exponent = ((rounded.to_bits() >> 23) & 0xff).max(1) as i32 - 127;
    (f64::from(computed) - exact).abs() / 2f64.powi(exponent - 23)
}
