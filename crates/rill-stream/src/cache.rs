//! Experts on time: which are in memory, which are being read, and for whom.
//!
//! Buffers are of one size and their number is fixed. Some hold *resident* records, which the policy
//! has chosen to keep; the others serve what is being read, and hold what was read last until they
//! are needed again. So a record that the policy refuses to keep still has somewhere to go.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::buffer::AlignedBuf;
use crate::error::StreamError;
use crate::key::ExpertKey;
use crate::place::{Extent, Placement, Record};
use crate::policy::{Learned, Policy};
use crate::readers::{Priority, Readers, Ticket};
use crate::storage::ReadError;

/// Where records are and whether what came is right.
pub trait Records: Send + Sync {
    /// The parts of a record.
    fn extents(&self, key: ExpertKey) -> Vec<Extent>;

    /// Checks a record that has just come, on a reading thread.
    ///
    /// # Errors
    /// Whatever is wrong with it; then it is not delivered.
    fn check(&self, key: ExpertKey, record: Record<'_>)
    -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// Sizes of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Buffers in all, at least one.
    pub slots: usize,
    /// Buffers that are not for residents, because what is being read needs them: one token's
    /// experts of a layer and those read ahead, where there are so many.
    pub reserve: usize,
    /// Of the reserve, buffers for reading ahead.
    pub ahead: usize,
    /// Bytes of a buffer: the largest record's placement.
    pub slot_bytes: usize,
    /// Deliver records while others are being read. Off, all that there are buffers for must have
    /// come first, which is good for measuring what this is worth.
    pub overlap: bool,
}

/// A record that could not be delivered.
#[derive(Clone, Debug, thiserror::Error)]
#[error("layer {}, expert {}: {source}", key.layer, key.expert)]
pub struct FetchError {
    /// Which.
    pub key: ExpertKey,
    /// Why.
    #[source]
    pub source: Arc<ReadError>,
}

/// What a cache has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Records asked for.
    pub wanted: u64,
    /// Of these, resident ones.
    pub hits: u64,
    /// Of these, ones that lay in a buffer that had not been used again yet, or that another
    /// request was reading.
    pub lucky: u64,
    /// Of these, ones that reading ahead had brought or was bringing.
    pub ahead_useful: u64,
    /// Records that were read because they were asked for.
    pub demanded: u64,
    /// Records that were read ahead and not asked for.
    pub ahead_wasted: u64,
    /// Bytes of `demanded`.
    pub demanded_bytes: u64,
    /// Bytes of `ahead_useful`.
    pub ahead_useful_bytes: u64,
    /// Bytes of `ahead_wasted`.
    pub ahead_wasted_bytes: u64,
    /// Bytes of records that were read before anything was asked for.
    pub preloaded_bytes: u64,
    /// Time spent waiting for records.
    pub stall: Duration,
}

impl CacheCounters {
    /// What has happened since the counters were `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            wanted: self.wanted - earlier.wanted,
            hits: self.hits - earlier.hits,
            lucky: self.lucky - earlier.lucky,
            ahead_useful: self.ahead_useful - earlier.ahead_useful,
            demanded: self.demanded - earlier.demanded,
            ahead_wasted: self.ahead_wasted - earlier.ahead_wasted,
            demanded_bytes: self.demanded_bytes - earlier.demanded_bytes,
            ahead_useful_bytes: self.ahead_useful_bytes - earlier.ahead_useful_bytes,
            ahead_wasted_bytes: self.ahead_wasted_bytes - earlier.ahead_wasted_bytes,
            preloaded_bytes: self.preloaded_bytes - earlier.preloaded_bytes,
            stall: self.stall.saturating_sub(earlier.stall),
        }
    }
}

/// What a cache's buffers are in use for. Their sum is the number of buffers, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Buffers with nothing in them.
    pub empty: usize,
    /// Buffers that are being filled.
    pub reading: usize,
    /// Records that the policy keeps.
    pub resident: usize,
    /// Records that stay until their buffer is needed.
    pub loose: usize,
    /// Records read ahead and not asked for yet.
    pub ahead: usize,
}

