//! A slice that several threads take parts of.
#![expect(unsafe_code, reason = "a counter hands out parts of a slice that do not overlap")]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A slice in parts of equal length, the last one perhaps shorter, each given out once.
pub(super) struct Parts<'a, T> {
    items: *mut T,
    len: usize,
    per_part: usize,
    next: AtomicUsize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: sharing it lets threads take items, each by one of them, as if they were sent there; the
// rest of it is numbers.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    /// # Panics
    /// When `per_part` is 0.
    pub(super) fn new(items: &'a mut [T], per_part: usize) -> Self {
        assert!(per_part > 0);
        let (items, len) = (items.as_mut_ptr(), items.len());
        Self { items, len, per_part, next: AtomicUsize::new(0), borrow: PhantomData }
    }

    /// The next part and the place of its first item, until there are no more.
    pub(super) fn take(&self) -> Option<(usize, &'a mut [T])> {
        // No thread asks again after the end, so the counter stays near it. What a part's thread
        // writes reaches the caller through the end of the region, not through this counter.
        let first = self.next.fetch_add(1, Ordering::Relaxed).saturating_mul(self.per_part);
        if first >= self.len {
            return None;
        }
        let len = self.per_part.min(self.len - first);
        // SAFETY: first + len <= self.len, so the items lie in the slice that is borrowed mutably for
        // 'a; the counter gives each `first` once, and parts begin `per_part` items apart and are
        // not longer, so none overlaps another.
        let part = unsafe { std::slice::from_raw_parts_mut(self.items.add(first), len) };
        Some((first, part))
    }
}

#[cfg(test)]
mod tests {
    use super::Parts;

    #[test]
    fn every_item_is_given_once() {
        for (len, per_part) in [(0, 1), (1, 1), (7, 3), (9, 3), (5, 8)] {
            let mut items = vec![0u8; len];
            let parts = Parts::new(&mut items, per_part);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while let Some((first, part)) = parts.take() {
                            assert_eq!(first % per_part, 0);
                            assert!(part.len() == per_part || first + part.len() == len);
                            part.iter_mut().for_each(|item| *item += 1);
                        }
                    });
                }
            });
            assert_eq!(items, vec![1; len], "{len} in parts of {per_part}");
        }
    }
}
