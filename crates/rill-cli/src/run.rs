//! `rill run`: a question in, an answer out.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rill::chat::{ChatFormat, ReplyPart, ReplyReader};
use rill::{FinishReason, GenerateOptions, StopMatcher, Token, Tokenizer, Utf8Stream};
use serde_json::{Value, json};

use crate::args::RunArgs;
use crate::model::{Model, Needs};
use crate::output::{Outcome, interrupt_flag, note, print, write_file};
use crate::progress::Progress;
use crate::{prompt, stats};

/// Least context that memory is set aside for unless `--ctx` says otherwise.
const USUAL_CONTEXT: usize = 4096;

pub(crate) fn run(args: &RunArgs) -> Result<Outcome> {
    let text = prompt::prompt(&args.prompt)?;
    let model = Model::find(&args.model)?;
    let tokenizer = model.tokenizer()?;
    let (ids, reader) = encode(args, model.config.bos_token_id, &tokenizer, &text)?;
    let context = ids.len().saturating_add(args.max_tokens).max(USUAL_CONTEXT);
    let engine = model.open(&args.engine, Needs { context, logits: 1, sessions: 1 })?;
    if !args.quiet
        && let Some(problem) = stats::drive_problem(&engine.drive())
    {
        note(&format!("rill: {problem}"));
    }

    let cancel = interrupt_flag()?;
    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        sampling: args.sampling.sampling(),
        logprobs: args.logprobs,
        cancel: cancel.clone(),
        ..GenerateOptions::default()
    };
    let start = Instant::now();
    let mut session = engine.new_session();
    let mut progress = Progress::new(&model.config, args.quiet);
    let mut generation =
        engine.generate_observed(&mut session, &ids, options, Some(&mut progress))?;
    let prefill = start.elapsed();

    let mut reply = Reply::new(reader, args);
    let mut n_tokens = 0;
    let mut tokens = Vec::new();
    let mut failure = None;
    for token in &mut generation {
        match token {
            Ok(token) => {
                n_tokens += 1;
                if args.json {
                    tokens.push(token_json(&tokenizer, &token));
                }
                let bytes = tokenizer.token_bytes(token.id).unwrap_or_default();
                if reply.push(token.id, bytes)? {
                    break;
                }
            }
            Err(error) => failure = Some(error),
        }
    }
    let collected = reply.finish()?;
    let total = start.elapsed();
    let finish = generation.finish_reason();
    let counters = engine.counters();
    if let Some(Collected { reasoning, content }) = collected {
        let reasoning = args.think.then_some(reasoning);
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
            rate(ids.len(), prefill),
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
    match failure {
        Some(error) => Err(error.into()),
        None if cancel.load(Ordering::Relaxed) => Ok(Outcome::Interrupted),
        None => Ok(Outcome::Done),
    }
}

/// Prompt ids, and the reader of the reply when the chat format is used.
fn encode(
    args: &RunArgs,
    bos: u32,
    tokenizer: &Tokenizer,
    text: &[u8],
) -> Result<(Vec<u32>, Option<ReplyReader>)> {
    if args.raw {
        return Ok(([vec![bos], tokenizer.encode_text_bytes(text)].concat(), None));
    }
    let format = ChatFormat::detect(tokenizer).context(
        "the tokenizer has no reserved tokens of a known chat format; use --raw to continue a \
         text",
    )?;
    let question = String::from_utf8_lossy(text);
    let ids = format.render_question(tokenizer, &question, args.think)?;
    Ok((ids, Some(format.reply_reader(tokenizer, args.think))))
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
    fn new(reader: Option<ReplyReader>, args: &RunArgs) -> Self {
        Self {
            reader,
            show_reasoning: args.think,
            reasoning: Utf8Stream::new(),
            content: Utf8Stream::new(),
            stop: StopMatcher::new(args.stop.clone()),
            in_reasoning: false,
            ends_with_newline: false,
            collected: args.json.then(Collected::default),
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
fn token_json(tokenizer: &Tokenizer, token: &Token) -> Value {
    let text = |id| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default());
    let mut value = json!({ "id": token.id, "text": text(token.id) });
    if let Some(logprobs) = &token.logprobs {
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
