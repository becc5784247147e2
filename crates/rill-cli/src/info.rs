//! `rill info`: a checkpoint described from its headers.

use anyhow::Result;
use rill::config::{Activation, Architecture, ExpertFormat, ModelConfig};
use rill::{Checkpoint, Engine, Folder, read_config};
use serde_json::json;

use crate::args::InfoArgs;
use crate::model;
use crate::output::{Outcome, print};

pub(crate) fn run(args: &InfoArgs) -> Result<Outcome> {
    let folder = model::folder(args.path.as_deref())?;
    let name = match &folder {
        Folder::Disk(path) => path.display().to_string(),
        Folder::Memory { name, .. } => (*name).to_owned(),
    };
    let config = read_config(&folder)?;
    let checkpoint = Checkpoint::open(folder)?;
    let summary = Engine::check(&checkpoint, &config)?;
    let parameters = Parameters::count(&checkpoint, &config);

    let [kda, mla, dense, moe] = config.layer_counts();
    let architecture = match config.architecture {
        Architecture::KimiK3 => "Kimi K3",
        Architecture::KimiLinear => "Kimi-Linear",
    };
    let expert_format = match config.moe.expert_format {
        ExpertFormat::Bf16 => "bf16",
        ExpertFormat::Mxfp4 => "mxfp4",
    };
    if args.json {
        let info = json!({
            "architecture": architecture,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "layers": config.layers.len(),
            "kda_layers": kda,
            "mla_layers": mla,
            "dense_layers": dense,
            "moe_layers": moe,
            "n_experts": config.moe.n_experts,
            "top_k": config.moe.top_k,
            "n_shared_experts": config.moe.n_shared_experts,
            "expert_format": expert_format,
            "max_position_embeddings": config.max_position_embeddings,
            "parameters": parameters.total,
            "active_parameters": parameters.active,
            "shards": checkpoint.shards().count(),
            "tensors": checkpoint.len(),
            "bound_tensors": summary.bound_tensors,
            "payload_bytes": checkpoint.payload_bytes(),
            "trunk_bytes": summary.trunk_bytes,
            "session_bytes": summary.session_bytes,
            "expert_bytes_per_token": parameters.expert_bytes_per_token,
        });
        print(format!("{info:#}\n"))?;
        return Ok(Outcome::Done);
    }
    let residuals = match config.attn_res_block_size {
        Some(size) => format!("attention residuals over blocks of {size}"),
        None => "plain residuals".to_owned(),
    };
    let activation = match config.activation {
        Activation::Silu => "SiLU",
        Activation::Situ { .. } => "SiTU",
    };
    let experts = match config.moe.latent {
        Some(latent) => format!("on a latent of {}", latent.size),
        None => "on the hidden state".to_owned(),
    };
    print(format!(
        "{name}\n\
         architecture   {architecture}, {residuals}, {activation}\n\
         layers         {} ({kda} KDA, {mla} MLA; {dense} dense, {moe} mixture of experts)\n\
         hidden size    {}, vocabulary {}, context {}\n\
         experts        {} per layer, {} used and {} shared, {experts}, stored as {expert_format}\n\
         parameters     {} in all, {} used per token\n\
         checkpoint     {} in {} tensors and {} shards; the text model uses {} of them\n\
         in memory      {} of weights, {} per session before its first token\n\
         per token      {} of experts read\n",
        config.layers.len(),
        config.hidden_size,
        config.vocab_size,
        config.max_position_embeddings,
        config.moe.n_experts,
        config.moe.top_k,
        config.moe.n_shared_experts,
        count(parameters.total),
        count(parameters.active),
        bytes(checkpoint.payload_bytes()),
        checkpoint.len(),
        checkpoint.shards().count(),
        summary.bound_tensors,
        bytes(summary.trunk_bytes),
        bytes(summary.session_bytes),
        bytes(parameters.expert_bytes_per_token),
    ))?;
    Ok(Outcome::Done)
}

struct Parameters {
    total: u64,
    /// Used for one token: all but the embedding's other rows and the experts not chosen.
    active: u64,
    expert_bytes_per_token: u64,
}

impl Parameters {
    fn count(checkpoint: &Checkpoint, config: &ModelConfig) -> Self {
        let (mut total, mut experts, mut expert_bytes, mut elsewhere) = (0u64, 0u64, 0u64, 0u64);
        for tensor in checkpoint.iter() {
            let elements = tensor.bytes / tensor.dtype.size();
            let parameters = if tensor.name.ends_with(".weight_packed") {
                2 * elements
            } else if tensor.name.ends_with(".weight_scale") {
                0
            } else {
                elements
            };
            total += parameters;
            if tensor.name.contains(".block_sparse_moe.experts.") {
                experts += parameters;
                expert_bytes += tensor.bytes;
            } else if tensor.name.starts_with("vision_tower.")
                || tensor.name.starts_with("mm_projector.")
                || tensor.name.ends_with("model.embed_tokens.weight")
            {
                elsewhere += parameters;
            }
        }
        let chosen = |x: u64| {
            (u128::from(x) * config.moe.top_k as u128 / config.moe.n_experts as u128) as u64
        };
        Self {
            total,
            active: total - experts - elsewhere + chosen(experts),
            expert_bytes_per_token: chosen(expert_bytes),
        }
    }
}

fn count(n: u64) -> String {
    scaled(n, &["", " thousand", " million", " billion", " trillion"])
}

fn bytes(n: u64) -> String {
    scaled(n, &[" bytes", " kB", " MB", " GB", " TB"])
}

/// Powers of 1,000, three digits or more.
fn scaled(n: u64, units: &[&str]) -> String {
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{n}{}", units[0]) } else { format!("{value:.2}{}", units[unit]) }
}
