//! Writing token after token.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::counters::RunCounters;
use crate::engine::Engine;
use crate::error::Error;
use crate::experts::LayerIdx;
use crate::sampler::{Logprobs, Sampler, SamplerState, Sampling, TokenFilter};
use crate::session::Session;
use crate::step::{Logits, Observer};

/// What to generate and when to stop.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Goes on where another generation's sampler was, instead of at the seed. See
    /// [`Generation::sampler_state`].
    pub resume: Option<SamplerState>,
    /// Tokens that end the text and are not part of it; `None` means the model's own.
    pub stop_tokens: Option<Vec<u32>>,
    /// Gives every token its log-probability and those of this many of the likeliest; `None` saves
    /// the work.
    pub logprobs: Option<usize>,
    /// Set it to stop within one layer's time, keeping what has been generated. A clone of the options
    /// has the same flag: it stops both.
    pub cancel: Arc<AtomicBool>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 512,
            sampling: Sampling::default(),
            resume: None,
            stop_tokens: None,
            logprobs: None,
            cancel: Arc::default(),
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model wrote a stop token.
    Stop,
    /// `max_tokens` were written.
    Length,
    /// The model's context is full.
    ContextFull,
    /// The filter, or the bias, forbade every token.
    NothingAllowed,
    /// The caller asked.
    Cancelled,
    /// Its time was over; only a [`Scheduler`](crate::Scheduler) has deadlines.
    Deadline,
    /// A step failed; the iterator has yielded the error.
    Failed,
}

/// A generated token.
#[derive(Clone, Debug)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// How likely the model thought it, if [`GenerateOptions::logprobs`] asked.
    pub logprobs: Option<Logprobs>,
    /// What the step that gave its logits took, for all sessions that took part: time, bytes read,
    /// experts found in memory. Of a prompt that was longer than a step, the last one.
    pub step: Arc<RunCounters>,
}

/// Tokens are equal that say the same, whatever they took.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        (self.id, &self.logprobs) == (other.id, &other.logprobs)
    }
}

/// An iterator over generated tokens.
///
/// A token is yielded before it is run through the model, so when the iteration ends the session
/// has seen every yielded token but the last. Tokens that end a text are in
/// [`GenerateOptions::stop_tokens`]; texts that do are for a [`StopMatcher`]:
///
/// ```
/// # use rill::{Engine, EngineOptions, Folder, GenerateOptions, StopMatcher};
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
/// # let engine = Engine::open(Folder::Disk("models/k3-nano".into()), &EngineOptions::default())?;
/// # let (tokenizer, mut session) = (engine.open_tokenizer()?, engine.new_session());
/// # let prompt = tokenizer.encode_text("The capital of France");
/// # let mut all = String::new();
/// let mut text = tokenizer.decoder();
/// let mut stop = StopMatcher::new(vec![".".to_owned()]);
/// for token in engine.generate(&mut session, &prompt, GenerateOptions::default())? {
///     let bytes = tokenizer.token_bytes(token?.id).unwrap_or_default();
///     let step = stop.push(&text.push(bytes));
///     print!("{}", step.emit);
/// #   all += &step.emit;
///     if step.stopped {
///         break;
///     }
/// }
/// // What was held back, because it might have become a character or a stop text.
/// print!("{}{}", stop.push(&text.finish()).emit, stop.finish());
/// # assert_eq!(all, " is Paris");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`StopMatcher`]: rill_text::StopMatcher
pub struct Generation<'a> {
    engine: &'a Engine,
    session: &'a mut Session,
    writer: Writer,
    filter: Option<&'a mut (dyn TokenFilter + Send)>,
    cancel: Arc<AtomicBool>,
    remaining: usize,
    /// Of the position after the last token that was run.
    logits: Vec<f32>,
    /// Yielded but not yet run.
    pending: Option<u32>,
    observer: Option<&'a mut (dyn Observer + Send)>,
    finish: Option<FinishReason>,
}

impl Engine {
    /// Runs the prompt and prepares to generate what follows it.
    pub fn generate<'a>(
        &'a self,
        session: &'a mut Session,
        prompt: &[u32],
        options: GenerateOptions,
    ) -> Result<Generation<'a>, Error> {
        self.generate_observed(session, prompt, options, None)
    }

    /// [`generate`](Self::generate) with an observer of every step.
    pub fn generate_observed<'a>(
        &'a self,
        session: &'a mut Session,
        prompt: &[u32],
        options: GenerateOptions,
        mut observer: Option<&'a mut (dyn Observer + Send)>,
    ) -> Result<Generation<'a>, Error> {
        let writer = Writer::new(self, session, prompt, &options)?;
        let mut stop = StopWhen { cancel: &options.cancel, inner: &mut observer };
        let mut finish = None;
        let logits = match self.forward_observed(session, prompt, Logits::Last, &mut stop) {
            Err(Error::Cancelled) => {
                finish = Some(FinishReason::Cancelled);
                Vec::new()
            }
            logits => logits?,
        };
        Ok(Generation {
            engine: self,
            session,
            writer,
            filter: None,
            cancel: options.cancel,
            remaining: options.max_tokens,
            logits,
            pending: None,
            observer,
            finish,
        })
    }
}

