//! Policies on real routing, and against slow versions of themselves.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use rill_stream::policy::{DecayedLfu, Lru, Scored};
use rill_stream::{ExpertKey, Geometry, Policy, Trace, optimal, replay};

/// Hits in percent at 1.5, 3, 6, 12, 24 and 48 % of all records, over the whole recording from an
/// empty cache, as an independent simulation measured them.
const LRU: [f64; 6] = [0.0, 0.0, 41.3, 57.0, 71.9, 86.2];
const DECAYED_LFU: [f64; 6] = [21.1, 31.1, 42.9, 56.8, 72.7, 86.6];
const OPTIMAL: [f64; 6] = [37.3, 51.1, 63.6, 74.6, 84.4, 91.0];

#[test]
fn lru_hits_what_the_reference_simulation_hit() {
    let trace = kimi_linear();
    let hits = percentages(&trace, |g| Box::new(Lru::new(g)));
    assert_close(&hits, &LRU, 0.2);
}

#[test]
fn one_decayed_count_hits_what_the_reference_simulation_hit() {
    // It counted and rounded capacities a little differently.
    let trace = kimi_linear();
    let hits = percentages(&trace, |g| Box::new(DecayedLfu::new(g)));
    assert_close(&hits, &DECAYED_LFU, 0.6);
}

#[test]
fn perfect_foresight_hits_what_the_reference_simulation_hit() {
    let trace = kimi_linear();
    let hits: Vec<f64> =
        SHARES.map(|s| 100.0 * optimal(&trace, capacity(&trace, s)).hit_share()).into();
    assert_close(&hits, &OPTIMAL, 0.3);
}

#[test]
fn scored_hits_its_target_from_cold() {
    assert_reaches(&kimi_linear(), &[26.5, 38.0, 49.5, 61.5]);
}

#[test]
fn scored_hits_its_target_on_a_model_it_was_not_fitted_to() {
    assert_reaches(&kimi_k3(), &[25.3, 36.6, 41.1, 43.3]);
}

#[test]
fn scored_is_no_worse_than_the_others_on_a_model_it_was_not_fitted_to() {
    let trace = kimi_k3();
    let scored = percentages(&trace, |g| Box::new(Scored::new(g)));
    let lru = percentages(&trace, |g| Box::new(Lru::new(g)));
    let lfu = percentages(&trace, |g| Box::new(DecayedLfu::new(g)));
    for (share, (s, other)) in
        SHARES.iter().zip(scored.iter().zip(lru.iter().zip(&lfu).map(|(a, b)| a.max(*b))))
    {
        assert!(*s >= other - 0.01, "{share}: scored {s:.2} %, another {other:.2} %");
    }
}

#[test]
fn a_prompt_taken_layer_by_layer_teaches_as_much_as_token_by_token() {
    let trace = kimi_linear();
    let geometry = trace.geometry();
    let chosen = |token, layer| -> Vec<u32> {
        trace.chosen(token, layer).iter().map(|&id| u32::from(id)).collect()
    };
    let mut by_token = Scored::new(geometry);
    let mut by_layer = Scored::new(geometry);
    for token in 0..150 {
        for layer in 0..geometry.n_layers {
            by_token.used(layer, &chosen(token, layer));
        }
    }
    for layer in 0..geometry.n_layers {
        for token in 0..150 {
            by_layer.used(layer, &chosen(token, layer));
        }
    }
    let rest = (150..300).flat_map(|t| (0..geometry.n_layers).map(move |l| (t, l)));
    let ids = rest.flat_map(|(t, l)| trace.chosen(t, l).to_vec()).collect();
    let rest = Trace::new("the rest", geometry, trace.top_k(), ids).unwrap();
    for policy in [&by_token, &by_layer] {
        let hits = replay(&rest, &mut policy.clone(), 400).hit_share();
        // Having seen nothing before, it hits 47.3 %.
        assert!(hits > 0.485, "{hits}");
    }
}

#[test]
fn no_policy_beats_perfect_foresight() {
    for trace in [kimi_linear(), kimi_k3()] {
        for share in [0.015, 0.06, 0.48] {
            let capacity = capacity(&trace, share);
            let best = optimal(&trace, capacity).hits();
            for mut policy in policies(trace.geometry()) {
                let hits = replay(&trace, &mut *policy, capacity).hits();
                assert!(hits <= best, "{capacity} records: {hits} hits, the best are {best}");
            }
        }
    }
}

#[test]
fn perfect_foresight_is_the_best_of_all_choices() {
    // Two layers of three experts, one chosen in each: small enough to try everything.
    let geometry = Geometry { n_layers: 2, n_experts: 3 };
    let mut random = Random(1);
    for _ in 0..200 {
        let ids = (0..2 * 7).map(|_| random.below(3) as u16).collect();
        let trace = Trace::new("made up", geometry, 1, ids).unwrap();
        for capacity in 0..=4 {
            let best = best_by_trial(&trace, capacity);
            assert_eq!(optimal(&trace, capacity).hits(), best, "{trace:?}, {capacity} records");
        }
    }
}

#[test]
fn a_cache_of_everything_misses_each_record_once() {
    let trace = kimi_k3();
    let n_records = trace.geometry().n_records();
    for mut policy in policies(trace.geometry()) {
        let report = replay(&trace, &mut *policy, n_records);
        assert_eq!(report.misses(), report.n_distinct);
        assert_eq!(report.n_uses, 12 * 92 * 16);
        assert_eq!(report.hits_by_layer.iter().sum::<u64>(), report.hits());
    }
}

