//! What every sampling option does, and that the same seed draws the same tokens on every machine.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::demo;
use proptest::prelude::*;
use rill::{
    Engine, EngineOptions, Error, FinishReason, GenerateOptions, Logits, Request, Sampler,
    SamplerState, Sampling, Scheduler, SchedulerOptions, StopMatcher, Token, TokenFilter,
};

const VOCAB: usize = 64;

fn usual() -> Sampling {
    Sampling { temperature: 1.0, ..Sampling::default() }
}

fn sampler(sampling: Sampling) -> Sampler {
    Sampler::new(sampling, VOCAB).expect("the parameters are in their ranges")
}

/// Logits of step `step`: twelve likely tokens, others 2 to 12 below them.
fn logits(step: usize) -> Vec<f32> {
    let unlikely = |i: usize| ((i * 11 + step * 5) % 41) as f32 * 0.25 - 10.0;
    let likely = |i: usize| (i + step).is_multiple_of(5);
    (0..VOCAB).map(|i| if likely(i) { 2.0 - i as f32 * 0.02 } else { unlikely(i) }).collect()
}

/// Draws and accepts, a token for every step of `steps`.
fn draw(sampler: &mut Sampler, steps: std::ops::Range<usize>) -> Vec<u32> {
    let mut one = |step| {
        let token = sampler.sample(&logits(step)).expect("not all are forbidden");
        sampler.accept(token);
        token
    };
    steps.map(&mut one).collect()
}

#[test]
fn every_option_draws_the_same_tokens_for_ever() {
    let seed = 5;
    // Committed, so that a change of algorithm or machine is noticed.
    let cases: &[(Sampling, [u32; 12])] = &[
        (Sampling { seed, ..usual() }, [15, 44, 13, 2, 6, 15, 30, 28, 22, 31, 20, 9]),
        (Sampling { temperature: 0.0, seed, ..usual() }, [0, 4, 3, 2, 1, 0, 4, 3, 2, 1, 0, 4]),
        (
            Sampling { temperature: 2.5, seed, ..usual() },
            [35, 40, 23, 7, 16, 30, 58, 53, 37, 61, 35, 14],
        ),
        (Sampling { top_k: 5, seed, ..usual() }, [5, 19, 3, 2, 1, 5, 24, 13, 7, 11, 5, 4]),
        (Sampling { top_p: 0.5, seed, ..usual() }, [5, 19, 8, 2, 1, 5, 24, 13, 12, 16, 5, 4]),
        (Sampling { min_p: 0.8, seed, ..usual() }, [5, 14, 3, 2, 1, 5, 14, 8, 7, 6, 5, 4]),
        (
            Sampling { temperature: 0.0, repetition_penalty: 1.5, seed, ..usual() },
            [20, 4, 3, 2, 1, 25, 9, 8, 7, 6, 30, 14],
        ),
        (
            Sampling { temperature: 0.0, presence_penalty: 0.15, seed, ..usual() },
            [0, 4, 3, 2, 1, 5, 9, 8, 7, 6, 0, 4],
        ),
        (
            Sampling { temperature: 0.0, frequency_penalty: 0.06, seed, ..usual() },
            [0, 4, 3, 2, 1, 0, 4, 3, 2, 1, 5, 9],
        ),
        (
            Sampling { logit_bias: vec![(7, 12.0), (9, 11.5)], seed, ..usual() },
            [7, 9, 9, 7, 9, 7, 9, 7, 7, 7, 9, 9],
        ),
        (
            Sampling {
                temperature: 0.8,
                top_k: 20,
                top_p: 0.95,
                min_p: 0.05,
                repetition_penalty: 1.2,
                presence_penalty: 0.4,
                frequency_penalty: 0.2,
                logit_bias: vec![(3, 2.0), (10, f32::NEG_INFINITY)],
                seed,
            },
            [25, 34, 3, 2, 6, 15, 34, 18, 22, 31, 30, 4],
        ),
    ];
    for (sampling, expected) in cases {
        let mut sampler = sampler(sampling.clone());
        sampler.accept_prompt(&[0, 5, 10, 15]);
        assert_eq!(draw(&mut sampler, 0..12), expected, "{sampling:?}");
    }
}

