//! `rill bench serve`: what several sessions get together.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use anyhow::{Result, ensure};
use rill::{
    Engine, Event, ForcedRouting, GenerateOptions, Request, RunCounters, Scheduler,
    SchedulerOptions, Trace,
};
use serde_json::json;

use super::{arbitrary_ids, engine_facts};
use crate::args::ServeArgs;
use crate::model::{Model, Needs};
use crate::output::{Outcome, interrupt_flag, print};
use crate::stats;

pub(crate) fn run(args: &ServeArgs) -> Result<Outcome> {
    let measure = &args.measure;
    let trace = measure.routing.as_deref().map(Trace::read).transpose()?.map(Arc::new);
    let model = Model::find(&measure.model)?;
    let most = args.sessions.iter().copied().max().unwrap_or(1).into();
    let mut engine_args = measure.engine.clone();
    if trace.is_some() {
        // The model's own router knows nothing of what the recording will choose.
        engine_args.lookahead.get_or_insert(0);
    }
    let written = (args.warm + args.tokens) as usize;
    let needs = Needs { context: 1 + written, logits: 1, sessions: most };
    let opened = model.open(&engine_args, needs)?;
    let engine = opened.shared();
    let interrupted = interrupt_flag()?;

    let mut rows = Vec::new();
    for &sessions in &args.sessions {
        let n_sessions = usize::from(sessions);
        let measured = measure_sessions(args, &engine, trace.as_ref(), n_sessions, &interrupted)?;
        let Some(counters) = measured else { return Ok(Outcome::Interrupted) };
        rows.push((sessions, counters));
    }
    match measure.json {
        true => show_json(args, &engine, &rows)?,
        false => show(&engine, &rows)?,
    }
    Ok(Outcome::Done)
}

/// What so many sessions took while all of them were writing; nothing when interrupted.
fn measure_sessions(
    args: &ServeArgs,
    engine: &Arc<Engine>,
    trace: Option<&Arc<Trace>>,
    sessions: usize,
    interrupted: &Arc<AtomicBool>,
) -> Result<Option<RunCounters>> {
    // All of them write as soon as they have come.
    let options =
        SchedulerOptions { queue: sessions, prefill_share: 1.0, ..SchedulerOptions::default() };
    let scheduler = Scheduler::new(engine.clone(), &options)?;
    let meter = Arc::new(Mutex::new(Meter { cold: sessions, counters: [None; 2] }));
    let (end, ends) = mpsc::channel();
    // The first is held until the others have come, so that they begin together.
    let (go, gate) = mpsc::channel::<()>();
    let mut gate = Some(gate);
    let ids = arbitrary_ids(sessions, engine.config().vocab_size);
    for (i, &id) in ids.iter().enumerate() {
        let options = GenerateOptions {
            max_tokens: (args.warm + args.tokens) as usize,
            stop_tokens: Some(Vec::new()),
            ..GenerateOptions::default()
        };
        let mut request = Request::new(engine.new_session(), vec![id], options);
        if let Some(trace) = trace {
            // Strangers: each has another stretch of the recording.
            let start = i * trace.n_tokens() / sessions;
            let forced = ForcedRouting::new(trace.clone(), engine.config())?.starting_at(start);
            request.observer = Some(Box::new(forced));
        }
        let (meter, engine, end) = (meter.clone(), engine.clone(), end.clone());
        let (interrupted, gate) = (interrupted.clone(), gate.take());
        let (mut written, warm, all) = (0, args.warm, args.warm + args.tokens);
        scheduler.submit_with(request, move |event| {
            match event {
                Event::Token(_) => {
                    written += 1;
                    // Between two steps, because it is the thread that takes them.
                    let mut meter = meter.lock().unwrap_or_else(PoisonError::into_inner);
                    meter.count(written, warm, all, &engine);
                }
                Event::Ended(ended) => {
                    let _ = end.send(ended.outcome.map(drop));
                }
                Event::Prefilled { .. } => {
                    // Ends when the other side is dropped.
                    if let Some(gate) = &gate {
                        let _ = gate.recv();
                    }
                }
            }
            match interrupted.load(Ordering::Relaxed) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })?;
    }
    drop((go, end));
    for outcome in ends {
        outcome?;
    }
    let meter = meter.lock().unwrap_or_else(PoisonError::into_inner);
    match meter.counters {
        _ if interrupted.load(Ordering::Relaxed) => Ok(None),
        [Some(before), Some(after)] => {
            let counters = after.since(&before);
            ensure!(
                counters.decode.tokens > 0,
                "the first session had ended before the last was warm; raise --tokens"
            );
            Ok(Some(counters))
        }
        _ => Ok(None),
    }
}

