//! Which tensors a Kimi K3 or Kimi-Linear checkpoint holds, computed from its `config.json`.

use serde_json::Value;

/// The element types these checkpoints use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Dtype {
    /// bfloat16, two bytes.
    Bf16,
    /// IEEE single precision, four bytes.
    F32,
    /// Bytes: two MXFP4 elements or one scale.
    U8,
}

impl Dtype {
    /// The safetensors name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::U8 => "U8",
        }
    }

    /// Bytes per element.
    pub fn size(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
            Self::U8 => 1,
        }
    }
}

/// One tensor of a checkpoint, without its bytes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Tensor {
    /// Full name, prefix included.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
}

impl Tensor {
    /// Payload bytes: product of the dimensions times the element size.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size()
    }
}

/// The 497,220 tensors of the published Kimi K3 checkpoint, vision tower included.
pub fn kimi_k3_tensors() -> Vec<Tensor> {
    tensors(&published(include_str!("../../../fixtures/configs/kimi-k3.json")))
}

/// The tensors of the published Kimi-Linear-48B-A3B checkpoint.
pub fn kimi_linear_tensors() -> Vec<Tensor> {
    tensors(&published(include_str!("../../../fixtures/configs/kimi-linear-48b.json")))
}

/// The tensors of a checkpoint with this `config.json`, in layer order.
///
/// # Panics
///
/// If a key that the shapes depend on is absent.
pub fn tensors(config: &Value) -> Vec<Tensor> {
    let mut list = List(Vec::new());
    match config.get("text_config") {
        Some(text) => text_model(&mut list, text, "language_model."),
        None => text_model(&mut list, config, ""),
    }
    if let Some(vision) = config.get("vision_config") {
        vision_tower(&mut list, vision);
    }
    list.0
}

fn text_model(list: &mut List, config: &Value, prefix: &str) {
    let hidden = number(config, "hidden_size");
    let vocab = number(config, "vocab_size");
    let attn_res = config.get("attn_res_block_size").is_some();
    let full_attn = &config["linear_attn_config"]["full_attn_layers"];
    let full_attn = full_attn.as_array().expect("full_attn_layers lists the MLA layers");

    let model = format!("{prefix}model");
    list.bf16(format!("{model}.embed_tokens.weight"), &[vocab, hidden]);
    for layer in 0..number(config, "num_hidden_layers") {
        let at = format!("{model}.layers.{layer}");
        list.bf16(format!("{at}.input_layernorm.weight"), &[hidden]);
        list.bf16(format!("{at}.post_attention_layernorm.weight"), &[hidden]);
        if attn_res {
            for site in ["self_attention", "mlp"] {
                list.bf16(format!("{at}.{site}_res_norm.weight"), &[hidden]);
                list.bf16(format!("{at}.{site}_res_proj.weight"), &[1, hidden]);
            }
        }
        // The published layer lists count from one.
        if full_attn.contains(&Value::from(layer + 1)) {
            mla(list, config, &format!("{at}.self_attn"));
        } else {
            kda(list, config, &format!("{at}.self_attn"));
        }
        if layer < number(config, "first_k_dense_replace") {
            let inter = number(config, "intermediate_size");
            mlp(list, &format!("{at}.mlp"), inter, hidden);
        } else {
            moe(list, config, &format!("{at}.block_sparse_moe"));
        }
    }
    list.bf16(format!("{model}.norm.weight"), &[hidden]);
    if attn_res {
        list.bf16(format!("{model}.output_attn_res_norm.weight"), &[hidden]);
        list.bf16(format!("{model}.output_attn_res_proj.weight"), &[1, hidden]);
    }
    list.bf16(format!("{prefix}lm_head.weight"), &[vocab, hidden]);
}

fn kda(list: &mut List, config: &Value, at: &str) {
    let hidden = number(config, "hidden_size");
    let linear = &config["linear_attn_config"];
    let heads = number(linear, "num_heads");
    let head_dim = number(linear, "head_dim");
    let taps = number(linear, "short_conv_kernel_size");
    let full_rank_gate = linear["use_full_rank_gate"].as_bool() == Some(true);
    let wide = heads * head_dim;

    for part in ["q", "k", "v"] {
        list.bf16(format!("{at}.{part}_proj.weight"), &[wide, hidden]);
        // The two releases store these three differently; nothing in the configuration says so,
        // so the gate, which is what tells K3's attention apart, stands in for it.
        let dtype = if full_rank_gate { Dtype::F32 } else { Dtype::Bf16 };
        list.push(format!("{at}.{part}_conv1d.weight"), dtype, &[wide, 1, taps]);
    }
    list.bf16(format!("{at}.f_a_proj.weight"), &[head_dim, hidden]);
    list.bf16(format!("{at}.f_b_proj.weight"), &[wide, head_dim]);
    if full_rank_gate {
        // head_dim values, of which the first `heads` are used and the rest are padding.
        list.push(format!("{at}.A_log"), Dtype::F32, &[head_dim]);
        list.bf16(format!("{at}.g_proj.weight"), &[wide, hidden]);
    } else {
        list.push(format!("{at}.A_log"), Dtype::F32, &[1, 1, heads, 1]);
        list.bf16(format!("{at}.g_a_proj.weight"), &[head_dim, hidden]);
        list.bf16(format!("{at}.g_b_proj.weight"), &[wide, head_dim]);
    }
    list.push(format!("{at}.dt_bias"), Dtype::F32, &[wide]);
    list.bf16(format!("{at}.b_proj.weight"), &[heads, hidden]);
    list.bf16(format!("{at}.o_norm.weight"), &[head_dim]);
    list.bf16(format!("{at}.o_proj.weight"), &[hidden, wide]);
}

