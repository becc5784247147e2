//! Threads for kernels. They split rows, heads or experts, never a reduction, so their number
//! cannot change a bit.
//!
//! Made for many short splits, one after another: a token of a large model has thousands. So threads
//! that have nothing to do look for work for a moment before they sleep ([`crew`]), and work is dealt
//! in parts that are small enough for a slow core not to hold up the others ([`parts`]).

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use self::crew::{Crew, Place};
use self::parts::Parts;

mod crew;
mod parts;

/// Multiply-adds below which handing work to other threads costs more than it saves.
const MIN_WORK: usize = 1 << 16;
/// Multiply-adds of a part, at least: a few microseconds, many times what dealing it costs.
const MIN_PART: usize = 1 << 15;
/// Parts for each thread, so that the last of them are short.
const PARTS_PER_THREAD: usize = 8;
/// Rows of a part are a multiple of this, so that kernels that take several at a time have whole
/// tiles; and of so many where there are enough, because vector-quantised rows are interleaved so.
const ROW_STEP: usize = 16;
const WIDE_ROW_STEP: usize = 64;

/// A pool of its own for each engine: nothing is global, and nobody else's work is done by its
/// threads.
#[derive(Debug)]
pub struct Pool {
    crew: Arc<Crew>,
    /// To the first thread; gone when the pool ends.
    tasks: Option<Sender<Task>>,
    threads: Vec<JoinHandle<()>>,
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
    ///
    /// # Errors
    /// When a thread cannot be started, or not be tied.
    pub fn new(threads: usize, cpus: &[usize]) -> Result<Self, PoolError> {
        let threads = threads.max(1);
        // Threads that share a CPU must not keep each other from it.
        let available = match cpus.len() {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let crew = Arc::new(Crew::new(threads <= available));
        let (tasks, received) = channel();
        let mut received = Some(received);
        // Threads that have started end when this is dropped.
        let mut pool = Self { crew, tasks: Some(tasks), threads: Vec::new() };
        let (tied, ties) = channel();
        for index in 0..threads {
            let cpu = (!cpus.is_empty()).then(|| cpus[index % cpus.len()]);
            let (crew, tied, tasks) = (pool.crew.clone(), tied.clone(), received.take());
            let run = move || {
                let tie = cpu.map_or(Ok(()), |cpu| {
                    pin(cpu).map_err(|reason| PoolError::Pin { cpu, reason })
                });
                // Nobody listens any more when another thread has failed.
                let _ = tied.send((index, tie));
                drop(tied);
                crew.belong();
                match tasks {
                    Some(tasks) => lead(&tasks),
                    None => crew.help(),
                }
            };
            let thread = std::thread::Builder::new().name(format!("rill-{index}")).spawn(run);
            let failed = |e: std::io::Error| PoolError::Start { threads, reason: e.to_string() };
            pool.threads.push(thread.map_err(failed)?);
        }
        drop(tied);
        let mut ties: Vec<_> = ties.iter().collect();
        ties.sort_by_key(|(index, _)| *index);
        for (_, tie) in ties {
            tie?;
        }
        pool.crew.meet(pool.threads.iter().map(|thread| thread.thread().clone()).collect());
        Ok(pool)
    }

    /// Threads in the pool.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Runs `f` on each item, items spread over the threads. `work` is the total number of
    /// multiply-adds, by which small jobs stay on one thread.
    pub fn each<T: Send>(&self, items: &mut [T], work: usize, f: impl Fn(&mut T) + Sync) {
        let per_part = self.per_part(items.len(), work, 1);
        self.deal(items, per_part, &|_, part| part.iter_mut().for_each(&f));
    }

    /// Runs `f` on the pool's first thread, from which the splits it makes need no hand-over.
    /// Those who come meanwhile wait. From inside the pool, `f` just runs.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match self.crew.place() {
            Place::Outside => {}
            Place::Leading | Place::InPart => return f(),
        }
        let mut result = None;
        let (done, ended) = channel();
        let work = Box::new(|| result = Some(catch_unwind(AssertUnwindSafe(f))));
        let tasks = self.tasks.as_ref().expect("there until the pool is dropped");
        let sent = tasks.send(Task::new(work, done)).is_ok();
        // Ends in any case when the task is gone.
        let ran = ended.recv().is_ok();
        assert!(sent && ran, "the first thread lives as long as the pool");
        result.expect("the task has run").unwrap_or_else(|panic| resume_unwind(panic))
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
        let enough = rows >= 2 * WIDE_ROW_STEP * self.threads();
        let step = if enough { WIDE_ROW_STEP } else { ROW_STEP };
        let per_part = self.per_part(rows, work, step) * per_row;
        self.deal(out, per_part, &|first, part: &mut [f32]| {
            let first = first / per_row;
            f(first..first + part.len() / per_row, part);
        });
    }

    /// Items of a part when `items` items are `work` multiply-adds: a multiple of `step`.
    fn per_part(&self, items: usize, work: usize, step: usize) -> usize {
        if work < MIN_WORK || self.threads() == 1 {
            return items.max(1);
        }
        let fair = items.div_ceil(self.threads() * PARTS_PER_THREAD);
        let worthwhile = MIN_PART.div_ceil((work / items.max(1)).max(1));
        fair.max(worthwhile).next_multiple_of(step)
    }

    /// Gives `items`, `per_part` at a time, to whichever thread comes first: `f` gets the place of
    /// the first one too.
    fn deal<T: Send>(
        &self,
        items: &mut [T],
        per_part: usize,
        f: &(impl Fn(usize, &mut [T]) + Sync),
    ) {
        let n_parts = items.len().div_ceil(per_part);
        match self.crew.place() {
            _ if n_parts < 2 => f(0, items),
            // The other threads are at work on the parts around this one.
            Place::InPart => f(0, items),
            Place::Outside => self.install(|| self.deal(items, per_part, f)),
            Place::Leading => {
                let parts = Parts::new(items, per_part);
                self.crew.share(n_parts - 1, &|| {
                    while let Some((first, part)) = parts.take() {
                        f(first, part);
                    }
                });
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.tasks = None;
        self.crew.end();
        for thread in &self.threads {
            thread.thread().unpark();
        }
        for thread in self.threads.drain(..) {
            // No thread panics: what it runs for others is caught.
            let _ = thread.join();
        }
    }
}

/// What `install` was given, until the first thread runs it.
struct Task {
    run: Box<dyn FnOnce() + Send>,
    /// Dropped or sent to after `run` is gone.
    done: Sender<()>,
}

impl Task {
    fn new<'a>(run: Box<dyn FnOnce() + Send + 'a>, done: Sender<()>) -> Self {
        #[expect(unsafe_code, reason = "another thread runs what borrows from the caller's stack")]
        // SAFETY: `install` alone calls this, and does not return before `done` has been sent to
        // or dropped. Both happen after `run` has been consumed: `lead` calls it first, and a task
        // that is never received drops its fields in this order.
        let run = unsafe {
            std::mem::transmute::<Box<dyn FnOnce() + Send + 'a>, Box<dyn FnOnce() + Send>>(run)
        };
        Self { run, done }
    }
}

