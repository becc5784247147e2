//! What runs have read, waited for and computed.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rill_stream::{CacheCounters, ReadTotals};

use crate::engine::Engine;
use crate::trunk::TrunkCounters;

/// What an engine has done since it was opened, or between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounters {
    /// Time that opening the model took.
    pub open: Duration,
    /// Steps of several tokens.
    pub prefill: Pace,
    /// Steps of one token.
    pub decode: Pace,
    /// Of the weights that every token needs.
    pub trunk: TrunkCounters,
    /// Of the routed experts.
    pub experts: CacheCounters,
    /// All reads but those at opening, and how long the drive was at it.
    pub reads: ReadTotals,
}

/// Tokens, and the time they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Tokens that went through the model.
    pub tokens: u64,
    /// Time in which they did.
    pub time: Duration,
}

/// What a run waited for most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Reads: it stood still for half of the time or more.
    Disk,
    /// Its own multiplications.
    Arithmetic,
}

impl Engine {
    /// What it has done since it was opened.
    pub fn counters(&self) -> RunCounters {
        let [prefill, decode] = self.paces.get();
        let reads = self.reads();
        RunCounters {
            open: self.open_time,
            prefill,
            decode,
            trunk: self.trunk_counters(),
            experts: self.expert_counters(),
            reads: ReadTotals {
                bytes: reads.bytes - self.opening_reads.bytes,
                busy: reads.busy.saturating_sub(self.opening_reads.busy),
            },
        }
    }
}

impl RunCounters {
    /// What has happened since the counters were `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let pace = |now: Pace, then: Pace| Pace {
            tokens: now.tokens - then.tokens,
            time: now.time.saturating_sub(then.time),
        };
        Self {
            open: self.open,
            prefill: pace(self.prefill, earlier.prefill),
            decode: pace(self.decode, earlier.decode),
            trunk: TrunkCounters {
                streamed_bytes: self.trunk.streamed_bytes - earlier.trunk.streamed_bytes,
                stall: self.trunk.stall.saturating_sub(earlier.trunk.stall),
            },
            experts: self.experts.since(&earlier.experts),
            reads: ReadTotals {
                bytes: self.reads.bytes - earlier.reads.bytes,
                busy: self.reads.busy.saturating_sub(earlier.reads.busy),
            },
        }
    }

    /// All tokens, and the time of all steps.
    pub fn pace(&self) -> Pace {
        let (a, b) = (self.prefill, self.decode);
        Pace { tokens: a.tokens + b.tokens, time: a.time + b.time }
    }

    /// Bytes read for a token, 0 without any.
    pub fn bytes_per_token(&self) -> f64 {
        share(self.reads.bytes as f64, self.pace().tokens as f64)
    }

    /// Bytes read in a second of those in which the drive was busy, 0 without any.
    pub fn drive_bytes_per_second(&self) -> f64 {
        share(self.reads.bytes as f64, self.reads.busy.as_secs_f64())
    }

    /// Time in which nothing could be computed for want of bytes.
    pub fn stall(&self) -> Duration {
        self.trunk.stall + self.experts.stall
    }

    /// Part of the time of all steps that was spent waiting for bytes, from 0 to 1.
    pub fn stall_share(&self) -> f64 {
        share(self.stall().as_secs_f64(), self.pace().time.as_secs_f64()).min(1.0)
    }

    /// What it waited for most; `None` before the first step.
    pub fn bound(&self) -> Option<Bound> {
        match self.pace().tokens {
            0 => None,
            _ if self.stall_share() >= 0.5 => Some(Bound::Disk),
            _ => Some(Bound::Arithmetic),
        }
    }
}

impl Pace {
    /// Tokens in a second, 0 without any.
    pub fn tokens_per_second(&self) -> f64 {
        share(self.tokens as f64, self.time.as_secs_f64())
    }
}

/// The engine's count of its steps: those of several tokens, those of one.
#[derive(Debug, Default)]
pub(crate) struct Paces(Mutex<[Pace; 2]>);

impl Paces {
    /// A step of this many tokens, part of a call with so many, has been taken.
    pub(crate) fn add(&self, tokens: usize, of_call: usize, time: Duration) {
        let pace = &mut self.lock()[usize::from(of_call == 1)];
        pace.tokens += tokens as u64;
        pace.time += time;
    }

    fn get(&self) -> [Pace; 2] {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, [Pace; 2]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_waits_for_half_of_its_time_is_bound_by_the_disk() {
        let step = |tokens, ms| Pace { tokens, time: Duration::from_millis(ms) };
        let mut counters = RunCounters { prefill: step(4, 60), ..Default::default() };
        assert_eq!(RunCounters::default().bound(), None);
        counters.decode = step(1, 40);
        counters.trunk.stall = Duration::from_millis(20);
        counters.experts.stall = Duration::from_millis(29);
        assert_eq!(counters.bound(), Some(Bound::Arithmetic));
        let later = RunCounters { decode: step(2, 50), ..counters };
        assert_eq!(later.since(&counters).decode, step(1, 10));
        counters.experts.stall = Duration::from_millis(30);
        assert_eq!(counters.bound(), Some(Bound::Disk));
        assert_eq!(counters.stall_share(), 0.5);
    }
}
