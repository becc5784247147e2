//! `rill run`: prompts in, text out.

use crate::common::{ANSWER, QUESTION, args, command, ended, file, repository, rill, rill_fed};

#[test]
fn a_bare_question_is_answered_from_any_folder_with_an_empty_environment() {
    let elsewhere = tempfile::tempdir().unwrap();
    let mut command = command(["run", QUESTION]);
    assert_eq!(ended(command.env_clear().current_dir(&elsewhere)).done(), ANSWER);
    assert_eq!(std::fs::read_dir(elsewhere).unwrap().count(), 0);
}

#[test]
fn a_prompt_is_the_same_from_an_argument_a_file_a_dash_and_a_pipe() {
    let (_folder, path) = file(QUESTION);
    assert_eq!(rill(["run", QUESTION]).done(), ANSWER);
    assert_eq!(rill(args!["run", "--file", &path]).done(), ANSWER);
    assert_eq!(rill_fed(["run", "-"], QUESTION).done(), ANSWER);
    assert_eq!(rill_fed(["run"], QUESTION).done(), ANSWER);
}

#[test]
fn one_line_ending_at_the_end_of_a_pipe_or_file_is_dropped() {
    let raw = |input: &str| rill_fed(["run", "--raw", "-n", "8"], input).done();
    let expected = raw("The capital of Italy");
    assert_eq!(raw("The capital of Italy\n"), expected);
    assert_eq!(raw("The capital of Italy\r\n"), expected);
    assert_ne!(raw("The capital of Italy\n\n"), expected);
    let (_folder, path) = file("The capital of Italy\n");
    assert_eq!(rill(args!["run", "--raw", "-n", "8", "--file", path]).done(), expected);
    // An argument is what was typed.
    let typed = rill(["run", "--raw", "-n", "8", "The capital of Italy\n"]).done();
    assert_ne!(typed, expected);
}

#[test]
fn raw_continues_the_text_and_a_bare_question_uses_the_chat_format() {
    let raw = rill(["run", "--raw", "-n", "8", "Call me Ishmael"]).done();
    assert_ne!(raw, rill(["run", "-n", "8", "Call me Ishmael"]).done());
    // The text and BOS before it, and none of the structure of a conversation.
    let n_tokens = rill(["tokenize", "Call me Ishmael"]).done().split(',').count();
    let statistics = rill(["run", "--raw", "-n", "1", "Call me Ishmael"]).stderr;
    let expected = format!("prompt {} tokens in", n_tokens + 1);
    assert!(statistics.contains(&expected), "{statistics}");
    // The demo model has read Moby-Dick; it has no answer to give here.
    assert!(raw.starts_with('.') || raw.starts_with(',') || raw.starts_with(' '), "{raw:?}");
}

#[test]
fn reasoning_is_shown_between_lines_of_its_own_and_only_when_asked_for() {
    let text = rill(["run", "--think", QUESTION]).done();
    let (reasoning, answer) = text.split_once("\n</think>\n").unwrap();
    let reasoning = reasoning.strip_prefix("<think>\n").unwrap();
    assert!(reasoning.contains("Italy"), "{text}");
    assert_eq!(answer, ANSWER);

    let cut_short = rill(["run", "--think", "-n", "3", QUESTION]).done();
    let shown = cut_short.strip_prefix("<think>\n").unwrap().strip_suffix("\n</think>\n").unwrap();
    assert!(reasoning.starts_with(shown) && !shown.is_empty(), "{cut_short}");
}

