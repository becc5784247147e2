//! Many requests through one engine.
//!
//! One thread takes steps. Every step has a token of each session that is writing, as far as there is
//! room, and a piece of a prompt: the trunk is read once for all of them, and so is each expert that
//! several of them chose. What a session is given does not depend on its company, bit for bit.

mod agenda;
mod worker;

use std::fmt;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::agenda::Agenda;
use self::worker::{Job, Worker};
use crate::engine::Engine;
use crate::error::Error;
use crate::generate::{FinishReason, GenerateOptions, Token};
use crate::prefix::{PrefixDisk, Prefixes};
use crate::sampler::{SamplerState, TokenFilter};
use crate::session::Session;
use crate::step::Observer;

/// How a scheduler shares an engine out.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerOptions {
    /// Sessions that take part in steps; others wait. 0 means as many as the engine was opened for
    /// ([`EngineOptions::sessions`](crate::EngineOptions::sessions)).
    pub max_sessions: usize,
    /// Requests that may wait; more are refused.
    pub queue: usize,
    /// Most tokens of a prompt in a step in which others write.
    pub prefill_while_decoding: usize,
    /// Share of the time that prompts may take while others write, above 0 and at most 1.
    pub prefill_share: f64,
    /// How long a request without room waits while nothing runs whose end could make room: its caller
    /// may be about to drop an idle session. Then it is refused.
    pub patience: Duration,
    /// Keeps beginnings of conversations ([`Request::prefix`]) on disk as well. Each of them passes
    /// through the room for snapshots
    /// ([`EngineOptions::snapshot_bytes`](crate::EngineOptions::snapshot_bytes)): what is larger than that
    /// is not kept. `None` writes nothing.
    pub prefix_disk: Option<PrefixDisk>,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            max_sessions: 0,
            queue: 64,
            prefill_while_decoding: 16,
            prefill_share: 0.5,
            patience: Duration::from_secs(10),
            prefix_disk: None,
        }
    }
}

/// A prompt and what is to become of it.
pub struct Request {
    /// Where it goes on; comes back with [`Event::Ended`].
    pub session: Session,
    /// Tokens that follow what the session has seen; at least one.
    pub prompt: Vec<u32>,
    /// What to generate.
    pub options: GenerateOptions,
    /// Higher ones go first, wherever there is not room for all.
    pub priority: i32,
    /// When the request ends at the latest, with what it has.
    pub deadline: Option<Instant>,
    /// Sees every step of it. A panic in it ends the request with [`Error::Panicked`].
    pub observer: Option<Box<dyn Observer + Send>>,
    /// Forbids tokens. A panic in it ends the request with [`Error::Panicked`].
    pub filter: Option<Box<dyn TokenFilter + Send>>,
    /// Go on from an earlier request that began with the same tokens, and be such a one for later
    /// requests. Only for sessions that have seen nothing, on an engine with room for snapshots
    /// ([`EngineOptions::snapshot_bytes`](crate::EngineOptions::snapshot_bytes)), and not with an
    /// observer that changes what it sees: others would go on from what it made.
    pub prefix: Option<Prefix>,
}

/// How a request shares its beginning with others.
#[derive(Clone)]
pub struct Prefix {
    /// Whose it is: requests of other name spaces neither find it nor notice it. A secret, such as a key
    /// of an interface: files are named with it so that only who has it can tell what they are of.
    pub namespace: Arc<str>,
    /// Positions in the prompt where others may begin to differ, such as ends of messages, ascending.
    /// The end of the answer is always one.
    pub boundaries: Vec<usize>,
}

impl Request {
    /// A request of ordinary priority.
    pub fn new(session: Session, prompt: Vec<u32>, options: GenerateOptions) -> Self {
        Self {
            session,
            prompt,
            options,
            priority: 0,
            deadline: None,
            observer: None,
            filter: None,
            prefix: None,
        }
    }
}