fn mla(list: &mut List, config: &Value, at: &str) {
    let hidden = number(config, "hidden_size");
    let heads = number(config, "num_attention_heads");
    let latent = number(config, "kv_lora_rank");
    let nope = number(config, "qk_nope_head_dim");
    let rope = number(config, "qk_rope_head_dim");
    let value = number(config, "v_head_dim");

    let query = heads * (nope + rope);
    if let Some(rank) = config["q_lora_rank"].as_u64() {
        list.bf16(format!("{at}.q_a_proj.weight"), &[rank, hidden]);
        list.bf16(format!("{at}.q_a_layernorm.weight"), &[rank]);
        list.bf16(format!("{at}.q_b_proj.weight"), &[query, rank]);
    } else {
        list.bf16(format!("{at}.q_proj.weight"), &[query, hidden]);
    }
    list.bf16(format!("{at}.kv_a_proj_with_mqa.weight"), &[latent + rope, hidden]);
    list.bf16(format!("{at}.kv_a_layernorm.weight"), &[latent]);
    list.bf16(format!("{at}.kv_b_proj.weight"), &[heads * (nope + value), latent]);
    if config["mla_use_output_gate"].as_bool() == Some(true) {
        list.bf16(format!("{at}.g_proj.weight"), &[heads * value, hidden]);
    }
    list.bf16(format!("{at}.o_proj.weight"), &[hidden, heads * value]);
}

fn moe(list: &mut List, config: &Value, at: &str) {
    let hidden = number(config, "hidden_size");
    let experts = number(config, "num_experts");
    let inter = number(config, "moe_intermediate_size");
    let shared = number(config, "num_shared_experts");
    let latent = config["routed_expert_hidden_size"].as_u64();
    let mxfp4 = config["quantization_config"]["format"].as_str() == Some("mxfp4-pack-quantized");

    list.bf16(format!("{at}.gate.weight"), &[experts, hidden]);
    list.push(format!("{at}.gate.e_score_correction_bias"), Dtype::F32, &[experts]);
    if let Some(latent) = latent {
        list.bf16(format!("{at}.routed_expert_down_proj.weight"), &[latent, hidden]);
        list.bf16(format!("{at}.routed_expert_norm.weight"), &[latent]);
        list.bf16(format!("{at}.routed_expert_up_proj.weight"), &[hidden, latent]);
    }
    mlp(list, &format!("{at}.shared_experts"), shared * inter, hidden);
    let width = latent.unwrap_or(hidden);
    for expert in 0..experts {
        for (part, out, input) in [("w1", inter, width), ("w3", inter, width), ("w2", width, inter)]
        {
            let weight = format!("{at}.experts.{expert}.{part}.weight");
            if mxfp4 {
                list.push(format!("{weight}_packed"), Dtype::U8, &[out, input / 2]);
                list.push(format!("{weight}_scale"), Dtype::U8, &[out, input / 32]);
            } else {
                list.bf16(weight, &[out, input]);
            }
        }
    }
}

fn mlp(list: &mut List, at: &str, inter: u64, hidden: u64) {
    list.bf16(format!("{at}.gate_proj.weight"), &[inter, hidden]);
    list.bf16(format!("{at}.up_proj.weight"), &[inter, hidden]);
    list.bf16(format!("{at}.down_proj.weight"), &[hidden, inter]);
}

fn vision_tower(list: &mut List, config: &Value) {
    let dim = number(config, "vt_hidden_size");
    let inter = number(config, "vt_intermediate_size");
    let qkv = number(config, "qkv_hidden_size");
    let patch = number(config, "patch_size");
    let rows = number(config, "init_pos_emb_height");
    let columns = number(config, "init_pos_emb_width");
    let text = number(config, "text_hidden_size");
    let merge = config["merge_kernel_size"].as_array().expect("merge_kernel_size is a pair");
    let merged = merge.iter().filter_map(Value::as_u64).product::<u64>() * dim;

    let embed = "vision_tower.patch_embed";
    list.bf16(format!("{embed}.proj.weight"), &[dim, 3, patch, patch]);
    list.bf16(format!("{embed}.pos_emb.weight"), &[rows, columns, dim]);
    for block in 0..number(config, "vt_num_hidden_layers") {
        let at = format!("vision_tower.encoder.blocks.{block}");
        list.bf16(format!("{at}.norm0.weight"), &[dim]);
        list.bf16(format!("{at}.wqkv.weight"), &[3 * qkv, dim]);
        list.bf16(format!("{at}.wo.weight"), &[dim, qkv]);
        list.bf16(format!("{at}.norm1.weight"), &[dim]);
        list.bf16(format!("{at}.mlp.fc0.weight"), &[inter, dim]);
        list.bf16(format!("{at}.mlp.fc1.weight"), &[dim, inter]);
    }
    list.bf16("vision_tower.encoder.final_layernorm.weight".into(), &[dim]);
    list.bf16("mm_projector.proj.0.weight".into(), &[merged, merged]);
    list.bf16("mm_projector.proj.2.weight".into(), &[text, merged]);
    list.bf16("mm_projector.post_norm.weight".into(), &[text]);
}

struct List(Vec<Tensor>);

impl List {
    fn push(&mut self, name: String, dtype: Dtype, shape: &[u64]) {
        let shape = shape.to_vec();
        self.0.push(Tensor { name, dtype, shape });
    }

    fn bf16(&mut self, name: String, shape: &[u64]) {
        self.push(name, Dtype::Bf16, shape);
    }
}

fn published(config: &str) -> Value {
    serde_json::from_str(config).expect("the published configurations are valid JSON")
}

fn number(config: &Value, key: &str) -> u64 {
    config[key].as_u64().unwrap_or_else(|| panic!("the configuration has no number under {key:?}"))
}
