//! What a model of a given `config.json` consists of: every tensor of the trunk under its
//! published name, and the shape of its routed experts.

use rill_format::Dtype;
use serde_json::Value;

use crate::config::{MAX_LAYERS, MAX_NUMBER, number};
use crate::error::ConvertError;

/// The tensors of a model.
#[derive(Debug)]
pub(super) struct Shapes {
    /// Everything but routed experts, in no particular order.
    pub(super) trunk: Vec<Tensor>,
    pub(super) experts: Experts,
    /// Layers that have experts, ascending.
    pub(super) moe_layers: std::ops::Range<u32>,
    /// Rows of the embedding.
    pub(super) vocab: u64,
    /// Tokens that are text; reserved ones follow.
    pub(super) n_ranks: u64,
}

/// A tensor of the trunk.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// As published.
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) values: Values,
}

/// What a tensor's numbers look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Values {
    /// Of both signs, this times 1/√inputs on average.
    Matrix(f32),
    /// Of both signs, of this size on average.
    Sized(f32),
    /// Evenly from here to there; zeros after the first `.2` of them.
    Even(f32, f32, u64),
    /// Few large, many small, as Zipf's law has it; this is the median.
    Zipf(f32),
}

/// All routed experts of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    /// Of one layer.
    pub(super) n: u32,
    /// Inputs and outputs of an expert.
    pub(super) width: u64,
    /// Rows of gate and up.
    pub(super) inter: u64,
    /// Whether they are published as mxfp4; otherwise as bf16.
    pub(super) mxfp4: bool,
}

// These four were chosen so that routing in the engine looks like that of recorded traces; what
// else a layer adds to the hidden state is of size 1/2 or so. `docs/performance.md` has the
// figures.

/// Size of an embedding's numbers: small against what attention adds, which changes slowly from
/// token to token.
const EMBEDDING: f32 = 0.1;
/// Gain of the projection that brings the sum of experts back to the hidden width: the norm in
/// front of it would make experts, which change with every token, louder than attention.
const LATENT_UP: f32 = 0.2;
/// Gain of an expert's last matrix, for the same reason.
pub(super) const EXPERT_DOWN: f32 = 0.7;
/// Median correction of a router's scores, which makes some experts popular.
const ROUTER_BIAS: f32 = 0.01;

const MAX_EXPERTS: u64 = 1 << 16;

impl Shapes {
    /// The tensors that this configuration asks for.
    ///
    /// # Errors
    /// When a number that shapes depend on is missing or absurd.
    pub(super) fn new(config: &Value) -> Result<Self, ConvertError> {
        let nested = config["text_config"].is_object();
        let (text, prefix) =
            if nested { (&config["text_config"], "language_model.") } else { (config, "") };
        let get = |key| number(text, key, MAX_NUMBER);
        let latent = match text.get("routed_expert_hidden_size") {
            Some(_) => Some(get("routed_expert_hidden_size")?),
            None => None,
        };
        let layers = number(text, "num_hidden_layers", MAX_LAYERS)?;
        let dense = number(text, "first_k_dense_replace", layers)?;
        let format = text["quantization_config"]["format"].as_str();
        let experts = Experts {
            n: number(text, "num_experts", MAX_EXPERTS)? as u32,
            width: latent.unwrap_or(get("hidden_size")?),
            inter: get("moe_intermediate_size")?,
            mxfp4: format == Some("mxfp4-pack-quantized"),
        };
        let vocab = get("vocab_size")?;
        let bos = config.get("bos_token_id").unwrap_or(&text["bos_token_id"]);
        let n_ranks = bos.as_u64().filter(|n| (256..=vocab.saturating_sub(64)).contains(n));
        let n_ranks = n_ranks.ok_or_else(|| ConvertError::Config {
            field: "bos_token_id".to_owned(),
            expected: "the first reserved token, after 256 bytes and with room for 64 names".into(),
            found: bos.to_string(),
        })?;
        let moe_layers = dense as u32..layers as u32;
        let mut shapes = Self { trunk: Vec::new(), experts, moe_layers, vocab, n_ranks };
        shapes.text_model(text, prefix, latent)?;
        if let Some(vision) = config.get("vision_config") {
            shapes.vision(vision)?;
        }
        Ok(shapes)
    }

