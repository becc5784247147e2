//! The threads of a pool, and how they share a job.
//!
//! One thread leads: it runs what the pool was given, alone, until that splits something. Then it
//! opens a *region*, a job that every thread may join, and joins it itself. The job takes parts until
//! there are none; when the leader has found none left it closes the region and waits for those that
//! are still inside. A helper that comes too late finds it closed, so that nobody waits for a thread
//! that the system has not let run.
//!
//! Entering and closing change one word, [`Crew::state`], so that they cannot pass each other.
#![expect(unsafe_code, reason = "helpers run a job that lies on the leader's stack")]

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::Panic;

/// How long a thread that waits looks again and again, before it sleeps: longer than what lies between
/// most splits of a token, and too short for others who need the core to notice.
const SPIN: Duration = Duration::from_micros(50);
/// Looks before the first offer of the core to others, a few microseconds.
const EAGER_LOOKS: usize = 64;

/// Bits of [`Crew::state`]: how many helpers are inside lies below them.
const OPEN: u64 = 1 << 30;
const ENDING: u64 = 1 << 31;
/// Regions are counted from here on.
const REGION: u64 = 1 << 32;

type Job<'a> = &'a (dyn Fn() + Sync);

/// What the threads of one pool share.
#[derive(Debug)]
pub(super) struct Crew {
    state: AtomicU64,
    /// The open region's. Points into the leader's stack.
    job: AtomicPtr<Job<'static>>,
    /// The leader first.
    threads: OnceLock<Vec<Thread>>,
    /// Whether there is a CPU for each thread.
    may_spin: bool,
}

/// Where a thread stands to a pool.
pub(super) enum Place {
    /// It is not one of its threads.
    Outside,
    /// It is the first, and its helpers are free.
    Leading,
    /// It is at work on a part.
    InPart,
}

thread_local! {
    /// The crew that this thread belongs to, and whether it is at work on a part.
    static HERE: Cell<(*const Crew, bool)> = const { Cell::new((std::ptr::null(), false)) };
}

impl Crew {
    pub(super) fn new(may_spin: bool) -> Self {
        let (state, job) = (AtomicU64::new(0), AtomicPtr::new(std::ptr::null_mut()));
        Self { state, job, threads: OnceLock::new(), may_spin }
    }

    /// Makes the calling thread one of the crew, which must outlive it.
    pub(super) fn belong(&self) {
        HERE.set((self, false));
    }

    /// Introduces the threads to each other, the leader first, before there is work.
    pub(super) fn meet(&self, threads: Vec<Thread>) {
        self.threads.set(threads).expect("they meet once");
    }

    /// Where the calling thread stands.
    pub(super) fn place(&self) -> Place {
        match HERE.get() {
            (crew, _) if !std::ptr::eq(crew, self) => Place::Outside,
            (_, false) => Place::Leading,
            (_, true) => Place::InPart,
        }
    }

    /// Runs `job` on the calling thread, which leads, and on up to `helpers` others that are free;
    /// returns when all who began have ended.
    ///
    /// # Panics
    /// With what the job panicked with, on whichever thread.
    pub(super) fn share(&self, helpers: usize, job: Job<'_>) {
        let panics: Mutex<Vec<Panic>> = Mutex::new(Vec::new());
        let caught = || {
            HERE.set((self, true));
            if let Err(panic) = catch_unwind(AssertUnwindSafe(job)) {
                panics.lock().unwrap_or_else(PoisonError::into_inner).push(panic);
            }
            HERE.set((self, false));
        };
        let job: Job<'_> = &caught;

        self.job.store((&raw const job).cast_mut().cast(), Ordering::Relaxed);
        let count = self.state.load(Ordering::Relaxed) & !(REGION - 1);
        // Nobody changes the word while no region is open.
        self.state.store(count.wrapping_add(REGION) | OPEN, Ordering::Release);
        let threads = self.threads.get().expect("they have met");
        for thread in threads.iter().skip(1).take(helpers) {
            thread.unpark();
        }
        job();
        // What helpers have written is seen by whoever sees that they have left.
        let closed = self.state.fetch_and(!OPEN, Ordering::Acquire);
        if inside(closed) > 0 {
            self.wait(|| inside(self.state.load(Ordering::Acquire)) == 0);
        }

        let panics = panics.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(panic) = panics.into_iter().next() {
            resume_unwind(panic);
        }
    }

    /// What a helper does until the crew ends.
    pub(super) fn help(&self) {
        // A region is worth entering once.
        let mut last = 0;
        let fresh = |state: u64, last| state & OPEN != 0 && state / REGION != last;
        loop {
            self.wait(|| {
                let state = self.state.load(Ordering::Relaxed);
                state & ENDING != 0 || fresh(state, last)
            });
            let mut state = self.state.load(Ordering::Relaxed);
            if state & ENDING != 0 {
                return;
            }
            while fresh(state, last) {
                let enter = self.state.compare_exchange_weak(
                    state,
                    state + 1,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                );
                match enter {
                    Ok(_) => {
                        last = state / REGION;
                        self.run_job();
                        self.leave();
                    }
                    Err(now) => state = now,
                }
            }
        }
    }

    /// Sends the helpers home; the caller wakes them.
    pub(super) fn end(&self) {
        self.state.fetch_or(ENDING, Ordering::Relaxed);
    }

    /// Only between entering a region and leaving it.
    fn run_job(&self) {
        let job = self.job.load(Ordering::Relaxed);
        // SAFETY: the pointer is to a local of `share`, written before the region was opened, which
        // entering it has acquired. `share` stays, and with it all that the job borrows, until it
        // has closed the region and seen that nobody is inside, and this thread is counted as being
        // there: entering succeeded on a word with OPEN set. The job catches its panics, so nothing
        // in `share` between opening and then can unwind.
        let job = unsafe { *job };
        job();
    }

    fn leave(&self) {
        let before = self.state.fetch_sub(1, Ordering::Release);
        if before & OPEN == 0 && inside(before) == 1 {
            let threads = self.threads.get().expect("they have met");
            threads[0].unpark();
        }
    }

    /// Waits until `done`, for which somebody will unpark this thread.
    fn wait(&self, done: impl Fn() -> bool) {
        if self.may_spin && spin(&done) {
            return;
        }
        // An unparking that came before is not lost: the next park returns at once.
        while !done() {
            std::thread::park();
        }
    }
}

/// How many helpers are inside, of a state.
fn inside(state: u64) -> u64 {
    state & (OPEN - 1)
}

/// Looks for a short time whether something is done.
fn spin(done: impl Fn() -> bool) -> bool {
    for _ in 0..EAGER_LOOKS {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    while start.elapsed() < SPIN {
        if done() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}
