//! The cache delivers the right bytes or an error that names the record, whatever the drive does.

use std::collections::BTreeSet;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use rill_stream::{
    CacheOptions, ExpertCache, ExpertKey, Extent, Policy, READ_ALIGN, ReadError, ReadOptions,
    Readers, Record, Records, Storage,
};

const LAYERS: u32 = 4;
const EXPERTS: u32 = 12;
const RECORD_BYTES: u64 = 3 * READ_ALIGN as u64 + 100;

/// A drive in memory that can be told to fail.
struct Faulty {
    bytes: Vec<u8>,
    /// Draws faults; every draw moves it on.
    random: AtomicU64,
    /// One read in so many goes wrong; 0 for none.
    one_in: AtomicU64,
    reads: AtomicU64,
}

impl Faulty {
    fn new(seed: u64) -> Self {
        let total = u64::from(LAYERS * EXPERTS) * RECORD_BYTES;
        let mut bytes = vec![0; total as usize];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = ((i as u64).wrapping_mul(0x9E37_79B9) >> 13) as u8;
        }
        let random = AtomicU64::new(seed | 1);
        Self { bytes, random, one_in: AtomicU64::new(0), reads: AtomicU64::new(0) }
    }

    fn draw(&self) -> u64 {
        // Which thread gets which draw is up to the machine: every outcome must be right.
        let x = self.random.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x ^ x >> 31
    }

    fn record(&self, key: ExpertKey) -> &[u8] {
        let at = offset(key) as usize;
        &self.bytes[at..at + RECORD_BYTES as usize]
    }
}

fn offset(key: ExpertKey) -> u64 {
    u64::from(key.layer * EXPERTS + key.expert) * RECORD_BYTES
}

impl Storage for Faulty {
    fn read_at(&self, _file: u32, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let rest = &self.bytes[(offset as usize).min(self.bytes.len())..];
        let n = rest.len().min(out.len());
        out[..n].copy_from_slice(&rest[..n]);
        let one_in = self.one_in.load(Ordering::Relaxed);
        if one_in == 0 || !self.draw().is_multiple_of(one_in) {
            return Ok(n);
        }
        match self.draw() % 6 {
            0 => Err(io::Error::other("the drive gave up")),
            1 => Err(io::ErrorKind::Interrupted.into()),
            // Less than was asked for, but on a block's edge: to be continued.
            2 => Ok((n / 2).next_multiple_of(READ_ALIGN).min(n)),
            // The file has been cut.
            3 => Ok(n.saturating_sub(1 + (self.draw() % 5000) as usize)),
            4 => {
                let at = (self.draw() % n.max(1) as u64) as usize;
                out[at] ^= 1 << (self.draw() % 8);
                Ok(n)
            }
            // A panic that is not printed.
            _ => std::panic::resume_unwind(Box::new("a reader breaks down")),
        }
    }

    fn name(&self, _file: u32) -> String {
        "memory".to_owned()
    }
}

/// Records in two parts, checked against the truth.
struct Checked(Arc<Faulty>);

impl Records for Checked {
    fn extents(&self, key: ExpertKey) -> Vec<Extent> {
        let first = RECORD_BYTES / 3;
        let at = offset(key);
        vec![
            Extent { file: 0, offset: at, bytes: first },
            Extent { file: 0, offset: at + first, bytes: RECORD_BYTES - first },
        ]
    }

    fn check(
        &self,
        key: ExpertKey,
        record: Record<'_>,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        if record.joined() == self.0.record(key) { Ok(()) } else { Err("wrong bytes".into()) }
    }
}

/// Keeps what was used last.
#[derive(Default)]
struct Newest {
    clock: u64,
    residents: Vec<(ExpertKey, u64)>,
}

impl Policy for Newest {
    fn used(&mut self, layer: u32, experts: &[u32]) {
        self.clock += 1;
        for (key, time) in &mut self.residents {
            if key.layer == layer && experts.contains(&key.expert) {
                *time = self.clock;
            }
        }
    }

    fn victim(&mut self, pinned: &dyn Fn(ExpertKey) -> bool) -> Option<ExpertKey> {
        let free = self.residents.iter().filter(|(key, _)| !pinned(*key));
        free.min_by_key(|(key, time)| (*time, *key)).map(|&(key, _)| key)
    }

    fn admit(&mut self, key: ExpertKey, _victim: ExpertKey) -> bool {
        // Refuses some, so that this happens too.
        !key.expert.is_multiple_of(5)
    }

    fn score(&mut self, _key: ExpertKey) -> f64 {
        0.0
    }

    fn inserted(&mut self, key: ExpertKey) {
        assert!(self.residents.iter().all(|(other, _)| *other != key), "inserted twice");
        self.residents.push((key, self.clock));
    }

