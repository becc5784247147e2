//! Ctrl-C and requests to terminate.
#![cfg(unix)]

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{args, command, repository, rill};

/// Enough for the slowest machine, and nothing beside the hours that are left undone.
const PATIENCE: Duration = Duration::from_secs(60);

fn send(signal: &str, child: &Child) {
    let status = Command::new("kill").arg(signal).arg(child.id().to_string()).status().unwrap();
    assert!(status.success());
}

fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < PATIENCE, "waited for {what}");
        sleep(Duration::from_millis(2));
    }
}

/// Exit code of a child that ends soon, with what it has yet to print.
fn end(mut child: Child) -> (Option<i32>, Vec<u8>, String) {
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let mut code = None;
    wait_until("the end", || {
        code = child.try_wait().unwrap();
        code.is_some()
    });
    let (mut out, mut err) = (Vec::new(), String::new());
    stdout.read_to_end(&mut out).unwrap();
    stderr.read_to_string(&mut err).unwrap();
    (code.unwrap().code(), out, err)
}

fn start(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn an_interrupted_generation_keeps_what_was_printed() {
    for signal in ["-INT", "-TERM"] {
        let mut child =
            start(command(["run", "--raw", "--temp", "1", "-n", "100000", "It was a dark and"]));
        let mut first = [0; 20];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        send(signal, &child);
        let (code, rest, stderr) = end(child);
        assert_eq!(code, Some(130), "{signal}: {stderr}");
        let text = String::from_utf8([&first[..], &rest].concat()).unwrap();
        assert!(text.ends_with('\n'), "{signal}: {text:?}");
        // The statistics tell that it did not end by itself, and nothing else is said.
        assert!(stderr.contains("; interrupted\n"), "{signal}: {stderr}");
        assert_eq!(stderr.lines().count(), 3, "{signal}: {stderr}");
    }
}

#[test]
fn an_interrupted_prompt_prints_nothing_but_the_end_of_the_line() {
    // A minute's worth of prompt.
    let pipe = tempfile::tempdir().unwrap();
    let path = pipe.path().join("prompt");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let child = start(command(args!["run", "--raw", "--file", &path]));
    fs::write(&path, "It was a dark and stormy night. ".repeat(20_000)).unwrap();
    sleep(Duration::from_millis(500));
    send("-INT", &child);
    let (code, stdout, stderr) = end(child);
    // Either it was still opening the model, when there is nothing to keep, or it was at work.
    if code.is_some() {
        assert_eq!(code, Some(130), "{stderr}");
        assert_eq!(stdout, b"\n");
    }
}

#[test]
fn an_interrupted_dump_leaves_neither_a_file_nor_half_of_one() {
    for signal in ["-INT", "-TERM"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("logits.safetensors");
        let text = repository("models/k3-nano/heldout.txt");
        let child = start(command(args!["eval", "--file", text, "--dump-logits", &path]));
        let entries = |folder: &Path| fs::read_dir(folder).unwrap().count();
        wait_until("the file to be begun", || entries(folder.path()) > 0);
        send(signal, &child);
        let (code, stdout, stderr) = end(child);
        assert_eq!(code, Some(130), "{signal}: {stderr}");
        assert_eq!(stdout, b"", "{signal}");
        assert_eq!(stderr, "", "{signal}");
        assert_eq!(entries(folder.path()), 0, "{signal}");
    }
}

/// A long story, which the end token does not end.
const STORY: [&str; 10] =
    ["run", "--raw", "-q", "--temp", "1", "-n", "600", "--logit-bias", "3842=-inf", "--ctx=4096"];

fn kept(path: &Path, prompt: &str) -> Child {
    let mut args = args!["--autosave", path, "--autosave-every", "0.001"];
    args.extend(STORY.map(Into::into));
    args.push(prompt.into());
    // `run` comes first.
    let at = args.iter().position(|arg| arg == "run").unwrap();
    let run = args.remove(at);
    args.insert(0, run);
    start(command(args))
}

#[test]
fn an_answer_that_was_broken_off_goes_on_as_if_it_had_not_been() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("story");
    let whole = rill(STORY.iter().chain(&["It was a dark and"])).done();
    for signals in [["-KILL", "-KILL"], ["-INT", "-KILL"], ["-KILL", "-TERM"]] {
        let mut child = kept(&path, "It was a dark and");
        let mut first = [0; 40];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        send(signals[0], &child);
        let (code, rest, stderr) = end(child);
        let text = String::from_utf8_lossy(&[&first[..], &rest].concat()).into_owned();
        assert!(whole.starts_with(text.trim_end()), "{stderr}: {text:?}");
        assert!(matches!(code, None | Some(130)), "{code:?}");
        assert!(text.len() < whole.len(), "it was broken off");

        let error = rill(args!["run", "--autosave", &path, "something else"]).failed();
        assert!(error.contains("not over"), "{error}");

        // Once more, while it goes on.
        let resume = args!["run", "-q", "--resume", &path, "--ctx", "4096"];
        let mut child = start(command(resume.iter().chain(&args!["--autosave-every", "0.001"])));
        let mut more = vec![0; text.trim_end().len() + 10];
        if let Err(error) = child.stdout.as_mut().unwrap().read_exact(&mut more) {
            panic!("{signals:?}, {error}: {:?}", end(child));
        }
        assert!(whole.as_bytes().starts_with(&more), "what there was is printed again, then more");
        send(signals[1], &child);
        end(child);
        assert_eq!(rill(&resume).done(), whole, "{signals:?}");
        assert_eq!(rill(&resume).done(), whole, "it is over, and still there");
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert!(left.len() <= 2, "at most one save that was broken off: {left:?}");
    }
}

#[test]
fn a_prompt_that_was_broken_off_is_not_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("story");
    let prompt = "It was a dark and stormy night. ".repeat(150);
    let command_of = |more: &[&str]| {
        let mut args = args!["run", "--raw", "-n", "5", "--prefill-chunk", "16", "--ctx", "4096"];
        args.extend(more.iter().map(Into::into));
        args
    };
    let prompt_tokens = |stderr: &str| -> usize {
        let statistics = stderr.split("prompt ").nth(1).unwrap();
        statistics.split(' ').next().unwrap().parse().unwrap()
    };
    let whole = rill(command_of(&[&prompt]));
    let all = prompt_tokens(&whole.stderr);
    let whole = whole.done();
    let mut args = command_of(&["--autosave-every", "0.001", "--autosave"]);
    args.extend(args![&path, &prompt]);
    let child = start(command(&args));
    // One is made before anything is read; later ones are longer.
    let length = || fs::metadata(&path).map_or(0, |file| file.len());
    let mut first = 0;
    wait_until("a save in the prompt", || {
        first = if first == 0 { length() } else { first };
        length() > first
    });
    send("-KILL", &child);
    let (code, stdout, _) = end(child);
    assert_eq!((code, stdout.len()), (None, 0), "it was broken off in the prompt");
    let resumed = rill(args!["run", "--resume", &path, "--ctx", "4096", "--prefill-chunk", "16"]);
    let left = prompt_tokens(&resumed.stderr);
    assert!(left + 16 <= all, "{left} of {all} tokens were left");
    assert_eq!(resumed.done(), whole);
}
