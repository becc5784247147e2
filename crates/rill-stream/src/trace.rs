//! Recorded routing: which experts every token used, as a safetensors file.
//!
//! The file holds one tensor, `expert_ids`, I16 of shape `(n_tokens, n_layers, top_k)`, and in its
//! metadata `n_experts`. A file without `n_experts` (they come from other programs) is taken to have
//! just enough experts for its largest id.

use std::path::Path;

use serde::Deserialize;

use crate::files::read_whole;
use crate::{Access, Geometry, StreamError, write_whole};

/// Which experts a run of tokens used, in every layer that has experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    geometry: Geometry,
    top_k: usize,
    /// `(n_tokens, n_layers, top_k)`
    ids: Vec<u16>,
}

impl Trace {
    /// A recording of `ids`, `(n_tokens, n_layers, top_k)`. `file` is used in messages.
    ///
    /// # Errors
    ///
    /// If the sizes do not fit each other, exceed what a cache can be planned for, or if an id is
    /// not below `n_experts` or stands twice in one choice.
    pub fn new(
        file: &str,
        geometry: Geometry,
        top_k: usize,
        ids: Vec<u16>,
    ) -> Result<Self, StreamError> {
        let Geometry { n_layers, n_experts } = geometry;
        let wrong = |what: String, expected: String, found: String| StreamError::Trace {
            file: file.to_owned(),
            what,
            expected,
            found,
        };
        if n_experts == 0 || n_experts > MAX_EXPERTS {
            let expected = format!("from 1 to {MAX_EXPERTS}");
            return Err(wrong("number of experts".to_owned(), expected, n_experts.to_string()));
        }
        if n_layers == 0 || n_layers > MAX_RECORDS / n_experts {
            let expected = format!("from 1 to {}", MAX_RECORDS / n_experts);
            return Err(wrong("number of layers".to_owned(), expected, n_layers.to_string()));
        }
        if top_k == 0 || top_k > n_experts as usize {
            let expected = format!("from 1 to {n_experts}");
            return Err(wrong("experts per choice".to_owned(), expected, top_k.to_string()));
        }
        let token_ids = n_layers as usize * top_k;
        if ids.is_empty() || !ids.len().is_multiple_of(token_ids) {
            let expected = format!("a multiple of {token_ids}");
            return Err(wrong("number of ids".to_owned(), expected, ids.len().to_string()));
        }

        // The choice in which each expert was last seen, counted from 1.
        let mut seen = vec![0; n_experts as usize];
        for (choice, ids) in ids.chunks_exact(top_k).enumerate() {
            for &id in ids {
                let place = || {
                    let (token, layer) = (choice / n_layers as usize, choice % n_layers as usize);
                    format!("expert of token {token}, layer {layer}")
                };
                let Some(last) = seen.get_mut(usize::from(id)) else {
                    return Err(wrong(place(), format!("below {n_experts}"), id.to_string()));
                };
                if *last == choice + 1 {
                    return Err(wrong(place(), "chosen once".to_owned(), format!("{id} twice")));
                }
                *last = choice + 1;
            }
        }
        Ok(Self { geometry, top_k, ids })
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// If it cannot be read, is larger than any useful recording, or is not one.
    pub fn read(path: &Path) -> Result<Self, StreamError> {
        let bytes = read_whole(path, MAX_FILE_BYTES)?;
        Self::parse(&path.display().to_string(), &bytes)
    }

    /// Takes a file's bytes apart. `file` is used in messages.
    ///
    /// # Errors
    ///
    /// The first rule that the bytes break.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, StreamError> {
        let wrong = |what: &str, expected: &str, found: String| StreamError::Trace {
            file: file.to_owned(),
            what: what.to_owned(),
            expected: expected.to_owned(),
            found,
        };
        let Some((length, rest)) = bytes.split_first_chunk() else {
            return Err(wrong("size in bytes", "at least 8", bytes.len().to_string()));
        };
        let header_bytes = u64::from_le_bytes(*length);
        let header_bytes = match usize::try_from(header_bytes) {
            Ok(n) if n <= rest.len().min(MAX_HEADER_BYTES) => n,
            _ => {
                let expected = format!("at most {}", rest.len().min(MAX_HEADER_BYTES));
                return Err(wrong("header size in bytes", &expected, header_bytes.to_string()));
            }
        };
        let (header, payload) = rest.split_at(header_bytes);
        let header: Header = serde_json::from_slice(header).map_err(|e| {
            wrong(
                "header",
                "that of one tensor expert_ids (n_tokens, n_layers, top_k)",
                e.to_string(),
            )
        })?;
        let Tensor { dtype, shape: [n_tokens, n_layers, top_k], data_offsets } = header.expert_ids;
        if dtype != "I16" {
            return Err(wrong("type of expert_ids", "I16", format!("{dtype:?}")));
        }
        let whole = [0, payload.len() as u64];
        if data_offsets != whole {
            let expected = format!("{whole:?}, the rest of the file");
            return Err(wrong("data_offsets", &expected, format!("{data_offsets:?}")));
        }
        let dims = [n_tokens, n_layers, top_k, 2];
        if dims.iter().try_fold(1, |n: u64, &dim| n.checked_mul(dim)) != Some(whole[1]) {
            let expected = format!("{} ids", payload.len() / 2);
            return Err(wrong("shape of expert_ids", &expected, format!("{:?}", &dims[..3])));
        }
        // Whatever is cut off here is far beyond the limits that `new` checks.
        let n_layers = u32::try_from(n_layers).unwrap_or(u32::MAX);
        let top_k = usize::try_from(top_k).unwrap_or(usize::MAX);

        let mut ids = Vec::with_capacity(payload.len() / 2);
        for &id in payload.as_chunks().0 {
            let id = i16::from_le_bytes(id);
            let negative = |_| wrong("expert id", "0 or more", id.to_string());
            ids.push(u16::try_from(id).map_err(negative)?);
        }
        let n_experts = match header.metadata.and_then(|m| m.n_experts) {
            Some(stated) => stated.parse().map_err(|_| {
                wrong("n_experts in the metadata", "a whole number", format!("{stated:?}"))
            })?,
            None => ids.iter().max().map_or(0, |&id| u32::from(id) + 1),
        };
        Self::new(file, Geometry { n_layers, n_experts }, top_k, ids)
    }

