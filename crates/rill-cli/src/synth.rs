//! `rill synth`: a container of true shape and random weights.

use std::time::Instant;

use anyhow::Result;
use rill_convert::{
    Control, ConvertError, ExpertCodec, Synth, SynthFormat, SynthModel, SynthOptions,
};
use rill_format::container::Container;

use crate::args::{Format, Like, SynthArgs};
use crate::convert::{Meter, jobs};
use crate::output::{Outcome, bytes, interrupt_flag, note, print};

pub(crate) fn run(args: &SynthArgs) -> Result<Outcome> {
    // Kimi-Linear's experts as published are 14 MB each, four times what a container has for them.
    let (model, usual) = match args.like {
        Like::KimiK3 => (SynthModel::KimiK3, ExpertCodec::Source),
        Like::KimiLinear48b => (SynthModel::KimiLinear48b, ExpertCodec::Q4),
    };
    let format = match args.format {
        Format::Rill => SynthFormat::Rill,
        Format::Waste if args.experts.is_some() => crate::prompt::usage(
            "--experts is for .rill containers: .waste has one format for them",
        ),
        Format::Waste => SynthFormat::Waste,
    };
    if let Some(ExpertCodec::Mxfp4zThinned { .. }) = args.experts {
        crate::prompt::usage("random weights have no loss to choose by: take --experts mxfp4z");
    }
    let synth = Synth::new(
        model.config(),
        &SynthOptions {
            layers: args.layers,
            format,
            experts: args.experts.unwrap_or(usual),
            trunk: args.trunk,
            seed: args.seed,
        },
    )?;
    let Some(destination) = args.destination.as_ref().filter(|_| !args.estimate) else {
        print(format!(
            "container   {}\ntrunk       {}\nexperts     {} in {} records of {}{}\n",
            bytes(synth.container_bytes()),
            bytes(synth.trunk_bytes()),
            bytes(synth.expert_bytes()),
            synth.n_experts(),
            if synth.varies() { "up to " } else { "" },
            bytes(synth.record_bytes()),
        ))?;
        return Ok(Outcome::Done);
    };
    let interrupted = interrupt_flag()?;
    let meter = Meter::new(&interrupted);
    let start = Instant::now();
    let control = Control { jobs: jobs(args.jobs), progress: &|p| meter.tell(p) };
    let result = synth.write(destination, &control);
    meter.end();
    let folder = destination.display();
    match result {
        Err(ConvertError::Cancelled) => {
            note(&format!("rill: stopped; {folder} is no container, remove it"));
            return Ok(Outcome::Interrupted);
        }
        result => result?,
    }
    let seconds = start.elapsed().as_secs_f64();
    let rate = synth.container_bytes() as f64 / seconds / 1e9;
    let fingerprint = match args.format {
        Format::Rill => {
            let container = Container::open(destination.clone())?;
            format!(", fingerprint {}", container.manifest().fingerprint)
        }
        Format::Waste => String::new(),
    };
    let size = bytes(synth.container_bytes());
    print(format!("{folder}: {size} in {seconds:.1} s, {rate:.2} GB/s{fingerprint}\n"))?;
    Ok(Outcome::Done)
}
