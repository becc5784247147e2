//! `.waste` containers: a real one, ones made by hand in every number format, and broken ones.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use proptest::prelude::*;
use rill_format::{
    Checkpoint, Dtype, ExpertDims, Folder, FormatError, Waste, WasteData, WasteExpert,
    WasteExperts, WasteFormat, WasteMatrix, WasteTensor, parse_waste_manifest,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use FormatError as E;

// ---- The real container and the checkpoint it was made from.

const K3_DIMS: ExpertDims = ExpertDims { inter: 96, width: 64 };

#[test]
fn the_real_container_opens_and_says_what_it_holds() {
    let folder = fixture("k3-tiny.waste");
    assert!(Waste::is_waste(&folder));
    let waste = Waste::open(folder).unwrap();
    let format = WasteExperts { stages: 3, entries: 256, index_block: 64, packed: false };
    assert_eq!(waste.expert_format(), format);
    assert_eq!(waste.layers().keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8]);
    for (i, (&number, layer)) in waste.layers().iter().enumerate() {
        assert_eq!((layer.experts, layer.record_bytes), (12, 12_288));
        assert_eq!(usize::from(layer.codebook_base), 9 * i);
        assert_eq!(waste.record_bytes(number), Some(12_288));
    }
    assert_eq!(waste.record_bytes(0), None);
    assert_eq!(waste.codebook(71).unwrap().len(), 256 * 8);
    assert_eq!(waste.codebook(72), None);
    assert_eq!(waste.trunk().count(), 258);
    assert!(waste.trunk().all(|tensor| tensor.format == WasteFormat::F32));
    assert_eq!(waste.payload_bytes(), 5_025_824 + 8 * 147_456 + 296_064);
}

#[test]
fn the_real_containers_files_say_what_the_checkpoints_do() {
    let waste = Waste::open(fixture("k3-tiny.waste")).unwrap();
    let of_checkpoint = |name: &str| fs::read(fixture("k3-tiny").join(name)).unwrap();
    let value = |json: &[u8]| serde_json::from_slice::<Value>(json).unwrap();
    assert_eq!(value(&waste.config_json()), value(&of_checkpoint("config.json")));
    // Numbers are not rewritten on the way.
    assert!(String::from_utf8(waste.config_json()).unwrap().contains("1e-05"));
    assert_eq!(waste.tokenizer_model().unwrap(), of_checkpoint("tiktoken.model"));
    assert_eq!(
        value(&waste.tokenizer_config_json().unwrap())["added_tokens_decoder"],
        value(&of_checkpoint("tokenizer_config.json"))["added_tokens_decoder"]
    );
}

#[test]
fn every_trunk_tensor_equals_the_checkpoints_exactly() {
    let waste = Waste::open(fixture("k3-tiny.waste")).unwrap();
    let checkpoint = Checkpoint::open(Folder::Disk(fixture("k3-tiny"))).unwrap();
    for tensor in waste.trunk() {
        let info = checkpoint.require(&tensor.name).unwrap();
        assert_eq!(tensor.shape, *info.shape, "{}", tensor.name);
        let expected = values_of_checkpoint(&checkpoint, &tensor.name);
        let data = waste.read_trunk(tensor).unwrap();
        assert!(data.scales.is_empty());
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&decode(tensor, &data)), bits(&expected), "{}", tensor.name);
    }
}

#[test]
fn every_record_of_the_real_container_has_a_true_checksum() {
    let waste = Waste::open(fixture("k3-tiny.waste")).unwrap();
    let mut record = Vec::new();
    for (&layer, bank) in waste.layers() {
        for expert in 0..bank.experts {
            waste.read_expert(layer, expert, K3_DIMS, true, &mut record).unwrap();
            assert_eq!(record.len(), 12_288);
        }
    }
}

