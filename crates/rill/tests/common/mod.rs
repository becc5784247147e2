//! Where the checkpoints are, and their expected values.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use rill::reference::Reference;
use rill::{Engine, EngineOptions, Error, Folder};
use rill_convert::{Control, ExpertCodec, Plan, TrunkCodec};
use rill_format::Checkpoint;

/// A path inside the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub(crate) fn k3_tiny() -> Folder {
    Folder::Disk(repository("fixtures/k3-tiny"))
}

pub(crate) fn kimi_linear_tiny() -> Folder {
    Folder::Disk(repository("fixtures/kimi-linear-tiny"))
}

pub(crate) fn demo() -> Folder {
    Folder::Disk(repository("models/k3-nano"))
}

/// The `expected.safetensors` beside a checkpoint.
pub(crate) fn reference(folder: &Folder) -> Reference {
    let bytes = folder.read("expected.safetensors", 1 << 30).expect("the file is there");
    Reference::parse(&bytes).expect("the file is a reference")
}

/// The least budget that works with these options.
pub(crate) fn floor_bytes(folder: &Folder, options: &EngineOptions) -> u64 {
    let below = EngineOptions { budget_bytes: 1, ..options.clone() };
    match Engine::open(folder.clone(), &below).err() {
        Some(Error::BelowFloor { plan }) => plan.floor_bytes,
        other => panic!("a budget of one byte: {other:?}"),
    }
}

/// A checkpoint of the repository as a container.
pub(crate) fn convert(path: &str, experts: ExpertCodec, trunk: TrunkCodec) -> tempfile::TempDir {
    convert_over(path, experts, trunk, &[])
}

/// With every record spread over further folders.
pub(crate) fn convert_over(
    path: &str,
    experts: ExpertCodec,
    trunk: TrunkCodec,
    folders: &[(PathBuf, f64)],
) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let checkpoint = Checkpoint::open(Folder::Disk(repository(path))).expect("it is there");
    let plan = Plan::new(&checkpoint, experts, trunk).expect("it can be planned");
    let plan = plan.spread(folders).expect("records are large enough");
    let control = Control { jobs: 2, progress: &|_| ControlFlow::Continue(()) };
    rill_convert::convert(&checkpoint, &plan, dir.path(), &control).expect("it converts");
    dir
}

/// Fails instead of waiting for ever.
pub(crate) fn within_a_minute<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, wait) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let result = work();
        let _ = done.send(());
        result
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = wait.recv_timeout(Duration::from_secs(60)) {
        panic!("still waiting after a minute");
    }
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// FNV-1a over the bits of numbers: one value to commit and to compare.
pub(crate) fn fingerprint(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|v| v.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// Fails at the first value whose bits differ.
pub(crate) fn assert_same_bits(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    if let Some(i) = got.iter().zip(expected).position(differs) {
        panic!("{what}: value {i} is {:e}, expected {:e}", got[i], expected[i]);
    }
}

/// A copy of a checkpoint on disk whose tensors can be changed.
pub(crate) struct Copy {
    pub(crate) dir: tempfile::TempDir,
}

impl Copy {
    pub(crate) fn of(source: &Path) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for entry in std::fs::read_dir(source).expect("the checkpoint is there") {
            let entry = entry.expect("its entries can be listed");
            // Not fs::copy: that would keep a read-only mark.
            let bytes = std::fs::read(entry.path()).expect("its files can be read");
            std::fs::write(dir.path().join(entry.file_name()), bytes).expect("there is room");
        }
        Self { dir }
    }

    pub(crate) fn folder(&self) -> Folder {
        Folder::Disk(self.dir.path().to_owned())
    }

    /// Changes the bytes of every tensor whose name `which` accepts; returns how many there were.
    pub(crate) fn edit(&self, which: impl Fn(&str) -> bool, edit: impl Fn(&mut [u8])) -> usize {
        let mut edited = 0;
        for entry in std::fs::read_dir(self.dir.path()).expect("the copy is there") {
            let path = entry.expect("its entries can be listed").path();
            let name = path.file_name().expect("a file").to_string_lossy().into_owned();
            if !name.starts_with("model-") {
                continue;
            }
            let mut bytes = std::fs::read(&path).expect("its files can be read");
            let (length, header) = safetensors::SafeTensors::read_metadata(&bytes).expect("valid");
            let ranges: Vec<_> = header
                .tensors()
                .into_iter()
                .filter(|(name, _)| which(name))
                .map(|(_, info)| info.data_offsets)
                .collect();
            for (begin, end) in ranges {
                edit(&mut bytes[8 + length + begin..8 + length + end]);
                edited += 1;
            }
            std::fs::write(&path, bytes).expect("there is room");
        }
        edited
    }
}