/// Notes the engine's counters when the last session is warm, and when the first one ends.
struct Meter {
    /// Sessions that are not warm yet.
    cold: usize,
    counters: [Option<RunCounters>; 2],
}

impl Meter {
    fn count(&mut self, written: u32, warm: u32, all: u32, engine: &Engine) {
        // The first token comes from the prompt: the step after it is the first that only writes.
        if written == warm.max(1) {
            self.cold -= 1;
            if self.cold == 0 {
                self.counters[0] = Some(engine.counters());
            }
        }
        if written == all {
            self.counters[1].get_or_insert_with(|| engine.counters());
        }
    }
}

/// Tokens a second of all sessions together, and bytes read for each: trunk and experts.
fn rates(counters: &RunCounters) -> (f64, f64, f64) {
    let pace = counters.pace();
    let tokens = pace.tokens.max(1) as f64;
    let experts = counters.experts.demanded_bytes
        + counters.experts.ahead_useful_bytes
        + counters.experts.ahead_wasted_bytes;
    (
        pace.tokens_per_second(),
        counters.trunk.streamed_bytes as f64 / tokens,
        experts as f64 / tokens,
    )
}

fn show(engine: &Engine, rows: &[(u16, RunCounters)]) -> Result<()> {
    let mut text = format!(
        "{} threads, {} kernels, pieces of {} tokens\n\
         sessions  tokens/s  times one  a session  MB/token: trunk  experts  GB/s  waiting\n",
        engine.threads(),
        engine.kernels(),
        engine.plan().prefill_chunk,
    );
    // Of the fewest sessions, and of their last row if there are several: the first finds nothing read.
    let fewest = rows.iter().rev().min_by_key(|(sessions, _)| *sessions);
    let one = fewest.map_or(0.0, |(sessions, counters)| {
        counters.pace().tokens_per_second() / f64::from(*sessions)
    });
    for (sessions, counters) in rows {
        let (speed, trunk, experts) = rates(counters);
        text += &format!(
            "{sessions:>8}  {speed:>8.2}  {:>9.2}  {:>9.3}  {:>15.1}  {:>7.1}  {:>4.2}  {:>5.0} %\n",
            speed / one,
            speed / f64::from(*sessions),
            trunk / 1e6,
            experts / 1e6,
            speed * (trunk + experts) / 1e9,
            100.0 * counters.stall_share(),
        );
    }
    print(text + &stats::drive(&engine.drive()) + "\n")
}

fn show_json(args: &ServeArgs, engine: &Engine, rows: &[(u16, RunCounters)]) -> Result<()> {
    let results: Vec<_> = rows
        .iter()
        .map(|(sessions, counters)| {
            let (speed, trunk, experts) = rates(counters);
            json!({
                "sessions": sessions,
                "tokens_per_second": speed,
                "trunk_bytes_per_token": trunk,
                "expert_bytes_per_token": experts,
                "stall_share": counters.stall_share(),
                "counters": stats::json(counters),
            })
        })
        .collect();
    let mut facts = engine_facts(&args.measure, engine);
    facts["results"] = results.into();
    print(format!("{facts:#}\n"))
}
