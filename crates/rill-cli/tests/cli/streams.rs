//! Standard output and standard error that do not take what is written.
#![cfg(unix)]

use std::io::Read;
use std::process::Stdio;

use crate::common::command;

#[test]
fn a_reader_that_stops_reading_ends_the_program_without_noise() {
    let mut long = command(["run", "--raw", "--temp", "1", "-n", "100000", "It was a"]);
    let mut child = long.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 10]).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}

/// Where there is a device that is always full.
#[cfg(target_os = "linux")]
mod full {
    use std::fs::File;
    use std::process::Stdio;

    use crate::common::{ANSWER, QUESTION, command, ended};

    #[test]
    fn a_full_disk_under_standard_output_is_a_failure() {
        for args in [
            &["run", QUESTION][..],
            &["eval", "x"],
            &["eval", "x", "--json"],
            &["tokenize", "x"],
            &["detokenize", "1"],
            &["info"],
            &["info", "--json"],
            &["selftest"],
        ] {
            let mut command = command(args);
            let full = File::options().write(true).open("/dev/full").unwrap();
            let message = ended(command.stdout(full)).failed();
            assert!(message.contains("cannot write standard output: "), "{args:?}: {message}");
        }
    }

    #[test]
    fn statistics_that_nobody_can_read_do_not_spoil_the_answer() {
        let mut command = command(["run", QUESTION]);
        command.stdout(Stdio::piped());
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = command.stderr(full).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(String::from_utf8(output.stdout).unwrap(), ANSWER);
    }
}
