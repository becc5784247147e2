//! Models and reference values that are part of the program, so that an installed binary can
//! answer and prove itself with nothing beside it.

use rill::Folder;

/// Declares a folder of files compiled into the program.
macro_rules! folder {
    ($name:literal, $path:literal, [$($file:literal),* $(,)?]) => {
        Folder::Memory {
            name: $name,
            files: &[$(($file, include_bytes!(concat!("../../../", $path, "/", $file)))),*],
        }
    };
}

/// The demo model.
pub(crate) fn demo() -> Folder {
    folder!(
        "built-in k3-nano",
        "models/k3-nano",
        [
            "config.json",
            "expected.safetensors",
            "generation_config.json",
            "model-00001-of-000002.safetensors",
            "model-00002-of-000002.safetensors",
            "model.safetensors.index.json",
            "tiktoken.model",
            "tokenizer_config.json",
        ]
    )
}

/// A K3-shaped checkpoint of adversarial random weights.
pub(crate) fn k3_tiny() -> Folder {
    folder!(
        "built-in k3-tiny",
        "fixtures/k3-tiny",
        [
            "config.json",
            "expected.safetensors",
            "model-00001-of-000003.safetensors",
            "model-00002-of-000003.safetensors",
            "model-00003-of-000003.safetensors",
            "model.safetensors.index.json",
        ]
    )
}

/// A Kimi-Linear-shaped checkpoint of random weights.
pub(crate) fn kimi_linear_tiny() -> Folder {
    folder!(
        "built-in kimi-linear-tiny",
        "fixtures/kimi-linear-tiny",
        [
            "config.json",
            "expected.safetensors",
            "model-00001-of-000002.safetensors",
            "model-00002-of-000002.safetensors",
            "model.safetensors.index.json",
        ]
    )
}
