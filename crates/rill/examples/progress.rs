//! What a window shows, and its stop button: `cargo run --release --example progress FOLDER TEXT`.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use rill::{Engine, EngineOptions, Event, Folder, GenerateOptions, Request, Scheduler};

pub(crate) fn run(folder: &Path, text: &str, out: &mut dyn Write) -> Result<()> {
    let options = EngineOptions { prefill_chunk: 8, ..EngineOptions::default() };
    let engine = Arc::new(Engine::open(Folder::Disk(folder.into()), &options)?);
    let prompt = engine.open_tokenizer()?.encode_text(text);
    let scheduler = Scheduler::new(engine.clone(), &Default::default())?;
    let session = engine.new_session();
    let answer = scheduler.submit(Request::new(session, prompt, GenerateOptions::default()))?;
    let stop = answer.canceller();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1)); // Until somebody presses the button.
        stop.cancel();
    });
    for event in answer {
        match event {
            Event::Prefilled { tokens, of } => writeln!(out, "{:3} %", 100 * tokens / of)?,
            Event::Token(_) => write!(out, ".")?,
            Event::Ended(ended) => writeln!(out, "\n{:?}, {:?}", ended.outcome?, ended.statistics)?,
        }
    }
    Ok(())
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "models/k3-nano".into());
    let text = std::env::args().nth(2).unwrap_or_else(|| "Once upon a time".repeat(9));
    run(folder.as_ref(), &text, &mut std::io::stdout())
}
