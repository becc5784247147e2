//! Conversions killed at random moments and run again, as a real process. Also what
//! `examples/soak.rs` does, for longer.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::random::Random;

/// When the kills came.
#[derive(Debug, Default)]
pub(crate) struct Kills {
    /// Before the destination had a note of the conversion.
    pub(crate) early: usize,
    /// While it was being written.
    pub(crate) midway: usize,
    /// When the manifest was in place, or the process had ended.
    pub(crate) late: usize,
}

/// Kills conversions until `midway` of the kills came in the middle, runs each again to its end and
/// compares every byte with a conversion that nobody disturbed. With `reclaim` each deletes its
/// source, a copy, as it goes. What differs is the error.
pub(crate) fn kill_and_resume(
    rill: &Path,
    original: &Path,
    midway: usize,
    seed: u64,
    experts: &str,
    reclaim: bool,
) -> Result<Kills, String> {
    let mut random = Random(seed);
    let whole = tempfile::tempdir().map_err(|e| e.to_string())?;
    let start = Instant::now();
    finish(rill, original, whole.path(), experts, 1, false)?;
    let mut longest_us = start.elapsed().as_micros() as usize;
    let expected = files(whole.path())?;

    let mut kills = Kills::default();
    while kills.midway < midway {
        if kills.early + kills.late > 20 * midway {
            return Err(format!("too few kills came in the middle: {kills:?}"));
        }
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let copy = tempfile::tempdir().map_err(|e| e.to_string())?;
        let source = if reclaim { copy.path() } else { original };
        if reclaim {
            for (name, bytes) in files(original)? {
                fs::write(source.join(name), bytes).map_err(|e| e.to_string())?;
            }
        }
        // A resumed conversion can be killed as well.
        for _ in 0..1 + random.below(3) {
            let jobs = 1 + random.below(2);
            let mut child = start_conversion(rill, source, folder.path(), experts, jobs, reclaim)?;
            sleep(Duration::from_micros(random.below(longest_us) as u64));
            child.kill().and_then(|()| child.wait()).map_err(|e| e.to_string())?;
            let left = files(folder.path())?;
            if left.contains_key("manifest.json") {
                kills.late += 1;
                // Where nothing is left to hit, hit earlier.
                longest_us = (longest_us * 9 / 10).max(1000);
                for (name, bytes) in &expected {
                    if left.get(name) != Some(bytes) {
                        return Err(format!("seed {seed}: a manifest, and {name} is not whole"));
                    }
                }
                break;
            } else if left.contains_key("convert.json") {
                kills.midway += 1;
            } else {
                kills.early += 1;
            }
        }
        let left = files(folder.path())?;
        if !left.contains_key("manifest.json") || left.contains_key("convert.json") {
            finish(rill, source, folder.path(), experts, 1 + random.below(2), reclaim)?;
        }
        let is_shard = |name: &&String| name.ends_with(".safetensors") && name.contains("-of-");
        if reclaim && let Some(shard) = files(source)?.keys().find(is_shard) {
            return Err(format!("seed {seed}, {kills:?}: {shard} is still there"));
        }
        let mut found = files(folder.path())?;
        // Killed between the removal of the notes, which says that there is nothing left to do.
        found.retain(|name, _| !matches!(name.as_str(), "reclaim.log" | "convert.headers"));
        if found != expected {
            let differs = |name: &&String| found.get(*name) != expected.get(*name);
            let names: Vec<&String> = found.keys().chain(expected.keys()).filter(differs).collect();
            return Err(format!("seed {seed}, {kills:?}: {names:?} differ"));
        }
    }
    Ok(kills)
}

/// Starts a conversion to some format of experts that makes the trunk smaller.
pub(crate) fn start_conversion(
    rill: &Path,
    source: &Path,
    to: &Path,
    experts: &str,
    jobs: usize,
    reclaim: bool,
) -> Result<Child, String> {
    let mut command = Command::new(rill);
    command.arg("convert").arg(source).arg(to);
    command.args(["--experts", experts, "--trunk", "q4", "--jobs", &jobs.to_string()]);
    if reclaim {
        command.args(["--reclaim", "on", "--trust-source"]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().map_err(|e| format!("{command:?}: {e}"))
}

/// Runs a conversion to its end.
fn finish(
    rill: &Path,
    source: &Path,
    to: &Path,
    experts: &str,
    jobs: usize,
    reclaim: bool,
) -> Result<(), String> {
    let child = start_conversion(rill, source, to, experts, jobs, reclaim)?;
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{}: {stderr}", output.status)) }
}

/// Every file of a folder, by name.
pub(crate) fn files(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(|e| e.to_string())? {
        let path = entry.map_err(|e| e.to_string())?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.insert(name, fs::read(&path).map_err(|e| e.to_string())?);
    }
    Ok(files)
}
