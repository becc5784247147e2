//! Writing token after token.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::engine::Engine;
use crate::error::Error;
use crate::experts::LayerIdx;
use crate::sampler::{Sampler, Sampling};
use crate::session::Session;
use crate::step::{Logits, Observer};

/// What to generate and when to stop.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text and are not part of it; `None` means the model's own.
    pub stop_tokens: Option<Vec<u32>>,
    /// Set it to stop within one layer's time, keeping what has been generated.
    pub cancel: Arc<AtomicBool>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 512,
            sampling: Sampling::default(),
            stop_tokens: None,
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
    /// The caller asked.
    Cancelled,
    /// Its time was over; only a [`Scheduler`](crate::Scheduler) has deadlines.
    Deadline,
    /// A step failed; the iterator has yielded the error.
    Failed,
}

/// An iterator over generated tokens.
///
/// A token is yielded before it is run through the model, so when the iteration ends the session
/// has seen every yielded token but the last.
pub struct Generation<'a> {
    engine: &'a Engine,
    session: &'a mut Session,
    sampler: Sampler,
    stop_tokens: Vec<u32>,
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
        let sampler = Sampler::new(options.sampling)?;
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
            sampler,
            stop_tokens: options.stop_tokens.unwrap_or_else(|| self.stop_tokens().to_vec()),
            cancel: options.cancel,
            remaining: options.max_tokens,
            logits,
            pending: None,
            observer,
            finish,
        })
    }
}

impl Generation<'_> {
    /// Why the iteration ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    fn step(&mut self) -> Result<u32, Result<FinishReason, Error>> {
        if self.cancel.load(Ordering::Relaxed) {
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
        let token = self.sampler.sample(&self.logits);
        if self.stop_tokens.contains(&token) {
            return Err(Ok(FinishReason::Stop));
        }
        self.remaining -= 1;
        self.pending = Some(token);
        Ok(token)
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<u32, Error>;

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
