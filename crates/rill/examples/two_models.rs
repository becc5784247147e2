//! Two models in one program, each with its own memory and threads: what does one think of the other's
//! text? `cargo run --release --example two_models FOLDER OTHER_FOLDER`.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use rill::{Engine, EngineOptions, Folder, GenerateOptions, Logits};

pub(crate) fn run(writer: &Path, reader: &Path, out: &mut dyn Write) -> Result<()> {
    let options = EngineOptions { budget_bytes: 200_000_000, threads: 1, ..Default::default() };
    let open = |folder: &Path| Engine::open(Folder::Disk(folder.into()), &options);
    let (writer, reader) = (open(writer)?, open(reader)?);

    let (mut session, mut judge) = (writer.new_session(), reader.new_session());
    let options = GenerateOptions { max_tokens: 8, ..Default::default() };
    let mut before = writer.config().bos_token_id;
    for token in writer.generate(&mut session, &[before], options)? {
        let token = token?.id;
        let logits = reader.forward(&mut judge, &[before], Logits::Last)?;
        let better = logits.iter().filter(|&&logit| logit > logits[token as usize]).count();
        writeln!(out, "{token}: the other would have preferred {better} tokens")?;
        before = token;
    }
    Ok(())
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let mut folder = || args.next().unwrap_or_else(|| "models/k3-nano".into());
    run(folder().as_ref(), folder().as_ref(), &mut std::io::stdout())
}
