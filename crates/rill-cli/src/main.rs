//! The `rill` program: a client of the library like any other.

mod args;
mod bench;
mod bundle;
mod convert;
mod eval;
mod info;
mod model;
mod output;
mod plan;
mod progress;
mod prompt;
mod run;
mod selftest;
mod stats;
mod synth;
mod tokens;
mod trace;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};
use output::Outcome;

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Tokenize(args) => tokens::tokenize(&args),
        Command::Detokenize(args) => tokens::detokenize(&args),
        Command::Info(args) => info::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Selftest(args) => selftest::run(&args),
        Command::Convert(args) => convert::convert(&args),
        Command::Verify(args) => convert::verify(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Bench(args) => bench::run(&args),
    };
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Interrupted) => ExitCode::from(130),
        Err(error) if output::reader_went_away(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("rill: {}", message(&error)));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, less those that the text before them has already told: the library's
/// messages are whole sentences that contain their source.
fn message(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
