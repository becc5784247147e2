//! How a record lies in the memory it is read into.

use std::ops::Range;

use crate::storage::READ_ALIGN;

/// Some bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of the file.
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Where the parts of a record lie in a slot, and the reads that bring them there. Reads are
/// widened to whole blocks, and parts that share a block or follow one another share a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Of each extent, its bytes in the slot.
    pub parts: Vec<Range<usize>>,
    /// The reads, in order of their place in the slot.
    pub(crate) spans: Vec<Span>,
    /// Bytes of the slot that are used, a multiple of [`READ_ALIGN`].
    pub bytes: usize,
}

/// One read: whole blocks, of which the first `needed` bytes must come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) file: u32,
    pub(crate) offset: u64,
    pub(crate) needed: usize,
    pub(crate) slot_offset: usize,
}

impl Span {
    /// Bytes to ask for.
    pub(crate) fn len(&self) -> usize {
        self.needed.next_multiple_of(READ_ALIGN)
    }
}

impl Placement {
    /// Lays out the parts of one record.
    #[must_use]
    pub fn new(extents: &[Extent]) -> Self {
        let align = READ_ALIGN as u64;
        let mut order: Vec<usize> = (0..extents.len()).collect();
        order.sort_by_key(|&i| (extents[i].file, extents[i].offset));
        let mut placement = Self { parts: vec![0..0; extents.len()], ..Self::default() };
        for i in order {
            let extent = extents[i];
            let start = extent.offset / align * align;
            let end = extent.offset + extent.bytes;
            let joins = placement.spans.last().is_some_and(|span| {
                span.file == extent.file && span.offset + span.len() as u64 >= start
            });
            if !joins {
                placement.spans.push(Span {
                    file: extent.file,
                    offset: start,
                    needed: 0,
                    slot_offset: placement.bytes,
                });
            }
            let span = placement.spans.last_mut().expect("there is one by now");
            span.needed = span.needed.max((end - span.offset) as usize);
            placement.bytes = span.slot_offset + span.len();
            let first = span.slot_offset + (extent.offset - span.offset) as usize;
            placement.parts[i] = first..first + extent.bytes as usize;
        }
        placement
    }
}

/// A record in memory.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    bytes: &'a [u8],
    parts: &'a [Range<usize>],
}

impl<'a> Record<'a> {
    /// The record that lies in `bytes` as a placement says.
    #[must_use]
    pub fn new(bytes: &'a [u8], placement: &'a Placement) -> Self {
        Self { bytes: &bytes[..placement.bytes], parts: &placement.parts }
    }

    /// One part, in the order of the extents.
    ///
    /// # Panics
    /// When there is no such part.
    #[must_use]
    pub fn part(&self, index: usize) -> &'a [u8] {
        &self.bytes[self.parts[index].clone()]
    }

    /// From the first part's first byte to the last part's last, for parts that follow one another.
    #[must_use]
    pub fn joined(&self) -> &'a [u8] {
        match (self.parts.first(), self.parts.last()) {
            (Some(first), Some(last)) => &self.bytes[first.start..last.end],
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extent(file: u32, offset: u64, bytes: u64) -> Extent {
        Extent { file, offset, bytes }
    }

    #[test]
    fn an_aligned_record_is_one_read_and_needs_no_room_beyond_itself() {
        let placement = Placement::new(&[extent(3, 16384, 8192)]);
        assert_eq!(placement.parts[0], 0..8192);
        assert_eq!(placement.bytes, 8192);
        assert_eq!(placement.spans.len(), 1);
    }

    #[test]
    fn stripes_of_two_files_lie_end_to_end() {
        let placement = Placement::new(&[extent(0, 0, 16384), extent(1, 32768, 4096)]);
        assert_eq!(placement.parts, [0..16384, 16384..20480]);
        assert_eq!(placement.spans.len(), 2);
    }

    #[test]
    fn neighbours_share_a_read_whatever_their_order() {
        let placement = Placement::new(&[extent(0, 5000, 100), extent(0, 100, 4900)]);
        assert_eq!(placement.parts, [5000..5100, 100..5000]);
        assert_eq!(placement.spans.len(), 1);
        assert_eq!(placement.spans[0].needed, 5100);
        assert_eq!(placement.bytes, 8192);
    }

    proptest! {
        #[test]
        fn every_part_is_where_its_read_brings_it(
            extents in prop::collection::vec((0u32..3, 0u64..100_000, 1u64..20_000), 1..8)
        ) {
            let extents: Vec<Extent> =
                extents.into_iter().map(|(f, o, b)| extent(f, o, b)).collect();
            let placement = Placement::new(&extents);
            for (part, extent) in placement.parts.iter().zip(&extents) {
                prop_assert_eq!(part.len() as u64, extent.bytes);
                let span = placement.spans.iter().find(|s| {
                    s.file == extent.file
                        && s.offset <= extent.offset
                        && extent.offset + extent.bytes <= s.offset + s.needed as u64
                });
                let span = span.expect("a read covers the part");
                prop_assert_eq!(
                    part.start - span.slot_offset,
                    (extent.offset - span.offset) as usize
                );
            }
            let mut end = 0;
            for span in &placement.spans {
                prop_assert_eq!(span.slot_offset, end);
                prop_assert_eq!(span.offset % READ_ALIGN as u64, 0);
                end += span.len();
            }
            prop_assert_eq!(end, placement.bytes);
        }
    }
}
