//! Fresh random text through Python's tiktoken and through ours. Where `python3 -c "import tiktoken"` does not work
//! these report as ignored, by name; they never pass unrun.

mod common;

use std::collections::HashSet;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::{MODEL, Random, k3_nano, model_file, single_bytes};
use libtest_mimic::{Arguments, Failed, Trial};
use rill_text::Tokenizer;

fn main() -> std::process::ExitCode {
    let args = Arguments::from_args();
    let missing = !args.list && !has_tiktoken();
    if missing {
        eprintln!(
            "SKIP: `python3 -c \"import tiktoken\"` fails here, so nothing is compared with it"
        );
    }
    let trials = vec![
        Trial::test("corpus_is_what_its_generator_prints", corpus_is_what_its_generator_prints),
        Trial::test("random_text_encodes_as_in_tiktoken", random_text_encodes_as_in_tiktoken),
        Trial::test("random_merges_encode_as_in_tiktoken", random_merges_encode_as_in_tiktoken),
        Trial::test("shuffled_ranks_encode_as_in_tiktoken", shuffled_ranks_encode_as_in_tiktoken),
    ];
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(missing)).collect();
    libtest_mimic::run(&args, trials).exit_code()
}

fn corpus_is_what_its_generator_prints() -> Result<(), Failed> {
    let printed = python(&["--print"], b"")?;
    if printed != include_bytes!("data/corpus.jsonl") {
        return Err("tests/data/corpus.jsonl is out of date: run tools/tokenizer_corpus.py".into());
    }
    Ok(())
}

fn random_text_encodes_as_in_tiktoken() -> Result<(), Failed> {
    let (mut random, seed) = fresh();
    let cases = (0..3000).map(|_| random_text(&mut random).into_bytes()).collect();
    compare(&k3_nano(), MODEL, cases, seed)
}

/// Tokens are random joins of random tokens and a few strings no merge reaches; ranks, those of single bytes too, are
/// in random order. Whatever is special about trained vocabularies is gone.
fn random_merges_encode_as_in_tiktoken() -> Result<(), Failed> {
    let (mut random, seed) = fresh();
    let alphabet = ["a", "b", "a", "b", "s", "'", " ", "\n", "中", "é", "1", ".", "B"];
    let mut tokens = single_bytes();
    let mut seen: HashSet<Vec<u8>> = tokens.iter().cloned().collect();
    let mut joinable: Vec<Vec<u8>> =
        alphabet.iter().flat_map(|c| c.bytes()).map(|byte| vec![byte]).collect();
    while tokens.len() < 1500 {
        let joined =
            [&joinable[random.below(joinable.len())][..], &joinable[random.below(joinable.len())]]
                .concat();
        if joined.len() <= 10 && seen.insert(joined.clone()) {
            joinable.push(joined.clone());
            tokens.push(joined);
        }
        let unreachable = some_of(&mut random, &alphabet, 3, 9).into_bytes();
        if random.below(8) == 0 && seen.insert(unreachable.clone()) {
            tokens.push(unreachable);
        }
    }
    shuffle(&mut random, &mut tokens);
    let mut cases: Vec<Vec<u8>> =
        (0..1500).map(|_| some_of(&mut random, &alphabet, 0, 40).into_bytes()).collect();
    // One piece each, on both sides of the length where tiktoken changes its algorithm.
    cases.extend(
        (0..300).map(|_| some_of(&mut random, &["a", "b", "s", "é"], 60, 600).into_bytes()),
    );
    cases.extend((0..300).map(|_| some_of(&mut random, &["a", "b"], 2, 30).into_bytes()));
    compare_made(&tokens, cases, seed)
}

/// The demo vocabulary's tokens with their ranks shuffled: most are no longer reached by merges.
fn shuffled_ranks_encode_as_in_tiktoken() -> Result<(), Failed> {
    let (mut random, seed) = fresh();
    let model = std::str::from_utf8(MODEL)?;
    let mut tokens = Vec::new();
    for line in model.lines() {
        tokens.push(STANDARD.decode(line.split(' ').next().unwrap_or_default())?);
    }
    shuffle(&mut random, &mut tokens);
    let cases = (0..1500).map(|_| random_text(&mut random).into_bytes()).collect();
    compare_made(&tokens, cases, seed)
}

