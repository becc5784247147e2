//! The container reader against hostile manifests and records, and records over two drives.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rill_format::FormatError;
use rill_format::container::{
    ALIGN, Bank, Codec, CodecName, Container, Experts, MANIFEST, Manifest, Matrix, RecordLayout,
    Run, SmallFile, Stripe, Trunk, TrunkTensor, VERSION, checksum, hex,
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
        version: VERSION,
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
                    records: None,
                    stripes: vec![stripe(0, "experts-00001.rill", 3 * align)],
                },
                Bank {
                    layer: 4,
                    experts: 2,
                    records: None,
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

type Edit = fn(&mut Manifest);

fn experts(m: &mut Manifest) -> &mut Experts {
    m.experts.as_mut().expect("it has experts")
}

/// Opens the container in a folder with an edited manifest, which must be refused.
fn refused(folder: &Path, mut manifest: Manifest, (field, edit): (&str, Edit)) {
    edit(&mut manifest);
    fs::write(folder.join(MANIFEST), manifest.to_bytes()).expect("there is room");
    let error = Container::open(folder.to_owned()).expect_err(field).to_string();
    assert!(error.contains(MANIFEST) && error.contains(field), "{field}: {error}");
}

#[test]
fn a_container_of_another_version_is_refused_by_its_version_whatever_else_it_has() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manifest = manifest(&b.path().display().to_string());
    for version in [0, 2, u32::MAX] {
        let text = String::from_utf8(Manifest { version, ..manifest.clone() }.to_bytes()).unwrap();
        // As it is, without a field, with another one, and without a checksum that this version would take.
        let without = text.replacen("\"fingerprint\"", "\"name\"", 1);
        for text in [text.clone(), without, text.replace("checksum", "sum")] {
            fs::write(a.path().join(MANIFEST), text).unwrap();
            assert!(Container::is_container(a.path()));
            let error = Container::open(a.path().to_owned()).unwrap_err();
            let FormatError::ContainerVersion { ref file, expected: 1, found } = error else {
                panic!("{error}");
            };
            assert!(file.ends_with(MANIFEST) && found == u64::from(version));
            let message = error.to_string();
            assert!(message.contains("again") && !message.contains("damaged"), "{message}");
            assert_eq!(message.contains("newer"), version > 1, "{message}");
        }
    }
}

#[test]
fn hostile_manifests_are_refused_by_field() {
    let cases: [(&str, Edit); 42] = [
        ("format", |m| m.format = "rall".into()),
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
        ("tensor \"b\"", |m| m.trunk.runs[0].tensors[1].codec.name = CodecName::Mxfp4z),
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
        ("experts.banks[1].records", |m| experts(m).banks[1].records = Some(vec![[0, 3], [3, 3]])),
        ("experts.banks[1].stripes", |m| experts(m).banks[1].stripes[1].bytes = 1),
        ("experts.banks[1].stripes", |m| {
            experts(m).banks[1].stripes.pop();
        }),
    ];
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(a.path(), b.path());
    Container::open(a.path().to_owned()).unwrap();
    for case in cases {
        refused(a.path(), manifest(&b.path().display().to_string()), case);
    }
}

/// An expert and the bytes of codes of its gate, up and down.
type Lengths = (u32, [u64; 3]);

/// Two banks' experts, in the order in which their records lie there.
const LENGTHS: [(u32, &[Lengths]); 2] = [
    (1, &[(2, [40_000, 5, 0]), (0, [1, 2, 3]), (1, [16_000, 130, 400])]),
    (4, &[(1, [0, 70_000, 70_000]), (0, [30_000, 30_000, 20_000])]),
];

/// A container whose records differ in size; the second bank lies in two folders, divided 1 to 2.
fn variable_manifest(second: &str) -> Manifest {
    let mut manifest = manifest(second);
    let experts = experts(&mut manifest);
    let name = CodecName::Mxfp4z;
    for matrix in [&mut experts.gate, &mut experts.up, &mut experts.down] {
        (matrix.codec, matrix.code_bytes) = (Codec { name, ..BF16 }, 70_000);
    }
    let align = ALIGN as u64;
    experts.record_bytes = 9 * align;
    experts.banks[0].records = Some(vec![[3, 1], [4, 2], [0, 3]]);
    experts.banks[0].stripes[0].bytes = 10 * align;
    experts.banks[1].records = Some(vec![[9, 5], [0, 9]]);
    experts.banks[1].stripes[0].bytes = 4 * align;
    experts.banks[1].stripes[1].bytes = 8 * align;
    manifest
}

fn variable_record(manifest: &Manifest, layer: u32, expert: u32, lengths: [u64; 3]) -> Vec<u8> {
    let own = layout(manifest).with_code_bytes(lengths).expect("they are below 70,000");
    record(&own, layer, expert)
}

