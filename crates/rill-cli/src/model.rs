//! Opening what `-m` names.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rill::config::ModelConfig;
use rill::{Engine, EngineOptions, Folder, KernelChoice, Tokenizer};

use crate::args::{EngineArgs, Kernels, ModelArgs};
use crate::bundle;

/// The folder that was named, or the demo model.
pub(crate) fn folder(path: Option<&Path>) -> Result<Folder> {
    let Some(path) = path else { return Ok(bundle::demo()) };
    let shown = path.display();
    if !fs::metadata(path).with_context(|| format!("cannot open {shown}"))?.is_dir() {
        bail!("{shown} is not a folder; name the folder that holds the checkpoint");
    }
    Ok(Folder::Disk(path.to_owned()))
}

/// Configuration and tokenizer, without the weights.
pub(crate) fn tokenizer(args: &ModelArgs) -> Result<(ModelConfig, Tokenizer)> {
    let folder = folder(args.model.as_deref())?;
    let config = rill::read_config(&folder)?;
    let tokenizer = rill::open_tokenizer(&folder, &config)?;
    Ok((config, tokenizer))
}

/// The whole model.
pub(crate) fn engine(model: &ModelArgs, engine: &EngineArgs) -> Result<Engine> {
    Ok(Engine::open(folder(model.model.as_deref())?, &options(engine))?)
}

pub(crate) fn options(args: &EngineArgs) -> EngineOptions {
    EngineOptions {
        threads: args.threads.into(),
        prefill_chunk: args.prefill_chunk.into(),
        kernels: match args.kernels {
            Kernels::Fastest => KernelChoice::Fastest,
            Kernels::Scalar => KernelChoice::Scalar,
        },
        ..EngineOptions::default()
    }
}