#[test]
fn n_limits_the_tokens_and_the_statistics_say_so() {
    let ended = rill(["run", "-n", "3", QUESTION]);
    assert!(ended.stderr.contains("generated 3 tokens"), "{}", ended.stderr);
    assert!(ended.stderr.contains("stopped at --max-tokens"), "{}", ended.stderr);
    let cut_short = ended.done();
    let shown = cut_short.strip_suffix('\n').unwrap();
    assert!(ANSWER.starts_with(shown) && !shown.is_empty(), "{cut_short}");

    let ended = rill(["run", QUESTION]);
    assert!(!ended.stderr.contains("stopped at"), "{}", ended.stderr);
    assert_eq!(rill(["run", "-n", "0", QUESTION]).done(), "\n");
    // No room is set aside for tokens that may never come.
    let most = usize::MAX.to_string();
    assert_eq!(rill(["run", "-n", &most, QUESTION]).done(), ANSWER);
}

#[test]
fn greedy_is_the_default_and_gives_the_same_text_twice() {
    let greedy = || rill(["run", "--raw", "-n", "30", "It was a"]).done();
    let text = greedy();
    assert_eq!(greedy(), text);
    assert_eq!(rill(["run", "--raw", "-n", "30", "--seed", "9", "It was a"]).done(), text);
    assert_eq!(rill(["run", "--raw", "-n", "30", "--temp", "0", "It was a"]).done(), text);
    // One token to choose from leaves nothing to chance.
    for only_one in [["--top-k", "1"], ["--top-p", "1e-9"], ["--min-p", "1"]] {
        let sampled = ["run", "--raw", "-n", "30", "--temp", "1", "It was a"];
        assert_eq!(rill(sampled.iter().chain(&only_one)).done(), text, "{only_one:?}");
    }
}

#[test]
fn a_seed_gives_its_own_text_every_time() {
    let seeded = |seed: &str| {
        rill(["run", "--raw", "-n", "30", "--temp", "1", "--seed", seed, "It was a"]).done()
    };
    let text = seeded("7");
    assert_eq!(seeded("7"), text);
    assert_ne!(seeded("8"), text);
    // The seed is 0 unless it is given, so that a run can be repeated.
    let unseeded = rill(["run", "--raw", "-n", "30", "--temp", "1", "It was a"]).done();
    assert_eq!(unseeded, seeded("0"));
}

/// Ids of thirty tokens.
fn ids(options: &[&str]) -> Vec<u64> {
    let base = ["run", "-q", "--json", "--raw", "-n", "30", "It was a"];
    let written = json(rill(base.iter().chain(options)).done());
    let tokens = written["tokens"].as_array().unwrap();
    tokens.iter().map(|token| token["id"].as_u64().unwrap()).collect()
}

fn json(text: String) -> serde_json::Value {
    serde_json::from_str(&text).unwrap()
}

#[test]
fn penalties_and_bias_change_what_is_written() {
    let plain = ids(&[]);
    let mut distinct = plain.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() < plain.len(), "it repeats nothing: {plain:?}");
    // Taken off often enough, nothing is written twice, and negative ones have the first repeated.
    for penalty in ["--presence-penalty", "--frequency-penalty"] {
        let mut varied = ids(&[penalty, "100"]);
        varied.sort_unstable();
        varied.dedup();
        assert_eq!(varied.len(), 30, "{penalty}");
        assert_eq!(ids(&[penalty, "-100"]), [plain[0]; 30], "{penalty}");
    }
    assert_ne!(ids(&["--repetition-penalty", "2"]), plain);
    for bias in ["-100", "-inf"] {
        let forbidden = format!("{}={bias}", plain[0]);
        assert!(!ids(&["--logit-bias", &forbidden]).contains(&plain[0]));
    }
    let both = ids(&["--logit-bias", "7=100", "--logit-bias", "9=200"]);
    assert_eq!(both, [9; 30]);

    let unknown = rill(["run", "--logit-bias", "99999999=1", QUESTION]).failed();
    assert!(unknown.contains("logit_bias names token 99999999"), "{unknown}");
}

