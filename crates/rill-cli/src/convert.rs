//! `rill convert` and `rill verify`.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rill::Checkpoint;
use rill_convert::{
    Control, ConvertError, ConvertSource, Deletion, FirstLayers, LayerError, Plan, Progress,
    Quality, Reclaim, TrunkCodec, WeightError, deletions, differing_files, open_checkpoint,
    weight_errors,
};
use rill_format::Waste;
use rill_format::container::Container;
use serde_json::json;

use crate::args::{self, ConvertArgs, VerifyArgs, When};
use crate::model;
use crate::output::{Outcome, bytes, interrupt_flag, note, print, status};

pub(crate) fn convert(args: &ConvertArgs) -> Result<Outcome> {
    let source = Source::open(&args.source, args.destination.as_deref())?;
    // A container of a model that cannot be run would be found out hours later. When shards have
    // been deleted, this has been looked at.
    let about = match source.is_whole() {
        true => Some(rill::describe(model::folder(Some(&args.source))?)?),
        false => None,
    };
    let cut = args.layers.map(|layers| FirstLayers::new(source.get(), layers)).transpose()?;
    let model = cut.as_ref().map_or(source.get(), |cut| cut);
    let (experts, trunk) = match args.quality {
        None => (args.experts, TrunkCodec::Source),
        Some(asked) => quality(asked).codecs(model)?,
    };
    let plan = Plan::new(model, experts, args.trunk.unwrap_or(trunk))?.spread(&args.spread)?;
    if args.estimate {
        let at_most = if plan.is_upper_bound() { "at most " } else { "" };
        print(format!(
            "container   {at_most}{}\ntrunk       {}\nexperts     {at_most}{} in {} records of {at_most}{}\nsource      {}\n",
            bytes(plan.container_bytes()),
            bytes(plan.trunk_bytes()),
            bytes(plan.expert_bytes()),
            plan.n_experts(),
            bytes(plan.record_bytes()),
            about.map_or_else(String::new, |about| bytes(about.payload_bytes)),
        ))?;
        return Ok(Outcome::Done);
    }
    let Some(destination) = &args.destination else {
        crate::prompt::usage("name the folder to write to, or ask for an --estimate");
    };
    let reclaim = match (&source, args.reclaim) {
        (_, None) => None,
        (Source::Checkpoint(checkpoint), Some(when)) => {
            Some((checkpoint, Reclaim::new(checkpoint, args.trust_source)?, when))
        }
        (Source::Container(_) | Source::Waste(_), Some(_)) => bail!(
            "{} is a container; --reclaim deletes the shards of published checkpoints only",
            args.source.display()
        ),
    };
    if let Some((checkpoint, reclaim, When::Dry)) = &reclaim {
        print(schedule(&deletions(checkpoint, &plan, reclaim), plan.container_bytes()))?;
        return Ok(Outcome::Done);
    }
    let interrupted = interrupt_flag()?;
    let meter = Meter::new(&interrupted);
    let control = Control { jobs: jobs(args.jobs), progress: &|p| meter.tell(p) };
    let result = match &reclaim {
        Some((checkpoint, reclaim, _)) => {
            rill_convert::convert_and_reclaim(checkpoint, &plan, destination, &control, reclaim)
                .map(Some)
        }
        None => rill_convert::convert(model, &plan, destination, &control).map(|()| None),
    };
    meter.end();
    let reclaimed = match result {
        Err(ConvertError::Cancelled) => {
            note("rill: stopped; the same command goes on where it stopped");
            return Ok(Outcome::Interrupted);
        }
        result => result?,
    };
    let fingerprint = Container::open(destination.clone())?.manifest().fingerprint.clone();
    let reclaimed = reclaimed.map_or_else(String::new, |r| {
        format!("deleted {} shards of {}, {}\n", r.files, args.source.display(), bytes(r.bytes))
    });
    print(format!(
        "{}: {}, fingerprint {fingerprint}\n{reclaimed}",
        destination.display(),
        bytes(plan.container_bytes())
    ))?;
    Ok(Outcome::Done)
}

/// What would be deleted, and after how much has been written.
fn schedule(deletions: &[Deletion], container_bytes: u64) -> String {
    let total = bytes(container_bytes);
    let line = |d: &Deletion| {
        let after = format!("after {} of {total}", bytes(d.written_bytes));
        format!("{}  {:>10}  {after}\n", d.file, bytes(d.bytes))
    };
    let mut text: String = deletions.iter().map(line).collect();
    let freed = bytes(deletions.iter().map(|d| d.bytes).sum());
    text.push_str(&format!("{freed} would be deleted; nothing was written or deleted\n"));
    text
}

