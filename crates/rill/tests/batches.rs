//! Steps that sessions share: each gets the bits it gets alone.

mod common;

use std::ops::ControlFlow;

use common::{assert_same_bits, demo, k3_tiny, kimi_linear_tiny, reference};
use proptest::prelude::*;
use proptest::sample::select;
use rill::{
    Engine, EngineOptions, Error, Folder, LayerIdx, Logits, Observer, Part, RoutingRecorder,
    Session,
};

fn open(folder: &Folder) -> Engine {
    let options =
        EngineOptions { context: 64, sessions: 4, logits: 64, threads: 2, ..Default::default() };
    Engine::open(folder.clone(), &options).expect("it opens")
}

/// One session's tokens, and how many of them it has seen before the step that is shared.
#[derive(Clone, Debug)]
struct Timeline {
    ids: Vec<u32>,
    past: usize,
    logits: Logits,
}

fn timeline() -> impl Strategy<Value = Timeline> {
    let logits = select(vec![Logits::None, Logits::Last, Logits::All]);
    (1usize..9, 0usize..9, any::<u32>(), logits).prop_map(|(now, past, seed, logits)| {
        let ids = (0..now + past).map(|i| seed.wrapping_mul(i as u32 + 7) % 500).collect();
        Timeline { ids, past, logits }
    })
}

fn session_with_past(engine: &Engine, timeline: &Timeline) -> Session {
    let mut session = engine.new_session();
    if timeline.past > 0 {
        let past = &timeline.ids[..timeline.past];
        engine.forward(&mut session, past, Logits::None).expect("it runs");
    }
    session
}

fn assert_same_sessions(a: &Session, b: &Session) {
    assert_eq!(a.tokens(), b.tokens());
    for layer in 0..8 {
        match (a.kda_state(layer), b.kda_state(layer)) {
            (Some(a), Some(b)) => assert_same_bits("KDA state", a, b),
            (a, b) => assert_eq!(a.is_some(), b.is_some()),
        }
    }
}

/// Stops after a layer.
struct StopAfter(usize);

impl Observer for StopAfter {
    fn after_layer(&mut self, layer: LayerIdx, _hidden: &mut [f32]) -> ControlFlow<()> {
        if layer.0 == self.0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn sessions_that_share_a_step_get_the_bits_they_get_alone(
        timelines in prop::collection::vec(timeline(), 1..6),
        stopped in prop::option::of((0usize..6, 0usize..4)),
    ) {
        for folder in [k3_tiny(), kimi_linear_tiny()] {
            let engine = open(&folder);
            let mut alone = Vec::new();
            for timeline in &timelines {
                let mut session = session_with_past(&engine, timeline);
                let now = &timeline.ids[timeline.past..];
                let mut recorder = RoutingRecorder::new(engine.config());
                let logits = engine
                    .forward_observed(&mut session, now, timeline.logits, &mut recorder)
                    .expect("it runs");
                alone.push((logits, session, recorder.trace().expect("it has tokens")));
            }

            let mut sessions: Vec<Session> =
                timelines.iter().map(|timeline| session_with_past(&engine, timeline)).collect();
            let mut recorders: Vec<_> =
                timelines.iter().map(|_| RoutingRecorder::new(engine.config())).collect();
            let mut stop = StopAfter(stopped.map_or(99, |(_, layer)| layer));
            let stopped = stopped.map(|(part, _)| part % timelines.len());
            let mut stop = Some(&mut stop);
            let parts = sessions.iter_mut().zip(&timelines).zip(&mut recorders).enumerate();
            let mut parts: Vec<Part<'_>> = parts
                .map(|(i, ((session, timeline), recorder))| Part {
                    session,
                    tokens: &timeline.ids[timeline.past..],
                    logits: timeline.logits,
                    observer: match stop.take_if(|_| stopped == Some(i)) {
                        Some(stop) => stop,
                        None => recorder,
                    },
                })
                .collect();
            let together = engine.step(&mut parts).expect("it runs");

            for (i, (logits, session, routing)) in alone.iter().enumerate() {
                match &together[i] {
                    Some(found) => {
                        prop_assert!(stopped != Some(i));
                        assert_same_bits("logits", found, logits);
                        assert_same_sessions(&sessions[i], session);
                        let found = recorders[i].trace().expect("it has tokens");
                        prop_assert_eq!(&found, routing);
                    }
                    None => {
                        prop_assert_eq!(stopped, Some(i));
                        let before = session_with_past(&engine, &timelines[i]);
                        assert_same_sessions(&sessions[i], &before);
                        // It can go on from there as if nothing had been.
                        let now = &timelines[i].ids[timelines[i].past..];
                        let again = engine
                            .forward(&mut sessions[i], now, timelines[i].logits)
                            .expect("it runs");
                        assert_same_bits("after a stop", &again, logits);
                    }
                }
            }
        }
    }
}

#[test]
fn an_expert_that_several_sessions_choose_is_asked_for_once() {
    let engine = open(&demo());
    let ids = &reference(&demo()).input_ids[..6];
    let asked = |sessions: usize| {
        let before = engine.expert_counters().wanted;
        let mut sessions: Vec<Session> = (0..sessions).map(|_| engine.new_session()).collect();
        let mut observers = vec![(); sessions.len()];
        let mut parts: Vec<Part<'_>> = sessions
            .iter_mut()
            .zip(&mut observers)
            .map(|(session, observer)| Part {
                session,
                tokens: ids,
                logits: Logits::Last,
                observer,
            })
            .collect();
        engine.step(&mut parts).expect("it runs");
        engine.expert_counters().wanted - before
    };
    let one = asked(1);
    assert!(one > 0);
    assert_eq!(asked(3), one, "three sessions with the same tokens want the same experts");
}

#[test]
fn a_step_with_more_tokens_than_there_is_room_for_is_refused_and_changes_nothing() {
    let options = EngineOptions { context: 64, prefill_chunk: 4, ..Default::default() };
    let engine = Engine::open(k3_tiny(), &options).expect("it opens");
    let [mut a, mut b] = [engine.new_session(), engine.new_session()];
    let [mut first, mut second] = [(), ()];
    let mut parts = [
        Part { session: &mut a, tokens: &[1, 2, 3], logits: Logits::Last, observer: &mut first },
        Part { session: &mut b, tokens: &[4, 5], logits: Logits::Last, observer: &mut second },
    ];
    match engine.step(&mut parts) {
        Err(Error::StepTooLarge { tokens: 5, most: 4 }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!((a.position(), b.position()), (0, 0));
}
