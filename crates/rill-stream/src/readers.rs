//! Threads that read. What is needed now comes before what is needed next, and that before what may
//! be needed; large reads are cut so that several threads share them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::buffer::AlignedBuf;
use crate::error::StreamError;
use crate::place::{Placement, Span};
use crate::storage::{READ_ALIGN, ReadError, Storage, read_span};

/// How reads are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOptions {
    /// Threads that read, at least one.
    pub threads: usize,
    /// Longer reads are cut into pieces of this size.
    pub piece_bytes: usize,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { threads: 4, piece_bytes: 4 << 20 }
    }
}

/// How soon bytes are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for them.
    Now,
    /// Certainly, but later.
    Next,
    /// Perhaps.
    Maybe,
}

/// Called with the buffer when all of a read has come or some of it has failed, on the thread that
/// read last.
pub type Done = Box<dyn FnOnce(AlignedBuf, Result<(), ReadError>) + Send>;

/// A read under way.
#[derive(Debug)]
pub struct Ticket(Arc<Batch>);

/// Totals of all reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadTotals {
    /// Bytes that came.
    pub bytes: u64,
    /// Time during which at least one read was under way.
    pub busy: Duration,
}

/// A pool of threads that read from one [`Storage`].
#[derive(Debug)]
pub struct Readers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the system refuses to start them.
    pub fn new(storage: Arc<dyn Storage>, options: ReadOptions) -> Result<Self, StreamError> {
        let piece_bytes = options.piece_bytes.max(1).next_multiple_of(READ_ALIGN);
        let shared = Arc::new(Shared {
            storage,
            piece_bytes,
            queues: Mutex::new(Queues::default()),
            work: Condvar::new(),
        });
        let mut readers = Self { shared, threads: Vec::new() };
        for i in 0..options.threads.max(1) {
            let shared = readers.shared.clone();
            let thread = std::thread::Builder::new().name(format!("rill-read-{i}"));
            let thread = thread.spawn(move || shared.work());
            // Those that have started end with the pool.
            readers.threads.push(thread.map_err(|source| StreamError::Threads { source })?);
        }
        Ok(readers)
    }

    /// Threads that read.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Reads what a placement says into a buffer, which comes back through `done`.
    ///
    /// # Panics
    /// When the buffer is shorter than the placement.
    pub fn submit(
        &self,
        priority: Priority,
        mut buffer: AlignedBuf,
        placement: &Placement,
        done: Done,
    ) -> Ticket {
        assert!(buffer.as_slice().len() >= placement.bytes, "a buffer too short for its record");
        let mut pieces: Vec<Span> =
            placement.spans.iter().flat_map(|span| cut(*span, self.shared.piece_bytes)).collect();
        if pieces.is_empty() {
            // So that `done` is never called from here, where its caller may hold a lock it needs.
            pieces.push(Span::default());
        }
        let batch = Arc::new(Batch {
            base: Base(buffer.as_mut_slice().as_mut_ptr()),
            left: AtomicUsize::new(pieces.len()),
            outcome: Mutex::new(Outcome { error: None, owned: Some((buffer, done)) }),
        });
        let mut queues = self.shared.lock();
        let queue = &mut queues.by_priority[priority as usize];
        queue.extend(pieces.into_iter().map(|span| Piece { span, batch: batch.clone() }));
        drop(queues);
        self.shared.work.notify_all();
        Ticket(batch)
    }

    /// Somebody now waits for what was only likely to be needed.
    pub fn promote(&self, ticket: &Ticket) {
        let mut queues = self.shared.lock();
        let pieces = queues.take(&ticket.0);
        queues.by_priority[Priority::Now as usize].extend(pieces);
    }

    /// Takes back a read that has not begun, with its buffer; `None` when it is under way or done,
    /// and then `done` is still called.
    #[must_use]
    pub fn cancel(&self, ticket: &Ticket) -> Option<AlignedBuf> {
        let mut queues = self.shared.lock();
        let pieces = queues.take(&ticket.0);
        if pieces.len() != ticket.0.left.load(Ordering::Acquire) {
            // Some piece is being read or has been: the rest comes too.
            queues.by_priority[Priority::Maybe as usize].extend(pieces);
            return None;
        }
        ticket.0.outcome().owned.take().map(|(buffer, _)| buffer)
    }

    /// What has been read so far.
    #[must_use]
    pub fn totals(&self) -> ReadTotals {
        let queues = self.shared.lock();
        let running = queues.busy_since.map_or(Duration::ZERO, |since| since.elapsed());
        ReadTotals { bytes: queues.bytes, busy: queues.busy + running }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A reader's panic has been caught and told where it happened.
            let _ = thread.join();
        }
    }
}

