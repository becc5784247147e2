//! One step at a time.
//!
//! A step uses every thread of the pool, and the budget sets aside activations, a unit of the trunk and
//! buffers of experts for one. Two at once would each take what the other needs to go on.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A queue: who came first goes first, so that nobody starves.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    queue: Mutex<Queue>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Of whoever comes next.
    ticket: u64,
    /// Whose turn it is.
    serving: u64,
}

impl Turns {
    /// Waits for a turn, which lasts until what this returns is dropped.
    pub(crate) fn wait(&self) -> Turn<'_> {
        let mut queue = self.lock();
        let ticket = queue.ticket;
        queue.ticket += 1;
        while queue.serving != ticket {
            queue = self.ended.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        Turn(self)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends when dropped.
pub(crate) struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().serving += 1;
        self.0.ended.notify_all();
    }
}
