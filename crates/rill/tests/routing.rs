//! Routing that is recorded and played back.

mod common;

use common::{assert_same_bits, demo};
use rill::{
    Engine, EngineOptions, Error, ForcedRouting, LayerIdx, Logits, Observer, RoutingRecorder, Trace,
};

const TOKENS: [u32; 9] = [1, 700, 31, 5, 3000, 31, 2, 9, 1200];

/// Forces and records at once.
struct Both(ForcedRouting, RoutingRecorder);

impl Observer for Both {
    fn choose(&mut self, layer: LayerIdx, ids: &mut [u32]) {
        self.0.choose(layer, ids);
    }

    fn routed(&mut self, layer: LayerIdx, ids: &[u32], weights: &[f32]) {
        self.1.routed(layer, ids, weights);
    }
}

/// In pieces, as a prompt and what follows it.
fn run(engine: &Engine, observer: &mut (dyn Observer + Send)) -> Vec<f32> {
    let mut session = engine.new_session();
    let mut logits = Vec::new();
    for piece in [&TOKENS[..6], &TOKENS[6..7], &TOKENS[7..]] {
        let piece = engine.forward_observed(&mut session, piece, Logits::All, observer);
        logits.extend(piece.expect("it runs"));
    }
    logits
}

fn engine() -> Engine {
    let options = EngineOptions { prefill_chunk: 4, ..EngineOptions::default() };
    Engine::open(demo(), &options).expect("the model opens")
}

fn recorded(engine: &Engine) -> (Trace, Vec<f32>) {
    let mut recorder = RoutingRecorder::new(engine.config());
    let logits = run(engine, &mut recorder);
    (recorder.trace().expect("something was recorded"), logits)
}

#[test]
fn what_was_recorded_is_what_is_used_when_it_is_forced() {
    let engine = engine();
    let (own, logits) = recorded(&engine);
    assert_eq!((own.n_tokens(), own.top_k()), (TOKENS.len(), engine.config().moe.top_k));

    // Its own routing changes nothing.
    let forced = || ForcedRouting::new(own.clone().into(), engine.config()).expect("it fits");
    assert_same_bits("forced to do as before", &run(&engine, &mut forced()), &logits);

    // Another one, from a recording that is shorter in both ways, repeats.
    let (n_layers, top_k) = (own.geometry().n_layers, own.top_k());
    let geometry = rill_stream::Geometry { n_layers: n_layers - 1, ..own.geometry() };
    let ids =
        (0..2 * (n_layers - 1)).flat_map(|i| (0..top_k).map(move |k| (i as usize + k) as u16));
    let short = Trace::new("short", geometry, top_k, ids.map(|id| id % 16).collect());
    let short = short.expect("the ids are right");
    let forced = ForcedRouting::new(short.clone().into(), engine.config()).expect("it fits");
    let mut both = Both(forced, RoutingRecorder::new(engine.config()));
    run(&engine, &mut both);
    let used = both.1.trace().expect("something was recorded");
    for token in 0..TOKENS.len() {
        for layer in 0..n_layers {
            let mut expected = short.chosen(token % 2, layer % (n_layers - 1)).to_vec();
            expected.sort_unstable();
            assert_eq!(used.chosen(token, layer), expected, "token {token}, layer {layer}");
        }
    }
}

#[test]
fn a_recording_of_another_model_is_refused_with_both_numbers() {
    let engine = engine();
    let (own, _) = recorded(&engine);
    let geometry = rill_stream::Geometry { n_layers: 1, n_experts: own.geometry().n_experts + 1 };
    let ids: Vec<u16> = (0..own.top_k() as u16).collect();
    let other = Trace::new("other", geometry, own.top_k(), ids).expect("the ids are right");
    let error = ForcedRouting::new(other.into(), engine.config()).expect_err("it does not fit");
    let error = error.to_string();
    let (n, found) = (own.geometry().n_experts, geometry.n_experts);
    assert!(error.contains(&n.to_string()) && error.contains(&found.to_string()), "{error}");
}

#[test]
fn experts_that_cannot_be_are_an_error_and_not_a_panic() {
    struct Wrong(fn(&mut [u32]));
    impl Observer for Wrong {
        fn choose(&mut self, _layer: LayerIdx, ids: &mut [u32]) {
            (self.0)(ids);
        }
    }
    let engine = engine();
    let wrong: [fn(&mut [u32]); 3] =
        [|ids| ids[ids.len() - 1] = u32::MAX, |ids| ids.reverse(), |ids| ids.fill(0)];
    for wrong in wrong {
        let mut session = engine.new_session();
        let error = engine
            .forward_observed(&mut session, &TOKENS, Logits::Last, &mut Wrong(wrong))
            .expect_err("nobody can choose that");
        assert!(matches!(error, Error::Routing { .. }), "{error}");
        assert_eq!(session.position(), 0);
    }
}

#[test]
fn counters_tell_prompts_from_single_tokens() {
    let engine = engine();
    let before = engine.counters();
    run(&engine, &mut ());
    let counters = engine.counters();
    assert_eq!((counters.prefill.tokens, counters.decode.tokens), (8, 1));
    let read = counters.experts.demanded_bytes + counters.experts.ahead_useful_bytes;
    assert!(read > 0 && counters.reads.bytes >= read, "{counters:?}");
    assert!(counters.open > std::time::Duration::ZERO);
    assert_eq!(counters.since(&before), counters);
    assert_eq!(counters.since(&counters).pace().tokens, 0);
}
