//! The front of a session's file: its first bytes, version, head and tokens. The states after them are
//! those of a real file, and the checksum, which no fuzzer would find, is made right. A session that is
//! taken goes on. Beginnings of conversations on disk are such files too.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use rill::{Engine, EngineOptions, Folder, Logits, Session, read_session_note};
use rill_format::container::Checksum;

const CONTEXT: usize = 16;
/// Stands for the model's identity in an input.
const MODEL: &[u8] = &[b'#'; 33];

struct Fixture {
    engine: Engine,
    path: PathBuf,
    identity: Vec<u8>,
    /// States of a session with a full context, and bytes that each token has in them.
    states: Vec<u8>,
    token_bytes: usize,
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let folder = Folder::Disk(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/k3-tiny").into());
    let options = EngineOptions {
        budget_bytes: 256 << 20,
        context: CONTEXT,
        sessions: 2,
        threads: 1,
        ..EngineOptions::default()
    };
    let engine = Engine::open(folder, &options).expect("the fixture is there");
    let path = std::env::temp_dir().join(format!("rill-fuzz-session-{}", std::process::id()));
    let whole = |tokens: &[u32]| {
        let mut session = engine.new_session();
        engine.forward(&mut session, tokens, Logits::None).expect("it runs");
        engine.save_session(&session, &path, "").expect("the temporary folder can be written");
        std::fs::read(&path).expect("it has just been written")
    };
    let full = whole(&[7; CONTEXT]);
    let states = full[states_at(&full, CONTEXT)..full.len() - 8].to_vec();
    let one = whole(&[7]);
    let token_bytes = (states.len() - (one.len() - 8 - states_at(&one, 1))) / (CONTEXT - 1);
    let start = 16 + br#"{"model":""#.len();
    let identity = full[start..start + MODEL.len()].to_vec();
    assert_eq!(full[start + MODEL.len()], b'"', "placeholder and identity have one length");
    Fixture { engine, path, identity, states, token_bytes }
});

fuzz_target!(|data: &[u8]| {
    let Fixture { engine, path, .. } = &*FIXTURE;
    std::fs::write(path, file(data)).expect("there is room");
    let held = engine.ledger().held_bytes();
    let note = read_session_note(path);
    match engine.load_session(path) {
        Ok((mut session, found)) => {
            assert_eq!(note.expect("it is part of what is whole"), found);
            check(engine, &mut session);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    assert_eq!(engine.ledger().held_bytes(), held, "nothing stays leased");
});

/// The file that an input is the front of. One of even length has the states of as many tokens as its
/// head says, the others none.
fn file(data: &[u8]) -> Vec<u8> {
    let fixture = &*FIXTURE;
    let mut file = data.to_vec();
    if let Some(at) = file.windows(MODEL.len()).position(|window| window == MODEL) {
        file[at..at + MODEL.len()].copy_from_slice(&fixture.identity);
    }
    if let Some(tokens) = tokens(&file).filter(|_| data.len().is_multiple_of(2)) {
        let states_at = states_at(&file, tokens);
        file.resize(states_at, 1);
        let bytes = fixture.states.len() - (CONTEXT - tokens) * fixture.token_bytes;
        file.extend(&fixture.states[..bytes]);
    }
    let mut sum = Checksum::default();
    sum.update(&file);
    file.extend(sum.finish().to_le_bytes());
    file
}

/// What the head says, if there is a state for so many.
fn tokens(file: &[u8]) -> Option<usize> {
    let head = file.get(16..16 + head_bytes(file)?)?;
    let head: serde_json::Value = serde_json::from_slice(head).ok()?;
    head["tokens"].as_u64().map(|n| n as usize).filter(|n| *n <= CONTEXT)
}

fn head_bytes(file: &[u8]) -> Option<usize> {
    file.get(12..16).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four")) as usize)
}

fn states_at(file: &[u8], tokens: usize) -> usize {
    16 + head_bytes(file).expect("it has a head") + 4 * tokens
}

fn check(engine: &Engine, session: &mut Session) {
    let position = session.position();
    assert!(position <= CONTEXT);
    assert!(session.tokens().iter().all(|&id| (id as usize) < engine.config().vocab_size));
    if position < CONTEXT {
        engine.forward(session, &[1], Logits::Last).expect("it runs, whatever it means");
        assert_eq!(session.position(), position + 1);
    }
}
