//! Whole engines on bad drives, with the least memory there is: weights that come late, in pieces,
//! not at all or with a wrong bit. Every request ends with the bits of a good drive or with an error
//! that says what is missing; then the session stands at its last whole token, no slot is lost, and
//! the next request is served.
//!
//! Flips are for containers alone: a published checkpoint has no checksums, so a byte of it that is
//! wrong but possible cannot be noticed.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use common::{assert_same_bits, convert, floor_bytes, k3_tiny, reference, within_a_minute};
use proptest::prelude::*;
use rill::{Engine, EngineOptions, Error, Folder, Logits, Session, Storage};
use rill_convert::{ExpertCodec, TrunkCodec};

/// Tokens that go in at once, and those that follow one by one.
const PROMPT: usize = 3;
const DECODED: usize = 2;
/// What positions, lengths and ends of direct reads are multiples of.
const BLOCK: usize = 4096;

/// What a read does wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Comes in two pieces, cut between blocks.
    Pieces,
    /// Is interrupted before anything came.
    Interrupted,
    /// Comes late.
    Slow,
    /// The drive reports an error.
    Refused,
    /// The file ends before, or in the middle of, what was asked for.
    Cut,
    /// The file is empty.
    Gone,
    /// One bit is wrong: of the header, if it is the first read of a record, or anywhere.
    FlipsHeader,
    FlipsAnywhere,
    /// The thread that reads breaks down.
    Panics,
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    kind: Kind,
    /// Reads that go well before.
    after: usize,
    /// Reads that go wrong.
    times: usize,
    /// Chooses byte, bit and length.
    random: usize,
}

/// A drive that can be told to fail.
struct Faulty {
    inner: Arc<dyn Storage>,
    fault: Arc<Mutex<Option<Fault>>>,
}

impl Faulty {
    /// What this read does wrong.
    fn draw(&self) -> Option<Fault> {
        let mut armed = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = armed.as_mut()?;
        if fault.after > 0 {
            fault.after -= 1;
            return None;
        }
        fault.times = fault.times.checked_sub(1)?;
        Some(*fault)
    }
}

impl Storage for Faulty {
    fn read_at(&self, file: u32, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        let Some(Fault { kind, random, .. }) = self.draw() else {
            return self.inner.read_at(file, offset, out);
        };
        match kind {
            Kind::Pieces => {
                let first = (out.len() / 2).next_multiple_of(BLOCK).min(out.len());
                self.inner.read_at(file, offset, &mut out[..first])
            }
            Kind::Interrupted => Err(io::ErrorKind::Interrupted.into()),
            Kind::Slow => {
                std::thread::sleep(Duration::from_millis(1 + random as u64 % 5));
                self.inner.read_at(file, offset, out)
            }
            Kind::Refused => Err(io::Error::other("the drive gave up")),
            Kind::Cut => {
                let n = self.inner.read_at(file, offset, out)?;
                Ok(n - (1 + random % n.max(1)).min(n))
            }
            Kind::Gone => Ok(0),
            Kind::FlipsHeader | Kind::FlipsAnywhere => {
                let n = self.inner.read_at(file, offset, out)?;
                let most = if kind == Kind::FlipsHeader { 64 } else { n };
                if n > 0 {
                    out[random % most.min(n)] ^= 1 << (random / 7 % 8);
                }
                Ok(n)
            }
            // A panic that is not printed.
            Kind::Panics => std::panic::resume_unwind(Box::new("a reader breaks down")),
        }
    }

    fn name(&self, file: u32) -> String {
        self.inner.name(file)
    }
}

/// A model, its floor, a prompt and what a good drive makes of it.
struct Model {
    folder: Folder,
    options: EngineOptions,
    ids: Vec<u32>,
    good: Vec<Vec<f32>>,
    _dir: Option<tempfile::TempDir>,
}

impl Model {
    fn new(folder: Folder, dir: Option<tempfile::TempDir>) -> Self {
        let context = PROMPT + DECODED;
        let options = EngineOptions { context, threads: 1, readers: 3, ..EngineOptions::default() };
        let budget_bytes = floor_bytes(&folder, &options);
        let options = EngineOptions { budget_bytes, ..options };
        let engine = Engine::open(folder.clone(), &options).expect("the floor is enough");
        let plan = engine.plan();
        assert!(!plan.pinned.contains(&true) && !plan.head_resident, "{plan}");
        let ids = reference(&k3_tiny()).input_ids[..context].to_vec();
        let good = request(&engine, &mut engine.new_session(), &ids).expect("a good drive");
        Self { folder, options, ids, good, _dir: dir }
    }
}

static CONTAINER: LazyLock<Model> = LazyLock::new(|| {
    let dir = convert("fixtures/k3-tiny", ExpertCodec::Source, TrunkCodec::Source);
    Model::new(Folder::Disk(dir.path().to_owned()), Some(dir))
});
static CHECKPOINT: LazyLock<Model> = LazyLock::new(|| Model::new(k3_tiny(), None));

/// Runs what is left of the prompt, then token by token: the last logits of each step.
fn request(engine: &Engine, session: &mut Session, ids: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
    let mut all = Vec::new();
    while session.position() < ids.len() {
        let at = session.position();
        let step = if at < PROMPT { &ids[at..PROMPT] } else { &ids[at..=at] };
        all.push(engine.forward(session, step, Logits::Last)?);
    }
    Ok(all)
}

/// These are the last of a good drive's steps.
fn assert_good(what: &str, got: &[Vec<f32>], model: &Model) {
    let good = &model.good[model.good.len() - got.len()..];
    got.iter().zip(good).for_each(|(got, good)| assert_same_bits(what, got, good));
}

