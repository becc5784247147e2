//! Placement never changes bits: chunks, threads, kernels and machines.

mod common;

use std::ops::ControlFlow;

use common::{assert_same_bits, demo, fingerprint, k3_tiny, kimi_linear_tiny, reference};
use rill::{Engine, EngineOptions, Folder, KernelChoice, LayerIdx, Logits, Observer};
use rill_kernels::Kernels;

fn models() -> [(Folder, u64); 3] {
    // Fingerprints of the logits of all positions of each reference prompt, the same on x86-64
    // and 64-bit Arm. A change of arithmetic changes them: then docs/arithmetic.md changes too.
    [
        (demo(), 0x300e_c37b_ccff_a739),
        (k3_tiny(), 0xbe65_2996_6f04_3a1f),
        (kimi_linear_tiny(), 0xc6b7_6f72_6d91_5bb4),
    ]
}

fn logits(folder: &Folder, options: &EngineOptions) -> Vec<f32> {
    let engine = Engine::open(folder.clone(), options).expect("the model opens");
    let ids = reference(folder).input_ids;
    engine.forward(&mut engine.new_session(), &ids, Logits::All).expect("it runs")
}

#[test]
fn logits_have_the_committed_fingerprints() {
    let found =
        models().map(|(folder, _)| fingerprint(&logits(&folder, &EngineOptions::default())));
    assert_eq!(found.map(|h| format!("{h:#018x}")), models().map(|m| format!("{:#018x}", m.1)));
}

#[test]
fn prefill_chunks_do_not_change_bits() {
    for (folder, _) in models() {
        let with =
            |prefill_chunk| logits(&folder, &EngineOptions { prefill_chunk, ..Default::default() });
        let whole = with(usize::MAX);
        for chunk in [1, 3, 64] {
            assert_same_bits(&format!("chunks of {chunk}"), &with(chunk), &whole);
        }
    }
}

#[test]
fn dividing_a_prompt_into_calls_does_not_change_bits() {
    for (folder, _) in models() {
        let engine = Engine::open(folder.clone(), &EngineOptions::default()).unwrap();
        let ids = reference(&folder).input_ids;
        let whole = engine.forward(&mut engine.new_session(), &ids, Logits::All).unwrap();
        for piece in [1, 7] {
            let mut session = engine.new_session();
            let mut pieces = Vec::new();
            for ids in ids.chunks(piece) {
                pieces.extend(engine.forward(&mut session, ids, Logits::All).unwrap());
            }
            assert_eq!(session.position(), ids.len());
            assert_same_bits(&format!("calls of {piece}"), &pieces, &whole);
        }
        let last = engine.forward(&mut engine.new_session(), &ids, Logits::Last).unwrap();
        let vocab = engine.config().vocab_size;
        assert_same_bits("last position alone", &last, &whole[whole.len() - vocab..]);
    }
}

#[test]
fn thread_counts_do_not_change_bits() {
    for (folder, _) in models() {
        let with = |threads| logits(&folder, &EngineOptions { threads, ..Default::default() });
        let one = with(1);
        for threads in [2, 5] {
            assert_same_bits(&format!("{threads} threads"), &with(threads), &one);
        }
    }
}

#[test]
fn kernels_do_not_change_bits() {
    for (folder, _) in models() {
        let with = |kernels| logits(&folder, &EngineOptions { kernels, ..Default::default() });
        let fastest = with(KernelChoice::Fastest);
        for set in Kernels::all() {
            let named = KernelChoice::Named(set.name().to_owned());
            assert_same_bits(set.name(), &with(named), &fastest);
        }
    }
}

#[test]
fn kernels_that_do_not_exist_are_refused_with_those_that_do() {
    let kernels = KernelChoice::Named("abacus".to_owned());
    let options = EngineOptions { kernels, ..Default::default() };
    let error = Engine::open(demo(), &options).err().map(|error| error.to_string());
    let error = error.expect("there is no abacus");
    assert!(error.contains("abacus") && error.contains("scalar"), "{error}");
}

#[test]
fn a_cloned_session_continues_with_the_same_bits() {
    let engine = Engine::open(demo(), &EngineOptions::default()).unwrap();
    let ids = reference(&demo()).input_ids;
    let mut session = engine.new_session();
    engine.forward(&mut session, &ids[..100], Logits::Last).unwrap();
    let mut fork = session.fork().unwrap();
    // What the fork does in between is its own affair.
    engine.forward(&mut fork, &ids[..30], Logits::Last).unwrap();
    let mut copy = session.fork().unwrap();
    let a = engine.forward(&mut session, &ids[100..], Logits::All).unwrap();
    let b = engine.forward(&mut copy, &ids[100..], Logits::All).unwrap();
    let whole = engine.forward(&mut engine.new_session(), &ids, Logits::All).unwrap();
    assert_same_bits("original and copy", &a, &b);
    assert_same_bits("whole", &a, &whole[whole.len() - a.len()..]);
}

/// Changes what a layer leaves.
struct Disturbing;

impl Observer for Disturbing {
    fn after_layer(&mut self, _layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        hidden.iter_mut().for_each(|value| *value *= 0.5);
        ControlFlow::Continue(())
    }
}

#[test]
fn going_back_to_a_snapshot_takes_nothing_from_another_past_with_the_same_tokens() {
    let engine = Engine::open(demo(), &EngineOptions::default()).unwrap();
    let ids = reference(&demo()).input_ids;
    let mut session = engine.new_session();
    engine.forward(&mut session, &ids[..20], Logits::Last).unwrap();
    let snapshot = session.snapshot().unwrap();
    let expected = engine.forward(&mut session, &ids[20..25], Logits::All).unwrap();
    let mut other = engine.new_session();
    engine.forward_observed(&mut other, &ids[..20], Logits::Last, &mut Disturbing).unwrap();
    for mut session in [session, other, engine.session_from(&snapshot).unwrap()] {
        session.restore(&snapshot).unwrap();
        assert_eq!(session.tokens(), &ids[..20]);
        let found = engine.forward(&mut session, &ids[20..25], Logits::All).unwrap();
        assert_same_bits("after going back", &found, &expected);
    }
}