fn compare_made(tokens: &[Vec<u8>], cases: Vec<Vec<u8>>, seed: u64) -> Result<(), Failed> {
    let model = model_file(tokens);
    let tokenizer = Tokenizer::from_bytes(
        model.as_bytes(),
        br#"{"added_tokens_decoder": {}}"#,
        tokens.len() as u32,
    )?;
    compare(&tokenizer, model.as_bytes(), cases, seed)
}

fn compare(
    tokenizer: &Tokenizer,
    model: &[u8],
    cases: Vec<Vec<u8>>,
    seed: u64,
) -> Result<(), Failed> {
    let encoded: Vec<String> = cases.iter().map(|case| STANDARD.encode(case)).collect();
    let request = serde_json::json!({ "model": std::str::from_utf8(model)?, "cases": encoded });
    let answer = python(&["--encode"], &serde_json::to_vec(&request)?)?;
    let expected: Vec<Vec<u32>> = serde_json::from_slice(&answer)?;
    if expected.len() != cases.len() {
        return Err(format!("{} answers to {} cases", expected.len(), cases.len()).into());
    }
    for (case, expected) in cases.iter().zip(expected) {
        let found = tokenizer.encode_text_bytes(case);
        if found != expected {
            let text = String::from_utf8_lossy(case);
            return Err(format!(
                "seed {seed}: {text:?}\ntiktoken: {expected:?}\n    ours: {found:?}"
            )
            .into());
        }
    }
    Ok(())
}

/// Runs `tools/tokenizer_corpus.py` and returns what it printed.
fn python(args: &[&str], input: &[u8]) -> Result<Vec<u8>, Failed> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/tokenizer_corpus.py");
    let mut child = Command::new("python3")
        .arg(script)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()?;
    // The script reads all its input before it prints, so writing first cannot block for ever.
    child.stdin.take().ok_or("the child has no stdin")?.write_all(input)?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(format!("tools/tokenizer_corpus.py failed: {}", output.status).into());
    }
    Ok(output.stdout)
}

fn has_tiktoken() -> bool {
    let mut command = Command::new("python3");
    command
        .args(["-c", "import tiktoken"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn fresh() -> (Random, u64) {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
    (Random(seed), seed)
}

fn some_of(random: &mut Random, parts: &[&str], at_least: usize, at_most: usize) -> String {
    let n = at_least + random.below(at_most - at_least + 1);
    (0..n).map(|_| random.pick(parts)).collect()
}

fn shuffle(random: &mut Random, tokens: &mut [Vec<u8>]) {
    for i in (1..tokens.len()).rev() {
        tokens.swap(i, random.below(i + 1));
    }
}

/// A few parts, each of a kind that the pattern treats in its own way.
fn random_text(random: &mut Random) -> String {
    let words = [
        "the", " of", "Whale", " LORD", "don", "it", "I", "x1", "ſ", "ß", "é", "Ω", "中文", "あア",
        "ǅ", "ʰ", "a\u{301}",
    ];
    let tails = ["'s", "'S", "'ſ", "'T", "'re", "'LL", "'ve", "'m", "'D", "'", "'sa", "’s"];
    let spaces = [
        " ", " ", "  ", "\n", "\r\n", "\r", "\t", "\u{a0}", "\u{3000}", "\u{2028}", "\u{85}",
        "\u{b}", "\u{200b}",
    ];
    let others = [
        "1",
        "23",
        "4567",
        "Ⅳ",
        "²",
        "١",
        "½",
        ".",
        "--",
        "!?",
        "(",
        "<|sep|>",
        "[BOS]",
        "👩‍👧",
        "🇮🇹",
        "\u{fffd}",
    ];
    let mut text = String::new();
    for _ in 0..random.below(12) {
        match random.below(6) {
            0 => text.push_str(&some_of(random, &words, 1, 3)),
            1 => text.push_str(&some_of(random, &tails, 1, 2)),
            2 => text.push_str(&some_of(random, &spaces, 1, 5)),
            3 => text.push_str(&some_of(random, &others, 1, 3)),
            4 => text.extend(
                (0..1 + random.below(8))
                    .filter_map(|_| char::from_u32(random.below(0x3000) as u32)),
            ),
            _ => text.extend(
                (0..1 + random.below(4))
                    .filter_map(|_| char::from_u32(random.below(0x11_0000) as u32)),
            ),
        }
    }
    text
}
