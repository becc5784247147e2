//! Deleting the shards of a checkpoint while it is converted, so that a disk need not hold both.
//!
//! Two files in the destination make this resumable. `convert.headers` holds the headers of all
//! shards and is written before the first deletion; `reclaim.log` has a line for each shard, written
//! before that shard is deleted, and permits it to be missing. A shard in `reclaim.log` that is there
//! all the same is deleted like any other, once everything made from it has been found to be whole.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use rill_format::container::MANIFEST;
use rill_format::{Checkpoint, Folder, ShardHeader};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::convert::remove_files;
use crate::disk::{LineFile, OutFile, io_error, sync_folder, whole_lines};
use crate::error::ConvertError;
use crate::note::{NOTE, SourceFile};
use crate::plan::Plan;
use crate::source::ConvertSource;

const LEDGER: &str = "reclaim.log";
const HEADERS: &str = "convert.headers";
/// Room for seven times K3's headers.
const MAX_HEADERS_BYTES: u64 = 512 << 20;

/// Beside the shards: a line `SHA-256  name` for each.
const SUMS: &str = "SHA256SUMS";
const MAX_SUMS_BYTES: u64 = 16 << 20;
/// Where the Hugging Face client notes what it has downloaded: commit, SHA-256, time.
const DOWNLOADS: &str = ".cache/huggingface/download";
/// Bytes that are read at once while a shard is compared with its checksum.
const PIECE_BYTES: usize = 16 << 20;

/// The shards of a checkpoint that may be deleted when they are done with.
#[derive(Debug)]
pub struct Reclaim {
    /// Those that are still there.
    pub(crate) shards: Vec<Shard>,
}

/// A shard that a conversion is going to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deletion {
    /// The shard.
    pub file: String,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes of the container that are written before, on one thread.
    pub written_bytes: u64,
}

/// What a conversion has deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Shards.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Reclaim {
    /// Decides whether a checkpoint's shards may be deleted: each must be a plain file that nothing
    /// else shares, and have a SHA-256 to be compared with before it goes. That is taken from a
    /// `SHA256SUMS` file beside the shards, or else from what the Hugging Face client noted when it
    /// downloaded them. `trust` does without. Hard links are only noticed on Unix.
    ///
    /// # Errors
    /// [`ConvertError::NotReclaimable`] and [`ConvertError::Unverified`] with the first shard that may
    /// not be deleted.
    pub fn new(source: &Checkpoint, trust: bool) -> Result<Self, ConvertError> {
        let Folder::Disk(folder) = source.folder() else {
            return Err(ConvertError::NotReclaimable {
                file: source.folder().describe(""),
                reason: "is part of the program",
            });
        };
        let sums = published_sums(source.folder())?;
        let mut shards = Vec::new();
        for name in source.files() {
            // Without a file it was deleted by an earlier run, or the checkpoint would not be open.
            let Some(found) = SourceFile::find(source.folder(), &name) else { continue };
            let path = folder.join(&name);
            check_unshared(&path)?;
            let expected = match trust {
                true => None,
                false => match sums.get(&name).cloned().or_else(|| noted_sum(folder, &name)) {
                    None => {
                        return Err(ConvertError::Unverified { shard: path.display().to_string() });
                    }
                    sum => sum,
                },
            };
            let SourceFile { bytes, modified_ns, .. } = found;
            shards.push(Shard { name, path, bytes, modified_ns, expected });
        }
        Ok(Self { shards })
    }

    /// Refuses a plan that leaves tensors out: they would be lost.
    pub(crate) fn check_plan(&self, source: &Checkpoint, plan: &Plan) -> Result<(), ConvertError> {
        if plan.n_source_tensors() == source.len() {
            return Ok(());
        }
        Err(ConvertError::NotReclaimable {
            file: source.folder().describe(""),
            reason: "holds tensors that are not converted and would be lost",
        })
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Shard> {
        self.shards.iter().find(|shard| shard.name == name)
    }
}

/// Opens a checkpoint to be converted into `destination`, where a conversion that deletes its shards
/// may have begun: shards that it has deleted are known by their headers.
///
/// # Errors
/// [`ConvertError::Exists`] when that conversion has ended; otherwise as [`Checkpoint::open`].
pub fn open_checkpoint(folder: Folder, destination: &Path) -> Result<Checkpoint, ConvertError> {
    if destination.join(MANIFEST).exists() && !destination.join(NOTE).exists() {
        return Err(ConvertError::Exists { folder: destination.display().to_string() });
    }
    let deleted = deleted_shards(destination)?;
    let known = match deleted.is_empty() {
        true => HashMap::new(),
        false => read_headers(&destination.join(HEADERS), &deleted)?,
    };
    Ok(Checkpoint::open_without(folder, &known)?)
}

/// A shard that is there and may be deleted.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) name: String,
    path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) modified_ns: u64,
    /// Published SHA-256 in lower-case hexadecimal digits; `None` when the source is trusted.
    pub(crate) expected: Option<String>,
}

