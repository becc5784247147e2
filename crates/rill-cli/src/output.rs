//! Standard output, interruption and files that appear whole or not at all.

use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Error, Result};
use rill_stream::{Access, StreamError, WholeFile};

/// How a command that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    Interrupted,
}

/// Writes to standard output at once.
pub(crate) fn print(text: impl AsRef<[u8]>) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_ref()).and_then(|()| out.flush()).context("cannot write standard output")
}

/// Writes a line to standard error. That nobody can read it there is no reason to fail.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes part of a line to standard error, as [`note`] does.
pub(crate) fn status(text: &str) {
    let _ = write!(io::stderr(), "{text}");
}

/// Whether an error is only that whoever read our output has stopped reading, as `head` does.
pub(crate) fn reader_went_away(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|e| e.downcast_ref::<io::Error>());
    io.is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
}

/// A flag that Ctrl-C (or a request to terminate) sets. The second one ends the program at once.
pub(crate) fn interrupt_flag() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let handler = flag.clone();
    ctrlc::set_handler(move || {
        if handler.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(flag)
}

/// Writes a file that no failure leaves half of: an old one survives until the new one is whole.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<Outcome>,
) -> Result<Outcome> {
    let what = || format!("cannot write {}", path.display());
    let mut file = WholeFile::create(path, Access::Usual).map_err(nameless).with_context(what)?;
    // What went wrong elsewhere is not the file's fault.
    let outcome =
        write(&mut file).map_err(|e| if e.is::<io::Error>() { e.context(what()) } else { e })?;
    if outcome == Outcome::Done {
        file.finish().map_err(nameless).with_context(what)?;
    }
    Ok(outcome)
}

/// What went wrong with a file that the message names already.
fn nameless(error: StreamError) -> Error {
    match error {
        StreamError::Io { source, .. } => source.into(),
        error => error.into(),
    }
}

/// A number of bytes for people, in powers of 1,000.
pub(crate) fn bytes(n: u64) -> String {
    scaled(n, &[" bytes", " kB", " MB", " GB", " TB"])
}

/// Powers of 1,000, three digits or more.
pub(crate) fn scaled(n: u64, units: &[&str]) -> String {
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{n}{}", units[0]) } else { format!("{value:.2}{}", units[unit]) }
}
