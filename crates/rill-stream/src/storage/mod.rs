//! Files that weights are read from, past the page cache where the system allows it.

mod platform;

use std::fs::File;
use std::io;
use std::path::PathBuf;

use crate::buffer::AlignedBuf;
use crate::error::StreamError;

/// What positions, lengths and addresses of reads are multiples of. Every file system in use that
/// allows direct reads at all allows them at this.
pub const READ_ALIGN: usize = 4096;

/// Where reads go. Files are numbered; tests put faults in here.
pub trait Storage: Send + Sync {
    /// Reads some bytes from `offset` on and returns how many, 0 at the end of the file. Offset,
    /// length and address are multiples of [`READ_ALIGN`].
    fn read_at(&self, file: u32, offset: u64, out: &mut [u8]) -> io::Result<usize>;

    /// What to call a file in messages.
    fn name(&self, file: u32) -> String;
}

/// A file to read from.
#[derive(Clone, Debug)]
pub struct FileSpec {
    /// What to call it in messages.
    pub name: String,
    /// Where it is.
    pub place: Place,
    /// Its size when it was checked.
    pub bytes: u64,
}

/// Where a file is.
#[derive(Clone, Debug)]
pub enum Place {
    /// On disk.
    Disk(PathBuf),
    /// In the program.
    Memory(&'static [u8]),
}

/// Files of a model, open.
#[derive(Debug)]
pub struct Drive {
    files: Vec<Open>,
    names: Vec<String>,
    direct: DirectReads,
}

/// Whether reads go past the page cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectReads {
    /// All of them do: each file was probed with a real read.
    Yes,
    /// The caller did not want it.
    Off,
    /// Some file refused; all others are read directly.
    Refused {
        /// The first file that did.
        file: String,
        /// Why.
        reason: String,
    },
    /// Nothing is on a disk.
    InMemory,
}

#[derive(Debug)]
enum Open {
    Direct(File),
    Buffered(File),
    Memory(&'static [u8]),
}

impl Drive {
    /// Opens files. With `direct`, each is probed with a real read past the page cache, and is
    /// read through it if that fails.
    ///
    /// # Errors
    /// When a file cannot be opened, or has another size than when it was checked.
    pub fn open(specs: &[FileSpec], direct: bool) -> Result<Self, StreamError> {
        let mut state = if direct { DirectReads::InMemory } else { DirectReads::Off };
        let mut files = Vec::new();
        for spec in specs {
            let path = match &spec.place {
                Place::Memory(bytes) => {
                    files.push(Open::Memory(bytes));
                    continue;
                }
                Place::Disk(path) => path,
            };
            let io_error = |doing, source| StreamError::Io { file: path.clone(), doing, source };
            let buffered = File::open(path).map_err(|e| io_error("opening it", e))?;
            let found = buffered.metadata().map_err(|e| io_error("taking its size", e))?.len();
            if found != spec.bytes {
                return Err(StreamError::Replaced {
                    file: path.clone(),
                    expected: spec.bytes,
                    found,
                });
            }
            if !direct {
                files.push(Open::Buffered(buffered));
                continue;
            }
            match platform::open_direct(path).and_then(probe) {
                Ok(file) => {
                    files.push(Open::Direct(file));
                    if state == DirectReads::InMemory {
                        state = DirectReads::Yes;
                    }
                }
                Err(error) => {
                    files.push(Open::Buffered(buffered));
                    if !matches!(state, DirectReads::Refused { .. }) {
                        let (file, reason) = (spec.name.clone(), error.to_string());
                        state = DirectReads::Refused { file, reason };
                    }
                }
            }
        }
        let names = specs.iter().map(|spec| spec.name.clone()).collect();
        Ok(Self { files, names, direct: state })
    }

    /// Whether reads go past the page cache.
    #[must_use]
    pub fn direct(&self) -> &DirectReads {
        &self.direct
    }
}

/// Reads one block: whether the device takes direct reads is known only by trying.
fn probe(file: File) -> io::Result<File> {
    let mut block = AlignedBuf::new(READ_ALIGN).ok_or(io::ErrorKind::OutOfMemory)?;
    platform::read_at(&file, block.as_mut_slice(), 0)?;
    Ok(file)
}

impl Storage for Drive {
    fn read_at(&self, file: u32, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        match &self.files[file as usize] {
            Open::Direct(file) => platform::read_at(file, out, offset),
            Open::Buffered(file) => {
                let n = platform::read_at(file, out, offset)?;
                platform::forget(file, offset, n as u64);
                Ok(n)
            }
            Open::Memory(bytes) => {
                let rest = usize::try_from(offset).ok().and_then(|at| bytes.get(at..));
                let rest = rest.unwrap_or_default();
                let n = rest.len().min(out.len());
                out[..n].copy_from_slice(&rest[..n]);
                Ok(n)
            }
        }
    }

    fn name(&self, file: u32) -> String {
        self.names.get(file as usize).cloned().unwrap_or_default()
    }
}

/// Why bytes did not come.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The system refused.
    #[error("{file}: reading at byte {byte} failed: {source}; check the drive")]
    Io {
        /// The file.
        file: String,
        /// The first byte that did not come.
        byte: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// The file ends early.
    #[error(
        "{file}: ends at byte {byte}, expected {expected} bytes more; it has been cut since it was \
         opened"
    )]
    Short {
        /// The file.
        file: String,
        /// Where it ends.
        byte: u64,
        /// Bytes that are missing.
        expected: u64,
    },
    /// What came is not what it should be.
    #[error(transparent)]
    Refused(Box<dyn std::error::Error + Send + Sync>),
    /// A reader broke down.
    #[error("{file}: the thread that read at byte {byte} broke down; please report this as a bug")]
    ReaderDied {
        /// The file.
        file: String,
        /// Where it read.
        byte: u64,
    },
}

/// Fills `out` from `offset` on, of which at least `needed` bytes must come.
pub(crate) fn read_span(
    storage: &dyn Storage,
    file: u32,
    offset: u64,
    out: &mut [u8],
    needed: usize,
) -> Result<(), ReadError> {
    let mut filled = 0;
    while filled < needed {
        let byte = offset + filled as u64;
        let expected = (needed - filled) as u64;
        let short = || ReadError::Short { file: storage.name(file), byte, expected };
        // Direct reads stop off a block's edge only at the end of the file.
        if !filled.is_multiple_of(READ_ALIGN) {
            return Err(short());
        }
        match storage.read_at(file, byte, &mut out[filled..]) {
            Ok(0) => return Err(short()),
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(ReadError::Io { file: storage.name(file), byte, source }),
        }
    }
    Ok(())
}
