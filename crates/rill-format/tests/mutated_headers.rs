//! Whatever the bytes of a header, parsing ends in an error or in a layout that can be trusted.

use std::collections::HashSet;

use proptest::collection::vec;
use proptest::prelude::*;
use rill_format::{HeaderEntry, parse_header};

const PAYLOAD_BYTES: u64 = 44;

fn valid_header() -> Vec<u8> {
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"#,
        r#""model.norm.weight":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},"#,
        r#""experts.0.w1.weight_packed":{"dtype":"U8","shape":[2,3],"data_offsets":[6,12]},"#,
        r#""scalar":{"dtype":"F32","shape":[],"data_offsets":[12,16]},"#,
        r#""empty":{"dtype":"F16","shape":[0,5],"data_offsets":[16,16]},"#,
        r#""conv":{"dtype":"F32","shape":[7,1,1],"data_offsets":[16,44]}}   "#,
    );
    header.as_bytes().to_vec()
}

#[test]
fn the_header_that_is_mutated_is_valid() {
    let entries = parse_header("shard", &valid_header(), PAYLOAD_BYTES).unwrap();
    assert_eq!(entries.len(), 5);
    assert_trusted(&entries, PAYLOAD_BYTES);
}

#[test]
fn every_single_byte_change_is_refused_or_harmless() {
    let header = valid_header();
    for i in 0..header.len() {
        for byte in 0..=255 {
            let mut changed = header.clone();
            changed[i] = byte;
            parse(&changed, PAYLOAD_BYTES);
        }
    }
}

#[test]
fn every_cut_is_refused() {
    let header = valid_header();
    let json = header.trim_ascii_end().len();
    for end in 0..json {
        assert!(parse_header("shard", &header[..end], PAYLOAD_BYTES).is_err(), "{end}");
    }
}

proptest! {
    #[test]
    fn mutated_headers_never_panic_nor_overlap(
        edits in vec((any::<prop::sample::Index>(), 0..3u8, replacement()), 1..6),
        payload_bytes in prop_oneof![Just(PAYLOAD_BYTES), 0..64u64, any::<u64>()],
    ) {
        let mut header = valid_header();
        for (at, edit, byte) in edits {
            let i = at.index(header.len());
            match edit {
                0 => header[i] = byte,
                1 => header.insert(i, byte),
                _ => { header.remove(i); }
            }
        }
        parse(&header, payload_bytes);
    }

    /// Layouts that fit, in any order, half of them with one number changed or one tensor moved.
    #[test]
    fn layouts_are_accepted_exactly_when_they_fit(
        (sizes, order) in vec(0..4u64, 0..6).prop_flat_map(|sizes| {
            let order: Vec<usize> = (0..sizes.len()).collect();
            (Just(sizes), Just(order).prop_shuffle())
        }),
        change in proptest::option::of((any::<prop::sample::Index>(), 0..6usize, 0..8u64)),
        spare_bytes in prop_oneof![8 => Just(0), 1 => Just(-1), 1 => 1..3i64],
    ) {
        let mut end = 0;
        let mut tensors: Vec<[u64; 3]> = sizes
            .iter()
            .map(|&n| {
                end += n;
                [n, end - n, end]
            })
            .collect();
        if let Some((tensor, field, value)) = change && !tensors.is_empty() {
            let tensor = tensor.get_mut(&mut tensors);
            match tensor.get_mut(field) {
                Some(number) => *number = value,
                None => *tensor = [tensor[0], value, value + tensor[0]],
            }
        }
        let lines: Vec<String> = order
            .iter()
            .map(|&i| {
                let [dim, begin, end] = tensors[i];
                format!(
                    r#""t{i}":{{"dtype":"U8","shape":[{dim}],"data_offsets":[{begin},{end}]}}"#
                )
            })
            .collect();
        let header = format!("{{{}}}", lines.join(","));
        let last_end = tensors.iter().map(|tensor| tensor[2]).max().unwrap_or(0);
        let payload_bytes = last_end.saturating_add_signed(spare_bytes);
        let accepted = parse_header("shard", header.as_bytes(), payload_bytes).is_ok();
        prop_assert_eq!(accepted, fits(&tensors, payload_bytes));
        parse(header.as_bytes(), payload_bytes);
    }
}

/// The rule again, by marking bytes: each payload byte has one owner, each size is its shape's.
fn fits(tensors: &[[u64; 3]], payload_bytes: u64) -> bool {
    let mut owners = vec![0; payload_bytes as usize];
    for &[dim, begin, end] in tensors {
        if end.checked_sub(begin) != Some(dim) || end > payload_bytes {
            return false;
        }
        for byte in begin..end {
            owners[byte as usize] += 1;
        }
    }
    // An empty tensor owns nothing, but may not lie inside another one.
    let inside = |at: u64| tensors.iter().any(|&[_, begin, end]| begin < at && at < end);
    let stray = tensors.iter().any(|&[dim, begin, _]| dim == 0 && inside(begin));
    owners.iter().all(|&n| n == 1) && !stray
}

fn replacement() -> impl Strategy<Value = u8> {
    prop_oneof![any::<u8>(), prop::sample::select(b"0123456789[]{},:\" ".to_vec())]
}

fn parse(header: &[u8], payload_bytes: u64) {
    match parse_header("shard", header, payload_bytes) {
        Ok(entries) => assert_trusted(&entries, payload_bytes),
        Err(error) => assert!(error.to_string().contains("shard")),
    }
}

fn assert_trusted(entries: &[HeaderEntry], payload_bytes: u64) {
    let mut covered = 0;
    for entry in entries {
        assert_eq!(entry.begin, covered);
        let bytes = entry.shape.iter().product::<u64>() * entry.dtype.size();
        assert_eq!(entry.end - entry.begin, bytes);
        covered = entry.end;
    }
    assert_eq!(covered, payload_bytes);
    let names: HashSet<_> = entries.iter().map(|entry| &entry.name).collect();
    assert_eq!(names.len(), entries.len());
}