impl<'a> Generation<'a> {
    /// Lets `filter` forbid tokens.
    pub fn filtered(mut self, filter: &'a mut (dyn TokenFilter + Send)) -> Self {
        self.filter = Some(filter);
        self
    }

    /// The session it goes on in.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// What the sampler remembers. Saved with the session and given to
    /// [`GenerateOptions::resume`], with the last yielded token as the prompt, the text goes on as if
    /// it had not been broken off.
    pub fn sampler_state(&self) -> &SamplerState {
        self.writer.sampler.state()
    }

    /// Why the iteration ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    fn step(&mut self) -> Result<Token, Result<FinishReason, Error>> {
        // What follows the prompt is known already: without it, going on later would need the last
        // token of the prompt once more.
        if self.cancel.load(Ordering::Relaxed) && self.pending.is_some() {
            return Err(Ok(FinishReason::Cancelled));
        }
        if self.remaining == 0 {
            return Err(Ok(FinishReason::Length));
        }
        if let Some(token) = self.pending.take() {
            let mut stop = StopWhen { cancel: &self.cancel, inner: &mut self.observer };
            let logits =
                self.engine.forward_observed(self.session, &[token], Logits::Last, &mut stop);
            self.logits = logits.map_err(|error| match error {
                Error::Cancelled => Ok(FinishReason::Cancelled),
                Error::ContextFull { .. } => Ok(FinishReason::ContextFull),
                error => Err(error),
            })?;
        }
        let filter = self.filter.as_mut().map(|filter| &mut **filter as &mut dyn TokenFilter);
        let token = self.writer.next(self.session, &self.logits, filter).map_err(Ok)?;
        self.remaining -= 1;
        self.pending = Some(token.id);
        Ok(token)
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish.is_some() {
            return None;
        }
        match self.step() {
            Ok(token) => Some(Ok(token)),
            Err(Ok(reason)) => {
                self.finish = Some(reason);
                None
            }
            Err(Err(error)) => {
                self.finish = Some(FinishReason::Failed);
                Some(Err(error))
            }
        }
    }
}

/// Chooses the tokens of one text.
pub(crate) struct Writer {
    pub(crate) sampler: Sampler,
    stop_tokens: Vec<u32>,
    logprobs: Option<usize>,
}

impl Writer {
    /// For what follows `prompt`, which follows what the session has seen.
    pub(crate) fn new(
        engine: &Engine,
        session: &Session,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<Self, Error> {
        let vocab_size = engine.config().vocab_size;
        let sampling = options.sampling.clone();
        let mut sampler = match options.resume.clone() {
            None => Sampler::new(sampling, vocab_size)?,
            Some(state) => Sampler::resume(sampling, vocab_size, state)?,
        };
        sampler.compute_with(engine.compute.kernels);
        sampler.accept_prompt(session.tokens());
        sampler.accept_prompt(prompt);
        let stop_tokens = options.stop_tokens.as_deref().unwrap_or(engine.stop_tokens()).to_vec();
        Ok(Self { sampler, stop_tokens, logprobs: options.logprobs })
    }

    /// The next token, given the logits of the session's last step, or why the text has ended.
    pub(crate) fn next(
        &mut self,
        session: &Session,
        logits: &[f32],
        filter: Option<&mut dyn TokenFilter>,
    ) -> Result<Token, FinishReason> {
        let id = match filter {
            None => self.choose(logits)?,
            Some(filter) => {
                // A copy: log-probabilities are of what the model said.
                let mut masked = logits.to_vec();
                filter.mask(&mut masked);
                let id = self.choose(&masked)?;
                filter.accept(id);
                id
            }
        };
        self.sampler.accept(id);
        let logprobs = self.logprobs.map(|n| self.sampler.logprobs(logits, id, n));
        Ok(Token { id, logprobs, step: session.last_step().clone() })
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32, FinishReason> {
        let id = self.sampler.sample(logits).ok_or(FinishReason::NothingAllowed)?;
        if self.stop_tokens.contains(&id) { Err(FinishReason::Stop) } else { Ok(id) }
    }
}

/// Ends a step when the flag is set, and lets another observer look on.
struct StopWhen<'a, 'b> {
    cancel: &'a AtomicBool,
    inner: &'a mut Option<&'b mut (dyn Observer + Send)>,
}

impl Observer for StopWhen<'_, '_> {
    fn after_layer(&mut self, layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        match self.inner {
            Some(inner) => inner.after_layer(layer, hidden),
            None => ControlFlow::Continue(()),
        }
    }

    fn choose(&mut self, layer: LayerIdx, ids: &mut [u32]) {
        if let Some(inner) = self.inner {
            inner.choose(layer, ids);
        }
    }

    fn routed(&mut self, layer: LayerIdx, ids: &[u32], weights: &[f32]) {
        if let Some(inner) = self.inner {
            inner.routed(layer, ids, weights);
        }
    }

    fn normed(&mut self, hidden: &[f32]) {
        if let Some(inner) = self.inner {
            inner.normed(hidden);
        }
    }
}