/// A cache of expert records, shared by all who use one model.
pub struct ExpertCache {
    inner: Arc<Inner>,
    readers: Arc<Readers>,
    records: Arc<dyn Records>,
    options: CacheOptions,
}

impl ExpertCache {
    /// An empty cache.
    ///
    /// # Errors
    /// When there is no memory for its buffers.
    pub fn new(
        readers: Arc<Readers>,
        records: Arc<dyn Records>,
        policy: Box<dyn Policy>,
        options: CacheOptions,
    ) -> Result<Self, StreamError> {
        let CacheOptions { slots, slot_bytes, .. } = options;
        let buffers = (0..slots.max(1)).map(|_| AlignedBuf::new(slot_bytes));
        let state = State {
            policy,
            entries: HashMap::new(),
            spare: buffers
                .collect::<Option<_>>()
                .ok_or(StreamError::OutOfMemory { buffers: slots, bytes: slot_bytes })?,
            recycle: VecDeque::new(),
            loose: 0,
            ahead: Vec::new(),
            worth: Worth { limit: options.ahead, useful: 0, wasted: 0 },
            hint: None,
            residents: 0,
            keep: slots.saturating_sub(options.reserve.max(1)),
            counters: CacheCounters::default(),
        };
        let inner = Arc::new(Inner { state: Mutex::new(state), arrived: Condvar::new() });
        Ok(Self { inner, readers, records, options })
    }

    /// Its sizes.
    #[must_use]
    pub fn options(&self) -> CacheOptions {
        self.options
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> CacheCounters {
        self.inner.lock().counters
    }

    /// What its policy would like to know in the next run.
    #[must_use]
    pub fn learned(&self) -> Option<Learned> {
        self.inner.lock().policy.learned()
    }

    /// What its buffers are in use for at this moment.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        let state = self.inner.lock();
        let mut occupancy = Occupancy { empty: state.spare.len(), ..Occupancy::default() };
        for entry in state.entries.values() {
            match (&entry.stage, entry.keep) {
                (Stage::Failed(_), _) => {}
                (Stage::Reading(_), _) => occupancy.reading += 1,
                (_, Keep::Resident) => occupancy.resident += 1,
                (_, Keep::Loose) => occupancy.loose += 1,
                (_, Keep::Ahead) => occupancy.ahead += 1,
            }
        }
        occupancy
    }

    /// Gives up to `n` buffers back to the system, never those of the reserve: first what is empty or
    /// loose, then what the policy would give up first. Returns how many.
    pub fn shrink(&self, n: usize) -> usize {
        let mut freed = Vec::new();
        let mut state = self.inner.lock();
        while freed.len() < n && state.keep > 0 {
            let buffer = match state.residents < state.keep {
                true => state.free_buffer().or_else(|| state.evict()),
                false => state.evict(),
            };
            // All are in use at this moment.
            let Some(buffer) = buffer else { break };
            state.keep -= 1;
            freed.push(buffer);
        }
        drop(state);
        freed.len()
    }

    /// The policy learns what one token chose in a layer. Tell it before the fetch.
    pub fn used(&self, layer: u32, experts: &[u32]) {
        self.inner.lock().policy.used(layer, experts);
    }

    /// Reads records into free buffers and keeps them, as far as there are buffers for what the policy
    /// keeps: what is asked for meanwhile comes first. A record that cannot be read is left out.
    pub fn preload(&self, keys: impl IntoIterator<Item = ExpertKey>) {
        let mut state = self.inner.lock();
        for key in keys {
            if state.residents >= state.keep {
                break;
            }
            if state.entries.contains_key(&key) {
                continue;
            }
            let Some(buffer) = state.spare.pop() else { break };
            self.start(&mut state, key, buffer, Priority::Maybe);
            state.residents += 1;
            state.policy.inserted(key);
            let entry = state.entries.get_mut(&key).expect("just made");
            entry.keep = Keep::Resident;
            state.counters.preloaded_bytes += entry.bytes;
        }
    }

