//! Memory that direct reads can go to.
//!
//! Large buffers come straight from the system and go straight back: an allocator would keep what is
//! given up, and would write zeros into what it hands out again, so that a buffer took memory before
//! it held anything.

use std::slice;

use crate::storage::READ_ALIGN;

/// Alignment of a buffer's first byte, as direct reads need it.
pub const BUFFER_ALIGN: usize = READ_ALIGN;

/// Zeroed bytes whose first is aligned to [`BUFFER_ALIGN`]. The system hands pages out as they are
/// first written, so a buffer costs nothing until it is used.
#[derive(Debug)]
pub struct AlignedBuf {
    pages: Pages,
    len: usize,
}

impl AlignedBuf {
    /// A buffer of `len` bytes; `None` when there is no memory for it.
    #[must_use]
    pub fn new(len: usize) -> Option<Self> {
        // One page at least, because nothing cannot be mapped.
        let bytes = len.max(1).checked_next_multiple_of(BUFFER_ALIGN)?;
        Some(Self { pages: Pages::new(bytes)?, len })
    }

    /// The bytes.
    #[must_use]
    #[expect(unsafe_code, reason = "memory from the system")]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the pages are mapped, zeroed or written since, at least `len` bytes, and owned by
        // this buffer until it is dropped.
        unsafe { slice::from_raw_parts(self.pages.first, self.len) }
    }

    /// The bytes, to write.
    #[expect(unsafe_code, reason = "memory from the system")]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed by nobody else while `self` is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.pages.first, self.len) }
    }
}

/// Whole pages of memory.
#[derive(Debug)]
struct Pages {
    first: *mut u8,
    bytes: usize,
}

#[expect(unsafe_code, reason = "memory from the system")]
// SAFETY: the pages belong to whoever has this value; nothing about them depends on a thread.
unsafe impl Send for Pages {}
#[expect(unsafe_code, reason = "memory from the system")]
// SAFETY: a shared reference gives shared access only.
unsafe impl Sync for Pages {}

#[cfg(unix)]
#[expect(unsafe_code, reason = "memory from the system")]
impl Pages {
    fn new(bytes: usize) -> Option<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the system's choice touches nothing that exists.
        let first = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, kind) };
        Some(Self { first: first.ok()?.cast(), bytes })
    }
}

#[cfg(unix)]
impl Drop for Pages {
    #[expect(unsafe_code, reason = "memory from the system")]
    fn drop(&mut self) {
        // SAFETY: mapped with this size by `new`, and nobody has a reference any more. It can fail
        // only for arguments that are wrong.
        let _ = unsafe { rustix::mm::munmap(self.first.cast(), self.bytes) };
    }
}

#[cfg(not(unix))]
#[expect(unsafe_code, reason = "memory from the system")]
impl Pages {
    fn layout(bytes: usize) -> Option<std::alloc::Layout> {
        std::alloc::Layout::from_size_align(bytes, BUFFER_ALIGN).ok()
    }

    fn new(bytes: usize) -> Option<Self> {
        let layout = Self::layout(bytes)?;
        // SAFETY: one page at least, so not of size zero.
        let first = unsafe { std::alloc::alloc_zeroed(layout) };
        if first.is_null() { None } else { Some(Self { first, bytes }) }
    }
}

#[cfg(not(unix))]
impl Drop for Pages {
    #[expect(unsafe_code, reason = "memory from the system")]
    fn drop(&mut self) {
        let layout = Self::layout(self.bytes).expect("it was one when the pages were taken");
        // SAFETY: allocated with this layout by `new`.
        unsafe { std::alloc::dealloc(self.first, layout) };
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
            buffer.as_mut_slice().fill(7);
            assert!(buffer.as_slice().iter().all(|byte| *byte == 7));
        }
    }

    #[test]
    fn a_buffer_larger_than_the_address_space_is_refused() {
        assert!(AlignedBuf::new(usize::MAX - 5).is_none());
        assert!(AlignedBuf::new(isize::MAX as usize - BUFFER_ALIGN).is_none());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_buffer_takes_memory_when_it_is_written_and_gives_it_back() {
        let resident = || crate::machine::own_memory().expect("Linux tells").resident_bytes;
        let before = resident();
        let mut buffer = AlignedBuf::new(256 << 20).expect("address space");
        assert!(resident() < before + (64 << 20), "before it is written");
        buffer.as_mut_slice()[..128 << 20].fill(1);
        assert!(resident() > before + (100 << 20), "after half of it is written");
        drop(buffer);
        assert!(resident() < before + (64 << 20), "after it is gone");
    }
}