impl Shard {
    /// Compares it with its published checksum. `tell` is called now and then and may break off.
    pub(crate) fn check_bytes(
        &self,
        tell: &dyn Fn() -> Result<(), ConvertError>,
    ) -> Result<(), ConvertError> {
        let Some(expected) = &self.expected else { return Ok(()) };
        let mut file = File::open(&self.path).map_err(|e| io_error(&self.path, "opening", e))?;
        let mut sum = Sha256::new();
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let n = file.read(&mut piece).map_err(|e| io_error(&self.path, "reading", e))?;
            if n == 0 {
                break;
            }
            sum.update(&piece[..n]);
            tell()?;
        }
        let found: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if found == *expected {
            return Ok(());
        }
        let (shard, expected) = (self.path.display().to_string(), expected.clone());
        Err(ConvertError::WrongShard { shard, expected, found })
    }
}

/// The deletions of a conversion, open to be added to.
pub(crate) struct Ledger(LineFile);

/// A line of the ledger.
#[derive(Serialize, Deserialize)]
struct LedgerLine {
    file: String,
    bytes: u64,
    /// What everything that was in it has become, for people.
    covered_by: Vec<String>,
}

impl Ledger {
    /// Opens or makes it, with the headers of all shards beside it.
    pub(crate) fn open(destination: &Path, source: &Checkpoint) -> Result<Self, ConvertError> {
        // From the first run that deletes on, it is never written again: shards may be gone.
        if !destination.join(HEADERS).exists() {
            write_headers(destination, source)?;
        }
        let (lines, _) = LineFile::open(destination.join(LEDGER))?;
        sync_folder(destination)?;
        Ok(Self(lines))
    }

    /// Notes that a shard is covered, then deletes it.
    pub(crate) fn delete(
        &mut self,
        source: &Checkpoint,
        shard: &Shard,
        covered_by: Vec<String>,
    ) -> Result<(), ConvertError> {
        // What was checked and converted is what is deleted.
        check_unshared(&shard.path)?;
        let now = SourceFile::find(source.folder(), &shard.name);
        if now.is_none_or(|now| (now.bytes, now.modified_ns) != (shard.bytes, shard.modified_ns)) {
            return Err(ConvertError::ShardChanged { shard: shard.path.display().to_string() });
        }
        let line = LedgerLine { file: shard.name.clone(), bytes: shard.bytes, covered_by };
        self.0.append(&serde_json::to_string(&line).expect("plain data serialises"))?;
        source.close_shard(&shard.name);
        fs::remove_file(&shard.path).map_err(|e| io_error(&shard.path, "deleting it", e))?;
        shard.path.parent().map_or(Ok(()), sync_folder)
    }
}

/// Shards that may be missing.
pub(crate) fn deleted_shards(destination: &Path) -> Result<HashSet<String>, ConvertError> {
    let text = whole_lines(&destination.join(LEDGER))?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<LedgerLine>(line).ok());
    Ok(lines.map(|line| line.file).collect())
}

/// The container is whole, or never had any shard deleted for it.
pub(crate) fn remove_notes(destination: &Path) -> Result<(), ConvertError> {
    remove_files(destination, &[LEDGER, HEADERS])
}

/// By how much less than its own size the container's folder needs room, because shards on the same
/// drive are deleted while it grows. Cautious: a shard counts as deleted only when everything up to
/// the deletion of the next one has been written as well, and where it cannot be told that source and
/// destination share a drive, the answer is 0.
pub(crate) fn saving_bytes(
    source: &dyn ConvertSource,
    destination: &Path,
    container_bytes: u64,
    deletions: &[Deletion],
) -> u64 {
    let Folder::Disk(source) = source.folder() else { return 0 };
    if !on_one_drive(&source, destination) {
        return 0;
    }
    let mut most = 0;
    let (mut deleted, mut last) = (0u64, 0);
    let ends = deletions.iter().map(|d| (d.written_bytes, d.bytes));
    for (written, bytes) in ends.chain([(container_bytes, 0)]) {
        most = most.max(written.saturating_sub(deleted));
        deleted += last;
        last = bytes;
    }
    container_bytes - most.min(container_bytes)
}

#[cfg(unix)]
fn on_one_drive(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    // The destination may not have been made yet.
    let device = |path: &Path| {
        let path = std::path::absolute(path).ok()?;
        path.ancestors().find_map(|path| fs::metadata(path).ok()).map(|m| m.dev())
    };
    device(a).is_some() && device(a) == device(b)
}

#[cfg(not(unix))]
fn on_one_drive(_: &Path, _: &Path) -> bool {
    false
}

/// Refuses what is not a file of its own.
fn check_unshared(path: &Path) -> Result<(), ConvertError> {
    let found = fs::symlink_metadata(path).map_err(|e| io_error(path, "looking it up", e))?;
    let refuse =
        |reason| Err(ConvertError::NotReclaimable { file: path.display().to_string(), reason });
    if found.is_symlink() {
        return refuse("is a link to a file elsewhere");
    }
    #[cfg(unix)]
    if std::os::unix::fs::MetadataExt::nlink(&found) > 1 {
        return refuse("has another name elsewhere (a hard link)");
    }
    Ok(())
}

