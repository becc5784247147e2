//! The note in a destination that says which conversion it belongs to: `convert.json`.
//!
//! Its first line names the plan. Every further line lists the source's files with their sizes and
//! times of change; the last one counts. The note is locked while a process is at work.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rill_format::Folder;
use serde::{Deserialize, Serialize};

use crate::disk::{io_error, whole_lines};
use crate::error::ConvertError;
use crate::plan::Plan;

pub(crate) const NOTE: &str = "convert.json";

/// What a file of the source is recognised by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SourceFile {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Since 1970; 0 where the system does not say.
    pub(crate) modified_ns: u64,
}

impl SourceFile {
    /// A file on disk; `None` when it is not there.
    pub(crate) fn find(folder: &Folder, name: &str) -> Option<Self> {
        let Folder::Disk(folder) = folder else { return None };
        let metadata = fs::metadata(folder.join(name)).ok().filter(|m| m.is_file())?;
        let modified = metadata.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        Some(Self {
            name: name.to_owned(),
            bytes: metadata.len(),
            modified_ns: modified.map_or(0, |since| since.as_nanos() as u64),
        })
    }
}

/// The note, locked.
pub(crate) struct Note {
    path: PathBuf,
    file: File,
    /// As last noted; `None` in a new note.
    files: Option<Vec<SourceFile>>,
}

impl Note {
    /// Opens or makes the note, and locks it.
    pub(crate) fn lock(folder: &Path, plan: &Plan) -> Result<Self, ConvertError> {
        let path = folder.join(NOTE);
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(|e| io_error(&path, "opening", e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ConvertError::Busy { folder: folder.display().to_string() });
            }
            Err(TryLockError::Error(e)) => return Err(io_error(&path, "locking", e)),
        }
        let expected = serde_json::json!({
            "experts": plan.experts, "trunk": plan.trunk, "identity": plan.identity,
        });
        let expected = expected.to_string();
        let text = whole_lines(&path)?;
        let mut lines = text.lines();
        let first = lines.next();
        if first.is_some_and(|found| found != expected) {
            return Err(ConvertError::OtherPlan { folder: folder.display().to_string() });
        }
        let files = lines.next_back().and_then(|line| serde_json::from_str(line).ok());
        let mut note = Self { path, file, files };
        // Killed in the middle of a line: nothing that depends on it has been written.
        let cut =
            note.file.set_len(text.len() as u64).and_then(|()| note.file.seek(SeekFrom::End(0)));
        cut.map_err(|e| io_error(&note.path, "writing", e))?;
        if first.is_none() {
            note.append(&expected)?;
        }
        Ok(note)
    }

    /// Names of files that are not what they were when they were noted. What is missing now is not
    /// among them.
    pub(crate) fn changed(&self, now: &[SourceFile]) -> Vec<String> {
        let noted = self.files.as_deref().unwrap_or_default();
        let is_other = |file: &&SourceFile| noted.iter().any(|n| n.name == file.name && n != *file);
        now.iter().filter(is_other).map(|file| file.name.clone()).collect()
    }

    /// Notes what the files are now, and keeps what is known of those that are missing.
    pub(crate) fn update(&mut self, now: &[SourceFile]) -> Result<(), ConvertError> {
        let mut files = now.to_vec();
        let missing = self.files.iter().flatten();
        files.extend(missing.filter(|n| now.iter().all(|file| file.name != n.name)).cloned());
        files.sort_by(|a, b| a.name.cmp(&b.name));
        if self.files.as_ref() != Some(&files) {
            self.append(&serde_json::to_string(&files).expect("plain data serialises"))?;
            self.files = Some(files);
        }
        Ok(())
    }

    fn append(&mut self, line: &str) -> Result<(), ConvertError> {
        let line = format!("{line}\n");
        let write = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_all());
        write.map_err(|e| io_error(&self.path, "writing", e))
    }
}
