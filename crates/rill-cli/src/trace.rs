//! `rill trace`: recorded routing, and what it says about caches.

use std::sync::atomic::Ordering;

use anyhow::Result;
use rill::{GenerateOptions, RoutingRecorder};
use rill_stream::policy::{DecayedLfu, Lru, Scored};
use rill_stream::{Geometry, Policy, Report, Trace, optimal, replay};
use serde_json::json;

use crate::args::{CachePolicy, RecordArgs, ReplayArgs, TraceArgs, TraceCommand};
use crate::model::{Model, Needs};
use crate::output::{Outcome, interrupt_flag, print};
use crate::prompt;

pub(crate) fn run(args: &TraceArgs) -> Result<Outcome> {
    match &args.command {
        TraceCommand::Record(args) => record(args),
        TraceCommand::Replay(args) => show_replay(args),
    }
}

fn record(args: &RecordArgs) -> Result<Outcome> {
    let text = prompt::prompt(&args.text)?;
    let model = Model::find(&args.model)?;
    let text = model.tokenizer()?.encode_text_bytes(&text);
    let ids = [vec![model.config.bos_token_id], text].concat();
    let context = ids.len().saturating_add(args.max_tokens);
    let engine = model.open(&args.engine, Needs { context, logits: 1, sessions: 1 })?;
    let cancel = interrupt_flag()?;
    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        cancel: cancel.clone(),
        ..GenerateOptions::default()
    };
    let mut recorder = RoutingRecorder::new(&model.config);
    let mut session = engine.new_session();
    for token in engine.generate_observed(&mut session, &ids, options, Some(&mut recorder))? {
        token?;
    }
    if cancel.load(Ordering::Relaxed) {
        return Ok(Outcome::Interrupted);
    }
    let trace = recorder.trace()?;
    trace.write(&args.out, engine.source_kind())?;
    print(format!("{}: {} tokens\n", args.out.display(), trace.n_tokens()))?;
    Ok(Outcome::Done)
}

fn show_replay(args: &ReplayArgs) -> Result<Outcome> {
    let trace = Trace::read(&args.file)?;
    let Geometry { n_layers, n_experts } = trace.geometry();
    let n_records = trace.geometry().n_records();
    let sizes = if args.slots.is_empty() {
        args.share
            .iter()
            .map(|percent| (percent / 100.0 * n_records as f64).round() as usize)
            .collect()
    } else {
        args.slots.clone()
    };
    let policies = match args.cache {
        CachePolicy::All => vec![CachePolicy::Lru, CachePolicy::Lfu, CachePolicy::Scored],
        one => vec![one],
    };

    // A row for each size: what the policies do, then what foresight would.
    let rows = sizes.iter().map(|&slots| {
        let played = policies.iter().map(|&kind| {
            let mut policy = policy(kind, trace.geometry());
            (name(kind), replay(&trace, &mut *policy, slots))
        });
        played.chain([(FORESIGHT, optimal(&trace, slots))]).collect::<Vec<_>>()
    });

    if args.json {
        let rows: Vec<_> = rows.flatten().map(|(name, r)| row_json(name, &r)).collect();
        let all = json!({
            "n_tokens": trace.n_tokens(),
            "n_layers": n_layers,
            "n_experts": n_experts,
            "top_k": trace.top_k(),
            "replays": rows,
        });
        print(format!("{all}\n"))?;
        return Ok(Outcome::Done);
    }

    print(format!(
        "{} tokens, {n_layers} layers of {n_experts} experts, {} used in each\n\n",
        trace.n_tokens(),
        trace.top_k(),
    ))?;
    let names = policies.iter().map(|&kind| name(kind)).chain([FORESIGHT]);
    let heads = names.map(|name| format!("{name:>10}")).collect::<String>();
    print(format!("{:>8}{:>9}{heads}\n", "slots", "of all"))?;
    for row in rows {
        let slots = row[0].1.capacity;
        let share = 100.0 * slots as f64 / n_records as f64;
        let hits = row.iter().map(|(_, r)| format!("{:>8.1} %", 100.0 * r.hit_share()));
        print(format!("{slots:>8}{share:>7.1} %{}\n", hits.collect::<String>()))?;
    }
    print(
        "\nShares of uses that find their expert in a cache that starts empty. The last column is the\n\
         most that any policy could reach, by knowing the future.\n",
    )?;
    Ok(Outcome::Done)
}

fn row_json(policy: &str, report: &Report) -> serde_json::Value {
    let half = report.hits_by_token.len() / 2;
    json!({
        "policy": policy,
        "slots": report.capacity,
        "uses": report.n_uses,
        "distinct": report.n_distinct,
        "hits": report.hits(),
        "misses": report.misses(),
        "hit_share": report.hit_share(),
        "hit_share_second_half": report.hit_share_from(half),
        "hits_by_layer": report.hits_by_layer,
    })
}

fn policy(kind: CachePolicy, geometry: Geometry) -> Box<dyn Policy> {
    match kind {
        CachePolicy::Lru => Box::new(Lru::new(geometry)),
        CachePolicy::Lfu => Box::new(DecayedLfu::new(geometry)),
        CachePolicy::Scored | CachePolicy::All => Box::new(Scored::new(geometry)),
    }
}

fn name(kind: CachePolicy) -> &'static str {
    match kind {
        CachePolicy::Lru => "lru",
        CachePolicy::Lfu => "lfu",
        CachePolicy::Scored | CachePolicy::All => "scored",
    }
}

const FORESIGHT: &str = "foresight";
