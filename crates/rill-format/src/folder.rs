//! Where a checkpoint's files come from.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;

use crate::FormatError;
use crate::read_at::Source;

/// A directory, or files compiled into the program (the bundled demo).
#[derive(Clone, Debug)]
pub enum Folder {
    /// A directory.
    Disk(PathBuf),
    /// Files in the program.
    Memory {
        /// What to call the folder in messages.
        name: &'static str,
        /// File names and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl Folder {
    /// Whether there is a regular file of this name.
    pub fn exists(&self, file: &str) -> bool {
        match self {
            Self::Disk(folder) => folder.join(file).is_file(),
            Self::Memory { files, .. } => files.iter().any(|(name, _)| *name == file),
        }
    }

    /// Reads a whole small file, such as `config.json`.
    ///
    /// # Errors
    ///
    /// If the file is absent, is not a regular file, has more than `max_bytes`, or cannot be read.
    pub fn read(&self, file: &str, max_bytes: u64) -> Result<Vec<u8>, FormatError> {
        let (mut stream, _) = self.stream(file, max_bytes)?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).map_err(|source| self.io_error(file, "reading", source))?;
        // The file may have grown since its size was taken; the stream ends one byte late.
        if bytes.len() as u64 > max_bytes {
            return Err(self.too_large(file, bytes.len() as u64, max_bytes));
        }
        Ok(bytes)
    }

    /// The file's path, or folder and name for files in the program. For messages.
    pub fn describe(&self, file: &str) -> String {
        match self {
            Self::Disk(folder) => folder.join(file).display().to_string(),
            Self::Memory { name, .. } => format!("{name}/{file}"),
        }
    }

    /// What to call the folder itself in messages.
    pub(crate) fn describe_folder(&self) -> String {
        match self {
            Self::Disk(folder) => folder.display().to_string(),
            Self::Memory { name, .. } => (*name).to_owned(),
        }
    }

    /// A stream over a file of at most `max_bytes`, and the file's size. The stream ends one byte
    /// after `max_bytes` at the latest, however the file grows.
    pub(crate) fn stream(
        &self,
        file: &str,
        max_bytes: u64,
    ) -> Result<(Box<dyn Read>, u64), FormatError> {
        let source = self.open(file)?;
        let found =
            source.len().map_err(|source| self.io_error(file, "taking its size", source))?;
        if found > max_bytes {
            return Err(self.too_large(file, found, max_bytes));
        }
        let limit = max_bytes.saturating_add(1);
        let stream: Box<dyn Read> = match source {
            Source::File(file) => Box::new(file.take(limit)),
            Source::Memory(bytes) => Box::new(bytes),
        };
        Ok((stream, found))
    }

    /// Opens a file for reads at a position.
    pub(crate) fn open(&self, file: &str) -> Result<Source, FormatError> {
        match self {
            Self::Disk(folder) => {
                let path = folder.join(file);
                // Ask before opening: opening a pipe would wait for a writer.
                match fs::metadata(&path) {
                    Ok(metadata) if !metadata.is_file() => {
                        return Err(FormatError::NotAFile { file: self.describe(file) });
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        return Err(self.missing(file));
                    }
                    _ => {}
                }
                File::open(path)
                    .map(Source::File)
                    .map_err(|source| self.io_error(file, "opening", source))
            }
            Self::Memory { files, .. } => files
                .iter()
                .find(|(name, _)| *name == file)
                .map(|(_, bytes)| Source::Memory(bytes))
                .ok_or_else(|| self.missing(file)),
        }
    }

    pub(crate) fn missing(&self, file: &str) -> FormatError {
        FormatError::MissingFile { file: self.describe(file) }
    }

    fn too_large(&self, file: &str, found: u64, max_bytes: u64) -> FormatError {
        FormatError::FileTooLarge { file: self.describe(file), found, max_bytes }
    }

    pub(crate) fn io_error(
        &self,
        file: &str,
        doing: &'static str,
        source: io::Error,
    ) -> FormatError {
        FormatError::Io { file: self.describe(file), doing, source }
    }
}