/// Random weights at three bits lose about a sixth of their size. A wrong codebook, row or stage
/// gives a wrong vector, which is off by more than the weights themselves.
#[test]
fn experts_of_the_real_container_are_near_the_checkpoints() {
    let waste = Waste::open(fixture("k3-tiny.waste")).unwrap();
    let checkpoint = Checkpoint::open(Folder::Disk(fixture("k3-tiny"))).unwrap();
    let mut record = Vec::new();
    let mut worst = 0.0f64;
    for (&layer, bank) in waste.layers() {
        for expert in 0..bank.experts {
            let found = waste.read_expert(layer, expert, K3_DIMS, true, &mut record).unwrap();
            let ExpertDims { inter, width } = K3_DIMS;
            let matrices = [
                ("w1", &found.gate, inter, width),
                ("w3", &found.up, inter, width),
                ("w2", &found.down, width, inter),
            ];
            for (name, matrix, rows, cols) in matrices {
                let name = format!(
                    "language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                );
                let expected = mxfp4_of_checkpoint(&checkpoint, &name);
                let (mut error, mut size) = (0.0, 0.0);
                for (i, expected) in expected.into_iter().enumerate() {
                    let (row, col) = (i / cols, i % cols);
                    let found = vq_weight(&waste, &record, matrix, (rows, cols), row, col);
                    error += f64::from(found - expected).powi(2);
                    size += f64::from(expected).powi(2);
                }
                worst = worst.max((error / size).sqrt());
            }
        }
    }
    assert!(worst < 0.2, "{worst}");
}

// ---- Number formats that the real container does not use.

#[test]
fn quantised_trunk_tensors_are_within_half_a_step_of_the_checkpoints() {
    let checkpoint = Checkpoint::open(Folder::Disk(fixture("k3-tiny"))).unwrap();
    // Rows of 96, 160 and 192 inputs: none is whole groups of 128.
    let layer = "language_model.model.layers";
    let names = [
        format!("{layer}.0.mlp.gate_proj.weight"),
        format!("{layer}.0.mlp.down_proj.weight"),
        format!("{layer}.1.block_sparse_moe.shared_experts.down_proj.weight"),
    ];
    let formats =
        [(2, WasteFormat::Q8, 127.0), (3, WasteFormat::Q4, 7.0), (7, WasteFormat::Q3, 3.0)];
    let mut maker = Maker::new(false);
    let mut expected = Vec::new();
    for name in &names {
        let shape = checkpoint.require(name).unwrap().shape.to_vec();
        let values = values_of_checkpoint(&checkpoint, name);
        for (fmt, format, most) in formats {
            let cols = shape[1] as usize;
            let mut codes = Vec::new();
            let mut scales = Vec::new();
            for row in values.chunks(cols) {
                for group in row.chunks(128) {
                    let largest = group.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    // Rounded up, so that the largest is in range too.
                    let mut scale = f16::from_f32(largest / most);
                    if scale.to_f32() < largest / most {
                        scale = f16::from_bits(scale.to_bits() + 1);
                    }
                    codes.extend(group.iter().map(|v| (v / scale.to_f32()).round() as i8));
                    scales.push(scale);
                }
            }
            let steps = scales.iter().map(|scale| scale.to_f32()).collect::<Vec<_>>();
            let tensor = format!("{name}.{fmt}");
            maker.add_quantised(&tensor, fmt, &shape, 128, &codes, &scales, false);
            expected.push((tensor, format, values.clone(), steps));
        }
    }
    let (waste, _dir) = maker.open().unwrap();
    for (name, format, values, steps) in expected {
        let tensor = waste.find(&name).unwrap();
        assert_eq!((tensor.format, tensor.group), (format, 128));
        let found = decode(tensor, &waste.read_trunk(tensor).unwrap());
        let cols = tensor.shape[1] as usize;
        for (i, (found, value)) in found.into_iter().zip(values).enumerate() {
            let step = steps[i / cols * cols.div_ceil(128) + i % cols / 128];
            // The quotient that was rounded is itself rounded to f32, hence the thousandth.
            assert!((found - value).abs() <= step * 0.5005, "{name} {i}: {found} {value}");
        }
    }
}

#[test]
fn codes_and_scales_come_without_the_files_padding() {
    let maker = Maker::new(false);
    let (waste, _dir) = maker.open().unwrap();
    for (name, codes, scales) in maker.quantised() {
        let tensor = waste.find(name).unwrap();
        let data = waste.read_trunk(tensor).unwrap();
        let (rows, cols) = (tensor.shape[0] as usize, codes.len() / tensor.shape[0] as usize);
        assert_eq!(codes_of(tensor, &data), *codes, "{name}");
        let expected: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        assert_eq!(data.scales, expected, "{name}");
        let row_bytes = if tensor.format == WasteFormat::Q4 { cols.div_ceil(2) } else { cols };
        assert_eq!(data.codes.len(), rows * row_bytes, "{name}");
    }
}

#[test]
fn rows_are_those_of_the_whole_tensor() {
    let (waste, _dir) = Maker::new(false).open().unwrap();
    for tensor in waste.trunk() {
        let rows = tensor.shape.first().copied().unwrap_or(1);
        let all = waste.read_trunk(tensor).unwrap();
        let of_row = |bytes: &[u8]| bytes.len() / rows as usize;
        for first in 0..=rows {
            for n in 0..=rows - first {
                let part = waste.read_trunk_rows(tensor, first, n).unwrap();
                for (part, all) in [(part.codes, &all.codes), (part.scales, &all.scales)] {
                    let start = first as usize * of_row(all);
                    assert_eq!(part, all[start..start + n as usize * of_row(all)]);
                }
            }
        }
        for (first, n) in [(0, rows + 1), (rows, 1), (1, u64::MAX), (u64::MAX, 1)] {
            let error = waste.read_trunk_rows(tensor, first, n).unwrap_err();
            assert!(matches!(error, E::BadRows { .. }), "{error}");
        }
    }
}

/// More than one piece of repacked rows: 1 MiB is 10,485 rows of 100 bytes.
#[test]
fn long_tensors_are_repacked_in_pieces() {
    let shape = [20_001, 97];
    let mut maker = Maker::new(false);
    let codes: Vec<i8> =
        (0..shape[0] * shape[1]).map(|i| ((i * i + i / 97) % 8) as i8 - 4).collect();
    let scales = vec![f16::ONE; shape[0] as usize * 7];
    maker.add_quantised("long.q8", 2, &shape, 16, &codes, &scales, false);
    maker.add_quantised("long.q3", 7, &shape, 16, &codes, &scales, false);
    let (waste, _dir) = maker.open().unwrap();
    for name in ["long.q8", "long.q3"] {
        let tensor = waste.find(name).unwrap();
        let data = waste.read_trunk(tensor).unwrap();
        assert!(codes_of(tensor, &data) == codes, "{name}");
    }
}

#[test]
fn records_made_by_hand_read_back_their_indices() {
    for packed in [false, true] {
        let maker = Maker::new(packed);
        let (waste, _dir) = maker.open().unwrap();
        let mut record = Vec::new();
        for (&layer, bank) in waste.layers() {
            for expert in 0..bank.experts {
                let found = waste.read_expert(layer, expert, DIMS, true, &mut record).unwrap();
                let stages = waste.expert_format().stages;
                for (kind, matrix) in [&found.gate, &found.up, &found.down].into_iter().enumerate()
                {
                    let (rows, cols) = shape_of(kind);
                    assert_eq!(
                        usize::from(matrix.first_codebook),
                        usize::from(bank.codebook_base) + kind * stages
                    );
                    for row in 0..rows {
                        let scale = f16_at(&record[matrix.scales.clone()], row);
                        assert_eq!(scale, scale_by_hand(kind, row));
                        for (vector, stage) in pairs(cols / 8, stages) {
                            let at = (rows, cols);
                            let index = vq_index(&waste, &record, matrix, at, row, vector, stage);
                            let by_hand = index_by_hand(layer, expert, kind, row, vector, stage);
                            assert_eq!(index, by_hand, "{packed} {kind} {row} {vector} {stage}");
                        }
                    }
                }
            }
        }
        // A buffer that is too long is cut to the record.
        record.resize(1 << 20, 7);
        waste.read_expert(1, 0, DIMS, true, &mut record).unwrap();
        assert_eq!(Some(record.len() as u64), waste.record_bytes(1));
    }
}

#[test]
fn rows_without_blocks_are_plain_row_major() {
    let mut maker = Maker::new(false);
    maker.set("/expert_quant/index_block", json!(0));
    for (layer, n) in LAYERS {
        let bank = (0..n).flat_map(|expert| record_by_hand(layer, expert, false, 0)).collect();
        maker.files.insert(format!("experts-L{layer}.bin"), bank);
        maker.set(&format!("/layers/{layer}/bytes"), json!(n * 4096));
    }
    let (waste, _dir) = maker.open().unwrap();
    let mut record = Vec::new();
    let found = waste.read_expert(4, 2, DIMS, true, &mut record).unwrap();
    let codes = &record[found.up.codes];
    for (row, i) in pairs(DIMS.inter, DIMS.width / 8 * 3) {
        let expected = index_by_hand(4, 2, 1, row, i / 3, i % 3);
        assert_eq!(codes[row * DIMS.width / 8 * 3 + i], expected);
    }
}

#[test]
fn a_configuration_without_wrapper_stays_as_written() {
    let maker = Maker::new(false);
    let (waste, _dir) = maker.open().unwrap();
    let config: Value = serde_json::from_slice(&waste.config_json()).unwrap();
    assert_eq!(config, maker.manifest["config"]);
}

#[test]
fn only_manifests_of_this_format_are_taken_for_one() {
    let cases = [
        (r#"{"format_version": 0}"#, true),
        (r#"{"format_version": 7, "other": [1, {}]}"#, true),
        (r#"{"format": "waste", "format_version": 0}"#, true),
        (r#"{"format": "rill", "format_version": 0}"#, false),
        (r#"{"format": "rill"}"#, false),
        (r#"{"format_version": null}"#, false),
        ("{}", false),
        ("[0]", false),
        ("", false),
        ("format_version", false),
    ];
    let dir = TempDir::new().unwrap();
    assert!(!Waste::is_waste(dir.path()));
    for (json, expected) in cases {
        fs::write(dir.path().join("manifest.json"), json).unwrap();
        assert_eq!(Waste::is_waste(dir.path()), expected, "{json}");
    }
}

// ---- Broken containers.

/// A change to a container, the error it must cause on opening or reading everything, and what
/// the message must contain.
struct Case {
    what: &'static str,
    change: fn(&mut Maker),
    refused: fn(&FormatError) -> bool,
    says: &'static [&'static str],
}

const fn case(
    what: &'static str,
    change: fn(&mut Maker),
    refused: fn(&FormatError) -> bool,
    says: &'static [&'static str],
) -> Case {
    Case { what, change, refused, says }
}

fn is_field(error: &FormatError) -> bool {
    matches!(error, E::ManifestField { .. })
}

fn is_manifest(error: &FormatError) -> bool {
    matches!(error, E::BadManifest { .. })
}

fn is_codebook(error: &FormatError) -> bool {
    matches!(error, E::BadCodebook { .. })
}

fn is_record(error: &FormatError) -> bool {
    matches!(error, E::BadRecord { .. })
}

const CASES: &[Case] = &[
    case(
        "version 1",
        |m| m.set("/format_version", json!(1)),
        |e| matches!(e, E::WasteVersion { .. }),
        &["format_version 1", "only 0", "manifest.json"],
    ),
    case(
        "version as text",
        |m| m.set("/format_version", json!("0")),
        |e| matches!(e, E::WasteVersion { .. }),
        &["\"0\""],
    ),
    case(
        "no version",
        |m| m.remove("/format_version"),
        |e| matches!(e, E::WasteVersion { .. }),
        &["(none)"],
    ),
    case(
        "a version of a million digits",
        |m| m.set("/format_version", json!("9".repeat(1_000_000))),
        |e| matches!(e, E::WasteVersion { .. }) && e.to_string().len() < 1000,
        &[],
    ),
    case("a list", |m| m.manifest = json!([]), is_manifest, &[]),
    case("no trunk", |m| m.remove("/trunk"), is_manifest, &["trunk"]),
    case("no layers", |m| m.remove("/layers"), is_manifest, &["layers"]),
    case("no config", |m| m.remove("/config"), is_manifest, &["config"]),
    case("config is a list", |m| m.set("/config", json!([1])), is_manifest, &["config"]),
    case(
        "text_config in the wrapper already",
        |m| m.set("/config/_outer", json!({ "text_config": {} })),
        is_field,
        &["text_config"],
    ),
    case("wrapper is a number", |m| m.set("/config/_outer", json!(3)), is_manifest, &["config"]),
    case("a manifest of spaces", |m| m.manifest_text = Some(" ".repeat(99)), is_manifest, &[]),
    case(
        "a field twice",
        |m| {
            let twice = r#"{"format_version":0,"layers":{},"layers":{},"#;
            m.manifest_text = Some(m.manifest.to_string().replacen('{', twice, 1));
        },
        is_manifest,
        &["duplicate"],
    ),
    case(
        "nested beyond reason",
        |m| {
            let deep = format!(r#"{{"x":{},"#, "[".repeat(100_000));
            m.manifest_text = Some(m.manifest.to_string().replacen('{', &deep, 1));
        },
        is_manifest,
        &[],
    ),
    case(
        "a manifest of 17 MB",
        |m| m.manifest_text = Some(" ".repeat(17 << 20)),
        |e| matches!(e, E::FileTooLarge { .. }),
        &["manifest.json"],
    ),
    case("five stages", |m| m.set("/expert_quant/stages", json!(5)), is_field, &["stages", "5"]),
    case("no stages", |m| m.set("/expert_quant/stages", json!(0)), is_field, &["stages"]),
    case(
        "packed bits for unpacked stages",
        |m| m.set("/expert_quant/index_bits", json!(6)),
        is_field,
        &["stages", "6 bits"],
    ),
    case("vectors of 4", |m| m.set("/expert_quant/vec_dim", json!(4)), is_field, &["vec_dim"]),
    case("no entries", |m| m.set("/expert_quant/entries", json!(0)), is_field, &["entries"]),
    case("257 entries", |m| m.set("/expert_quant/entries", json!(257)), is_field, &["entries"]),
    case(
        "32 entries",
        |m| m.set("/expert_quant/entries", json!(32)),
        is_codebook,
        &["entries", "32"],
    ),
    case(
        "blocks of 128",
        |m| m.set("/expert_quant/index_block", json!(128)),
        is_field,
        &["index_block"],
    ),
    case(
        "a bank outside the folder",
        |m| m.set("/layers/1/file", json!("../experts-L1.bin")),
        is_field,
        &["plain", "layers.1.file"],
    ),
    case("a bank on a drive", |m| m.set("/layers/1/file", json!("C:x")), is_field, &["plain"]),
    case("a bank without a name", |m| m.set("/layers/1/file", json!("")), is_field, &["plain"]),
    case(
        "a bank that is its folder",
        |m| m.set("/layers/1/file", json!(".")),
        is_field,
        &["plain"],
    ),
    case(
        "one bank for two layers",
        |m| m.set("/layers/4/file", json!("experts-L1.bin")),
        is_field,
        &["of its own"],
    ),
    case(
        "a bank that is not there",
        |m| m.set("/layers/4/file", json!("experts-L5.bin")),
        |e| matches!(e, E::MissingFile { .. }),
        &["experts-L5.bin"],
    ),
    case(
        "banks exchanged",
        |m| {
            let a = m.files.remove("experts-L1.bin").unwrap();
            let b = m.files.remove("experts-L4.bin").unwrap();
            m.set("/layers/1/experts", json!(3));
            m.set("/layers/1/bytes", json!(b.len()));
            m.set("/layers/4/experts", json!(2));
            m.set("/layers/4/bytes", json!(a.len()));
            m.files.insert("experts-L1.bin".to_owned(), b);
            m.files.insert("experts-L4.bin".to_owned(), a);
        },
        is_record,
        &["experts-L1.bin", "layer 1", "the layer", "is 4"],
    ),
    case("no experts", |m| m.set("/layers/1/experts", json!(0)), is_field, &["layers.1.experts"]),
    case(
        "experts beyond a header's field",
        |m| m.set("/layers/1/experts", json!(65_537)),
        is_field,
        &["experts"],
    ),
    case("bytes of no records", |m| m.set("/layers/1/bytes", json!(0)), is_field, &["bytes"]),
    case(
        "records that are not whole pages",
        |m| m.set("/layers/1/bytes", json!(8192 + 2048)),
        is_field,
        &["layers.1.bytes", "4096"],
    ),
    case(
        "a bank that is shorter than said",
        |m| m.set("/layers/1/bytes", json!(1u64 << 40)),
        |e| matches!(e, E::WasteFileSize { .. }),
        &["experts-L1.bin", "1099511627776"],
    ),
    case(
        "half as many experts",
        |m| m.set("/layers/1/experts", json!(1)),
        |e| matches!(e, E::RecordShape { .. }),
        &["16384", "72", "24"],
    ),
    case(
        "another layer's codebooks",
        |m| m.set("/layers/1/codebook_base", json!(9)),
        is_record,
        &["codebook_id"],
    ),
    case(
        "codebooks that are not there",
        |m| m.set("/layers/1/codebook_base", json!(500)),
        |e| matches!(e, E::MissingCodebook { .. }),
        &["codebook 500", "layer 1"],
    ),
    case(
        "codebooks beyond the last number",
        |m| m.set("/layers/1/codebook_base", json!(65_530)),
        is_field,
        &["codebook_base"],
    ),
    case(
        "a layer number with a zero in front",
        |m| {
            let layer = m.manifest["layers"]["1"].clone();
            m.set("/layers/01", layer);
        },
        is_field,
        &["layers.01"],
    ),
    case(
        "a layer twice",
        |m| {
            let layer = r#""layers":{"1":{"file":"x","experts":1,"bytes":4096,"codebook_base":0},"#;
            let text = m.manifest.to_string();
            m.manifest_text = Some(text.replacen(r#""layers":{"#, layer, 1));
        },
        is_field,
        &["twice"],
    ),
    case(
        "a tensor twice",
        |m| m.set("/trunk/1/name", json!("f32.vector")),
        |e| matches!(e, E::DuplicateTensor { .. }),
        &["f32.vector"],
    ),
    case(
        "a name of 2,000 bytes",
        |m| m.set("/trunk/1/name", json!("n".repeat(2000))),
        |e| matches!(e, E::NameTooLong { .. }),
        &["2000"],
    ),
    case("an unknown number format", |m| m.set("/trunk/0/fmt", json!(4)), is_field, &["fmt", "4"]),
    case(
        "more dimensions than any weight has",
        |m| m.set("/trunk/0/shape", json!([1, 1, 1, 1, 1, 1, 1, 1, 3])),
        is_field,
        &["shape", "f32.vector"],
    ),
    case("an empty tensor", |m| m.set("/trunk/0/shape", json!([0])), is_field, &["at least 1"]),
    case(
        "a shape that overflows",
        |m| m.set("/trunk/0/shape", json!([1u64 << 40, 1u64 << 40])),
        is_field,
        &["64 bits"],
    ),
    case(
        "a place that overflows",
        |m| m.set("/trunk/0/off", json!(u64::MAX)),
        is_field,
        &["64 bits", "f32.vector"],
    ),
    case(
        "bytes for another shape",
        |m| m.set("/trunk/0/bytes", json!(16)),
        is_field,
        &["bytes", "f32.vector", "12"],
    ),
    case(
        "a tensor inside another",
        |m| m.set("/trunk/1/off", json!(4)),
        |e| matches!(e, E::Overlap { .. }),
        &["f32.vector", "f32.scalar"],
    ),
    case(
        "a tensor beyond the end",
        |m| m.set("/trunk/0/off", json!(1u64 << 40)),
        |e| matches!(e, E::WasteTrunkCutOff { .. }),
        &["f32.vector", "trunk.bin"],
    ),
    case("no group", |m| m.remove("/trunk/3/group"), is_field, &["group", "absent", "q8"]),
    case("groups of 0", |m| m.set("/trunk/3/group", json!(0)), is_field, &["group"]),
    case("another group", |m| m.set("/trunk/3/group", json!(32)), is_field, &["bytes", "q8"]),
    case("scales elsewhere", |m| m.set("/trunk/3/scale_off", json!(2)), is_field, &["scale_off"]),
    case("no scales", |m| m.remove("/trunk/3/scale_off"), is_field, &["scale_off"]),
    case("a packed vector", |m| m.set("/trunk/3/shape", json!([240])), is_field, &["shape"]),
    case(
        "no codebooks",
        |m| drop(m.files.remove("codebooks.bin")),
        |e| matches!(e, E::MissingFile { .. }),
        &["codebooks.bin"],
    ),
    case("codebook magic", |m| m.poke("codebooks.bin", 1040, &[0]), is_codebook, &["1040"]),
    case("codebook twice", |m| m.poke("codebooks.bin", 1044, &[0]), is_codebook, &["id", "1044"]),
    case("codebook fmt", |m| m.poke("codebooks.bin", 1046, &[9]), is_codebook, &["fmt", "1046"]),
    case("codebook vec_dim", |m| m.poke("codebooks.bin", 7, &[4]), is_codebook, &["vec_dim"]),
    case(
        "codebook entries",
        |m| m.poke("codebooks.bin", 8, &[65]),
        is_codebook,
        &["entries", "65"],
    ),
    case("codebook reserved", |m| m.poke("codebooks.bin", 15, &[1]), is_codebook, &["reserved"]),
    case(
        "codebook with infinity",
        |m| m.poke("codebooks.bin", 20, &[0, 0x7c]),
        is_codebook,
        &["inf", "20"],
    ),
    case(
        "codebook with NaN",
        |m| m.poke("codebooks.bin", 1036, &[1, 0xfe]),
        is_codebook,
        &["NaN", "1036"],
    ),
    case(
        "the other kind of record",
        |m| m.poke("experts-L1.bin", 8, &[8]),
        is_record,
        &["fmt", "expected 4"],
    ),
    case(
        "a low-rank part",
        |m| m.poke("experts-L1.bin", 8192 + 12, &[1]),
        is_record,
        &["lowrank_id", "expert 1 of layer 1", "8204"],
    ),
    case(
        "offsets out of order",
        |m| m.poke("experts-L1.bin", 20, &[0, 9]),
        is_record,
        &["gate_off"],
    ),
    case(
        "a damaged scale",
        |m| m.poke("experts-L4.bin", 8192 + SCALES_AT, &[0xff]),
        |e| matches!(e, E::RecordChecksum { .. }),
        &["expert 1 of layer 4", "8192", "experts-L4.bin"],
    ),
    case(
        "special tokens that are none",
        |m| drop(m.files.insert("specials.json".to_owned(), b"{}".to_vec())),
        |e| matches!(e, E::BadSpecials { .. }),
        &["specials.json"],
    ),
    case(
        "a special token twice",
        |m| {
            let twice = br#"[{"id":1,"text":"a"},{"id":1,"text":"b"}]"#;
            m.files.insert("specials.json".to_owned(), twice.to_vec());
        },
        |e| matches!(e, E::BadSpecials { .. }),
        &["id 1"],
    ),
];

#[test]
fn each_broken_container_is_refused_by_name() {
    for Case { what, change, refused, says } in CASES {
        let mut maker = Maker::new(false);
        change(&mut maker);
        let error = maker.read_all().err().unwrap_or_else(|| panic!("{what}: accepted"));
        assert!(refused(&error), "{what}: {error:?}");
        let message = error.to_string();
        for part in *says {
            assert!(message.contains(part), "{what}: {part:?} not in: {message}");
        }
    }
}

#[test]
fn experts_and_dimensions_that_are_not_there_are_refused() {
    let (waste, _dir) = Maker::new(false).open().unwrap();
    let mut record = Vec::new();
    for (layer, expert) in [(0, 0), (2, 0), (1, 2), (4, 3), (1, u32::MAX), (65_537, 0)] {
        let error = waste.read_expert(layer, expert, DIMS, true, &mut record).unwrap_err();
        assert!(matches!(error, E::MissingExpert { .. }), "{error}");
    }
    let sizes =
        [0, 1, 8, 12, 16, 24, 64, 72, 4096, 1 << 20, usize::MAX / 3, usize::MAX, usize::MAX - 7];
    for (inter, width) in sizes.into_iter().flat_map(|a| sizes.map(|b| (a, b))) {
        let dims = ExpertDims { inter, width };
        if dims != DIMS {
            assert!(waste.read_expert(1, 0, dims, true, &mut record).is_err(), "{dims:?}");
        }
    }
    assert!(record.capacity() < 1 << 20, "{}", record.capacity());
}

/// The header says nothing that is not known already, except the checksum.
#[test]
fn every_byte_of_a_records_header_is_checked() {
    for packed in [false, true] {
        let maker = Maker::new(packed);
        let (waste, dir) = maker.open().unwrap();
        let mut file =
            OpenOptions::new().write(true).open(dir.path().join("experts-L4.bin")).unwrap();
        let mut record = Vec::new();
        let expected = waste.read_expert(4, 1, DIMS, true, &mut record).unwrap();
        let header = record[..48].to_vec();
        let mut put = |byte: usize, value: u8| {
            let record_bytes = waste.record_bytes(4).unwrap();
            file.seek(SeekFrom::Start(record_bytes + byte as u64)).unwrap();
            file.write_all(&[value]).unwrap();
        };
        for (byte, &value) in header.iter().enumerate() {
            let others = [0, 1, 3, 5, 8, 255, value ^ 1, value ^ 128, value.wrapping_add(1)];
            for other in others.into_iter().filter(|&other| other != value) {
                put(byte, other);
                assert!(
                    waste.read_expert(4, 1, DIMS, true, &mut record).is_err(),
                    "{byte} {other}"
                );
                let unverified = waste.read_expert(4, 1, DIMS, false, &mut record);
                match unverified {
                    Ok(found) => assert!(found == expected && (36..40).contains(&byte), "{byte}"),
                    Err(error) => assert!(is_record(&error), "{error}"),
                }
            }
            put(byte, value);
        }
        assert_eq!(waste.read_expert(4, 1, DIMS, true, &mut record).unwrap(), expected);
    }
}

#[test]
fn every_bit_of_a_records_payload_is_under_its_checksum() {
    let maker = Maker::new(true);
    let (waste, dir) = maker.open().unwrap();
    let path = dir.path().join("experts-L1.bin");
    let mut file = OpenOptions::new().write(true).open(path).unwrap();
    let mut record = Vec::new();
    let expert = waste.read_expert(1, 0, DIMS, true, &mut record).unwrap();
    let good = record.clone();
    let end = expert.down.scales.end;
    let mut put = |byte: usize, value: u8| {
        file.seek(SeekFrom::Start(byte as u64)).unwrap();
        file.write_all(&[value]).unwrap();
    };
    for byte in (48..end).step_by(7).chain([end - 1]) {
        put(byte, good[byte] ^ 1 << (byte % 8));
        let error = waste.read_expert(1, 0, DIMS, true, &mut record).unwrap_err();
        assert!(matches!(error, E::RecordChecksum { layer: 1, expert: 0, .. }), "{error}");
        put(byte, good[byte]);
    }
    // Padding says nothing.
    put(end, 255);
    assert_eq!(waste.read_expert(1, 0, DIMS, true, &mut record).unwrap(), expert);
}

/// Everything but the configuration, which the engine judges.
#[test]
fn every_number_of_a_manifest_is_checked_or_means_nothing() {
    for packed in [false, true] {
        let maker = Maker::new(packed);
        let expected = maker.read_all().unwrap();
        let (_, dir) = maker.open().unwrap();
        let mut paths = Vec::new();
        numbers(&maker.manifest, String::new(), &mut paths);
        assert!(paths.len() > 60, "{}", paths.len());
        let mut n_refused = 0;
        for path in paths.iter().filter(|path| !path.starts_with("/config")) {
            let value = maker.manifest.pointer(path).unwrap().as_f64().unwrap() as u64;
            let mut changes: Vec<Value> = [0, 1, 2, 3, 4, 6, 7, 8, 64, 4096, u64::MAX, 1 << 32]
                .into_iter()
                .chain([value + 1, value.wrapping_sub(1), 2 * value, value / 2, value + 4096])
                .filter(|&other| other != value)
                .map(|other| json!(other))
                .collect();
            changes.extend([json!(-1), json!(0.5), json!("0"), Value::Null, json!([]), json!({})]);
            for change in changes {
                let mut manifest = maker.manifest.clone();
                *manifest.pointer_mut(path).unwrap() = change.clone();
                fs::write(dir.path().join("manifest.json"), manifest.to_string()).unwrap();
                match read_all(dir.path()) {
                    Err(error) => {
                        assert!(!error.to_string().is_empty());
                        n_refused += 1;
                    }
                    Ok(mut found) => {
                        // Padding can hide how long rows are. The shape is told as written, and
                        // the engine knows what it must be; nothing else may be affected.
                        if let Some((tensor, _)) = path.split_once("/shape/") {
                            let i = tensor.rsplit_once('/').unwrap().1.parse::<usize>().unwrap();
                            assert_ne!(found.trunk[i].1, expected.trunk[i].1);
                            assert_ne!(found.trunk[i].2, WasteFormat::F32);
                            found.trunk[i] = expected.trunk[i].clone();
                        } else {
                            assert!(path.ends_with("bits_per_weight"), "{path} = {change}");
                        }
                        assert!(found == expected, "{path} = {change}");
                    }
                }
            }
        }
        assert!(n_refused > 1000, "{n_refused}");
    }
}

#[test]
fn files_cut_anywhere_are_refused() {
    let maker = Maker::new(false);
    let manifest = maker.manifest.to_string();
    for end in (0..manifest.len()).step_by(13) {
        let mut cut = maker.clone();
        cut.manifest_text = Some(manifest[..end].to_owned());
        assert!(is_manifest(&cut.open().unwrap_err()), "{end}");
    }
    for (name, bytes) in &maker.files {
        // Opaque to this crate: the tokenizer judges it.
        if name == "tokenizer.model" {
            continue;
        }
        let n = bytes.len();
        for end in [0, 1, n / 4, n / 3, n / 2, n - 4096.min(n - 1), n - 2, n - 1] {
            let mut cut = maker.clone();
            cut.files.get_mut(name).unwrap().truncate(end);
            let error = cut.read_all().err().unwrap_or_else(|| panic!("{name} cut to {end}"));
            // Cut between two codebooks, the file itself is sound.
            let sound = matches!(error, E::MissingCodebook { .. });
            assert!(sound || error.to_string().contains(name), "{name} {end}: {error}");
        }
        let mut absent = maker.clone();
        absent.files.remove(name);
        assert!(matches!(absent.read_all(), Err(E::MissingFile { .. })), "{name}");
        // Only the trunk may have bytes that belong to nothing.
        let mut longer = maker.clone();
        longer.files.get_mut(name).unwrap().push(b'!');
        assert_eq!(longer.read_all().is_ok(), name == "trunk.bin", "{name}");
    }
}

#[test]
fn files_that_shrink_while_open_end_reads_naming_what_was_read() {
    let maker = Maker::new(false);
    let (waste, dir) = maker.open().unwrap();
    let cut = |name: &str, bytes: u64| {
        let file = OpenOptions::new().write(true).open(dir.path().join(name)).unwrap();
        file.set_len(bytes).unwrap();
    };

    cut("experts-L4.bin", 8192 + 100);
    let mut record = Vec::new();
    waste.read_expert(4, 0, DIMS, true, &mut record).unwrap();
    let error = waste.read_expert(4, 1, DIMS, true, &mut record).unwrap_err();
    assert!(matches!(error, E::ShortRead { byte: 8292, expected: 8192, found: 100, .. }));
    assert!(error.to_string().contains("expert 1 of layer 4"), "{error}");

    // Three of the matrix's four rows are still there, and only they are read.
    let matrix = waste.find("f32.matrix").unwrap();
    cut("trunk.bin", matrix.place().start + 3 * 20);
    waste.read_trunk_rows(matrix, 0, 3).unwrap();
    for error in [waste.read_trunk(matrix), waste.read_trunk_rows(matrix, 3, 1)] {
        let error = error.unwrap_err();
        assert!(matches!(error, E::ShortRead { .. }), "{error}");
        assert!(error.to_string().contains("f32.matrix"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_manifests_are_refused_or_can_be_trusted(
        packed in any::<bool>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..4u8, replacement()), 1..5),
        trunk_bytes in prop_oneof![4 => Just(None), 1 => any::<u64>().prop_map(Some)],
    ) {
        let maker = Maker::without_banks(packed);
        let mut manifest = maker.manifest.clone();
        for (at, edit, value) in edits {
            let mut paths = Vec::new();
            nodes(&manifest, String::new(), &mut paths);
            let path = at.get(&paths);
            match edit {
                0 => remove(&mut manifest, path),
                _ => *manifest.pointer_mut(path).unwrap() = value,
            }
        }
        let trunk_bytes = trunk_bytes.unwrap_or(maker.files["trunk.bin"].len() as u64);
        trusted_or_refused(manifest.to_string().as_bytes(), trunk_bytes);
    }

    #[test]
    fn manifests_with_random_bytes_are_refused_or_can_be_trusted(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let maker = Maker::without_banks(true);
        let mut json = maker.manifest.to_string().into_bytes();
        for (at, byte) in edits {
            let i = at.index(json.len());
            json[i] = byte;
        }
        trusted_or_refused(&json, maker.files["trunk.bin"].len() as u64);
    }
}

/// What a checked manifest promises.
fn trusted_or_refused(json: &[u8], trunk_bytes: u64) {
    let manifest = match parse_waste_manifest("manifest", json, trunk_bytes) {
        Ok(manifest) => manifest,
        Err(error) => return assert!(error.to_string().contains("manifest")),
    };
    let mut end = 0;
    for tensor in &manifest.tensors {
        let place = tensor.place();
        assert!(end <= place.start && place.start < place.end && place.end <= trunk_bytes);
        let n: u64 = tensor.shape.iter().product();
        assert!(n > 0 && n <= 3 * (place.end - place.start));
        end = place.end;
    }
    let WasteExperts { stages, entries, index_block, packed } = manifest.experts;
    assert!(matches!((packed, stages), (true, 4) | (false, 2 | 3)));
    assert!((1..=256).contains(&entries) && matches!(index_block, 0 | 64));
    for layer in manifest.layers.values() {
        assert!(layer.experts > 0 && layer.record_bytes > 0);
        assert!(layer.record_bytes.is_multiple_of(4096));
        assert!(usize::from(layer.codebook_base) + 3 * stages <= 65_536);
        assert!(!layer.file.contains(['/', '\\', ':']) && !layer.file.starts_with('.'));
    }
    assert!(serde_json::from_slice::<Value>(&manifest.config_json).is_ok_and(|v| v.is_object()));
}

fn replacement() -> impl Strategy<Value = Value> {
    prop_oneof![
        (0..200u64).prop_map(|n| json!(n)),
        any::<u64>().prop_map(|n| json!(n)),
        any::<i64>().prop_map(|n| json!(n)),
        (0..48u32).prop_map(|bits| json!(1u64 << bits)),
        any::<f64>().prop_map(|n| json!(n)),
        prop::sample::select(vec![
            Value::Null,
            json!(true),
            json!("x"),
            json!("a/b"),
            json!([]),
            json!([4, 5]),
            json!({}),
        ]),
    ]
}

// ---- Containers made by hand.

/// Two layers; the numbers leave a gap.
const LAYERS: [(u32, u32); 2] = [(1, 2), (4, 3)];

/// 72 rows are not whole blocks of 64.
const DIMS: ExpertDims = ExpertDims { inter: 72, width: 24 };

/// 48, then twice 128 rows of 3 vectors and once 64 of 9, three bytes each.
const SCALES_AT: usize = 48 + 2 * 128 * 3 * 3 + 64 * 9 * 3;

const ENTRIES: usize = 64;

/// A container in memory.
#[derive(Clone)]
struct Maker {
    manifest: Value,
    /// Instead of the manifest.
    manifest_text: Option<String>,
    files: BTreeMap<String, Vec<u8>>,
    /// By name: codes and scales.
    quantised: Vec<(String, Vec<i8>, Vec<f16>)>,
}

impl Maker {
    /// One tensor or more of each format, and two banks.
    fn new(packed: bool) -> Self {
        let mut maker = Self::without_banks(packed);
        for (layer, n) in LAYERS {
            let bank =
                (0..n).flat_map(|expert| record_by_hand(layer, expert, packed, 64)).collect();
            maker.files.insert(format!("experts-L{layer}.bin"), bank);
        }
        maker
    }

    /// The banks are in the manifest and nowhere else.
    fn without_banks(packed: bool) -> Self {
        let stages = if packed { 4 } else { 3 };
        let mut codebooks = Vec::new();
        for id in 0..3 * stages as u16 * 2 {
            codebooks.extend(0x4b42_4357u32.to_le_bytes());
            codebooks.extend(id.to_le_bytes());
            codebooks.extend([if packed { 8 } else { 4 }, 8]);
            codebooks.extend((ENTRIES as u32).to_le_bytes());
            codebooks.extend([0; 4]);
            for i in 0..ENTRIES * 8 {
                codebooks.extend(f16::from_f32(i as f32 - f32::from(id)).to_le_bytes());
            }
        }
        let layers: serde_json::Map<_, _> = (0..)
            .zip(LAYERS)
            .map(|(i, (layer, n))| {
                let value = json!({
                    "file": format!("experts-L{layer}.bin"),
                    "experts": n,
                    "bytes": n * 8192,
                    "codebook_base": i * 3 * stages,
                });
                (layer.to_string(), value)
            })
            .collect();
        let manifest = json!({
            "format_version": 0,
            "arch": "kimi-linear",
            "tensor_prefix": "",
            "config": { "hidden_size": 16, "rms_norm_eps": 1e-5, "linear_attn_config": { "n": [1, 2] } },
            "expert_quant": {
                "stages": stages,
                "vec_dim": 8,
                "entries": ENTRIES,
                "index_block": 64,
                "index_bits": if packed { 6 } else { 8 },
                "bits_per_weight": 3.0,
            },
            "layers": layers,
            "trunk": [],
        });
        let specials = json!([{ "id": 7, "text": "[BOS]" }, { "id": 8, "text": "\"<\u{e9}>" }]);
        let files = BTreeMap::from([
            ("trunk.bin".to_owned(), Vec::new()),
            ("codebooks.bin".to_owned(), codebooks),
            ("tokenizer.model".to_owned(), b"QQ== 0\n".to_vec()),
            ("specials.json".to_owned(), specials.to_string().into_bytes()),
        ]);
        let mut maker = Self { manifest, manifest_text: None, files, quantised: Vec::new() };

        for (name, shape) in [("vector", vec![3u64]), ("scalar", vec![]), ("matrix", vec![4, 5])] {
            let n: u64 = shape.iter().product();
            let bytes = (0..n).flat_map(|i| (i as f32 + 0.25).to_le_bytes()).collect();
            let entry = json!({ "name": format!("f32.{name}"), "fmt": 0, "shape": shape });
            maker.add(entry, bytes);
        }
        // Ragged groups, padded rows, and four dimensions.
        let tensors: [(&str, u64, &[u64], u64, bool); 5] = [
            ("q8", 2, &[5, 40], 16, false),
            ("q8.whole", 2, &[3, 32], 32, true),
            ("q4", 3, &[3, 37], 32, true),
            ("q3", 7, &[7, 50], 16, false),
            ("q4.deep", 3, &[2, 3, 2, 6], 16, false),
        ];
        for (name, fmt, shape, group, absolute) in tensors {
            let cols: u64 = shape[1..].iter().product();
            let span = [127, 7, 3][[2, 3, 7].iter().position(|&f| f == fmt).unwrap()];
            let codes: Vec<i8> = (0..shape[0] * cols)
                .map(|i| (((i * 31 + i / 7) % (2 * span + 1)) as i64 - span as i64) as i8)
                .collect();
            let n_scales = shape[0] * cols.div_ceil(group);
            // The first is the smallest subnormal.
            let scales: Vec<f16> =
                (0..n_scales).map(|i| f16::from_bits(1 + 97 * i as u16)).collect();
            maker.add_quantised(name, fmt, shape, group, &codes, &scales, absolute);
        }
        maker
    }

    /// Appends a tensor to the trunk; `off` and `bytes` are added to its entry.
    fn add(&mut self, mut entry: Value, bytes: Vec<u8>) {
        let trunk = self.files.get_mut("trunk.bin").unwrap();
        entry["off"] = json!(trunk.len());
        entry["bytes"] = json!(bytes.len());
        trunk.extend(bytes);
        self.manifest["trunk"].as_array_mut().unwrap().push(entry);
    }

    /// Packs codes as the format is described. `absolute`: `scale_off` counts from the file's
    /// start instead of the tensor's.
    #[expect(clippy::too_many_arguments, reason = "all of it is one tensor")]
    fn add_quantised(
        &mut self,
        name: &str,
        fmt: u64,
        shape: &[u64],
        group: u64,
        codes: &[i8],
        scales: &[f16],
        absolute: bool,
    ) {
        let cols = codes.len() / shape[0] as usize;
        let padded = cols.next_multiple_of(group as usize);
        let mut bytes = Vec::new();
        for row in codes.chunks(cols) {
            // Padding has codes that would be seen if they were read.
            let code = |i: usize| row.get(i).copied().unwrap_or(1);
            match fmt {
                2 => bytes.extend((0..padded).map(|i| code(i) as u8)),
                3 => {
                    let nibble = |i| (code(i) + 8) as u8;
                    bytes.extend((0..padded / 2).map(|i| nibble(2 * i) | nibble(2 * i + 1) << 4));
                }
                _ => {
                    let mut stream = vec![0u8; (3 * cols).div_ceil(8) + 1];
                    for bit in 0..3 * cols {
                        let q = (code(bit / 3) + 4) as u8;
                        stream[bit / 8] |= (q >> (bit % 3) & 1) << (bit % 8);
                    }
                    bytes.extend(stream);
                }
            }
        }
        let start = if absolute { self.files["trunk.bin"].len() } else { 0 };
        let entry = json!({
            "name": name,
            "fmt": fmt,
            "shape": shape,
            "group": group,
            "scale_off": start + bytes.len(),
        });
        bytes.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
        self.add(entry, bytes);
        self.quantised.push((name.to_owned(), codes.to_vec(), scales.to_vec()));
    }

    fn quantised(&self) -> impl Iterator<Item = (&str, &Vec<i8>, &Vec<f16>)> {
        self.quantised.iter().map(|(name, codes, scales)| (name.as_str(), codes, scales))
    }

    /// Sets a value of the manifest; the last part of the path may be new.
    fn set(&mut self, path: &str, value: Value) {
        let (parent, key) = path.rsplit_once('/').unwrap();
        let parent = self.manifest.pointer_mut(parent).unwrap();
        match parent {
            Value::Object(map) => drop(map.insert(key.to_owned(), value)),
            _ => parent[key.parse::<usize>().unwrap()] = value,
        }
    }

    fn remove(&mut self, path: &str) {
        remove(&mut self.manifest, path);
    }

    /// Overwrites bytes of a file.
    fn poke(&mut self, file: &str, at: usize, bytes: &[u8]) {
        self.files.get_mut(file).unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn write(&self) -> TempDir {
        let dir = TempDir::new().unwrap();
        for (name, bytes) in &self.files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        let text = self.manifest_text.clone().unwrap_or_else(|| self.manifest.to_string());
        fs::write(dir.path().join("manifest.json"), text).unwrap();
        dir
    }

    fn open(&self) -> Result<(Waste, TempDir), FormatError> {
        let dir = self.write();
        Ok((Waste::open(dir.path().to_owned())?, dir))
    }

    fn read_all(&self) -> Result<Everything, FormatError> {
        read_all(self.write().path())
    }
}

/// All that a container gives.
#[derive(PartialEq)]
struct Everything {
    files: [Vec<u8>; 3],
    experts: WasteExperts,
    trunk: Vec<(String, Vec<u64>, WasteFormat, u32, WasteData)>,
    records: Vec<(u32, u32, WasteExpert, Vec<u8>)>,
    codebooks: Vec<Vec<f32>>,
}

fn read_all(folder: &Path) -> Result<Everything, FormatError> {
    let waste = Waste::open(folder.to_owned())?;
    let mut trunk = Vec::new();
    for tensor in waste.trunk() {
        let WasteTensor { name, shape, format, group, .. } = tensor;
        let data = waste.read_trunk(tensor)?;
        trunk.push((name.clone(), shape.clone(), *format, *group, data));
    }
    let mut records = Vec::new();
    for (&layer, bank) in waste.layers() {
        for expert in 0..bank.experts {
            let mut record = Vec::new();
            let found = waste.read_expert(layer, expert, DIMS, true, &mut record)?;
            records.push((layer, expert, found, record));
        }
    }
    Ok(Everything {
        files: [waste.config_json(), waste.tokenizer_model()?, waste.tokenizer_config_json()?],
        experts: waste.expert_format(),
        trunk,
        records,
        codebooks: (0..=u16::MAX).filter_map(|i| waste.codebook(i)).map(<[f32]>::to_vec).collect(),
    })
}

fn shape_of(kind: usize) -> (usize, usize) {
    if kind == 2 { (DIMS.width, DIMS.inter) } else { (DIMS.inter, DIMS.width) }
}

fn index_by_hand(
    layer: u32,
    expert: u32,
    kind: usize,
    row: usize,
    vector: usize,
    stage: usize,
) -> u8 {
    let who = (layer * 8 + expert) as usize;
    ((who * 13 + kind * 29 + row * 37 + vector * 11 + stage * 7 + row * stage) % ENTRIES) as u8
}

fn scale_by_hand(kind: usize, row: usize) -> f32 {
    1.0 + kind as f32 + row as f32 / 128.0
}

/// A record written field by field from the description of the format.
fn record_by_hand(layer: u32, expert: u32, packed: bool, block: usize) -> Vec<u8> {
    let stages = if packed { 4 } else { 3 };
    let mut payload = Vec::new();
    let mut offsets = Vec::new();
    for kind in 0..3 {
        offsets.push(48 + payload.len() as u32);
        let (rows, cols) = shape_of(kind);
        let mut put = |row: usize, vector: usize| {
            let index = |stage| match row < rows {
                true => index_by_hand(layer, expert, kind, row, vector, stage),
                false => 63,
            };
            let [a, b, c] = [index(0), index(1), index(2)];
            if packed {
                let d = index(3);
                payload.extend([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2]);
            } else {
                payload.extend([a, b, c]);
            }
        };
        if block == 0 {
            pairs(rows, cols / 8).for_each(|(row, vector)| put(row, vector));
        } else {
            for (row_block, vector) in pairs(rows.div_ceil(block), cols / 8) {
                (0..block).for_each(|row| put(row_block * block + row, vector));
            }
        }
    }
    offsets.push(48 + payload.len() as u32);
    for kind in 0..3 {
        for row in 0..shape_of(kind).0 {
            payload.extend(f16::from_f32(scale_by_hand(kind, row)).to_le_bytes());
        }
    }
    let pages = (48 + payload.len()).div_ceil(4096);

    let codebook = if layer == LAYERS[0].0 { 0 } else { 3 * stages as u16 };
    let mut record = 0x5058_4557u32.to_le_bytes().to_vec();
    record.extend((layer as u16).to_le_bytes());
    record.extend((expert as u16).to_le_bytes());
    record.extend([if packed { 8 } else { 4 }, 0]);
    record.extend(codebook.to_le_bytes());
    record.extend([0; 4]);
    record.extend((pages as u32).to_le_bytes());
    record.extend(offsets.iter().flat_map(|offset| offset.to_le_bytes()));
    record.extend(crc32(&payload).to_le_bytes());
    record.extend([0; 8]);
    record.extend(payload);
    record.resize(pages * 4096, 0);
    record
}

/// zlib's CRC-32, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ ((crc & 1) * 0xedb8_8320))
    })
}

// ---- Reading packed numbers, plainly.

fn f16_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()
}

/// Codes of a tensor, Q4's unpacked.
fn codes_of(tensor: &WasteTensor, data: &WasteData) -> Vec<i8> {
    if tensor.format != WasteFormat::Q4 {
        return data.codes.iter().map(|&code| code as i8).collect();
    }
    let rows = tensor.shape[0] as usize;
    let cols = tensor.shape[1..].iter().product::<u64>() as usize;
    pairs(rows, cols)
        .map(|(row, i)| {
            let byte = data.codes[row * cols.div_ceil(2) + i / 2];
            (byte >> (4 * (i % 2)) & 15) as i8 - 8
        })
        .collect()
}

/// Values of a tensor.
fn decode(tensor: &WasteTensor, data: &WasteData) -> Vec<f32> {
    if tensor.format == WasteFormat::F32 {
        let values = data.codes.chunks_exact(4);
        return values.map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    }
    let cols = tensor.shape[1..].iter().product::<u64>() as usize;
    let groups = cols.div_ceil(tensor.group as usize);
    let scale = |i| f16_at(&data.scales, i / cols * groups + i % cols / tensor.group as usize);
    let codes = codes_of(tensor, data).into_iter().enumerate();
    codes.map(|(i, code)| f32::from(code) * scale(i)).collect()
}

/// The index of one vector's stage in a matrix of some rows and columns.
fn vq_index(
    waste: &Waste,
    record: &[u8],
    matrix: &WasteMatrix,
    (rows, cols): (usize, usize),
    row: usize,
    vector: usize,
    stage: usize,
) -> u8 {
    let format = waste.expert_format();
    let bytes = if format.packed { 3 } else { format.stages };
    let codes = &record[matrix.codes.clone()];
    assert_eq!(codes.len(), rows.next_multiple_of(64) * (cols / 8) * bytes);
    let at = ((row / 64 * (cols / 8) + vector) * 64 + row % 64) * bytes;
    if !format.packed {
        return codes[at + stage];
    }
    let bits = (6 * stage..6 * stage + 6).map(|bit| codes[at + bit / 8] >> (bit % 8) & 1);
    bits.rev().fold(0, |n, bit| n << 1 | bit)
}

fn vq_weight(
    waste: &Waste,
    record: &[u8],
    matrix: &WasteMatrix,
    shape: (usize, usize),
    row: usize,
    col: usize,
) -> f32 {
    let sum: f32 = (0..waste.expert_format().stages)
        .map(|stage| {
            let index = vq_index(waste, record, matrix, shape, row, col / 8, stage);
            let codebook = waste.codebook(matrix.first_codebook + stage as u16).unwrap();
            codebook[usize::from(index) * 8 + col % 8]
        })
        .sum();
    sum * f16_at(&record[matrix.scales.clone()], row)
}

fn values_of_checkpoint(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let info = checkpoint.require(name).unwrap();
    let bytes = checkpoint.read(info.id).unwrap();
    match info.dtype {
        Dtype::F32 => {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        }
        Dtype::BF16 => {
            bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        dtype => panic!("{dtype}"),
    }
}

fn mxfp4_of_checkpoint(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let read = |part: &str| {
        let id = checkpoint.require(&format!("{name}.weight_{part}")).unwrap().id;
        checkpoint.read(id).unwrap()
    };
    let (codes, scales) = (read("packed"), read("scale"));
    let value = |i: usize| {
        let nibble = codes[i / 2] >> (4 * (i % 2)) & 15;
        let sign = if nibble < 8 { 1.0 } else { -1.0 };
        let scale = f32::from(scales[i / 32]) - 127.0;
        sign * MAGNITUDES[usize::from(nibble % 8)] * scale.exp2()
    };
    (0..2 * codes.len()).map(value).collect()
}

fn pairs(n: usize, m: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).flat_map(move |i| (0..m).map(move |j| (i, j)))
}

// ---- Paths into JSON.

fn children(value: &Value, path: &str) -> Vec<String> {
    match value {
        Value::Object(map) => map.keys().map(|key| format!("{path}/{key}")).collect(),
        Value::Array(list) => (0..list.len()).map(|i| format!("{path}/{i}")).collect(),
        _ => Vec::new(),
    }
}

/// Paths of all values but the root.
fn nodes(root: &Value, path: String, out: &mut Vec<String>) {
    for child in children(root.pointer(&path).unwrap(), &path) {
        out.push(child.clone());
        nodes(root, child, out);
    }
    if path.is_empty() && out.is_empty() {
        out.push(path);
    }
}

fn numbers(root: &Value, path: String, out: &mut Vec<String>) {
    nodes(root, path, out);
    out.retain(|path| root.pointer(path).unwrap().is_number());
}

fn remove(root: &mut Value, path: &str) {
    let Some((parent, key)) = path.rsplit_once('/') else { return };
    match root.pointer_mut(parent).unwrap() {
        Value::Object(map) => drop(map.remove(key)),
        Value::Array(list) => drop(list.remove(key.parse().unwrap())),
        _ => {}
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}
