//! Opening what `-m` names.

use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rill::config::ModelConfig;
use rill::{CachePolicy, Engine, EngineOptions, Error, Folder, Tokenizer};

use crate::args::{Cache, EngineArgs, ModelArgs, Switch};
use crate::bundle;
use crate::output::note;
use crate::prompt::usage;

/// The folder that was named, or the demo model.
pub(crate) fn folder(path: Option<&Path>) -> Result<Folder> {
    let Some(path) = path else { return Ok(bundle::demo()) };
    let shown = path.display();
    if !fs::metadata(path).with_context(|| format!("cannot open {shown}"))?.is_dir() {
        bail!("{shown} is not a folder; name the folder that holds the checkpoint");
    }
    Ok(Folder::Disk(path.to_owned()))
}

/// A model that has been named and not been opened.
pub(crate) struct Model {
    folder: Folder,
    pub(crate) config: ModelConfig,
}

/// What a command asks of an engine: memory is set aside for it.
#[derive(Clone, Copy)]
pub(crate) struct Needs {
    /// Tokens of context, unless `--ctx` says otherwise.
    pub(crate) context: usize,
    /// Positions whose logits are asked for at once.
    pub(crate) logits: usize,
    /// Sessions that are open at once.
    pub(crate) sessions: usize,
}

impl Model {
    pub(crate) fn find(args: &ModelArgs) -> Result<Self> {
        let folder = folder(args.model.as_deref())?;
        let config = rill::read_config(&folder)?;
        Ok(Self { folder, config })
    }

    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        Ok(rill::open_tokenizer(&self.folder, &self.config)?)
    }

    /// Opens all of it.
    pub(crate) fn open(&self, args: &EngineArgs, needs: Needs) -> Result<Opened> {
        if args.learn.is_some() && !matches!(args.cache, Cache::Scored) {
            usage("--learn is for --cache scored: the others learn nothing that lasts");
        }
        let max_positions = self.config.max_position_embeddings;
        if let Some(ctx) = args.ctx.filter(|&ctx| ctx as usize > max_positions) {
            return Err(Error::ContextFull { positions: ctx as usize, max_positions })
                .context("--ctx");
        }
        let engine = Engine::open(self.folder.clone(), &options(args, needs))?;
        if let Some(problem) = engine.learned_problem() {
            note(&format!("rill: {problem}"));
        }
        Ok(Opened(Arc::new(engine)))
    }
}

/// An engine that saves what it has learned, however the command ends.
pub(crate) struct Opened(Arc<Engine>);

impl Opened {
    /// The same engine, for those who keep it.
    pub(crate) fn shared(&self) -> Arc<Engine> {
        self.0.clone()
    }
}

impl Deref for Opened {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Err(error) = self.0.save_learned() {
            note(&format!("rill: {error}"));
        }
    }
}

pub(crate) fn options(args: &EngineArgs, needs: Needs) -> EngineOptions {
    let usual = EngineOptions::default();
    EngineOptions {
        budget_bytes: args.budget,
        context: args.ctx.map_or(needs.context, |ctx| ctx as usize),
        latents: args.latents.into(),
        logits: needs.logits,
        sessions: needs.sessions,
        threads: args.threads.into(),
        cpus: args.cpus.as_ref().map_or_else(Vec::new, |list| list.0.clone()),
        prefill_chunk: args.prefill_chunk.into(),
        kernels: args.kernels.clone(),
        cache: match args.cache {
            Cache::Lru => CachePolicy::Lru,
            Cache::Lfu => CachePolicy::Lfu,
            Cache::Scored => CachePolicy::Scored,
        },
        lookahead: args.lookahead.map_or(usual.lookahead, usize::from),
        readers: args.readers.into(),
        overlap: !args.no_overlap,
        direct: !args.no_direct,
        verify: args.verify == Switch::On,
        learn: args.learn.clone(),
        ..usual
    }
}
