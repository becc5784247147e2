//! `rill plan`: what a model takes, and what a budget costs in reads.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rill::plan::{Budget, Plan, PlanOptions, Recode, Sizes};
use rill::{EngineOptions, Folder};
use rill_convert::{ExpertCodec, TRELLIS_WIDTH, TrunkCodec};
use serde_json::{Map, json};

use crate::args::PlanArgs;
use crate::model;
use crate::output::{Outcome, bytes, print};

/// Budgets and contexts of the table: powers of 1,000 bytes, powers of two tokens.
const BUDGETS_GB: [u64; 7] = [4, 8, 16, 32, 64, 128, 256];
const CONTEXTS_K: [usize; 5] = [4, 16, 64, 256, 1024];
/// Largest configuration that makes sense.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

pub(crate) fn run(args: &PlanArgs) -> Result<Outcome> {
    let (name, sizes) = sizes(args)?;
    let usual = EngineOptions::default();
    let run = EngineOptions {
        context: args.ctx as usize,
        latents: args.latents.into(),
        threads: args.threads.into(),
        prefill_chunk: args.prefill_chunk.into(),
        lookahead: args.lookahead.map_or(usual.lookahead, usize::from),
        ..usual
    };
    let mut options = run.plan_options();
    if args.table {
        print(format!("{name}\n{}", table(&sizes, options)))?;
        return Ok(Outcome::Done);
    }
    let budget = Budget::new(args.budget);
    options.budget_bytes = budget.bytes();
    let plan = Plan::new(&sizes, options);
    if args.json {
        let (fits, shown) = match &plan {
            Ok(plan) => (true, plan),
            Err(rill::Error::BelowFloor { plan }) => (false, &**plan),
            Err(_) => return Err(plan.expect_err("matched above").into()),
        };
        print(format!("{:#}\n", facts(&name, fits, shown)))?;
        plan?;
        return Ok(Outcome::Done);
    }
    let plan = plan.with_context(|| format!("{name} with {budget}"))?;
    print(format!("{name}\nbudget            {budget}\n\n{plan}"))?;
    Ok(Outcome::Done)
}

/// The model's name and sizes.
fn sizes(args: &PlanArgs) -> Result<(String, Sizes)> {
    if let Some(path) = &args.config {
        let name = path.display().to_string();
        let experts = match args.experts {
            ExpertCodec::Source => Recode::Source,
            ExpertCodec::F32 => Recode::F32,
            ExpertCodec::Q8 => Recode::Q8,
            ExpertCodec::Q4 => Recode::Q4,
            ExpertCodec::Trellis { rate } => {
                Recode::Trellis { rate: rate.into(), width: TRELLIS_WIDTH as usize }
            }
            // At most, of those that are thinned.
            ExpertCodec::Mxfp4z | ExpertCodec::Mxfp4zThinned { .. } => Recode::Mxfp4z,
        };
        let trunk = match args.trunk {
            TrunkCodec::Source => Recode::Source,
            TrunkCodec::Q8 => Recode::Q8,
            TrunkCodec::Q4 => Recode::Q4,
            TrunkCodec::Trellis { rate } => {
                Recode::Trellis { rate: rate.into(), width: TRELLIS_WIDTH as usize }
            }
        };
        let sizes = Sizes::of_config(&read_config(path)?, name.clone(), experts, trunk)?;
        return Ok((name, sizes));
    }
    let folder = model::folder(args.path.as_deref())?;
    let name = match &folder {
        Folder::Disk(path) => path.display().to_string(),
        Folder::Memory { name, .. } => (*name).to_owned(),
    };
    Ok((name, Sizes::of_folder(folder)?))
}

fn read_config(path: &Path) -> Result<Vec<u8>> {
    let what = || format!("cannot read {}", path.display());
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(what)?;
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes).with_context(what)?;
    if bytes.len() as u64 > MAX_CONFIG_BYTES {
        bail!("{} is larger than any config.json; name that file", path.display());
    }
    Ok(bytes)
}

fn facts(name: &str, fits: bool, plan: &Plan) -> serde_json::Value {
    let shares = plan.shares.lines();
    let shares: Map<_, _> =
        shares.into_iter().map(|(name, bytes)| (name.to_owned(), bytes.into())).collect();
    json!({
        "model": name,
        "fits": fits,
        "budget_bytes": plan.options.budget_bytes,
        "context": plan.options.context,
        "latents": plan.options.latents.name(),
        "floor_bytes": plan.floor_bytes,
        "recommended_bytes": plan.recommended_bytes,
        "planned_bytes": plan.shares.total(),
        "shares": shares,
        "pinned_layers": plan.pinned.iter().filter(|pinned| **pinned).count(),
        "layers": plan.pinned.len(),
        "head_resident": plan.head_resident,
        "ring_slot_bytes": plan.ring_slot_bytes,
        "expert_slots": plan.expert_slots,
        "record_bytes": plan.record_bytes,
        "mean_record_bytes": plan.mean_record_bytes,
        "estimated": plan.estimated,
        "n_records": plan.n_records,
        "prefill_chunk": plan.prefill_chunk,
        "working_set_bytes": plan.working_set_bytes,
        "trunk_read_bytes_per_token": plan.trunk_read_bytes,
        "expert_read_bytes_per_token": plan.expert_read_bytes,
        "hit_share": plan.hit_share(),
        "disk_bytes": plan.disk_bytes,
    })
}

/// Bytes read per token for every budget and context that makes sense.
fn table(sizes: &Sizes, options: PlanOptions) -> String {
    let contexts: Vec<usize> =
        CONTEXTS_K.into_iter().filter(|k| k * 1024 <= sizes.max_context).collect();
    let plan = |budget_bytes: u64, k: usize| {
        Plan::new(sizes, PlanOptions { budget_bytes, context: k * 1024, ..options })
    };
    let row = |name: &str, cell: &dyn Fn(usize) -> String| {
        let cells: String = contexts.iter().map(|&k| format!("{:>12}", cell(k))).collect();
        format!("{name:<14}{cells}\n")
    };
    let mut text = "bytes read per token, by budget and context (- does not fit)\n".to_owned();
    text += &row("context", &|k| if k < 1024 { format!("{k}K") } else { format!("{}M", k / 1024) });
    for gb in BUDGETS_GB {
        text += &row(&format!("{gb} GB"), &|k| match plan(gb * 1_000_000_000, k) {
            Ok(plan) => bytes(plan.bytes_per_token()),
            Err(_) => "-".to_owned(),
        });
    }
    let edge = |k: usize| match plan(0, k) {
        Err(rill::Error::BelowFloor { plan }) => Some(plan),
        _ => None,
    };
    let of = |f: fn(&Plan) -> u64| move |k| edge(k).map_or_else(String::new, |p| bytes(f(&p)));
    text += &row("floor", &of(|plan| plan.floor_bytes));
    text += &row("recommended", &of(|plan| plan.recommended_bytes));
    text
}