struct Shared {
    storage: Arc<dyn Storage>,
    piece_bytes: usize,
    queues: Mutex<Queues>,
    work: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("piece_bytes", &self.piece_bytes).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Queues {
    /// Indexed by [`Priority`].
    by_priority: [VecDeque<Piece>; 3],
    /// Pieces being read.
    running: usize,
    busy_since: Option<Instant>,
    busy: Duration,
    bytes: u64,
    stop: bool,
}

impl Queues {
    /// Takes a batch's pieces out of all queues.
    fn take(&mut self, batch: &Arc<Batch>) -> Vec<Piece> {
        let mut taken = Vec::new();
        for queue in &mut self.by_priority {
            let (of_batch, others) =
                queue.drain(..).partition(|piece: &Piece| Arc::ptr_eq(&piece.batch, batch));
            *queue = others;
            taken.extend::<VecDeque<Piece>>(of_batch);
        }
        taken
    }
}

/// Part of one read.
#[derive(Debug)]
struct Piece {
    span: Span,
    batch: Arc<Batch>,
}

/// The pieces of one record.
#[derive(Debug)]
struct Batch {
    base: Base,
    /// Pieces that have not ended.
    left: AtomicUsize,
    outcome: Mutex<Outcome>,
}

/// First byte of a batch's buffer.
#[derive(Debug)]
struct Base(*mut u8);

#[expect(unsafe_code, reason = "threads fill parts of one buffer")]
// SAFETY: the pointer is used only by `Shared::read`, for parts that do not overlap.
unsafe impl Send for Base {}
#[expect(unsafe_code, reason = "threads fill parts of one buffer")]
// SAFETY: as above.
unsafe impl Sync for Base {}

struct Outcome {
    /// The first that happened.
    error: Option<ReadError>,
    /// Until it is over.
    owned: Option<(AlignedBuf, Done)>,
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outcome").field("error", &self.error).finish_non_exhaustive()
    }
}

impl Batch {
    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All pieces have ended.
    fn finish(&self) {
        let (owned, error) = {
            let mut outcome = self.outcome();
            (outcome.owned.take(), outcome.error.take())
        };
        if let Some((buffer, done)) = owned {
            done(buffer, error.map_or(Ok(()), Err));
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's life.
    fn work(&self) {
        loop {
            let mut queues = self.lock();
            let piece = loop {
                if queues.stop {
                    return;
                }
                if let Some(piece) = queues.by_priority.iter_mut().find_map(VecDeque::pop_front) {
                    break piece;
                }
                queues = self.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
            };
            queues.running += 1;
            queues.busy_since.get_or_insert_with(Instant::now);
            drop(queues);

            let result = catch_unwind(AssertUnwindSafe(|| self.read(&piece)));
            let result = result.unwrap_or_else(|_| {
                let file = self.storage.name(piece.span.file);
                Err(ReadError::ReaderDied { file, byte: piece.span.offset })
            });

            let mut queues = self.lock();
            queues.running -= 1;
            if result.is_ok() {
                queues.bytes += piece.span.needed as u64;
            }
            if queues.running == 0
                && let Some(since) = queues.busy_since.take()
            {
                queues.busy += since.elapsed();
            }
            // Under the lock, so that a cancellation sees both or neither.
            let last = piece.batch.left.fetch_sub(1, Ordering::AcqRel) == 1;
            drop(queues);
            if let Err(error) = result {
                piece.batch.outcome().error.get_or_insert(error);
            }
            if last {
                // Whoever made the callback catches what it can; a bug there must not cost a reader.
                let _ = catch_unwind(AssertUnwindSafe(|| piece.batch.finish()));
            }
        }
    }

    fn read(&self, piece: &Piece) -> Result<(), ReadError> {
        let Span { file, offset, needed, slot_offset } = piece.span;
        let base = piece.batch.base.0;
        #[expect(unsafe_code, reason = "threads fill parts of one buffer")]
        // SAFETY: `submit` checked that the placement lies in the buffer; the batch owns that, its
        // pages unmoved and untouched, until the last piece has ended; pieces do not overlap.
        let out = unsafe { slice::from_raw_parts_mut(base.add(slot_offset), piece.span.len()) };
        read_span(&*self.storage, file, offset, out, needed)
    }
}

/// Cuts a read into pieces of at most `piece_bytes`, a multiple of the alignment.
fn cut(span: Span, piece_bytes: usize) -> impl Iterator<Item = Span> {
    (0..span.needed).step_by(piece_bytes).map(move |at| Span {
        offset: span.offset + at as u64,
        needed: piece_bytes.min(span.needed - at),
        slot_offset: span.slot_offset + at,
        ..span
    })
}
