//! `rill info`: a checkpoint described from its headers.

use std::collections::BTreeMap;

use anyhow::Result;
use rill::config::{Activation, Architecture};
use rill::{Folder, FormatShare};
use serde_json::json;

use crate::args::InfoArgs;
use crate::model;
use crate::output::{Outcome, bytes, print, scaled};

pub(crate) fn run(args: &InfoArgs) -> Result<Outcome> {
    let folder = model::folder(args.path.as_deref())?;
    let name = match &folder {
        Folder::Disk(path) => path.display().to_string(),
        Folder::Memory { name, .. } => (*name).to_owned(),
    };
    let about = rill::describe(folder)?;
    let (config, summary) = (&about.config, &about.summary);

    let [kda, mla, dense, moe] = config.layer_counts();
    let architecture = match config.architecture {
        Architecture::KimiK3 => "Kimi K3",
        Architecture::KimiLinear => "Kimi-Linear",
    };
    let [trunk_formats, expert_formats] = &about.formats;
    let expert_format = expert_formats.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    let is_checkpoint = about.source_kind == "published checkpoint";
    if args.json {
        let formats = |part: &BTreeMap<String, FormatShare>| {
            let share = |(name, share): (&String, &FormatShare)| {
                (name.clone(), json!({ "weights": share.weights, "bytes": share.bytes }))
            };
            part.iter().map(share).collect::<serde_json::Map<_, _>>()
        };
        let info = json!({
            "source": about.source_kind,
            "fingerprint": about.fingerprint,
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
            "parameters": about.parameters,
            "active_parameters": about.active_parameters,
            "shards": about.files,
            "tensors": about.tensors,
            "bound_tensors": summary.bound_tensors,
            "payload_bytes": about.payload_bytes,
            "payload_estimated_from_records": about.headers_read,
            "file_bytes": about.file_bytes,
            "trunk_formats": formats(trunk_formats),
            "expert_formats": formats(expert_formats),
            "trunk_bytes": summary.trunk_bytes,
            "session_bytes": summary.session_bytes,
            "expert_bytes_per_token": about.expert_bytes_per_token,
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
    let stored = match &about.fingerprint {
        _ if is_checkpoint => format!(
            "checkpoint     {} in {} tensors and {} shards; the text model uses {} of them",
            bytes(about.payload_bytes),
            about.tensors,
            about.files,
            summary.bound_tensors
        ),
        fingerprint => format!(
            "container      {}, {} in {} files, of it {} of weights{}",
            about.source_kind,
            bytes(about.file_bytes),
            about.files,
            bytes(about.payload_bytes),
            fingerprint.as_ref().map_or_else(String::new, |f| format!("; fingerprint {f}")),
        ),
    };
    print(format!(
        "{name}\n\
         architecture   {architecture}, {residuals}, {activation}\n\
         layers         {} ({kda} KDA, {mla} MLA; {dense} dense, {moe} mixture of experts)\n\
         hidden size    {}, vocabulary {}, context {}\n\
         experts        {} per layer, {} used and {} shared, {experts}, stored as {expert_format}\n\
         parameters     {} in all, {} used per token\n\
         {stored}\n\
         formats        trunk {}; experts {}{}\n\
         in memory      {} of weights, {} per session before its first token\n\
         per token      {} of experts read\n",
        config.layers.len(),
        config.hidden_size,
        config.vocab_size,
        config.max_position_embeddings,
        config.moe.n_experts,
        config.moe.top_k,
        config.moe.n_shared_experts,
        count(about.parameters),
        count(about.active_parameters),
        shares(trunk_formats),
        shares(expert_formats),
        about.headers_read.map_or_else(String::new, |n| format!(", by the headers of {n} records")),
        bytes(summary.trunk_bytes),
        bytes(summary.session_bytes),
        bytes(about.expert_bytes_per_token),
    ))?;
    Ok(Outcome::Done)
}

/// Each format with its share and its bits per weight.
fn shares(part: &BTreeMap<String, FormatShare>) -> String {
    let share = |(name, share): (&String, &FormatShare)| {
        format!("{name} {} at {:.2} bits", bytes(share.bytes), share.bits_per_weight())
    };
    part.iter().map(share).collect::<Vec<_>>().join(", ")
}

fn count(n: u64) -> String {
    scaled(n, &["", " thousand", " million", " billion", " trillion"])
}