/// The first thread: runs one task after another until the pool ends.
fn lead(tasks: &Receiver<Task>) {
    for Task { run, done } in tasks {
        run();
        // Its receiver waits for this.
        let _ = done.send(());
    }
}

/// What a thread panicked with.
type Panic = Box<dyn Any + Send>;

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
    use std::collections::HashSet;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use super::{MIN_WORK, Pool, PoolError};

    /// Miri takes a thousand times as long.
    const ROUNDS: usize = if cfg!(miri) { 20 } else { 5000 };
    /// Enough work for any split.
    const LARGE: usize = 1 << 40;

    /// Adds one to every item with the pool, and says which threads did it.
    fn count_up(pool: &Pool, items: &mut [usize]) -> usize {
        let seen = Mutex::new(HashSet::new());
        pool.each(items, LARGE, |item| {
            *item += 1;
            seen.lock().unwrap().insert(std::thread::current().id());
        });
        seen.into_inner().unwrap().len()
    }

    #[test]
    fn a_cpu_that_does_not_exist_is_refused_by_number() {
        for cpu in [1023, 1 << 20] {
            let error = Pool::new(2, &[cpu]).unwrap_err();
            assert!(matches!(error, PoolError::Pin { cpu: named, .. } if named == cpu), "{error}");
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn threads_take_turns_on_the_cpus_they_are_tied_to() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let cpus: Vec<usize> =
            (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
        let pool = Pool::new(3, &cpus[..1]).unwrap();
        // Each thread holds one item until all have one.
        let together = std::sync::Barrier::new(3);
        pool.each(&mut [(); 3], LARGE, |()| {
            together.wait();
            let set = rustix::thread::sched_getaffinity(None).unwrap();
            assert!(set.count() == 1 && set.is_set(cpus[0]));
        });
        let own = rustix::thread::sched_getaffinity(None).unwrap();
        assert_eq!(own.count(), allowed.count(), "the caller stays as it was");
    }

    #[test]
    fn every_item_is_worked_on_once_in_every_of_many_regions() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads, &[]).unwrap();
            let mut items = vec![0; 37];
            pool.install(|| {
                for _ in 0..ROUNDS {
                    pool.each(&mut items, LARGE, |item| *item += 1);
                }
            });
            assert_eq!(items, [ROUNDS; 37], "{threads} threads");
        }
    }

    #[test]
    fn rows_come_with_their_part_of_the_output() {
        let pool = Pool::new(3, &[]).unwrap();
        for (rows, per_row) in [(0, 0), (1, 1), (5, 0), (100, 1), (301, 7)] {
            let mut out = vec![0.0; rows * per_row];
            pool.rows(rows, LARGE, &mut out, |range, out| {
                assert_eq!(out.len(), range.len() * per_row);
                for (i, out) in out.iter_mut().enumerate() {
                    *out += (range.start * per_row + i) as f32;
                }
            });
            assert!(out.iter().enumerate().all(|(i, &x)| x == i as f32), "{rows} × {per_row}");
        }
    }

    #[test]
    fn a_split_ends_when_its_last_part_is_done() {
        let pool = Pool::new(2, &[]).unwrap();
        let together = std::sync::Barrier::new(2);
        let mut items = [0; 2];
        pool.install(|| {
            let leader = std::thread::current().id();
            pool.each(&mut items, LARGE, |item| {
                together.wait();
                if std::thread::current().id() != leader {
                    std::thread::sleep(Duration::from_millis(30));
                }
                *item = 1;
            });
            assert_eq!(items, [1; 2], "the helper is still at it");
        });
    }

    #[test]
    fn helpers_that_sleep_are_woken() {
        let pool = Pool::new(2, &[]).unwrap();
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(5));
            let together = std::sync::Barrier::new(2);
            // Never ends on one thread.
            pool.each(&mut [(); 2], LARGE, |()| {
                together.wait();
            });
        }
    }

    #[test]
    fn a_helper_that_is_held_up_holds_up_nobody_who_has_the_rest() {
        let pool = Pool::new(2, &[]).unwrap();
        let others = AtomicUsize::new(0);
        let mut items: Vec<usize> = (0..64).collect();
        let start = Instant::now();
        pool.each(&mut items, LARGE, |item| {
            if *item > 0 {
                others.fetch_add(1, Ordering::SeqCst);
                return;
            }
            // Until the other thread has done all but this one's part, more than its half.
            while others.load(Ordering::SeqCst) < 56 {
                assert!(start.elapsed() < Duration::from_secs(60), "the other thread waits");
                std::thread::yield_now();
            }
        });
        assert_eq!(others.into_inner(), 63);
    }

    #[test]
    fn small_work_stays_where_it_is() {
        let pool = Pool::new(2, &[]).unwrap();
        let here = std::thread::current().id();
        pool.each(&mut [(); 9], MIN_WORK - 1, |()| assert_eq!(std::thread::current().id(), here));
    }

    #[test]
    fn splits_inside_a_part_run_in_it() {
        let pool = Pool::new(3, &[]).unwrap();
        let mut outer = vec![0; 24];
        pool.each(&mut outer, LARGE, |item| {
            let here = std::thread::current().id();
            let mut inner = vec![0; 24];
            pool.each(&mut inner, LARGE, |item| {
                assert_eq!(std::thread::current().id(), here);
                *item += 1;
            });
            *item = pool.install(|| inner.iter().sum());
        });
        assert_eq!(outer, [24; 24]);
    }

    #[test]
    fn a_panic_in_a_part_reaches_the_caller_and_the_pool_works_afterwards() {
        let pool = Pool::new(3, &[]).unwrap();
        for round in 0..ROUNDS.min(200) {
            let mut items: Vec<usize> = (0..64).collect();
            let panic = catch_unwind(AssertUnwindSafe(|| {
                pool.each(&mut items, LARGE, |item| {
                    if *item == round % 64 || *item == 5 {
                        std::panic::resume_unwind(Box::new("part"));
                    }
                });
            }));
            assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"part"));
            assert!(count_up(&pool, &mut items) >= 1);
        }
        let panic = catch_unwind(AssertUnwindSafe(|| {
            pool.install(|| std::panic::resume_unwind(Box::new("task")))
        }));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"task"));
        assert_eq!(pool.install(|| 7), 7);
    }

    #[test]
    fn callers_from_many_threads_and_pools_do_not_mix() {
        let pools: Vec<Pool> = (1..4).map(|threads| Pool::new(threads, &[]).unwrap()).collect();
        std::thread::scope(|scope| {
            for caller in 0..6 {
                let pools = &pools;
                scope.spawn(move || {
                    let (pool, other) = (&pools[caller % 3], &pools[(caller + 1) % 3]);
                    let mut items = vec![0; 40];
                    for _ in 0..ROUNDS / 20 {
                        pool.each(&mut items, LARGE, |item| *item += 1);
                        // Only upwards, so that no two pools wait for each other.
                        if caller % 3 < 2 {
                            pool.install(|| other.each(&mut items, LARGE, |item| *item += 1));
                        }
                    }
                    let times = if caller % 3 < 2 { 2 } else { 1 };
                    assert_eq!(items, vec![ROUNDS / 20 * times; 40]);
                });
            }
        });
    }

    #[test]
    fn a_pool_that_is_dropped_ends_its_threads_in_any_state() {
        for round in 0..ROUNDS.min(200) {
            let pool = Pool::new(1 + round % 4, &[]).unwrap();
            let crew = std::sync::Arc::downgrade(&pool.crew);
            // Unused, spinning, asleep.
            if round % 3 > 0 {
                count_up(&pool, &mut [0; 16]);
            }
            if round % 3 > 1 {
                std::thread::sleep(Duration::from_micros(200));
            }
            drop(pool);
            assert_eq!(crew.strong_count(), 0, "a thread still holds the crew");
        }
    }
}
