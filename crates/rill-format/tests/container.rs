//! The container reader against hostile manifests and records, and records over two drives.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rill_format::container::{
    ALIGN, Bank, Codec, CodecName, Container, Experts, MANIFEST, Manifest, Matrix, RecordLayout,
    Run, SmallFile, Stripe, Trunk, TrunkTensor, checksum, hex,
};

const BF16: Codec = Codec::plain(CodecName::Bf16);

/// A container of one run and two banks; the second bank lies in two folders.
fn manifest(second: &str) -> Manifest {
    let matrix = |rows, cols| Matrix {
        rows,
        cols,
        codec: BF16,
        code_bytes: 2 * rows * cols,
        scale_bytes: 0,
    };
    let stripe = |directory, file: &str, bytes| Stripe { directory, file: file.to_owned(), bytes };
    let align = ALIGN as u64;
    let tensor = |name: &str, offset| TrunkTensor {
        name: name.to_owned(),
        shape: vec![4, 8],
        codec: BF16,
        offset,
        code_bytes: 64,
        scale_bytes: 0,
    };
    Manifest {
        format: "rill".to_owned(),
        version: 0,
        fingerprint: "0123456789abcdef0123456789abcdef".to_owned(),
        directories: vec![".".to_owned(), second.to_owned()],
        files: vec![SmallFile {
            name: "config.json".to_owned(),
            bytes: 2,
            checksum: hex(checksum(b"{}")),
        }],
        trunk: Trunk {
            directory: 0,
            file: "trunk.rill".to_owned(),
            bytes: align,
            runs: vec![Run {
                name: "global".to_owned(),
                offset: 0,
                bytes: align,
                checksum: hex(checksum(&vec![7; ALIGN])),
                tensors: vec![tensor("a", 0), tensor("b", 128)],
            }],
        },
        experts: Some(Experts {
            gate: matrix(64, 96),
            up: matrix(64, 96),
            down: matrix(96, 64),
            record_bytes: 3 * align,
            banks: vec![
                Bank {
                    layer: 1,
                    experts: 3,
                    stripes: vec![stripe(0, "experts-00001.rill", 3 * align)],
                },
                Bank {
                    layer: 4,
                    experts: 2,
                    stripes: vec![stripe(0, "fast.rill", 2 * align), stripe(1, "slow.rill", align)],
                },
            ],
        }),
        checksum: String::new(),
    }
}

fn layout(manifest: &Manifest) -> RecordLayout {
    let Experts { gate, up, down, .. } = manifest.experts.clone().expect("it has experts");
    RecordLayout::new([gate, up, down]).expect("it is small")
}

fn record(layout: &RecordLayout, layer: u32, expert: u32) -> Vec<u8> {
    let mut record = vec![0; layout.record_bytes];
    for index in 0..3 {
        let (codes, _) = layout.matrix_mut(&mut record, index);
        for (i, b) in codes.iter_mut().enumerate() {
            *b = (i as u32 * 31 + layer * 7 + expert * 3 + index as u32) as u8;
        }
    }
    layout.seal(&mut record, layer, expert);
    record
}

fn write(folder: &Path, second: &Path) {
    let manifest = manifest(&second.display().to_string());
    let layout = layout(&manifest);
    fs::write(folder.join("config.json"), "{}").expect("there is room");
    fs::write(folder.join("trunk.rill"), vec![7; ALIGN]).expect("there is room");
    let bank = |layer, n: u32| (0..n).map(move |e| (layer, e));
    let first: Vec<u8> = bank(1, 3).flat_map(|(l, e)| record(&layout, l, e)).collect();
    fs::write(folder.join("experts-00001.rill"), first).expect("there is room");
    let (mut fast, mut slow) = (vec![], vec![]);
    for (l, e) in bank(4, 2) {
        let record = record(&layout, l, e);
        fast.extend(&record[..2 * ALIGN]);
        slow.extend(&record[2 * ALIGN..]);
    }
    fs::write(folder.join("fast.rill"), fast).expect("there is room");
    fs::write(second.join("slow.rill"), slow).expect("there is room");
    fs::write(folder.join(MANIFEST), manifest.to_bytes()).expect("there is room");
}