    /// Records of a later layer that are likely to be asked for, the likeliest first. They are read
    /// as soon as the next fetch has asked for its own, as far as there are buffers.
    pub fn hint(&self, layer: u32, experts: Vec<u32>) {
        self.inner.lock().hint = Some((layer, experts));
    }

    /// Delivers each of `experts` (ascending, without duplicates) of a layer exactly once to
    /// `consume`, in any order: what is in memory first, then whatever comes first.
    ///
    /// # Errors
    /// When a record could not be read or is not what it should be. Others may have been delivered;
    /// nothing is held on to.
    pub fn fetch(
        &self,
        layer: u32,
        experts: &[u32],
        consume: &mut dyn FnMut(u32, Record<'_>),
    ) -> Result<(), FetchError> {
        let mut claims = Claims { cache: self, keys: Vec::new(), layer };
        let mut missing = VecDeque::new();
        // Reads that began for somebody else: when one fails, this request tries itself.
        let mut joined = Vec::new();
        let mut state = self.inner.lock();
        state.counters.wanted += experts.len() as u64;
        for &expert in experts {
            let key = ExpertKey { layer, expert };
            match self.claim_present(&mut state, key) {
                true => {
                    claims.keys.push(key);
                    joined.push(key);
                }
                false => missing.push_back(key),
            }
        }
        loop {
            while let Some(&key) = missing.front() {
                let begun = state.entries.contains_key(&key);
                if !self.claim_missing(&mut state, key, claims.keys.is_empty()) {
                    break;
                }
                claims.keys.push(key);
                missing.pop_front();
                if begun {
                    joined.push(key);
                }
            }
            if missing.is_empty()
                && let Some((layer, likely)) = state.hint.take()
            {
                self.read_ahead(&mut state, layer, &likely);
            }
            if claims.keys.is_empty() && missing.is_empty() {
                return Ok(());
            }
            let reading = |key: &ExpertKey| state.entries[key].is_reading();
            let wait = !self.options.overlap && claims.keys.iter().any(reading);
            let come = claims.keys.iter().position(|key| !wait && !reading(key));
            let Some(index) = come else {
                let since = Instant::now();
                state = self.inner.wait(state);
                state.counters.stall += since.elapsed();
                continue;
            };
            let key = claims.keys[index];
            let loaded = match &state.entries[&key].stage {
                Stage::Ready(loaded) => loaded.clone(),
                Stage::Failed(_) if joined.contains(&key) => {
                    joined.retain(|&other| other != key);
                    claims.keys.swap_remove(index);
                    state.release(key);
                    self.inner.arrived.notify_all();
                    missing.push_back(key);
                    continue;
                }
                Stage::Failed(source) => return Err(FetchError { key, source: source.clone() }),
                Stage::Reading(_) => unreachable!("this one has come"),
            };
            drop(state);
            consume(key.expert, Record::new(loaded.buffer.as_slice(), &loaded.placement));
            drop(loaded);
            claims.keys.swap_remove(index);
            state = self.inner.lock();
            state.release(key);
            self.inner.arrived.notify_all();
        }
    }

    /// Starts reading what a hint names. What had been read ahead for other layers is given up.
    fn read_ahead(&self, state: &mut State, layer: u32, experts: &[u32]) {
        self.give_up_ahead(state, |key| key.layer != layer);
        for &expert in experts {
            if state.ahead.len() >= state.worth.limit {
                break;
            }
            let key = ExpertKey { layer, expert };
            if state.entries.contains_key(&key) {
                continue;
            }
            // The rest of the reserve is for what will be asked for.
            let demand = self.options.reserve - self.options.ahead.min(self.options.reserve);
            if state.spare.len() + state.loose <= demand {
                break;
            }
            let Some(buffer) = state.free_buffer() else { break };
            self.start(state, key, buffer, Priority::Maybe);
            state.ahead.push(key);
        }
    }

    /// Claims a record that is in memory or on its way.
    fn claim_present(&self, state: &mut State, key: ExpertKey) -> bool {
        let Some(entry) = state.entries.get_mut(&key) else { return false };
        if matches!(entry.stage, Stage::Failed(_)) {
            return false;
        }
        let (counters, bytes) = (&mut state.counters, entry.bytes);
        entry.waiting += 1;
        if let Stage::Reading(Some(ticket)) = &entry.stage {
            self.readers.promote(ticket);
        }
        match entry.keep {
            Keep::Resident => counters.hits += 1,
            Keep::Ahead => {
                counters.ahead_useful += 1;
                counters.ahead_useful_bytes += bytes;
                state.worth.useful += 1;
                state.worth.adapt(self.options.ahead);
                entry.keep = Keep::Loose;
                state.ahead.retain(|&other| other != key);
            }
            Keep::Loose => {
                counters.lucky += 1;
                if entry.waiting == 1 && !entry.is_reading() {
                    state.loose -= 1;
                }
            }
        }
        true
    }

    /// Starts reading a record, if there is a buffer for it. With `force`, a resident makes room.
    fn claim_missing(&self, state: &mut State, key: ExpertKey, force: bool) -> bool {
        // Another request may have begun to read it while this one waited, or have failed and not
        // heard of it yet.
        if state.entries.contains_key(&key) {
            return self.claim_present(state, key);
        }
        let mut buffer = state.free_buffer();
        if buffer.is_none() && force {
            self.give_up_ahead(state, |_| true);
            buffer = state.free_buffer().or_else(|| state.evict());
        }
        let Some(buffer) = buffer else { return false };
        self.start(state, key, buffer, Priority::Now);
        let entry = state.entries.get_mut(&key).expect("just made");
        entry.keep = Keep::Loose;
        entry.waiting = 1;
        state.counters.demanded += 1;
        state.counters.demanded_bytes += entry.bytes;
        true
    }

    /// Puts a record on its way, read ahead until somebody claims it.
    fn start(&self, state: &mut State, key: ExpertKey, buffer: AlignedBuf, priority: Priority) {
        let placement = Placement::new(&self.records.extents(key));
        let bytes = placement.parts.iter().map(|part| part.len() as u64).sum();
        let entry = Entry { stage: Stage::Reading(None), keep: Keep::Ahead, waiting: 0, bytes };
        state.entries.insert(key, entry);
        let (inner, records, placed) =
            (self.inner.clone(), self.records.clone(), placement.clone());
        let done = Box::new(move |buffer: AlignedBuf, result: Result<(), ReadError>| {
            let result = result.and_then(|()| {
                let record = Record::new(buffer.as_slice(), &placed);
                // A panic here would leave somebody waiting for ever.
                catch_unwind(AssertUnwindSafe(|| records.check(key, record)))
                    .unwrap_or_else(|_| Err("its check broke down; please report this".into()))
                    .map_err(ReadError::Refused)
            });
            inner.arrive(key, buffer, placed, result);
        });
        let ticket = self.readers.submit(priority, buffer, &placement, done);
        if let Some(Entry { stage: Stage::Reading(place), .. }) = state.entries.get_mut(&key) {
            *place = Some(ticket);
        }
    }

    /// Frees what was read ahead and is not wanted any more.
    fn give_up_ahead(&self, state: &mut State, unwanted: impl Fn(ExpertKey) -> bool) {
        let (old, ahead) = state.ahead.drain(..).partition(|&key| unwanted(key));
        state.ahead = ahead;
        let old: Vec<ExpertKey> = old;
        for key in old {
            let Some(entry) = state.entries.get_mut(&key) else { continue };
            if let Stage::Reading(Some(ticket)) = &entry.stage
                && let Some(buffer) = self.readers.cancel(ticket)
            {
                state.entries.remove(&key);
                state.spare.push(buffer);
                continue;
            }
            state.counters.ahead_wasted += 1;
            state.counters.ahead_wasted_bytes += entry.bytes;
            state.worth.wasted += 1;
            state.worth.adapt(self.options.ahead);
            entry.keep = Keep::Loose;
            if !entry.is_reading() {
                state.loosen(key);
            }
        }
        self.inner.arrived.notify_all();
    }
}

/// What a request holds on to; let go of however it ends.
struct Claims<'a> {
    cache: &'a ExpertCache,
    keys: Vec<ExpertKey>,
    layer: u32,
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.inner.lock();
        for key in self.keys.drain(..) {
            state.release(key);
        }
        let layer = self.layer;
        self.cache.give_up_ahead(&mut state, |key| key.layer == layer);
        drop(state);
        self.cache.inner.arrived.notify_all();
    }
}

