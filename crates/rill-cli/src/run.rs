//! `rill run`: a question in, an answer out.

mod kept;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rill::chat::{ChatFormat, ReplyPart, ReplyReader};
use rill::{
    Error, FinishReason, GenerateOptions, Logits, Logprobs, StopMatcher, Tokenizer, Utf8Stream,
};
use serde_json::{Value, json};

use self::kept::{Answer, Keeper};
use crate::args::RunArgs;
use crate::model::{Model, Needs};
use crate::output::{Outcome, interrupt_flag, note, print, write_file};
use crate::progress::Progress;
use crate::{prompt, stats};

/// Least context that memory is set aside for unless `--ctx` says otherwise.
const USUAL_CONTEXT: usize = 4096;

pub(crate) fn run(args: &RunArgs) -> Result<Outcome> {
    let mut keeper = Keeper::new(args)?;
    let model = Model::find(&args.model)?;
    let tokenizer = model.tokenizer()?;
    let mut answer = match &args.resume {
        Some(file) => {
            let kept = rill::read_session_note(file)?;
            let what = || format!("{} holds no answer of `rill run`", file.display());
            serde_json::from_str(&kept).with_context(what)?
        }
        None => {
            let text = prompt::prompt(&args.prompt)?;
            Answer::new(args, encode(args, model.config.bos_token_id, &tokenizer, &text)?)
        }
    };
    let reader = match answer.raw {
        true => None,
        false => Some(chat_format(&tokenizer)?.reply_reader(&tokenizer, answer.think)),
    };
    let context = answer.prompt.len().saturating_add(answer.max_tokens).max(USUAL_CONTEXT);
    let engine = model.open(&args.engine, Needs { context, logits: 1, sessions: 1 })?;
    if !args.quiet
        && let Some(problem) = stats::drive_problem(&engine.drive())
    {
        note(&format!("rill: {problem}"));
    }
    let mut session = match &args.resume {
        Some(file) => engine.load_session(file)?.0,
        None => engine.new_session(),
    };

    // Now rather than after hours, if it cannot be done.
    keeper.save(&engine, &session, &answer)?;

    let cancel = interrupt_flag()?;
    let options = GenerateOptions {
        max_tokens: answer.max_tokens.saturating_sub(answer.written.len()),
        sampling: answer.sampling(),
        resume: answer.sampler.clone(),
        logprobs: args.logprobs,
        cancel: cancel.clone(),
        ..GenerateOptions::default()
    };
    let mut reply = Reply::new(reader, &answer, args.json);
    let mut tokens = Vec::new();
    for &id in &answer.written {
        if args.json {
            tokens.push(token_json(&tokenizer, id, None));
        }
        let over = reply.push(id, tokenizer.token_bytes(id).unwrap_or_default())?;
        answer.finished |= over;
    }
    let start = Instant::now();
    let mut progress = Progress::new(&model.config, args.quiet, cancel.clone());
    let unseen = answer.unseen(session.position());
    let mut ids = unseen.as_slice();
    let mut interrupted = false;
    // Piece by piece, so that what has been read of a long prompt is kept too.
    while keeper.file().is_some() && !answer.finished && ids.len() > engine.plan().prefill_chunk {
        let (piece, rest) = ids.split_at(engine.plan().prefill_chunk);
        match engine.forward_observed(&mut session, piece, Logits::None, &mut progress) {
            Err(Error::Cancelled) => {
                interrupted = true;
                break;
            }
            logits => logits?,
        };
        ids = rest;
        keeper.now_and_then(&engine, &session, || answer.clone());
    }
    let (mut prefill, mut n_tokens) = (start.elapsed(), 0);
    let mut failure = None;
    let mut finish = match answer.finished {
        _ if interrupted => Some(FinishReason::Cancelled),
        true if answer.written.len() == answer.max_tokens => Some(FinishReason::Length),
        _ => None,
    };
    if !answer.finished && !interrupted {
        let mut generation =
            engine.generate_observed(&mut session, ids, options, Some(&mut progress))?;
        prefill = start.elapsed();
        while let Some(token) = generation.next() {
            match token {
                Ok(token) => {
                    n_tokens += 1;
                    answer.written.push(token.id);
                    if args.json {
                        tokens.push(token_json(&tokenizer, token.id, token.logprobs.as_ref()));
                    }
                    let bytes = tokenizer.token_bytes(token.id).unwrap_or_default();
                    if reply.push(token.id, bytes)? {
                        answer.finished = true;
                        break;
                    }
                    keeper.now_and_then(&engine, generation.session(), || Answer {
                        sampler: Some(generation.sampler_state().clone()),
                        ..answer.clone()
                    });
                }
                Err(error) => failure = Some(error),
            }
        }
        finish = generation.finish_reason();
        answer.sampler = Some(generation.sampler_state().clone());
    }
    let total = start.elapsed();
    answer.finished |= matches!(finish, Some(FinishReason::Stop | FinishReason::Length));
    let kept = keeper.save(&engine, &session, &answer);
    let collected = reply.finish()?;
    let counters = engine.counters();
    if let Some(Collected { reasoning, content }) = collected {
        let reasoning = answer.think.then_some(reasoning);
        let finish = match finish {
            // The reply was over, or had a stop text.
            None | Some(FinishReason::Stop) => "stop",
            Some(FinishReason::Length) => "length",
            Some(FinishReason::ContextFull) => "context_full",
            Some(FinishReason::NothingAllowed) => "nothing_allowed",
            Some(FinishReason::Cancelled | FinishReason::Deadline) => "interrupted",
            Some(FinishReason::Failed) => "failed",
        };
        let all = json!({
            "reasoning": reasoning,
            "content": content,
            "finish": finish,
            "tokens": tokens,
        });
        print(format!("{all}\n"))?;
    }
    if !args.quiet {
        note(&format!(
            "prompt {}; generated {}; {} threads, {} kernels{}\n{}",
            rate(unseen.len(), prefill),
            rate(n_tokens, total - prefill),
            engine.threads(),
            engine.kernels(),
            match finish {
                Some(FinishReason::Length) => "; stopped at --max-tokens",
                Some(FinishReason::ContextFull) => "; stopped because the context is full",
                Some(FinishReason::NothingAllowed) => "; stopped because every token is forbidden",
                Some(FinishReason::Cancelled) => "; interrupted",
                _ => "",
            },
            stats::lines(&counters),
        ));
    }
    if let Some(path) = &args.stats_json {
        write_file(path, |out| {
            writeln!(out, "{:#}", stats::json(&counters))?;
            Ok(Outcome::Done)
        })?;
    }
    kept?;
    if let Some(file) = keeper.file().filter(|_| !answer.finished && !args.quiet) {
        note(&format!("go on with: rill run --resume {}", file.display()));
    }
    match failure {
        Some(error) => Err(error.into()),
        None if cancel.load(Ordering::Relaxed) => Ok(Outcome::Interrupted),
        None => Ok(Outcome::Done),
    }
}

