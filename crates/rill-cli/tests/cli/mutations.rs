//! Containers damaged at random places: an error that names the file, or nothing changed. Also what
//! `examples/soak.rs` does, for longer.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::kills::files;
use crate::random::Random;

/// What the program made of the damage.
#[derive(Debug, Default)]
pub(crate) struct Mutations {
    /// `rill verify` refused them, as it must each.
    pub(crate) refused_by_verify: usize,
    /// `rill eval` ended with an error.
    pub(crate) refused_by_eval: usize,
    /// `rill eval` did not need the damaged bytes and gave the same logits.
    pub(crate) not_needed: usize,
}

/// Bytes that a page of zeros replaces.
const PAGE_BYTES: usize = 4096;

/// Makes a lossless container of a checkpoint, damages it `n` times in one place each, and asks
/// `rill verify` and `rill eval` about it. What they do not notice is the error.
pub(crate) fn mutate(rill: &Path, source: &Path, n: usize, seed: u64) -> Result<Mutations, String> {
    let mut random = Random(seed);
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let folder = dir.path();
    let run = |command: &mut Command| -> Result<(Option<i32>, Vec<u8>, String), String> {
        let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((output.status.code(), output.stdout, stderr))
    };
    let (code, _, stderr) = run(Command::new(rill).arg("convert").arg(source).arg(folder))?;
    if code != Some(0) {
        return Err(stderr);
    }
    let whole = files(folder)?;
    let names: Vec<&String> = whole.keys().collect();
    let eval = || {
        let mut command = Command::new(rill);
        // All logits, to the last bit.
        command.args(["eval", "--ids", "1,9,77,300,5,5,260,31", "--json", "--top", "1000000"]);
        command.arg("-m").arg(folder);
        command
    };
    let (code, expected, stderr) = run(&mut eval())?;
    if code != Some(0) {
        return Err(stderr);
    }

    let expected = answer(&expected);
    let mut found = Mutations::default();
    while found.refused_by_verify < n {
        let name = names[random.below(names.len())];
        let mut bytes = whole[name].clone();
        let at = random.below(bytes.len());
        let what = match random.below(10) {
            0 => {
                bytes.truncate(at);
                format!("{name} cut off after {at} bytes")
            }
            1 => {
                let page = at / PAGE_BYTES * PAGE_BYTES..bytes.len().min(at + PAGE_BYTES);
                bytes[page].fill(0);
                format!("{name} without the page of byte {at}")
            }
            bit => {
                bytes[at] ^= 1 << (bit - 2);
                format!("{name} with bit {} of byte {at} flipped", bit - 2)
            }
        };
        if bytes == whole[name] {
            continue;
        }
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|e| e.to_string())?;
        let what = format!("seed {seed}, {what}");
        let named = |code: Option<i32>, stderr: &str| {
            code == Some(1) && stderr.starts_with("rill: ") && stderr.contains(name.as_str())
        };
        let (code, _, stderr) = run(Command::new(rill).arg("verify").arg(folder))?;
        if !named(code, &stderr) {
            return Err(format!("{what}: verify ended with {code:?}: {stderr}"));
        }
        found.refused_by_verify += 1;
        let (code, stdout, stderr) = run(&mut eval())?;
        if code == Some(0) && answer(&stdout) == expected {
            found.not_needed += 1;
        } else if named(code, &stderr) && stdout.is_empty() {
            found.refused_by_eval += 1;
        } else {
            return Err(format!("{what}: eval ended with {code:?}: {stderr}"));
        }
        fs::write(&path, &whole[name]).map_err(|e| e.to_string())?;
    }
    Ok(found)
}

/// What `eval --json` says, without what it took to find out.
pub(crate) fn answer(json: impl AsRef<[u8]>) -> String {
    let json = json.as_ref();
    match serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(json) {
        Ok(mut facts) => {
            facts.remove("counters");
            serde_json::Value::Object(facts).to_string()
        }
        Err(_) => String::from_utf8_lossy(json).into_owned(),
    }
}