struct Inner {
    state: Mutex<State>,
    /// Something has come, or a buffer may be free.
    arrived: Condvar,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// A read has ended.
    fn arrive(
        &self,
        key: ExpertKey,
        buffer: AlignedBuf,
        placement: Placement,
        result: Result<(), ReadError>,
    ) {
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(&key) else {
            state.spare.push(buffer);
            return;
        };
        match result {
            Ok(()) => {
                entry.stage = Stage::Ready(Arc::new(Loaded { buffer, placement }));
                if entry.waiting == 0 && entry.keep == Keep::Loose {
                    state.loosen(key);
                }
            }
            Err(error) => {
                entry.stage = Stage::Failed(Arc::new(error));
                let preloaded = entry.keep == Keep::Resident;
                let unclaimed = entry.waiting == 0;
                if preloaded {
                    entry.keep = Keep::Loose;
                    state.residents -= 1;
                    state.policy.removed(key);
                }
                // Nobody hears of a failure to read ahead; whoever wants the record tries again.
                if unclaimed {
                    state.entries.remove(&key);
                    state.ahead.retain(|&other| other != key);
                }
                state.spare.push(buffer);
            }
        }
        drop(state);
        self.arrived.notify_all();
    }
}

struct State {
    policy: Box<dyn Policy>,
    entries: HashMap<ExpertKey, Entry>,
    /// Buffers with nothing in them.
    spare: Vec<AlignedBuf>,
    /// Loose records, the oldest first, and keys that are no longer loose.
    recycle: VecDeque<ExpertKey>,
    /// Loose records that nobody waits for.
    loose: usize,
    /// Records read ahead that nobody has claimed.
    ahead: Vec<ExpertKey>,
    worth: Worth,
    /// What the next fetch starts reading ahead.
    hint: Option<(u32, Vec<u32>)>,
    residents: usize,
    /// Most residents.
    keep: usize,
    counters: CacheCounters,
}

