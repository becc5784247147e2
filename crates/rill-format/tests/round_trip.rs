//! What others wrote is read back bit for bit.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use rill_format::{Checkpoint, Dtype, Folder, FormatError, ShardHeader};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as TheirDtype, TensorView, serialize_to_file};

#[test]
fn the_four_dtypes_come_back_as_the_safetensors_crate_wrote_them() {
    let dir = tempfile::tempdir().unwrap();
    // Every byte pattern matters, NaNs included, so the values are just bytes.
    let bytes: Vec<u8> = (0..=255).collect();
    let cases = [
        ("single", TheirDtype::F32, Dtype::F32, vec![8, 8]),
        ("half", TheirDtype::F16, Dtype::F16, vec![2, 2, 32]),
        ("brain", TheirDtype::BF16, Dtype::BF16, vec![128]),
        ("packed", TheirDtype::U8, Dtype::U8, vec![256, 1, 1, 1]),
        ("scalar", TheirDtype::F32, Dtype::F32, vec![]),
        ("empty", TheirDtype::BF16, Dtype::BF16, vec![0, 7]),
    ];
    let views = cases.iter().map(|(name, theirs, ours, shape)| {
        let n = shape.iter().product::<usize>() * ours.size() as usize;
        (*name, TensorView::new(*theirs, shape.clone(), &bytes[..n]).unwrap())
    });
    serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();

    let checkpoint = Checkpoint::open(Folder::Disk(dir.path().to_owned())).unwrap();
    assert_eq!(checkpoint.len(), cases.len());
    assert_eq!(checkpoint.payload_bytes(), 4 * 256 + 4);
    assert_eq!(checkpoint.shards().collect::<Vec<_>>(), ["model.safetensors"]);
    for (name, theirs, ours, shape) in cases {
        let info = checkpoint.require(name).unwrap();
        assert_eq!(info.dtype, ours);
        assert_eq!(info.dtype.to_string(), theirs.to_string());
        assert_eq!(info.shape.iter().map(|&d| d as usize).collect::<Vec<_>>(), shape);
        assert_eq!(checkpoint.read(info.id).unwrap(), bytes[..info.bytes as usize]);
    }
    let id = checkpoint.require("half").unwrap().id;
    let mut row = [0; 64];
    checkpoint.read_range_into(id, 128, &mut row).unwrap();
    assert_eq!(row, bytes[128..192]);
}

