//! Large writes past the page cache, where the system lets us: a container is larger than memory,
//! and what is measured with it should not be in the cache already.

use std::path::PathBuf;

use crate::disk::OutFile;
use crate::error::ConvertError;

/// What memory, length and position of a direct write are multiples of: a page.
pub(super) const PAGE_BYTES: usize = 4096;

/// A file that is written at positions, whole pages of it directly.
pub(super) struct DirectFile {
    file: OutFile,
    /// The same file, opened for direct writes, where that is possible.
    #[cfg(target_os = "linux")]
    direct: Option<std::fs::File>,
}

impl DirectFile {
    /// Makes a file of this size.
    pub(super) fn open(path: PathBuf, bytes: u64) -> Result<Self, ConvertError> {
        let file = OutFile::open(path, bytes)?;
        #[cfg(target_os = "linux")]
        let direct = {
            use std::os::unix::fs::OpenOptionsExt;
            let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
            std::fs::OpenOptions::new().write(true).custom_flags(flags).open(&file.path).ok()
        };
        Ok(Self {
            file,
            #[cfg(target_os = "linux")]
            direct,
        })
    }

    /// Writes all bytes.
    pub(super) fn write_at(&self, bytes: &[u8], position: u64) -> Result<(), ConvertError> {
        let written = self.write_pages(bytes, position);
        self.file.write_at(&bytes[written..], position + written as u64)
    }

    pub(super) fn sync(&self) -> Result<(), ConvertError> {
        self.file.sync()
    }

    /// Writes what can be written directly; returns how much that was. Whatever stood in the way
    /// of the rest will be told by the ordinary write, if it is in its way too.
    #[cfg(target_os = "linux")]
    fn write_pages(&self, bytes: &[u8], position: u64) -> usize {
        use std::os::unix::fs::FileExt;
        let Some(direct) = &self.direct else { return 0 };
        let in_place = bytes.as_ptr().align_offset(PAGE_BYTES) == 0
            && position.is_multiple_of(PAGE_BYTES as u64);
        let whole = bytes.len() - bytes.len() % PAGE_BYTES;
        if in_place && direct.write_all_at(&bytes[..whole], position).is_ok() { whole } else { 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn write_pages(&self, _bytes: &[u8], _position: u64) -> usize {
        0
    }
}

/// Memory that begins at a page, all zeros at first.
pub(super) struct Pages {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    pub(super) fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE_BYTES];
        // A vector that is never resized stays where it is.
        let start = bytes.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        Self { bytes, start, len }
    }

    pub(super) fn all(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_of_any_length_and_place_arrive() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut expected = vec![0; 100_000];
        let file = DirectFile::open(path.clone(), expected.len() as u64).unwrap();
        let mut pages = Pages::new(20_000);
        for (i, (skip, n, at)) in
            [(0, 8192, 0), (0, 10_000, 8192), (0, 4096, 20_000), (7, 9000, 40_960), (0, 0, 5)]
                .into_iter()
                .enumerate()
        {
            pages.all().fill(i as u8 + 1);
            file.write_at(&pages.all()[skip..skip + n], at as u64).unwrap();
            expected[at..at + n].fill(i as u8 + 1);
        }
        file.sync().unwrap();
        assert!(std::fs::read(path).unwrap() == expected);
    }

    #[test]
    fn pages_begin_at_a_page() {
        for len in [0, 1, 4096, 100_000] {
            let mut pages = Pages::new(len);
            assert_eq!(pages.all().len(), len);
            assert_eq!(pages.all().as_ptr().align_offset(PAGE_BYTES), 0);
        }
    }
}
