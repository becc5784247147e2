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
