//! Help, and arguments that make no sense.

use crate::common::{QUESTION, args, file, rill};

#[test]
fn the_help_of_every_command_names_what_it_takes() {
    for (command, parts) in [
        (
            &[][..],
            &[
                "run",
                "eval",
                "tokenize",
                "detokenize",
                "info",
                "selftest",
                "Exit codes",
                "0 done",
                "1 failure",
                "2 wrong usage",
                "130",
            ][..],
        ),
        (
            &["run"],
            &[
                "[TEXT]",
                "--file",
                "--model",
                "--raw",
                "--think",
                "--max-tokens",
                "--temp",
                "--top-p",
                "--top-k",
                "--min-p",
                "--repetition-penalty",
                "--presence-penalty",
                "--frequency-penalty",
                "--logit-bias",
                "--seed",
                "--stop",
                "--json",
                "--logprobs",
                "--quiet",
                "--threads",
                "--kernels",
                "standard input",
                "demo",
            ],
        ),
        (
            &["eval"],
            &[
                "[TEXT]",
                "--file",
                "--model",
                "--ids",
                "--json",
                "--top",
                "--dump-logits",
                "--perplexity",
                "--window",
                "safetensors",
                "--prefill-chunk",
            ],
        ),
        (&["tokenize"], &["[TEXT]", "--file", "--model", "--markup", "--json"]),
        (&["detokenize"], &["[IDS]", "--model", "standard input"]),
        (&["info"], &["[PATH]", "--json", "demo"]),
        (&["trace", "replay"], &["FILE", "--cache", "scored", "--share", "--slots", "--json"]),
        (&["selftest"], &["--threads", "--kernels", "reference"]),
        (&["run"], ENGINE),
        (&["eval"], ENGINE),
        (&["selftest"], ENGINE),
        (&["trace", "record"], ENGINE),
        (&["bench", "decode"], ENGINE),
        (&["bench", "prefill"], ENGINE),
        (&["trace", "record"], &["[TEXT]", "--out", "--max-tokens", "--model"]),
        (&["bench", "decode"], &["--tokens", "--prompt", "--routing", "--json", "--model"]),
        (&["bench", "prefill"], &["--prompt", "--routing", "--json", "--model"]),
        (
            &["bench", "kernels"],
            &["--shape", "--threads", "--kernels", "--seconds", "--budget", "--json"],
        ),
    ] {
        let help = rill(command.iter().chain(&["--help"])).done();
        for part in parts {
            assert!(help.contains(part), "{command:?} --help has no {part:?}:\n{help}");
        }
        assert_eq!(rill(command.iter().chain(&["-h"])).done(), help, "{command:?}");
    }
}

/// What every command that computes takes.
const ENGINE: &[&str] = &[
    "--budget",
    "--ctx",
    "--cache",
    "--lookahead",
    "--readers",
    "--no-overlap",
    "--no-direct",
    "--verify",
    "--learn",
    "--threads",
    "--cpus",
    "--prefill-chunk",
    "--kernels",
];

#[test]
fn version_tells_the_programs_name_and_version() {
    let expected = format!("rill {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(rill(["--version"]).done(), expected);
    assert_eq!(rill(["-V"]).done(), expected);
}

#[test]
fn no_command_shows_the_help_as_wrong_usage() {
    let ended = rill::<&str>([]);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("Usage: rill <COMMAND>"), "{}", ended.stderr);
}

