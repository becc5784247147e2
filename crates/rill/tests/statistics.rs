//! What a token took: it comes with the token, and adds up to what the engine has counted.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{floor_bytes, k3_tiny};
use rill::{Engine, EngineOptions, Event, GenerateOptions, Request, RunCounters, Scheduler, Token};

const PROMPT: [u32; 5] = [5, 77, 3, 300, 12];

fn engine() -> EngineOptions {
    EngineOptions { context: 32, sessions: 3, threads: 1, readers: 1, ..Default::default() }
}

fn open(options: &EngineOptions) -> Engine {
    Engine::open(k3_tiny(), options).expect("it opens")
}

fn options(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, stop_tokens: Some(Vec::new()), ..Default::default() }
}

#[test]
fn tokens_bring_what_their_steps_took() {
    // Which must read for every token.
    let budget_bytes = floor_bytes(&k3_tiny(), &engine());
    let engine = open(&EngineOptions { budget_bytes, ..engine() });
    let mut session = engine.new_session();
    assert_eq!(**session.last_step(), RunCounters::default());
    let before = engine.counters();
    let mut tokens: Vec<Token> = Vec::new();
    for token in engine.generate(&mut session, &PROMPT, options(6)).expect("it runs") {
        tokens.push(token.expect("it goes on"));
    }
    let all = engine.counters().since(&before);
    // The first came of the prompt, at the floor the last piece of it: a token.
    let decoded = &tokens[1..];
    assert!(decoded.iter().all(|token| token.step.decode.tokens == 1));
    let sum =
        |of: fn(&RunCounters) -> u64| decoded.iter().map(|token| of(&token.step)).sum::<u64>();
    assert_eq!(sum(|step| step.decode.tokens), all.decode.tokens);
    let time: Duration = decoded.iter().map(|token| token.step.decode.time).sum();
    assert_eq!(time, all.decode.time);
    for token in &tokens {
        assert!(token.step.trunk.streamed_bytes > 0 && token.step.experts.wanted > 0);
        assert!(token.step.pace().time >= token.step.stall());
    }
    assert!(sum(|step| step.trunk.streamed_bytes) < all.trunk.streamed_bytes);
}

#[test]
fn tokens_of_a_shared_step_bring_what_all_of_it_took() {
    let engine = Arc::new(open(&engine()));
    let scheduler = Scheduler::new(engine.clone(), &Default::default()).expect("it starts");
    let answers: Vec<_> = (0..3)
        .map(|_| Request::new(engine.new_session(), PROMPT.to_vec(), options(8)))
        .map(|request| scheduler.submit(request).expect("it is taken"))
        .collect();
    let steps = answers.into_iter().flatten().filter_map(|event| match event {
        Event::Token(token) => Some(token.step),
        _ => None,
    });
    let steps: Vec<Arc<RunCounters>> = steps.collect();
    assert_eq!(steps.len(), 24);
    // Some steps had three writers: the tokens of each all say so.
    let shared = steps.iter().filter(|step| step.decode.tokens == 3).count();
    assert!(shared >= 3 && shared.is_multiple_of(3), "{shared}");
}
