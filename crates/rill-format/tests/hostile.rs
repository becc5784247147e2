//! Broken checkpoints, each made by hand, each refused by name.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::{self, File};
use std::path::Path;

use rill_format::{Checkpoint, Folder, FormatError, TensorId};
use rill_testkit::shard_bytes;

use FormatError as E;

const INDEX: &str = "model.safetensors.index.json";
const LONE: &str = "model.safetensors";

/// A broken checkpoint: its files, the error it must cause, and what the message must contain.
struct Case {
    what: &'static str,
    files: Vec<(&'static str, Vec<u8>)>,
    refused: fn(&FormatError) -> bool,
    says: &'static [&'static str],
}

#[test]
fn each_broken_header_is_refused_naming_file_and_tensor() {
    let deep = format!(r#"{{"w":{}"#, "[".repeat(200_000));
    let long = format!(r#"{{"{}":{F32_4}}}"#, "n".repeat(1025));
    let cases = [
        shard("empty file", vec![], |e| matches!(e, E::HeaderCutOff { found: 0, .. }), &[]),
        shard(
            "cut off in the length",
            vec![9, 0, 0],
            |e| matches!(e, E::HeaderCutOff { expected: 8, found: 3, .. }),
            &["3"],
        ),
        shard(
            "cut off in the header",
            shard_bytes(&format!(r#"{{"w":{F32_4}}}"#), &[])[..20].to_vec(),
            |e| matches!(e, E::HeaderCutOff { found: 20, .. }),
            &["20", "download"],
        ),
        shard(
            "header beyond the format's bound",
            [100_000_001u64.to_le_bytes().as_slice(), b"{}"].concat(),
            |e| matches!(e, E::HeaderTooLarge { found: 100_000_001, .. }),
            &["100000001"],
        ),
        shard(
            "header length of all ones",
            [u64::MAX.to_le_bytes().as_slice(), b"{}"].concat(),
            |e| matches!(e, E::HeaderTooLarge { .. }),
            &[],
        ),
        header("no header", "", &[], is_bad_header, &["'{'"]),
        header("spaces first", " {}", &[], is_bad_header, &["'{'"]),
        header("a list", "[]", &[], is_bad_header, &["'{'"]),
        header("not JSON", "{w", &[], is_bad_header, &["column"]),
        header("two objects", "{}{}", &[], is_bad_header, &["trailing"]),
        header("deep nesting", &deep, &[], is_bad_header, &[r#""w""#]),
        shard(
            "not UTF-8",
            [6u64.to_le_bytes().as_slice(), b"{\"w\xff\":"].concat(),
            is_bad_header,
            &["unicode"],
        ),
        header(
            "metadata of numbers",
            r#"{"__metadata__":{"a":1}}"#,
            &[],
            is_bad_header,
            &["string"],
        ),
        header(
            "metadata twice",
            r#"{"__metadata__":{},"__metadata__":{}}"#,
            &[],
            is_bad_header,
            &["__metadata__"],
        ),
        header("entry is a number", r#"{"w":3}"#, &[], is_bad_header, &[r#""w""#]),
        header(
            "no dtype",
            r#"{"w":{"shape":[1],"data_offsets":[0,4]}}"#,
            &[0; 4],
            is_bad_header,
            &[r#""w""#, "dtype"],
        ),
        header(
            "dtype twice",
            r#"{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            &[0; 4],
            is_bad_header,
            &[r#""w""#, "dtype"],
        ),
        header(
            "unknown field",
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"stride":[1]}}"#,
            &[0; 4],
            is_bad_header,
            &[r#""w""#, "stride"],
        ),
        header(
            "negative dimension",
            r#"{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
            &[0; 4],
            is_bad_header,
            &[r#""w""#, "-1"],
        ),
        header(
            "fractional offset",
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4.0]}}"#,
            &[0; 4],
            is_bad_header,
            &[r#""w""#],
        ),
        header(
            "three offsets",
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#,
            &[0; 4],
            is_bad_header,
            &[r#""w""#],
        ),
        header(
            "name beyond the bound",
            &long,
            &[0; 4],
            |e| matches!(e, E::NameTooLong { found: 1025, .. }),
            &["nnnn"],
        ),
        header(
            "unknown dtype",
            r#"{"w":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#,
            &[0; 8],
            |e| matches!(e, E::UnknownDtype { .. }),
            &[r#""w""#, "I64", "BF16"],
        ),
        header(
            "nine dimensions",
            r#"{"w":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}"#,
            &[0; 1],
            |e| matches!(e, E::RankTooLarge { .. }),
            &[r#""w""#, "8 dimensions"],
        ),
        header(
            "size overflows",
            r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#,
            &[],
            |e| matches!(e, E::SizeOverflow { .. }),
            &[r#""w""#, "4294967296"],
        ),
        header(
            "size overflows but for a zero",
            r#"{"w":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#,
            &[],
            |e| matches!(e, E::SizeOverflow { .. }),
            &[r#""w""#],
        ),
        header(
            "shape and offsets disagree",
            r#"{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,13]}}"#,
            &[0; 13],
            |e| matches!(e, E::SizeMismatch { expected: 12, end: 13, .. }),
            &[r#""w""#, "[2, 3] of BF16", "12"],
        ),
        header(
            "offsets backwards",
            r#"{"w":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}"#,
            &[0; 2],
            |e| matches!(e, E::SizeMismatch { begin: 2, end: 0, .. }),
            &[r#""w""#],
        ),
        header(
            "overlap",
            &two_u8("[0,4]", "[2,6]"),
            &[0; 6],
            |e| matches!(e, E::Overlap { byte: 2, .. }),
            &[r#""a""#, r#""b""#],
        ),
        header(
            "the same bytes twice",
            &two_u8("[0,4]", "[0,4]"),
            &[0; 4],
            |e| matches!(e, E::Overlap { byte: 0, .. }),
            &[r#""a""#, r#""b""#],
        ),
        header(
            "gap between",
            &two_u8("[0,4]", "[5,9]"),
            &[0; 9],
            |e| matches!(e, E::Gap { tensor: Some(_), begin: 4, end: 5, .. }),
            &[r#""b""#],
        ),
        header(
            "gap at the start",
            &two_u8("[5,9]", "[1,5]"),
            &[0; 9],
            |e| matches!(e, E::Gap { tensor: Some(_), begin: 0, end: 1, .. }),
            &[r#""b""#],
        ),
        header(
            "bytes after the last tensor",
            &two_u8("[0,4]", "[4,8]"),
            &[0; 10],
            |e| matches!(e, E::Gap { tensor: None, begin: 8, end: 10, .. }),
            &["8 to 10"],
        ),
        header(
            "payload cut off",
            &two_u8("[0,4]", "[4,8]"),
            &[0; 7],
            |e| matches!(e, E::PayloadCutOff { expected: 8, found: 7, .. }),
            &[r#""b""#, "cut off", "download"],
        ),
        header(
            "offsets at the end of the number range",
            r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}}"#,
            &[0],
            |e| matches!(e, E::Gap { .. }),
            &[r#""w""#],
        ),
        header(
            "a name twice",
            &format!(r#"{{"w":{F32_4},"w":{F32_4}}}"#),
            &[0; 4],
            |e| matches!(e, E::DuplicateTensor { .. }),
            &[r#""w""#],
        ),
        header(
            "a name twice, once escaped",
            &format!(r#"{{"w":{F32_4},"\u0077":{F32_4}}}"#),
            &[0; 4],
            |e| matches!(e, E::DuplicateTensor { .. }),
            &[r#""w""#],
        ),
        header(
            "a name that would colour the terminal",
            &two_u8("[0,4]", "[4,8]").replace('b', r"\u001b[31m"),
            &[0; 7],
            |e| matches!(e, E::PayloadCutOff { .. }),
            &[r"\u{1b}[31m"],
        ),
    ];
    assert!(cases.len() >= 20);
    for case in cases {
        check(&case, LONE);
    }
}

#[test]
fn each_broken_index_is_refused_naming_file_and_tensor() {
    let deep = format!(r#"{{"weight_map":{{"a":{}"#, "[".repeat(200_000));
    let long = "n".repeat(1025);
    let a = || ("1.safetensors", one_u8("a"));
    let b = || ("2.safetensors", one_u8("b"));
    let map = |pairs: &[(&str, &str)]| {
        let lines: Vec<_> = pairs.iter().map(|(t, s)| format!("{t:?}:{s:?}")).collect();
        format!(r#"{{"metadata":{{"total_size":2}},"weight_map":{{{}}}}}"#, lines.join(","))
    };
    let cases = [
        index("not JSON", "{", vec![a()], is_bad_index, &["column"]),
        index("a list", "[]", vec![a()], is_bad_index, &["weight_map"]),
        index("no weight_map", r#"{"metadata":{}}"#, vec![a()], is_bad_index, &["weight_map"]),
        index(
            "weight_map twice",
            r#"{"weight_map":{},"weight_map":{}}"#,
            vec![a()],
            is_bad_index,
            &["weight_map"],
        ),
        index("a number for a shard", r#"{"weight_map":{"a":1}}"#, vec![a()], is_bad_index, &[]),
        index("deep nesting", &deep, vec![a()], is_bad_index, &[]),
        index(
            "name beyond the bound",
            &map(&[(&long, "1.safetensors")]),
            vec![a()],
            is_bad_index,
            &["1024"],
        ),
        index("trailing text", &(map(&[]) + "x"), vec![], is_bad_index, &["trailing"]),
        index("path up", &map(&[("a", "../1.safetensors")]), vec![a()], is_bad_name, &[r#""a""#]),
        index("path down", &map(&[("a", "x/1.safetensors")]), vec![a()], is_bad_name, &[r#""a""#]),
        index(
            "absolute path",
            &map(&[("a", "/1.safetensors")]),
            vec![a()],
            is_bad_name,
            &[r#""a""#],
        ),
        index("backslash", &map(&[("a", r"x\1.safetensors")]), vec![a()], is_bad_name, &[r#""a""#]),
        index("drive", &map(&[("a", "C:1.safetensors")]), vec![a()], is_bad_name, &[r#""a""#]),
        index("the parent itself", &map(&[("a", "..")]), vec![a()], is_bad_name, &[r#""a""#]),
        index("no name", &map(&[("a", "")]), vec![a()], is_bad_name, &[r#""a""#]),
        index(
            "zero byte",
            &map(&[]).replace("{}}", r#"{"a":"1\u0000"}}"#),
            vec![a()],
            is_bad_name,
            &[r#""a""#],
        ),
        index(
            "absent shard",
            &map(&[("a", "1.safetensors"), ("b", "2.safetensors")]),
            vec![a()],
            |e| matches!(e, E::MissingShard { .. }),
            &[r#""b""#, "2.safetensors", "download"],
        ),
        index(
            "tensor that its shard lacks",
            &map(&[("a", "1.safetensors"), ("c", "1.safetensors")]),
            vec![a()],
            |e| matches!(e, E::IndexedTensorMissing { .. }),
            &[r#""c""#, "1.safetensors"],
        ),
        index(
            "tensor assigned to the wrong shard, met before the right one",
            &map(&[("b", "1.safetensors"), ("a", "2.safetensors")]),
            vec![a(), b()],
            |e| matches!(e, E::WrongShard { .. }),
            &[r#""b""#, "1.safetensors", "2.safetensors"],
        ),
        index(
            "tensor assigned to the wrong shard, met after the right one",
            &map(&[("a", "1.safetensors"), ("c", "2.safetensors"), ("b", "2.safetensors")]),
            vec![
                ("1.safetensors", shard_bytes(&two_u8("[0,4]", "[4,8]"), &[0; 8])),
                ("2.safetensors", one_u8("c")),
            ],
            |e| matches!(e, E::WrongShard { .. }),
            &[r#""b""#, "1.safetensors", "2.safetensors"],
        ),
        index(
            "tensor that the index does not name",
            &map(&[("a", "1.safetensors")]),
            vec![("1.safetensors", shard_bytes(&two_u8("[0,4]", "[4,8]"), &[0; 8]))],
            |e| matches!(e, E::UnindexedTensor { .. }),
            &[r#""b""#, "1.safetensors"],
        ),
        index(
            "tensor named twice",
            &map(&[("a", "1.safetensors"), ("a", "1.safetensors")]),
            vec![a()],
            |e| matches!(e, E::IndexedTwice { .. }),
            &[r#""a""#],
        ),
        index(
            "tensor in two shards",
            &map(&[("a", "1.safetensors"), ("b", "2.safetensors")]),
            vec![a(), ("2.safetensors", one_u8("a"))],
            |e| matches!(e, E::DuplicateTensor { .. }),
            &[r#""a""#, "1.safetensors", "2.safetensors"],
        ),
        index(
            "broken shard",
            &map(&[("a", "1.safetensors"), ("b", "2.safetensors")]),
            vec![a(), ("2.safetensors", shard_bytes(&two_u8("[0,4]", "[4,8]"), &[0; 6]))],
            |e| matches!(e, E::PayloadCutOff { .. }),
            &[r#""b""#, "2.safetensors"],
        ),
    ];
    for case in cases {
        check(&case, "safetensors");
    }
}

#[test]
fn deep_nesting_in_ignored_parts_of_the_index_is_no_danger() {
    let depth = 1_000_000;
    let nested = "[".repeat(depth) + &"]".repeat(depth);
    let dir = folder(&[
        (INDEX, format!(r#"{{"metadata":{nested},"weight_map":{{"a":"1"}}}}"#).into_bytes()),
        ("1", one_u8("a")),
    ]);
    assert_eq!(open(dir.path()).unwrap().len(), 1);
}

#[test]
fn folder_without_a_checkpoint_says_what_was_looked_for() {
    let dir = folder(&[("config.json", b"{}".to_vec())]);
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(error, E::NoCheckpoint { .. }), "{error}");
    let message = error.to_string();
    let path = dir.path().display().to_string();
    assert!(message.contains(&path) && message.contains(INDEX), "{message}");
}

#[test]
fn directory_in_place_of_a_shard_is_refused() {
    let dir = folder(&[(INDEX, br#"{"weight_map":{"a":"1.safetensors"}}"#.to_vec())]);
    fs::create_dir(dir.path().join("1.safetensors")).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(error, E::NotAFile { .. }), "{error}");
    assert!(error.to_string().contains("1.safetensors"), "{error}");
}

#[test]
fn missing_tensor_says_where_it_was_looked_for() {
    let dir = folder(&[(LONE, one_u8("a"))]);
    let error = open(dir.path()).unwrap().require("lm_head.weight").unwrap_err();
    assert!(matches!(error, E::MissingTensor { tensors: 1, .. }), "{error}");
    let message = error.to_string();
    let path = dir.path().display().to_string();
    assert!(message.contains(&path) && message.contains("lm_head.weight"), "{message}");
}

#[test]
fn file_that_shrank_after_opening_names_file_tensor_and_byte() {
    let header = two_u8("[0,4]", "[4,8]");
    let dir = folder(&[(LONE, shard_bytes(&header, &[7; 8]))]);
    let checkpoint = open(dir.path()).unwrap();
    let payload_at = 8 + header.len() as u64;
    let file = File::options().write(true).open(dir.path().join(LONE)).unwrap();
    file.set_len(payload_at + 6).unwrap();

    let read = |name| checkpoint.read(checkpoint.require(name).unwrap().id);
    assert_eq!(read("a").unwrap(), [7; 4]);
    let error = read("b").unwrap_err();
    let end = payload_at + 6;
    assert!(
        matches!(error, E::ShortRead { byte, expected: 4, found: 2, .. } if byte == end),
        "{error}"
    );
    let message = error.to_string();
    for part in [LONE, r#""b""#, &end.to_string()] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn reads_outside_a_tensor_are_refused() {
    let dir = folder(&[(LONE, shard_bytes(&two_u8("[0,4]", "[4,8]"), &[7; 8]))]);
    let checkpoint = open(dir.path()).unwrap();
    let id = checkpoint.require("a").unwrap().id;
    let refused = |result: Result<(), FormatError>| {
        let error = result.unwrap_err();
        assert!(matches!(error, E::BadRange { bytes: 4, .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains(LONE) && message.contains(r#""a""#), "{message}");
    };
    refused(checkpoint.read_into(id, &mut [0; 3]));
    refused(checkpoint.read_into(id, &mut [0; 5]));
    refused(checkpoint.read_range_into(id, 2, &mut [0; 3]));
    refused(checkpoint.read_range_into(id, u64::MAX, &mut [0; 2]));
    checkpoint.read_range_into(id, 4, &mut []).unwrap();
}

#[test]
fn whole_file_read_is_refused_above_its_bound() {
    let dir = folder(&[("config.json", vec![b' '; 11])]);
    let folder = Folder::Disk(dir.path().to_owned());
    assert_eq!(folder.read("config.json", 11).unwrap(), [b' '; 11]);
    let error = folder.read("config.json", 10).unwrap_err();
    assert!(matches!(error, E::FileTooLarge { found: 11, max_bytes: 10, .. }), "{error}");
    assert!(error.to_string().contains("config.json"), "{error}");
    let error = folder.read("absent.json", 10).unwrap_err();
    assert!(matches!(error, E::MissingFile { .. }), "{error}");
    assert!(error.to_string().contains("absent.json"), "{error}");
}

#[test]
fn no_changed_byte_of_a_checkpoint_makes_it_panic_or_misread() {
    let good: [(&str, Vec<u8>); 3] = [
        (
            INDEX,
            br#"{"metadata":{"total_size":9},"weight_map":{"a":"1","b":"1","c":"2"}}"#.to_vec(),
        ),
        ("1", shard_bytes(&two_u8("[0,4]", "[4,8]"), b"aaaabbbb")),
        ("2", one_u8("c")),
    ];
    let dir = folder(&good);
    assert_eq!(open(dir.path()).unwrap().len(), 3);
    let (mut opened, mut refused) = (0, 0);
    for (file, bytes) in &good {
        for i in 0..bytes.len() {
            for new in [bytes[i] ^ 1, bytes[i] ^ 0x80, b'9', b'"'] {
                let mut changed = bytes.clone();
                changed[i] = new;
                fs::write(dir.path().join(file), &changed).unwrap();
                match open(dir.path()) {
                    Ok(checkpoint) => {
                        opened += 1;
                        read_all(&checkpoint);
                    }
                    Err(error) => {
                        refused += 1;
                        assert!(error.to_string().contains(&*dir.path().display().to_string()));
                    }
                }
            }
        }
        fs::write(dir.path().join(file), bytes).unwrap();
    }
    // Payload bytes, spaces and ignored metadata may change; nearly everything else may not.
    assert!(opened > 0 && refused > 2 * opened, "{opened} opened, {refused} refused");
}

/// Entry of a tensor that fills a four-byte payload.
const F32_4: &str = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;

fn two_u8(a: &str, b: &str) -> String {
    let entry = |offsets| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}"#);
    format!(r#"{{"a":{},"b":{}}}"#, entry(a), entry(b))
}

fn one_u8(name: &str) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#);
    shard_bytes(&header, &[1])
}

fn shard(
    what: &'static str,
    bytes: Vec<u8>,
    refused: fn(&FormatError) -> bool,
    says: &'static [&'static str],
) -> Case {
    Case { what, files: vec![(LONE, bytes)], refused, says }
}

fn header(
    what: &'static str,
    header: &str,
    payload: &[u8],
    refused: fn(&FormatError) -> bool,
    says: &'static [&'static str],
) -> Case {
    shard(what, shard_bytes(header, payload), refused, says)
}

fn index(
    what: &'static str,
    index: &str,
    mut files: Vec<(&'static str, Vec<u8>)>,
    refused: fn(&FormatError) -> bool,
    says: &'static [&'static str],
) -> Case {
    files.push((INDEX, index.as_bytes().to_vec()));
    Case { what, files, refused, says }
}

fn is_bad_header(error: &FormatError) -> bool {
    matches!(error, E::BadHeader { .. })
}

fn is_bad_index(error: &FormatError) -> bool {
    matches!(error, E::BadIndex { .. })
}

fn is_bad_name(error: &FormatError) -> bool {
    matches!(error, E::BadShardName { .. })
}

fn check(case: &Case, file: &str) {
    let dir = folder(&case.files);
    let error = open(dir.path()).expect_err(case.what);
    assert!((case.refused)(&error), "{}: {error:?}", case.what);
    let message = error.to_string();
    let folder = dir.path().display().to_string();
    for part in [folder.as_str(), file].iter().chain(case.says) {
        assert!(message.contains(part), "{}: {part:?} is not in: {message}", case.what);
    }
}

fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn open(path: &Path) -> Result<Checkpoint, FormatError> {
    Checkpoint::open(Folder::Disk(path.to_owned()))
}

fn read_all(checkpoint: &Checkpoint) {
    let ids: Vec<TensorId> = checkpoint.iter().map(|info| info.id).collect();
    for id in ids {
        let info = checkpoint.info(id);
        assert_eq!(checkpoint.read(id).unwrap().len() as u64, info.bytes);
        assert_eq!(checkpoint.find(info.name).map(|found| found.id), Some(id));
    }
}
