//! Recordings of routing, whole and broken.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;

use rill_stream::{Geometry, StreamError, Trace};

#[test]
fn recordings_made_by_other_programs_are_read() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let trace = Trace::read(&data.join("kimi_linear_300_tokens.safetensors")).unwrap();
    assert_eq!(trace.geometry(), Geometry { n_layers: 26, n_experts: 256 });
    assert_eq!((trace.n_tokens(), trace.top_k()), (300, 8));
    let trace = Trace::read(&data.join("kimi_k3_12_tokens.safetensors")).unwrap();
    assert_eq!(trace.geometry(), Geometry { n_layers: 92, n_experts: 896 });
    assert_eq!((trace.n_tokens(), trace.top_k()), (12, 16));
}

#[test]
fn a_written_recording_reads_back_equal_and_others_can_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.safetensors");
    fs::write(&path, "an older recording").unwrap();
    small().write(&path, "made up, \"quoted\"").unwrap();
    // Ten experts, although no id is above 5.
    assert_eq!(Trace::read(&path).unwrap(), small());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a file was left aside");

    let bytes = fs::read(&path).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = theirs.tensor("expert_ids").unwrap();
    assert_eq!((ids.dtype(), ids.shape()), (safetensors::Dtype::I16, &[2, 3, 2][..]));
    assert_eq!(ids.data()[..4], [0, 0, 1, 0]);
}

#[test]
fn a_recording_that_cannot_be_written_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absent").join("trace.safetensors");
    let error = small().write(&path, "").unwrap_err();
    assert!(error.to_string().contains("trace.safetensors"), "{error}");
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let whole = bytes();
    for end in 0..whole.len() {
        Trace::parse("t", &whole[..end]).unwrap_err();
    }
    let longer = [&whole[..], &[0, 0]].concat();
    Trace::parse("t", &longer).unwrap_err();
}

#[test]
fn no_changed_byte_panics_or_goes_unchecked() {
    let whole = bytes();
    for at in 0..whole.len() {
        for value in [0, 1, b'"', b'9', b'{', 0x7f, 0x80, 0xff] {
            let mut changed = whole.clone();
            changed[at] = value;
            if let Ok(trace) = Trace::parse("t", &changed) {
                let Geometry { n_layers, n_experts } = trace.geometry();
                for token in 0..trace.n_tokens() {
                    for layer in 0..n_layers {
                        let chosen = trace.chosen(token, layer);
                        assert!(chosen.iter().all(|&id| u32::from(id) < n_experts));
                    }
                }
            }
        }
    }
}

#[test]
fn broken_headers_say_what_is_wrong() {
    let ids = [0u16, 1, 2, 3].map(u16::to_le_bytes).concat();
    for (header, message) in [
        ("", "header should be"),
        ("[]", "header should be"),
        (r#"{"expert_ids":{"dtype":"I16","shape":[1,2,2]}}"#, "data_offsets"),
        (r#"{"ids":{"dtype":"I16","shape":[1,2,2],"data_offsets":[0,8]}}"#, "unknown field `ids`"),
        (
            r#"{"expert_ids":{"dtype":"I32","shape":[1,1,2],"data_offsets":[0,8]}}"#,
            r#"I16, found "I32""#,
        ),
        (
            r#"{"expert_ids":{"dtype":"I16","shape":[1,2,2],"data_offsets":[0,6]}}"#,
            "[0, 8], the rest of the file, found [0, 6]",
        ),
        (
            r#"{"expert_ids":{"dtype":"I16","shape":[1,2,3],"data_offsets":[0,8]}}"#,
            "4 ids, found [1, 2, 3]",
        ),
        (
            r#"{"expert_ids":{"dtype":"I16","shape":[2,4294967296,4294967296],"data_offsets":[0,8]}}"#,
            "4 ids",
        ),
        (
            r#"{"expert_ids":{"dtype":"I16","shape":[4,2],"data_offsets":[0,8]}}"#,
            "header should be",
        ),
        (
            r#"{"__metadata__":{"n_experts":"many"},"expert_ids":{"dtype":"I16","shape":[1,2,2],"data_offsets":[0,8]}}"#,
            "a whole number",
        ),
        (
            r#"{"__metadata__":{"n_experts":"3"},"expert_ids":{"dtype":"I16","shape":[1,2,2],"data_offsets":[0,8]}}"#,
            "expert of token 0, layer 1 should be below 3, found 3",
        ),
        (
            r#"{"__metadata__":{"n_experts":"99999"},"expert_ids":{"dtype":"I16","shape":[1,2,2],"data_offsets":[0,8]}}"#,
            "from 1 to 32768, found 99999",
        ),
    ] {
        let error = Trace::parse("t.safetensors", &file(header, &ids)).unwrap_err().to_string();
        assert!(error.starts_with("t.safetensors: ") && error.contains(message), "{error}");
    }
}

#[test]
fn impossible_choices_say_where_they_are() {
    let header = r#"{"expert_ids":{"dtype":"I16","shape":[2,1,2],"data_offsets":[0,8]}}"#;
    for (ids, message) in [
        ([0, 1, 2, 2u16], "token 1, layer 0 should be chosen once, found 2 twice"),
        ([0, 1, 2, 0xffff], "expert id should be 0 or more, found -1"),
    ] {
        let bytes = file(header, &ids.map(u16::to_le_bytes).concat());
        let error = Trace::parse("t", &bytes).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    // The same expert at different tokens is what routing is like.
    let bytes = file(header, &[0, 1, 1, 0u16].map(u16::to_le_bytes).concat());
    Trace::parse("t", &bytes).unwrap();
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let geometry = |n_layers, n_experts| Geometry { n_layers, n_experts };
    for (geometry, top_k, n_ids, message) in [
        (geometry(2, 0), 1, 2, "number of experts"),
        (geometry(2, u32::MAX), 1, 2, "number of experts"),
        (geometry(0, 4), 1, 2, "number of layers"),
        (geometry(u32::MAX, 4), 1, 2, "number of layers"),
        (geometry(2, 4), 0, 2, "experts per choice"),
        (geometry(2, 4), 5, 10, "experts per choice"),
        (geometry(2, 4), 1, 3, "number of ids"),
        (geometry(2, 4), 1, 0, "number of ids"),
    ] {
        let error = Trace::new("t", geometry, top_k, vec![0; n_ids]).unwrap_err();
        assert!(matches!(error, StreamError::Trace { .. }));
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn what_is_not_a_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = Trace::read(folder.path()).unwrap_err();
    assert!(matches!(error, StreamError::NotAFile { .. }), "{error}");
    let error = Trace::read(&folder.path().join("absent")).unwrap_err();
    assert!(matches!(error, StreamError::Io { .. }), "{error}");
}

/// Two tokens, three layers, two of ten experts each.
fn small() -> Trace {
    let ids = vec![0, 1, 2, 3, 4, 5, 5, 0, 0, 2, 1, 3];
    Trace::new("small", Geometry { n_layers: 3, n_experts: 10 }, 2, ids).unwrap()
}

fn bytes() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.safetensors");
    small().write(&path, "small").unwrap();
    fs::read(&path).unwrap()
}

fn file(header: &str, payload: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), payload].concat()
}