/// The error says which weights are missing.
fn assert_names_its_weights(error: &Error, model: &Model) {
    let message = error.to_string();
    match error {
        Error::Expert { layer, expert, .. } => {
            assert!(layer.0 < 12 && expert.0 < 12, "{message}");
        }
        Error::Trunk { what, .. } => {
            assert!(what.contains("layer ") || what.contains("of the head"), "{message}");
        }
        Error::Format(_) => {
            assert!(message.contains("trunk.rill") && message.contains("run \"layer"), "{message}");
        }
        _ => panic!("{:?}: {error:?}", model.folder),
    }
}

/// One request while the drive fails, the rest of it and another when it is good again.
fn survive(model: &'static Model, fault: Fault) -> bool {
    let armed = Arc::new(Mutex::new(None));
    let arm = |fault| *armed.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    let open = || {
        Engine::open_with_storage(model.folder.clone(), &model.options, |inner| {
            Arc::new(Faulty { inner, fault: armed.clone() })
        })
    };
    let engine = open().expect("nothing is pinned, so nothing is read");
    arm(Some(fault));
    let mut session = engine.new_session();
    let first = request(&engine, &mut session, &model.ids);
    arm(None);
    match &first {
        Ok(logits) => assert_good("on a bad drive", logits, model),
        Err(error) => {
            assert_names_its_weights(error, model);
            assert!(session.position() < model.ids.len());
            let rest = request(&engine, &mut session, &model.ids).expect("a good drive again");
            assert_good("the rest", &rest, model);
        }
    }
    drop(session);
    let next = request(&engine, &mut engine.new_session(), &model.ids).expect("a good drive");
    assert_good("the next request", &next, model);
    let slots = engine.expert_slots();
    let sum = slots.empty + slots.reading + slots.resident + slots.loose + slots.ahead;
    assert_eq!(sum as u64, engine.plan().expert_slots, "{slots:?}");
    first.is_err()
}

fn kind() -> impl Strategy<Value = Kind> {
    use Kind::*;
    let kinds = [Pieces, Interrupted, Slow, Refused, Cut, Gone, FlipsHeader, FlipsAnywhere, Panics];
    prop::sample::select(kinds.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_bad_drive_never_makes_a_wrong_token_nor_a_request_that_hangs(
        kind in kind(),
        after in 0usize..700,
        times in prop_oneof![Just(1usize), 2usize..40],
        random: usize,
        checkpoint: bool,
    ) {
        let flips = matches!(kind, Kind::FlipsHeader | Kind::FlipsAnywhere);
        let model: &Model = if checkpoint && !flips { &CHECKPOINT } else { &CONTAINER };
        let fault = Fault { kind, after, times, random };
        within_a_minute(move || survive(model, fault));
    }
}

#[test]
fn each_kind_of_fault_in_the_first_reads_is_survived_and_noticed_if_it_matters() {
    use Kind::*;
    let harmless = [Pieces, Interrupted, Slow].map(|kind| (kind, false));
    let noticed = [Refused, Cut, Gone, FlipsHeader, FlipsAnywhere, Panics].map(|kind| (kind, true));
    for (kind, matters) in harmless.into_iter().chain(noticed) {
        let failed = (0..14).filter(|&after| {
            let fault = Fault { kind, after, times: 1, random: 3 + 977 * after };
            within_a_minute(move || survive(&CONTAINER, fault))
        });
        // What fails while it is read ahead is read again, so that not all of them are noticed.
        assert_eq!(failed.count() > 0, matters, "{kind:?}");
    }
}

/// Flips a bit in the middle of every read of the trunk at one place, and notes all places.
struct FlipsAt {
    inner: Arc<dyn Storage>,
    place: Mutex<Option<u64>>,
    seen: Mutex<BTreeSet<u64>>,
}

impl Storage for FlipsAt {
    fn read_at(&self, file: u32, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read_at(file, offset, out)?;
        // The first file is the trunk.
        if file == 0 {
            self.seen.lock().unwrap().insert(offset);
            if *self.place.lock().unwrap() == Some(offset) {
                out[n / 2] ^= 16;
            }
        }
        Ok(n)
    }

    fn name(&self, file: u32) -> String {
        self.inner.name(file)
    }
}

#[test]
fn a_wrong_bit_in_any_part_of_the_streamed_trunk_is_noticed() {
    let model = &*CONTAINER;
    let mut drive = None;
    let engine = Engine::open_with_storage(model.folder.clone(), &model.options, |inner| {
        let flips = FlipsAt { inner, place: Mutex::default(), seen: Mutex::default() };
        drive.insert(Arc::new(flips)).clone()
    });
    let (engine, drive) = (engine.expect("it opens"), drive.expect("it was asked for"));
    let first = request(&engine, &mut engine.new_session(), &model.ids);
    assert!(first.is_ok(), "nothing is flipped yet");
    let places = drive.seen.lock().unwrap().clone();
    let mut parts = BTreeSet::new();
    for place in places {
        *drive.place.lock().unwrap() = Some(place);
        let error = request(&engine, &mut engine.new_session(), &model.ids).err();
        let error = error.unwrap_or_else(|| panic!("nothing noticed at byte {place}"));
        assert_names_its_weights(&error, model);
        parts.insert(error.to_string());
        *drive.place.lock().unwrap() = None;
        let good = request(&engine, &mut engine.new_session(), &model.ids).expect("repaired");
        assert_good("repaired", &good, model);
    }
    let n_layers = engine.config().layers.len();
    assert!(parts.len() > n_layers, "every layer and the head: {parts:?}");
}
