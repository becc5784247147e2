//! The same bytes on every machine: fingerprints of converted fixtures, which are checksums of every
//! byte, as they came out on x86-64.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::ops::ControlFlow;
use std::path::Path;

use rill_convert::{
    Control, ConvertSource, ExpertCodec, FirstLayers, Plan, Progress, TrunkCodec, convert,
};
use rill_format::container::Container;
use rill_format::{Checkpoint, Folder, Waste};

const SOURCE: (ExpertCodec, TrunkCodec) = (ExpertCodec::Source, TrunkCodec::Source);
const MXFP4Z: (ExpertCodec, TrunkCodec) = (ExpertCodec::Mxfp4z, TrunkCodec::Source);
const Q8: (ExpertCodec, TrunkCodec) = (ExpertCodec::Q8, TrunkCodec::Q8);
const Q4: (ExpertCodec, TrunkCodec) = (ExpertCodec::Q4, TrunkCodec::Q4);
const TRELLIS: (ExpertCodec, TrunkCodec) = (ExpertCodec::Trellis { rate: 23 }, TrunkCodec::Q4);
const ROTATED: (ExpertCodec, TrunkCodec) =
    (ExpertCodec::Trellis { rate: 24 }, TrunkCodec::Trellis { rate: 28 });
const SMALL: (ExpertCodec, TrunkCodec) = (ExpertCodec::Trellis { rate: 19 }, TrunkCodec::Source);

const THINNED: (ExpertCodec, TrunkCodec) =
    (ExpertCodec::Mxfp4zThinned { hundredths: 345 }, TrunkCodec::Source);

fn fingerprint(source: &dyn ConvertSource, codecs: (ExpertCodec, TrunkCodec)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let plan = Plan::new(source, codecs.0, codecs.1).unwrap();
    let progress = |_: Progress| ControlFlow::Continue(());
    convert(source, &plan, dir.path(), &Control { jobs: 2, progress: &progress }).unwrap();
    Container::open(dir.path().to_owned()).unwrap().manifest().fingerprint.clone()
}

fn checkpoint(path: &str) -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path);
    Checkpoint::open(Folder::Disk(path)).unwrap()
}

#[test]
fn conversions_write_the_committed_bytes() {
    let (k3, linear) = (checkpoint("k3-tiny"), checkpoint("kimi-linear-tiny"));
    let waste = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/k3-tiny.waste");
    let waste = Waste::open(waste).unwrap();
    let cut = FirstLayers::new(&k3, 3).unwrap();
    let sources: [(&str, &dyn ConvertSource, _, &str); 10] = [
        ("k3-tiny", &k3, SOURCE, "1df5c82209a1bd3b9ed41f5492a5ca77"),
        ("k3-tiny", &k3, MXFP4Z, "1f4ff4ff9ff21e3779de994955ebb754"),
        ("k3-tiny", &k3, THINNED, "22116265591baf2449b45b4d3a24b45b"),
        ("k3-tiny", &k3, Q8, "181af15ec301ec15b70371e04007be1b"),
        ("k3-tiny", &k3, Q4, "ba9106114a1be91b57fae1c1ebf91110"),
        ("k3-tiny, 3 layers", &cut, Q4, "c1c0aa512723937cf2fbe91d509ad20b"),
        ("kimi-linear-tiny", &linear, SOURCE, "029fa89d14401db7ef8e11209fe6aae6"),
        ("kimi-linear-tiny", &linear, Q8, "ac1460f3f1f7d7df63f10263f9dc409b"),
        ("kimi-linear-tiny", &linear, Q4, "cff4e53490ceba83f82738d9753e5a97"),
        ("k3-tiny.waste", &waste, Q8, "130f0997543d0ce8d7b8044291c6ad86"),
    ];
    let found =
        sources.map(|(name, source, codecs, _)| (name, codecs, fingerprint(source, codecs)));
    let expected = sources.map(|(name, _, codecs, expected)| (name, codecs, expected.to_owned()));
    assert_eq!(found, expected);
}

// One by one, and of few layers, because packing these takes minutes where the CPU is emulated.

#[test]
fn trellis_experts_have_the_committed_bytes() {
    let k3 = checkpoint("k3-tiny");
    let cut = FirstLayers::new(&k3, 3).unwrap();
    assert_eq!(fingerprint(&cut, TRELLIS), "ced9b17e3a6d32e8dd53fa7c84e323ff");
}

#[test]
fn trellis_experts_of_fewer_bits_have_the_committed_bytes() {
    let k3 = checkpoint("k3-tiny");
    let cut = FirstLayers::new(&k3, 2).unwrap();
    assert_eq!(fingerprint(&cut, SMALL), "887dfb99efcd8a6a7256d9bdc7903d87");
}

#[test]
fn rotated_experts_and_trunk_have_the_committed_bytes() {
    let linear = checkpoint("kimi-linear-tiny");
    let cut = FirstLayers::new(&linear, 2).unwrap();
    assert_eq!(fingerprint(&cut, ROTATED), "b6e1c22fe27ec344301bf7f20a497579");
}
