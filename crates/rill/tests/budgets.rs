//! The budget changes the clock and never the answer.

mod common;

use common::{assert_same_bits, demo, k3_tiny, kimi_linear_tiny, reference};
use rill::{CachePolicy, Engine, EngineOptions, Error, Folder, Logits};

/// Tokens that go in at once, and those that follow one by one.
const PROMPT: usize = 40;
const DECODED: usize = 24;

/// Logits of the whole prompt and of each later token.
fn logits(engine: &Engine, ids: &[u32]) -> Vec<f32> {
    let mut session = engine.new_session();
    let mut out = engine.forward(&mut session, &ids[..PROMPT], Logits::All).expect("it runs");
    for &id in &ids[PROMPT..] {
        out.extend(engine.forward(&mut session, &[id], Logits::Last).expect("it runs"));
    }
    out
}

/// 64 tokens: the reference prompt, over and over.
fn tokens(folder: &Folder) -> Vec<u32> {
    reference(folder).input_ids.into_iter().cycle().take(PROMPT + DECODED).collect()
}

fn open(folder: &Folder, options: &EngineOptions) -> Engine {
    Engine::open(folder.clone(), options).expect("the model opens")
}

/// The least that works, and what a plan of any budget takes at most.
fn floor_and_all(folder: &Folder, options: &EngineOptions) -> (u64, u64) {
    let below = EngineOptions { budget_bytes: 1, ..options.clone() };
    let floor = match Engine::open(folder.clone(), &below).err() {
        Some(Error::BelowFloor { plan }) => plan.floor_bytes,
        other => panic!("a budget of one byte: {other:?}"),
    };
    (floor, open(folder, options).plan().shares.total())
}

/// Small, so that the differences between budgets are more than logits.
fn base() -> EngineOptions {
    let context = PROMPT + DECODED;
    EngineOptions { context, logits: PROMPT, threads: 2, readers: 4, ..EngineOptions::default() }
}

fn models() -> [Folder; 3] {
    [demo(), k3_tiny(), kimi_linear_tiny()]
}

#[test]
fn twelve_budgets_from_the_floor_to_everything_give_the_same_bits() {
    let mut streaming = 0;
    for folder in models() {
        let ids = tokens(&folder);
        let expected = logits(&open(&folder, &base()), &ids);
        let (floor, all) = floor_and_all(&folder, &base());
        let mut seen = std::collections::BTreeSet::new();
        for step in 0..12 {
            let budget_bytes = floor + (all - floor) * step / 11;
            // Everything else changes as well, so that it is met in many combinations.
            let options = EngineOptions {
                budget_bytes,
                cache: [CachePolicy::Lru, CachePolicy::Lfu, CachePolicy::Scored][step as usize % 3],
                readers: 1 + step as usize % 4,
                direct: step % 2 == 0,
                overlap: step % 3 != 2,
                verify: step % 5 != 1,
                threads: [2, 1, 4][step as usize / 4],
                ..base()
            };
            let engine = open(&folder, &options);
            assert_same_bits(
                &format!("a budget of {budget_bytes}"),
                &logits(&engine, &ids),
                &expected,
            );
            assert!(engine.ledger().peak_bytes() <= budget_bytes);
            let plan = engine.plan();
            let pinned = plan.pinned.iter().filter(|pinned| **pinned).count();
            seen.insert((pinned, plan.head_resident, plan.expert_slots));
            let streamed = engine.trunk_counters().streamed_bytes;
            assert_eq!(streamed > 0, plan.trunk_read_bytes > 0, "{plan:?}");
            streaming += usize::from(streamed > 0);
            if step == 11 {
                assert_eq!(streamed, 0, "everything is held");
            }
        }
        assert!(seen.len() >= 4, "the budgets are divided differently: {seen:?}");
    }
    assert!(streaming >= 4, "the trunk was streamed {streaming} times");
}

#[test]
fn while_the_system_pages_slots_are_given_back_and_the_bits_stay() {
    for folder in models() {
        let ids = tokens(&folder);
        let engine = open(&folder, &base());
        let expected = logits(&engine, &ids);
        assert_eq!(engine.given_slots(), 0);
        let before = engine.ledger().held_bytes();
        let mut calm = 3;
        let engine = open(&folder, &base()).with_pressure(move || match calm {
            0 => rill::Pressure::Paging,
            _ => {
                calm -= 1;
                rill::Pressure::Calm
            }
        });
        assert_same_bits("paging", &logits(&engine, &ids), &expected);
        let (given, slots) = (engine.given_slots(), engine.expert_slots());
        let left = slots.empty + slots.reading + slots.resident + slots.loose + slots.ahead;
        assert!(given > 0 && left >= engine.config().moe.top_k, "{given}, {left}");
        assert_eq!(left as u64 + given, engine.plan().expert_slots);
        assert!(engine.ledger().held_bytes() <= before - given * engine.plan().record_bytes);
    }
}