#[test]
fn arguments_that_make_no_sense_exit_with_2_and_are_named() {
    let too_large = "99999999999999999999";
    for (args, named) in [
        (&["ruin"][..], "'ruin'"),
        (&["run", "x", "--bogus"], "'--bogus'"),
        (&["run", "one", "two"], "'two'"),
        (&["run", "x", "--file", "y"], "'--file <PATH>'"),
        (&["run", "x", "--file"], "'--file <PATH>'"),
        (&["run", "x", "--think", "--raw"], "'--think'"),
        (&["run", "x", "--temp", "-1"], "'--temp <T>'"),
        (&["run", "x", "--temp", "nan"], "'--temp <T>'"),
        (&["run", "x", "--temp", "inf"], "'--temp <T>'"),
        (&["run", "x", "--temp", "warm"], "'--temp <T>'"),
        (&["run", "x", "--top-p", "0"], "'--top-p <P>'"),
        (&["run", "x", "--top-p", "-0.5"], "'--top-p <P>'"),
        (&["run", "x", "--top-p", "1.01"], "'--top-p <P>'"),
        (&["run", "x", "--top-p", "nan"], "'--top-p <P>'"),
        (&["run", "x", "--top-k", "-1"], "'--top-k <K>'"),
        (&["run", "x", "--min-p", "-0.1"], "'--min-p <P>'"),
        (&["run", "x", "--min-p", "1.01"], "'--min-p <P>'"),
        (&["run", "x", "--min-p", "nan"], "'--min-p <P>'"),
        (&["run", "x", "--repetition-penalty", "0"], "'--repetition-penalty <R>'"),
        (&["run", "x", "--repetition-penalty", "inf"], "'--repetition-penalty <R>'"),
        (&["run", "x", "--presence-penalty", "nan"], "'--presence-penalty <A>'"),
        (&["run", "x", "--frequency-penalty", "inf"], "'--frequency-penalty <A>'"),
        (&["run", "x", "--logit-bias", "7"], "such as 42=-1.5"),
        (&["run", "x", "--logit-bias", "=1"], "'--logit-bias <ID=VALUE>'"),
        (&["run", "x", "--logit-bias", "4294967296=1"], "'--logit-bias <ID=VALUE>'"),
        (&["run", "x", "--logit-bias", "7=inf"], "'--logit-bias <ID=VALUE>'"),
        (&["run", "x", "--logit-bias", "7=nan"], "'--logit-bias <ID=VALUE>'"),
        (&["run", "x", "--logprobs", "3"], "--json"),
        (&["run", "x", "--json", "--logprobs", "-1"], "'--logprobs <N>'"),
        (&["run", "x", "--seed", "-1"], "'--seed <S>'"),
        (&["run", "x", "-n", "abc"], "'--max-tokens <N>'"),
        (&["run", "x", "-n", "-1"], "'--max-tokens <N>'"),
        (&["run", "x", "-n", "1.5"], "'--max-tokens <N>'"),
        (&["run", "x", "-n", ""], "'--max-tokens <N>'"),
        (&["run", "x", "-n", too_large], "'--max-tokens <N>'"),
        (&["run", "x", "--stop", ""], "'--stop <TEXT>'"),
        (&["run", "x", "-m", ""], "'--model <PATH>'"),
        (&["run", "x", "--threads", "1025"], "'--threads <N>'"),
        (&["run", "x", "--prefill-chunk", "0"], "'--prefill-chunk <N>'"),
        (&["run", "x", "--kernels", "magic"], "'--kernels <SET>'"),
        (&["eval", "--ids", "1,b"], "'--ids <1,2,3>'"),
        (&["eval", "--ids", "1,,2"], "'--ids <1,2,3>'"),
        (&["eval", "--ids", ""], "'--ids <1,2,3>'"),
        (&["eval", "--ids", "-1"], "'--ids <1,2,3>'"),
        (&["eval", "--ids", "4294967296"], "'--ids <1,2,3>'"),
        (&["eval", "--ids", "1", "x"], "'--ids <1,2,3>'"),
        (&["eval", "--ids", "1", "--file", "x"], "'--ids <1,2,3>'"),
        (&["eval", "x", "--file", "y"], "'--file <PATH>'"),
        (&["eval", "x", "--top", "-1"], "'--top <N>'"),
        (&["eval", "--perplexity", "x", "--dump-logits", "y"], "'--dump-logits <FILE>'"),
        (&["eval", "--perplexity", "x", "--ids", "1"], "'--ids <1,2,3>'"),
        (&["eval", "--perplexity", "x", "--top", "3"], "'--top <N>'"),
        (&["eval", "--perplexity", "x", "--window", "0"], "'--window <N>'"),
        (&["eval", "x", "--perplexity", "y"], "'--perplexity <FILE>'"),
        (&["eval", "x", "--window", "9"], "'--window <N>'"),
        (&["eval", "--window", "9"], "--perplexity <FILE>"),
        (&["detokenize", "1,b"], "\"b\""),
        (&["detokenize", "1", "-1"], "'-1'"),
        (&["detokenize", "4294967296"], "\"4294967296\""),
        (&["info", ""], "'[PATH]'"),
        (&["info", "x", "y"], "'y'"),
        (&["selftest", "x"], "'x'"),
    ] {
        let message = rill(args).misused();
        assert!(message.contains(named), "{args:?}: {message}");
    }
}

#[test]
fn a_model_is_not_opened_for_wrong_usage() {
    // Otherwise the missing folder would be the complaint.
    rill(["run", "-m", "no/such/folder", QUESTION, "--temp", "-1"]).misused();
    let (_folder, path) = file("x");
    rill(args!["run", "-m", "no/such/folder", "--raw", "--think", "--file", path]).misused();
}

#[cfg(unix)]
#[test]
fn arguments_need_not_be_text_to_be_refused_politely() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let not_text = OsStr::from_bytes(b"\xff\xfe");
    rill([OsStr::new("run"), not_text]).misused();
    // Paths are another matter: the name is not text, but it is a name.
    for args in [
        [OsStr::new("run"), OsStr::new("--file"), not_text],
        [OsStr::new("tokenize"), OsStr::new("--file"), not_text],
        [OsStr::new("eval"), OsStr::new("--perplexity"), not_text],
    ] {
        assert!(rill(args).failed().contains("cannot read "));
    }
    assert!(rill([OsStr::new("info"), not_text]).failed().contains("cannot open "));
}
