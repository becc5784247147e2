//! Requests that share an engine: each gets what it gets alone, and none waits for ever.

mod common;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use common::{floor_bytes, k3_tiny, kimi_linear_tiny, within_a_minute};
use proptest::prelude::*;
use rill::{
    CacheCounters, CachePolicy, Ended, Engine, EngineOptions, Error, Event, Expert, ExpertError,
    ExpertId, ExpertSource, FinishReason, Folder, GenerateOptions, LayerIdx, Log, Observer, Prefix,
    Request, Sampling, Scheduler, SchedulerOptions, Session, Token, TokenFilter,
};

const CONTEXT: usize = 64;

/// For so many sessions, with no more memory than they and a step take.
fn open(folder: Folder, sessions: usize) -> Arc<Engine> {
    let options = EngineOptions {
        context: CONTEXT,
        sessions,
        threads: 2,
        cache: CachePolicy::Lru,
        ..EngineOptions::default()
    };
    // Something over the floor, so that a step has room for more than a token.
    let budget_bytes = floor_bytes(&folder, &options) + (8 << 20);
    let options = EngineOptions { budget_bytes, ..options };
    Arc::new(Engine::open(folder, &options).expect("it opens"))
}

fn scheduler(engine: &Arc<Engine>, options: SchedulerOptions) -> Scheduler {
    Scheduler::new(engine.clone(), &options).expect("it starts")
}

fn options(max_tokens: usize, seed: u64) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        sampling: Sampling {
            temperature: 1.0,
            repetition_penalty: 1.2,
            presence_penalty: 0.5,
            seed,
            ..Sampling::default()
        },
        logprobs: Some(2),
        stop_tokens: Some(Vec::new()),
        ..GenerateOptions::default()
    }
}

fn prompt(n: usize, seed: u64) -> Vec<u32> {
    (0..n as u64).map(|i| ((seed + 1) * (i + 3) * 7919 % 509) as u32).collect()
}

/// What is left of a request when it has ended; its session has been given back.
#[derive(Debug)]
struct Done {
    written: Vec<Token>,
    outcome: Result<FinishReason, Error>,
    state: State,
}

/// What a session has seen and remembers.
#[derive(Debug, PartialEq)]
struct State {
    tokens: Vec<u32>,
    kda: Vec<Option<Vec<u32>>>,
}

impl State {
    fn of(session: &Session) -> Self {
        let bits = |state: &[f32]| state.iter().map(|value| value.to_bits()).collect();
        let kda = (0..8).map(|layer| session.kda_state(layer).map(bits)).collect();
        Self { tokens: session.tokens().to_vec(), kda }
    }
}

/// Hands a request in and calls `at_token` with the number of tokens written, after each and before
/// the first; breaking cancels.
fn submit(
    scheduler: &Scheduler,
    request: Request,
    at_token: impl FnMut(usize) -> ControlFlow<()> + Send + 'static,
) -> Result<mpsc::Receiver<Done>, Error> {
    submit_then(scheduler, request, at_token, |written, ended| {
        let Ended { session, outcome, .. } = ended;
        let state = State::of(&session);
        drop(session);
        Done { written, outcome, state }
    })
}

/// The same, giving what `then` makes of all that was written, and how it ended.
fn submit_then<T: Send + 'static>(
    scheduler: &Scheduler,
    request: Request,
    mut at_token: impl FnMut(usize) -> ControlFlow<()> + Send + 'static,
    mut then: impl FnMut(Vec<Token>, Ended) -> T + Send + 'static,
) -> Result<mpsc::Receiver<T>, Error> {
    let (done, wait) = mpsc::channel();
    let mut written = Vec::new();
    scheduler.submit_with(request, move |event| {
        match event {
            Event::Token(token) => written.push(token),
            Event::Ended(ended) => {
                let _ = done.send(then(std::mem::take(&mut written), *ended));
                return ControlFlow::Continue(());
            }
            _ => {}
        }
        at_token(written.len())
    })?;
    Ok(wait)
}

