//! Which code multiplies mxfp4z matrices, and the checks in front of it.

use super::Mxfp4zMatrix;

/// A way of multiplying mxfp4z matrices, chosen once. Every one gives the same bits, even for damaged streams.
#[derive(Clone, Copy)]
pub struct Mxfp4zKernels {
    name: &'static str,
    /// May need CPU features, which [`all`](Self::all) has checked.
    multiply: unsafe fn(&Mxfp4zMatrix<'_>, &[f32], usize, &mut [f32]),
}

impl Mxfp4zKernels {
    /// The specification, [`Mxfp4zMatrix::multiply`], compiled for any CPU.
    pub const SCALAR: Self =
        Self { name: "scalar", multiply: |matrix, x, n, out| matrix.multiply(x, n, out) };

    /// Everything this CPU can run, the specification first and the fastest last.
    pub fn all() -> Vec<Self> {
        #[allow(unused_mut, reason = "only some machines have more")]
        let mut all = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("popcnt")
        {
            all.push(Self { name: "avx2", multiply: super::product_avx2::multiply });
        }
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2")
            && is_x86_feature_detected!("popcnt")
        {
            all.push(Self { name: "avx512", multiply: super::product_avx512::multiply });
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(Self { name: "neon", multiply: super::product_neon::multiply });
        }
        all
    }

    /// The fastest this CPU can run.
    pub fn detect() -> Self {
        Self::all().pop().unwrap_or(Self::SCALAR)
    }

    /// Short name for reports.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// As [`Mxfp4zMatrix::multiply`], to the last bit (for NaN: NaN where that has NaN).
    ///
    /// # Panics
    /// When the lengths disagree.
    pub fn multiply(&self, matrix: &Mxfp4zMatrix<'_>, x: &[f32], n: usize, out: &mut [f32]) {
        matrix.check(x, n, out);
        #[expect(unsafe_code, reason = "kernels may need CPU features")]
        // SAFETY: kernels are safe functions that need CPU features at most; a set that does is made
        // by `all` alone, which has checked that this CPU has them.
        unsafe {
            (self.multiply)(matrix, x, n, out);
        }
    }
}

impl std::fmt::Debug for Mxfp4zKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mxfp4zKernels({})", self.name)
    }
}
