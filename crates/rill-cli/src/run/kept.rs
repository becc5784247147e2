//! An answer that outlives the program: everything that `--resume` needs beside the session.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rill::{Engine, SamplerState, Sampling, Session};
use serde::{Deserialize, Serialize};

use crate::args::RunArgs;
use crate::output::note;

/// The note in the session's file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Answer {
    pub(super) prompt: Vec<u32>,
    /// Tokens of the answer so far; the session has not seen the last one.
    pub(super) written: Vec<u32>,
    /// Tokens of the answer, at most.
    pub(super) max_tokens: usize,
    /// Nothing comes any more.
    pub(super) finished: bool,
    pub(super) raw: bool,
    pub(super) think: bool,
    pub(super) stop: Vec<String>,
    /// `None` before the first token.
    pub(super) sampler: Option<SamplerState>,
    pub(super) sampling: KeptSampling,
}

/// [`Sampling`] in numbers that JSON can hold: bits, because a bias may be infinite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeptSampling {
    /// Temperature, top-p, min-p; repetition, presence and frequency penalty.
    bits: [u32; 6],
    top_k: usize,
    bias: Vec<(u32, u32)>,
    seed: u64,
}

impl Answer {
    pub(super) fn new(args: &RunArgs, prompt: Vec<u32>) -> Self {
        let s = args.sampling.sampling();
        let floats = [
            s.temperature,
            s.top_p,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
        ];
        Self {
            prompt,
            written: Vec::new(),
            max_tokens: args.max_tokens,
            finished: false,
            raw: args.raw,
            think: args.think,
            stop: args.stop.clone(),
            sampler: None,
            sampling: KeptSampling {
                bits: floats.map(f32::to_bits),
                top_k: s.top_k,
                bias: s.logit_bias.iter().map(|&(id, bias)| (id, bias.to_bits())).collect(),
                seed: s.seed,
            },
        }
    }

    pub(super) fn sampling(&self) -> Sampling {
        let KeptSampling { bits, top_k, bias, seed } = &self.sampling;
        let [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty] =
            bits.map(f32::from_bits);
        Sampling {
            temperature,
            top_k: *top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: bias.iter().map(|&(id, bias)| (id, f32::from_bits(bias))).collect(),
            seed: *seed,
        }
    }

    /// Tokens that a session at this position has still to see.
    pub(super) fn unseen(&self, position: usize) -> Vec<u32> {
        self.prompt.iter().chain(&self.written).skip(position).copied().collect()
    }
}

/// Keeps an answer in a file, now and then.
pub(super) struct Keeper {
    file: Option<PathBuf>,
    every: Duration,
    last: Instant,
    failed: bool,
}

impl Keeper {
    /// For an answer that begins; one that is not over is not written over, nor is any other file.
    pub(super) fn new(args: &RunArgs) -> Result<Self> {
        if let Some(file) = args.autosave.as_ref().filter(|file| file.exists()) {
            let name = file.display();
            let kept: Option<Answer> = rill::read_session_note(file)
                .ok()
                .and_then(|note| serde_json::from_str(&note).ok());
            match kept {
                None => bail!("{name} is there and holds no answer; name another file"),
                Some(answer) if !answer.finished => bail!(
                    "{name} holds an answer that is not over; go on with it (--resume), remove it, or \
                     name another file"
                ),
                Some(_) => {}
            }
        }
        // An answer that is resumed is kept where it was.
        let file = args.autosave.as_ref().or(args.resume.as_ref()).cloned();
        let every = Duration::from_secs_f64(args.autosave_every);
        Ok(Self { file, every, last: Instant::now(), failed: false })
    }

    /// Where it is kept, if it is.
    pub(super) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Saves if it is time to. A disk that does not take it is no reason to lose the answer on the
    /// screen: that is told once, and tried again.
    pub(super) fn now_and_then(
        &mut self,
        engine: &Engine,
        session: &Session,
        answer: impl FnOnce() -> Answer,
    ) {
        if self.file.is_none() || self.last.elapsed() < self.every {
            return;
        }
        self.last = Instant::now();
        match self.save(engine, session, &answer()) {
            Ok(()) => self.failed = false,
            Err(error) if !self.failed => {
                self.failed = true;
                note(&format!("rill: {error:#}; the answer goes on and will be saved again"));
            }
            Err(_) => {}
        }
    }

    /// Saves.
    pub(super) fn save(&self, engine: &Engine, session: &Session, answer: &Answer) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let text = serde_json::to_string(answer).context("the answer cannot be written down")?;
        engine.save_session(session, file, &text).context("the answer cannot be kept")
    }
}
