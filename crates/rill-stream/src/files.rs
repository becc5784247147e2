//! Files that are written and read whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::StreamError;

/// Who may read a file that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Whoever may read any new file of this user.
    Usual,
    /// Its owner alone, where the system has such a thing: for conversations.
    Owner,
}

/// A file that appears whole or not at all: it is written aside, synced, and moved into place.
///
/// Until [`finish`](Self::finish) nothing has happened to an older file of the name; dropping it undoes
/// all. Where the name is a link, the file behind it is replaced. Writers of the same file do not
/// disturb each other: the last to finish has its way. What a killed one left aside is removed by the
/// next that writes to the folder.
#[derive(Debug)]
pub struct WholeFile {
    /// As the caller knows it.
    name: PathBuf,
    /// Behind all links.
    path: PathBuf,
    aside: BufWriter<NamedTempFile>,
}

impl WholeFile {
    /// Begins to write a file.
    ///
    /// # Errors
    /// When something other than a regular file has the name, or the folder takes no file.
    pub fn create(name: &Path, access: Access) -> Result<Self, StreamError> {
        let path = behind_links(name);
        // Moving a file over a device would put an end to the device.
        if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(StreamError::NotAFile { file: name.to_owned() });
        }
        let aside = create_aside(folder_of(&path), access);
        let aside = BufWriter::new(aside.map_err(io_error(name, "creating"))?);
        Ok(Self { name: name.to_owned(), path, aside })
    }

    /// Moves it into place.
    ///
    /// # Errors
    /// When the disk does not take it: an older file of this name then stays as it was.
    pub fn finish(self) -> Result<(), StreamError> {
        let Self { name, path, aside } = self;
        let aside = aside.into_inner().map_err(|e| io_error(&name, "writing")(e.into_error()))?;
        aside.as_file().sync_all().map_err(io_error(&name, "writing"))?;
        aside.persist(&path).map_err(|e| io_error(&name, "moving into place")(e.error))?;
        sync_folder(folder_of(&path));
        Ok(())
    }
}

impl Write for WholeFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.aside.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.aside.flush()
    }
}

/// Writes a file, which appears whole or not at all; see [`WholeFile`].
///
/// # Errors
/// What `write` says, and when the disk does not take it: an older file of this name then stays as it
/// was.
pub fn write_whole(
    path: &Path,
    access: Access,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), StreamError> {
    let mut file = WholeFile::create(path, access)?;
    write(&mut file).map_err(io_error(path, "writing"))?;
    file.finish()
}

/// Removes what writers that were killed have left aside in a folder. A living one holds a lock on its
/// file; where there are no locks, all stays.
pub fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let aside = name.starts_with(ASIDE.0) && name.ends_with(ASIDE.1);
        // Opening a pipe would wait for its other end, and a link may lead to one.
        if !aside || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let file = OpenOptions::new().write(true).open(entry.path());
        if file.is_ok_and(|file| file.try_lock().is_ok() && fs::remove_file(entry.path()).is_ok()) {
            sync_folder(folder);
        }
    }
}

/// Reads a regular file of at most `max_bytes`.
pub(crate) fn read_whole(path: &Path, max_bytes: u64) -> Result<Vec<u8>, StreamError> {
    // Asked before opening, because opening a pipe waits for its other end.
    if !fs::metadata(path).map_err(io_error(path, "opening"))?.is_file() {
        return Err(StreamError::NotAFile { file: path.to_owned() });
    }
    let file = File::open(path).map_err(io_error(path, "opening"))?;
    let mut bytes = Vec::new();
    // Not trusting the file to keep the size it had: the read ends one byte too late.
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(io_error(path, "reading"))?;
    if bytes.len() as u64 > max_bytes {
        return Err(StreamError::FileTooLarge { file: path.to_owned(), max_bytes });
    }
    Ok(bytes)
}

/// What comes before and after the random part of the names of files aside.
const ASIDE: (&str, &str) = (".rill-", ".part");

fn create_aside(folder: &Path, access: Access) -> io::Result<NamedTempFile> {
    remove_leftovers(folder);
    let mut builder = tempfile::Builder::new();
    builder.prefix(ASIDE.0).suffix(ASIDE.1);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(match access {
        Access::Usual => 0o666,
        Access::Owner => 0o600,
    }));
    #[cfg(not(unix))]
    let _ = access;
    loop {
        let file = builder.tempfile_in(folder)?;
        // Without locks nobody takes it for a leftover.
        let _ = file.as_file().lock();
        // Somebody may have done so before it had its lock.
        if file.path().exists() {
            return Ok(file);
        }
    }
}

