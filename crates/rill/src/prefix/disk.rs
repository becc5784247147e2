//! Beginnings in files, for engines that come later.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use rill_kernels::LatentFormat;
use rill_stream::{StreamError, remove_leftovers};

use super::name::{Name, Namer};
use crate::engine::Engine;
use crate::error::Error;
use crate::log::Log;
use crate::saved::write_session;
use crate::session::{Session, Snapshot};

/// Where beginnings of conversations are kept across runs, and how many.
///
/// Each is a file like those of [`Engine::save_session`], readable by its owner alone. What names, sizes
/// and times of such files tell is in `docs/memory.md`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixDisk {
    /// A folder of their own. It is made if it is not there, open to its owner alone. Several schedulers
    /// may share one, also of other models: what one writes the others find within half a minute.
    pub folder: PathBuf,
    /// Most bytes of all files; those that were used longest ago go first.
    pub max_bytes: u64,
    /// Files that nobody used for so long are removed, within a minute while a scheduler runs.
    pub max_age: Duration,
}

/// The files, and a thread that writes them.
pub(super) struct Disk {
    shelf: Arc<Shelf>,
    /// `None` once it is being dropped.
    send: Option<Sender<(Name, Arc<Snapshot>)>>,
    writer: Option<JoinHandle<()>>,
}

struct Shelf {
    options: PrefixDisk,
    /// Of whose states the files are, and how their latents are kept.
    model: String,
    latents: LatentFormat,
    /// What is known to be in the folder: no file is opened to find out.
    files: Mutex<BTreeMap<Name, Kept>>,
    log: Log,
}

#[derive(Clone, Copy)]
struct Kept {
    bytes: u64,
    used: SystemTime,
}

impl Disk {
    /// Looks what is in the folder.
    ///
    /// # Errors
    /// When the model cannot be told from others, or the system gives no thread. A folder that cannot be
    /// used is no error: nothing is found in it then, and nothing is kept.
    pub(super) fn open(engine: &Engine, options: PrefixDisk) -> Result<Self, Error> {
        let (model, latents) = (engine.model_identity()?, engine.home.latents);
        let (files, log) = (Mutex::default(), engine.log.clone());
        let shelf = Arc::new(Shelf { options, model, latents, files, log });
        shelf.tidy(0);
        shelf.warn();
        let (send, receive) = mpsc::channel();
        let serving = shelf.clone();
        let thread = std::thread::Builder::new().name("rill-prefixes".to_owned());
        let writer = thread
            .spawn(move || serving.serve(&receive))
            .map_err(|e| Error::SchedulerThread { reason: e.to_string() })?;
        Ok(Self { shelf, send: Some(send), writer: Some(writer) })
    }

    /// Takes a session that has seen nothing to the longest beginning of `tokens` that is here and longer
    /// than `held`. False if there is none: then it still has seen nothing.
    pub(super) fn load(
        &self,
        engine: &Engine,
        namespace: &str,
        tokens: &[u32],
        held: usize,
        session: &mut Session,
    ) -> bool {
        let shelf = &self.shelf;
        for name in shelf.find(namespace, tokens).into_iter().rev() {
            if name.tokens <= held {
                if name.tokens == held {
                    // The one in memory is used in its place.
                    shelf.touch(name);
                }
                break;
            }
            // The name in the file as well: one that was given another name is not what it says.
            let wanted = |seen: &[u32], note: &str| {
                *seen == tokens[..name.tokens] && note == name.to_string()
            };
            match engine.read_session(&shelf.path(name), &shelf.model, session, wanted) {
                Ok(_) => {
                    shelf.touch(name);
                    return true;
                }
                Err(error) => shelf.discard(name, &error),
            }
        }
        false
    }

    /// Has a snapshot written in the background, unless it is here already.
    pub(super) fn keep(&self, namespace: &str, snapshot: &Arc<Snapshot>) {
        let mut namer = self.shelf.namer(namespace);
        namer.push(snapshot.tokens());
        let name = namer.name();
        if let Some(send) = self.send.as_ref().filter(|_| !self.shelf.files().contains_key(&name)) {
            // The writer ends after this sender.
            let _ = send.send((name, snapshot.clone()));
        }
    }
}

impl Drop for Disk {
    /// Waits for what is still to be written.
    fn drop(&mut self) {
        self.send = None;
        if let Some(writer) = self.writer.take() {
            // It has nothing to report but a panic, which has been printed.
            let _ = writer.join();
        }
    }
}

/// How often files that are too old are looked for.
const TIDY_EVERY: Duration = Duration::from_secs(30);
/// What a file has beside tokens and states, at most.
const HEAD_BYTES: u64 = 1 << 10;

