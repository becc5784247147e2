//! One question, answered token by token: `cargo run --release --example ask FOLDER QUESTION`.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use rill::chat::{ChatFormat, ReplyPart};
use rill::{Engine, EngineOptions, Folder, GenerateOptions};

pub(crate) fn run(folder: &Path, question: &str, out: &mut dyn Write) -> Result<()> {
    let engine = Engine::open(Folder::Disk(folder.into()), &EngineOptions::default())?;
    let tokenizer = engine.open_tokenizer()?;
    let format = ChatFormat::detect(&tokenizer).context("this model has no chat format")?;
    let prompt = format.render_question(&tokenizer, question, false)?;

    let mut session = engine.new_session();
    let mut reply = format.reply_reader(&tokenizer, false);
    let mut text = tokenizer.decoder();
    for token in engine.generate(&mut session, &prompt, GenerateOptions::default())? {
        let token = token?.id;
        if reply.push(token) == ReplyPart::Content {
            let bytes = tokenizer.token_bytes(token).unwrap_or_default();
            write!(out, "{}", text.push(bytes))?;
        }
    }
    Ok(writeln!(out, "{}", text.finish())?)
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().unwrap_or_else(|| "models/k3-nano".into());
    let question = args.next().unwrap_or_else(|| "What is the capital of France?".into());
    run(folder.as_ref(), &question, &mut std::io::stdout())
}
