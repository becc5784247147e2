//! `rill eval`: what the model expects next.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result};
use rill::{Comparison, Engine, Error, Logits, Perplexity, RunCounters, Tokenizer, likelier_first};
use serde_json::json;

use crate::args::{EngineArgs, EvalArgs, LatentChoice, ModelArgs};
use crate::model::{Model, Needs};
use crate::output::{Outcome, interrupt_flag, print, write_file};
use crate::progress::Progress;
use crate::{prompt, stats};

/// Positions whose logits are computed and written at a time.
const POSITIONS: usize = 64;

pub(crate) fn run(args: &EvalArgs) -> Result<Outcome> {
    if let Some(path) = &args.perplexity {
        return perplexity(args, path);
    }
    let text = match args.ids {
        Some(_) => None,
        None => Some(prompt::prompt(&args.text)?),
    };
    let model = Model::find(&args.model)?;
    // Ids need no tokenizer, so a checkpoint without one can be evaluated by them.
    let tokenizer = match &text {
        Some(_) => Some(model.tokenizer()?),
        None => model.tokenizer().ok(),
    };
    let ids = match (&args.ids, &text, &tokenizer) {
        (None, Some(text), Some(tokenizer)) => {
            [vec![model.config.bos_token_id], tokenizer.encode_text_bytes(text)].concat()
        }
        (ids, ..) => ids.clone().unwrap_or_default(),
    };
    let logits = if args.dump_logits.is_some() { ids.len().min(POSITIONS) } else { 1 };
    let engine = model.open(&args.engine, Needs { context: ids.len(), logits, sessions: 1 })?;
    let last = match &args.dump_logits {
        None => engine.forward(&mut engine.new_session(), &ids, Logits::Last)?,
        Some(path) => match dump(&engine, &ids, path)? {
            Some(last) => last,
            None => return Ok(Outcome::Interrupted),
        },
    };
    show(args, &ids, &last, tokenizer.as_ref(), &engine.counters())?;
    Ok(Outcome::Done)
}

/// Writes the logits of all positions to a file, a few at a time, and returns the last
/// position's; `None` when interrupted, with no file written.
fn dump(engine: &Engine, ids: &[u32], path: &Path) -> Result<Option<Vec<f32>>> {
    let (vocab, max_positions) = (engine.config().vocab_size, engine.plan().options.context);
    // The engine will see only parts of the text: what is wrong with the whole is noticed here.
    if let Some(position) = ids.iter().position(|&id| id as usize >= vocab) {
        let token = ids[position];
        return Err(Error::TokenOutOfRange { token, position, vocab_size: vocab }.into());
    }
    if ids.len() > max_positions {
        return Err(Error::ContextFull { positions: ids.len(), max_positions }.into());
    }
    let mut progress = Progress::new(engine.config(), false, interrupt_flag()?);
    let mut last = Vec::new();
    let outcome = write_file(path, |out| {
        write_header(out, ids.len(), vocab)?;
        for id in ids {
            out.write_all(&id.to_le_bytes())?;
        }
        let mut session = engine.new_session();
        for chunk in ids.chunks(POSITIONS) {
            let forward = engine.forward_observed(&mut session, chunk, Logits::All, &mut progress);
            let logits = match forward {
                Err(Error::Cancelled) => return Ok(Outcome::Interrupted),
                logits => logits?,
            };
            let bytes: Vec<u8> = logits.iter().flat_map(|l| l.to_le_bytes()).collect();
            out.write_all(&bytes)?;
            last = logits[logits.len() - vocab..].to_vec();
        }
        Ok(Outcome::Done)
    })?;
    Ok((outcome == Outcome::Done).then_some(last))
}

/// The header of a safetensors file with `input_ids` (n) and `logits` (n, vocab), data in that
/// order. Written by hand so that the logits of a long text need not fit in memory.
fn write_header(out: &mut dyn Write, n: usize, vocab: usize) -> Result<()> {
    let ids = 4 * n;
    let end = ids + 4 * n * vocab;
    let header = json!({
        "input_ids": { "dtype": "I32", "shape": [n], "data_offsets": [0, ids] },
        "logits": { "dtype": "F32", "shape": [n, vocab], "data_offsets": [ids, end] },
    });
    let mut header = header.to_string();
    // Data starts aligned.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    Ok(())
}

