//! The thread that takes steps.

use std::fmt;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::agenda::{Agenda, Need};
use super::{Ended, Event, Prefix, Request, RequestStatistics, Shared, Sink};
use crate::engine::Engine;
use crate::error::Error;
use crate::experts::LayerIdx;
use crate::generate::{FinishReason, Writer};
use crate::prefix::Prefixes;
use crate::sampler::TokenFilter;
use crate::session::Session;
use crate::step::{Logits, Observer, Part};

/// How often somebody without room looks again while nothing runs.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

pub(super) struct Worker {
    engine: Arc<Engine>,
    shared: Arc<Shared>,
    max_sessions: usize,
    patience: Duration,
    /// Since when requests wait although nothing runs.
    stuck_since: Option<Instant>,
    agenda: Agenda,
    /// In the order in which they are let in.
    waiting: Vec<Job>,
    running: Vec<Job>,
    prefixes: Prefixes,
    step: u64,
}

/// A request and how far it has come.
pub(super) struct Job {
    session: Session,
    prompt: Vec<u32>,
    /// Tokens of the prompt that the session has seen.
    prefilled: usize,
    /// Written, and not seen by the session yet.
    pending: Option<u32>,
    writer: Writer,
    filter: Option<Guarded<dyn TokenFilter + Send>>,
    max_tokens: usize,
    priority: i32,
    watch: Watch,
    sink: Sink,
    last_step: u64,
    prefix: Option<Prefix>,
    /// A step of several sessions with it failed, and it is not known whose fault that was.
    suspect: bool,
    submitted: Instant,
    first_step: Option<Instant>,
    first_token: Option<Instant>,
    statistics: RequestStatistics,
}

/// Ends a job's part in a step, and lets the caller's observer look on.
struct Watch {
    /// Its own, and the one of its options, which may be that of many.
    cancel: [Arc<AtomicBool>; 2],
    shared: Arc<Shared>,
    deadline: Option<Instant>,
    inner: Option<Guarded<dyn Observer + Send>>,
}

/// Code of the caller's: what it breaks is its own request.
struct Guarded<T: ?Sized> {
    inner: Box<T>,
    /// It is not asked any more.
    panicked: bool,
}

impl Worker {
    pub(super) fn new(
        engine: Arc<Engine>,
        shared: Arc<Shared>,
        max_sessions: usize,
        patience: Duration,
        agenda: Agenda,
        prefixes: Prefixes,
    ) -> Self {
        let (waiting, running) = (Vec::new(), Vec::new());
        Self {
            engine,
            shared,
            max_sessions,
            patience,
            stuck_since: None,
            agenda,
            waiting,
            running,
            prefixes,
            step: 0,
        }
    }

    /// Serves until the scheduler closes.
    pub(super) fn run(mut self) {
        while self.receive() {
            self.sweep();
            self.let_in();
            if !self.running.is_empty() {
                self.take_step();
            }
        }
        // All of them, now that it closes.
        self.sweep();
    }

