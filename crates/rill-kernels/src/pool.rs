//! Threads for kernels. They split rows, heads or experts, never a reduction, so their number
//! cannot change a bit.

use std::ops::Range;

/// Multiply-adds below which handing work to other threads costs more than it saves.
const MIN_WORK: usize = 1 << 16;

/// A pool of its own for each engine: nothing is global.
#[derive(Debug)]
pub struct Pool {
    threads: rayon::ThreadPool,
}

/// The operating system refused to start threads.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} threads: {reason}; ask for fewer")]
pub struct PoolError {
    threads: usize,
    reason: String,
}

impl Pool {
    /// A pool of `threads` threads, at least one.
    pub fn new(threads: usize) -> Result<Self, PoolError> {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("rill-{i}"))
            .build()
            .map(|threads| Self { threads })
            .map_err(|e| PoolError { threads, reason: e.to_string() })
    }

    /// Threads in the pool.
    pub fn threads(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// Runs `f` on each item, items spread over the threads. `work` is the total number of
    /// multiply-adds, by which small jobs stay on one thread.
    pub fn each<T: Send>(&self, items: &mut [T], work: usize, f: impl Fn(&mut T) + Sync) {
        if work < MIN_WORK || self.threads() == 1 || items.len() < 2 {
            items.iter_mut().for_each(f);
            return;
        }
        let per_part = items.len().div_ceil(self.threads());
        self.threads.in_place_scope(|scope| {
            for part in items.chunks_mut(per_part) {
                let f = &f;
                scope.spawn(move |_| part.iter_mut().for_each(f));
            }
        });
    }

    /// Runs `f` inside the pool, so that the splits it makes need no hand-over.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let foreign = rayon::current_thread_index().is_some()
            && self.threads.current_thread_index().is_none();
        if !foreign {
            return self.threads.install(f);
        }
        // A thread of another pool takes up other work of that pool while it waits here, such as
        // the next of several sessions, and whatever that waits for may be held by `f`.
        std::thread::scope(|scope| match scope.spawn(|| self.threads.install(f)).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    /// Splits `rows` rows over the threads. `out` holds `out.len() / rows` values per row;
    /// `f` gets a range of rows and their part of `out`. `work` is the total number of
    /// multiply-adds, by which small jobs stay on one thread.
    pub fn rows(
        &self,
        rows: usize,
        work: usize,
        out: &mut [f32],
        f: impl Fn(Range<usize>, &mut [f32]) + Sync,
    ) {
        if rows == 0 {
            return;
        }
        let per_row = out.len() / rows;
        assert_eq!(out.len(), rows * per_row);
        if per_row == 0 {
            return f(0..rows, out);
        }
        let rows_per_part = rows.div_ceil(self.threads());
        let parts = out.chunks_mut(rows_per_part * per_row).enumerate();
        let mut parts: Vec<_> = parts.map(|(i, part)| (i * rows_per_part, part)).collect();
        self.each(&mut parts, work, |(first, part)| {
            f(*first..*first + part.len() / per_row, part);
        });
    }
}
