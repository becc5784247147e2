//! Numbers that are the same for the same seed everywhere.

/// A linear congruential generator; good enough to choose places.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A number below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n as u64) as usize
    }
}
