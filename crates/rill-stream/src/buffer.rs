//! Memory that direct reads can go to.

/// Alignment of a buffer's first byte: a multiple of every page and sector size in use.
pub const BUFFER_ALIGN: usize = 16 << 10;

/// Zeroed bytes whose first is aligned to [`BUFFER_ALIGN`]. The system hands pages out as they are
/// first written, so a buffer costs nothing until it is used.
#[derive(Debug)]
pub struct AlignedBuf {
    /// Longer than needed, so that an aligned part of it is long enough: the allocator returns
    /// untouched zero pages only for alignments it was not asked for.
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuf {
    /// Bytes that a buffer of `len` bytes takes.
    #[must_use]
    pub fn cost(len: usize) -> usize {
        len.saturating_add(BUFFER_ALIGN)
    }

    /// A buffer of `len` bytes; `None` when there is no memory for it.
    #[must_use]
    pub fn new(len: usize) -> Option<Self> {
        // `vec!` alone asks for zeroed memory, and it aborts when there is none.
        let total = len.checked_add(BUFFER_ALIGN)?;
        Vec::<u8>::new().try_reserve_exact(total).ok()?;
        let bytes = vec![0; total];
        let start = bytes.as_ptr().align_offset(BUFFER_ALIGN);
        Some(Self { bytes, start, len })
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_as_long_as_asked() {
        for len in [0, 1, 4096, BUFFER_ALIGN, 100_001] {
            let mut buffer = AlignedBuf::new(len).expect("memory for a small buffer");
            assert_eq!(buffer.as_slice().as_ptr().align_offset(BUFFER_ALIGN), 0);
            assert_eq!(buffer.as_mut_slice(), vec![0; len]);
        }
    }

    #[test]
    fn a_buffer_larger_than_the_address_space_is_refused() {
        assert!(AlignedBuf::new(usize::MAX - 5).is_none());
        assert!(AlignedBuf::new(isize::MAX as usize - BUFFER_ALIGN).is_none());
    }
}
