//! `rill bench`: how fast a model runs, and what it computes with.

use std::ops::ControlFlow;
use std::sync::Arc;

use anyhow::Result;
use rill::{Engine, Error, ForcedRouting, LayerIdx, Logits, Observer, RunCounters, Session, Trace};
use serde_json::{Value, json};

use crate::args::{BenchArgs, BenchCommand, MeasureArgs};
use crate::model::{Model, Needs};
use crate::output::{Outcome, interrupt_flag, print};
use crate::progress::Progress;
use crate::stats;

mod kernels;
mod rest;
mod serve;

pub(crate) fn run(args: &BenchArgs) -> Result<Outcome> {
    let (measure, n_prompt, n_tokens) = match &args.command {
        BenchCommand::Kernels(args) => return kernels::run(args),
        BenchCommand::Serve(args) => return serve::run(args),
        BenchCommand::Decode(args) => (&args.measure, args.prompt as usize, args.tokens as usize),
        BenchCommand::Prefill(args) => (&args.measure, args.prompt as usize, 0),
    };
    let trace = measure.routing.as_deref().map(Trace::read).transpose()?.map(Arc::new);
    let model = Model::find(&measure.model)?;
    let mut engine_args = measure.engine.clone();
    if trace.is_some() {
        // The model's own router knows nothing of what the recording will choose.
        engine_args.lookahead.get_or_insert(0);
    }
    let forced = trace.clone().map(|trace| ForcedRouting::new(trace, &model.config)).transpose()?;
    let needs = Needs { context: n_prompt + n_tokens, logits: 1, sessions: 1 };
    let engine = model.open(&engine_args, needs)?;
    let progress = Progress::new(&model.config, false, interrupt_flag()?);
    let mut watch = Watch { forced, progress };

    let mut session = engine.new_session();
    let ids = arbitrary_ids(n_prompt + n_tokens, model.config.vocab_size);
    let (prompt, tokens) = ids.split_at(n_prompt);
    let mut before = engine.counters();
    if !prompt.is_empty() && !step(&engine, &mut session, prompt, &mut watch)? {
        return Ok(Outcome::Interrupted);
    }
    if n_tokens > 0 {
        before = engine.counters();
    }
    for id in tokens {
        if !step(&engine, &mut session, &[*id], &mut watch)? {
            return Ok(Outcome::Interrupted);
        }
    }
    show(measure, &engine, &engine.counters().since(&before))?;
    Ok(Outcome::Done)
}

/// Runs tokens; false when interrupted.
fn step(engine: &Engine, session: &mut Session, tokens: &[u32], watch: &mut Watch) -> Result<bool> {
    match engine.forward_observed(session, tokens, Logits::Last, watch) {
        Ok(_) => Ok(true),
        Err(Error::Cancelled) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn show(args: &MeasureArgs, engine: &Engine, counters: &RunCounters) -> Result<()> {
    if args.json {
        let mut facts = engine_facts(args, engine);
        facts["counters"] = stats::json(counters);
        return print(format!("{facts:#}\n"));
    }
    let pace = counters.pace();
    print(format!(
        "{} tokens in {:.2} s, {:.2} tokens/s; {} threads, {} kernels; waiting {:.0} % of the time\n{}\n{}\n",
        pace.tokens,
        pace.time.as_secs_f64(),
        pace.tokens_per_second(),
        engine.threads(),
        engine.kernels(),
        100.0 * counters.stall_share(),
        stats::lines(counters),
        stats::drive(&engine.drive()),
    ))
}

/// What was measured, for JSON.
fn engine_facts(args: &MeasureArgs, engine: &Engine) -> Value {
    json!({
        "source": engine.source_kind(),
        "threads": engine.threads(),
        "kernels": engine.kernels(),
        "budget_bytes": engine.plan().options.budget_bytes,
        "expert_slots": engine.plan().expert_slots,
        "forced_routing": args.routing.is_some(),
        "drive_probed_bytes_per_second": engine.drive().probed_bytes_per_second,
    })
}

/// Ids spread over the vocabulary, the same every time.
fn arbitrary_ids(n: usize, vocab_size: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (i * 7919 % vocab_size.max(1) as u64) as u32).collect()
}

/// Forces a step's experts, and shows how far it is.
struct Watch {
    forced: Option<ForcedRouting>,
    progress: Progress,
}

impl Observer for Watch {
    fn after_layer(&mut self, layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        self.progress.after_layer(layer, hidden)
    }

    fn choose(&mut self, layer: LayerIdx, ids: &mut [u32]) {
        if let Some(forced) = &mut self.forced {
            forced.choose(layer, ids);
        }
    }
}
