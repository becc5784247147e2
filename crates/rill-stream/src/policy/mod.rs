//! Which expert records stay in a cache of fixed capacity.
//!
//! A cache tells its policy what was used, inserted and removed, and asks which record to give up
//! and whether a newcomer is worth it. The policy never sees bytes and never changes a result.
//! Everything here is deterministic: equal scores are ordered by key.

mod decayed_lfu;
mod history;
mod learned;
mod lru;
mod ranking;
mod scored;

pub use decayed_lfu::DecayedLfu;
pub use learned::Learned;
pub use lru::Lru;
pub use scored::Scored;

use crate::ExpertKey;

/// Ranks the records of one model. One policy serves one cache.
///
/// The order of events for one layer of one pass: [`used`](Policy::used) when its router has
/// chosen; then, for each record that had to be fetched and after it was multiplied, either
/// [`inserted`](Policy::inserted) into a free slot, or [`victim`](Policy::victim) and
/// [`admit`](Policy::admit), and on `true` [`removed`](Policy::removed) for the one and `inserted`
/// for the other. A key outside the model's [`Geometry`](crate::Geometry) is a caller's bug and may
/// panic.
pub trait Policy: Send {
    /// The router of `layer` has chosen `experts` for one token. Tokens of a prompt come in their
    /// order, layer by layer or token by token.
    fn used(&mut self, layer: u32, experts: &[u32]);

    /// The resident record to give up first, among those that `pinned` does not hold on to; `None`
    /// when there is none.
    fn victim(&mut self, pinned: &dyn Fn(ExpertKey) -> bool) -> Option<ExpertKey>;

    /// Whether to keep `key`, just fetched and used, at the price of `victim`.
    fn admit(&mut self, key: ExpertKey, victim: ExpertKey) -> bool {
        self.score(key) > self.score(victim)
    }

    /// How much `key` is worth keeping, or reading ahead: higher is more. Comparable only with
    /// other scores of the same policy at the same moment.
    fn score(&mut self, key: ExpertKey) -> f64;

    /// `key` is resident from now on.
    fn inserted(&mut self, key: ExpertKey);

    /// `key` is no longer resident.
    fn removed(&mut self, key: ExpertKey);

    /// What is worth keeping for the next run; `None` if this policy learns nothing that lasts.
    fn learned(&self) -> Option<Learned> {
        None
    }
}
