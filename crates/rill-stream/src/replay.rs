//! A recording played against a cache that exists only on paper.

use std::collections::BTreeSet;

use crate::{ExpertKey, Geometry, Policy, Trace};

/// What a cache would have done for a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Records the cache holds.
    pub capacity: usize,
    /// Uses of a record that was resident, by token, `(n_tokens)`.
    pub hits_by_token: Vec<u64>,
    /// The same by layer, `(n_layers)`.
    pub hits_by_layer: Vec<u64>,
    /// Uses in all: each is one read when there is no cache.
    pub n_uses: u64,
    /// Different records used: the reads of a cache that holds everything.
    pub n_distinct: u64,
}

impl Report {
    /// Uses of a record that was resident.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.hits_by_token.iter().sum()
    }

    /// Uses of a record that had to be read.
    #[must_use]
    pub fn misses(&self) -> u64 {
        self.n_uses - self.hits()
    }

    /// The share of uses that were hits.
    #[must_use]
    pub fn hit_share(&self) -> f64 {
        self.hit_share_from(0)
    }

    /// The share of uses that were hits, from a token on; not a number if there is no such token.
    #[must_use]
    pub fn hit_share_from(&self, token: usize) -> f64 {
        let hits_by_token = self.hits_by_token.get(token..).unwrap_or_default();
        let token_uses = self.n_uses as f64 / self.hits_by_token.len() as f64;
        hits_by_token.iter().sum::<u64>() as f64 / (hits_by_token.len() as f64 * token_uses)
    }
}

/// Replays a recording, token by token from an empty cache of `capacity` records.
///
/// As in an engine, a layer's records are all used before it is decided which of the fetched ones
/// stay. Nothing is read ahead: every hit is one that the policy earned.
pub fn replay(trace: &Trace, policy: &mut dyn Policy, capacity: usize) -> Report {
    let mut cache = Residents::new(trace, capacity);
    let mut experts = Vec::with_capacity(trace.top_k());
    for token in 0..trace.n_tokens() {
        for layer in 0..trace.geometry().n_layers {
            experts.clear();
            experts.extend(trace.chosen(token, layer).iter().map(|&id| u32::from(id)));
            policy.used(layer, &experts);
            let keys = experts.iter().map(|&expert| ExpertKey { layer, expert });
            let hits: Vec<bool> = keys.clone().map(|key| cache.use_once(token, key)).collect();
            for (key, hit) in keys.zip(hits) {
                if hit || capacity == 0 {
                    continue;
                }
                if cache.n_resident == capacity {
                    let victim = policy.victim(&|_| false).expect("a full cache has residents");
                    if !policy.admit(key, victim) {
                        continue;
                    }
                    cache.set(victim, false);
                    policy.removed(victim);
                }
                cache.set(key, true);
                policy.inserted(key);
            }
        }
    }
    cache.report
}

/// The most hits that any policy can get from a cache of `capacity` records without reading ahead:
/// Belady's, which knows the future and may also refuse a newcomer.
#[must_use]
pub fn optimal(trace: &Trace, capacity: usize) -> Report {
    let mut cache = Residents::new(trace, capacity);
    let geometry = trace.geometry();

    // For each use in order, the number of the next use of the same record: `NEVER` for none.
    let uses = || {
        (0..trace.n_tokens()).flat_map(move |token| {
            (0..geometry.n_layers).flat_map(move |layer| {
                let chosen = trace.chosen(token, layer).iter();
                chosen.map(move |&id| (token, ExpertKey { layer, expert: u32::from(id) }))
            })
        })
    };
    // Four bytes are enough for any recording that can be read, and there are as many as ids.
    let mut next_use = vec![NEVER; uses().count()];
    let mut last_use = vec![None; geometry.n_records()];
    for (at, (_, key)) in (0u32..).zip(uses()) {
        if let Some(last) = last_use[geometry.index(key)].replace(at) {
            let last: u32 = last;
            next_use[last as usize] = at;
        }
    }

    // Residents by when they are used next; a resident's entry is renewed at each use.
    let mut residents: BTreeSet<(u32, ExpertKey)> = BTreeSet::new();
    for (at, (token, key)) in (0u32..).zip(uses()) {
        let hit = cache.use_once(token, key);
        if hit {
            residents.remove(&(at, key));
        }
        let newcomer = (next_use[at as usize], key);
        if newcomer.0 == NEVER {
            if hit {
                cache.set(key, false);
            }
            continue;
        }
        if !hit && cache.n_resident == capacity {
            match residents.last().copied() {
                Some(furthest) if furthest > newcomer => {
                    residents.remove(&furthest);
                    cache.set(furthest.1, false);
                }
                _ => continue,
            }
        }
        residents.insert(newcomer);
        cache.set(key, true);
    }
    cache.report
}

/// Which records are resident, and what has been counted.
struct Residents {
    report: Report,
    /// `(n_layers, n_experts)`
    resident: Vec<bool>,
    used: Vec<bool>,
    n_resident: usize,
    geometry: Geometry,
}

impl Residents {
    fn new(trace: &Trace, capacity: usize) -> Self {
        let geometry = trace.geometry();
        let report = Report {
            capacity,
            hits_by_token: vec![0; trace.n_tokens()],
            hits_by_layer: vec![0; geometry.n_layers as usize],
            n_uses: 0,
            n_distinct: 0,
        };
        let none = vec![false; geometry.n_records()];
        Self { report, resident: none.clone(), used: none, n_resident: 0, geometry }
    }

    /// Counts one use; true if it is a hit.
    fn use_once(&mut self, token: usize, key: ExpertKey) -> bool {
        let index = self.geometry.index(key);
        let hit = self.resident[index];
        self.report.n_uses += 1;
        self.report.n_distinct += u64::from(!self.used[index]);
        self.report.hits_by_token[token] += u64::from(hit);
        self.report.hits_by_layer[key.layer as usize] += u64::from(hit);
        self.used[index] = true;
        hit
    }

    fn set(&mut self, key: ExpertKey, resident: bool) {
        let index = self.geometry.index(key);
        if self.resident[index] != resident {
            self.resident[index] = resident;
            if resident { self.n_resident += 1 } else { self.n_resident -= 1 }
        }
    }
}

/// The number of a use that does not come.
const NEVER: u32 = u32::MAX;