#[test]
fn a_missing_shard_is_known_by_its_header_and_cannot_be_read() {
    const SHARD: &str = "model-00002-of-000003.safetensors";
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(repository().join("fixtures/k3-tiny")).unwrap().flatten() {
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let folder = || Folder::Disk(dir.path().to_owned());
    let whole = Checkpoint::open(folder()).unwrap();
    let header = whole.shard_header(SHARD).unwrap();
    let path = dir.path().join(SHARD);
    assert_eq!(header.file_bytes, fs::metadata(&path).unwrap().len());
    fs::remove_file(&path).unwrap();
    assert!(matches!(Checkpoint::open(folder()), Err(FormatError::MissingShard { .. })));

    let known = HashMap::from([(SHARD.to_owned(), header.clone())]);
    let partial = Checkpoint::open_without(folder(), &known).unwrap();
    assert_eq!(partial.payload_bytes(), whole.payload_bytes());
    for (a, b) in whole.iter().zip(partial.iter()) {
        assert_eq!((a.name, a.dtype, a.shape, a.shard), (b.name, b.dtype, b.shape, b.shard));
        match partial.read(b.id) {
            Ok(bytes) => assert!(b.shard != SHARD && bytes == whole.read(a.id).unwrap()),
            Err(error) => {
                assert!(b.shard == SHARD && matches!(error, FormatError::ShardGone { .. }))
            }
        }
    }
    assert!(partial.shard_header(SHARD).is_err());
    // The open file outlives its name, until it is closed.
    let id = whole.iter().find(|t| t.shard == SHARD).unwrap().id;
    whole.close_shard(SHARD);
    assert!(matches!(whole.read(id), Err(FormatError::ShardGone { .. })));

    for damaged in [
        ShardHeader { file_bytes: header.file_bytes - 1, header: header.header.clone() },
        ShardHeader { file_bytes: 7, header: header.header.clone() },
        ShardHeader { file_bytes: header.file_bytes, header: header.header[1..].to_vec() },
    ] {
        let known = HashMap::from([(SHARD.to_owned(), damaged)]);
        let error = Checkpoint::open_without(folder(), &known).unwrap_err().to_string();
        assert!(error.contains(SHARD), "{error}");
    }
}

#[test]
fn small_checkpoints_are_read_as_the_safetensors_crate_reads_them() {
    for (folder, n_shards) in
        [("fixtures/k3-tiny", 3), ("fixtures/kimi-linear-tiny", 2), ("models/k3-nano", 2)]
    {
        let path = repository().join(folder);
        let checkpoint = Checkpoint::open(Folder::Disk(path.clone())).unwrap();
        assert_eq!(checkpoint.shards().count(), n_shards);
        assert_same(&checkpoint, &path);
    }
}

#[test]
fn checkpoint_in_the_program_reads_as_the_one_on_disk() {
    let folder = Folder::Memory { name: "built-in demo", files: K3_TINY };
    assert!(folder.exists("config.json") && !folder.exists("absent.json"));
    assert_eq!(folder.describe("config.json"), "built-in demo/config.json");
    let path = repository().join("fixtures/k3-tiny");
    let config = fs::read(path.join("config.json")).unwrap();
    assert_eq!(folder.read("config.json", 1 << 20).unwrap(), config);
    assert!(folder.read("config.json", 10).is_err());
    assert_same(&Checkpoint::open(folder).unwrap(), &path);
}

#[test]
fn threads_share_a_checkpoint() {
    let path = repository().join("fixtures/k3-tiny");
    let checkpoint = Checkpoint::open(Folder::Disk(path)).unwrap();
    let alone: Vec<_> =
        checkpoint.iter().map(|info| (info, checkpoint.read(info.id).unwrap())).collect();
    thread::scope(|scope| {
        for thread in 0..4 {
            let (checkpoint, alone) = (&checkpoint, &alone);
            scope.spawn(move || {
                for i in 0..alone.len() {
                    let (info, bytes) = &alone[(i + thread * 200) % alone.len()];
                    assert_eq!(&checkpoint.read(info.id).unwrap(), bytes, "{}", info.name);
                }
            });
        }
    });
}

#[cfg(unix)]
#[test]
fn shards_may_be_links_as_in_a_download_cache() {
    let dir = tempfile::tempdir().unwrap();
    let path = repository().join("fixtures/kimi-linear-tiny");
    for entry in fs::read_dir(&path).unwrap() {
        let file = entry.unwrap().path();
        let link = dir.path().join(file.file_name().unwrap());
        std::os::unix::fs::symlink(file.canonicalize().unwrap(), link).unwrap();
    }
    assert_same(&Checkpoint::open(Folder::Disk(dir.path().to_owned())).unwrap(), &path);
}

macro_rules! k3_tiny {
    ($($file:literal),* $(,)?) => {
        &[$(($file, include_bytes!(concat!("../../../fixtures/k3-tiny/", $file)))),*]
    };
}

static K3_TINY: &[(&str, &[u8])] = k3_tiny![
    "config.json",
    "model.safetensors.index.json",
    "model-00001-of-000003.safetensors",
    "model-00002-of-000003.safetensors",
    "model-00003-of-000003.safetensors",
];

/// Every tensor of every shard under `path`, by the safetensors crate, is in the checkpoint.
fn assert_same(checkpoint: &Checkpoint, path: &Path) {
    let mut n_tensors = 0;
    let mut payload_bytes = 0;
    for shard in checkpoint.shards() {
        let file = fs::read(path.join(shard)).unwrap();
        for (name, theirs) in SafeTensors::deserialize(&file).unwrap().tensors() {
            let ours = checkpoint.require(&name).unwrap();
            assert_eq!(ours.shard, shard);
            assert_eq!(ours.dtype.to_string(), theirs.dtype().to_string());
            assert_eq!(ours.shape.iter().map(|&d| d as usize).collect::<Vec<_>>(), theirs.shape());
            assert_eq!(checkpoint.read(ours.id).unwrap(), theirs.data(), "{name}");
            n_tensors += 1;
            payload_bytes += ours.bytes;
        }
    }
    assert_eq!(checkpoint.len(), n_tensors);
    assert_eq!(checkpoint.iter().count(), n_tensors);
    assert_eq!(checkpoint.payload_bytes(), payload_bytes);
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