/// What happens to a request.
#[derive(Debug)]
pub enum Event {
    /// So many tokens of the prompt have been taken in.
    Prefilled {
        /// Tokens of the prompt.
        tokens: usize,
        /// Of so many.
        of: usize,
    },
    /// A token has been written. The session sees it when the next one is.
    Token(Token),
    /// Nothing comes any more.
    Ended(Box<Ended>),
}

/// How a request ended.
#[derive(Debug)]
pub struct Ended {
    /// Its session, at the last whole token it has seen.
    pub session: Session,
    /// What its sampler remembers, for [`GenerateOptions::resume`].
    pub sampler: SamplerState,
    /// Why it ended.
    pub outcome: Result<FinishReason, Error>,
    /// What it took.
    pub statistics: RequestStatistics,
}

/// What a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestStatistics {
    /// Time before its first step.
    pub queued: Duration,
    /// From its first step to its first token.
    pub prefill: Duration,
    /// From its first token to its end.
    pub decode: Duration,
    /// Tokens of the prompt that were run.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that an earlier request had run.
    pub reused_tokens: usize,
    /// Tokens written.
    pub written_tokens: usize,
    /// Steps it took part in.
    pub steps: usize,
}

/// A request under way: an iterator over what happens to it, up to [`Event::Ended`].
///
/// Dropping it cancels the request.
#[derive(Debug)]
pub struct Answer {
    events: Receiver<Event>,
    cancel: Canceller,
}

/// Ends a request within one layer's time, from any thread; it keeps what has been written.
#[derive(Clone, Debug)]
pub struct Canceller {
    cancel: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

/// Runs requests of many sessions through one engine. Dropping it ends them all.
///
/// One thread does everything between two steps, and nobody's step begins meanwhile: calls of sinks,
/// filters and observers, a copy of a session's state wherever a beginning is kept in memory
/// ([`Session::snapshot_bytes`], half a gigabyte and more with Kimi K3), and the reading of a file when a
/// request goes on from a beginning on disk. Files are written by another thread; dropping the scheduler
/// waits for it.
///
/// ```
/// # use std::sync::Arc;
/// # use rill::{Engine, EngineOptions, Event, Folder, GenerateOptions, Request, Scheduler};
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
/// let options = EngineOptions { sessions: 2, ..EngineOptions::default() };
/// let engine = Arc::new(Engine::open(Folder::Disk("models/k3-nano".into()), &options)?);
/// let scheduler = Scheduler::new(engine.clone(), &Default::default())?;
/// let ask = |text: &str| {
///     let prompt = engine.open_tokenizer()?.encode_text(text);
///     let options = GenerateOptions { max_tokens: 8, ..GenerateOptions::default() };
///     scheduler.submit(Request::new(engine.new_session(), prompt, options))
/// };
/// // Both are under way at once, and share every step.
/// let (first, second) = (ask("The capital of France")?, ask("The capital of Peru")?);
/// for event in first.chain(second) {
///     match event {
///         Event::Prefilled { tokens, of } => println!("{tokens} of {of} taken in"),
///         Event::Token(token) => println!("{}, {:?}", token.id, token.step.pace().time),
///         Event::Ended(ended) => println!("{:?}, {:?}", ended.outcome?, ended.statistics),
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Scheduler {
    engine: Arc<Engine>,
    shared: Arc<Shared>,
    queue: usize,
    thread: Option<JoinHandle<()>>,
}

type Sink = Box<dyn FnMut(Event) -> ControlFlow<()> + Send>;

#[derive(Debug, Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    changed: Condvar,
    /// Whatever is under way is to end.
    closing: AtomicBool,
}

