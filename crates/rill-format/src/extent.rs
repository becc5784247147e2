//! Where bytes lie, for those who read them in their own way.

use std::path::PathBuf;

use crate::Folder;

/// A file that holds weights.
#[derive(Clone, Debug)]
pub struct DataFile {
    /// What to call it in messages.
    pub name: String,
    /// Where it is.
    pub place: DataPlace,
    /// Its size when the model was opened.
    pub bytes: u64,
}

/// Where a file's bytes are.
#[derive(Clone, Debug)]
pub enum DataPlace {
    /// In a file system.
    Disk(PathBuf),
    /// In the program.
    Memory(&'static [u8]),
}

/// Some bytes of a file. Opening a model has checked that the file has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataExtent {
    /// Index in the list of the model's files.
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl DataFile {
    /// A file of a folder that has been opened as `bytes` bytes.
    pub(crate) fn new(folder: &Folder, file: &str, bytes: u64) -> Self {
        let place = match folder {
            Folder::Disk(path) => DataPlace::Disk(path.join(file)),
            Folder::Memory { files, .. } => {
                let found = files.iter().find(|(name, _)| *name == file);
                DataPlace::Memory(found.map_or(&[], |(_, bytes)| bytes))
            }
        };
        Self { name: folder.describe(file), place, bytes }
    }
}
