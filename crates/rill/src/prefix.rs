//! Beginnings of conversations that have been run before.
//!
//! A prompt that starts like an earlier one goes on from a snapshot that was taken there: only what is
//! new is run. Nobody finds another's: each has a name space.

use std::sync::Arc;

use crate::error::Error;
use crate::session::{Session, Snapshot};

/// Snapshots by the tokens they have seen, the most recently used ones, within a number of bytes.
#[derive(Debug)]
pub(crate) struct Prefixes {
    room_bytes: u64,
    held_bytes: u64,
    /// The most recently used last.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    namespace: Arc<str>,
    snapshot: Arc<Snapshot>,
}

impl Prefixes {
    pub(crate) fn new(room_bytes: u64) -> Self {
        Self { room_bytes, held_bytes: 0, entries: Vec::new() }
    }

    /// The longest snapshot that `tokens` begin with and go on after.
    pub(crate) fn find(&mut self, namespace: &str, tokens: &[u32]) -> Option<Arc<Snapshot>> {
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
            self.held_bytes -= self.entries.remove(0).snapshot.bytes();
        }
        let snapshot = Arc::new(session.snapshot()?);
        self.held_bytes += snapshot.bytes();
        self.entries.push(Entry { namespace: namespace.clone(), snapshot });
        Ok(())
    }
}