/// Any parameters in their ranges.
fn any_sampling() -> impl Strategy<Value = Sampling> {
    let penalties = (0.3f32..3.0, -2.0f32..2.0, -2.0f32..2.0);
    let bias = prop_oneof![4 => -5.0f32..5.0, 1 => Just(f32::NEG_INFINITY)];
    let logit_bias = prop::collection::vec((0..VOCAB as u32, bias), 0..4);
    let cuts = (0usize..20, 0.01f32..=1.0, 0.0f32..=1.0);
    let temperature = prop_oneof![Just(0.0f32), 0.1f32..3.0];
    (temperature, cuts, penalties, logit_bias, any::<u64>()).prop_map(
        |(temperature, (top_k, top_p, min_p), penalties, logit_bias, seed)| {
            let (repetition_penalty, presence_penalty, frequency_penalty) = penalties;
            Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                logit_bias,
                seed,
            }
        },
    )
}

fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let wild = prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::MAX, f32::MIN, -0.0]);
    prop::collection::vec(prop_oneof![9 => -20.0f32..20.0, 1 => wild], VOCAB)
}

proptest! {
    #[test]
    fn only_tokens_that_are_allowed_are_drawn(
        sampling in any_sampling(),
        steps in prop::collection::vec(any_logits(), 1..20),
        forbidden in prop::collection::vec(prop::bool::weighted(0.9), VOCAB),
    ) {
        let biased: Vec<u32> =
            sampling.logit_bias.iter().filter(|b| b.1 == f32::NEG_INFINITY).map(|b| b.0).collect();
        let allowed = |id: u32| !forbidden[id as usize] && !biased.contains(&id);
        let mut sampler = sampler(sampling);
        for mut logits in steps {
            for (l, _) in logits.iter_mut().zip(&forbidden).filter(|(_, forbidden)| **forbidden) {
                *l = f32::NEG_INFINITY;
            }
            match sampler.sample(&logits) {
                Some(token) => {
                    prop_assert!(allowed(token));
                    sampler.accept(token);
                }
                None => prop_assert!(!(0..VOCAB as u32).any(allowed)),
            }
        }
    }

    #[test]
    fn penalties_and_bias_are_those_of_their_formulas(
        (mine, rival) in (-9.0f32..9.0, -9.0f32..9.0),
        bias in -3.0f32..3.0,
        (repetition, presence, frequency) in (0.3f32..3.0, -2.0f32..2.0, -2.0f32..2.0),
        in_prompt: bool,
        n_generated in 0u32..5,
    ) {
        let mut sampler = sampler(Sampling {
            repetition_penalty: repetition,
            presence_penalty: presence,
            frequency_penalty: frequency,
            logit_bias: vec![(1, bias)],
            ..Sampling::default()
        });
        if in_prompt {
            sampler.accept_prompt(&[1, 1, 1]);
        }
        (0..n_generated).for_each(|_| sampler.accept(1));

        let mut expected = mine + bias;
        if in_prompt || n_generated > 0 {
            expected = if expected > 0.0 { expected / repetition } else { expected * repetition };
        }
        // OpenAI's formula: μ − c·frequency − (1 if c > 0)·presence.
        expected -= n_generated as f32 * frequency;
        if n_generated > 0 {
            expected -= presence;
        }
        // The greatest wins: token 1 as soon as it is above its rival.
        let taken = sampler.sample(&[f32::NEG_INFINITY, mine, rival]);
        prop_assert_eq!(taken, Some(if expected >= rival { 1 } else { 2 }));
        let just_above = expected + expected.abs() * f32::EPSILON + f32::MIN_POSITIVE;
        prop_assert_eq!(sampler.sample(&[f32::NEG_INFINITY, mine, just_above]), Some(2));
        prop_assert_eq!(sampler.sample(&[f32::NEG_INFINITY, mine, expected]), Some(1));
    }

    #[test]
    fn a_resumed_sampler_draws_what_the_first_would_have(
        sampling in any_sampling(),
        prompt in prop::collection::vec(0..VOCAB as u32, 0..5),
        (before, after) in (0usize..12, 1usize..12),
    ) {
        let allowed = |b: &&(u32, f32)| b.1 != f32::NEG_INFINITY;
        let logit_bias = sampling.logit_bias.iter().filter(allowed).copied().collect();
        let sampling = Sampling { logit_bias, ..sampling };
        let mut whole = sampler(sampling.clone());
        whole.accept_prompt(&prompt);
        draw(&mut whole, 0..before);

        let saved = serde_json::to_string(whole.state()).unwrap();
        let state: SamplerState = serde_json::from_str(&saved).unwrap();
        // What is saved has come so far; the seed is only for starting.
        let sampling = Sampling { seed: !sampling.seed, ..sampling };
        let mut resumed = Sampler::resume(sampling, VOCAB, state).unwrap();
        let steps = before..before + after;
        prop_assert_eq!(draw(&mut resumed, steps.clone()), draw(&mut whole, steps));
        prop_assert_eq!(resumed.state(), whole.state());
    }
}