    fn removed(&mut self, key: ExpertKey) {
        let at = self.residents.iter().position(|(other, _)| *other == key);
        self.residents.swap_remove(at.expect("only residents are removed"));
    }
}

fn cache(drive: &Arc<Faulty>, readers: usize, options: CacheOptions) -> ExpertCache {
    let read = ReadOptions { threads: readers, piece_bytes: READ_ALIGN };
    let readers = Arc::new(Readers::new(drive.clone(), read).expect("threads to start"));
    let records = Arc::new(Checked(drive.clone()));
    let policy = Box::new(Newest::default());
    ExpertCache::new(readers, records, policy, options).expect("memory for a few pages")
}

fn options(slots: usize, reserve: usize, ahead: usize) -> CacheOptions {
    CacheOptions { slots, reserve, ahead, slot_bytes: 5 * READ_ALIGN, overlap: true }
}

/// Fetches and demands that every delivered record is right and comes once.
fn fetch(
    cache: &ExpertCache,
    drive: &Faulty,
    layer: u32,
    experts: &[u32],
) -> Result<(), (ExpertKey, Arc<ReadError>)> {
    let mut seen = BTreeSet::new();
    cache.used(layer, experts);
    let result = cache.fetch(layer, experts, &mut |expert, record| {
        assert_eq!(record.joined(), drive.record(ExpertKey { layer, expert }), "a wrong byte");
        assert!(seen.insert(expert), "expert {expert} came twice");
    });
    match result {
        Ok(()) => {
            assert!(seen.iter().eq(experts), "{seen:?} of {experts:?} came");
            Ok(())
        }
        Err(error) => {
            assert!(experts.contains(&error.key.expert) && error.key.layer == layer);
            Err((error.key, error.source))
        }
    }
}

fn total(cache: &ExpertCache) -> usize {
    let o = cache.occupancy();
    o.empty + o.reading + o.resident + o.loose + o.ahead
}

#[test]
fn a_second_request_reads_nothing() {
    let drive = Arc::new(Faulty::new(1));
    let cache = cache(&drive, 2, options(10, 2, 0));
    fetch(&cache, &drive, 1, &[1, 2, 3, 4]).unwrap();
    let reads = drive.reads.load(Ordering::Relaxed);
    fetch(&cache, &drive, 1, &[1, 2, 3, 4]).unwrap();
    assert_eq!(drive.reads.load(Ordering::Relaxed), reads);
    let counters = cache.counters();
    assert_eq!((counters.wanted, counters.hits, counters.demanded), (8, 4, 4));
    assert_eq!(counters.demanded_bytes, 4 * RECORD_BYTES);
}

#[test]
fn more_experts_than_buffers_come_in_waves() {
    let drive = Arc::new(Faulty::new(1));
    for slots in 1..4 {
        let cache = cache(&drive, 3, options(slots, 1, 0));
        let all: Vec<u32> = (0..EXPERTS).collect();
        for layer in [0, 1, 0] {
            fetch(&cache, &drive, layer, &all).unwrap();
        }
        assert_eq!(total(&cache), slots);
    }
}

#[test]
fn without_overlap_nothing_is_delivered_while_anything_is_read() {
    let drive = Arc::new(Faulty::new(1));
    let all: Vec<u32> = (0..EXPERTS).collect();
    for slots in [1, 3, 64] {
        let cache = cache(&drive, 3, CacheOptions { overlap: false, ..options(slots, 1, 0) });
        for layer in [0, 1, 0] {
            let mut came = Vec::new();
            let fetched = cache.fetch(layer, &all, &mut |expert, _| {
                came.push(expert);
                assert_eq!(cache.occupancy().reading, 0);
            });
            fetched.expect("the drive is good");
            came.sort_unstable();
            assert_eq!(came, all);
        }
    }
}

#[test]
fn what_was_read_ahead_is_not_read_again() {
    let drive = Arc::new(Faulty::new(1));
    let cache = cache(&drive, 2, options(12, 6, 3));
    cache.hint(2, vec![5, 6, 7, 8]);
    fetch(&cache, &drive, 1, &[0]).unwrap();
    fetch(&cache, &drive, 2, &[1, 5, 6]).unwrap();
    let counters = cache.counters();
    // Three are read ahead at most; one of them is not wanted, and has been read unless it could be
    // taken back in time.
    assert_eq!((counters.wanted, counters.ahead_useful, counters.demanded), (4, 2, 2));
    assert_eq!(counters.ahead_useful_bytes, 2 * RECORD_BYTES);
    assert!(counters.ahead_wasted <= 1);
    assert_eq!(cache.occupancy().ahead, 0);
}

