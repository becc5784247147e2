//! What a run has read and waited for, in words and as JSON.

use rill::{Bound, DirectReads, DriveReport, Pace, RunCounters};
use serde_json::{Value, json};

use crate::output::bytes;

/// Two lines.
pub(crate) fn lines(counters: &RunCounters) -> String {
    let experts = &counters.experts;
    let percent = |n: u64| 100.0 * n as f64 / experts.wanted.max(1) as f64;
    let bound = match counters.bound() {
        Some(Bound::Disk) => "the disk",
        Some(Bound::Arithmetic) => "arithmetic",
        None => "nothing yet",
    };
    format!(
        "read {:.3} MB/token at {:.2} GB/s: {} of the trunk, {} of experts, {} ahead of time, {} in \
         vain, {} beforehand\nexperts {:.0} % resident, {:.0} % still there, {:.0} % read ahead; waited {:.2} s of \
         {:.2} s for the disk, bound by {bound}; opened in {:.2} s",
        counters.bytes_per_token() / 1e6,
        counters.drive_bytes_per_second() / 1e9,
        bytes(counters.trunk.streamed_bytes),
        bytes(experts.demanded_bytes),
        bytes(experts.ahead_useful_bytes),
        bytes(experts.ahead_wasted_bytes),
        bytes(experts.preloaded_bytes),
        percent(experts.hits),
        percent(experts.lucky),
        percent(experts.ahead_useful),
        counters.stall().as_secs_f64(),
        counters.pace().time.as_secs_f64(),
        counters.open.as_secs_f64(),
    )
}

/// How the drive is read and how fast it is.
pub(crate) fn drive(drive: &DriveReport) -> String {
    let how = match &drive.direct {
        DirectReads::Yes => "past the page cache".to_owned(),
        DirectReads::InMemory => return "everything is built into the program".to_owned(),
        DirectReads::Off => "through the page cache, as asked".to_owned(),
        DirectReads::Refused { file, reason } => {
            format!("through the page cache, because {file} cannot be read past it: {reason}")
        }
    };
    let speed = match drive.probed_bytes_per_second {
        Some(speed) => format!("{:.2} GB/s when probed", speed / 1e9),
        None => "not probed".to_owned(),
    };
    let slow = if drive.is_slow { "; everything will wait for it" } else { "" };
    format!(
        "drive {speed}{slow}, {} readers, pieces of {}, {how}",
        drive.readers,
        bytes(drive.piece_bytes as u64),
    )
}

/// What a user should know of the drive without asking.
pub(crate) fn drive_problem(report: &DriveReport) -> Option<String> {
    let refused = matches!(report.direct, DirectReads::Refused { .. });
    (report.is_slow || refused).then(|| drive(report))
}

/// The counters for programs; `docs/performance.md` has the keys.
pub(crate) fn json(counters: &RunCounters) -> Value {
    let RunCounters { open, prefill, decode, trunk, experts, reads } = counters;
    let pace = |pace: &Pace| {
        json!({
            "tokens": pace.tokens,
            "seconds": pace.time.as_secs_f64(),
            "tokens_per_second": pace.tokens_per_second(),
        })
    };
    json!({
        "open_seconds": open.as_secs_f64(),
        "prefill": pace(prefill),
        "decode": pace(decode),
        "bytes_per_token": counters.bytes_per_token(),
        "read_bytes": {
            "trunk": trunk.streamed_bytes,
            "experts_demanded": experts.demanded_bytes,
            "experts_ahead_useful": experts.ahead_useful_bytes,
            "experts_ahead_wasted": experts.ahead_wasted_bytes,
            "experts_preloaded": experts.preloaded_bytes,
        },
        "experts": {
            "wanted": experts.wanted,
            "resident": experts.hits,
            "lucky": experts.lucky,
            "ahead": experts.ahead_useful,
            "demanded": experts.demanded,
        },
        "stall_seconds": {
            "trunk": trunk.stall.as_secs_f64(),
            "experts": experts.stall.as_secs_f64(),
        },
        "stall_share": counters.stall_share(),
        "drive": {
            "bytes": reads.bytes,
            "busy_seconds": reads.busy.as_secs_f64(),
            "bytes_per_second": counters.drive_bytes_per_second(),
        },
        "bound": counters.bound().map(|bound| match bound {
            Bound::Disk => "disk",
            Bound::Arithmetic => "arithmetic",
        }),
    })
}