    fn text_model(
        &mut self,
        text: &Value,
        prefix: &str,
        latent: Option<u64>,
    ) -> Result<(), ConvertError> {
        let hidden = number(text, "hidden_size", MAX_NUMBER)?;
        let residuals = text.get("attn_res_block_size").is_some();
        let full = &text["linear_attn_config"]["full_attn_layers"];
        let full: Vec<u64> =
            full.as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
        let embed = format!("{prefix}model.embed_tokens.weight");
        self.add(embed, Dtype::BF16, &[self.vocab, hidden], Values::Sized(EMBEDDING));
        self.matrix(format!("{prefix}lm_head.weight"), self.vocab, hidden);
        self.norm(format!("{prefix}model.norm.weight"), hidden);
        if residuals {
            self.residual(&format!("{prefix}model.output_attn"), hidden);
        }
        for layer in 0..self.moe_layers.end {
            let at = format!("{prefix}model.layers.{layer}");
            self.norm(format!("{at}.input_layernorm.weight"), hidden);
            self.norm(format!("{at}.post_attention_layernorm.weight"), hidden);
            if residuals {
                self.residual(&format!("{at}.self_attention"), hidden);
                self.residual(&format!("{at}.mlp"), hidden);
            }
            // The list counts from one.
            match full.contains(&(u64::from(layer) + 1)) {
                true => self.mla(text, &format!("{at}.self_attn"), hidden)?,
                false => self.kda(text, &format!("{at}.self_attn"), hidden)?,
            }
            if self.moe_layers.contains(&layer) {
                self.moe(text, &format!("{at}.block_sparse_moe"), hidden, latent)?;
            } else {
                let inter = number(text, "intermediate_size", MAX_NUMBER)?;
                self.mlp(&format!("{at}.mlp"), inter, hidden);
            }
        }
        Ok(())
    }

    fn kda(&mut self, text: &Value, at: &str, hidden: u64) -> Result<(), ConvertError> {
        let linear = &text["linear_attn_config"];
        let heads = number(linear, "num_heads", MAX_NUMBER)?;
        let dim = number(linear, "head_dim", MAX_NUMBER)?;
        let taps = number(linear, "short_conv_kernel_size", 1 << 6)?;
        let p = heads * dim;
        // K3 has one wide gate, and stores these small tensors otherwise than Kimi-Linear.
        let k3 = linear["use_full_rank_gate"].as_bool() == Some(true);
        let conv = if k3 { Dtype::F32 } else { Dtype::BF16 };
        for part in ["q", "k", "v"] {
            self.matrix(format!("{at}.{part}_proj.weight"), p, hidden);
            // Of one sign, so that neighbouring tokens see much of the same.
            let name = format!("{at}.{part}_conv1d.weight");
            self.add(name, conv, &[p, 1, taps], Values::Even(0.2, 0.8, u64::MAX));
        }
        self.matrix(format!("{at}.f_a_proj.weight"), dim, hidden);
        self.matrix(format!("{at}.f_b_proj.weight"), p, dim);
        let a_log = if k3 { vec![dim.max(heads)] } else { vec![1, 1, heads, 1] };
        self.add(format!("{at}.A_log"), Dtype::F32, &a_log, Values::Even(-0.5, 1.5, heads));
        let bias = Values::Even(-5.0, -1.0, u64::MAX);
        self.add(format!("{at}.dt_bias"), Dtype::F32, &[p], bias);
        if k3 {
            self.matrix(format!("{at}.g_proj.weight"), p, hidden);
        } else {
            self.matrix(format!("{at}.g_a_proj.weight"), dim, hidden);
            self.matrix(format!("{at}.g_b_proj.weight"), p, dim);
        }
        self.matrix(format!("{at}.b_proj.weight"), heads, hidden);
        self.norm(format!("{at}.o_norm.weight"), dim);
        self.matrix(format!("{at}.o_proj.weight"), hidden, p);
        Ok(())
    }

