//! Files and folders that are written to.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::error::ConvertError;

#[cfg(unix)]
pub(crate) fn available_bytes(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(not(unix))]
pub(crate) fn available_bytes(_folder: &Path) -> Option<u64> {
    None
}

#[cfg(unix)]
pub(crate) fn allocated_bytes(metadata: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(metadata) * 512
}

#[cfg(not(unix))]
pub(crate) fn allocated_bytes(metadata: &fs::Metadata) -> u64 {
    metadata.len()
}

pub(crate) fn io_error(path: &Path, doing: &'static str, source: io::Error) -> ConvertError {
    ConvertError::Io { file: path.display().to_string(), doing, source }
}

/// Makes a rename in the folder durable.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), ConvertError> {
    #[cfg(unix)]
    {
        let sync = File::open(folder).and_then(|folder| folder.sync_all());
        sync.map_err(|e| io_error(folder, "syncing", e))?;
    }
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

/// A file that is written at positions.
pub(crate) struct OutFile {
    pub(crate) path: PathBuf,
    file: File,
}

impl OutFile {
    /// Opens or makes a file and gives it a size; what it holds is kept.
    pub(crate) fn open(path: PathBuf, bytes: u64) -> Result<Self, ConvertError> {
        let out = Self::open_to_grow(path)?;
        out.set_bytes(bytes)?;
        Ok(out)
    }

    /// Opens or makes a file as large as it is.
    pub(crate) fn open_to_grow(path: PathBuf) -> Result<Self, ConvertError> {
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(|e| io_error(&path, "opening", e))?;
        Ok(Self { path, file })
    }

    pub(crate) fn bytes(&self) -> Result<u64, ConvertError> {
        let metadata = self.file.metadata();
        Ok(metadata.map_err(|e| io_error(&self.path, "taking its size", e))?.len())
    }

    pub(crate) fn set_bytes(&self, bytes: u64) -> Result<(), ConvertError> {
        self.file.set_len(bytes).map_err(|e| io_error(&self.path, "setting its size", e))
    }

    /// Lets what was synced be read from the drive again, where the system can be told.
    pub(crate) fn drop_cached(&self) {
        // Only advice: where it fails, reads come from memory as before.
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
    }

    #[cfg(unix)]
    pub(crate) fn write_at(&self, bytes: &[u8], position: u64) -> Result<(), ConvertError> {
        std::os::unix::fs::FileExt::write_all_at(&self.file, bytes, position)
            .map_err(|e| io_error(&self.path, "writing", e))
    }

    #[cfg(windows)]
    pub(crate) fn write_at(&self, mut bytes: &[u8], mut position: u64) -> Result<(), ConvertError> {
        while !bytes.is_empty() {
            let n = std::os::windows::fs::FileExt::seek_write(&self.file, bytes, position)
                .map_err(|e| io_error(&self.path, "writing", e))?;
            bytes = &bytes[n..];
            position += n as u64;
        }
        Ok(())
    }

    #[cfg(unix)]
    pub(crate) fn read_at(&self, out: &mut [u8], position: u64) -> Result<(), ConvertError> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, out, position)
            .map_err(|e| io_error(&self.path, "reading back", e))
    }

    #[cfg(windows)]
    pub(crate) fn read_at(
        &self,
        mut out: &mut [u8],
        mut position: u64,
    ) -> Result<(), ConvertError> {
        while !out.is_empty() {
            let n = std::os::windows::fs::FileExt::seek_read(&self.file, out, position)
                .map_err(|e| io_error(&self.path, "reading back", e))?;
            if n == 0 {
                let end = io::ErrorKind::UnexpectedEof.into();
                return Err(io_error(&self.path, "reading back", end));
            }
            out = &mut out[n..];
            position += n as u64;
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), ConvertError> {
        self.file.sync_all().map_err(|e| io_error(&self.path, "syncing", e))
    }

    /// Gives what was written aside its name, durably. Asides have fixed names here: a conversion that
    /// was killed is run again and writes over them.
    pub(crate) fn move_into_place(self, path: &Path) -> Result<(), ConvertError> {
        self.sync()?;
        fs::rename(&self.path, path).map_err(|e| io_error(path, "moving it into place", e))?;
        path.parent().map_or(Ok(()), sync_folder)
    }
}

/// A text file that grows by whole lines, each durable before it counts.
pub(crate) struct LineFile {
    path: PathBuf,
    file: File,
}

impl LineFile {
    /// Opens or makes a file; returns the whole lines in it. A line that a crash cut off is removed,
    /// or it would spoil the next.
    pub(crate) fn open(path: PathBuf) -> Result<(Self, String), ConvertError> {
        let text = whole_lines(&path)?;
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let mut file = open.map_err(|e| io_error(&path, "opening", e))?;
        let cut = file.set_len(text.len() as u64).and_then(|()| file.seek(SeekFrom::End(0)));
        cut.map_err(|e| io_error(&path, "setting its size", e))?;
        Ok((Self { path, file }, text))
    }

    pub(crate) fn append(&mut self, line: &str) -> Result<(), ConvertError> {
        let line = format!("{line}\n");
        let write = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_all());
        write.map_err(|e| io_error(&self.path, "writing", e))
    }
}

/// The whole lines of a file that need not be there.
pub(crate) fn whole_lines(path: &Path) -> Result<String, ConvertError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(io_error(path, "reading", e)),
    };
    let end = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
    // We wrote it in UTF-8; from anything else on it is not ours.
    let valid = std::str::from_utf8(&bytes[..end]).map_or_else(|e| e.valid_up_to(), |_| end);
    let text = String::from_utf8_lossy(&bytes[..valid]).into_owned();
    let end = text.rfind('\n').map_or(0, |at| at + 1);
    Ok(text[..end].to_owned())
}