    /// Takes in what has arrived, and waits for it where there is nothing else to do. False when the
    /// scheduler closes.
    fn receive(&mut self) -> bool {
        let mut inbox = self.shared.lock();
        if self.stuck_since.is_some() {
            // Nobody tells when memory is given back.
            let (again, _) = self
                .shared
                .changed
                .wait_timeout(inbox, LOOK_AGAIN)
                .unwrap_or_else(PoisonError::into_inner);
            inbox = again;
        }
        let idle = self.waiting.is_empty() && self.running.is_empty();
        while idle && inbox.arrived.is_empty() && !self.shared.closing.load(Ordering::Relaxed) {
            inbox = self.shared.changed.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.append(&mut inbox.arrived);
        drop(inbox);
        self.waiting.sort_by_key(|job| (std::cmp::Reverse(job.priority), job.submitted));
        !self.shared.closing.load(Ordering::Relaxed)
    }

    /// Ends whatever is to end.
    fn sweep(&mut self) {
        let waiting = self.waiting.len();
        for jobs in [&mut self.waiting, &mut self.running] {
            for job in jobs.extract_if(.., |job| job.watch.reason().is_some()) {
                let reason = job.watch.reason().unwrap_or(FinishReason::Cancelled);
                job.end(Ok(reason));
            }
        }
        self.no_longer_waiting(waiting - self.waiting.len());
    }

    /// Lets those that wait take part, as far as there is room for them.
    fn let_in(&mut self) {
        let before = self.waiting.len();
        let mut at = 0;
        while at < self.waiting.len() && self.running.len() < self.max_sessions.max(1) {
            match self.waiting[at].session.admit() {
                Ok(()) => {
                    let mut job = self.waiting.remove(at);
                    match job.look_for_beginning(&self.engine, &mut self.prefixes) {
                        Ok(()) => self.running.push(job),
                        Err(error) => job.end(Err(error)),
                    }
                }
                // Somebody's end will make room.
                Err(_) if !self.running.is_empty() => at += 1,
                Err(error) => {
                    let since = *self.stuck_since.get_or_insert_with(Instant::now);
                    match since.elapsed() < self.patience {
                        true => at += 1,
                        false => self.waiting.remove(at).end(Err(error)),
                    }
                }
            }
        }
        if self.waiting.is_empty() || !self.running.is_empty() {
            self.stuck_since = None;
        }
        self.no_longer_waiting(before - self.waiting.len());
    }

    fn no_longer_waiting(&self, jobs: usize) {
        if jobs > 0 {
            self.shared.lock().waiting -= jobs;
        }
    }

    fn take_step(&mut self) {
        self.step += 1;
        let tokens = match self.running.iter().position(|job| job.suspect) {
            // One after the other, so that only whose fault it is must bear it.
            Some(suspect) => {
                let room = self.engine.plan().prefill_chunk;
                let mut tokens = vec![0; self.running.len()];
                tokens[suspect] = self.running[suspect].piece().clamp(1, room);
                tokens
            }
            None => {
                let needs: Vec<Need> = self.running.iter().map(Job::need).collect();
                self.agenda.next(&needs)
            }
        };
        let start = Instant::now();
        let decoding = self.running.iter().filter(|job| job.remaining() == 0).count();
        let mut parts = Vec::new();
        let (mut prompt, mut written) = (0, 0);
        for (job, &n) in self.running.iter_mut().zip(&tokens).filter(|(_, n)| **n > 0) {
            match job.remaining() {
                0 => written += n,
                _ => prompt += n,
            }
            job.last_step = self.step;
            job.statistics.steps += 1;
            job.first_step.get_or_insert(start);
            parts.push(job.part(n));
        }
        let stepped = self.engine.step(&mut parts);
        drop(parts);
        self.agenda.took(prompt, written, decoding, start.elapsed());
        let taking_part = tokens.iter().filter(|n| **n > 0).count();
        let mut outcomes = match stepped {
            Ok(logits) => logits.into_iter().map(Ok).collect::<Vec<_>>().into_iter(),
            Err(error) if taking_part == 1 => vec![Err(error)].into_iter(),
            Err(error) => {
                self.engine.log.say(|| {
                    format!(
                        "a step of {taking_part} sessions failed, trying them one by one: {error}"
                    )
                });
                for (job, _) in self.running.iter_mut().zip(&tokens).filter(|(_, n)| **n > 0) {
                    job.suspect = true;
                }
                return;
            }
        };
        let mut going_on = Vec::with_capacity(self.running.len());
        for (mut job, n) in self.running.drain(..).zip(tokens) {
            let end = match n {
                0 => None,
                n => match outcomes.next().expect("one for each that took part") {
                    _ if job.watch.panicked() => Some(Err(Error::Panicked { what: "observer" })),
                    Ok(Some(logits)) => {
                        let end = job.advance(n, &logits, &self.engine);
                        job.keep_beginning(&mut self.prefixes, end.is_some());
                        end
                    }
                    // Why it was stopped is seen before the next step.
                    Ok(None) => Some(Ok(job.watch.reason().unwrap_or(FinishReason::Cancelled))),
                    Err(error) => Some(Err(error)),
                },
            };
            match end {
                None => going_on.push(job),
                Some(outcome) => job.end(outcome),
            }
        }
        self.running = going_on;
    }
}

impl Drop for Worker {
    /// Whoever comes later is refused, and whoever came is not left waiting: also after a panic.
    fn drop(&mut self) {
        let mut inbox = self.shared.lock();
        self.shared.closing.store(true, Ordering::Relaxed);
        let arrived = std::mem::take(&mut inbox.arrived);
        drop(inbox);
        drop(arrived);
    }
}

impl Job {
    pub(super) fn new(
        request: Request,
        engine: &Engine,
        cancel: Arc<AtomicBool>,
        shared: Arc<Shared>,
        sink: Sink,
    ) -> Result<Self, Error> {
        let Request { session, prompt, options, priority, deadline, observer, filter, prefix } =
            request;
        // Positions in the prompt are positions in the session only then.
        let prefix = prefix.filter(|_| session.position() == 0);
        let writer = Writer::new(engine, &session, &prompt, &options)?;
        let cancel = [cancel, options.cancel];
        Ok(Self {
            session,
            prompt,
            prefilled: 0,
            pending: None,
            writer,
            filter: filter.map(Guarded::new),
            max_tokens: options.max_tokens,
            priority,
            watch: Watch { cancel, shared, deadline, inner: observer.map(Guarded::new) },
            sink,
            last_step: 0,
            prefix,
            suspect: false,
            submitted: Instant::now(),
            first_step: None,
            first_token: None,
            statistics: RequestStatistics::default(),
        })
    }