/// How many records to read ahead, by how many of late were asked for. The likeliest come first in
/// a hint, so that reading fewer is also reading better ones.
struct Worth {
    limit: usize,
    /// Since the limit was last looked at.
    useful: u32,
    wasted: u32,
}

impl Worth {
    /// Records between two looks: enough that one wrong hint does not matter.
    const WINDOW: u32 = 16;

    /// One fewer, but at least one, when less than half were useful; one more, but at most `most`,
    /// when more than three quarters were.
    fn adapt(&mut self, most: usize) {
        let total = self.useful + self.wasted;
        if total < Self::WINDOW {
            return;
        }
        if 2 * self.useful < total {
            self.limit = self.limit.saturating_sub(1).max(most.min(1));
        } else if 4 * self.useful > 3 * total {
            self.limit = (self.limit + 1).min(most);
        }
        (self.useful, self.wasted) = (0, 0);
    }
}

struct Entry {
    stage: Stage,
    keep: Keep,
    /// Requests that have claimed it.
    waiting: u32,
    /// Bytes of the record.
    bytes: u64,
}

enum Stage {
    /// With its ticket, once it has one.
    Reading(Option<Ticket>),
    Ready(Arc<Loaded>),
    Failed(Arc<ReadError>),
}

struct Loaded {
    buffer: AlignedBuf,
    placement: Placement,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    /// The policy keeps it.
    Resident,
    /// Kept until its buffer is needed.
    Loose,
    /// Read ahead and not claimed.
    Ahead,
}