#[test]
fn what_was_preloaded_is_kept_and_leaves_the_reserve_free() {
    let drive = Arc::new(Faulty::new(1));
    let cache = cache(&drive, 2, options(8, 3, 1));
    cache.preload(every_record());
    assert_eq!(cache.occupancy().empty, 3);
    fetch(&cache, &drive, 0, &[0, 1, 2, 3, 4, 5]).unwrap();
    let counters = cache.counters();
    assert_eq!((counters.hits, counters.demanded), (5, 1));
    assert_eq!(counters.preloaded_bytes, 5 * RECORD_BYTES);
}

#[test]
fn a_failed_preload_is_forgotten_and_its_record_read_when_it_is_wanted() {
    let drive = Arc::new(Faulty::new(1));
    // Every read goes wrong in some way or other.
    drive.one_in.store(1, Ordering::Relaxed);
    let cache = cache(&drive, 2, options(8, 3, 0));
    cache.preload(every_record());
    while cache.occupancy().reading > 0 {
        std::thread::yield_now();
    }
    drive.one_in.store(0, Ordering::Relaxed);
    fetch(&cache, &drive, 0, &[0, 1, 2, 3, 4]).expect("the drive is good again");
    assert_eq!(total(&cache), 8);
}

fn every_record() -> impl Iterator<Item = ExpertKey> {
    (0..LAYERS * EXPERTS).map(|i| ExpertKey { layer: i / EXPERTS, expert: i % EXPERTS })
}

#[test]
fn reading_ahead_never_takes_the_last_buffers() {
    let drive = Arc::new(Faulty::new(1));
    // No buffer to spare beyond those for what is asked for.
    let tight = cache(&drive, 2, options(4, 4, 0));
    tight.hint(2, vec![5, 6, 7, 8]);
    fetch(&tight, &drive, 1, &[0, 1, 2, 3, 4]).unwrap();
    fetch(&tight, &drive, 2, &[5]).unwrap();
    assert_eq!(tight.counters().ahead_useful, 0);
    // All buffers are for reading ahead, and what is in them is not what is asked for.
    let cache = cache(&drive, 2, options(2, 2, 2));
    cache.hint(3, vec![5, 6]);
    fetch(&cache, &drive, 1, &[]).unwrap();
    assert_eq!(total(&cache), 2);
    fetch(&cache, &drive, 2, &[1, 2, 3]).unwrap();
}

#[test]
fn fewer_are_read_ahead_when_hints_are_wrong_and_more_when_they_are_right() {
    let drive = Arc::new(Faulty::new(1));
    let cache = cache(&drive, 2, options(12, 8, 4));
    // Records read ahead in one round, whose hint names some that are asked for next, or others.
    let round = |layer: u32, right: bool| {
        let before = cache.counters();
        cache.hint((layer + 1) % LAYERS, vec![1, 2, 3, 4]);
        fetch(&cache, &drive, layer, &[0]).unwrap();
        // All of it comes, so that nothing is taken back.
        while cache.occupancy().reading > 0 {
            std::thread::yield_now();
        }
        let next: &[u32] = if right { &[1, 2, 3, 4] } else { &[11] };
        fetch(&cache, &drive, (layer + 1) % LAYERS, next).unwrap();
        let after = cache.counters();
        (after.ahead_useful - before.ahead_useful, after.ahead_wasted - before.ahead_wasted)
    };
    assert_eq!(round(0, false), (0, 4));
    for i in 0..30 {
        round(i % LAYERS, false);
    }
    // What is in memory by chance is not read ahead, so that a round may have less to do.
    let wasted: Vec<u64> = (0..4).map(|i| round(i, false).1).collect();
    assert_eq!(wasted.iter().max(), Some(&1), "{wasted:?}");
    let useful: Vec<u64> = (0..200).map(|i| round(i % LAYERS, true).0).collect();
    let most = useful.iter().max();
    assert!(most > Some(&1) && most <= Some(&4), "{useful:?}");
}

#[test]
fn a_shrunken_cache_keeps_its_reserve_and_delivers_as_before() {
    let drive = Arc::new(Faulty::new(1));
    let cache = cache(&drive, 2, options(12, 4, 1));
    let all: Vec<u32> = (0..EXPERTS).collect();
    fetch(&cache, &drive, 0, &all).unwrap();
    assert_eq!(cache.shrink(3), 3);
    assert_eq!(total(&cache), 9);
    fetch(&cache, &drive, 1, &all).unwrap();
    assert_eq!((cache.shrink(100), total(&cache)), (5, 4));
    assert_eq!(cache.shrink(1), 0);
    assert_eq!(cache.occupancy().resident, 0);
    for layer in 0..LAYERS {
        fetch(&cache, &drive, layer, &all).unwrap();
    }
    assert_eq!(total(&cache), 4);
}