    /// Tokens of the prompt that are still to be run.
    fn remaining(&self) -> usize {
        self.prompt.len() - self.prefilled
    }

    fn need(&self) -> Need {
        Need { prompt: self.piece(), priority: self.priority, last_step: self.last_step }
    }

    /// Tokens of the prompt up to where others may begin to differ.
    fn piece(&self) -> usize {
        let boundaries = self.prefix.iter().flat_map(|prefix| &prefix.boundaries);
        let next = boundaries.copied().find(|&boundary| boundary > self.prefilled);
        next.map_or(self.prompt.len(), |next| next.min(self.prompt.len())) - self.prefilled
    }

    /// Goes on from an earlier request that began with the same tokens.
    fn look_for_beginning(
        &mut self,
        engine: &Engine,
        prefixes: &mut Prefixes,
    ) -> Result<(), Error> {
        let Some(prefix) = &self.prefix else { return Ok(()) };
        prefixes.resume(engine, &prefix.namespace, &self.prompt, &mut self.session)?;
        self.prefilled = self.session.position();
        self.statistics.reused_tokens = self.prefilled;
        Ok(())
    }

    /// Keeps what others may go on from.
    fn keep_beginning(&mut self, prefixes: &mut Prefixes, ended: bool) {
        let Some(prefix) = &self.prefix else { return };
        if ended || prefix.boundaries.contains(&self.session.position()) {
            // Without room for it the next one has to run more: that is all.
            let _ = prefixes.keep(&prefix.namespace, &self.session);
        }
    }

    /// Its part of a step, with the next `n` tokens.
    fn part(&mut self, n: usize) -> Part<'_> {
        let left = &self.prompt[self.prefilled..];
        let (tokens, logits) = match &self.pending {
            Some(token) if left.is_empty() => (std::slice::from_ref(token), Logits::Last),
            _ if n == left.len() => (left, Logits::Last),
            _ => (&left[..n], Logits::None),
        };
        Part { session: &mut self.session, tokens, logits, observer: &mut self.watch }
    }