/// Checksums in `SHA256SUMS`, by file; none where there is no such file.
fn published_sums(folder: &Folder) -> Result<HashMap<String, String>, ConvertError> {
    if !folder.exists(SUMS) {
        return Ok(HashMap::new());
    }
    let bytes = folder.read(SUMS, MAX_SUMS_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
    let line = |line: &str| {
        let (sum, name) = line.split_once(' ')?;
        // A second blank, or a star for a file read as bytes.
        let name = name.strip_prefix([' ', '*']).unwrap_or(name);
        Some((name.strip_prefix("./").unwrap_or(name).to_owned(), sha256(sum)?))
    };
    Ok(text.lines().filter_map(line).collect())
}

/// The checksum that the Hugging Face client has noted. Small files have a SHA-1 there instead.
fn noted_sum(folder: &Path, shard: &str) -> Option<String> {
    let path = folder.join(DOWNLOADS).join(format!("{shard}.metadata"));
    let mut text = String::new();
    File::open(path).ok()?.take(1 << 12).read_to_string(&mut text).ok()?;
    sha256(text.lines().nth(1)?.trim())
}

fn sha256(text: &str) -> Option<String> {
    let is_sum = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    is_sum.then(|| text.to_ascii_lowercase())
}

/// In front of each header in [`HEADERS`].
#[derive(Serialize, Deserialize)]
struct HeaderLine {
    shard: String,
    file_bytes: u64,
    header_bytes: usize,
}

/// Writes the headers of all shards aside, and moves them into place.
fn write_headers(destination: &Path, source: &Checkpoint) -> Result<(), ConvertError> {
    let aside = OutFile::open(destination.join("convert.headers.part"), 0)?;
    let mut at = 0;
    for shard in source.files() {
        let ShardHeader { file_bytes, mut header } = source.shard_header(&shard)?;
        let line = HeaderLine { shard, file_bytes, header_bytes: header.len() };
        let mut bytes = serde_json::to_vec(&line).expect("plain data serialises");
        bytes.push(b'\n');
        bytes.append(&mut header);
        aside.write_at(&bytes, at)?;
        at += bytes.len() as u64;
    }
    aside.move_into_place(&destination.join(HEADERS))
}

/// Reads the headers of some shards.
fn read_headers(
    path: &Path,
    wanted: &HashSet<String>,
) -> Result<HashMap<String, ShardHeader>, ConvertError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|e| io_error(path, "opening", e))?;
    let read = file.take(MAX_HEADERS_BYTES).read_to_end(&mut bytes);
    read.map_err(|e| io_error(path, "reading", e))?;
    let mut known = HashMap::new();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let damaged = || ConvertError::Headers {
            file: path.display().to_string(),
            byte: (bytes.len() - rest.len()) as u64,
        };
        let end = rest.iter().position(|&b| b == b'\n').ok_or_else(damaged)?;
        let line: HeaderLine = serde_json::from_slice(&rest[..end]).map_err(|_| damaged())?;
        let (header, after) =
            rest[end + 1..].split_at_checked(line.header_bytes).ok_or_else(damaged)?;
        if wanted.contains(&line.shard) {
            let header = header.to_vec();
            known.insert(line.shard, ShardHeader { file_bytes: line.file_bytes, header });
        }
        rest = after;
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_found_in_lists_of_either_kind() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = ("0A".repeat(32), "f1".repeat(32));
        fs::write(dir.path().join(SUMS), format!("{a}  ./x 1\n{b} *y\nshort  z\n\n")).unwrap();
        let sums = published_sums(&Folder::Disk(dir.path().to_owned())).unwrap();
        assert_eq!(sums.len(), 2);
        assert_eq!((&sums["x 1"], &sums["y"]), (&"0a".repeat(32), &b));
        let notes = dir.path().join(DOWNLOADS);
        fs::create_dir_all(&notes).unwrap();
        fs::write(notes.join("x.metadata"), format!("commit\n{b}\n1700000000.5\n")).unwrap();
        fs::write(
            notes.join("y.metadata"),
            "commit\nda39a3ee5e6b4b0d3255bfef95601890afd80709\n1\n",
        )
        .unwrap();
        assert_eq!(noted_sum(dir.path(), "x"), Some(b));
        assert_eq!(noted_sum(dir.path(), "y"), None, "a SHA-1");
        assert_eq!(noted_sum(dir.path(), "z"), None);
    }

    #[test]
    fn a_shard_counts_as_deleted_only_when_the_next_one_is_done_with() {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/k3-tiny");
        let source = Checkpoint::open(Folder::Disk(source)).unwrap();
        let deletion = |written_bytes| Deletion { file: String::new(), bytes: 100, written_bytes };
        // Room for two shards' worth: at 200 written none counts, at 300 the first, at 330 all but
        // the last.
        let deletions = [deletion(100), deletion(200), deletion(300)];
        let saving = saving_bytes(&source, dir.path(), 330, &deletions);
        let expected =
            if on_one_drive(dir.path(), &std::env::current_dir().unwrap()) { 130 } else { 0 };
        assert_eq!(saving, expected);
        assert_eq!(saving_bytes(&source, dir.path(), 330, &[]), 0);
    }
}
