//! What goes where, in which format.

use rill_format::container::{Codec, CodecName};

use crate::error::ConvertError;
use crate::plan::{TRELLIS_WIDTH, TrunkCodec};
use crate::source::{Form, SourceTensor};

/// Inputs that share a scale in the trunk.
pub(crate) const GROUP: u32 = 128;

/// What a tensor of the trunk is, which decides its format.
///
/// | class | tensors | `source` | `q8` | `q4` |
/// |---|---|---|---|---|
/// | `Small` | norms, vectors, convolutions, residual projections | as published | as published | as published |
/// | `Router` | `block_sparse_moe.gate.weight` | as published | as published | as published |
/// | `Ends` | embedding and head | as published | q8 | q8 |
/// | `Vision` | matrices of the vision tower | as published | q8 | q8 |
/// | `Matrix` | every other matrix: attention, shared experts, latent projections, dense layer | as published | q8 | q4 |
///
/// With `trellis` a `Matrix` is a rotated trellis, except `kv_b_proj` and those whose columns are no multiple of 32, which
/// are q8, as are `Ends` and `Vision`. Routed experts have an option of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Small,
    Router,
    Ends,
    Vision,
    Matrix,
}

/// The run that a tensor of the trunk belongs to; the order is that of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RunKey {
    Global,
    Layer(u32),
    Vision,
}

impl RunKey {
    pub(crate) fn name(self) -> String {
        match self {
            RunKey::Global => "global".to_owned(),
            RunKey::Layer(layer) => format!("layer {layer}"),
            RunKey::Vision => "vision".to_owned(),
        }
    }
}

/// Where a routed expert's tensor belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ExpertKey {
    pub(crate) layer: u32,
    pub(crate) expert: u32,
    /// 0 gate (w1), 1 up (w3), 2 down (w2).
    pub(crate) matrix: usize,
    /// Scales of a packed matrix; otherwise its nibbles or plain weights.
    pub(crate) scales: bool,
}

/// Reads a routed expert's place from its tensor name; `None` for the trunk.
pub(crate) fn expert_key(name: &str) -> Option<ExpertKey> {
    let (layer, rest) = layer_and_rest(name)?;
    let rest = rest.strip_prefix("block_sparse_moe.experts.")?;
    let (expert, rest) = rest.split_once('.')?;
    let (matrix, kind) = rest.split_once('.')?;
    Some(ExpertKey {
        layer,
        expert: expert.parse().ok()?,
        matrix: ["w1", "w3", "w2"].iter().position(|w| *w == matrix)?,
        scales: match kind {
            "weight" | "weight_packed" => false,
            "weight_scale" => true,
            _ => return None,
        },
    })
}

pub(crate) fn run_key(name: &str) -> RunKey {
    if is_vision(name) {
        return RunKey::Vision;
    }
    layer_and_rest(name).map_or(RunKey::Global, |(layer, _)| RunKey::Layer(layer))
}

pub(crate) fn class(name: &str, shape: &[u64]) -> Class {
    let is_matrix = matches!(shape, [rows, cols] if *rows > 1 && *cols >= 16);
    if !is_matrix {
        Class::Small
    } else if is_vision(name) {
        Class::Vision
    } else if name.ends_with("embed_tokens.weight") || name.ends_with("lm_head.weight") {
        Class::Ends
    } else if name.ends_with("block_sparse_moe.gate.weight") {
        Class::Router
    } else {
        Class::Matrix
    }
}