fn show(
    args: &EvalArgs,
    ids: &[u32],
    logits: &[f32],
    tokenizer: Option<&Tokenizer>,
    counters: &RunCounters,
) -> Result<()> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |l: f32| f64::from(l - max).exp();
    let total: f64 = logits.iter().map(|&l| weight(l)).sum();
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| likelier_first(logits, a, b));
    let text = |id| {
        let bytes = tokenizer.and_then(|t| t.token_bytes(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    let rows = order.iter().take(args.top).map(|&id| {
        let logit = logits[id as usize];
        (id, text(id), logit, weight(logit) / total)
    });
    if args.json {
        let top: Vec<_> = rows
            .map(|(id, text, logit, probability)| {
                json!({ "id": id, "text": text, "logit": logit, "probability": probability })
            })
            .collect();
        let counters = stats::json(counters);
        let all = json!({ "input_ids": ids, "next": top, "counters": counters });
        return print(format!("{all}\n"));
    }
    let mut table = format!("{:>8} {:>11} {:>9}  token\n", "id", "probability", "logit");
    for (id, text, logit, probability) in rows {
        table.push_str(&format!("{id:>8} {probability:>11.6} {logit:>9.4}  {text:?}\n"));
    }
    print(table)
}

fn perplexity(args: &EvalArgs, path: &Path) -> Result<Outcome> {
    let text = prompt::file(path)?;
    let model = Model::find(&args.model)?;
    let ids = model.tokenizer()?.encode_text_bytes(&text);
    let context = args.window as usize;
    let needs = Needs { context, logits: context.min(Perplexity::POSITIONS), sessions: 1 };
    let engine = model.open(&args.engine, needs)?;
    let show_progress = io::stderr().is_terminal();
    let mut progress = |done: usize, all: usize| {
        if show_progress {
            let end = if done == all { "\n" } else { "" };
            let _ = write!(io::stderr(), "\rwindow {done} of {all}{end}");
        }
        ControlFlow::Continue(())
    };
    if let Some(against) = &args.against {
        let reference = Model::find(&ModelArgs { model: Some(against.clone()) })?;
        // What is compared with is as exact as it can be.
        let exact = EngineArgs { latents: LatentChoice::F32, ..args.engine.clone() };
        let reference = reference.open(&exact, needs)?;
        let compared = engine.compare(&reference, &ids, context, &mut progress);
        let compared = compared.with_context(|| path.display().to_string())?;
        print(comparison(args, &compared))?;
        return Ok(Outcome::Done);
    }
    let result = engine.perplexity(&ids, context, &mut progress);
    if let Err(error @ Error::TextTooShort { .. }) = result {
        return Err(error).with_context(|| path.display().to_string());
    }
    let result = result?;
    let (perplexity, tokens, windows) = (result.perplexity, result.tokens, result.windows);
    if args.json {
        let counters = stats::json(&engine.counters());
        let result = json!({
            "perplexity": perplexity,
            "tokens": tokens,
            "windows": windows,
            "counters": counters,
        });
        print(format!("{result}\n"))?;
    } else {
        print(format!("perplexity {perplexity:.4} over {tokens} tokens in {windows} windows\n"))?;
    }
    Ok(Outcome::Done)
}

fn comparison(args: &EvalArgs, found: &Comparison) -> String {
    let Perplexity { perplexity, tokens, windows } = found.perplexity;
    if args.json {
        let result = json!({
            "perplexity": perplexity,
            "reference_perplexity": found.reference_perplexity,
            "kl_divergence": found.kl_divergence,
            "agreement": found.agreement,
            "layer_errors": found.layer_errors,
            "tokens": tokens,
            "windows": windows,
        });
        return format!("{result}\n");
    }
    let mut text = format!(
        "perplexity {perplexity:.4}, {:.4} of the other model, over {tokens} tokens in {windows} windows\n\
         divergence {:.6} nats a token, the same token likeliest {:.2} % of the time\n\n\
         layer     error of its output\n",
        found.reference_perplexity,
        found.kl_divergence,
        100.0 * found.agreement,
    );
    for (layer, error) in found.layer_errors.iter().enumerate() {
        text.push_str(&format!("{layer:>5}  {error:>10.6}\n"));
    }
    text
}
