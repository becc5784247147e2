//! Flags of every command that computes.

use std::ffi::OsString;

use crate::common::{ANSWER, QUESTION, args, repository, rill};

/// The least budget with which a command works, from the message that refuses less.
pub(crate) fn floor(command: &[OsString]) -> u64 {
    let refused = rill(command.iter().chain(&args!["--budget", "1"])).failed();
    let floor = refused.split("below the floor of ").nth(1).unwrap();
    floor.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn malformed_values_are_wrong_usage_with_every_command() {
    for (flag, values) in [
        ("--budget", &["8X", "-1", "", "1e9", "1..5G"][..]),
        ("--ctx", &["0", "-1", "x", "4294967296"]),
        ("--cache", &["best", "all", ""]),
        ("--lookahead", &["-1", "1025", "x"]),
        ("--readers", &["-1", "257", "x"]),
        ("--verify", &["maybe", ""]),
        ("--threads", &["-1", "1025", "x"]),
        ("--cpus", &["", "3-1", "0,0", "0-", "a", "1024"]),
        ("--prefill-chunk", &["0", "-1", "8193"]),
        ("--no-overlap", &["yes"]),
        ("--no-direct", &["yes"]),
    ] {
        for value in values {
            for command in COMPUTING {
                let given = format!("{flag}={value}");
                let message = rill(command.iter().chain(&[given.as_str()])).misused();
                assert!(message.contains(flag), "{command:?} {given}: {message}");
            }
        }
    }
}

/// Commands that open an engine.
const COMPUTING: &[&[&str]] = &[
    &["run", QUESTION],
    &["eval", "x"],
    &["selftest"],
    &["bench", "decode"],
    &["bench", "prefill"],
    &["trace", "record", "--out", "never-written", "x"],
];

#[test]
fn a_budget_below_the_floor_is_refused_with_the_plan() {
    for command in COMPUTING {
        let message = rill(command.iter().chain(&["--budget", "10M"])).failed();
        for part in ["10000000 bytes is below the floor", "process baseline", "expert slots"] {
            assert!(message.contains(part), "{command:?}: no {part:?} in {message}");
        }
    }
}

#[test]
fn the_budget_does_not_change_the_text() {
    for model in ["models/k3-nano", "fixtures/k3-tiny"] {
        let mut base = args!["run", "-q", "-m", repository(model), "--raw", "-n", "12"];
        base.extend(args!["--prefill-chunk", "16", "--temp", "1", "It was a dark and stormy"]);
        let text = rill(base.iter().chain(&args!["--budget", "1G"])).done();
        let floor = floor(&base);
        for budget in [floor, floor + (1 << 20), 0] {
            let budget = budget.to_string();
            assert_eq!(
                rill(base.iter().chain(&args!["--budget", &budget])).done(),
                text,
                "{budget}"
            );
        }
    }
}

#[test]
fn how_experts_are_read_does_not_change_the_text() {
    let base = args!["run", "-q", "--raw", "-n", "12", "It was a dark and stormy"];
    let text = rill(&base).done();
    let floor = floor(&base).to_string();
    for more in [
        &["--cache", "lru"][..],
        &["--cache", "lfu"],
        &["--cache", "scored", "--lookahead", "0"],
        &["--lookahead", "100"],
        &["--readers", "1"],
        &["--no-overlap"],
        &["--no-direct"],
        &["--verify"],
        &["--verify=off"],
    ] {
        let mut all = base.clone();
        // The look-ahead needs slots of its own.
        if !more.contains(&"100") {
            all.extend(args!["--budget", &floor]);
        }
        all.extend(more.iter().map(OsString::from));
        assert_eq!(rill(&all).done(), text, "{more:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn threads_are_tied_to_cpus_that_exist() {
    let message = rill(["run", QUESTION, "--cpus", "1023"]).failed();
    assert!(message.contains("cannot tie a thread to CPU 1023"), "{message}");
}

#[test]
fn a_context_is_as_long_as_it_was_asked_for() {
    let message = rill(["run", "--raw", "--ctx", "3", "one two three four"]).failed();
    assert!(
        message.contains("do not fit a context of 3;") && message.contains("--ctx"),
        "{message}"
    );
    let message = rill(["eval", "--ids", "1,2,3,4", "--ctx", "3"]).failed();
    assert!(message.contains("4 tokens do not fit a context of 3;"), "{message}");
    let message = rill(["run", "--ctx", "1048577", "x"]).failed();
    assert!(message.contains("1048577 tokens do not fit a context of 1048576;"), "{message}");
    // A full context ends the text.
    let ended = rill(["run", "--raw", "--ctx", "10", "-n", "100", "It was a"]);
    assert!(ended.stderr.contains("the context is full"), "{}", ended.stderr);
    ended.done();
}

#[test]
fn what_was_learned_is_used_by_the_next_run_and_spares_it_reads() {
    let folder = tempfile::tempdir().unwrap();
    let (learn, stats) = (folder.path().join("learned.json"), folder.path().join("stats.json"));
    let base = args!["run", "--learn", &learn, "--stats-json", &stats, QUESTION];
    let run = || {
        let ended = rill(&base);
        assert_eq!(ended.stderr.lines().count(), 3, "nothing to complain about: {}", ended.stderr);
        assert_eq!(ended.done(), ANSWER);
        let stats: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
        let of = |key: &str| stats["read_bytes"][key].as_u64().unwrap();
        (of("experts_preloaded"), of("experts_demanded"))
    };
    let (preloaded, demanded) = run();
    assert_eq!(preloaded, 0);
    let (preloaded, demanded_then) = run();
    assert!(preloaded > 0 && demanded_then < demanded, "{preloaded} {demanded_then} {demanded}");
}

#[test]
fn what_was_learned_is_gone_without_when_it_is_damaged_or_of_another_model() {
    let folder = tempfile::tempdir().unwrap();
    let learn = folder.path().join("learned.json");
    let nano = || rill(args!["run", "-q", "--learn", &learn, QUESTION]);
    nano().done();
    let whole = std::fs::read(&learn).unwrap();
    // Another model takes the file over.
    let tiny = repository("fixtures/k3-tiny");
    let ended = rill(args!["eval", "--learn", &learn, "-m", tiny, "--ids", "1,2,3"]);
    assert!(ended.stderr.contains("learned.json: model should be"), "{}", ended.stderr);
    ended.done();
    let ended = nano();
    assert!(ended.stderr.contains("model should be"), "{}", ended.stderr);
    assert_eq!(ended.done(), ANSWER);
    for damaged in [&whole[..whole.len() / 2], b"", b"[]"] {
        std::fs::write(&learn, damaged).unwrap();
        let ended = nano();
        assert!(ended.stderr.contains("go on without it"), "{}", ended.stderr);
        assert_eq!(ended.done(), ANSWER);
        // And it is whole again.
        assert_eq!(nano().stderr, "");
    }
    let nowhere = folder.path().join("no/such/folder");
    let ended = rill(args!["run", "-q", "--learn", nowhere, QUESTION]);
    assert!(ended.stderr.contains("no/such/folder"), "{}", ended.stderr);
    assert_eq!(ended.done(), ANSWER);
    for wrong in
        [&["run", "x", "--cache", "lru", "--learn", "f"][..], &["selftest", "--learn", "f"]]
    {
        assert!(rill(wrong).misused().contains("--learn"));
    }
}
