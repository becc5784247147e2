//! Converting the first layers only.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use rill::{Engine, EngineOptions, LayerIdx, Logits, Observer};
use rill_convert::{
    Control, ConvertError, ConvertSource, ExpertCodec, FirstLayers, Plan, Progress, Reclaim,
    TrunkCodec, convert, convert_and_reclaim, differing_files, weight_errors,
};
use rill_format::container::Container;
use rill_format::{Checkpoint, Folder, Waste};
use rill_testkit::{Tensor, tensors, write_checkpoint};
use tempfile::TempDir;

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

const CONTROL: Control<'_> = Control { jobs: 2, progress: &go_on };
const LAYERS: u32 = 4;
const IDS: [u32; 10] = [7, 31, 200, 5, 5, 99, 12, 301, 44, 8];

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn checkpoint(path: &Path) -> Checkpoint {
    Checkpoint::open(Folder::Disk(path.to_owned())).unwrap()
}

/// A lossless container of the first layers.
fn cut(source: &dyn ConvertSource, experts: ExpertCodec) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let source = FirstLayers::new(source, LAYERS).unwrap();
    let plan = Plan::new(&source, experts, TrunkCodec::Source).unwrap();
    convert(&source, &plan, dir.path(), &CONTROL).unwrap();
    dir
}

/// Hidden states after every layer.
#[derive(Default)]
struct Hidden(BTreeMap<usize, Vec<f32>>);

impl Observer for Hidden {
    fn after_layer(&mut self, layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        self.0.insert(layer.0, hidden.to_vec());
        ControlFlow::Continue(())
    }
}

fn run(folder: &Path) -> (Vec<f32>, BTreeMap<usize, Vec<f32>>) {
    let engine = Engine::open(Folder::Disk(folder.to_owned()), &EngineOptions::default()).unwrap();
    let mut hidden = Hidden::default();
    let session = &mut engine.new_session();
    let logits = engine.forward_observed(session, &IDS, Logits::All, &mut hidden).unwrap();
    (logits, hidden.0)
}

#[test]
fn its_layers_compute_what_they_do_in_the_whole_model() {
    for path in ["fixtures/k3-tiny", "fixtures/kimi-linear-tiny"] {
        let original = checkpoint(&repository(path));
        let dir = cut(&original, ExpertCodec::Source);
        let (logits, hidden) = run(dir.path());
        let (_, whole) = run(&repository(path));
        assert_eq!(hidden.len() as u32, LAYERS);
        assert!(whole.len() > hidden.len());
        for (layer, hidden) in hidden {
            assert!(hidden == whole[&layer], "{path}, layer {layer}");
        }
        // And its logits are those of a checkpoint of these layers.
        let few = tempfile::tempdir().unwrap();
        let config = fs::read(dir.path().join("config.json")).unwrap();
        fs::write(few.path().join("config.json"), &config).unwrap();
        let tensors = tensors(&serde_json::from_slice(&config).unwrap());
        assert!(tensors.len() < original.len());
        let read = |t: &Tensor| original.read(original.require(&t.name).unwrap().id).unwrap();
        write_checkpoint(few.path(), &tensors, 2, read).unwrap();
        assert!(logits == run(few.path()).0, "{path}");
        assert!(logits.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn it_is_compared_with_the_same_layers_of_its_source() {
    let original = checkpoint(&repository("fixtures/k3-tiny"));
    let dir = cut(&original, ExpertCodec::Source);
    let container = Container::open(dir.path().to_owned()).unwrap();
    let source = FirstLayers::as_many_as(&container, &original).unwrap().unwrap();
    assert!(weight_errors(&container, &source, &CONTROL).unwrap().iter().all(|c| c.worst == 0.0));
    assert_eq!(differing_files(&container, &source).unwrap(), [""; 0]);
    assert_eq!(differing_files(&container, &original).unwrap(), ["config.json"]);
    assert!(weight_errors(&container, &original, &CONTROL).is_err());
    assert!(FirstLayers::as_many_as(&original, &container).unwrap().is_none());
}

#[test]
fn containers_of_either_kind_are_cut_like_checkpoints() {
    let original = checkpoint(&repository("fixtures/k3-tiny"));
    let direct = cut(&original, ExpertCodec::Q8);
    let whole = tempfile::tempdir().unwrap();
    let plan = Plan::new(&original, ExpertCodec::Source, TrunkCodec::Source).unwrap();
    convert(&original, &plan, whole.path(), &CONTROL).unwrap();
    let container = Container::open(whole.path().to_owned()).unwrap();
    let fingerprint = |dir: &TempDir| {
        Container::open(dir.path().to_owned()).unwrap().manifest().fingerprint.clone()
    };
    assert_eq!(fingerprint(&cut(&container, ExpertCodec::Q8)), fingerprint(&direct));
    let waste = Waste::open(repository("fixtures/k3-tiny.waste")).unwrap();
    let (_, hidden) = run(cut(&waste, ExpertCodec::Q8).path());
    assert_eq!(hidden.len() as u32, LAYERS);
}

#[test]
fn more_layers_than_there_are_or_none_with_experts_are_refused() {
    let original = checkpoint(&repository("fixtures/k3-tiny"));
    for layers in [0, 1, 10, u32::MAX] {
        let error = FirstLayers::new(&original, layers).err().unwrap().to_string();
        assert!(error.contains("2 to 9 layers"), "{error}");
    }
}

#[test]
fn shards_are_not_deleted_for_a_part_of_what_is_in_them() {
    let (dir, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for entry in fs::read_dir(repository("fixtures/k3-tiny")).unwrap().flatten() {
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let original = checkpoint(dir.path());
    let few = FirstLayers::new(&original, LAYERS).unwrap();
    let plan = Plan::new(&few, ExpertCodec::Source, TrunkCodec::Source).unwrap();
    let reclaim = Reclaim::new(&original, true).unwrap();
    let error = convert_and_reclaim(&original, &plan, to.path(), &CONTROL, &reclaim).unwrap_err();
    assert!(matches!(error, ConvertError::NotReclaimable { .. }), "{error}");
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
}
