//! Starting the program, and checkpoints to start it on.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const QUESTION: &str = "What is the capital of Italy?";
pub(crate) const ANSWER: &str = "The capital of Italy is Rome.\n";

/// The program with these arguments and nothing on standard input.
pub(crate) fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rill"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the program with nothing on standard input.
pub(crate) fn rill<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ended {
    ended(&mut command(args))
}

/// Runs the program with a pipe on standard input.
pub(crate) fn rill_fed<S: AsRef<OsStr>>(
    args: impl IntoIterator<Item = S>,
    input: impl AsRef<[u8]>,
) -> Ended {
    let mut command = command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The program may end without reading it.
    let _ = child.stdin.take().unwrap().write_all(input.as_ref());
    Ended::new(child.wait_with_output().unwrap(), &command)
}

/// Runs a command.
pub(crate) fn ended(command: &mut Command) -> Ended {
    Ended::new(command.output().unwrap(), command)
}

/// What a process left behind.
pub(crate) struct Ended {
    command: String,
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Ended {
    fn new(output: Output, command: &Command) -> Self {
        let stderr = String::from_utf8(output.stderr).unwrap();
        // Whatever else it does, it must not fall over.
        assert!(!stderr.contains("panicked"), "{command:?}: {stderr}");
        Self {
            command: format!("{command:?}"),
            code: output.status.code(),
            stdout: output.stdout,
            stderr,
        }
    }

    /// Standard output as text.
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    /// Standard output as text, of a process that must have succeeded.
    #[track_caller]
    pub(crate) fn done(self) -> String {
        assert_eq!(self.code, Some(0), "{}: {}", self.command, self.stderr);
        String::from_utf8(self.stdout).unwrap()
    }

    /// The message of a process that must have failed with exit code 1 and printed nothing.
    #[track_caller]
    pub(crate) fn failed(self) -> String {
        assert_eq!(self.code, Some(1), "{}: {}", self.command, self.stderr);
        assert!(self.stderr.starts_with("rill: "), "{}: {}", self.command, self.stderr);
        assert_eq!(self.text(), "", "{}", self.command);
        self.stderr
    }

    /// The message of a process that must have refused its arguments with exit code 2.
    #[track_caller]
    pub(crate) fn misused(self) -> String {
        assert_eq!(self.code, Some(2), "{}: {}", self.command, self.stderr);
        assert!(self.stderr.starts_with("error: "), "{}: {}", self.command, self.stderr);
        assert_eq!(self.text(), "", "{}", self.command);
        self.stderr
    }
}

/// A path inside the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A copy of a checkpoint, to be damaged.
pub(crate) fn copy_of(path: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(repository(path)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

/// Sets the first byte of a tensor.
pub(crate) fn overwrite(folder: &Path, tensor: &str, byte: u8) {
    let index: Value =
        serde_json::from_slice(&fs::read(folder.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    let path = folder.join(index["weight_map"][tensor].as_str().unwrap());
    let mut bytes = fs::read(&path).unwrap();
    let shard = SafeTensors::deserialize(&bytes).unwrap();
    let data = shard.tensor(tensor).unwrap().data();
    let start = data.as_ptr() as usize - bytes.as_ptr() as usize;
    bytes[start] = byte;
    fs::write(path, bytes).unwrap();
}

/// A file in a folder of its own.
pub(crate) fn file(contents: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    fs::write(&path, contents).unwrap();
    (folder, path)
}

/// Strings from arguments of several kinds.
macro_rules! args {
    ($($arg:expr),* $(,)?) => {
        vec![$(std::ffi::OsString::from($arg)),*]
    };
}
pub(crate) use args;
