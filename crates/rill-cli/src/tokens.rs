//! `rill tokenize` and `rill detokenize`.

use std::io::{self, IsTerminal};

use anyhow::{Error, Result};
use serde_json::json;

use crate::args::{DetokenizeArgs, TokenizeArgs, token_id};
use crate::model::Model;
use crate::output::{Outcome, print};
use crate::prompt;

pub(crate) fn tokenize(args: &TokenizeArgs) -> Result<Outcome> {
    let text = prompt::bytes(&args.text)?;
    let tokenizer = Model::find(&args.model)?.tokenizer()?;
    let ids = match args.markup {
        true => tokenizer.encode_markup(&String::from_utf8_lossy(&text)),
        false => tokenizer.encode_text_bytes(&text),
    };
    if args.json {
        let piece = |&id| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default());
        let pieces: Vec<_> = ids.iter().map(piece).collect();
        print(format!("{}\n", json!({ "ids": ids, "pieces": pieces })))?;
    } else {
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        print(format!("{}\n", ids.join(",")))?;
    }
    Ok(Outcome::Done)
}

pub(crate) fn detokenize(args: &DetokenizeArgs) -> Result<Outcome> {
    let ids = match &args.ids[..] {
        [] => piped(&prompt::stdin(false, "give token ids, or pipe them in")?)?,
        [dash] if dash == "-" => piped(&prompt::stdin(true, "")?)?,
        typed => parse(&typed.join(",")).unwrap_or_else(|message| prompt::usage(&message)),
    };
    let tokenizer = Model::find(&args.model)?.tokenizer()?;
    let mut bytes = tokenizer.decode(&ids)?;
    // Exact for a pipe; a terminal gets its prompt on a line of its own.
    if io::stdout().is_terminal() {
        bytes.push(b'\n');
    }
    print(bytes)?;
    Ok(Outcome::Done)
}

fn piped(text: &[u8]) -> Result<Vec<u32>> {
    parse(&String::from_utf8_lossy(text)).map_err(Error::msg)
}

/// Ids between commas, spaces and line ends, none of which need be there.
fn parse(text: &str) -> Result<Vec<u32>, String> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace());
    words.filter(|word| !word.is_empty()).map(token_id).collect()
}