#[test]
fn a_cache_of_nothing_hits_nothing() {
    let trace = kimi_k3();
    for mut policy in policies(trace.geometry()) {
        assert_eq!(replay(&trace, &mut *policy, 0).hits(), 0);
    }
    assert_eq!(optimal(&trace, 0).hits(), 0);
}

#[test]
fn the_victim_is_the_lowest_resident_that_is_not_pinned_and_the_first_of_equals() {
    let geometry = Geometry { n_layers: 5, n_experts: 9 };
    for mut policy in policies(geometry) {
        let mut random = Random(7);
        let mut resident: Vec<ExpertKey> = Vec::new();
        for step in 0..3000 {
            let key = ExpertKey { layer: random.below(5), expert: random.below(9) };
            match random.below(3) {
                0 => policy.used(key.layer, &[key.expert, (key.expert + 4) % 9]),
                1 if resident.contains(&key) => {
                    resident.retain(|&k| k != key);
                    policy.removed(key);
                }
                1 => {
                    resident.push(key);
                    policy.inserted(key);
                }
                _ => {}
            }
            let bits = random.below(1 << 16);
            let pinned = |k: ExpertKey| bits >> ((k.layer * 9 + k.expert) % 16) & 1 == 1;
            for pinned in [&pinned as &dyn Fn(ExpertKey) -> bool, &|_| false, &|_| true] {
                let free = resident.iter().copied().filter(|&k| !pinned(k));
                let lowest = free.min_by(|&a, &b| {
                    let (x, y) = (policy.score(a), policy.score(b));
                    x.total_cmp(&y).then(a.cmp(&b))
                });
                assert_eq!(policy.victim(pinned), lowest, "step {step}");
            }
        }
    }
}

#[test]
fn what_is_used_more_and_later_is_worth_more() {
    let geometry = Geometry { n_layers: 1, n_experts: 4 };
    let key = |expert| ExpertKey { layer: 0, expert };
    for mut policy in policies(geometry) {
        policy.used(0, &[0, 1]);
        policy.used(0, &[1, 2]);
        policy.used(0, &[1, 3]);
        let scores = [0, 2, 3, 1].map(|expert| policy.score(key(expert)));
        assert!(scores.is_sorted(), "{scores:?}");
        assert!(scores[0] < scores[1] && scores[1] < scores[2], "{scores:?}");
    }
}

#[test]
fn a_newcomer_below_everything_resident_is_refused_except_by_lru() {
    let geometry = Geometry { n_layers: 1, n_experts: 2 };
    let (hot, cold) = (ExpertKey { layer: 0, expert: 0 }, ExpertKey { layer: 0, expert: 1 });
    let admits = policies(geometry).map(|mut policy| {
        policy.inserted(hot);
        for _ in 0..5 {
            policy.used(0, &[0]);
        }
        policy.used(0, &[0, 1]);
        policy.admit(cold, hot)
    });
    assert_eq!(admits, [true, false, false]);
}

const SHARES: [f64; 6] = [0.015, 0.03, 0.06, 0.12, 0.24, 0.48];

fn policies(geometry: Geometry) -> [Box<dyn Policy>; 3] {
    [
        Box::new(Lru::new(geometry)),
        Box::new(DecayedLfu::new(geometry)),
        Box::new(Scored::new(geometry)),
    ]
}

fn percentages(trace: &Trace, policy: impl Fn(Geometry) -> Box<dyn Policy>) -> Vec<f64> {
    let hits = |share| {
        let report = replay(trace, &mut *policy(trace.geometry()), capacity(trace, share));
        100.0 * report.hit_share()
    };
    SHARES.map(hits).into()
}

fn capacity(trace: &Trace, share: f64) -> usize {
    (trace.geometry().n_records() as f64 * share).round() as usize
}

/// `targets` are hits in percent at the first of `SHARES`.
#[track_caller]
fn assert_reaches(trace: &Trace, targets: &[f64]) {
    let hits = percentages(trace, |g| Box::new(Scored::new(g)));
    assert!(hits.iter().zip(targets).all(|(h, t)| h >= t), "{hits:.2?}, targets {targets:?}");
}

#[track_caller]
fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= tolerance, "{found:.2?}, expected {expected:.2?}");
    }
}

fn kimi_linear() -> Trace {
    read("kimi_linear_300_tokens.safetensors")
}

fn kimi_k3() -> Trace {
    read("kimi_k3_12_tokens.safetensors")
}

fn read(name: &str) -> Trace {
    Trace::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).unwrap()
}

/// The most hits, by trying to keep and to give up everything at every use.
fn best_by_trial(trace: &Trace, capacity: usize) -> u64 {
    let mut best = std::collections::HashMap::from([(0u32, 0u64)]);
    for token in 0..trace.n_tokens() {
        for layer in 0..trace.geometry().n_layers {
            let bit = 1 << (layer * 3 + u32::from(trace.chosen(token, layer)[0]));
            let mut next = std::collections::HashMap::new();
            for (resident, hits) in best {
                let hits = hits + u64::from(resident & bit != 0);
                let all = resident | bit;
                for kept in 0..=all {
                    if kept & !all == 0 && kept.count_ones() as usize <= capacity {
                        let entry = next.entry(kept).or_insert(0);
                        *entry = hits.max(*entry);
                    }
                }
            }
            best = next;
        }
    }
    best.into_values().max().unwrap()
}

/// A linear congruential generator: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }
}
