//! The engine on containers: the same weights give the same bits wherever they lie.

mod common;

use std::ops::ControlFlow;
use std::path::Path;

use common::{assert_same_bits, convert, convert_over, reference, repository};
use rill::reference::{Feed, Reference, compare};
use rill::{Engine, EngineOptions, Error, Folder, Logits};
use rill_convert::{ExpertCodec, TrunkCodec};
use rill_format::container::Container;

fn open(folder: &Path) -> Engine {
    let folder = Folder::Disk(folder.to_owned());
    Engine::open(folder, &EngineOptions::default()).expect("the model opens")
}

fn logits(engine: &Engine, ids: &[u32]) -> Vec<f32> {
    engine.forward(&mut engine.new_session(), ids, Logits::All).expect("it runs")
}

#[test]
fn a_lossless_container_gives_the_checkpoints_bits() {
    for path in ["models/k3-nano", "fixtures/k3-tiny", "fixtures/kimi-linear-tiny"] {
        let ids = reference(&Folder::Disk(repository(path))).input_ids;
        let dir = convert(path, ExpertCodec::Source, TrunkCodec::Source);
        let container = open(dir.path());
        assert_eq!(container.source_kind(), ".rill container");
        let checkpoint = open(&repository(path));
        assert_eq!(checkpoint.source_kind(), "published checkpoint");
        assert_same_bits(path, &logits(&container, &ids), &logits(&checkpoint, &ids));
        assert_eq!(container.stop_tokens(), checkpoint.stop_tokens());
        let (a, b) = (container.expert_counters(), checkpoint.expert_counters());
        assert_eq!((a.wanted, a.demanded), (b.wanted, b.demanded));
        assert!(a.demanded_bytes > b.demanded_bytes, "records have headers and padding");
    }
}

#[test]
fn entropy_coded_experts_give_the_checkpoints_bits() {
    // One whose records all have one size, and one whose records differ in size.
    let uneven = tempfile::tempdir().expect("a temporary folder");
    rill_testkit::write_uneven_experts(uneven.path(), &repository("fixtures/k3-tiny"), 2)
        .expect("there is room");
    let ids = reference(&Folder::Disk(repository("fixtures/k3-tiny"))).input_ids;
    for path in [repository("models/k3-nano"), uneven.path().to_owned()] {
        let ids = match path == uneven.path() {
            true => ids.clone(),
            false => reference(&Folder::Disk(path.clone())).input_ids,
        };
        let path = path.to_str().expect("Unicode");
        let expected = logits(&open(Path::new(path)), &ids);
        assert!(expected.iter().all(|x| x.is_finite()), "{path}");
        let other = tempfile::tempdir().expect("a temporary folder");
        for shares in [vec![], vec![(other.path().to_owned(), 2.0)]] {
            let dir = convert_over(path, ExpertCodec::Mxfp4z, TrunkCodec::Source, &shares);
            assert_same_bits(path, &logits(&open(dir.path()), &ids), &expected);
            floor_gives_the_same_bits(dir.path(), &ids);
        }
    }
}

/// The same logits with everything held and with the least that works.
fn floor_gives_the_same_bits(folder: &Path, ids: &[u32]) {
    let options = |budget_bytes| EngineOptions {
        budget_bytes,
        context: ids.len(),
        logits: ids.len(),
        ..EngineOptions::default()
    };
    let folder = Folder::Disk(folder.to_owned());
    let open = |budget| Engine::open(folder.clone(), &options(budget));
    let expected = logits(&open(0).expect("it opens"), ids);
    let Some(Error::BelowFloor { plan }) = open(1).err() else { panic!("one byte is enough?") };
    let engine = open(plan.floor_bytes).expect("the floor is enough");
    assert_same_bits("at the floor", &logits(&engine, ids), &expected);
    // All again, token by token: nothing that is evicted or read over may differ.
    let mut session = engine.new_session();
    let mut last = Vec::new();
    for &id in ids {
        last = engine.forward(&mut session, &[id], Logits::Last).expect("it runs");
    }
    assert_same_bits("token by token", &last, &expected[expected.len() - last.len()..]);
}

