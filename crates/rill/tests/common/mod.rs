//! Where the checkpoints are, and their expected values.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};

use rill::Folder;
use rill::reference::Reference;

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