/// The stored format of a tensor of the trunk.
pub(crate) fn trunk_codec(
    tensor: &SourceTensor,
    option: TrunkCodec,
) -> Result<Codec, ConvertError> {
    let grouped = |name| Ok(Codec::grouped(name, GROUP));
    match (class(&tensor.name, &tensor.shape), option) {
        (Class::Small | Class::Router, _) | (_, TrunkCodec::Source) => {
            tensor.form.as_published().ok_or_else(|| ConvertError::Tensor {
                tensor: tensor.name.clone(),
                reason: format!(
                    "stored as {} in {}, which only routed experts are; this is not a model that \
                     can be converted",
                    tensor.form, tensor.file
                ),
            })
        }
        (Class::Ends | Class::Vision, _) | (Class::Matrix, TrunkCodec::Q8) => {
            grouped(CodecName::Q8)
        }
        (Class::Matrix, TrunkCodec::Q4) => grouped(CodecName::Q4),
        (Class::Matrix, TrunkCodec::Trellis { rate }) => {
            let codec = trellis_or_q8(&tensor.name, tensor.rows_and_cols().1, rate);
            let is_trellis = matches!(
                tensor.form,
                Form::Packed(Codec { name: CodecName::Trellis | CodecName::Rotated, .. })
            );
            if codec.name == CodecName::Rotated && is_trellis && !tensor.form.is(codec) {
                return Err(ConvertError::Tensor {
                    tensor: tensor.name.clone(),
                    reason: format!(
                        "is stored as {}, and a trellis of a trellis would add up the errors of both; choose \
                         --trunk source",
                        tensor.form
                    ),
                });
            }
            Ok(codec)
        }
    }
}

/// The format of a `Matrix` of the trunk with `trellis`.
pub(crate) fn trellis_or_q8(name: &str, cols: u64, rate: u8) -> Codec {
    // By columns, which attention takes of it, a trellis is slow.
    match name.ends_with("kv_b_proj.weight") || !cols.is_multiple_of(32) {
        true => Codec::grouped(CodecName::Q8, GROUP),
        false => Codec::rotated(rate.into(), TRELLIS_WIDTH),
    }
}

fn is_vision(name: &str) -> bool {
    name.starts_with("vision_tower.") || name.starts_with("mm_projector.")
}

/// `…model.layers.N.rest` → N and rest.
fn layer_and_rest(name: &str) -> Option<(u32, &str)> {
    let name = name.strip_prefix("language_model.").unwrap_or(name);
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_told_from_the_trunk_by_name() {
        let key = expert_key(
            "language_model.model.layers.12.block_sparse_moe.experts.345.w3.weight_scale",
        );
        assert_eq!(key, Some(ExpertKey { layer: 12, expert: 345, matrix: 1, scales: true }));
        let key = expert_key("model.layers.1.block_sparse_moe.experts.0.w2.weight");
        assert_eq!(key, Some(ExpertKey { layer: 1, expert: 0, matrix: 2, scales: false }));
        for trunk in [
            "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
            "model.layers.1.block_sparse_moe.gate.weight",
            "lm_head.weight",
            "vision_tower.encoder.blocks.0.wo.weight",
        ] {
            assert_eq!(expert_key(trunk), None, "{trunk}");
        }
    }

    #[test]
    fn runs_and_classes_follow_the_names() {
        let cases: [(&str, &[u64], RunKey, Class); 8] = [
            ("language_model.lm_head.weight", &[512, 96], RunKey::Global, Class::Ends),
            ("model.embed_tokens.weight", &[512, 96], RunKey::Global, Class::Ends),
            ("model.norm.weight", &[96], RunKey::Global, Class::Small),
            ("model.layers.7.mlp_res_proj.weight", &[1, 96], RunKey::Layer(7), Class::Small),
            (
                "model.layers.7.self_attn.q_conv1d.weight",
                &[96, 1, 4],
                RunKey::Layer(7),
                Class::Small,
            ),
            (
                "model.layers.2.block_sparse_moe.gate.weight",
                &[12, 96],
                RunKey::Layer(2),
                Class::Router,
            ),
            ("model.layers.2.self_attn.o_proj.weight", &[96, 96], RunKey::Layer(2), Class::Matrix),
            ("vision_tower.encoder.blocks.0.wo.weight", &[48, 48], RunKey::Vision, Class::Vision),
        ];
        for (name, shape, run, expected) in cases {
            assert_eq!((run_key(name), class(name, shape)), (run, expected), "{name}");
        }
    }
}
