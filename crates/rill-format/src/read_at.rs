//! Reads at a position, the same on every platform: whole or not at all, in pieces the operating
//! system accepts, resumed after an interruption.

use std::fs::File;
use std::io;

/// Linux stops a single read just below 2 GiB, macOS refuses more than that, Windows counts in
/// 32 bits. One GiB is below all three.
const PIECE_BYTES: usize = 1 << 30;

/// Where bytes come from.
#[derive(Debug)]
pub(crate) enum Source {
    File(File),
    Memory(&'static [u8]),
}

/// A read that did not fill its buffer.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// Bytes that had come before it stopped.
    pub(crate) filled: usize,
    /// Why it stopped; `None` at the end of the file.
    pub(crate) error: Option<io::Error>,
}

impl Source {
    pub(crate) fn len(&self) -> io::Result<u64> {
        match self {
            Self::File(file) => Ok(file.metadata()?.len()),
            Self::Memory(bytes) => Ok(bytes.len() as u64),
        }
    }

    /// Fills `out` with the bytes that start at `position`.
    pub(crate) fn read_exact_at(&self, out: &mut [u8], position: u64) -> Result<(), Stopped> {
        read_in_pieces(out, position, PIECE_BYTES, |piece, at| match self {
            Self::File(file) => file_read_at(file, piece, at),
            Self::Memory(bytes) => Ok(memory_read_at(bytes, piece, at)),
        })
    }
}

fn read_in_pieces(
    out: &mut [u8],
    position: u64,
    piece_bytes: usize,
    read_at: impl Fn(&mut [u8], u64) -> io::Result<usize>,
) -> Result<(), Stopped> {
    let mut filled = 0;
    while filled < out.len() {
        let piece_end = out.len().min(filled.saturating_add(piece_bytes));
        match read_at(&mut out[filled..piece_end], position + filled as u64) {
            Ok(0) => {
                return Err(Stopped { filled, error: None });
            }
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                return Err(Stopped { filled, error: Some(error) });
            }
        }
    }
    Ok(())
}

fn memory_read_at(bytes: &[u8], out: &mut [u8], position: u64) -> usize {
    let rest = usize::try_from(position)
        .ok()
        .and_then(|position| bytes.get(position..))
        .unwrap_or_default();
    let n = rest.len().min(out.len());
    out[..n].copy_from_slice(&rest[..n]);
    n
}

#[cfg(unix)]
fn file_read_at(file: &File, out: &mut [u8], position: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, position)
}

// Moves the file's cursor as well, which nothing here uses.
#[cfg(windows)]
fn file_read_at(file: &File, out: &mut [u8], position: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, position)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const DATA: &[u8] = b"0123456789abcdefghij";

    #[test]
    fn long_reads_are_split_into_pieces() {
        let calls = RefCell::new(Vec::new());
        let mut out = [0; 17];
        read_in_pieces(&mut out, 2, 5, |piece, at| {
            calls.borrow_mut().push((at, piece.len()));
            Ok(memory_read_at(DATA, piece, at))
        })
        .unwrap();
        assert_eq!(&out, &DATA[2..19]);
        assert_eq!(calls.into_inner(), [(2, 5), (7, 5), (12, 5), (17, 2)]);
    }

    #[test]
    fn partial_and_interrupted_reads_are_resumed() {
        let calls = RefCell::new(0);
        let mut out = [0; 20];
        read_in_pieces(&mut out, 0, 8, |piece, at| {
            *calls.borrow_mut() += 1;
            if *calls.borrow() % 2 == 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let n = piece.len().min(3);
            Ok(memory_read_at(DATA, &mut piece[..n], at))
        })
        .unwrap();
        assert_eq!(&out, DATA);
    }

    #[test]
    fn the_end_of_the_file_says_how_much_came() {
        let mut out = [0; 9];
        let stopped =
            read_in_pieces(&mut out, 15, 2, |piece, at| Ok(memory_read_at(DATA, piece, at)))
                .unwrap_err();
        assert_eq!(stopped.filled, 5);
        assert!(stopped.error.is_none());
    }

    #[test]
    fn a_failing_disk_says_how_much_came() {
        let mut out = [0; 9];
        let stopped = read_in_pieces(&mut out, 0, 4, |piece, at| {
            if at >= 8 {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            Ok(memory_read_at(DATA, piece, at))
        })
        .unwrap_err();
        assert_eq!(stopped.filled, 8);
        assert_eq!(stopped.error.unwrap().kind(), io::ErrorKind::BrokenPipe);
    }
}
