//! Several sessions and several engines at once, with the least memory there is for them: the same
//! bits as alone, and none waits for ever.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{
    assert_same_bits, demo, floor_bytes, k3_tiny, kimi_linear_tiny, reference, within_a_minute,
};
use rill::{
    CacheCounters, Engine, EngineOptions, Error, Expert, ExpertId, ExpertSource, Folder, LayerIdx,
    Logits,
};

/// Tokens of a prompt, and those that follow one by one.
const PROMPT: usize = 12;
const DECODED: usize = 4;
const SESSIONS: usize = 4;

fn options() -> EngineOptions {
    EngineOptions {
        context: PROMPT + DECODED,
        sessions: SESSIONS,
        threads: 3,
        ..EngineOptions::default()
    }
}

/// With a budget between the floor, 0, and so much that everything is held, 1.
fn open(folder: &Folder, share: f64) -> Engine {
    let floor = floor_bytes(folder, &options());
    let floor_options = EngineOptions { budget_bytes: floor, ..options() };
    let plan =
        Engine::open(folder.clone(), &floor_options).expect("the floor is enough").plan().clone();
    let more = plan.recommended_bytes.saturating_sub(floor) as f64 * share;
    let options = EngineOptions { budget_bytes: floor + more as u64, ..options() };
    let engine = Engine::open(folder.clone(), &options).expect("the floor is enough");
    assert!(share > 0.0 || engine.plan().trunk_read_bytes > 0, "some of the trunk is streamed");
    engine
}

/// Logits of the last token of a prompt and of all that follow.
fn run(engine: &Engine, ids: &[u32]) -> Vec<f32> {
    let mut session = engine.new_session();
    let mut step = |ids| engine.forward(&mut session, ids, Logits::Last).expect("it runs");
    let mut logits = step(&ids[..PROMPT]);
    ids[PROMPT..].chunks(1).for_each(|id| logits.extend(step(id)));
    logits
}

/// What each session is given: the reference prompt from another place on.
fn prompts(folder: &Folder) -> Vec<Vec<u32>> {
    let ids = reference(folder).input_ids;
    let from = |start| ids.iter().cycle().skip(start).take(PROMPT + DECODED).copied().collect();
    (0..SESSIONS).map(from).collect()
}

#[test]
fn sessions_in_many_threads_with_little_memory_get_the_bits_of_one_alone() {
    within_a_minute(|| {
        let folders = [demo(), k3_tiny(), kimi_linear_tiny()];
        // At the floor, and where longer pieces of a prompt are spread over threads.
        for (folder, share) in
            folders.iter().flat_map(|folder| [0.0, 0.12].map(|share| (folder, share)))
        {
            let prompts = prompts(folder);
            let engine = open(folder, share);
            let alone: Vec<Vec<f32>> = prompts.iter().map(|ids| run(&engine, ids)).collect();
            let together: Vec<Vec<f32>> = std::thread::scope(|scope| {
                let engine = &engine;
                let threads = prompts.iter().map(|ids| scope.spawn(move || run(engine, ids)));
                let threads: Vec<_> = threads.collect();
                threads.into_iter().map(|t| t.join().expect("it does not panic")).collect()
            });
            for (together, alone) in together.iter().zip(&alone) {
                assert_same_bits("together", together, alone);
            }
            assert!(engine.ledger().peak_bytes() <= engine.plan().options.budget_bytes);
        }
    });
}

#[test]
fn engines_side_by_side_at_their_floors_do_not_wait_for_each_other() {
    within_a_minute(|| {
        let folders = [k3_tiny(), kimi_linear_tiny(), k3_tiny()];
        let alone = folders.each_ref().map(|folder| run(&open(folder, 0.0), &prompts(folder)[0]));
        let engines = folders.each_ref().map(|folder| open(folder, 0.0));
        std::thread::scope(|scope| {
            for ((engine, folder), alone) in engines.iter().zip(&folders).zip(&alone) {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let together = run(engine, &prompts(folder)[0]);
                        assert_same_bits("side by side", &together, alone);
                    });
                }
            }
        });
    });
}

#[test]
fn an_engine_dropped_while_it_reads_ahead_ends() {
    within_a_minute(|| {
        let folder = k3_tiny();
        for _ in 0..20 {
            let engine = open(&folder, 0.0);
            let ids = &reference(&folder).input_ids[..1];
            engine.forward(&mut engine.new_session(), ids, Logits::Last).expect("it runs");
        }
    });
}

/// Counts how many steps are in it at once.
struct Counting {
    inner: Box<dyn ExpertSource>,
    inside: AtomicUsize,
    most: Arc<AtomicUsize>,
}

impl ExpertSource for Counting {
    fn fetch(
        &self,
        layer: LayerIdx,
        experts: &[ExpertId],
        consume: &mut dyn FnMut(ExpertId, Expert<'_>),
    ) -> Result<(), Error> {
        self.most.fetch_max(1 + self.inside.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
        // So long that another step would come in if it could.
        std::thread::sleep(Duration::from_millis(3));
        let fetched = self.inner.fetch(layer, experts, consume);
        self.inside.fetch_sub(1, Ordering::SeqCst);
        fetched
    }

    fn counters(&self) -> CacheCounters {
        self.inner.counters()
    }
}

#[test]
fn steps_of_one_engine_take_turns() {
    within_a_minute(|| {
        let folder = k3_tiny();
        let most = Arc::new(AtomicUsize::new(0));
        let (prompts, counted) = (prompts(&folder), most.clone());
        let engine = open(&folder, 0.0).with_experts(|inner| {
            Box::new(Counting { inner, inside: AtomicUsize::new(0), most: counted })
        });
        std::thread::scope(|scope| {
            for ids in &prompts {
                let engine = &engine;
                scope.spawn(move || run(engine, ids));
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), 1);
    });
}