#[test]
fn a_record_over_two_drives_is_the_record() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(a.path(), b.path());
    let container = Container::open(a.path().to_owned()).unwrap();
    let layout = container.layout().unwrap();
    let mut out = vec![0; layout.record_bytes];
    for (layer, expert) in [(1, 0), (1, 2), (4, 0), (4, 1)] {
        container.read_record(layer, expert, true, &mut out).unwrap();
        assert_eq!(out, record(layout, layer, expert));
    }
    for (layer, expert) in [(1, 3), (4, 2), (2, 0)] {
        let error = container.read_record(layer, expert, true, &mut out).unwrap_err().to_string();
        assert!(error.contains(&format!("layer {layer}, expert {expert}")), "{error}");
    }
    assert_eq!([container.experts(1), container.experts(4), container.experts(2)], [3, 2, 0]);
}

#[test]
fn trunk_tensors_are_read_whole_and_in_parts() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(a.path(), b.path());
    let container = Container::open(a.path().to_owned()).unwrap();
    assert_eq!(container.read_tensor("b").unwrap(), (vec![7; 64], vec![]));
    let mut out = [0; 16];
    container.read_part("b", false, 48, &mut out).unwrap();
    assert_eq!(out, [7; 16]);
    let error = container.read_part("b", false, 49, &mut out).unwrap_err().to_string();
    assert!(error.contains("\"b\"") && error.contains("64 bytes"), "{error}");
    assert!(container.read_tensor("c").unwrap_err().to_string().contains("\"c\""));
    for run in &container.manifest().trunk.runs {
        container.verify_run(run).unwrap();
    }
}

#[test]
fn every_changed_byte_of_a_record_header_is_refused() {
    let manifest = manifest("x");
    let layout = layout(&manifest);
    let good = record(&layout, 4, 1);
    assert!(layout.check(&good, 4, 1, true).is_ok());
    for at in 0..128 {
        for flip in [1, 0x80, 0xff] {
            let mut bad = good.clone();
            bad[at] ^= flip;
            assert!(
                layout.check(&bad, 4, 1, false).is_err() || (64..72).contains(&at),
                "byte {at}"
            );
            assert!(layout.check(&bad, 4, 1, true).is_err(), "byte {at}");
        }
    }
    let wrong_place = layout.check(&good, 4, 0, false).unwrap_err();
    assert_eq!(wrong_place.expected, "layer 4, expert 0");
    assert_eq!(wrong_place.found, "layer 4, expert 1");
    assert_eq!(layout.check(&[0; 7], 4, 1, false).unwrap_err().what, "its length");
    let mut payload = good.clone();
    payload[good.len() - 1] = 1;
    assert!(layout.check(&payload, 4, 1, false).is_ok(), "only on request");
    assert!(layout.check(&payload, 4, 1, true).unwrap_err().what.contains("payload"));
}