fn alone(engine: &Engine, mut session: Session, prompt: &[u32], options: GenerateOptions) -> Done {
    let mut answer = engine.generate(&mut session, prompt, options).expect("it runs");
    let written = answer.by_ref().collect::<Result<_, _>>().expect("it runs");
    let outcome = Ok(answer.finish_reason().expect("it has ended"));
    Done { written, outcome, state: State::of(&session) }
}

/// A request as the property test makes them up.
#[derive(Clone, Debug)]
struct Made {
    prompt: usize,
    max_tokens: usize,
    seed: u64,
    priority: i32,
    /// Cancelled after so many tokens.
    cancel_after: Option<usize>,
    /// Goes on from a fork of the first request's session instead of from nothing.
    forked: bool,
    /// Waits so many tokens of the request before it until it comes.
    arrives_after: usize,
    /// Its session is saved and dropped after so many tokens of its prompt and of its text, and loaded to
    /// go on.
    saved_after: Option<(usize, usize)>,
}

fn made() -> impl Strategy<Value = Made> {
    let whole = (1usize..20, 0usize..10, 0u64..1000, -1i32..2, any::<bool>(), 0usize..4);
    let breaks = (
        prop::option::weighted(0.25, 0usize..6),
        prop::option::weighted(0.4, any::<prop::sample::Index>()),
    );
    (whole, breaks).prop_map(|(whole, (cancel_after, saved_after))| {
        let (prompt, max_tokens, seed, priority, forked, arrives_after) = whole;
        let saved_after = saved_after.map(|at| match at.index(prompt + max_tokens) {
            at if at < prompt => (at, 0),
            at => (prompt, at - prompt + 1),
        });
        let saved_after = saved_after.filter(|(prompt, _)| *prompt > 0);
        Made {
            prompt,
            max_tokens,
            seed,
            priority,
            cancel_after,
            forked,
            arrives_after,
            saved_after,
        }
    })
}

