//! Text from the command line, a file or a pipe.

use std::fs;
use std::io::{self, IsTerminal, Read};

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap::error::ErrorKind;

use crate::args::{Args, TextArgs};

/// The bytes given, exactly.
pub(crate) fn bytes(args: &TextArgs) -> Result<Vec<u8>> {
    match (&args.text, &args.file) {
        (_, Some(path)) => {
            fs::read(path).with_context(|| format!("cannot read {}", path.display()))
        }
        (Some(text), None) if text != "-" => Ok(text.clone().into_bytes()),
        (text, None) => stdin(text.is_some(), "give a text, a --file, or pipe one in"),
    }
}

/// The bytes given, less one line ending at the end of a file or pipe, which an editor or `echo`
/// put there.
pub(crate) fn prompt(args: &TextArgs) -> Result<Vec<u8>> {
    let mut bytes = bytes(args)?;
    let typed = args.text.as_ref().is_some_and(|text| text != "-");
    if !typed && bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    Ok(bytes)
}

/// Standard input, if it was asked for by name or is a pipe; otherwise a usage error.
pub(crate) fn stdin(by_name: bool, advice: &str) -> Result<Vec<u8>> {
    if !by_name && io::stdin().is_terminal() {
        usage(advice);
    }
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
    Ok(bytes)
}

/// Ends the program as a wrong flag would.
pub(crate) fn usage(message: &str) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
