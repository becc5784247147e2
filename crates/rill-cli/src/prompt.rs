//! Text from the command line, a file or a pipe.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::CommandFactory;
use clap::error::ErrorKind;

use crate::args::{Args, TextArgs};

/// Most bytes of text that are read: the longest context takes a tenth of it.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// The bytes given, exactly.
pub(crate) fn bytes(args: &TextArgs) -> Result<Vec<u8>> {
    match (&args.text, &args.file) {
        (_, Some(path)) => file(path),
        (Some(text), None) if text != "-" => Ok(text.clone().into_bytes()),
        (text, None) => stdin(text.is_some(), "give a text, a --file, or pipe one in"),
    }
}

/// The bytes given, less one line ending at the end of a file or pipe, which an editor or `echo`
/// put there. Nothing at all is a mistake: a model would answer a question that nobody asked.
pub(crate) fn prompt(args: &TextArgs) -> Result<Vec<u8>> {
    let mut bytes = bytes(args)?;
    let typed = args.text.as_ref().is_some_and(|text| text != "-");
    if !typed && bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    if bytes.is_empty() {
        bail!("the text is empty; give at least a character");
    }
    Ok(bytes)
}

/// The bytes of a file, which may also be a named pipe.
pub(crate) fn file(path: &Path) -> Result<Vec<u8>> {
    let name = path.display().to_string();
    read(File::open(path).with_context(|| format!("cannot read {name}"))?, &name)
}

/// Standard input, if it was asked for by name or is a pipe; otherwise a usage error.
pub(crate) fn stdin(by_name: bool, advice: &str) -> Result<Vec<u8>> {
    if !by_name && io::stdin().is_terminal() {
        usage(advice);
    }
    read(io::stdin().lock(), "standard input")
}

/// Ends the program as a wrong flag would.
pub(crate) fn usage(message: &str) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}

fn read(source: impl Read, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source
        .take(MAX_TEXT_BYTES + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {name}"))?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        bail!("{name} has more than {} MiB of text; cut it", MAX_TEXT_BYTES >> 20);
    }
    Ok(bytes)
}
