//! `rill trace`.

use std::fs;

use serde_json::Value;

use crate::common::{args, repository, rill};

const RECORDING: &str = "crates/rill-stream/tests/data/kimi_linear_300_tokens.safetensors";

#[test]
fn replay_compares_policies_with_foresight() {
    let text = rill(args!["trace", "replay", repository(RECORDING), "--share", "3,12"]).done();
    let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(text.lines().next(), Some("300 tokens, 26 layers of 256 experts, 8 used in each"));
    assert_eq!(rows[2], ["slots", "of", "all", "lru", "lfu", "scored", "foresight"]);
    assert_eq!((rows[3][0], rows[4][0]), ("200", "799"));
    for row in &rows[3..5] {
        let shares: Vec<f64> = row.iter().skip(3).step_by(2).map(|s| s.parse().unwrap()).collect();
        assert!(shares.len() == 4 && shares.is_sorted(), "{row:?}");
    }
}

#[test]
fn replay_as_json_counts_every_use() {
    let text = rill(args![
        "trace",
        "replay",
        repository(RECORDING),
        "--cache",
        "scored",
        "--slots",
        "0,799,6656",
        "--json"
    ])
    .done();
    let all: Value = serde_json::from_str(&text).unwrap();
    let replays = all["replays"].as_array().unwrap();
    let of = |name: &str| -> Vec<&Value> {
        replays.iter().filter(|r| r["policy"].as_str() == Some(name)).collect()
    };
    assert_eq!((of("scored").len(), of("foresight").len(), replays.len()), (3, 3, 6));
    for r in replays {
        let n = |key: &str| r[key].as_u64().unwrap();
        assert_eq!(n("hits") + n("misses"), 300 * 26 * 8);
        let by_layer: u64 =
            r["hits_by_layer"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
        assert_eq!(by_layer, n("hits"));
        match n("slots") {
            0 => assert_eq!(n("hits"), 0),
            6656 => assert_eq!(n("misses"), n("distinct")),
            _ => assert!(r["hit_share_second_half"].as_f64().unwrap() > 0.6),
        }
    }
}

#[test]
fn what_is_not_a_recording_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.safetensors");
    for (bytes, part) in [
        (&b"short"[..], "at least 8"),
        (&[0xff; 64], "header size"),
        (&[0; 64], "header should be"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = rill(args!["trace", "replay", &path]).failed();
        assert!(error.contains("trace.safetensors") && error.contains(part), "{error}");
    }
    let weights = repository("models/k3-nano/expected.safetensors");
    let error = rill(args!["trace", "replay", weights]).failed();
    assert!(error.contains("expected.safetensors: header should be that of one tensor"), "{error}");
}

#[test]
fn sizes_of_a_cache_that_make_no_sense_are_wrong_usage() {
    for (option, value) in
        [("--share", "101"), ("--share", "x"), ("--slots", "-1"), ("--cache", "best")]
    {
        rill(args!["trace", "replay", repository(RECORDING), option, value]).misused();
    }
    let both = ["--share", "3", "--slots", "5"];
    rill(args!["trace", "replay", repository(RECORDING)].into_iter().chain(both.map(Into::into)))
        .misused();
}

#[test]
fn a_recorded_run_can_be_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.safetensors");
    let text = "It was a dark and stormy night";
    let n_text = 1 + rill(["tokenize", text]).done().split(',').count();
    let said = rill(args!["trace", "record", "--out", &path, "-n", "6", text]).done();
    // The last token that is generated is not run.
    assert!(said.ends_with(&format!(": {} tokens\n", n_text + 5)), "{said}");
    let shown = rill(args!["trace", "replay", &path, "--share", "10,100"]).done();
    assert!(shown.starts_with(&format!("{} tokens, ", n_text + 5)), "{shown}");

    // The same routing whatever the budget.
    let again = folder.path().join("again.safetensors");
    let mut small = args!["trace", "record", "--out", &again, "-n", "6", text];
    let floor = crate::engine::floor(&small).to_string();
    small.extend(args!["--budget", floor]);
    rill(&small).done();
    assert_eq!(fs::read(&path).unwrap(), fs::read(&again).unwrap());

    rill(["trace", "record", text]).misused();
    let nowhere = folder.path().join("no/such/folder");
    let error = rill(args!["trace", "record", "-n", "1", "--out", nowhere, text]).failed();
    assert!(error.contains("no/such/folder"), "{error}");
}