impl Shelf {
    /// Says what about the options is probably not meant.
    fn warn(&self) {
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let folder = &self.options.folder;
            let mode = fs::metadata(folder).map_or(0, |metadata| metadata.permissions().mode());
            if mode & 0o077 != 0 {
                let folder = folder.display();
                self.log.say(|| format!("{folder} is open to others than its owner (chmod 700)"));
            }
        }
    }

    fn serve(&self, snapshots: &Receiver<(Name, Arc<Snapshot>)>) {
        let mut failing = false;
        loop {
            match snapshots.recv_timeout(TIDY_EVERY) {
                Ok((name, snapshot)) => match self.write(name, &snapshot) {
                    Ok(()) => failing = false,
                    Err(error) => {
                        // Once: a full disk stays full for a while.
                        if !std::mem::replace(&mut failing, true) {
                            self.log.say(|| {
                                format!("beginnings are not kept on disk for now: {error}")
                            });
                        }
                    }
                },
                Err(RecvTimeoutError::Timeout) => drop(self.tidy(0)),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn write(&self, name: Name, snapshot: &Snapshot) -> Result<(), Error> {
        let bytes = snapshot.bytes() + 4 * name.tokens as u64 + HEAD_BYTES;
        // What is too large for the limit does not make the others go.
        if bytes > self.options.max_bytes || !self.tidy(bytes) {
            return Ok(());
        }
        let folder = &self.options.folder;
        make_folder(folder)?;
        let (path, note) = (self.path(name), name.to_string());
        let (model, layers) = (self.model.clone(), &snapshot.layers);
        write_session(&path, model, self.latents, snapshot.tokens(), layers, &note)?;
        self.files().insert(name, Kept { bytes, used: SystemTime::now() });
        Ok(())
    }

    /// Looks what is in the folder, also by other hands, and removes what is too old or too much; then
    /// `room` more bytes are allowed. False if they are not, because something cannot be removed.
    fn tidy(&self, room: u64) -> bool {
        let PrefixDisk { folder, max_bytes, max_age } = &self.options;
        remove_leftovers(folder);
        let mut files = list(folder);
        let mut total: u64 = files.values().map(|kept| kept.bytes).sum();
        let mut by_use: Vec<(Name, Kept)> =
            files.iter().map(|(&name, &kept)| (name, kept)).collect();
        by_use.sort_by_key(|(_, kept)| kept.used);
        for (name, kept) in by_use {
            if kept.age() <= *max_age && total.saturating_add(room) <= *max_bytes {
                break;
            }
            if remove(&self.path(name)) {
                files.remove(&name);
                total -= kept.bytes;
            }
        }
        *self.files() = files;
        total.saturating_add(room) <= *max_bytes
    }

    /// All beginnings of `tokens` that leave something to run, the longest last.
    fn find(&self, namespace: &str, tokens: &[u32]) -> Vec<Name> {
        let files = self.files();
        let mut lengths: Vec<usize> = files.keys().map(|name| name.tokens).collect();
        lengths.dedup();
        let mut namer = self.namer(namespace);
        let mut found = Vec::new();
        let mut seen = 0;
        for length in lengths.into_iter().take_while(|&length| length < tokens.len()) {
            namer.push(&tokens[seen..length]);
            seen = length;
            let name = namer.name();
            if files.get(&name).is_some_and(|kept| kept.age() <= self.options.max_age) {
                found.push(name);
            }
        }
        found
    }

    /// It has been used now.
    fn touch(&self, name: Name) {
        let now = SystemTime::now();
        // If the system does not note it, the file goes earlier than it need.
        let _ = File::options().write(true).open(self.path(name)).and_then(|f| f.set_modified(now));
        if let Some(kept) = self.files().get_mut(&name) {
            kept.used = now;
        }
    }

    /// It is of no use.
    fn discard(&self, name: Name, why: &Error) {
        self.files().remove(&name);
        let gone = |source: &std::io::Error| source.kind() == ErrorKind::NotFound;
        // Another scheduler may have removed it to make room.
        if !matches!(why, Error::Stream(StreamError::Io { source, .. }) if gone(source)) {
            remove(&self.path(name));
            self.log.say(|| format!("a beginning on disk is of no use and was removed: {why}"));
        }
    }

    fn namer(&self, namespace: &str) -> Namer {
        Namer::new(namespace, &format!("{} {}", self.model, self.latents))
    }

    fn path(&self, name: Name) -> PathBuf {
        self.options.folder.join(name.to_string())
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<Name, Kept>> {
        // Nothing that can panic happens between the steps of a change.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn age(&self) -> Duration {
        // A clock that was set back makes nothing old.
        self.used.elapsed().unwrap_or_default()
    }
}

/// The beginnings in a folder; whatever else is in it is let alone.
fn list(folder: &Path) -> BTreeMap<Name, Kept> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let kept = entries.filter_map(|entry| {
        let name = Name::parse(entry.file_name().to_str()?)?;
        let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        Some((name, Kept { bytes: metadata.len(), used: metadata.modified().ok()? }))
    });
    kept.collect()
}

/// Whether a file is gone now.
fn remove(path: &Path) -> bool {
    fs::remove_file(path).map_or_else(|error| error.kind() == ErrorKind::NotFound, |()| true)
}

fn make_folder(folder: &Path) -> Result<(), Error> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    let made = builder.create(folder);
    made.map_err(|source| {
        StreamError::Io { file: folder.to_owned(), doing: "making the folder", source }.into()
    })
}
