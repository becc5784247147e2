//! The examples do what they say, and are short.

mod common;

#[path = "../examples/ask.rs"]
mod ask;
#[path = "../examples/batch.rs"]
mod batch;
#[path = "../examples/chat.rs"]
mod chat;
#[path = "../examples/progress.rs"]
mod progress;
#[path = "../examples/two_models.rs"]
mod two_models;

use common::repository;

fn shown(out: Vec<u8>) -> String {
    String::from_utf8_lossy(&out).into_owned()
}

#[test]
fn ask_answers() {
    let mut out = Vec::new();
    ask::run(&repository("models/k3-nano"), "What is the capital of France?", &mut out).unwrap();
    assert!(shown(out).contains("Paris"));
}

#[test]
fn batch_answers_every_prompt_as_if_it_were_alone() {
    let model = repository("models/k3-nano");
    let texts = ["Once", "The sun", "A dog", "My"].map(String::from);
    let mut together = Vec::new();
    batch::run(&model, &texts, &mut together).unwrap();
    let mut alone = Vec::new();
    for text in &texts {
        batch::run(&model, std::slice::from_ref(text), &mut alone).unwrap();
    }
    assert!(texts.iter().all(|text| shown(alone.clone()).contains(text)));
    assert_eq!(shown(together), shown(alone));
}

#[test]
fn chat_goes_on_where_it_was() {
    let mut questions =
        "What is the capital of France?\nWhat is the capital of Italy?\n".as_bytes();
    let mut out = Vec::new();
    chat::run(&repository("models/k3-nano"), &mut questions, &mut out).unwrap();
    let out = shown(out);
    let counts = out.lines().filter_map(|line| line.split('[').nth(1)?.split(' ').next());
    let counts: Vec<usize> = counts.map(|count| count.parse().unwrap()).collect();
    assert_eq!(counts.len(), 2, "{out}");
    assert!(counts[1] > counts[0] + 10, "{out}");
    assert!(out.contains("Paris"), "{out}");
}

#[test]
fn progress_shows_how_far_it_is_and_ends() {
    let mut out = Vec::new();
    let model = repository("models/k3-nano");
    progress::run(&model, &"Once upon a time ".repeat(9), &mut out).unwrap();
    let out = shown(out);
    assert!(out.contains("100 %") && out.contains("prompt_tokens"), "{out}");
}

#[test]
fn two_models_in_one_program_do_not_disturb_each_other() {
    let [nano, tiny] = ["models/k3-nano", "fixtures/k3-tiny"].map(repository);
    let mut same = Vec::new();
    two_models::run(&nano, &nano, &mut same).unwrap();
    let out = shown(same);
    assert_eq!(out.matches("preferred 0 tokens").count(), out.lines().count(), "{out}");
    let mut other = Vec::new();
    two_models::run(&tiny, &tiny, &mut other).unwrap();
    assert!(shown(other).contains("preferred 0 tokens"));
}

#[test]
fn examples_are_short() {
    for example in std::fs::read_dir(repository("crates/rill/examples")).unwrap() {
        let path = example.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        // Measurements are not what a reader learns from.
        if text.contains("fn run(") {
            assert!(text.lines().count() < 40, "{} is long", path.display());
        }
    }
}
