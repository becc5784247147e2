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

/// Why there are no threads to compute with.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The operating system refused to start them.
    #[error("cannot start {threads} threads: {reason}; ask for fewer")]
    Start {
        /// How many.
        threads: usize,
        /// What it said.
        reason: String,
    },

    /// A thread cannot be tied to a CPU.
    #[error("cannot tie a thread to CPU {cpu}: {reason}; name others, or none")]
    Pin {
        /// Its number, from zero.
        cpu: usize,
        /// What the operating system said, or that it cannot be asked.
        reason: String,
    },
}

impl Pool {
    /// A pool of `threads` threads, at least one. Unless `cpus` is empty, each is tied to one of
    /// them, in turn.
    pub fn new(threads: usize, cpus: &[usize]) -> Result<Self, PoolError> {
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("rill-{i}"))
            .build()
            .map_err(|e| PoolError::Start { threads, reason: e.to_string() })?;
        if !cpus.is_empty() {
            let pin = |index: usize| {
                let cpu = cpus[index % cpus.len()];
                pin(cpu).map_err(|reason| PoolError::Pin { cpu, reason })
            };
            threads
                .broadcast(|thread| pin(thread.index()))
                .into_iter()
                .collect::<Result<(), _>>()?;
        }
        Ok(Self { threads })
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

/// Ties the calling thread to a CPU.
#[cfg(target_os = "linux")]
fn pin(cpu: usize) -> Result<(), String> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    if cpu >= CpuSet::MAX_CPU {
        return Err(format!("CPUs are numbered from 0 to {}", CpuSet::MAX_CPU - 1));
    }
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    sched_setaffinity(None, &cpus).map_err(|e| e.to_string())
}

#[cfg(not(target_os = "linux"))]
fn pin(_cpu: usize) -> Result<(), String> {
    Err("Rill can do that on Linux only".to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Pool, PoolError};

    #[test]
    fn a_cpu_that_does_not_exist_is_refused_by_number() {
        for cpu in [1023, 1 << 20] {
            let error = Pool::new(2, &[cpu]).unwrap_err();
            assert!(matches!(error, PoolError::Pin { cpu: named, .. } if named == cpu), "{error}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_take_turns_on_the_cpus_they_are_tied_to() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let cpus: Vec<usize> =
            (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
        let pool = Pool::new(3, &cpus[..1]).unwrap();
        let tied = pool.threads.broadcast(|_| rustix::thread::sched_getaffinity(None).unwrap());
        for set in tied {
            assert!(set.count() == 1 && set.is_set(cpus[0]));
        }
    }
}
