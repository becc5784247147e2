//! Many prompts at once, sharing every step: `cargo run --release --example batch FOLDER TEXT...`.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use rill::{Engine, EngineOptions, Event, Folder, GenerateOptions, Request, Scheduler};

pub(crate) fn run(folder: &Path, texts: &[String], out: &mut dyn Write) -> Result<()> {
    let options = EngineOptions { sessions: 4, context: 256, ..EngineOptions::default() };
    let engine = Arc::new(Engine::open(Folder::Disk(folder.into()), &options)?);
    let tokenizer = engine.open_tokenizer()?;
    let scheduler = Scheduler::new(engine.clone(), &Default::default())?;
    let options = GenerateOptions { max_tokens: 16, ..Default::default() };
    let ask = |text: &String| {
        let prompt = tokenizer.encode_text(text);
        scheduler.submit(Request::new(engine.new_session(), prompt, options.clone()))
    };
    let answers: Vec<_> = texts.iter().map(ask).collect();
    for (text, answer) in texts.iter().zip(answers) {
        write!(out, "{text}")?;
        for event in answer? {
            match event {
                Event::Token(new) => out.write_all(tokenizer.token_bytes(new.id).unwrap_or(b""))?,
                Event::Ended(ended) => writeln!(out, " ({:?})", ended.outcome?)?,
                Event::Prefilled { .. } => {}
            }
        }
    }
    Ok(())
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().unwrap_or_else(|| "models/k3-nano".into());
    run(folder.as_ref(), &args.collect::<Vec<_>>(), &mut std::io::stdout())
}