#[test]
fn entropy_coded_experts_are_described_without_their_padding() {
    let dir = convert("models/k3-nano", ExpertCodec::Mxfp4z, TrunkCodec::Source);
    let folder = || Folder::Disk(dir.path().to_owned());
    let about = rill::describe(folder()).expect("its headers are right");
    let container = Container::open(dir.path().to_owned()).expect("it is whole");
    let (mut code_bytes, mut file_bytes) = (0, 0);
    for bank in container.bank_list() {
        for expert in 0..bank.experts {
            let mut record = vec![0; container.record_bytes(bank.layer, expert)];
            container.read_record(bank.layer, expert, true, &mut record).expect("it is whole");
            let own = container.record_layout(bank.layer, expert, &record).expect("it is whole");
            code_bytes += own.matrices.iter().map(|m| m.code_bytes).sum::<u64>();
            file_bytes += record.len() as u64;
        }
    }
    let [trunk, experts] = &about.formats;
    assert_eq!((experts["mxfp4z"].bytes, about.headers_read), (code_bytes, None));
    let trunk: u64 = trunk.values().map(|share| share.bytes).sum();
    assert_eq!(about.payload_bytes, trunk + code_bytes);
    assert_eq!(about.file_bytes, container.manifest().trunk.bytes + file_bytes);
    assert!(code_bytes < file_bytes);
    // A header that lies is named.
    let bank = &container.bank_list()[0];
    let path = dir.path().join(&bank.stripes[0].file);
    let mut bytes = std::fs::read(&path).expect("it is there");
    bytes[45] ^= 1;
    std::fs::write(&path, bytes).expect("it can be written");
    let error = rill::describe(folder()).expect_err("its header lies").to_string();
    assert!(error.contains("header of layer") && error.contains("experts-"), "{error}");
}

#[test]
fn every_kind_of_container_runs_at_its_floor() {
    let tiny = "fixtures/k3-tiny";
    let ids = reference(&Folder::Disk(repository(tiny))).input_ids;
    for trunk in [TrunkCodec::Source, TrunkCodec::Q8, TrunkCodec::Q4] {
        floor_gives_the_same_bits(convert(tiny, ExpertCodec::Source, trunk).path(), &ids);
    }
    let linear = "fixtures/kimi-linear-tiny";
    let linear_ids = reference(&Folder::Disk(repository(linear))).input_ids;
    for (experts, trunk) in [
        (ExpertCodec::Q4, TrunkCodec::Q4),
        (ExpertCodec::Trellis { rate: 24 }, TrunkCodec::Trellis { rate: 28 }),
    ] {
        floor_gives_the_same_bits(convert(linear, experts, trunk).path(), &linear_ids);
    }
    floor_gives_the_same_bits(&repository("fixtures/k3-tiny.waste"), &ids);
}

#[test]
fn records_spread_over_folders_give_the_same_bits() {
    let nano = "models/k3-nano";
    let ids = reference(&Folder::Disk(repository(nano))).input_ids[..100].to_vec();
    let others = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let shares = [(others[0].path().to_owned(), 1.0), (others[1].path().to_owned(), 2.0)];
    let dir = convert_over(nano, ExpertCodec::Source, TrunkCodec::Source, &shares);
    let spread = open(dir.path());
    assert_same_bits("spread", &logits(&spread, &ids), &logits(&open(&repository(nano)), &ids));
    floor_gives_the_same_bits(dir.path(), &ids);
}

#[test]
fn a_small_container_is_near_and_still_speaks() {
    let folder = Folder::Disk(repository("models/k3-nano"));
    let text = folder.read("heldout.txt", 1 << 20).expect("it is there");
    let perplexity = |experts, trunk| {
        let dir = convert("models/k3-nano", experts, trunk);
        let engine = open(dir.path());
        let ids = engine.open_tokenizer().expect("it is inside").encode_text_bytes(&text);
        let found = engine.perplexity(&ids[..2550], 255, &mut |_, _| ControlFlow::Continue(()));
        found.expect("it runs").perplexity
    };
    let source = perplexity(ExpertCodec::Source, TrunkCodec::Source);
    let q8 = perplexity(ExpertCodec::Q8, TrunkCodec::Q8);
    let q4 = perplexity(ExpertCodec::Source, TrunkCodec::Q4);
    println!("perplexity of ten windows: source {source:.3}, q8 {q8:.3}, trunk q4 {q4:.3}");
    assert!((q8 / source - 1.0).abs() < 0.005, "{q8} against {source}");
    assert!((q4 / source - 1.0).abs() < 0.2, "{q4} against {source}");
    assert_ne!(q4, source);
}