#[derive(Debug, Default)]
struct Inbox {
    arrived: Vec<Job>,
    /// Requests that take part in no step yet.
    waiting: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // Nothing that can panic happens between the steps of a change.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Scheduler {
    /// Starts a thread that serves requests.
    ///
    /// # Errors
    /// When the options make no sense, or the system gives no thread.
    pub fn new(engine: Arc<Engine>, options: &SchedulerOptions) -> Result<Self, Error> {
        let max_sessions = match options.max_sessions {
            0 => engine.plan().options.sessions,
            n => n,
        };
        let agenda = Agenda::new(engine.plan().prefill_chunk, options)?;
        let prefixes = Prefixes::new(&engine, options.prefix_disk.clone())?;
        let shared = Arc::new(Shared::default());
        let worker = Worker::new(
            engine.clone(),
            shared.clone(),
            max_sessions,
            options.patience,
            agenda,
            prefixes,
        );
        let thread = std::thread::Builder::new().name("rill-steps".to_owned());
        let thread = thread
            .spawn(move || worker.run())
            .map_err(|e| Error::SchedulerThread { reason: e.to_string() })?;
        Ok(Self { engine, shared, queue: options.queue, thread: Some(thread) })
    }

    /// The engine it runs.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Takes a request; what happens to it is read from the result.
    ///
    /// # Errors
    /// [`Error::QueueFull`], or any that [`Engine::forward`] has for the prompt itself. The session is
    /// lost then; fork it first if it is needed still.
    pub fn submit(&self, request: Request) -> Result<Answer, Error> {
        let (send, events) = mpsc::channel();
        let sink = move |event| match send.send(event) {
            Ok(()) => ControlFlow::Continue(()),
            // Nobody listens any more.
            Err(_) => ControlFlow::Break(()),
        };
        let cancel = self.submit_with(request, sink)?;
        Ok(Answer { events, cancel })
    }

    /// Takes a request and calls `sink` with all that happens to it, on the thread that serves
    /// everybody: it must be quick. Breaking cancels the request, and so does a panic.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit).
    pub fn submit_with(
        &self,
        request: Request,
        sink: impl FnMut(Event) -> ControlFlow<()> + Send + 'static,
    ) -> Result<Canceller, Error> {
        self.engine.check_tokens(&request.session, &request.prompt)?;
        // Its own: the one in the options may be that of many requests.
        let cancel = Arc::new(AtomicBool::new(false));
        let job =
            Job::new(request, &self.engine, cancel.clone(), self.shared.clone(), Box::new(sink))?;
        let mut inbox = self.shared.lock();
        if self.shared.closing.load(Ordering::Relaxed) {
            return Err(Error::SchedulerGone);
        }
        if inbox.waiting >= self.queue {
            return Err(Error::QueueFull { waiting: inbox.waiting });
        }
        inbox.arrived.push(job);
        inbox.waiting += 1;
        drop(inbox);
        self.shared.changed.notify_all();
        Ok(Canceller { cancel, shared: self.shared.clone() })
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        {
            // Under the lock, so that nobody looks before and waits after.
            let _inbox = self.shared.lock();
            self.shared.closing.store(true, Ordering::Relaxed);
        }
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It has nothing to report but a panic, which has been printed.
            let _ = thread.join();
        }
    }
}

impl Answer {
    /// Ends the request early, from any thread.
    pub fn canceller(&self) -> Canceller {
        self.cancel.clone()
    }

    /// Waits for the end, whatever comes before it.
    ///
    /// # Errors
    /// [`Error::SchedulerGone`] when the scheduler has broken down.
    pub fn wait(self) -> Result<Ended, Error> {
        for event in self.events.iter() {
            if let Event::Ended(ended) = event {
                return Ok(*ended);
            }
        }
        Err(Error::SchedulerGone)
    }
}

impl Iterator for Answer {
    type Item = Event;

    /// Waits for the next event.
    fn next(&mut self) -> Option<Event> {
        self.events.recv().ok()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

impl Canceller {
    /// Ends the request within one layer's time.
    pub fn cancel(&self) {
        let _inbox = self.shared.lock();
        self.cancel.store(true, Ordering::Relaxed);
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl fmt::Debug for Prefix {
    /// Without the name space, which is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefix").field("boundaries", &self.boundaries).finish_non_exhaustive()
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("prompt", &self.prompt).finish_non_exhaustive()
    }
}
