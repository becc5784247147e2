//! A conversation: each question runs only its own tokens. `cargo run --release --example chat FOLDER`.

use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result};
use rill::chat::{ChatFormat, ReplyPart};
use rill::{Engine, EngineOptions, Folder, GenerateOptions};

pub(crate) fn run(folder: &Path, questions: &mut dyn BufRead, out: &mut dyn Write) -> Result<()> {
    let engine = Engine::open(Folder::Disk(folder.into()), &EngineOptions::default())?;
    let tokenizer = engine.open_tokenizer()?;
    let format = ChatFormat::detect(&tokenizer).context("this model has no chat format")?;
    let mut session = engine.new_session();
    let mut unseen = Vec::new(); // The end of the last answer, which the session has not seen.
    for question in questions.lines() {
        let mut prompt = std::mem::take(&mut unseen);
        prompt.extend(format.render_question(&tokenizer, &question?, false)?);
        let mut reply = format.reply_reader(&tokenizer, false);
        for token in engine.generate(&mut session, &prompt, GenerateOptions::default())? {
            let token = token?.id;
            unseen = vec![token];
            if reply.push(token) == ReplyPart::Content {
                out.write_all(tokenizer.token_bytes(token).unwrap_or_default())?;
            }
        }
        unseen.extend(engine.stop_tokens().first());
        writeln!(out, " [{} tokens so far]", session.position())?;
    }
    Ok(())
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "models/k3-nano".into());
    run(folder.as_ref(), &mut std::io::stdin().lock(), &mut std::io::stdout())
}