#[test]
fn a_penalty_that_overflows_does_not_forbid() {
    let mut sampler = sampler(Sampling {
        repetition_penalty: 10.0,
        frequency_penalty: -3e38,
        logit_bias: vec![(0, -3e38)],
        ..Sampling::default()
    });
    (0..3).for_each(|_| sampler.accept(0));
    assert_eq!(sampler.sample(&[f32::MIN, f32::NEG_INFINITY]), Some(0));
    // Not NaN either, which any number would be preferred to.
    assert_eq!(sampler.sample(&[f32::MIN, f32::MIN]), Some(0));
}

#[test]
fn a_bias_of_minus_a_hundred_is_as_good_as_a_ban() {
    for bias in [-100.0, f32::NEG_INFINITY] {
        let likely = (0..VOCAB as u32).filter(|id| id % 5 == 0).map(|id| (id, bias)).collect();
        let mut sampler = sampler(Sampling { logit_bias: likely, ..usual() });
        let drawn: Vec<u32> = (0..500).filter_map(|_| sampler.sample(&logits(0))).collect();
        assert_eq!(drawn.len(), 500);
        assert!(drawn.iter().all(|id| id % 5 != 0), "{bias}");
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_refused_by_name() {
    let sampling = Sampling { logit_bias: vec![(63, 1.0), (64, 1.0)], ..usual() };
    let error = Sampler::new(sampling, VOCAB).unwrap_err();
    assert_eq!(
        error.to_string(),
        "logit_bias names token 64, which is not below the vocabulary size 64"
    );
    let state = SamplerState { random: 1, counts: [(3, 1), (900, 0)].into() };
    let error = Sampler::resume(usual(), VOCAB, state).unwrap_err();
    assert!(matches!(error, Error::UnknownToken { token: 900, vocab_size: VOCAB, .. }), "{error}");
}

fn open() -> Engine {
    Engine::open(demo(), &EngineOptions::default()).expect("the demo model opens")
}

const PROMPT: [u32; 4] = [3, 14, 15, 92];

/// All tokens of a generation, and why it ended.
fn generate(
    engine: &Engine,
    options: GenerateOptions,
    filter: Option<&mut Only>,
) -> (Vec<Token>, Option<FinishReason>) {
    let mut session = engine.new_session();
    let generation = engine.generate(&mut session, &PROMPT, options).expect("the prompt runs");
    let mut generation = match filter {
        Some(filter) => generation.filtered(filter),
        None => generation,
    };
    let tokens = generation.by_ref().collect::<Result<_, _>>().expect("every step runs");
    (tokens, generation.finish_reason())
}

fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

/// All options at once, and no end but `max_tokens`.
fn all_options(max_tokens: usize) -> GenerateOptions {
    let sampling = Sampling {
        temperature: 1.5,
        top_k: 100,
        top_p: 0.97,
        min_p: 0.002,
        repetition_penalty: 1.1,
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        logit_bias: vec![(7, -1.0)],
        seed: 11,
    };
    let stop_tokens = Some(Vec::new());
    GenerateOptions { max_tokens, sampling, stop_tokens, ..GenerateOptions::default() }
}

/// Allows the tokens of a list, one after another, then none.
struct Only {
    tokens: Vec<u32>,
    accepted: Vec<u32>,
}

impl TokenFilter for Only {
    fn mask(&mut self, logits: &mut [f32]) {
        let allowed = self.tokens.get(self.accepted.len()).map(|&token| token as usize);
        for (id, l) in logits.iter_mut().enumerate() {
            if Some(id) != allowed {
                *l = f32::NEG_INFINITY;
            }
        }
    }

    fn accept(&mut self, token: u32) {
        self.accepted.push(token);
    }
}

#[test]
fn a_model_and_a_seed_write_the_same_text_for_ever() {
    let engine = open();
    let (tokens, finish) = generate(&engine, all_options(12), None);
    assert_eq!(finish, Some(FinishReason::Length));
    // Committed, so that a change of algorithm or machine is noticed.
    assert_eq!(ids(&tokens), [3461, 115, 330, 321, 871, 312, 407, 789, 321, 987, 281, 294]);
    let mut other = all_options(12);
    other.sampling.seed = 12;
    assert_ne!(ids(&generate(&engine, other, None).0), ids(&tokens));
}

#[test]
fn a_generation_resumed_from_saved_state_writes_the_rest_of_the_text() {
    let engine = open();
    let whole = ids(&generate(&engine, all_options(12), None).0);

    let mut session = engine.new_session();
    let mut first = engine.generate(&mut session, &PROMPT, all_options(5)).unwrap();
    let mut tokens: Vec<u32> = first.by_ref().map(|token| token.unwrap().id).collect();
    let saved = serde_json::to_string(first.sampler_state()).unwrap();

    let resume = Some(serde_json::from_str(&saved).unwrap());
    let options = GenerateOptions { resume, ..all_options(7) };
    let rest = engine.generate(&mut session, &tokens[4..], options).unwrap();
    tokens.extend(rest.map(|token| token.unwrap().id));
    assert_eq!(tokens, whole);
}

#[test]
fn all_that_the_session_has_seen_is_context_but_only_what_was_generated_counts() {
    let engine = open();
    let next = |sampling| {
        let mut session = engine.new_session();
        engine.forward(&mut session, &PROMPT, Logits::None).unwrap();
        let options = GenerateOptions { sampling, ..all_options(1) };
        let mut generation = engine.generate(&mut session, &[40], options).unwrap();
        generation.next().unwrap().unwrap().id
    };
    // Of an earlier turn, and made by far the likeliest.
    let seen = Sampling { logit_bias: vec![(PROMPT[2], 1000.0)], ..Sampling::default() };
    assert_eq!(next(seen.clone()), PROMPT[2]);
    assert_ne!(next(Sampling { repetition_penalty: 1e6, ..seen.clone() }), PROMPT[2]);
    let penalties = Sampling { presence_penalty: 1e6, frequency_penalty: 1e6, ..seen };
    assert_eq!(next(penalties), PROMPT[2]);
}

#[test]
fn log_probabilities_are_the_models_whatever_the_sampling() {
    let engine = open();
    let logprobs = |n| GenerateOptions { logprobs: n, ..all_options(3) };
    assert!(generate(&engine, logprobs(None), None).0.iter().all(|t| t.logprobs.is_none()));

    // A filter must not change them either.
    let mut filter = Only { tokens: vec![40, 41, 42], accepted: Vec::new() };
    let (tokens, _) = generate(&engine, logprobs(Some(4)), Some(&mut filter));
    assert_eq!(ids(&tokens), [40, 41, 42]);
    let context = [&PROMPT[..], &[40, 41]].concat();
    let all = engine.forward(&mut engine.new_session(), &context, Logits::All).unwrap();
    let rows = all.chunks_exact(engine.config().vocab_size).skip(PROMPT.len() - 1);
    for (token, row) in tokens.iter().zip(rows) {
        let found = token.logprobs.as_ref().expect("they were asked for");
        let total: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
        let near = |id: u32, found: f32| {
            let exact = f64::from(row[id as usize]) - total.ln();
            assert!((f64::from(found) - exact).abs() < 1e-5, "{id}: {found}, not {exact}");
        };
        near(token.id, found.chosen);
        found.top.iter().for_each(|&(id, logprob)| near(id, logprob));
        assert_eq!(found.top.len(), 4);
        assert!(found.top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
        let greatest = row.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(row[found.top[0].0 as usize], greatest);
    }
}

#[test]
fn a_filter_decides_what_may_come_and_ends_the_text_by_forbidding_all() {
    let engine = open();
    let mut filter = Only { tokens: vec![9, 200, 7], accepted: Vec::new() };
    let (tokens, finish) = generate(&engine, all_options(12), Some(&mut filter));
    assert_eq!(ids(&tokens), [9, 200, 7]);
    assert_eq!(filter.accepted, [9, 200, 7]);
    assert_eq!(finish, Some(FinishReason::NothingAllowed));

    // A stop token ends the text without being part of it.
    let mut filter = Only { tokens: vec![9, 200, 7], accepted: Vec::new() };
    let options = GenerateOptions { stop_tokens: Some(vec![200]), ..all_options(12) };
    let (tokens, finish) = generate(&engine, options, Some(&mut filter));
    assert_eq!((ids(&tokens), filter.accepted), (vec![9], vec![9]));
    assert_eq!(finish, Some(FinishReason::Stop));
}

#[test]
fn a_scheduler_filters_too_and_gives_the_samplers_state_back() {
    let engine = Arc::new(open());
    let shared = Scheduler::new(engine.clone(), &SchedulerOptions::default()).unwrap();
    let mut request = Request::new(engine.new_session(), PROMPT.to_vec(), all_options(12));
    request.filter = Some(Box::new(Only { tokens: vec![9, 200, 9], accepted: Vec::new() }));
    let ended = shared.submit(request).unwrap().wait().unwrap();
    assert_eq!(ended.session.tokens(), [&PROMPT[..], &[9, 200, 9]].concat());
    assert!(matches!(ended.outcome, Ok(FinishReason::NothingAllowed)));
    let mut counts: BTreeMap<u32, u32> = PROMPT.map(|token| (token, 0)).into();
    counts.extend([(9, 2), (200, 1)]);
    assert_eq!(ended.sampler.counts, counts);
}

#[test]
fn a_stop_text_across_tokens_ends_the_text_before_it() {
    let engine = open();
    let tokenizer = engine.open_tokenizer().unwrap();
    let mut text = tokenizer.decoder();
    let mut stop = StopMatcher::new(vec!["there, Wor".to_owned()]);
    let written = tokenizer.encode_text("Hello there, World!");
    let mut filter = Only { tokens: written, accepted: Vec::new() };
    let mut session = engine.new_session();
    let mut shown = String::new();
    let generation = engine.generate(&mut session, &PROMPT, all_options(99)).unwrap();
    for token in generation.filtered(&mut filter) {
        let bytes = tokenizer.token_bytes(token.unwrap().id).unwrap();
        let step = stop.push(&text.push(bytes));
        shown += &step.emit;
        if step.stopped {
            break;
        }
    }
    shown += &stop.push(&text.finish()).emit;
    shown += &stop.finish();
    assert_eq!(shown, "Hello ");
    assert!(filter.accepted.len() < filter.tokens.len());
}
