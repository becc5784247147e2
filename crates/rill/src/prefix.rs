//! Beginnings of conversations that have been run before.
//!
//! A prompt that starts like an earlier one goes on from a snapshot that was taken there: only what is
//! new is run. Nobody finds another's: each has a name space. Some are in memory, and if the options say
//! so, more are on disk.

mod disk;
mod name;

use std::sync::Arc;

pub use self::disk::PrefixDisk;

use self::disk::Disk;
use crate::engine::Engine;
use crate::error::Error;
use crate::session::{Session, Snapshot};

/// Snapshots by the tokens they have seen, the most recently used ones, within a number of bytes.
pub(crate) struct Prefixes {
    room_bytes: u64,
    held_bytes: u64,
    /// The most recently used last.
    entries: Vec<Entry>,
    disk: Option<Disk>,
}

struct Entry {
    namespace: Arc<str>,
    snapshot: Arc<Snapshot>,
}

impl Prefixes {
    /// As many as the engine has room for.
    ///
    /// # Errors
    /// Only with a disk, as for [`Disk::open`].
    pub(crate) fn new(engine: &Engine, disk: Option<PrefixDisk>) -> Result<Self, Error> {
        let room_bytes = engine.plan().options.snapshot_bytes;
        let disk = disk.map(|disk| Disk::open(engine, disk)).transpose()?;
        Ok(Self { room_bytes, held_bytes: 0, entries: Vec::new(), disk })
    }

    /// Takes a session that has seen nothing to the longest beginning of `tokens` that is known; without
    /// one it stays where it is.
    ///
    /// # Errors
    /// As for [`Session::restore`].
    pub(crate) fn resume(
        &mut self,
        engine: &Engine,
        namespace: &Arc<str>,
        tokens: &[u32],
        session: &mut Session,
    ) -> Result<(), Error> {
        let held = self.find(namespace, tokens);
        let held_tokens = held.as_ref().map_or(0, |snapshot| snapshot.tokens().len());
        let mut disk = self.disk.iter();
        if disk.any(|disk| disk.load(engine, namespace, tokens, held_tokens, session)) {
            drop(held);
            // The next one finds it in memory, if there is room.
            let _ = self.keep(namespace, session);
        } else if let Some(snapshot) = held {
            session.restore(&snapshot)?;
        }
        Ok(())
    }

    /// The longest snapshot that `tokens` begin with and go on after.
    fn find(&mut self, namespace: &str, tokens: &[u32]) -> Option<Arc<Snapshot>> {
        let fits = |entry: &Entry| {
            let seen = entry.snapshot.tokens();
            // Something must be left to run: a snapshot has no logits.
            *entry.namespace == *namespace && seen.len() < tokens.len() && tokens.starts_with(seen)
        };
        let entries = self.entries.iter().enumerate().filter(|(_, entry)| fits(entry));
        let (at, _) = entries.max_by_key(|(_, entry)| entry.snapshot.tokens().len())?;
        let entry = self.entries.remove(at);
        let snapshot = entry.snapshot.clone();
        self.entries.push(entry);
        Some(snapshot)
    }

    /// Keeps a session's present state, in place of what was used longest ago where there is not room
    /// for all.
    ///
    /// # Errors
    /// When the budget has no room for it.
    pub(crate) fn keep(&mut self, namespace: &Arc<str>, session: &Session) -> Result<(), Error> {
        let bytes = session.snapshot_bytes();
        if bytes > self.room_bytes || session.position() == 0 {
            return Ok(());
        }
        let same = |entry: &Entry| {
            entry.namespace == *namespace && entry.snapshot.tokens() == session.tokens()
        };
        if let Some(at) = self.entries.iter().position(same) {
            let entry = self.entries.remove(at);
            self.entries.push(entry);
            return Ok(());
        }
        while self.held_bytes + bytes > self.room_bytes {
            // What is being written to disk takes its room until then.
            let mut entries = self.entries.iter();
            let free = entries.position(|entry| Arc::strong_count(&entry.snapshot) == 1);
            let Some(oldest) = free else { return Ok(()) };
            self.held_bytes -= self.entries.remove(oldest).snapshot.bytes();
        }
        let snapshot = Arc::new(session.snapshot()?);
        self.held_bytes += snapshot.bytes();
        if let Some(disk) = &self.disk {
            disk.keep(namespace, &snapshot);
        }
        self.entries.push(Entry { namespace: namespace.clone(), snapshot });
        Ok(())
    }
}