/// Ids of the prompt.
fn encode(args: &RunArgs, bos: u32, tokenizer: &Tokenizer, text: &[u8]) -> Result<Vec<u32>> {
    if args.raw {
        return Ok([vec![bos], tokenizer.encode_text_bytes(text)].concat());
    }
    let question = String::from_utf8_lossy(text);
    Ok(chat_format(tokenizer)?.render_question(tokenizer, &question, args.think)?)
}

fn chat_format(tokenizer: &Tokenizer) -> Result<ChatFormat> {
    ChatFormat::detect(tokenizer).context(
        "the tokenizer has no reserved tokens of a known chat format; use --raw to continue a \
         text",
    )
}

/// Prints a reply as it is generated, or collects it for JSON.
struct Reply {
    /// `None`: everything is content.
    reader: Option<ReplyReader>,
    show_reasoning: bool,
    reasoning: Utf8Stream,
    content: Utf8Stream,
    stop: StopMatcher,
    in_reasoning: bool,
    ends_with_newline: bool,
    /// `None`: it is printed.
    collected: Option<Collected>,
}

#[derive(Default)]
struct Collected {
    reasoning: String,
    content: String,
}

/// What a piece of text that is shown is.
#[derive(Clone, Copy)]
enum Shown {
    Reasoning,
    Content,
    /// The lines around the reasoning.
    Mark,
}

