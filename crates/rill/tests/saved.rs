//! Sessions in files: they go on with the same bits, or are refused.

mod common;

use std::fs;
use std::path::Path;

use common::{assert_same_bits, convert, k3_tiny, kimi_linear_tiny};
use proptest::prelude::*;
use rill::{Engine, EngineOptions, Error, Folder, Logits, Session};
use rill_convert::{ExpertCodec, TrunkCodec};
use rill_format::container::Checksum;

const IDS: [u32; 12] = [5, 77, 3, 300, 12, 9, 501, 44, 8, 8, 250, 1];

fn open(folder: Folder) -> Engine {
    let options = EngineOptions { context: 32, sessions: 2, threads: 2, ..Default::default() };
    Engine::open(folder, &options).expect("it opens")
}

fn session(engine: &Engine, ids: &[u32]) -> Session {
    let mut session = engine.new_session();
    engine.forward(&mut session, ids, Logits::None).expect("it runs");
    session
}

fn saved(engine: &Engine, path: &Path) {
    engine.save_session(&session(engine, &IDS[..8]), path, "so far so good").expect("it is saved");
}

#[test]
fn a_loaded_session_goes_on_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk");
    for folder in [k3_tiny(), kimi_linear_tiny()] {
        let whole = {
            let engine = open(folder.clone());
            saved(&engine, &path);
            engine.forward(&mut session(&engine, &IDS[..8]), &IDS[8..], Logits::All).unwrap()
        };
        // Another engine, as after a power cut.
        let engine = open(folder);
        let (mut session, note) = engine.load_session(&path).expect("it is whole");
        assert_eq!((session.tokens(), note.as_str()), (&IDS[..8], "so far so good"));
        let rest = engine.forward(&mut session, &IDS[8..], Logits::All).unwrap();
        assert_same_bits("after loading", &rest, &whole);
    }
}

#[test]
fn a_session_that_has_seen_nothing_can_be_saved_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk");
    let engine = open(k3_tiny());
    engine.save_session(&engine.new_session(), &path, "").expect("it is saved");
    let (session, _) = engine.load_session(&path).expect("it is whole");
    assert_eq!(session.position(), 0);
}

#[test]
fn a_file_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk");
    saved(&open(k3_tiny()), &path);
    let [q8, q4] = [TrunkCodec::Q8, TrunkCodec::Q4]
        .map(|trunk| convert("fixtures/k3-tiny", ExpertCodec::Source, trunk));
    let disk = |dir: &tempfile::TempDir| Folder::Disk(dir.path().to_owned());
    let refused = |engine: &Engine| match engine.load_session(&path) {
        Err(Error::SessionFile { what: "its model", .. }) => {}
        other => panic!("{other:?}"),
    };
    refused(&open(kimi_linear_tiny()));
    // The same shapes with other weights.
    refused(&open(disk(&q8)));
    saved(&open(disk(&q8)), &path);
    refused(&open(disk(&q4)));
    // A checkpoint has no fingerprint: some bytes of it have been changed.
    let changed = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(common::repository("fixtures/k3-tiny")).unwrap() {
        let entry = entry.unwrap().path();
        let mut bytes = fs::read(&entry).unwrap();
        if entry.extension().is_some_and(|e| e == "safetensors") {
            let last = bytes.len() - 100;
            bytes[last] ^= 1;
        }
        fs::write(changed.path().join(entry.file_name().unwrap()), bytes).unwrap();
    }
    saved(&open(k3_tiny()), &path);
    refused(&open(disk(&changed)));
}

#[test]
fn a_session_longer_than_the_context_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk");
    saved(&open(k3_tiny()), &path);
    let short = EngineOptions { context: 7, ..Default::default() };
    let engine = Engine::open(k3_tiny(), &short).unwrap();
    match engine.load_session(&path) {
        Err(Error::ContextFull { positions: 8, max_positions: 7 }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_save_that_fails_leaves_the_older_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk");
    let engine = open(k3_tiny());
    saved(&engine, &path);
    let before = fs::read(&path).unwrap();
    // Noticed when the file has begun.
    let long = "x".repeat(17 << 20);
    let error = engine.save_session(&session(&engine, &IDS), &path, &long).unwrap_err();
    assert!(error.to_string().contains("talk"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), before);
    engine.save_session(&session(&engine, &IDS), &path, "").expect("nothing is in the way");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "nothing else is left: {left:?}");
}

#[cfg(unix)]
#[test]
fn a_conversation_is_readable_by_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk");
    saved(&open(k3_tiny()), &path);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_damaged_file_is_refused(
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 0..3),
        // Where the fields are.
        early in any::<bool>(),
        more in prop::option::weighted(0.2, prop::collection::vec(any::<u8>(), 1..9)),
    ) {
        let engine = open(k3_tiny());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk");
        saved(&engine, &path);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        for (at, bit) in flips {
            let range = if early { 120.min(bytes.len()) } else { bytes.len() };
            bytes[at.index(range)] ^= 1 << bit;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        bytes.extend(more.into_iter().flatten());
        fs::write(&path, &bytes).unwrap();
        let held = engine.ledger().held_bytes();
        match engine.load_session(&path) {
            Ok(_) => prop_assert_eq!(bytes, whole),
            Err(error) => {
                prop_assert!(bytes != whole);
                prop_assert!(error.to_string().contains("talk"), "{error}");
            }
        }
        prop_assert_eq!(engine.ledger().held_bytes(), held, "nothing stays leased");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    /// Whoever can write the file can write its checksum too.
    #[test]
    fn a_file_made_up_with_a_right_checksum_breaks_nothing(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..6),
        resize in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let engine = open(k3_tiny());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk");
        saved(&engine, &path);
        let mut bytes = fs::read(&path).unwrap();
        bytes.truncate(bytes.len() - 8);
        for (at, byte, where_to) in flips {
            // Fields, the head with the tokens, anything.
            let range = [16, 200, bytes.len()][usize::from(where_to)];
            bytes[at.index(range)] = byte;
        }
        if let Some(length) = resize {
            bytes.resize(length.index(2 * bytes.len()), 1);
        }
        let mut sum = Checksum::default();
        sum.update(&bytes);
        bytes.extend(sum.finish().to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        let _ = rill::read_session_note(&path);
        if let Ok((mut session, _)) = engine.load_session(&path) {
            let position = session.position();
            engine.forward(&mut session, &[1, 2], Logits::Last).expect("it runs, whatever it means");
            prop_assert_eq!(session.position(), position + 2);
        }
    }
}