fn write_variable(folder: &Path, second: &Path) -> Manifest {
    write(folder, second);
    let manifest = variable_manifest(&second.display().to_string());
    let (mut whole, mut fast, mut slow) = (vec![], vec![], vec![]);
    for (layer, records) in LENGTHS {
        for &(expert, lengths) in records {
            let record = variable_record(&manifest, layer, expert, lengths);
            if layer == 1 {
                whole.extend(record);
                continue;
            }
            // A third, rounded up.
            let units = record.len() / ALIGN;
            let (first, rest) = record.split_at(units.div_ceil(3) * ALIGN);
            fast.extend(first);
            slow.extend(rest);
        }
    }
    fs::write(folder.join("experts-00001.rill"), whole).expect("there is room");
    fs::write(folder.join("fast.rill"), fast).expect("there is room");
    fs::write(second.join("slow.rill"), slow).expect("there is room");
    fs::write(folder.join(MANIFEST), manifest.to_bytes()).expect("there is room");
    manifest
}

#[test]
fn records_of_different_sizes_come_back_whole_from_one_file_and_from_two() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manifest = write_variable(a.path(), b.path());
    let container = Container::open(a.path().to_owned()).unwrap();
    let layout = container.layout().unwrap();
    assert_eq!(layout.record_bytes, 9 * ALIGN, "a slot holds the largest");
    let files = container.data_files();
    for (layer, records) in LENGTHS {
        for &(expert, lengths) in records {
            let expected = variable_record(&manifest, layer, expert, lengths);
            assert_eq!(container.record_bytes(layer, expert), expected.len());
            let mut out = vec![0; expected.len()];
            container.read_record(layer, expert, true, &mut out).unwrap();
            assert!(out == expected, "layer {layer}, expert {expert}");
            // By extents, as the engine reads.
            let mut joined: Vec<u8> = Vec::new();
            for extent in container.record_extents(layer, expert) {
                let rill_format::DataPlace::Disk(path) = &files[extent.file].place else {
                    unreachable!("all files are on disk")
                };
                let bytes = fs::read(path).unwrap();
                assert_eq!(bytes.len() as u64, files[extent.file].bytes);
                joined.extend(&bytes[extent.offset as usize..][..extent.bytes as usize]);
            }
            assert!(joined == expected, "layer {layer}, expert {expert}");
            let (own, _) = layout.own(&out, layer, expert).unwrap();
            for (index, bytes) in lengths.into_iter().enumerate() {
                assert_eq!(own.matrix(&out, index).0.len() as u64, bytes);
            }
            // A buffer of the largest record's size is not this record's.
            let mut slot = vec![0; layout.record_bytes + ALIGN];
            assert!(container.read_record(layer, expert, true, &mut slot).is_err());
        }
    }
    assert_eq!([container.record_bytes(1, 3), container.record_bytes(2, 0)], [0, 0]);
    assert!(container.record_extents(1, 3).is_empty());
}

#[test]
fn a_record_too_small_for_all_stripes_begins_in_the_first() {
    let stripe = |units| Stripe { directory: 0, file: String::new(), bytes: units * ALIGN as u64 };
    let stripes = vec![stripe(1), stripe(5), stripe(2)];
    let bank = Bank { layer: 0, experts: 1, records: None, stripes };
    for (units, parts) in [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 2, 0]), (5, [1, 3, 1])] {
        let found: Vec<u64> = bank.divide(units * ALIGN as u64).map(|b| b / ALIGN as u64).collect();
        assert_eq!(found, parts, "{units}");
    }
    assert!(bank.divide(8 * ALIGN as u64).eq(bank.stripes.iter().map(|stripe| stripe.bytes)));
}

