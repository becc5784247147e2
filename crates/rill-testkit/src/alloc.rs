//! A global allocator that counts live bytes, for tests that hold code to a memory ceiling.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Passes every request to the system allocator and keeps the live and the peak byte count of the
/// whole process. Install it in a test binary of its own, with one test in it:
///
/// ```
/// # use rill_testkit::PeakAlloc;
/// #[global_allocator]
/// static ALLOC: PeakAlloc = PeakAlloc::new();
/// # fn main() {
/// let before = ALLOC.restart_peak();
/// let work = vec![0u8; 1 << 20];
/// assert!(ALLOC.peak_bytes() - before >= 1 << 20);
/// # drop(work);
/// # }
/// ```
pub struct PeakAlloc {
    live_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
}

impl PeakAlloc {
    /// An allocator that has handed out nothing.
    #[expect(
        clippy::new_without_default,
        reason = "it is only ever a static, which needs a const fn"
    )]
    pub const fn new() -> Self {
        Self { live_bytes: AtomicUsize::new(0), peak_bytes: AtomicUsize::new(0) }
    }

    /// Bytes allocated and not yet freed.
    pub fn live_bytes(&self) -> usize {
        self.live_bytes.load(Relaxed)
    }

    /// The most bytes that were live at once since the last [`restart_peak`](Self::restart_peak).
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(Relaxed)
    }

    /// Starts a new measurement and returns the live bytes it starts from.
    pub fn restart_peak(&self) -> usize {
        let live_bytes = self.live_bytes();
        self.peak_bytes.store(live_bytes, Relaxed);
        live_bytes
    }

    fn add(&self, bytes: usize) {
        let live_bytes = self.live_bytes.fetch_add(bytes, Relaxed) + bytes;
        self.peak_bytes.fetch_max(live_bytes, Relaxed);
    }

    fn sub(&self, bytes: usize) {
        self.live_bytes.fetch_sub(bytes, Relaxed);
    }
}

// The default `alloc_zeroed` and `realloc` go through `alloc` and `dealloc`, so a growing vector
// counts old and new storage together: the worst case, which is what a ceiling is about.
#[expect(unsafe_code, reason = "a global allocator is an unsafe trait; this one only counts")]
// SAFETY: every pointer comes from and returns to `System` with the caller's own layout, and the
// counters neither allocate nor panic.
unsafe impl GlobalAlloc for PeakAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise about `layout` is passed on unchanged.
        let block = unsafe { System.alloc(layout) };
        if !block.is_null() {
            self.add(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `block` came from `alloc` above with this `layout`, as the caller promises.
        unsafe { System.dealloc(block, layout) };
        self.sub(layout.size());
    }
}