    fn mla(&mut self, text: &Value, at: &str, hidden: u64) -> Result<(), ConvertError> {
        let get = |key| number(text, key, MAX_NUMBER);
        let (heads, latent) = (get("num_attention_heads")?, get("kv_lora_rank")?);
        let (nope, rope) = (get("qk_nope_head_dim")?, get("qk_rope_head_dim")?);
        let value = get("v_head_dim")?;
        if text["q_lora_rank"].is_null() {
            self.matrix(format!("{at}.q_proj.weight"), heads * (nope + rope), hidden);
        } else {
            let rank = get("q_lora_rank")?;
            self.matrix(format!("{at}.q_a_proj.weight"), rank, hidden);
            self.norm(format!("{at}.q_a_layernorm.weight"), rank);
            self.matrix(format!("{at}.q_b_proj.weight"), heads * (nope + rope), rank);
        }
        self.matrix(format!("{at}.kv_a_proj_with_mqa.weight"), latent + rope, hidden);
        self.norm(format!("{at}.kv_a_layernorm.weight"), latent);
        self.matrix(format!("{at}.kv_b_proj.weight"), heads * (nope + value), latent);
        if text["mla_use_output_gate"].as_bool() == Some(true) {
            self.matrix(format!("{at}.g_proj.weight"), heads * value, hidden);
        }
        self.matrix(format!("{at}.o_proj.weight"), hidden, heads * value);
        Ok(())
    }

    fn moe(
        &mut self,
        text: &Value,
        at: &str,
        hidden: u64,
        latent: Option<u64>,
    ) -> Result<(), ConvertError> {
        let n = u64::from(self.experts.n);
        self.matrix(format!("{at}.gate.weight"), n, hidden);
        let bias = format!("{at}.gate.e_score_correction_bias");
        self.add(bias, Dtype::F32, &[n], Values::Zipf(ROUTER_BIAS));
        if let Some(latent) = latent {
            self.matrix(format!("{at}.routed_expert_down_proj.weight"), latent, hidden);
            if text["latent_moe_use_norm"].as_bool() == Some(true) {
                self.norm(format!("{at}.routed_expert_norm.weight"), latent);
            }
            let up = format!("{at}.routed_expert_up_proj.weight");
            self.add(up, Dtype::BF16, &[hidden, latent], Values::Matrix(LATENT_UP));
        }
        let shared = number(text, "num_shared_experts", 1 << 8)? * self.experts.inter;
        self.mlp(&format!("{at}.shared_experts"), shared, hidden);
        Ok(())
    }

    fn mlp(&mut self, at: &str, inter: u64, hidden: u64) {
        self.matrix(format!("{at}.gate_proj.weight"), inter, hidden);
        self.matrix(format!("{at}.up_proj.weight"), inter, hidden);
        self.matrix(format!("{at}.down_proj.weight"), hidden, inter);
    }