/// Saves the session of a request that was broken off, loads it as soon as there is room for it, and
/// goes on with the rest of the prompt or of the text.
fn go_on(
    shared: &Scheduler,
    made: &Made,
    (mut written, ended): (Vec<Token>, Ended),
    at_token: impl Fn(usize) -> ControlFlow<()> + Send + 'static,
) -> Done {
    let Ended { session, sampler, outcome, .. } = ended;
    let state = State::of(&session);
    if !matches!(outcome, Ok(FinishReason::Length)) {
        return Done { written, outcome, state };
    }
    let engine = shared.engine();
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("session");
    engine.save_session(&session, &path, "").expect("the disk has room");
    drop(session);
    let session = loop {
        match engine.load_session(&path) {
            Ok((session, _)) => break session,
            // Others were let in meanwhile.
            Err(Error::OverBudget(_)) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(State::of(&session), state, "what was loaded is what was saved");
    let mut options = options(made.max_tokens - written.len(), made.seed);
    let rest = match written.last() {
        None => prompt(made.prompt, made.seed).split_off(made.saved_after.map_or(0, |at| at.0)),
        Some(_) if options.max_tokens == 0 => return Done { written, outcome, state },
        Some(last) => {
            options.resume = Some(sampler);
            vec![last.id]
        }
    };
    let mut request = Request::new(session, rest, options);
    request.priority = made.priority;
    let before = written.len();
    let wait = submit(shared, request, move |more| at_token(before + more));
    let done = wait.expect("it is taken").recv().expect("it ends");
    written.extend(done.written);
    Done { written, ..done }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]

    #[test]
    fn requests_that_come_and_go_as_they_like_get_the_bits_they_get_alone(
        requests in prop::collection::vec(made(), 1..=16),
        room in 1usize..5,
        k3 in any::<bool>(),
    ) {
        let folder = if k3 { k3_tiny() } else { kimi_linear_tiny() };
        // Forks take their room at once. For the others there is less than they need together, so some
        // wait until others have ended.
        let forked = requests.iter().filter(|made| made.forked).count();
        let engine = open(folder, 1 + forked + room);
        let mut trunk = engine.new_session();
        engine.forward(&mut trunk, &prompt(5, 77), rill::Logits::None).expect("it runs");
        let start = |made: &Made| match made.forked {
            true => trunk.fork().expect("there is room"),
            false => engine.new_session(),
        };
        let of = |made: &Made| {
            (prompt(made.prompt, made.seed), options(made.max_tokens, made.seed))
        };
        let expected = requests.iter().map(|made| {
            let (prompt, options) = of(made);
            alone(&engine, start(made), &prompt, options)
        });
        let expected: Vec<Done> = expected.collect();

        let options = SchedulerOptions { max_sessions: 99, queue: 99, ..Default::default() };
        let shared = scheduler(&engine, options);
        let done: Vec<Done> = std::thread::scope(|scope| {
            let shared = &shared;
            let mut threads = Vec::new();
            let mut before: Option<mpsc::Receiver<()>> = None;
            for made in &requests {
                if let Some(before) = before {
                    // Ends too, when the one before does.
                    before.iter().take(made.arrives_after).for_each(drop);
                }
                let (mut prompt, mut options) = of(made);
                if let Some((tokens, written)) = made.saved_after {
                    prompt.truncate(tokens);
                    options.max_tokens = written;
                }
                let mut request = Request::new(start(made), prompt, options);
                request.priority = made.priority;
                let (counter, count) = mpsc::channel();
                before = Some(count);
                let cancel_after = made.cancel_after;
                let at_token = move |written| {
                    let _ = counter.send(());
                    match cancel_after.is_some_and(|n| written >= n) {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    }
                };
                threads.push(if made.saved_after.is_some() {
                    let later = at_token.clone();
                    let wait = submit_then(shared, request, at_token, |written, ended| (written, ended));
                    let wait = wait.expect("it is taken");
                    scope.spawn(move || go_on(shared, made, wait.recv().expect("it ends"), later))
                } else {
                    let wait = submit(shared, request, at_token).expect("it is taken");
                    scope.spawn(move || wait.recv().expect("it ends"))
                });
            }
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
        });
        for ((made, expected), done) in requests.iter().zip(&expected).zip(done) {
            match done.outcome.expect("it runs") {
                FinishReason::Cancelled => {
                    prop_assert!(made.cancel_after.is_some());
                    prop_assert!(expected.written.starts_with(&done.written));
                    prop_assert!(expected.state.tokens.starts_with(&done.state.tokens));
                }
                FinishReason::Length => {
                    prop_assert_eq!(&done.written, &expected.written);
                    prop_assert_eq!(&done.state, &expected.state);
                }
                other => panic!("{other:?}"),
            }
        }
        drop(shared);
        prop_assert!(engine.ledger().peak_bytes() <= engine.plan().options.budget_bytes);
    }
}

#[test]
fn writers_go_on_while_a_long_prompt_is_taken_in() {
    within_a_minute(|| {
        let engine = open(k3_tiny(), 2);
        // Without time for the writer alone, so that no clock has a say.
        let shared =
            scheduler(&engine, SchedulerOptions { prefill_share: 1.0, ..Default::default() });
        let (started, wait) = mpsc::channel();
        let request = Request::new(engine.new_session(), prompt(3, 1), options(40, 1));
        let writer = submit(&shared, request, move |written| {
            let _ = started.send(written);
            ControlFlow::Continue(())
        })
        .expect("it is taken");
        assert_eq!(wait.recv(), Ok(0));
        let request = Request::new(engine.new_session(), prompt(60, 2), options(1, 2));
        let mut answer = shared.submit(request).expect("it is taken");
        let pieces = answer.by_ref().take_while(|event| matches!(event, Event::Prefilled { .. }));
        assert!(pieces.count() >= 4, "sixteen tokens at a time");
        // All that was written by then, of one token a step.
        let written = wait.try_iter().last().unwrap_or(0);
        assert!(written >= 3, "{written} tokens beside the prompt");
        drop(answer);
        assert_eq!(writer.recv().expect("it ends").written.len(), 40);
    });
}

#[test]
fn a_request_without_room_waits_for_another_to_end_and_is_refused_if_none_can() {
    within_a_minute(|| {
        let engine = open(k3_tiny(), 1);
        let options_shared = SchedulerOptions {
            max_sessions: 2,
            patience: Duration::from_millis(200),
            ..Default::default()
        };
        let shared = scheduler(&engine, options_shared);
        let fill = engine.ledger().lease("the rest", {
            let session: u64 = engine.plan().session_bytes();
            engine.ledger().free_bytes() - session
        });
        let fill = fill.expect("that much is free");
        let requests = [1, 2].map(|seed| {
            let request = Request::new(engine.new_session(), prompt(3, seed), options(5, seed));
            submit(&shared, request, |_| ControlFlow::Continue(())).expect("it is taken")
        });
        for request in requests {
            assert!(matches!(request.recv().expect("it ends").outcome, Ok(FinishReason::Length)));
        }
        // An idle session holds what there is.
        let mut idle = engine.new_session();
        engine.forward(&mut idle, &[1], rill::Logits::None).expect("there is room for one");
        let request = Request::new(engine.new_session(), prompt(3, 3), options(5, 3));
        let refused = submit(&shared, request, |_| ControlFlow::Continue(())).expect("it is taken");
        match refused.recv().expect("it ends").outcome {
            Err(Error::OverBudget(over)) => assert!(over.asked_bytes > 0),
            other => panic!("{other:?}"),
        }
        // The same with an idle session that is dropped in time.
        let patient = SchedulerOptions { max_sessions: 2, ..Default::default() };
        let shared = scheduler(&engine, patient);
        let request = Request::new(engine.new_session(), prompt(3, 3), options(5, 3));
        let waits = submit(&shared, request, |_| ControlFlow::Continue(())).expect("it is taken");
        assert!(waits.recv_timeout(Duration::from_millis(100)).is_err(), "there is no room yet");
        drop(idle);
        assert!(matches!(waits.recv().expect("it ends").outcome, Ok(FinishReason::Length)));
        drop(fill);
    });
}

/// An engine with room for so many snapshots of sessions of this length.
fn open_with_snapshots(folder: Folder, snapshots: u64, tokens: usize) -> Arc<Engine> {
    let options = EngineOptions { context: tokens, sessions: 2, threads: 2, ..Default::default() };
    let bytes = {
        let engine = Engine::open(folder.clone(), &options).expect("it opens");
        let mut session = engine.new_session();
        engine.forward(&mut session, &prompt(tokens, 0), rill::Logits::None).expect("it runs");
        session.snapshot_bytes()
    };
    let options = EngineOptions { snapshot_bytes: snapshots * bytes, ..options };
    let budget_bytes = floor_bytes(&folder, &options) + (8 << 20);
    let options = EngineOptions { budget_bytes, ..options };
    Arc::new(Engine::open(folder, &options).expect("it opens"))
}

/// Runs a prompt to its end; what it wrote, and tokens run and reused.
fn ask(
    shared: &Scheduler,
    prompt: &[u32],
    boundaries: &[usize],
    namespace: &str,
) -> (Vec<Token>, [usize; 2]) {
    let session = shared.engine().new_session();
    let mut request = Request::new(session, prompt.to_vec(), options(4, 5));
    request.prefix = Some(Prefix { namespace: namespace.into(), boundaries: boundaries.to_vec() });
    let mut written = Vec::new();
    for event in shared.submit(request).expect("it is taken") {
        match event {
            Event::Token(token) => written.push(token),
            Event::Ended(ended) => {
                assert!(matches!(ended.outcome, Ok(FinishReason::Length)), "{ended:?}");
                let taken = ended.statistics;
                return (written, [taken.prompt_tokens, taken.reused_tokens]);
            }
            Event::Prefilled { .. } => {}
        }
    }
    panic!("it did not end");
}

/// Counts tokens times layers, and distinct experts of each piece of a prompt and layer.
#[derive(Clone, Default)]
struct Counting(Arc<[AtomicUsize; 2]>);

impl Observer for Counting {
    fn routed(&mut self, layer: LayerIdx, ids: &[u32], weights: &[f32]) {
        assert_eq!(ids.len(), weights.len(), "layer {layer}");
        let distinct: BTreeSet<&u32> = ids.iter().collect();
        self.0[0].fetch_add(ids.len(), SeqCst);
        self.0[1].fetch_add(distinct.len(), SeqCst);
    }
}

#[test]
fn a_second_turn_of_a_long_conversation_asks_for_the_experts_of_its_new_tokens_alone() {
    within_a_minute(|| {
        let engine = open_with_snapshots(k3_tiny(), 2, 700);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let first = prompt(480, 1);
        let (answer, ran) = ask(&shared, &first, &[], "");
        assert_eq!(ran, [480, 0]);
        let answer = answer.iter().map(|token| token.id).collect();
        let second = [first, answer, prompt(7, 2)].concat();

        let counting = Counting::default();
        let mut request = Request::new(engine.new_session(), second.clone(), options(4, 5));
        request.prefix = Some(Prefix { namespace: "".into(), boundaries: Vec::new() });
        request.observer = Some(Box::new(counting.clone()));
        let before = engine.expert_counters().wanted;
        let done = submit(&shared, request, |_| ControlFlow::Continue(())).expect("it is taken");
        let done = done.recv().expect("it ends");

        let [chosen, distinct] = counting.0.each_ref().map(|n| n.load(SeqCst));
        // The answer's last token was written and not run, like that of this answer.
        let new_tokens = 1 + 7 + 3;
        let moe_layers = engine.config().layer_counts()[3];
        assert_eq!(chosen, new_tokens * moe_layers * engine.config().moe.top_k);
        assert_eq!(engine.expert_counters().wanted - before, distinct as u64);
        let alone = alone(&engine, engine.new_session(), &second, options(4, 5));
        assert_eq!((done.written, done.state), (alone.written, alone.state));
    });
}

#[test]
fn prompts_that_begin_alike_share_their_beginning_up_to_a_boundary() {
    within_a_minute(|| {
        let engine = open_with_snapshots(k3_tiny(), 9, CONTEXT);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let system = prompt(17, 1);
        let with = |question| [system.clone(), prompt(9, question)].concat();
        assert_eq!(ask(&shared, &with(2), &[17], "").1, [26, 0]);
        let (written, ran) = ask(&shared, &with(3), &[17], "");
        assert_eq!(ran, [9, 17]);
        let expected = alone(&engine, engine.new_session(), &with(3), options(4, 5)).written;
        assert_eq!(written, expected);
        // One that differs before the boundary shares nothing.
        let mut other = with(2);
        other[5] += 1;
        let (written, ran) = ask(&shared, &other, &[17], "");
        assert_eq!(ran, [26, 0]);
        let expected = alone(&engine, engine.new_session(), &other, options(4, 5)).written;
        assert_eq!(written, expected);
        // The same prompt once more: its last token at least must be run, and a boundary lies before.
        assert_eq!(ask(&shared, &with(3), &[17], "").1, [9, 17]);
    });
}

#[test]
fn nobody_finds_the_beginnings_of_another_name_space() {
    within_a_minute(|| {
        let engine = open_with_snapshots(k3_tiny(), 9, CONTEXT);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let ids = prompt(20, 1);
        assert_eq!(ask(&shared, &ids, &[10], "alice").1, [20, 0]);
        assert_eq!(ask(&shared, &ids, &[10], "bob").1, [20, 0]);
        assert_eq!(ask(&shared, &ids, &[10], "alice").1, [10, 10]);
    });
}

#[test]
fn beginnings_take_no_more_than_was_set_aside_and_the_oldest_goes_first() {
    within_a_minute(|| {
        let engine = open_with_snapshots(k3_tiny(), 2, CONTEXT);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let ask = |seed| ask(&shared, &prompt(20, seed), &[10], "").1[1];
        let room = engine.plan().options.snapshot_bytes;
        // Each leaves two: at the boundary, and at its end.
        for (seed, reused) in [(1, 0), (1, 10), (2, 0), (3, 0), (1, 0), (1, 10)] {
            assert_eq!(ask(seed), reused);
            let held = engine.ledger().held().into_iter().find(|(what, _)| *what == "snapshots");
            assert!(held.is_some_and(|(_, bytes)| bytes <= room));
        }
    });
}

/// Cancels a request when it reaches a layer, and notes how far it came.
struct CancelAt {
    layer: usize,
    cancel: Arc<AtomicBool>,
    last: Arc<AtomicUsize>,
}

impl Observer for CancelAt {
    fn after_layer(&mut self, layer: LayerIdx, _hidden: &mut [f32]) -> ControlFlow<()> {
        self.last.store(layer.0, SeqCst);
        if layer.0 == self.layer {
            self.cancel.store(true, SeqCst);
        }
        ControlFlow::Continue(())
    }
}

#[test]
fn cancelling_takes_effect_within_a_layer_and_leaves_the_session_at_a_whole_token() {
    within_a_minute(|| {
        let engine = open(k3_tiny(), 2);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let options = options(5, 1);
        let last = Arc::default();
        let observer =
            CancelAt { layer: 1, cancel: options.cancel.clone(), last: Arc::clone(&last) };
        let mut request = Request::new(engine.new_session(), prompt(3, 1), options);
        request.observer = Some(Box::new(observer));
        let done = submit(&shared, request, |_| ControlFlow::Continue(())).expect("it is taken");
        let done = done.recv().expect("it ends");
        assert!(matches!(done.outcome, Ok(FinishReason::Cancelled)));
        assert_eq!(last.load(SeqCst), 1, "no layer saw it after that");
        assert!(done.state.tokens.is_empty(), "it had seen no whole piece");
    });
}

#[test]
fn a_request_ends_at_its_deadline_with_what_it_has() {
    within_a_minute(|| {
        let engine = open(k3_tiny(), 2);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let mut request = Request::new(engine.new_session(), prompt(3, 1), options(50, 1));
        request.deadline = Some(Instant::now() + Duration::from_secs(3600));
        let far = submit(&shared, request, |_| ControlFlow::Continue(())).expect("it is taken");
        let mut request = Request::new(engine.new_session(), prompt(3, 2), options(50, 1));
        request.deadline = Some(Instant::now());
        let near = submit(&shared, request, |_| ControlFlow::Continue(())).expect("it is taken");
        let near = near.recv().expect("it ends");
        assert!(matches!(near.outcome, Ok(FinishReason::Deadline)), "{near:?}");
        assert!(near.written.len() < 50);
        let far = far.recv().expect("it ends");
        assert!(matches!(far.outcome, Ok(FinishReason::Length)));
    });
}

#[test]
fn a_full_queue_refuses_and_a_closing_scheduler_ends_what_it_has() {
    within_a_minute(|| {
        let engine = open(k3_tiny(), 1);
        let options_shared = SchedulerOptions { queue: 2, ..Default::default() };
        let shared = scheduler(&engine, options_shared);
        // Holds the thread up until it is let go.
        let (go, gate) = mpsc::channel::<()>();
        let (entered, inside) = mpsc::channel();
        let request = Request::new(engine.new_session(), prompt(3, 1), options(50, 1));
        let held = submit(&shared, request, move |_| {
            let _ = entered.send(());
            let _ = gate.recv();
            ControlFlow::Continue(())
        });
        inside.recv().expect("it has begun");
        let request = || Request::new(engine.new_session(), prompt(3, 2), options(50, 2));
        let submit = || submit(&shared, request(), |_| ControlFlow::Continue(()));
        let waiting = [submit().expect("there is room"), submit().expect("there is room")];
        match submit() {
            Err(Error::QueueFull { waiting: 2 }) => {}
            other => panic!("{other:?}"),
        }
        drop(go);
        drop(shared);
        for wait in waiting.into_iter().chain([held.expect("it was taken")]) {
            let done = wait.recv().expect("it is told");
            assert!(matches!(done.outcome, Ok(FinishReason::Cancelled | FinishReason::Length)));
        }
    });
}

#[test]
fn dropping_an_answer_cancels_it_alone_even_if_others_have_the_same_options() {
    within_a_minute(|| {
        let engine = open(k3_tiny(), 2);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let options = options(30, 1);
        let request = |seed| Request::new(engine.new_session(), prompt(3, seed), options.clone());
        let dropped = shared.submit(request(1)).expect("it is taken");
        let other =
            submit(&shared, request(2), |_| ControlFlow::Continue(())).expect("it is taken");
        drop(dropped);
        assert_eq!(other.recv().expect("it ends").written.len(), 30);
        // The flag in the options is for all that have it.
        options.cancel.store(true, SeqCst);
        for seed in [1, 2] {
            let wait = submit(&shared, request(seed), |_| ControlFlow::Continue(()));
            let done = wait.expect("it is taken").recv().expect("it ends");
            assert!(matches!(done.outcome, Ok(FinishReason::Cancelled)));
        }
    });
}

#[test]
fn a_sink_that_panics_ends_its_own_request_and_no_other() {
    within_a_minute(|| {
        let engine = open(k3_tiny(), 2);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let request = |seed| Request::new(engine.new_session(), prompt(3, seed), options(9, seed));
        let bad = submit(&shared, request(1), |written| {
            assert!(written < 2, "this is what the test is about");
            ControlFlow::Continue(())
        });
        let good = submit(&shared, request(2), |_| ControlFlow::Continue(())).expect("it is taken");
        assert_eq!(good.recv().expect("it ends").written.len(), 9);
        let bad = bad.expect("it is taken").recv().expect("it ends");
        assert!(matches!(bad.outcome, Ok(FinishReason::Cancelled)));
        assert_eq!(bad.written.len(), 2);
    });
}

/// Panics in one of the methods of observers and filters, when it has been called so often.
struct Panicking {
    method: &'static str,
    calls_left: usize,
}

impl Panicking {
    fn called(&mut self, method: &str) {
        if self.method == method {
            assert!(self.calls_left > 0, "this is what the test is about");
            self.calls_left -= 1;
        }
    }
}

impl Observer for Panicking {
    fn after_layer(&mut self, _layer: LayerIdx, _hidden: &mut [f32]) -> ControlFlow<()> {
        self.called("after_layer");
        ControlFlow::Continue(())
    }

    fn choose(&mut self, _layer: LayerIdx, ids: &mut [u32]) {
        if self.method == "choose" && self.calls_left == 0 {
            // No choice that any step would accept.
            ids.fill(u32::MAX);
        }
        self.called("choose");
    }

    fn routed(&mut self, _layer: LayerIdx, _ids: &[u32], _weights: &[f32]) {
        self.called("routed");
    }

    fn normed(&mut self, _hidden: &[f32]) {
        self.called("normed");
    }
}

impl TokenFilter for Panicking {
    fn mask(&mut self, logits: &mut [f32]) {
        logits[0] = f32::NEG_INFINITY;
        self.called("mask");
    }

    fn accept(&mut self, _token: u32) {
        self.called("accept");
    }
}

#[test]
fn an_observer_or_a_filter_that_panics_ends_its_own_request_and_no_other() {
    within_a_minute(|| {
        let engine = open(k3_tiny(), 2);
        let shared = scheduler(&engine, SchedulerOptions::default());
        let request = |seed| Request::new(engine.new_session(), prompt(3, seed), options(9, seed));
        let expected = alone(&engine, engine.new_session(), &prompt(3, 2), options(9, 2));
        // The latter three are called once for a token.
        let methods = [
            ("after_layer", 40),
            ("choose", 40),
            ("routed", 40),
            ("normed", 4),
            ("mask", 4),
            ("accept", 4),
        ];
        for (method, later) in methods {
            for calls_left in [0, later] {
                let mut bad = request(1);
                let panicking = Panicking { method, calls_left };
                let what = match method {
                    "mask" | "accept" => {
                        bad.filter = Some(Box::new(panicking));
                        "token filter"
                    }
                    _ => {
                        bad.observer = Some(Box::new(panicking));
                        "observer"
                    }
                };
                let [bad, good] = [bad, request(2)].map(|request| {
                    submit(&shared, request, |_| ControlFlow::Continue(())).expect("it is taken")
                });
                let good = good.recv().expect("it ends");
                assert_eq!(good.written, expected.written, "{method}");
                assert_eq!(good.state, expected.state, "{method}");
                let bad = bad.recv().expect("it ends");
                match bad.outcome {
                    Err(Error::Panicked { what: found }) => assert_eq!(found, what, "{method}"),
                    other => panic!("{method}: {other:?}"),
                }
                assert!(bad.written.len() < 9, "{method}");
                let seen = bad.state.tokens.len();
                assert!([0, 3, 4, 5, 6, 7].contains(&seen), "{method}: {seen} tokens are no steps");
            }
        }
    });
}

/// Notes every (layer, expert) that a request uses.
#[derive(Clone, Default)]
struct Used(Arc<Mutex<BTreeSet<(usize, u32)>>>);

impl Observer for Used {
    fn routed(&mut self, layer: LayerIdx, ids: &[u32], _weights: &[f32]) {
        self.0.lock().expect("nobody panics with it").extend(ids.iter().map(|&id| (layer.0, id)));
    }
}

/// Fails to deliver one expert.
struct Lacking {
    inner: Box<dyn ExpertSource>,
    expert: (usize, u32),
}

impl ExpertSource for Lacking {
    fn fetch(
        &self,
        layer: LayerIdx,
        experts: &[ExpertId],
        consume: &mut dyn FnMut(ExpertId, Expert<'_>),
    ) -> Result<(), Error> {
        let (lacking, id) = self.expert;
        if layer.0 == lacking && experts.contains(&ExpertId(id)) {
            let source = Box::new(ExpertError::Missing);
            return Err(Error::Expert { layer, expert: ExpertId(id), source });
        }
        self.inner.fetch(layer, experts, consume)
    }

    fn counters(&self) -> CacheCounters {
        self.inner.counters()
    }
}

#[test]
fn an_expert_that_cannot_be_read_ends_only_the_requests_that_need_it() {
    within_a_minute(|| {
        let prompts = [1, 2, 3].map(|seed| prompt(6, seed));
        let engine = open(k3_tiny(), 4);
        let runs = [0, 1, 2].map(|i| {
            let used = Used::default();
            let mut session = engine.new_session();
            let mut observer = used.clone();
            let answer = engine.generate_observed(
                &mut session,
                &prompts[i],
                options(6, i as u64),
                Some(&mut observer),
            );
            let written: Vec<Token> =
                answer.expect("it runs").map(|token| token.expect("it runs")).collect();
            (written, used.0.lock().unwrap().clone())
        });
        let others: BTreeSet<_> = runs[0].1.union(&runs[2].1).copied().collect();
        let expert = *runs[1].1.difference(&others).next().expect("it has an expert of its own");
        drop(engine);

        let lines = Arc::new(Mutex::new(Vec::new()));
        let heard = lines.clone();
        let log = Log::to(move |line| heard.lock().unwrap().push(line.to_owned()));
        let engine_options =
            EngineOptions { context: CONTEXT, sessions: 4, threads: 2, log, ..Default::default() };
        let engine = Engine::open(k3_tiny(), &engine_options).expect("it opens");
        let engine = Arc::new(engine.with_experts(|inner| Box::new(Lacking { inner, expert })));
        let shared = scheduler(&engine, SchedulerOptions::default());
        // The first is held until all have come, so that they share steps.
        let (go, gate) = mpsc::channel::<()>();
        let mut gate = Some(gate);
        let waits = [0, 1, 2].map(|i| {
            let gate = gate.take();
            let request =
                Request::new(engine.new_session(), prompts[i].clone(), options(6, i as u64));
            let wait = submit(&shared, request, move |_| {
                if let Some(gate) = &gate {
                    let _ = gate.recv();
                }
                ControlFlow::Continue(())
            });
            wait.expect("it is taken")
        });
        drop(go);
        let done = waits.map(|wait| wait.recv().expect("it ends"));
        for i in [0, 2] {
            assert!(matches!(done[i].outcome, Ok(FinishReason::Length)), "{:?}", done[i]);
            assert_eq!(done[i].written, runs[i].0);
        }
        match &done[1].outcome {
            Err(Error::Expert { layer, expert: found, .. }) => {
                assert_eq!((layer.0, found.0), expert);
            }
            other => panic!("{other:?}"),
        }
        assert!(runs[1].0.starts_with(&done[1].written));
        let lines = lines.lock().unwrap();
        assert!(lines.iter().any(|line| line.contains("expert slots")), "{lines:?}");
        assert!(lines.iter().any(|line| line.contains("trying them one by one")), "{lines:?}");
    });
}
