//! Vectors in every form that products take them in.

use crate::codec::{Activations, Codec, Trellis};

/// Vectors (n, cols), prepared for products with matrices of some formats: what a format's arithmetic
/// does to a vector is then done once and not again for every matrix and every range of rows.
#[derive(Debug)]
pub struct Inputs<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) n: usize,
    pub(crate) cols: usize,
    /// As integers of 15 bits.
    integers: Option<Activations>,
    /// The same in the basis of rotated matrices.
    rotated: Option<Activations>,
}

impl<'a> Inputs<'a> {
    /// Prepares `x` (n, cols) for matrices of these formats.
    ///
    /// # Panics
    /// When the lengths disagree.
    pub fn new(codecs: &[Codec], x: &'a [f32], n: usize, cols: usize) -> Self {
        assert_eq!(Some(x.len()), n.checked_mul(cols));
        let wants = |rotated: bool| {
            let mut profiles = codecs.iter().filter_map(|codec| match codec {
                Codec::Trellis(trellis) => Some(trellis.is_rotated()),
                _ => None,
            });
            cols > 0 && profiles.any(|profile| profile == rotated)
        };
        let integers = wants(false).then(|| Activations::new(x, cols));
        let rotated = wants(true).then(|| Activations::rotated(x, cols));
        Self { x, n, cols, integers, rotated }
    }

    /// The integers for matrices of a trellis.
    ///
    /// # Panics
    /// When they were not prepared for it.
    pub(crate) fn integers(&self, trellis: Trellis) -> &Activations {
        let integers = if trellis.is_rotated() { &self.rotated } else { &self.integers };
        integers.as_ref().expect("prepared for the format")
    }
}