    fn vision(&mut self, vision: &Value) -> Result<(), ConvertError> {
        let get = |key| number(vision, key, 1 << 13);
        let (dim, inter) = (get("vt_hidden_size")?, get("vt_intermediate_size")?);
        let (qkv, patch) = (get("qkv_hidden_size")?, get("patch_size")?);
        let (rows, columns) = (get("init_pos_emb_height")?, get("init_pos_emb_width")?);
        let text = get("text_hidden_size")?;
        let merge = vision["merge_kernel_size"].as_array().into_iter().flatten();
        let merge = merge.filter_map(Value::as_u64).fold(1, |n, m| n * m.min(16)).min(256);
        let wide = merge * dim;
        let at = "vision_tower.patch_embed";
        let embed = Values::Matrix(1.0);
        self.add(format!("{at}.proj.weight"), Dtype::BF16, &[dim, 3, patch, patch], embed);
        self.add(format!("{at}.pos_emb.weight"), Dtype::BF16, &[rows, columns, dim], embed);
        for block in 0..number(vision, "vt_num_hidden_layers", MAX_LAYERS)? {
            let at = format!("vision_tower.encoder.blocks.{block}");
            self.norm(format!("{at}.norm0.weight"), dim);
            self.matrix(format!("{at}.wqkv.weight"), 3 * qkv, dim);
            self.matrix(format!("{at}.wo.weight"), dim, qkv);
            self.norm(format!("{at}.norm1.weight"), dim);
            self.matrix(format!("{at}.mlp.fc0.weight"), inter, dim);
            self.matrix(format!("{at}.mlp.fc1.weight"), dim, inter);
        }
        self.norm("vision_tower.encoder.final_layernorm.weight".to_owned(), dim);
        self.matrix("mm_projector.proj.0.weight".to_owned(), wide, wide);
        self.matrix("mm_projector.proj.2.weight".to_owned(), text, wide);
        self.norm("mm_projector.post_norm.weight".to_owned(), text);
        Ok(())
    }

    fn residual(&mut self, at: &str, hidden: u64) {
        self.norm(format!("{at}_res_norm.weight"), hidden);
        let proj = format!("{at}_res_proj.weight");
        self.add(proj, Dtype::BF16, &[1, hidden], Values::Matrix(1.0));
    }

    fn matrix(&mut self, name: String, rows: u64, cols: u64) {
        self.add(name, Dtype::BF16, &[rows, cols], Values::Matrix(1.0));
    }

    fn norm(&mut self, name: String, n: u64) {
        self.add(name, Dtype::BF16, &[n], Values::Even(0.9, 1.1, u64::MAX));
    }

    fn add(&mut self, name: String, dtype: Dtype, shape: &[u64], values: Values) {
        self.trunk.push(Tensor { name, dtype, shape: shape.to_vec(), values });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::parse;

    #[test]
    fn the_trunk_is_the_published_one() {
        let listed = [rill_testkit::kimi_k3_tensors(), rill_testkit::kimi_linear_tensors()];
        for (model, listed) in crate::SynthModel::ALL.into_iter().zip(listed) {
            let shapes = Shapes::new(&parse(model.config()).unwrap()).unwrap();
            let key = |name: &str, dtype: &str, shape: &[u64]| format!("{name} {dtype} {shape:?}");
            let found: BTreeSet<String> =
                shapes.trunk.iter().map(|t| key(&t.name, &t.dtype.to_string(), &t.shape)).collect();
            let expected: BTreeSet<String> = listed
                .iter()
                .filter(|t| !t.name.contains(".block_sparse_moe.experts."))
                .map(|t| key(&t.name, t.dtype.name(), &t.shape))
                .collect();
            assert_eq!(found.len(), shapes.trunk.len(), "no name twice");
            assert_eq!(found, expected);
            let n_experts = shapes.moe_layers.len() as u64 * u64::from(shapes.experts.n);
            let per_expert = if shapes.experts.mxfp4 { 6 } else { 3 };
            assert_eq!((listed.len() - expected.len()) as u64, n_experts * per_expert);
        }
    }

    #[test]
    fn an_absurd_number_is_named() {
        for (key, value) in [("hidden_size", 0), ("num_experts", 1u64 << 40), ("vocab_size", 256)] {
            let mut config = parse(crate::SynthModel::KimiLinear48b.config()).unwrap();
            config[key] = value.into();
            let error = Shapes::new(&config).unwrap_err().to_string();
            let named = if key == "vocab_size" { "bos_token_id" } else { key };
            assert!(error.contains(named), "{error}");
        }
    }
}