#[test]
fn json_has_the_text_its_tokens_and_why_it_ended() {
    let written = json(rill(["run", "--json", QUESTION]).done());
    assert_eq!(format!("{}\n", written["content"].as_str().unwrap()), ANSWER);
    assert_eq!(written["finish"], "stop");
    assert!(written["reasoning"].is_null());
    assert!(written["tokens"][0].get("logprob").is_none());

    let written = json(rill(["run", "--json", "--think", "-n", "3", QUESTION]).done());
    assert!(!written["reasoning"].as_str().unwrap().is_empty());
    assert_eq!((&written["content"], &written["finish"]), (&"".into(), &"length".into()));
    let stopped = json(rill(["run", "--json", "--stop", "Rome", QUESTION]).done());
    assert_eq!(stopped["content"], "The capital of Italy is ");
    assert_eq!(stopped["finish"], "stop");

    let options = ["--json", "--logprobs", "3", "--temp", "1.5"];
    let raw = ["run", "--raw", "-n", "9", "It was a"];
    let written = json(rill(raw.iter().chain(&options)).done());
    let tokens = written["tokens"].as_array().unwrap();
    let texts = tokens.iter().map(|token| token["text"].as_str().unwrap());
    assert_eq!(texts.collect::<String>(), written["content"].as_str().unwrap());
    let mut surprises = 0;
    for token in tokens {
        let top = token["top"].as_array().unwrap();
        let logprobs: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(logprobs.len() == 3 && logprobs.is_sorted_by(|a, b| a >= b), "{token}");
        assert!(logprobs.iter().map(|l| l.exp()).sum::<f64>() <= 1.0 + 1e-6, "{token}");
        let chosen = token["logprob"].as_f64().unwrap();
        match top.iter().find(|t| t["id"] == token["id"]) {
            Some(same) => assert_eq!(same["logprob"], chosen),
            None => surprises += 1,
        }
        assert!(chosen <= logprobs[0], "{token}");
    }
    assert!(surprises > 0, "a high temperature leaves the likeliest three now and then");
}

#[test]
fn a_stop_text_is_found_across_tokens_and_not_printed() {
    let tokens = rill(["tokenize", "capital of It"]).done();
    assert!(tokens.contains(','), "{tokens} is one token");
    let stopped = rill(["run", "--stop", "capital of It", QUESTION]);
    assert!(!stopped.stderr.contains("stopped at"), "{}", stopped.stderr);
    assert_eq!(stopped.done(), "The \n");
    // The one that comes first in the text counts, wherever it is on the command line.
    for stops in [["Rome", "Italy"], ["Italy", "Rome"]] {
        let text = rill(["run", "--stop", stops[0], "--stop", stops[1], QUESTION]).done();
        assert_eq!(text, "The capital of \n");
    }
    // What was held back in case it was a stop text is printed after all.
    assert_eq!(rill(["run", "--stop", "Rome.!", QUESTION]).done(), ANSWER);
    // The reasoning is not the answer.
    let text = rill(["run", "--think", "--stop", "asks", QUESTION]).done();
    assert!(text.ends_with(ANSWER), "{text}");
}

#[test]
fn statistics_go_to_standard_error_and_quiet_leaves_them_out() {
    let ended = rill(["run", QUESTION]);
    for part in [
        "prompt 41 tokens in",
        "generated ",
        "tokens/s",
        "threads",
        "kernels",
        "MB/token",
        "GB/s",
        "of the trunk",
        "% resident",
        "bound by ",
        "opened in ",
    ] {
        assert!(ended.stderr.contains(part), "no {part:?} in {}", ended.stderr);
    }
    assert_eq!(ended.stderr.lines().count(), 3);
    assert_eq!(ended.done(), ANSWER);
    for quiet in ["-q", "--quiet"] {
        let ended = rill(["run", quiet, QUESTION]);
        assert_eq!(ended.stderr, "");
        assert_eq!(ended.done(), ANSWER);
    }
}

