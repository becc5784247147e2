//! Vectors in every form that products take them in.

use crate::codec::{Activations, Codec};

/// Vectors (n, cols), prepared for products with matrices of some formats: what a format's arithmetic
/// does to a vector is then done once and not again for every matrix and every range of rows.
#[derive(Debug)]
pub struct Inputs<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) n: usize,
    pub(crate) cols: usize,
    /// As integers of 15 bits.
    pub(crate) integers: Option<Activations>,
}

impl<'a> Inputs<'a> {
    /// Prepares `x` (n, cols) for matrices of these formats.
    ///
    /// # Panics
    /// When the lengths disagree.
    pub fn new(codecs: &[Codec], x: &'a [f32], n: usize, cols: usize) -> Self {
        assert_eq!(Some(x.len()), n.checked_mul(cols));
        let wants_integers = codecs.iter().any(|codec| matches!(codec, Codec::Trellis(_)));
        let integers = (wants_integers && cols > 0).then(|| Activations::new(x, cols));
        Self { x, n, cols, integers }
    }
}
