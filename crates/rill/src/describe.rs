//! A model described from its headers.

use std::collections::BTreeMap;

use rill_format::Folder;

use crate::config::ModelConfig;
use crate::engine::{ModelSummary, config_of};
use crate::error::Error;
use crate::session::Session;
use crate::source::{self, Form};
use crate::weights;

/// What a folder holds, without loading it.
#[derive(Clone, Debug)]
pub struct Description {
    /// Kind of folder: published checkpoint or container.
    pub source_kind: &'static str,
    /// Names the weights of a `.rill` container.
    pub fingerprint: Option<String>,
    /// The model's configuration.
    pub config: ModelConfig,
    /// Counts and sizes that matter to the engine.
    pub summary: ModelSummary,
    /// Weights in all, vision included.
    pub parameters: u64,
    /// Weights used for one token: all but the embedding's other rows, vision and the experts not
    /// chosen.
    pub active_parameters: u64,
    /// Tensors of a checkpoint, or of a container's trunk.
    pub tensors: usize,
    /// Files that hold weights.
    pub files: usize,
    /// Bytes of weights, scales included.
    pub payload_bytes: u64,
    /// Where records differ in size and are many: the experts' bytes are estimated from the headers of so many.
    pub headers_read: Option<u64>,
    /// Bytes of the files that hold them, as far as they hold weights and padding.
    pub file_bytes: u64,
    /// Bytes of routed experts that one token reads.
    pub expert_bytes_per_token: u64,
    /// Number formats: of the trunk, then of the routed experts.
    pub formats: [BTreeMap<String, FormatShare>; 2],
}

/// What is stored in one number format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatShare {
    /// Weights.
    pub weights: u64,
    /// Their bytes, scales included.
    pub bytes: u64,
}

impl FormatShare {
    /// Bits of payload per weight.
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.bytes as f64 / self.weights.max(1) as f64
    }

    fn add(&mut self, weights: u64, bytes: u64) {
        self.weights += weights;
        self.bytes += bytes;
    }
}

/// Describes the model in a folder.
///
/// # Errors
/// When it cannot be opened, or its headers do not fit its configuration.
pub fn describe(folder: Folder) -> Result<Description, Error> {
    let source = source::open(folder)?;
    let config = config_of(&*source)?;
    let bound = weights::check(&*source, &config)?;
    let stored = source.stored_experts(&config)?;
    let mut formats = [BTreeMap::new(), stored.formats.clone()];
    let (mut elsewhere, mut tensors) = (0, 0);
    for name in source.names() {
        tensors += 1;
        if name.contains(".block_sparse_moe.experts.") {
            continue;
        }
        let Some(found) = source.find(name) else { continue };
        let n: u64 = found.shape.iter().product();
        let share: &mut FormatShare = formats[0].entry(format_name(found.form)).or_default();
        share.add(n, stored_bytes(&found));
        let is_vision = name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
        if is_vision || name.ends_with("model.embed_tokens.weight") {
            elsewhere += n;
        }
    }
    let total = |part: &BTreeMap<String, FormatShare>| {
        part.values().fold(FormatShare::default(), |mut sum, share| {
            sum.add(share.weights, share.bytes);
            sum
        })
    };
    let (trunk, experts) = (total(&formats[0]), total(&formats[1]));
    let chosen =
        |x: u64| (u128::from(x) * config.moe.top_k as u128 / config.moe.n_experts as u128) as u64;
    Ok(Description {
        source_kind: source.kind(),
        fingerprint: source.fingerprint(),
        summary: ModelSummary {
            bound_tensors: bound.tensors,
            trunk_bytes: bound.trunk_bytes,
            session_bytes: Session::recurrent_bytes(&config),
        },
        parameters: trunk.weights + experts.weights,
        active_parameters: trunk.weights - elsewhere + chosen(experts.weights),
        tensors,
        files: stored.files,
        payload_bytes: trunk.bytes + experts.bytes,
        headers_read: stored.headers_read,
        file_bytes: stored.trunk_file_bytes.unwrap_or(trunk.bytes) + stored.expert_file_bytes,
        expert_bytes_per_token: chosen(stored.expert_file_bytes),
        formats,
        config,
    })
}

/// What a source says of its routed experts and files.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoredExperts {
    pub(crate) formats: BTreeMap<String, FormatShare>,
    /// Padding and headers included.
    pub(crate) expert_file_bytes: u64,
    /// Padding included; `None` where there is none.
    pub(crate) trunk_file_bytes: Option<u64>,
    pub(crate) files: usize,
    /// Records from which the bytes of all are estimated; `None` where they are known.
    pub(crate) headers_read: Option<u64>,
}

impl StoredExperts {
    pub(crate) fn add(&mut self, format: &str, weights: u64, bytes: u64) {
        self.formats.entry(format.to_owned()).or_default().add(weights, bytes);
    }
}

fn format_name(form: Form) -> String {
    match form {
        Form::Codec(codec) => codec.name().to_owned(),
        Form::F16 => "f16".to_owned(),
        Form::U8 => "u8".to_owned(),
    }
}

fn stored_bytes(stored: &crate::source::Stored) -> u64 {
    let n: u64 = stored.shape.iter().product();
    match stored.form {
        Form::F16 => 2 * n,
        Form::U8 => n,
        Form::Codec(codec) => {
            let rows = if stored.shape.len() == 2 { stored.shape[0] } else { 1 };
            let layout = codec.layout(rows as usize, (n / rows.max(1)) as usize);
            layout.map_or(0, |layout| (layout.codes + layout.scales) as u64)
        }
    }
}