    /// Writes the recording to a file, which appears whole or not at all. `model` says in words
    /// where it comes from.
    ///
    /// # Errors
    ///
    /// If the disk does not take it; an older file of this name then stays as it was.
    pub fn write(&self, path: &Path, model: &str) -> Result<(), StreamError> {
        let payload_bytes = 2 * self.ids.len();
        let header = serde_json::json!({
            "__metadata__": {
                "model": model,
                "n_experts": self.geometry.n_experts.to_string(),
                "shape": "tokens, moe layers, top-k",
            },
            "expert_ids": {
                "dtype": "I16",
                "shape": [self.n_tokens(), self.geometry.n_layers, self.top_k],
                "data_offsets": [0, payload_bytes],
            },
        });
        let mut header = header.to_string();
        // The payload then starts at a multiple of eight, as the format recommends.
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        write_whole(path, Access::Usual, |out| {
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(header.as_bytes())?;
            self.ids.iter().try_for_each(|id| out.write_all(&id.to_le_bytes()))
        })
    }

    /// Layers and experts.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Experts that a token uses in a layer.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Tokens.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.ids.len() / (self.geometry.n_layers as usize * self.top_k)
    }

    /// The experts that `token` used in `layer`, `(top_k)`.
    ///
    /// # Panics
    ///
    /// If there is no such token or layer.
    #[must_use]
    pub fn chosen(&self, token: usize, layer: u32) -> &[u16] {
        assert!(layer < self.geometry.n_layers, "layer {layer} of {}", self.geometry.n_layers);
        let choice = token * self.geometry.n_layers as usize + layer as usize;
        &self.ids[choice * self.top_k..][..self.top_k]
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    #[serde(rename = "__metadata__")]
    metadata: Option<Metadata>,
    expert_ids: Tensor,
}

#[derive(Deserialize)]
struct Metadata {
    n_experts: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor {
    dtype: String,
    shape: [u64; 3],
    data_offsets: [u64; 2],
}

/// Ids are I16.
const MAX_EXPERTS: u32 = 1 << 15;
/// Ten times what any published model has; it bounds the memory of a policy.
const MAX_RECORDS: u32 = 1 << 20;
/// The header describes one tensor; the rest is what its writer had to say about it.
const MAX_HEADER_BYTES: usize = 1 << 16;
/// 90,000 tokens of Kimi K3.
const MAX_FILE_BYTES: u64 = 1 << 28;