#[test]
fn reading_ahead_does_not_change_bits() {
    for folder in models() {
        let ids = tokens(&folder);
        let expected = logits(&open(&folder, &base()), &ids);
        for lookahead in [0, 4, 8] {
            let options = EngineOptions { lookahead, ..base() };
            let (floor, all) = floor_and_all(&folder, &options);
            for budget_bytes in [floor, floor + (all - floor) / 3] {
                let engine = open(&folder, &EngineOptions { budget_bytes, ..options.clone() });
                let what = format!("{lookahead} ahead, a budget of {budget_bytes}");
                assert_same_bits(&what, &logits(&engine, &ids), &expected);
                let counters = engine.expert_counters();
                let ahead = counters.ahead_useful + counters.ahead_wasted;
                assert!(ahead == 0 || lookahead > 0, "{counters:?}");
            }
        }
    }
}

#[test]
fn policies_readers_and_kinds_of_reads_do_not_change_bits_at_the_floor() {
    let folder = k3_tiny();
    let ids = tokens(&folder);
    let expected = logits(&open(&folder, &base()), &ids);
    let (floor, _) = floor_and_all(&folder, &EngineOptions { readers: 4, threads: 4, ..base() });
    let floor = EngineOptions { budget_bytes: floor, ..base() };
    for cache in [CachePolicy::Lru, CachePolicy::Lfu, CachePolicy::Scored] {
        for readers in 1..=4 {
            for direct in [true, false] {
                let options = EngineOptions { cache, readers, direct, ..floor.clone() };
                let what = format!("{cache:?}, {readers} readers, direct {direct}");
                assert_same_bits(&what, &logits(&open(&folder, &options), &ids), &expected);
            }
        }
    }
}

#[test]
fn a_prompt_reads_each_expert_once_per_layer() {
    for folder in models() {
        let ids = tokens(&folder);
        // The least budget with room for the activations of the whole prompt.
        let (floor, all) = floor_and_all(&folder, &base());
        let mut engines = (0..=32u64).map(|step| {
            let budget_bytes = floor + (2 * all - floor) * step / 32;
            open(&folder, &EngineOptions { budget_bytes, ..base() })
        });
        let engine = engines.find(|engine| engine.plan().prefill_chunk >= PROMPT);
        let engine = engine.expect("twice the memory is enough");
        let mut distinct = Distinct::default();
        let mut session = engine.new_session();
        engine
            .forward_observed(&mut session, &ids[..PROMPT], Logits::Last, &mut distinct)
            .expect("it runs");
        let counters = engine.expert_counters();
        assert_eq!((counters.wanted, counters.demanded), (distinct.0, distinct.0));
        // Token by token it is more, and not all of it from memory unless all is held.
        let one_by_one = EngineOptions { prefill_chunk: 1, ..base() };
        let engine = open(&folder, &one_by_one);
        engine.forward(&mut engine.new_session(), &ids[..PROMPT], Logits::Last).expect("it runs");
        assert!(engine.expert_counters().wanted > distinct.0);
    }
}

/// Counts the experts of each layer that any token chose.
#[derive(Default)]
struct Distinct(u64);

impl rill::Observer for Distinct {
    fn routed(&mut self, _layer: rill::LayerIdx, ids: &[u32], _weights: &[f32]) {
        self.0 += ids.iter().collect::<std::collections::BTreeSet<_>>().len() as u64;
    }
}

#[test]
fn budget_below_floor_is_refused_and_the_floor_works() {
    for folder in models() {
        let base = || EngineOptions { logits: 1, ..base() };
        let below = EngineOptions { budget_bytes: 1, ..base() };
        let Some(Error::BelowFloor { plan }) = Engine::open(folder.clone(), &below).err() else {
            panic!("one byte is enough?")
        };
        let floor = plan.floor_bytes;
        let just_below = EngineOptions { budget_bytes: floor - 1, ..base() };
        let error = Engine::open(folder.clone(), &just_below).err().expect("refused").to_string();
        assert!(error.contains(&floor.to_string()), "{error}");
        let engine = open(&folder, &EngineOptions { budget_bytes: floor, ..base() });
        let ids = tokens(&folder);
        let mut session = engine.new_session();
        engine.forward(&mut session, &ids, Logits::Last).expect("it runs");
        // Another session, or logits of all positions, are more than the floor has room for.
        let error = engine.forward(&mut engine.new_session(), &ids, Logits::Last).unwrap_err();
        assert!(matches!(error, Error::OverBudget(_)), "{error}");
        let error = engine.forward(&mut session, &ids[..1], Logits::All).unwrap_err();
        assert!(matches!(error, Error::ContextFull { .. }), "{error}");
        drop(session);
        let mut session = engine.new_session();
        let error = engine.forward(&mut session, &ids, Logits::All).unwrap_err();
        assert!(matches!(error, Error::OverBudget(_)), "{error}");
        engine.forward(&mut session, &ids, Logits::Last).expect("there is room for one");
    }
}
