//! Ctrl-C and requests to terminate.
#![cfg(unix)]

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{args, command, repository};

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