pub(crate) fn verify(args: &VerifyArgs) -> Result<Outcome> {
    // Says so when it is no folder at all.
    model::folder(Some(&args.path))?;
    let container = Container::open(args.path.clone())?;
    // A source that is not there would be found out hours later.
    let source = args.source.as_deref().map(|path| Source::open(path, None)).transpose()?;
    let interrupted = interrupt_flag()?;
    let meter = Meter::new(&interrupted);
    let control = Control { jobs: jobs(args.jobs), progress: &|p| meter.tell(p) };
    let compare = |source: Source| {
        // A container of a model's first layers is compared with these.
        let cut = FirstLayers::as_many_as(&container, source.get())?;
        let source = cut.as_ref().map_or(source.get(), |cut| cut);
        let files = differing_files(&container, source)?;
        Ok((files, weight_errors(&container, source, &control)?))
    };
    let result =
        rill_convert::verify(&container, &control).and_then(|()| source.map(compare).transpose());
    meter.end();
    let compared = match result {
        Err(ConvertError::Cancelled) => return Ok(Outcome::Interrupted),
        result => result?,
    };
    let fingerprint = &container.manifest().fingerprint;
    let (files, errors) = compared.unzip();
    if args.json {
        let errors: Option<Vec<_>> = errors.map(|errors| errors.iter().map(to_json).collect());
        let found = json!({
            "fingerprint": fingerprint,
            "differing_files": files,
            "weight_errors": errors,
        });
        print(format!("{found:#}\n"))?;
        return Ok(Outcome::Done);
    }
    let mut text =
        format!("{}: every byte is as written, fingerprint {fingerprint}\n", args.path.display());
    for file in files.iter().flatten() {
        text.push_str(&format!("{file} is not the source's\n"));
    }
    if let Some(errors) = errors {
        text.push_str(&table(&errors));
    }
    print(text)?;
    Ok(Outcome::Done)
}

/// What is converted, or compared with.
enum Source {
    Checkpoint(Checkpoint),
    Container(Box<Container>),
    Waste(Box<Waste>),
}

impl Source {
    /// Opens whatever a folder holds. A conversion into `destination` may have deleted shards of it.
    fn open(path: &Path, destination: Option<&Path>) -> Result<Self> {
        let folder = model::folder(Some(path))?;
        if Container::is_container(path) {
            return Ok(Self::Container(Box::new(Container::open(path.to_owned())?)));
        }
        if Waste::is_waste(path) {
            return Ok(Self::Waste(Box::new(Waste::open(path.to_owned())?)));
        }
        Ok(Self::Checkpoint(match destination {
            Some(destination) => open_checkpoint(folder, destination)?,
            None => Checkpoint::open(folder)?,
        }))
    }

    fn get(&self) -> &dyn ConvertSource {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint,
            Self::Container(container) => &**container,
            Self::Waste(waste) => &**waste,
        }
    }

    fn is_whole(&self) -> bool {
        match self {
            Self::Checkpoint(c) => c.shards().all(|shard| c.folder().exists(shard)),
            Self::Container(_) | Self::Waste(_) => true,
        }
    }
}

/// Classes with the mean and the largest relative error of their tensors.
fn table(errors: &[WeightError]) -> String {
    // Exactly 0 is another thing than a little.
    let number = |x: f64| if x == 0.0 { "0".to_owned() } else { format!("{x:.6}") };
    let mut text = "\nrelative error of weights, tensor by tensor\n".to_owned();
    text.push_str("     mean     worst  tensors  class, format\n");
    for error in errors {
        text.push_str(&format!(
            "{:>9} {:>9} {:>8}  {}, {}\n",
            number(error.mean),
            number(error.worst),
            error.tensors,
            error.class,
            error.format
        ));
    }
    text
}

fn to_json(error: &WeightError) -> serde_json::Value {
    json!({
        "class": error.class,
        "format": error.format,
        "experts": error.experts,
        "tensors": error.tensors,
        "weights": error.weights,
        // JSON has no infinity; it becomes null.
        "mean": error.mean,
        "worst": error.worst,
        "worst_tensor": error.worst_tensor,
    })
}

fn quality(asked: args::Quality) -> Quality {
    match asked {
        args::Quality::Lossless => Quality::Lossless,
        args::Quality::High => Quality::High,
        args::Quality::Standard => Quality::Standard,
        args::Quality::Small => Quality::Small,
    }
}

pub(crate) fn jobs(asked: u16) -> usize {
    match asked {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n.into(),
    }
}

/// One line on standard error, renewed now and then, if a person may be looking.
pub(crate) struct Meter<'a> {
    interrupted: &'a AtomicBool,
    start: Instant,
    shown: bool,
    last: Mutex<Instant>,
}

/// Time between two looks at the meter.
const INTERVAL: Duration = Duration::from_millis(250);

impl<'a> Meter<'a> {
    pub(crate) fn new(interrupted: &'a AtomicBool) -> Self {
        let start = Instant::now();
        let shown = std::io::stderr().is_terminal();
        Self { interrupted, start, shown, last: Mutex::new(start) }
    }

    pub(crate) fn tell(&self, progress: Progress) -> ControlFlow<()> {
        if self.interrupted.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        if let Some(LayerError { layer, experts, error }) = progress.layer {
            let clear = if self.shown { format!("\r{:70}\r", "") } else { String::new() };
            let error = 100.0 * error;
            let of = if experts == 1 { "expert" } else { "experts" };
            note(&format!("{clear}layer {layer}: error of {experts} {of} {error:.2} %"));
        }
        if self.shown
            && let Ok(mut last) = self.last.try_lock()
            && last.elapsed() >= INTERVAL
        {
            *last = Instant::now();
            let seconds = self.start.elapsed().as_secs_f64();
            let done = (progress.done_bytes - progress.resumed_bytes) as f64;
            let rate = done / seconds;
            let left = (progress.total_bytes - progress.done_bytes) as f64 / rate.max(1.0);
            status(&format!(
                "\r{} of {}, {:.2} GB/s, {}:{:02}:{:02} left   ",
                bytes(progress.done_bytes),
                bytes(progress.total_bytes),
                rate / 1e9,
                left as u64 / 3600,
                left as u64 / 60 % 60,
                left as u64 % 60,
            ));
        }
        ControlFlow::Continue(())
    }

    /// Clears the line.
    pub(crate) fn end(&self) {
        if self.shown {
            status(&format!("\r{:70}\r", ""));
        }
    }
}
