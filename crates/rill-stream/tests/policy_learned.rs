//! What a run leaves to the next one.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;

use rill_stream::policy::{Learned, Lru, Scored};
use rill_stream::{ExpertKey, Geometry, Policy, StreamError, Trace, replay};

#[test]
fn what_one_half_of_a_text_taught_helps_the_other_from_cold() {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let whole = Trace::read(&whole.join("kimi_linear_300_tokens.safetensors")).unwrap();
    let (first, second) = (part(&whole, 0, 150), part(&whole, 150, 300));
    let geometry = whole.geometry();
    let mut taught = Scored::new(geometry);
    replay(&first, &mut taught, 400);

    let learned = through_a_file(&taught.learned().unwrap());
    for capacity in [100, 200, 400, 800] {
        let cold = replay(&second, &mut Scored::new(geometry), capacity).hit_share();
        let warm = replay(&second, &mut Scored::from_learned(&learned), capacity).hit_share();
        assert!(warm > cold + 0.002, "{capacity} records: {cold} before, {warm} after learning");
    }
}

#[test]
fn what_was_used_most_ranks_first_before_anything_runs() {
    let geometry = Geometry { n_layers: 2, n_experts: 3 };
    let key = |layer, expert| ExpertKey { layer, expert };
    let mut policy = Scored::new(geometry);
    for experts in [[0, 1], [1, 2], [1, 2]] {
        policy.used(0, &experts);
        policy.used(1, &experts);
    }
    let learned = through_a_file(&policy.learned().unwrap());
    assert!((learned.count(key(1, 1)) - 3.0).abs() < 0.01, "{learned:?}");
    assert!((learned.count(key(0, 0)) - 1.0).abs() < 0.01, "{learned:?}");
    let mut next = Scored::from_learned(&learned);
    let scores = [0, 2, 1].map(|expert| next.score(key(0, expert)));
    assert!(scores[0] < scores[1] && scores[1] < scores[2], "{scores:?}");
}

#[test]
fn a_policy_that_learns_nothing_says_so() {
    assert!(Lru::new(Geometry { n_layers: 1, n_experts: 1 }).learned().is_none());
}

#[test]
fn hints_for_another_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("learned.json");
    let geometry = Geometry { n_layers: 2, n_experts: 3 };
    Scored::new(geometry).learned().unwrap().write(&path, "this model").unwrap();
    Learned::read(&path, "this model", geometry).unwrap();

    let refused = |fingerprint: &str, geometry| {
        let error = Learned::read(&path, fingerprint, geometry).unwrap_err();
        assert!(matches!(error, StreamError::Hint { .. }), "{error}");
        error.to_string()
    };
    let error = refused("another", geometry);
    assert!(error.contains(r#"should be "another", found "this model""#), "{error}");
    let error = refused("this model", Geometry { n_layers: 3, n_experts: 2 });
    assert!(error.contains("3 layers of 2 experts, found 2 layers of 3 experts"), "{error}");
}

#[test]
fn damaged_hints_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("learned.json");
    let geometry = Geometry { n_layers: 2, n_experts: 3 };
    let mut policy = Scored::new(geometry);
    policy.used(0, &[1]);
    policy.used(1, &[2]);
    let learned = policy.learned().unwrap();
    learned.write(&path, "m").unwrap();
    let whole = fs::read(&path).unwrap();
    let learned = Learned::read(&path, "m", geometry).unwrap();

    for end in 0..whole.len() {
        fs::write(&path, &whole[..end]).unwrap();
        Learned::read(&path, "m", geometry).unwrap_err();
    }
    for at in 0..whole.len() {
        for value in [b'0', b'9', b'-', b'.', b'"', b' ', 0xff] {
            let mut changed = whole.clone();
            changed[at] = value;
            fs::write(&path, &changed).unwrap();
            // What still passes must be what was written.
            if let Ok(read) = Learned::read(&path, "m", geometry) {
                assert_eq!(read, learned, "{}", String::from_utf8_lossy(&changed));
            }
        }
    }
    for (text, message) in [
        ("[]".to_owned(), "content should be"),
        (
            r#"{"fingerprint":"m","n_layers":2,"n_experts":3,"checksum":0,"counts":[0]}"#
                .to_owned(),
            "number of counts should be 6, found 1",
        ),
        (
            r#"{"fingerprint":"m","n_layers":2,"n_experts":3,"checksum":7,"counts":[0,0,0,0,0,0]}"#
                .to_owned(),
            "checksum should be 7",
        ),
        ("[".repeat(100_000), "content should be"),
    ] {
        fs::write(&path, text).unwrap();
        let error = Learned::read(&path, "m", geometry).unwrap_err().to_string();
        assert!(error.contains("learned.json") && error.contains(message), "{error}");
    }
    fs::File::create(&path).unwrap().set_len((1 << 24) + 1).unwrap();
    let error = Learned::read(&path, "m", geometry).unwrap_err();
    assert!(matches!(error, StreamError::FileTooLarge { .. }), "{error}");
}

fn through_a_file(learned: &Learned) -> Learned {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("learned.json");
    learned.write(&path, "a model").unwrap();
    Learned::read(&path, "a model", learned.geometry()).unwrap()
}

/// Some tokens of a recording.
fn part(trace: &Trace, from: usize, to: usize) -> Trace {
    let layers = 0..trace.geometry().n_layers;
    let choices = (from..to).flat_map(|token| layers.clone().map(move |layer| (token, layer)));
    let ids = choices.flat_map(|(token, layer)| trace.chosen(token, layer).to_vec()).collect();
    Trace::new("part", trace.geometry(), trace.top_k(), ids).unwrap()
}