/// The end of a chain of links, whether it is there or not.
fn behind_links(name: &Path) -> PathBuf {
    let mut path = name.to_owned();
    // Longer ones than any system follows go round in a circle: the one that is reached is replaced.
    for _ in 0..64 {
        match fs::read_link(&path) {
            Ok(target) => path = folder_of(&path).join(target),
            Err(_) => break,
        }
    }
    path
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes durable what was moved and removed in a folder, as far as the system has such a thing.
fn sync_folder(folder: &Path) {
    // The files themselves are safe; not every file system can do this.
    #[cfg(unix)]
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    #[cfg(not(unix))]
    let _ = folder;
}

fn io_error(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> StreamError {
    let file = path.to_owned();
    move |source| StreamError::Io { file, doing, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names in a folder.
    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn write(path: &Path, text: &str) -> Result<(), StreamError> {
        write_whole(path, Access::Usual, |out| out.write_all(text.as_bytes()))
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        write(&path, "one").unwrap();
        let mut second = WholeFile::create(&path, Access::Usual).unwrap();
        second.write_all(b"two, and longer").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        second.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two, and longer");
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn a_write_that_fails_leaves_the_older_file_and_nothing_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        write(&path, "one").unwrap();
        let failed = write_whole(&path, Access::Usual, |out| {
            out.write_all(b"half of tw")?;
            Err(io::Error::other("the disk is full"))
        });
        assert!(failed.unwrap_err().to_string().contains("the disk is full"));
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn two_writers_of_a_file_do_not_disturb_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let [mut first, mut second] =
            [(); 2].map(|()| WholeFile::create(&path, Access::Usual).unwrap());
        for _ in 0..100 {
            first.write_all(&[1; 1000]).unwrap();
            second.write_all(&[2; 999]).unwrap();
        }
        second.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), [2; 99_900]);
        first.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), [1; 100_000]);
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let living = WholeFile::create(&dir.path().join("a"), Access::Usual).unwrap();
        fs::write(dir.path().join(".rill-killed.part"), "half").unwrap();
        fs::write(dir.path().join("mine.part"), "whole").unwrap();
        write(&dir.path().join("b"), "two").unwrap();
        let left = names(dir.path());
        assert_eq!(left.len(), 3, "{left:?}");
        assert!(left[0].starts_with(".rill-") && left[0] != ".rill-killed.part", "{left:?}");
        assert_eq!(left[1..], ["b", "mine.part"]);
        living.finish().unwrap();
        assert_eq!(names(dir.path()), ["a", "b", "mine.part"]);
    }

    #[test]
    fn a_folder_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let refused = WholeFile::create(dir.path(), Access::Usual);
        assert!(matches!(refused, Err(StreamError::NotAFile { .. })), "{refused:?}");
        let missing = write(&dir.path().join("none/a"), "one").unwrap_err();
        assert!(matches!(missing, StreamError::Io { doing: "creating", .. }), "{missing:?}");
    }

    #[cfg(unix)]
    #[test]
    fn what_is_behind_a_link_is_replaced_and_not_the_link() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let [far, link, other] = ["far", "link", "far/other"].map(|name| dir.path().join(name));
        fs::create_dir(far).unwrap();
        symlink("far/other", &link).unwrap();
        symlink("end", &other).unwrap();
        // First where nothing is behind them yet.
        for text in ["one", "two"] {
            write(&link, text).unwrap();
            assert_eq!(fs::read_to_string(dir.path().join("far/end")).unwrap(), text);
            assert!(link.is_symlink() && other.is_symlink());
        }
        assert_eq!(names(&dir.path().join("far")), ["end", "other"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_file_is_its_owners_alone_if_asked() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        write_whole(&path, Access::Owner, |out| out.write_all(b"one")).unwrap();
        assert_eq!(mode(), 0o600);
        // Like any other new file.
        write(&path, "two").unwrap();
        let usual = File::create(dir.path().join("usual")).unwrap();
        assert_eq!(mode(), usual.metadata().unwrap().permissions().mode() & 0o777);
    }
}