#[test]
fn a_failed_read_names_its_record_and_the_next_request_works() {
    let drive = Arc::new(Faulty::new(7));
    let cache = cache(&drive, 2, options(6, 2, 0));
    drive.one_in.store(1, Ordering::Relaxed);
    let mut kinds = BTreeSet::new();
    for round in 0..200 {
        if let Err((_, error)) = fetch(&cache, &drive, round % LAYERS, &[1, 3, 5]) {
            kinds.insert(match *error {
                ReadError::Io { .. } => "refused",
                ReadError::Short { .. } => "short",
                ReadError::Refused(_) => "wrong",
                ReadError::ReaderDied { .. } => "died",
                _ => "other",
            });
        }
    }
    assert!(kinds.iter().eq(["died", "refused", "short", "wrong"].iter()), "{kinds:?}");
    drive.one_in.store(0, Ordering::Relaxed);
    for layer in 0..LAYERS {
        fetch(&cache, &drive, layer, &[1, 3, 5]).unwrap();
    }
    assert_eq!(total(&cache), 6);
}

/// Records that nothing is known of but where they are, as in a published checkpoint.
struct Unchecked(Checked);

impl Records for Unchecked {
    fn extents(&self, key: ExpertKey) -> Vec<Extent> {
        self.0.extents(key)
    }

    fn check(&self, _: ExpertKey, _: Record<'_>) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(())
    }
}

#[test]
fn a_file_that_ends_early_is_noticed_without_checksums() {
    let last = ExpertKey { layer: LAYERS - 1, expert: EXPERTS - 1 };
    let end = offset(last) + RECORD_BYTES;
    let block = READ_ALIGN as u64;
    // In the middle of a block, at its edge, and before the record's first byte.
    for bytes in [end - 1, end / block * block, (end / block - 1) * block, offset(last) - block] {
        let mut drive = Faulty::new(1);
        drive.bytes.truncate(bytes as usize);
        let drive = Arc::new(drive);
        let read = ReadOptions { threads: 2, piece_bytes: READ_ALIGN };
        let readers = Arc::new(Readers::new(drive.clone(), read).expect("threads to start"));
        let records = Arc::new(Unchecked(Checked(drive)));
        let policy = Box::new(Newest::default());
        let cache = ExpertCache::new(readers, records, policy, options(4, 2, 0)).unwrap();
        let error = cache.fetch(last.layer, &[last.expert], &mut |_, _| ()).unwrap_err();
        assert!(matches!(*error.source, ReadError::Short { .. }), "{bytes}: {error}");
    }
}

#[test]
fn a_consumer_that_panics_leaves_nothing_behind() {
    let drive = Arc::new(Faulty::new(1));
    let cache = cache(&drive, 2, options(3, 3, 0));
    for _ in 0..10 {
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            cache.fetch(0, &[1, 2, 3], &mut |_, _| {
                std::panic::resume_unwind(Box::new("the consumer breaks down"))
            })
        }));
        assert!(panics.is_err());
    }
    fetch(&cache, &drive, 0, &[4, 5, 6]).unwrap();
    assert_eq!(total(&cache), 3);
}

/// Many threads, few buffers, faults: right bytes or an error, no hang, no buffer lost.
fn storm(seed: u64, slots: usize, reserve: usize, ahead: usize, readers: usize, rounds: usize) {
    let drive = Arc::new(Faulty::new(seed));
    let cache = cache(&drive, readers, options(slots, reserve, ahead));
    drive.one_in.store(3 + seed % 40, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (cache, drive) = (&cache, &drive);
            scope.spawn(move || {
                let mut x = seed ^ thread << 32 | 1;
                let mut next = |n: u64| {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    x % n
                };
                for _ in 0..rounds {
                    let layer = next(u64::from(LAYERS)) as u32;
                    let mut pick = |most| {
                        let n = 1 + next(most);
                        (0..n).map(|_| next(u64::from(EXPERTS)) as u32).collect::<BTreeSet<_>>()
                    };
                    let wanted: Vec<u32> = pick(8).into_iter().collect();
                    let likely: Vec<u32> = pick(4).into_iter().collect();
                    // Right bytes or an error that names one of them: `fetch` looks.
                    cache.hint((layer + 1) % LAYERS, likely);
                    let _ = fetch(cache, drive, layer, &wanted);
                }
            });
        }
        cache.preload(every_record());
    });
    // What began on the bad drive may still fail, but not for those who ask from now on.
    drive.one_in.store(0, Ordering::Relaxed);
    for layer in 0..LAYERS {
        let all: Vec<u32> = (0..EXPERTS).collect();
        fetch(&cache, &drive, layer, &all).expect("the drive is good again");
    }
    assert_eq!(total(&cache), slots);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn many_requests_on_a_bad_drive_get_right_bytes_or_an_error(
        seed: u64,
        slots in 1usize..20,
        reserve in 1usize..8,
        ahead in 0usize..5,
        readers in 1usize..5,
    ) {
        storm(seed, slots, reserve, ahead, readers, 30);
    }
}
