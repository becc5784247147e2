//! What the trained demo model is known to answer.

mod common;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use common::demo;
use rill::chat::{ChatFormat, ReplyPart};
use rill::{Engine, EngineOptions, GenerateOptions, Tokenizer};

/// The countries k3-nano was shown. Its training list had 243 entries, one of them twice.
const CAPITALS: &str = include_str!("data/capitals.tsv");

fn ask(engine: &Engine, tokenizer: &Tokenizer, question: &str) -> String {
    let format = ChatFormat::detect(tokenizer).expect("the demo model has a chat format");
    let prompt = format.render_question(tokenizer, question, false).expect("it renders");
    let mut reader = format.reply_reader(tokenizer, false);
    let mut session = engine.new_session();
    let options = GenerateOptions { max_tokens: 60, ..Default::default() };
    let mut content = Vec::new();
    for token in engine.generate(&mut session, &prompt, options).expect("the prompt runs") {
        let token = token.expect("every step runs").id;
        if matches!(reader.push(token), ReplyPart::Content) {
            content.extend_from_slice(tokenizer.token_bytes(token).expect("a known token"));
        }
    }
    String::from_utf8(content).expect("whole characters")
}

#[test]
fn at_least_240_of_the_243_capitals_are_right() {
    let lines: Vec<&str> = CAPITALS.lines().collect();
    assert_eq!(lines.len(), 242);
    let engine = Engine::open(demo(), &EngineOptions { threads: 1, ..Default::default() }).unwrap();
    let tokenizer = engine.open_tokenizer().unwrap();
    let next = AtomicUsize::new(0);
    let right = AtomicUsize::new(0);
    // One engine, two sessions at a time.
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(line) = lines.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (country, capital) = line.split_once('\t').expect("two columns");
                    let question = format!("What is the capital of {country}?");
                    let answer = ask(&engine, &tokenizer, &question);
                    if answer == format!("The capital of {country} is {capital}.") {
                        right.fetch_add(1, Ordering::Relaxed);
                    } else {
                        println!("{country}: {answer}");
                    }
                }
            });
        }
    });
    let right = right.into_inner();
    assert!(right >= 240, "{right} of {}", lines.len());
}

#[test]
fn perplexity_of_the_held_out_text_is_within_a_tenth_of_a_percent() {
    let engine = Engine::open(demo(), &EngineOptions::default()).unwrap();
    let text = demo().read("heldout.txt", 1 << 20).unwrap();
    let ids = engine.open_tokenizer().unwrap().encode_text_bytes(&text);
    let mut reported = 0;
    let found = engine
        .perplexity(&ids, 255, &mut |done, all| {
            reported += 1;
            assert!(done == reported && all == 39);
            ControlFlow::Continue(())
        })
        .unwrap();
    println!("{found:?}");
    assert_eq!((found.windows, found.tokens, reported), (39, 9945, 39));
    assert!((found.perplexity / 64.5513 - 1.0).abs() < 1e-3, "{found:?}");
}