#[test]
fn a_changed_byte_ends_the_request_by_name_and_nothing_else() {
    let dir = convert("fixtures/k3-tiny", ExpertCodec::Source, TrunkCodec::Source);
    let ids = reference(&Folder::Disk(repository("fixtures/k3-tiny"))).input_ids;
    let whole = logits(&open(dir.path()), &ids);
    // Nothing of layer 5 has been read yet.
    let engine = open(dir.path());
    let path = dir.path().join("experts-00005.rill");
    let good = std::fs::read(&path).unwrap();
    let mut bad = good.clone();
    // One bit of every expert's payload.
    let record = bad.len() / 12;
    (0..12).for_each(|e| bad[e * record + 5000] ^= 4);
    std::fs::write(&path, &bad).unwrap();
    let mut session = engine.new_session();
    let error = engine.forward(&mut session, &ids, Logits::All).expect_err("it is refused");
    let error = error.to_string();
    assert!(error.contains("of layer 5") && error.contains("experts-00005.rill"), "{error}");
    assert_eq!(session.position(), 0);
    std::fs::write(&path, &good).unwrap();
    assert_same_bits("after repair", &logits(&engine, &ids), &whole);
}

#[test]
fn a_changed_byte_of_the_trunk_is_noticed_when_the_model_is_opened() {
    let dir = convert("fixtures/k3-tiny", ExpertCodec::Source, TrunkCodec::Q8);
    let path = dir.path().join("trunk.rill");
    let good = std::fs::read(&path).unwrap();
    // Embedding and head, and two layers. The vision tower at the end is not read.
    for at in [0, good.len() / 3, good.len() / 2] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let folder = Folder::Disk(dir.path().to_owned());
        let error = Engine::open(folder, &EngineOptions::default()).err().expect("it is refused");
        assert!(error.to_string().contains("trunk.rill"), "{error}");
    }
    std::fs::write(&path, &good).unwrap();
    open(dir.path());
}

#[test]
fn a_peers_container_agrees_with_float64_on_its_own_weights() {
    let folder = Folder::Disk(repository("fixtures/k3-tiny.waste"));
    let engine = Engine::open(folder.clone(), &EngineOptions::default()).expect("it opens");
    assert_eq!(engine.source_kind(), ".waste container, version 0");
    let bytes = folder.read("expected.safetensors", 1 << 30).expect("it is there");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("valid");
    let numbers = |name: &str| -> Vec<f32> {
        let data = file.tensor(name).expect("it has it").data().chunks_exact(4);
        data.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let ids = file.tensor("input_ids").unwrap().data().chunks_exact(4);
    let ids: Vec<u32> = ids.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let expected = numbers("logits");
    let got = logits(&engine, &ids);
    let vocab = engine.config().vocab_size;
    let error = |(a, b): (&[f32], &[f32])| {
        let d: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        (d / b.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>()).sqrt()
    };
    let mut errors: Vec<f64> = got.chunks(vocab).zip(expected.chunks(vocab)).map(error).collect();
    errors.sort_by(f64::total_cmp);
    let (median, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    let peer = error((&got[got.len() - vocab..], &numbers("peer_last_logits")));
    println!("median {median:.2e}, worst {worst:.2e}; against the peer's engine {peer:.2e}");
    assert!(median <= 3e-6 && worst <= 1e-4, "median {median:e}, worst {worst:e}");
    assert!(peer <= 1e-4, "{peer:e}");
}

#[test]
fn a_reference_of_the_checkpoint_fits_its_lossless_container() {
    let path = "fixtures/kimi-linear-tiny";
    let dir = convert(path, ExpertCodec::Source, TrunkCodec::Source);
    let bytes = std::fs::read(repository(path).join("expected.safetensors")).unwrap();
    let reference = Reference::parse(&bytes).unwrap();
    let found = compare(&open(dir.path()), &reference, Feed::Free).unwrap();
    assert!(found.logits.worst <= 2e-5, "{found:?}");
}

#[test]
fn kernels_know_every_format_of_a_container() {
    use rill_format::container::CodecName::{Bf16, F32, Mxfp4, Q4, Q8};
    for name in [F32, Bf16, Q8, Q4, Mxfp4] {
        let codec = rill_kernels::Codec::parse(name.as_str(), 128);
        assert_eq!(codec.map(|c| c.name()), Some(name.as_str()));
    }
}