impl Entry {
    fn is_reading(&self) -> bool {
        matches!(self.stage, Stage::Reading(_))
    }
}

impl State {
    /// A buffer that holds nothing worth keeping.
    fn free_buffer(&mut self) -> Option<AlignedBuf> {
        if let Some(buffer) = self.spare.pop() {
            return Some(buffer);
        }
        while let Some(key) = self.recycle.pop_front() {
            let loose = self.entries.get(&key).is_some_and(|entry| {
                entry.keep == Keep::Loose && entry.waiting == 0 && !entry.is_reading()
            });
            if loose {
                self.loose -= 1;
                return self.take(key);
            }
        }
        None
    }

    /// Makes room by giving up a resident.
    fn evict(&mut self) -> Option<AlignedBuf> {
        let victim = self.victim()?;
        self.policy.removed(victim);
        self.residents -= 1;
        self.take(victim)
    }

    fn victim(&mut self) -> Option<ExpertKey> {
        let entries = &self.entries;
        let busy = |entry: &Entry| entry.waiting > 0 || entry.is_reading();
        self.policy.victim(&|key| entries.get(&key).is_none_or(busy))
    }

    /// Takes a record that nobody has claimed out of memory.
    fn take(&mut self, key: ExpertKey) -> Option<AlignedBuf> {
        match self.entries.remove(&key)?.stage {
            Stage::Ready(loaded) => {
                let loaded = Arc::into_inner(loaded).expect("nobody has claimed it");
                Some(loaded.buffer)
            }
            _ => unreachable!("only records that have come are taken"),
        }
    }

    /// Puts a record into the queue of those whose buffers are used next.
    fn loosen(&mut self, key: ExpertKey) {
        self.loose += 1;
        // Keys that stopped being loose stay in the queue until they come up.
        if self.recycle.len() > 4 * (self.entries.len() + 16) {
            let entries = &self.entries;
            let mut seen = std::collections::HashSet::new();
            self.recycle.retain(|key| {
                entries.get(key).is_some_and(|e| e.keep == Keep::Loose) && seen.insert(*key)
            });
        }
        self.recycle.push_back(key);
    }

    /// One request is done with a record.
    fn release(&mut self, key: ExpertKey) {
        let entry = self.entries.get_mut(&key).expect("claimed records stay");
        entry.waiting -= 1;
        if entry.waiting > 0 || entry.keep != Keep::Loose {
            return;
        }
        match entry.stage {
            // Still on its way: it becomes loose when it comes.
            Stage::Reading(_) => return,
            Stage::Failed(_) => {
                self.entries.remove(&key);
                return;
            }
            Stage::Ready(_) => {}
        }
        if self.residents < self.keep {
            self.residents += 1;
            entry.keep = Keep::Resident;
            self.policy.inserted(key);
            return;
        }
        let victim = if self.keep == 0 { None } else { self.victim() };
        let Some(victim) = victim.filter(|&victim| self.policy.admit(key, victim)) else {
            self.loosen(key);
            return;
        };
        self.policy.removed(victim);
        let old = self.entries.get_mut(&victim).expect("residents are in memory");
        old.keep = Keep::Loose;
        self.loosen(victim);
        self.policy.inserted(key);
        self.entries.get_mut(&key).expect("claimed records stay").keep = Keep::Resident;
    }
}