impl Reply {
    fn new(reader: Option<ReplyReader>, answer: &Answer, collect: bool) -> Self {
        Self {
            reader,
            show_reasoning: answer.think,
            reasoning: Utf8Stream::new(),
            content: Utf8Stream::new(),
            stop: StopMatcher::new(answer.stop.clone()),
            in_reasoning: false,
            ends_with_newline: false,
            collected: collect.then(Collected::default),
        }
    }

    /// Shows what the token adds; true when the reply is over.
    fn push(&mut self, token: u32, bytes: &[u8]) -> Result<bool> {
        match self.reader.as_mut().map_or(ReplyPart::Content, |reader| reader.push(token)) {
            ReplyPart::Reasoning => {
                if self.show_reasoning {
                    if !self.in_reasoning {
                        self.in_reasoning = true;
                        self.show(Shown::Mark, "<think>\n")?;
                    }
                    let text = self.reasoning.push(bytes);
                    self.show(Shown::Reasoning, &text)?;
                }
                Ok(false)
            }
            ReplyPart::Content => {
                self.end_reasoning()?;
                let text = self.content.push(bytes);
                let step = self.stop.push(&text);
                self.show(Shown::Content, &step.emit)?;
                Ok(step.stopped)
            }
            ReplyPart::End => Ok(true),
            _ => Ok(false),
        }
    }

    /// Shows what was held back and ends the last line. Returns what was collected.
    fn finish(mut self) -> Result<Option<Collected>> {
        self.end_reasoning()?;
        let text = self.content.finish();
        let step = self.stop.push(&text);
        self.show(Shown::Content, &step.emit)?;
        let rest = self.stop.finish();
        self.show(Shown::Content, &rest)?;
        if !self.ends_with_newline {
            self.show(Shown::Mark, "\n")?;
        }
        Ok(self.collected)
    }

    fn end_reasoning(&mut self) -> Result<()> {
        if !self.in_reasoning {
            return Ok(());
        }
        self.in_reasoning = false;
        let rest = self.reasoning.finish();
        self.show(Shown::Reasoning, &rest)?;
        let line = if self.ends_with_newline { "</think>\n" } else { "\n</think>\n" };
        self.show(Shown::Mark, line)
    }

    fn show(&mut self, what: Shown, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let Some(collected) = &mut self.collected else {
            self.ends_with_newline = text.ends_with('\n');
            return print(text);
        };
        match what {
            Shown::Reasoning => collected.reasoning.push_str(text),
            Shown::Content => collected.content.push_str(text),
            Shown::Mark => {}
        }
        Ok(())
    }
}

/// A token of the reply, and what was likely in its place.
fn token_json(tokenizer: &Tokenizer, id: u32, logprobs: Option<&Logprobs>) -> Value {
    let text = |id| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default());
    let mut value = json!({ "id": id, "text": text(id) });
    if let Some(logprobs) = logprobs {
        let top = logprobs.top.iter();
        let top = top.map(|&(id, p)| json!({ "id": id, "text": text(id), "logprob": p }));
        value["logprob"] = json!(logprobs.chosen);
        value["top"] = top.collect();
    }
    value
}

fn rate(tokens: usize, time: Duration) -> String {
    let seconds = time.as_secs_f64();
    format!("{tokens} tokens in {seconds:.2} s ({:.1} tokens/s)", tokens as f64 / seconds.max(1e-9))
}