#[test]
fn hostile_places_of_records_are_refused_by_field() {
    fn records(m: &mut Manifest) -> &mut Vec<[u64; 2]> {
        experts(m).banks[0].records.as_mut().expect("records differ in size")
    }
    let cases: [(&str, Edit); 19] = [
        ("banks[0].records", |m| experts(m).banks[0].records = None),
        ("banks[0].records", |m| records(m).push([6, 1])),
        ("banks[0].records", |m| records(m).truncate(2)),
        ("banks[0].records", |m| records(m).clear()),
        // A gap, an overlap, two in one place, none at the beginning.
        ("banks[0].records", |m| records(m)[1] = [5, 2]),
        ("banks[0].records", |m| records(m)[1] = [3, 2]),
        ("banks[0].records", |m| records(m)[1] = [0, 3]),
        ("banks[0].records", |m| records(m)[2] = [1, 2]),
        ("banks[0].records", |m| records(m)[1] = [4, 0]),
        ("experts.record_bytes", |m| records(m)[1] = [4, 10]),
        ("experts.record_bytes", |m| records(m)[1] = [4, u64::MAX]),
        ("experts.record_bytes", |m| records(m)[1] = [u64::MAX, u64::MAX]),
        ("experts.record_bytes", |m| experts(m).record_bytes -= 1),
        ("experts.record_bytes", |m| experts(m).banks.clear()),
        // More than three matrices of the manifest's lengths can take.
        ("experts.record_bytes", |m| {
            experts(m).record_bytes = 14 * ALIGN as u64;
            records(m)[1] = [4, 14];
        }),
        ("experts", |m| experts(m).gate.code_bytes = 1 << 32),
        ("banks[0].stripes", |m| experts(m).banks[0].stripes[0].bytes = 8 * ALIGN as u64),
        ("banks[0].stripes", |m| experts(m).banks[0].stripes[0].bytes = 1 << 62),
        ("banks[1].stripes", |m| experts(m).banks[1].stripes[0].bytes = 0),
    ];
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manifest = write_variable(a.path(), b.path());
    for case in cases {
        refused(a.path(), manifest.clone(), case);
    }
    // Consistent with itself, but the files are of other sizes.
    let mut longer = manifest;
    records(&mut longer)[1] = [4, 3];
    fs::write(a.path().join(MANIFEST), longer.to_bytes()).unwrap();
    let error = Container::open(a.path().to_owned()).unwrap_err().to_string();
    assert!(error.contains("experts-00001.rill") && error.contains("its size"), "{error}");
}

#[test]
fn headers_that_lie_about_lengths_are_refused_whatever_their_checksum_says() {
    let manifest = variable_manifest("x");
    let layout = layout(&manifest);
    let good = variable_record(&manifest, 4, 1, [0, 70_000, 70_000]);
    assert!(layout.check(&good, 4, 1, true).is_ok());
    for at in 0..128 {
        for flip in [1, 0x80, 0xff] {
            let mut bad = good.clone();
            bad[at] ^= flip;
            assert!(layout.check(&bad, 4, 1, true).is_err(), "byte {at}");
            // Hostile rather than damaged: its own checksum is right.
            let sum = checksum(&bad[..120]).to_le_bytes();
            bad[120..128].copy_from_slice(&sum);
            let harmless = at >= 120;
            assert_eq!(layout.check(&bad, 4, 1, true).is_ok(), harmless, "byte {at}");
            if let Ok((own, _)) = layout.own(&bad, 4, 1) {
                // Within the record, whatever it says.
                assert!((64..72).contains(&at) || harmless, "byte {at}");
                assert_eq!(own.record_bytes, good.len());
            }
        }
    }
    for lengths in [[0, 70_001, 69_999], [u32::MAX; 3], [0, 70_000, 70_001], [70_000; 3]] {
        let mut bad = good.clone();
        for (i, length) in lengths.into_iter().enumerate() {
            bad[44 + 8 * i..48 + 8 * i].copy_from_slice(&length.to_le_bytes());
        }
        let sum = checksum(&bad[..120]).to_le_bytes();
        bad[120..128].copy_from_slice(&sum);
        assert!(layout.check(&bad, 4, 1, false).is_err(), "{lengths:?}");
    }
    for n in [0, 7, 127] {
        assert_eq!(layout.check(&good[..n], 4, 1, false).unwrap_err().what, "its length");
    }
    assert_eq!(layout.check(&good[..128], 4, 1, false).unwrap_err().what, "its length");
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
        [("\"version\": 1,", "\"version\": 1,\n  \"extra\": 1,"), ("\"version\": 1,", "")]
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
    fn places_of_records_never_panic_whatever_they_are(
        records in prop::collection::vec((0u64..12, 0u64..12), 3),
        huge in prop::option::of((0usize..3, any::<u64>(), any::<u64>())),
        stripe_units in 0u64..20,
    ) {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut manifest = write_variable(a.path(), b.path());
        let mut records: Vec<[u64; 2]> = records.into_iter().map(|(at, n)| [at, n]).collect();
        if let Some((i, at, n)) = huge {
            records[i] = [at, n];
        }
        let good = records == [[3, 1], [4, 2], [0, 3]] && stripe_units >= 9;
        let bank = &mut experts(&mut manifest).banks[0];
        bank.records = Some(records);
        bank.stripes[0].bytes = stripe_units * ALIGN as u64;
        let sizes = bank.file_bytes();
        prop_assert_eq!(sizes.len(), 1);
        fs::write(a.path().join(MANIFEST), manifest.to_bytes()).unwrap();
        prop_assert_eq!(Container::open(a.path().to_owned()).is_ok(), good);
    }

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
