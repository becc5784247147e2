//! Writes a checkpoint with the headers and sizes of a published model, of which only the first
//! layers take room on the disk: random weights there, holes elsewhere. To measure conversions with:
//!
//! ```sh
//! cargo run --release -p rill-convert --example true_shape -- kimi-k3 2 DIR
//! rill convert DIR OUT --layers 2
//! ```
//!
//! Embedding, head and vision are holes, which read as zeros.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use rill_convert::SynthModel;
use rill_testkit::{Dtype, Tensor, kimi_k3_tensors, kimi_linear_tensors, write_checkpoint};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, layers, dir] = &args[..] else { return usage() };
    let Ok(layers) = layers.parse::<u32>() else { return usage() };
    let (model, tensors, n_shards) = match model.as_str() {
        "kimi-k3" => (SynthModel::KimiK3, kimi_k3_tensors(), 96),
        "kimi-linear-48b" => (SynthModel::KimiLinear48b, kimi_linear_tensors(), 20),
        _ => return usage(),
    };
    let dir = Path::new(dir);
    let fill = |tensor: &Tensor| match layer(&tensor.name) {
        Some(layer) if layer < layers => random(tensor),
        _ => Vec::new(),
    };
    let written = fs::create_dir_all(dir)
        .and_then(|()| fs::write(dir.join("config.json"), model.config()))
        .and_then(|()| write_checkpoint(dir, &tensors, n_shards, fill));
    match written {
        Ok(written) => {
            println!("{written:?}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}: {error}", dir.display());
            ExitCode::FAILURE
        }
    }
}

/// `…layers.N.…` → N.
fn layer(name: &str) -> Option<u32> {
    let (_, rest) = name.split_once("model.layers.")?;
    rest.split_once('.')?.0.parse().ok()
}

/// Bytes of plausible weights: all finite, of both signs, none very large.
fn random(tensor: &Tensor) -> Vec<u8> {
    let mut state =
        tensor.name.bytes().fold(1u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100000001b3));
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes: Vec<u8> = Vec::with_capacity(tensor.bytes() as usize + 8);
    while (bytes.len() as u64) < tensor.bytes() {
        bytes.extend(next().to_le_bytes());
    }
    bytes.truncate(tensor.bytes() as usize);
    // Sign and mantissa stay as they came; exponents are between 2^-8 and 2^-1 or so.
    match tensor.dtype {
        Dtype::Bf16 => bytes.chunks_exact_mut(2).for_each(|w| w[1] = w[1] & 0x83 | 0x3c),
        Dtype::F32 => bytes.chunks_exact_mut(4).for_each(|w| w[3] = w[3] & 0x83 | 0x3c),
        Dtype::U8 if tensor.name.ends_with("_scale") => {
            bytes.iter_mut().for_each(|scale| *scale = 116 + (*scale & 7));
        }
        Dtype::U8 => {}
    }
    bytes
}

fn usage() -> ExitCode {
    eprintln!("usage: true_shape kimi-k3|kimi-linear-48b LAYERS DIR");
    ExitCode::from(2)
}