#[test]
fn hostile_manifests_are_refused_by_field() {
    type Edit = fn(&mut Manifest);
    fn experts(m: &mut Manifest) -> &mut Experts {
        m.experts.as_mut().expect("it has experts")
    }
    let cases: [(&str, Edit); 41] = [
        ("format", |m| m.format = "rall".into()),
        ("version", |m| m.version = 1),
        ("fingerprint", |m| m.fingerprint = "xyz".into()),
        ("fingerprint", |m| m.fingerprint = "0123456789ABCDEF0123456789ABCDEF".into()),
        ("directories[0]", |m| m.directories[0] = "/".into()),
        ("directories[0]", |m| m.directories.clear()),
        ("directories", |m| m.directories.extend(vec![String::new(); 300])),
        ("files[0].file", |m| m.files[0].name = "../config.json".into()),
        ("files[0].file", |m| m.files[0].name = "..".into()),
        ("files[0].file", |m| m.files[0].name = String::new()),
        ("files[0].file", |m| m.files[0].name = "manifest.json".into()),
        ("files[0].file", |m| m.files[0].name = "C:config.json".into()),
        ("files[0].checksum", |m| m.files[0].checksum = "12".into()),
        ("trunk.directory", |m| m.trunk.directory = 2),
        ("trunk.file", |m| m.trunk.file = "a/b".into()),
        ("trunk.file", |m| m.trunk.file = "config.json".into()),
        ("trunk.bytes", |m| m.trunk.bytes += 1),
        ("trunk.runs[0].offset", |m| m.trunk.runs[0].offset = 64),
        ("trunk.runs[0].bytes", |m| m.trunk.runs[0].bytes = 4096),
        ("trunk.runs[0].bytes", |m| m.trunk.runs[0].bytes = 1 << 20),
        ("trunk.runs[0].checksum", |m| m.trunk.runs[0].checksum.clear()),
        ("tensor \"b\"", |m| m.trunk.runs[0].tensors[1].offset = 32),
        ("tensor \"b\"", |m| m.trunk.runs[0].tensors[1].offset = u64::MAX - 63),
        ("tensor \"b\"", |m| m.trunk.runs[0].tensors[1].code_bytes = u64::MAX),
        ("tensor \"b\"", |m| m.trunk.runs[0].tensors[1].scale_bytes = u64::MAX - 128),
        ("trunk.runs[0].tensors", |m| m.trunk.runs[0].tensors[1].name = "a".into()),
        ("experts.gate.codec.group", |m| experts(m).gate.codec.group = 1 << 20),
        ("experts.up.codec.rate", |m| experts(m).up.codec.rate = 24),
        ("experts.up.codec.group", |m| experts(m).up.codec.group = 32),
        ("experts.down.codec.rate", |m| experts(m).down.codec = Codec::trellis(15, 12)),
        ("experts.down.codec.width", |m| experts(m).down.codec = Codec::trellis(24, 15)),
        ("experts.down.codec.group", |m| {
            experts(m).down.codec = Codec { group: 32, ..Codec::trellis(24, 12) };
        }),
        ("tensor \"a\".rate", |m| m.trunk.runs[0].tensors[0].codec.rate = 1),
        ("tensor \"b\".width", |m| {
            m.trunk.runs[0].tensors[1].codec =
                Codec { width: 4, ..Codec::grouped(CodecName::Q8, 16) };
        }),
        ("experts", |m| experts(m).up.code_bytes = u64::MAX),
        ("experts.record_bytes", |m| experts(m).record_bytes = 0),
        ("experts.banks[1].layer", |m| experts(m).banks[1].layer = 1),
        ("experts.banks[0].experts", |m| experts(m).banks[0].experts = 0),
        ("experts.banks[0].experts", |m| experts(m).banks[0].experts = u32::MAX),
        ("experts.banks[1].stripes", |m| experts(m).banks[1].stripes[1].bytes = 1),
        ("experts.banks[1].stripes", |m| {
            experts(m).banks[1].stripes.pop();
        }),
    ];
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(a.path(), b.path());
    Container::open(a.path().to_owned()).unwrap();
    for (field, edit) in cases {
        let mut manifest = manifest(&b.path().display().to_string());
        edit(&mut manifest);
        fs::write(a.path().join(MANIFEST), manifest.to_bytes()).unwrap();
        let error = Container::open(a.path().to_owned()).expect_err(field).to_string();
        assert!(error.contains(MANIFEST) && error.contains(field), "{field}: {error}");
    }
}

#[test]
fn manifests_that_are_no_manifest_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let good = manifest("x").to_bytes();
    let text = String::from_utf8(good.clone()).unwrap();
    let cases = [
        Vec::new(),
        b"{}".to_vec(),
        b"[]\n".to_vec(),
        good[..good.len() - 1].to_vec(),
        [&good[..], b" "].concat(),
        text.replace("rill", "rill ").into_bytes(),
        vec![0xff; 4096],
        b"  \"checksum\": \"0000000000000000\"\n}\n".to_vec(),
    ];
    for bytes in cases {
        fs::write(dir.path().join(MANIFEST), &bytes).unwrap();
        assert!(Container::open(dir.path().to_owned()).is_err(), "{:?}", bytes.get(..40));
    }
    // Sealed, but with a field too many or too few.
    for (from, to) in
        [("\"version\": 0,", "\"version\": 0,\n  \"extra\": 1,"), ("\"version\": 0,", "")]
    {
        let zeros = text.clone();
        let digits = zeros.len() - 4 - 16;
        let mut edited = zeros;
        edited.replace_range(digits..digits + 16, "0000000000000000");
        let mut edited = edited.replacen(from, to, 1);
        let sum = hex(checksum(edited.as_bytes()));
        let digits = edited.len() - 4 - 16;
        edited.replace_range(digits..digits + 16, &sum);
        fs::write(dir.path().join(MANIFEST), edited).unwrap();
        let error = Container::open(dir.path().to_owned()).unwrap_err().to_string();
        assert!(error.contains("its JSON"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn changed_bytes_of_a_manifest_never_panic_and_never_pass(
        edits in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4),
    ) {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(a.path(), b.path());
        let good = fs::read(a.path().join(MANIFEST)).unwrap();
        let mut bytes = good.clone();
        for (index, flip) in edits {
            let at = index.index(bytes.len());
            bytes[at] ^= flip;
        }
        fs::write(a.path().join(MANIFEST), &bytes).unwrap();
        let opened = Container::open(a.path().to_owned());
        prop_assert_eq!(opened.is_ok(), bytes == good);
    }
}