    /// A step with `n` of its tokens has been taken. Returns how it ends, if it does.
    fn advance(
        &mut self,
        n: usize,
        logits: &[f32],
        engine: &Engine,
    ) -> Option<Result<FinishReason, Error>> {
        self.suspect = false;
        if self.remaining() > 0 {
            self.prefilled += n;
            self.statistics.prompt_tokens += n;
            self.tell(Event::Prefilled { tokens: self.prefilled, of: self.prompt.len() });
        }
        if self.remaining() > 0 {
            return None;
        }
        self.pending = None;
        if self.statistics.written_tokens == self.max_tokens {
            return Some(Ok(FinishReason::Length));
        }
        let filter = self.filter.as_mut().map(|filter| filter as &mut dyn TokenFilter);
        let next = self.writer.next(&self.session, logits, filter);
        if self.filter.as_ref().is_some_and(|filter| filter.panicked) {
            return Some(Err(Error::Panicked { what: "token filter" }));
        }
        let token = match next {
            Ok(token) => token,
            Err(reason) => return Some(Ok(reason)),
        };
        self.first_token.get_or_insert_with(Instant::now);
        self.pending = Some(token.id);
        self.statistics.written_tokens += 1;
        self.tell(Event::Token(token));
        if self.statistics.written_tokens == self.max_tokens {
            return Some(Ok(FinishReason::Length));
        }
        let full = self.session.position() == engine.plan().options.context;
        full.then_some(Ok(FinishReason::ContextFull))
    }

    /// Tells its owner, and cancels it if nobody is there any more.
    fn tell(&mut self, event: Event) {
        // It is the caller's code, like observers and filters.
        let told = catch_unwind(AssertUnwindSafe(|| (self.sink)(event)));
        if !matches!(told, Ok(ControlFlow::Continue(()))) {
            self.watch.cancel[0].store(true, Ordering::Relaxed);
        }
    }

    fn end(mut self, outcome: Result<FinishReason, Error>) {
        let now = Instant::now();
        let first_step = self.first_step.unwrap_or(now);
        let first_token = self.first_token.unwrap_or(now);
        self.statistics.queued = first_step - self.submitted;
        self.statistics.prefill = first_token - first_step;
        self.statistics.decode = now - first_token;
        let Self { session, writer, statistics, mut sink, .. } = self;
        let sampler = writer.sampler.into_state();
        let ended = Box::new(Ended { session, sampler, outcome, statistics });
        let _ = catch_unwind(AssertUnwindSafe(|| sink(Event::Ended(ended))));
    }
}

impl Watch {
    /// Why the job is to end before its time, if it is.
    fn reason(&self) -> Option<FinishReason> {
        let mut flags = self.cancel.iter().map(|flag| &**flag).chain([&self.shared.closing]);
        if flags.any(|flag| flag.load(Ordering::Relaxed)) {
            return Some(FinishReason::Cancelled);
        }
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        late.then_some(FinishReason::Deadline)
    }

    fn panicked(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.panicked)
    }
}

impl<T: ?Sized> Guarded<T> {
    fn new(inner: Box<T>) -> Self {
        Self { inner, panicked: false }
    }

    /// Nothing, once it has panicked.
    fn ask<R>(&mut self, ask: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.panicked {
            return None;
        }
        let answer = catch_unwind(AssertUnwindSafe(|| ask(&mut self.inner))).ok();
        self.panicked = answer.is_none();
        answer
    }
}

impl TokenFilter for Guarded<dyn TokenFilter + Send> {
    fn mask(&mut self, logits: &mut [f32]) {
        self.ask(|filter| filter.mask(logits));
    }

    fn accept(&mut self, token: u32) {
        self.ask(|filter| filter.accept(token));
    }
}

impl Observer for Watch {
    fn after_layer(&mut self, layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        if self.reason().is_some() {
            return ControlFlow::Break(());
        }
        match &mut self.inner {
            // Breaks as well where any of these methods has panicked.
            Some(inner) => inner
                .ask(|inner| inner.after_layer(layer, hidden))
                .unwrap_or(ControlFlow::Break(())),
            None => ControlFlow::Continue(()),
        }
    }

    fn choose(&mut self, layer: LayerIdx, ids: &mut [u32]) {
        if let Some(inner) = &mut self.inner {
            inner.ask(|inner| inner.choose(layer, ids));
        }
    }

    fn routed(&mut self, layer: LayerIdx, ids: &[u32], weights: &[f32]) {
        if let Some(inner) = &mut self.inner {
            inner.ask(|inner| inner.routed(layer, ids, weights));
        }
    }

    fn normed(&mut self, hidden: &[f32]) {
        if let Some(inner) = &mut self.inner {
            inner.ask(|inner| inner.normed(hidden));
        }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("position", &self.session.position()).finish_non_exhaustive()
    }
}
