//! The long forms of three tests, for `.ci/soak`:
//!
//! ```sh
//! cargo run --release -p rill-cli --example soak -- target/release/rill kill-convert 100
//! cargo run --release -p rill-cli --example soak -- target/release/rill kill-reclaim 100
//! cargo run --release -p rill-cli --example soak -- target/release/rill container-mutations 5000
//! ```

#[path = "../tests/cli/kills.rs"]
mod kills;
#[path = "../tests/cli/mutations.rs"]
mod mutations;
#[path = "../tests/cli/random.rs"]
mod random;

use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [rill, step, count] = &args[..] else { return usage() };
    let Ok(count) = count.parse() else { return usage() };
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let rill = Path::new(rill);
    // Other places every time; a failure names its seed.
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
    let found = match step.as_str() {
        "kill-convert" | "kill-reclaim" => {
            let (reclaim, nano) = (step == "kill-reclaim", repository.join("models/k3-nano"));
            // Records of one size, then records that lie behind one another.
            let half = |experts, count| {
                kills::kill_and_resume(rill, &nano, count, seed, experts, reclaim)
                    .map(|kills| format!("{experts} {kills:?}"))
            };
            half("q8", count - count / 2)
                .and_then(|first| Ok(format!("{first}, {}", half("mxfp4z", count / 2)?)))
        }
        "container-mutations" => {
            mutations::mutate(rill, &repository.join("fixtures/k3-tiny"), count, seed)
                .map(|mutations| format!("{mutations:?}"))
        }
        _ => return usage(),
    };
    match found {
        Ok(found) => {
            println!("{found}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: soak RILL kill-convert|kill-reclaim|container-mutations COUNT");
    ExitCode::from(2)
}
