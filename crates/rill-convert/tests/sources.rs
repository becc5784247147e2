//! Source containers that are damaged or lie: a conversion must not turn them into good ones.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use rill_convert::{
    Control, ConvertError, ExpertCodec, Plan, Progress, TrunkCodec, convert, weight_errors,
};
use rill_format::container::{Container, MANIFEST, Manifest};
use rill_format::{Checkpoint, Folder};

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

const CONTROL: Control<'_> = Control { jobs: 2, progress: &go_on };

fn checkpoint() -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/k3-tiny");
    Checkpoint::open(Folder::Disk(path)).unwrap()
}

/// A container with packed matrices in the trunk.
fn container() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let plan = Plan::new(&checkpoint(), ExpertCodec::Source, TrunkCodec::Q8).unwrap();
    convert(&checkpoint(), &plan, dir.path(), &CONTROL).unwrap();
    dir
}

fn convert_container(from: &Path, experts: ExpertCodec, to: &Path) -> Result<(), ConvertError> {
    let source = Container::open(from.to_owned())?;
    let plan = Plan::new(&source, experts, TrunkCodec::Source)?;
    convert(&source, &plan, to, &CONTROL)
}

#[test]
fn a_damaged_trunk_is_refused_before_anything_is_written() {
    let dir = container();
    let path = dir.path().join("trunk.rill");
    let mut bytes = fs::read(&path).unwrap();
    bytes[70_000] ^= 16;
    fs::write(&path, bytes).unwrap();
    let to = tempfile::tempdir().unwrap();
    let error = convert_container(dir.path(), ExpertCodec::Source, to.path()).unwrap_err();
    assert!(error.to_string().contains("trunk.rill"), "{error}");
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
    // Nor is anything measured against it.
    let good = container();
    let good = Container::open(good.path().to_owned()).unwrap();
    let source = Container::open(dir.path().to_owned()).unwrap();
    let error = weight_errors(&good, &source, &CONTROL).unwrap_err();
    assert!(error.to_string().contains("trunk.rill"), "{error}");
}

#[test]
fn a_damaged_record_is_refused_by_name() {
    let dir = container();
    let path = dir.path().join("experts-00004.rill");
    let mut bytes = fs::read(&path).unwrap();
    bytes[40_000] ^= 1;
    fs::write(&path, bytes).unwrap();
    for experts in [ExpertCodec::Source, ExpertCodec::Q4] {
        let to = tempfile::tempdir().unwrap();
        let error = convert_container(dir.path(), experts, to.path()).unwrap_err().to_string();
        assert!(error.contains("experts-00004.rill") && error.contains("expert 2"), "{error}");
        assert!(!to.path().join(MANIFEST).exists());
    }
}

/// Changes a manifest and gives it a checksum that fits.
fn rewrite(folder: &Path, change: impl FnOnce(&mut Manifest)) {
    let path = folder.join(MANIFEST);
    let mut manifest: Manifest = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    fs::write(&path, manifest.to_bytes()).unwrap();
}

#[test]
fn sizes_that_do_not_fit_their_format_are_errors_and_no_panics() {
    type Change = fn(&mut Manifest);
    let changes: [(&str, Change); 6] = [
        ("a longer tensor", |m| embedding(m).code_bytes += 64),
        ("a shorter tensor", |m| embedding(m).code_bytes -= 1),
        ("a shape beyond 64 bits", |m| embedding(m).shape = vec![1 << 33, 1 << 33, 1]),
        ("fewer rows than bytes", |m| embedding(m).shape[0] -= 1),
        ("experts of many rows", |m| m.experts.as_mut().unwrap().down.rows = 1 << 60),
        ("experts of fewer rows", |m| m.experts.as_mut().unwrap().up.rows -= 1),
    ];
    for (what, change) in changes {
        let dir = container();
        rewrite(dir.path(), change);
        for experts in [ExpertCodec::Source, ExpertCodec::Q8] {
            let to = tempfile::tempdir().unwrap();
            let error = match convert_container(dir.path(), experts, to.path()) {
                Ok(()) => panic!("{what} was accepted"),
                Err(error) => error,
            };
            // A lie about a size is not a lack of room.
            assert!(!matches!(error, ConvertError::NoSpace { .. }), "{what}: {error}");
            assert!(!to.path().join(MANIFEST).exists(), "{what}: {error}");
        }
        let source = checkpoint();
        let measured = Container::open(dir.path().to_owned())
            .map_err(ConvertError::from)
            .and_then(|c| weight_errors(&c, &source, &CONTROL));
        assert!(measured.is_err(), "{what}: {measured:?}");
    }
}

/// The embedding; behind it lie small tensors that nobody asks for.
fn embedding(manifest: &mut Manifest) -> &mut rill_format::container::TrunkTensor {
    let tensors = &mut manifest.trunk.runs[0].tensors;
    let at = tensors.iter().position(|t| t.name.ends_with("embed_tokens.weight")).unwrap();
    tensors.truncate(at + 1);
    &mut tensors[at]
}

#[test]
fn weights_are_compared_with_a_checkpoint_or_a_container() {
    let dir = container();
    let ours = Container::open(dir.path().to_owned()).unwrap();
    let against_itself = weight_errors(&ours, &ours, &CONTROL).unwrap();
    assert!(against_itself.iter().all(|class| class.worst == 0.0 && class.mean == 0.0));
    let found = weight_errors(&ours, &checkpoint(), &CONTROL).unwrap();
    let one_job = Control { jobs: 1, progress: &go_on };
    assert_eq!(weight_errors(&ours, &checkpoint(), &one_job).unwrap(), found);
    let weights: u64 = found.iter().map(|class| class.weights).sum();
    let of_experts: u64 = found.iter().filter(|c| c.experts).map(|c| c.weights).sum();
    assert_eq!(of_experts, 8 * 12 * 3 * 64 * 96);
    assert!(weights > of_experts);
    for class in &found {
        let lossless = class.experts || !class.format.starts_with("q8");
        assert_eq!(class.worst == 0.0, lossless, "{class:?}");
        assert!(class.worst < 0.01 && class.mean <= class.worst, "{class:?}");
        let named = class.worst_tensor.contains(class.class.rsplit('*').next().unwrap());
        assert!(named, "{class:?}");
    }
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/kimi-linear-tiny");
    let other = Checkpoint::open(Folder::Disk(other)).unwrap();
    let error = weight_errors(&ours, &other, &CONTROL).unwrap_err().to_string();
    assert!(error.contains("name the source"), "{error}");
}
