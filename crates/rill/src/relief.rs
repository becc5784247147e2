//! Giving memory back while the system pages: a cache that is paged out is slower than the disk.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rill_stream::Lease;
use rill_stream::machine::{Pressure, PressureWatch};

use crate::experts::ExpertSource;

/// Between two looks at the system.
const EVERY: Duration = Duration::from_secs(1);
/// Part of the expert slots that are left that each look at a paging system gives back.
const SHARE: u64 = 8;

/// Looks at the system now and then, and gives slots of experts back while it pages.
pub(crate) struct Relief(Mutex<State>);

struct State {
    look: Box<dyn FnMut() -> Pressure + Send>,
    every: Duration,
    looked: Instant,
    /// Of the slots.
    lease: Option<Lease>,
    slot_bytes: u64,
    given_slots: u64,
}

impl Relief {
    /// Slots of `slot_bytes` each, held by a lease.
    pub(crate) fn new(lease: Option<Lease>, slot_bytes: u64) -> Self {
        let mut watch = PressureWatch::new();
        Self(Mutex::new(State {
            look: Box::new(move || watch.look()),
            every: EVERY,
            looked: Instant::now(),
            lease,
            slot_bytes,
            given_slots: 0,
        }))
    }

    /// Asks this instead of the system, before every step.
    pub(crate) fn ask(&self, look: Box<dyn FnMut() -> Pressure + Send>) {
        let mut state = self.lock();
        (state.look, state.every) = (look, Duration::ZERO);
    }

    /// Takes a look if it is time for one. Returns how many slots it gave back.
    pub(crate) fn look(&self, experts: &dyn ExpertSource) -> u64 {
        let mut state = self.lock();
        if state.looked.elapsed() < state.every {
            return 0;
        }
        state.looked = Instant::now();
        if (state.look)() != Pressure::Paging {
            return 0;
        }
        let slot_bytes = state.slot_bytes;
        let Some(lease) = &mut state.lease else { return 0 };
        let slots = lease.bytes() / slot_bytes.max(1);
        let given = experts.shrink(slots.div_ceil(SHARE) as usize) as u64;
        lease.shrink(given.saturating_mul(slot_bytes));
        state.given_slots += given;
        given
    }

    /// Slots that were given back so far.
    pub(crate) fn given_slots(&self) -> u64 {
        self.lock().given_slots
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Relief {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relief").finish_non_exhaustive()
    }
}