#[test]
fn threads_kernels_and_prefill_chunks_do_not_change_the_text() {
    let text = rill(["run", "--raw", "-n", "20", "It was a dark and"]).done();
    for option in [
        ["--threads", "1"],
        ["--threads", "5"],
        ["--prefill-chunk", "1"],
        ["--prefill-chunk", "3"],
        ["--kernels", "scalar"],
    ] {
        let base = ["run", "--raw", "-n", "20", "It was a dark and"];
        assert_eq!(rill(base.iter().chain(&option)).done(), text, "{option:?}");
    }
}

#[test]
fn output_is_printed_as_it_is_generated() {
    use std::io::Read;
    let mut long = command(["run", "-q", "--raw", "--temp", "1", "-n", "100000", "It was a"]);
    let mut child = long.stdout(std::process::Stdio::piped()).spawn().unwrap();
    // Ten bytes arrive long before 100,000 tokens are done.
    let mut first = [0; 10];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn statistics_are_written_as_json_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stats.json");
    let text = rill(args!["run", "-q", "-n", "5", "--stats-json", &path, QUESTION]).done();
    assert!(ANSWER.starts_with(text.trim_end()));
    let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    // The last token is not run.
    assert_eq!((&stats["prefill"]["tokens"], &stats["decode"]["tokens"]), (&41.into(), &4.into()));
    let read = |key: &str| stats["read_bytes"][key].as_u64().unwrap();
    assert_eq!(read("trunk"), 0, "it fits");
    assert!(read("experts_demanded") > 0);
    let experts = |key: &str| stats["experts"][key].as_u64().unwrap();
    let found = ["resident", "lucky", "ahead", "demanded"].map(experts);
    assert_eq!(found.iter().sum::<u64>(), experts("wanted"));
    assert!((0.0..=1.0).contains(&stats["stall_share"].as_f64().unwrap()));
    assert!(["disk", "arithmetic"].contains(&stats["bound"].as_str().unwrap()));
    let nowhere = folder.path().join("no/such/folder");
    let ended = rill(args!["run", "-q", "-n", "1", "--stats-json", nowhere, QUESTION]);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("cannot write "), "{}", ended.stderr);
}

#[test]
fn an_answer_is_resumed_with_its_own_settings_and_by_its_own_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answer");
    let first = rill(args!["run", "-q", "-n", "3", "--autosave", &path, "Name a colour."]).done();
    assert_eq!(rill(args!["run", "-q", "--resume", &path]).done(), first);
    let misused = rill(args!["run", "--resume", &path, "--temp", "1"]).misused();
    assert!(misused.contains("--resume"), "{misused}");
    let misused = rill(args!["run", "--resume", &path, "another question"]).misused();
    assert!(misused.contains("--resume"), "{misused}");
    let tiny = repository("fixtures/k3-tiny");
    let error = rill(args!["run", "--resume", &path, "-m", tiny]).failed();
    assert!(error.contains("its model should be"), "{error}");
    let error = rill(args!["run", "--resume", folder.path().join("none")]).failed();
    assert!(error.contains("none"), "{error}");
    std::fs::write(&path, "RILLSESS, or so it says").unwrap();
    let error = rill(args!["run", "--resume", &path]).failed();
    assert!(error.contains("its version should be 1"), "{error}");
}

#[test]
fn an_answer_that_cannot_be_kept_is_not_begun() {
    let error = rill(["run", "--autosave", "/no/such/folder/x", "Name a colour."]).failed();
    assert!(error.contains("the answer cannot be kept") && error.contains("/no/such"), "{error}");
}

#[test]
fn neither_an_answer_that_is_not_over_nor_another_file_is_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answer");
    let run = || rill(args!["run", "-q", "-n", "3", "--autosave", &path, "Name a colour."]);
    let first = run().done();
    assert_eq!(run().done(), first, "one that is over makes room");
    std::fs::write(&path, "what somebody wrote").unwrap();
    let error = run().failed();
    assert!(error.contains("holds no answer"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"what somebody wrote");
}
