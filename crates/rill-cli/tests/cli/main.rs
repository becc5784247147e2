//! The program as its users meet it: real processes, their output and their exit codes.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod bench;
mod broken;
#[cfg(target_os = "linux")]
mod ceiling;
mod common;
mod convert;
mod engine;
mod eval;
mod info;
mod kills;
mod mutations;
mod plan;
mod random;
mod run;
mod signals;
mod streams;
mod synth;
mod tokens;
mod trace;
mod usage;
