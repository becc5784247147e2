//! The model's configuration: `config.json` parsed into one typed struct.
//!
//! Both published forms are read, flat (`kimi_linear`) and nested (`kimi_k3` with
//! `text_config`). Nothing is defaulted and every problem is reported at once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Which of the two published layouts a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `KimiK3ForConditionalGeneration`: text model under `text_config`, tensors prefixed
    /// `language_model.`.
    KimiK3,
    /// `KimiLinearForCausalLM`: flat configuration, no prefix.
    KimiLinear,
}

/// Everything the forward pass needs to know about a model's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Layout of the checkpoint.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding and the head, reserved tokens included.
    pub vocab_size: usize,
    /// `eps` of every RMSNorm in the text model.
    pub rms_norm_eps: f32,
    /// Longest context the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Token that starts a document.
    pub bos_token_id: u32,
    /// Token that ends a reply.
    pub eos_token_id: u32,
    /// Padding token.
    pub pad_token_id: u32,
    /// What each layer is made of, first layer first.
    pub layers: Vec<LayerConfig>,
    /// Shape of the linear-attention layers.
    pub kda: KdaConfig,
    /// Shape of the full-attention layers.
    pub mla: MlaConfig,
    /// Intermediate width of a dense feed-forward layer.
    pub dense_intermediate_size: usize,
    /// Shape of the mixture-of-experts layers.
    pub moe: MoeConfig,
    /// Activation of every feed-forward product.
    pub activation: Activation,
    /// Layers per attention-residual block; `None` means plain residuals.
    pub attn_res_block_size: Option<usize>,
}

impl ModelConfig {
    /// Reads a checkpoint's `config.json`.
    ///
    /// Only keys whose absence has a meaning of its own may be absent (`gate_lower_bound`,
    /// `use_full_rank_gate`, `mla_use_output_gate`, `attn_res_block_size`,
    /// `routed_expert_hidden_size`, `quantization_config`); keys that are not needed are ignored.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every missing, malformed, absurd or contradictory field of the file, or
    /// with the one place where it stops being a JSON object.
    pub fn from_json(bytes: &[u8]) -> Result<ModelConfig, ConfigError> {
        let problems = RefCell::new(Vec::new());
        let config = Section::root(bytes, &problems).and_then(|root| read_model(&root));
        let problems = problems.into_inner();
        match config {
            Some(config) if problems.is_empty() => Ok(config),
            _ => Err(ConfigError { problems }),
        }
    }
}

/// The two parts of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Token mixing.
    pub attention: AttentionKind,
    /// Feed-forward.
    pub ffn: FfnKind,
}

/// How a layer mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// Kimi Delta Attention: a recurrent state per head.
    Kda,
    /// Multi-head latent attention over a cache.
    Mla,
}

/// What kind of feed-forward a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FfnKind {
    /// One wide gated product.
    Dense,
    /// Routed experts and shared experts.
    Moe,
}

/// Kimi Delta Attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KdaConfig {
    /// Heads.
    pub n_heads: usize,
    /// Width of keys and of values of one head.
    pub head_dim: usize,
    /// Taps of the short convolution, the current input included.
    pub conv_kernel_size: usize,
    /// How the log-decay is computed.
    pub decay_gate: DecayGate,
    /// How the output gate is projected.
    pub output_gate: KdaOutputGate,
}

/// The two decay functions of KDA: different functions, not a clamp.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DecayGate {
    /// `lower_bound · sigmoid(exp(A_log) · z)`.
    Bounded {
        /// Most negative log-decay.
        lower_bound: f32,
    },
    /// `−exp(A_log) · softplus(z)`.
    Unbounded,
}

/// Projection of KDA's output gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KdaOutputGate {
    /// One `g_proj`.
    FullRank,
    /// `g_a_proj` then `g_b_proj`, rank = head_dim.
    LowRank,
}

/// Multi-head latent attention, never rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaConfig {
    /// Heads (query, key and value alike).
    pub n_heads: usize,
    /// Rank of the query factorisation; `None` means a single `q_proj`.
    pub q_lora_rank: Option<usize>,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Per-head key width that comes from the latent.
    pub qk_nope_head_dim: usize,
    /// Key width shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Per-head value width.
    pub v_head_dim: usize,
    /// Whether `g_proj` gates the output.
    pub output_gate: bool,
}

/// Mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts of a layer.
    pub n_experts: usize,
    /// Routed experts used per token.
    pub top_k: usize,
    /// Shared experts, stored as one MLP of `n_shared_experts · intermediate_size`.
    pub n_shared_experts: usize,
    /// Intermediate width of one expert.
    pub intermediate_size: usize,
    /// Width of the latent the routed experts work on; `None` means they see the hidden state.
    pub latent: Option<LatentMoe>,
    /// Factor on the routed sum's weights.
    pub routed_scaling_factor: f32,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// How routed experts are stored.
    pub expert_format: ExpertFormat,
}

/// Latent mixture of experts (K3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentMoe {
    /// Width of the experts' input and output.
    pub size: usize,
    /// Whether the aggregate is normalised before the up projection.
    pub norm: bool,
}

/// Number format of the routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertFormat {
    /// Plain bf16 `.weight`.
    Bf16,
    /// MXFP4: `.weight_packed` and `.weight_scale`, groups of 32 inputs.
    Mxfp4,
}

/// Activation of the gated products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(g) · u`.
    Silu,
    /// `beta·tanh(g/beta)·sigmoid(g) · linear_beta·tanh(u/linear_beta)`.
    Situ {
        /// Bound of the gate.
        beta: f32,
        /// Bound of the linear part.
        linear_beta: f32,
    },
}

/// Everything that is wrong with a `config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    problems: Vec<Problem>,
}

impl ConfigError {
    /// The problems, in the order in which the fields are read.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.len() {
            1 => writeln!(f, "config.json has a problem:")?,
            n => writeln!(f, "config.json has {n} problems:")?,
        }
        for (i, problem) in self.problems.iter().enumerate() {
            writeln!(f, "  {}. {problem}", i + 1)?;
        }
        f.write_str(
            "Correct the file, or fetch it again from where the checkpoint was published; \
             only Kimi K3 and Kimi-Linear checkpoints can be run.",
        )
    }
}

impl std::error::Error for ConfigError {}

/// One thing that is wrong with a `config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted path as written in the file, such as `text_config.linear_attn_config.num_heads`;
    /// empty when the file as a whole cannot be read.
    pub field: String,
    /// What was expected and what was found.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}

// Upper limits. All are far above Kimi K3 (in brackets); their purpose is that no size taken from a
// configuration can make a later allocation or product absurd.

/// Length of the file in bytes (K3: 5 KB).
const MAX_FILE_BYTES: usize = 1 << 20;
/// Nested objects and lists (K3: 6).
const MAX_DEPTH: usize = 32;
/// `hidden_size` and every rank (7168).
const MAX_HIDDEN: usize = 1 << 17;
/// Rows of any projection, products of heads and head width included (33792).
const MAX_WIDTH: usize = 1 << 20;
/// Layers (93).
const MAX_LAYERS: usize = 1 << 10;
/// Vocabulary (163840).
const MAX_VOCAB: usize = 1 << 21;
/// Attention heads (96).
const MAX_HEADS: usize = 1 << 12;
/// Width of one head (192).
const MAX_HEAD_DIM: usize = 1 << 12;
/// Taps of the short convolution (4).
const MAX_CONV_KERNEL: usize = 1 << 6;
/// Routed experts of a layer (896).
const MAX_EXPERTS: usize = 1 << 16;
/// Shared experts of a layer (2).
const MAX_SHARED_EXPERTS: usize = 1 << 8;
/// Context length in tokens (1048576).
const MAX_POSITIONS: usize = 1 << 30;

/// Weights that share one MXFP4 scale.
const MXFP4_GROUP: usize = 32;

/// Longest piece of the file that a message repeats, in characters.
const QUOTED_CHARS: usize = 40;
/// Most entries of a list that a message names.
const NAMED_ITEMS: usize = 8;

fn read_model(root: &Section) -> Option<ModelConfig> {
    let model_type = root.text("model_type");
    let nested = root.contains("text_config");
    // Without its text model a K3 file would read as a flat one in which everything is missing.
    if !nested && model_type.as_deref() == Some("kimi_k3") {
        root.absent("text_config");
        return None;
    }

    let architecture = if nested { Architecture::KimiK3 } else { Architecture::KimiLinear };
    let (expected_type, expected_class, form) = match architecture {
        Architecture::KimiK3 => ("kimi_k3", "KimiK3ForConditionalGeneration", "a file with"),
        Architecture::KimiLinear => ("kimi_linear", "KimiLinearForCausalLM", "a file without"),
    };
    if let Some(found) = model_type.filter(|found| found != expected_type) {
        let found = shorten(&found);
        root.problem(
            "model_type",
            format!("expected \"{expected_type}\" in {form} text_config, found \"{found}\""),
        );
    }
    let classes = root.list("architectures");
    if classes.is_some_and(
        |list| !matches!(&list[..], [one] if decode(one).as_deref() == Some(expected_class)),
    ) {
        root.problem(
            "architectures",
            format!("expected [\"{expected_class}\"] in {form} text_config, found another list"),
        );
    }
    root.check_dtype();

    if !nested {
        return read_text_model(architecture, None, root);
    }
    let text = root.section("text_config")?;
    text.one_of("model_type", &["kimi_linear"]);
    text.check_dtype();
    if root.contains("tie_word_embeddings") {
        root.exactly("tie_word_embeddings", "false", "the head has weights of its own");
    }
    if root.contains("quantization_config") {
        root.problem(
            "quantization_config",
            "expected under text_config, found beside it: move it there",
        );
    }
    read_text_model(architecture, Some(root), &text)
}

/// Reads the text model from `text`; `outer` is the object around it in the nested form.
fn read_text_model(
    architecture: Architecture,
    outer: Option<&Section>,
    text: &Section,
) -> Option<ModelConfig> {
    let hidden_size = text.size("hidden_size", MAX_HIDDEN);
    let n_layers = text.size("num_hidden_layers", MAX_LAYERS);
    let vocab_size = text.size("vocab_size", MAX_VOCAB);
    let rms_norm_eps = text.positive("rms_norm_eps");
    let max_position_embeddings = read_max_positions(outer.is_some(), text);
    let bos_token_id = read_token_id("bos_token_id", outer, text, vocab_size);
    let eos_token_id = read_token_id("eos_token_id", outer, text, vocab_size);
    let pad_token_id = read_token_id("pad_token_id", outer, text, vocab_size);
    text.exactly("tie_word_embeddings", "false", "the head has weights of its own");
    text.exactly("num_nextn_predict_layers", "0", "draft heads are not run");

    let linear_attn = text.section("linear_attn_config");
    let kda = linear_attn.as_ref().and_then(read_kda);
    let attention = linear_attn.as_ref().and_then(|section| read_attention(section, n_layers));
    let mla = read_mla(text);

    let dense_intermediate_size = text.size("intermediate_size", MAX_WIDTH);
    let n_dense = text.integer("first_k_dense_replace", 0..=MAX_LAYERS);
    if let (Some(n_dense), Some(n_layers)) = (n_dense, n_layers)
        && n_dense > n_layers
    {
        text.problem(
            "first_k_dense_replace",
            format!("expected at most num_hidden_layers = {n_layers}, found {n_dense}"),
        );
    }
    let moe = read_moe(text, hidden_size);
    let activation = read_activation(text);
    let attn_res_block_size = text.optional_size("attn_res_block_size", MAX_LAYERS);

    let n_dense = n_dense?;
    let layers = attention?.into_iter().enumerate().map(|(layer, attention)| LayerConfig {
        attention,
        ffn: if layer < n_dense { FfnKind::Dense } else { FfnKind::Moe },
    });
    Some(ModelConfig {
        architecture,
        hidden_size: hidden_size?,
        vocab_size: vocab_size?,
        rms_norm_eps: rms_norm_eps?,
        max_position_embeddings: max_position_embeddings?,
        bos_token_id: bos_token_id?,
        eos_token_id: eos_token_id?,
        pad_token_id: pad_token_id?,
        layers: layers.collect(),
        kda: kda?,
        mla: mla?,
        dense_intermediate_size: dense_intermediate_size?,
        moe: moe?,
        activation: activation?,
        attn_res_block_size,
    })
}

/// The context length, which the flat form calls `model_max_length`.
fn read_max_positions(nested: bool, text: &Section) -> Option<usize> {
    const NESTED: &str = "max_position_embeddings";
    const FLAT: &str = "model_max_length";
    if nested || (text.contains(NESTED) && !text.contains(FLAT)) {
        return text.size(NESTED, MAX_POSITIONS);
    }
    let length = text.size(FLAT, MAX_POSITIONS);
    if text.contains(NESTED) {
        let other = text.size(NESTED, MAX_POSITIONS);
        if let (Some(length), Some(other)) = (length, other)
            && length != other
        {
            text.problem(FLAT, format!("is {length}, but {NESTED} is {other}: they must agree"));
        }
    }
    length
}

/// A token id, which the nested form may give at either level or at both.
fn read_token_id(
    key: &str,
    outer: Option<&Section>,
    text: &Section,
    vocab_size: Option<usize>,
) -> Option<u32> {
    let read = |section: &Section| {
        let id = section.integer(key, 0..=MAX_VOCAB - 1)?;
        if let Some(vocab_size) = vocab_size.filter(|size| id >= *size) {
            section.problem(
                key,
                format!("expected an id below vocab_size = {vocab_size}, found {id}"),
            );
        }
        u32::try_from(id).ok()
    };
    let outer = outer.filter(|outer| outer.contains(key));
    let outer_id = outer.and_then(read);
    if outer.is_some() && !text.contains(key) {
        return outer_id;
    }
    let id = read(text);
    if let (Some(id), Some(outer_id)) = (id, outer_id)
        && id != outer_id
    {
        text.problem(key, format!("is {id}, but the outer {key} is {outer_id}: they must agree"));
    }
    id
}

fn read_kda(section: &Section) -> Option<KdaConfig> {
    let n_heads = section.size("num_heads", MAX_HEADS);
    let head_dim = section.size("head_dim", MAX_HEAD_DIM);
    section.check_width("num_heads", "num_heads · head_dim", n_heads, head_dim);
    let conv_kernel_size = section.size("short_conv_kernel_size", MAX_CONV_KERNEL);
    let decay_gate = if section.contains("gate_lower_bound") {
        section
            .number("gate_lower_bound", "a finite negative number", |bound| bound < 0.0)
            .map(|lower_bound| DecayGate::Bounded { lower_bound })
    } else {
        Some(DecayGate::Unbounded)
    };
    let output_gate = match section.optional_flag("use_full_rank_gate") {
        true => KdaOutputGate::FullRank,
        false => KdaOutputGate::LowRank,
    };
    Some(KdaConfig {
        n_heads: n_heads?,
        head_dim: head_dim?,
        conv_kernel_size: conv_kernel_size?,
        decay_gate: decay_gate?,
        output_gate,
    })
}

/// Which layers are MLA and which are KDA, from the two one-based lists.
fn read_attention(section: &Section, n_layers: Option<usize>) -> Option<Vec<AttentionKind>> {
    const MLA: &str = "full_attn_layers";
    const KDA: &str = "kda_layers";
    let mla = section.layer_list(MLA, n_layers);
    let kda = section.layer_list(KDA, n_layers);
    let (mla, kda) = (mla?, kda?);
    let overlap = kda.iter().copied().filter(|layer| mla.contains(layer));
    if let Some(layers) = name_layers(overlap) {
        section.problem(KDA, format!("expected no layer that is also in {MLA}, found {layers}"));
    }
    let n_layers = n_layers?;
    let neither = (1..=n_layers).filter(|layer| !mla.contains(layer) && !kda.contains(layer));
    if let Some(layers) = name_layers(neither) {
        section.problem(KDA, format!("expected every layer here or in {MLA}, missing {layers}"));
    }
    let kind = |layer| {
        if mla.contains(&layer) { AttentionKind::Mla } else { AttentionKind::Kda }
    };
    Some((1..=n_layers).map(kind).collect())
}

fn read_mla(text: &Section) -> Option<MlaConfig> {
    let n_heads = text.size("num_attention_heads", MAX_HEADS);
    let n_kv_heads = text.size("num_key_value_heads", MAX_HEADS);
    if let (Some(n_heads), Some(n_kv_heads)) = (n_heads, n_kv_heads)
        && n_heads != n_kv_heads
    {
        text.problem(
            "num_key_value_heads",
            format!("expected num_attention_heads = {n_heads}, found {n_kv_heads}"),
        );
    }
    let q_lora_rank = text.size_or_null("q_lora_rank", MAX_HIDDEN);
    let kv_lora_rank = text.size("kv_lora_rank", MAX_HIDDEN);
    let nope = text.size("qk_nope_head_dim", MAX_HEAD_DIM);
    let rope = text.size("qk_rope_head_dim", MAX_HEAD_DIM);
    let v = text.size("v_head_dim", MAX_HEAD_DIM);
    let sum = |a: Option<usize>, b: Option<usize>| a.zip(b).map(|(a, b)| a + b);
    let query = "num_attention_heads · (qk_nope_head_dim + qk_rope_head_dim)";
    text.check_width("num_attention_heads", query, n_heads, sum(nope, rope));
    let key_value = "num_attention_heads · (qk_nope_head_dim + v_head_dim)";
    text.check_width("num_attention_heads", key_value, n_heads, sum(nope, v));
    text.exactly("mla_use_nope", "true", "rotary positions are not computed");
    Some(MlaConfig {
        n_heads: n_heads?,
        q_lora_rank,
        kv_lora_rank: kv_lora_rank?,
        qk_nope_head_dim: nope?,
        qk_rope_head_dim: rope?,
        v_head_dim: v?,
        output_gate: text.optional_flag("mla_use_output_gate"),
    })
}

fn read_moe(text: &Section, hidden_size: Option<usize>) -> Option<MoeConfig> {
    text.exactly("moe_layer_freq", "1", "every layer after the dense ones has experts");
    text.exactly("num_expert_group", "1", "experts are not routed in groups");
    text.exactly("topk_group", "1", "experts are not routed in groups");
    text.one_of("moe_router_activation_func", &["sigmoid"]);
    if text.contains("topk_method") {
        text.one_of("topk_method", &["noaux_tc"]);
    }
    let n_experts = text.size("num_experts", MAX_EXPERTS);
    let top_k = text.size("num_experts_per_token", MAX_EXPERTS);
    if let (Some(top_k), Some(n_experts)) = (top_k, n_experts)
        && top_k > n_experts
    {
        text.problem(
            "num_experts_per_token",
            format!("expected at most num_experts = {n_experts}, found {top_k}"),
        );
    }
    let n_shared_experts = text.size("num_shared_experts", MAX_SHARED_EXPERTS);
    let intermediate_size = text.size("moe_intermediate_size", MAX_WIDTH);
    let shared = "num_shared_experts · moe_intermediate_size";
    text.check_width("moe_intermediate_size", shared, n_shared_experts, intermediate_size);

    let has_latent = text.contains("routed_expert_hidden_size");
    let latent_size = text.optional_size("routed_expert_hidden_size", MAX_HIDDEN);
    let latent_norm = text.flag_if(has_latent, "latent_moe_use_norm", "routed_expert_hidden_size");
    let latent = latent_size.zip(latent_norm).map(|(size, norm)| LatentMoe { size, norm });

    let routed_scaling_factor = text.positive("routed_scaling_factor");
    let renormalize = text.flag("moe_renormalize");
    let mut expert_format = ExpertFormat::Bf16;
    if text.contains("quantization_config") {
        expert_format = ExpertFormat::Mxfp4;
        check_mxfp4(text);
        if has_latent {
            text.check_grouped("routed_expert_hidden_size", latent_size);
        } else {
            text.check_grouped("hidden_size", hidden_size);
        }
        text.check_grouped("moe_intermediate_size", intermediate_size);
    }
    Some(MoeConfig {
        n_experts: n_experts?,
        top_k: top_k?,
        n_shared_experts: n_shared_experts?,
        intermediate_size: intermediate_size?,
        latent,
        routed_scaling_factor: routed_scaling_factor?,
        renormalize: renormalize?,
        expert_format,
    })
}

/// The one quantisation that is run: MXFP4 as `compressed-tensors` writes it.
fn check_mxfp4(text: &Section) {
    const FORMATS: &[&str] = &["mxfp4-pack-quantized"];
    let Some(quantization) = text.section("quantization_config") else {
        return;
    };
    if quantization.contains("quant_method") {
        quantization.one_of("quant_method", &["compressed-tensors"]);
    }
    quantization.one_of("format", FORMATS);
    let Some(groups) = quantization.section("config_groups") else {
        return;
    };
    if groups.entries.len() > 1 {
        quantization.problem(
            "config_groups",
            format!("expected group_0 alone, found {} groups", groups.entries.len()),
        );
    }
    let Some(group) = groups.section("group_0") else {
        return;
    };
    if group.contains("format") {
        group.one_of("format", FORMATS);
    }
    let Some(weights) = group.section("weights") else {
        return;
    };
    weights.exactly("num_bits", "4", "experts are read as MXFP4");
    weights.exactly("group_size", "32", "experts are read as MXFP4");
    if weights.contains("type") {
        weights.one_of("type", &["float"]);
    }
}

fn read_activation(text: &Section) -> Option<Activation> {
    const BETA: &str = "activation_situ_beta";
    const LINEAR_BETA: &str = "activation_situ_linear_beta";
    match text.one_of("hidden_act", &["silu", "situ"])? {
        "situ" => {
            let beta = text.positive(BETA);
            let linear_beta = text.positive(LINEAR_BETA);
            Some(Activation::Situ { beta: beta?, linear_beta: linear_beta? })
        }
        _ => {
            for key in [BETA, LINEAR_BETA] {
                if text.contains(key) {
                    text.problem(
                        key,
                        "expected only with hidden_act \"situ\", found with \"silu\"",
                    );
                }
            }
            Some(Activation::Silu)
        }
    }
}

/// One JSON object of the file: values still unparsed, each key read by the type it should have.
///
/// Readers record a problem and return `None` when a value is unusable, so that everything else is
/// still read. Numbers stay text until then, which keeps `1e400` a problem of its field instead of
/// an unreadable file.
struct Section<'a> {
    /// Prefix of this object's fields: empty, or a dotted path with a dot at its end.
    path: String,
    entries: BTreeMap<String, Entry<'a>>,
    problems: &'a RefCell<Vec<Problem>>,
}

struct Entry<'a> {
    raw: &'a str,
    repeated: bool,
}

impl<'a> Section<'a> {
    fn root(bytes: &'a [u8], problems: &'a RefCell<Vec<Problem>>) -> Option<Section<'a>> {
        let unreadable = |message: String| {
            problems.borrow_mut().push(Problem { field: String::new(), message });
            None
        };
        if bytes.len() > MAX_FILE_BYTES {
            let found = bytes.len();
            return unreadable(format!("expected at most {MAX_FILE_BYTES} bytes, found {found}"));
        }
        if let Some((line, column)) = too_deep(bytes) {
            return unreadable(format!(
                "expected at most {MAX_DEPTH} nested objects and lists, \
                 found more at line {line}, column {column}"
            ));
        }
        match serde_json::from_slice::<Entries>(bytes) {
            Ok(Entries(entries)) => Some(Section { path: String::new(), entries, problems }),
            Err(e) if e.is_data() => unreadable(format!(
                "expected a JSON object, found another value at line {}, column {}",
                e.line(),
                e.column().max(1)
            )),
            Err(e) => unreadable(format!("expected a JSON object: {e}")),
        }
    }

    fn contains(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    fn problem(&self, key: &str, message: impl Into<String>) {
        let field = format!("{}{key}", self.path);
        self.problems.borrow_mut().push(Problem { field, message: message.into() });
    }

    fn absent(&self, key: &str) {
        self.problem(key, "is required, but absent");
    }

    fn unexpected(&self, key: &str, expected: &str, raw: &str) {
        self.problem(key, format!("expected {expected}, found {}", describe(raw)));
    }

    /// The text of a value that must be there.
    fn raw(&self, key: &str) -> Option<&'a str> {
        let Some(entry) = self.entries.get(key) else {
            self.absent(key);
            return None;
        };
        if entry.repeated {
            self.problem(key, "expected once, found more than once: which value is meant?");
            return None;
        }
        Some(entry.raw)
    }

    fn section(&self, key: &str) -> Option<Section<'a>> {
        let raw = self.raw(key)?;
        match serde_json::from_str(raw) {
            Ok(Entries(entries)) => Some(Section {
                path: format!("{}{key}.", self.path),
                entries,
                problems: self.problems,
            }),
            Err(e) if e.is_data() => {
                self.unexpected(key, "an object", raw);
                None
            }
            Err(e) => {
                self.problem(
                    key,
                    format!("expected a readable object: {e} (counted from its start)"),
                );
                None
            }
        }
    }

    fn list(&self, key: &str) -> Option<Vec<&'a str>> {
        let raw = self.raw(key)?;
        match serde_json::from_str::<Vec<&RawValue>>(raw) {
            Ok(list) => Some(list.into_iter().map(RawValue::get).collect()),
            Err(_) => {
                self.unexpected(key, "a list", raw);
                None
            }
        }
    }

    fn text(&self, key: &str) -> Option<String> {
        let raw = self.raw(key)?;
        let text = decode(raw);
        if text.is_none() {
            self.unexpected(key, "a string", raw);
        }
        text
    }

    fn flag(&self, key: &str) -> Option<bool> {
        match self.raw(key)? {
            "true" => Some(true),
            "false" => Some(false),
            raw => {
                self.unexpected(key, "true or false", raw);
                None
            }
        }
    }

    /// A flag whose absence means no.
    fn optional_flag(&self, key: &str) -> bool {
        self.contains(key) && self.flag(key) == Some(true)
    }

    /// A flag that must be there exactly when `condition` holds, which is `owner` being present.
    fn flag_if(&self, condition: bool, key: &str, owner: &str) -> Option<bool> {
        if condition {
            return self.flag(key);
        }
        if self.contains(key) {
            self.problem(key, format!("expected only beside {owner}, found without it"));
        }
        None
    }

    fn integer(&self, key: &str, range: RangeInclusive<usize>) -> Option<usize> {
        let raw = self.raw(key)?;
        let value = parse_integer(raw, &range);
        if value.is_none() {
            let (min, max) = range.into_inner();
            self.unexpected(key, &format!("an integer from {min} to {max}"), raw);
        }
        value
    }

    /// A dimension or a count: at least one.
    fn size(&self, key: &str, max: usize) -> Option<usize> {
        self.integer(key, 1..=max)
    }

    fn optional_size(&self, key: &str, max: usize) -> Option<usize> {
        if self.contains(key) { self.size(key, max) } else { None }
    }

    /// A dimension whose key must be there, with `null` for none.
    fn size_or_null(&self, key: &str, max: usize) -> Option<usize> {
        let raw = self.raw(key)?;
        let value = parse_integer(raw, &(1..=max));
        if value.is_none() && raw != "null" {
            self.unexpected(key, &format!("an integer from 1 to {max}, or null"), raw);
        }
        value
    }

    /// A finite number that passes `accept`; `expected` says so in words.
    fn number(&self, key: &str, expected: &str, accept: fn(f32) -> bool) -> Option<f32> {
        let raw = self.raw(key)?;
        // The file is valid JSON, so the words that Rust would also parse cannot stand here.
        let value = raw.parse().ok().filter(|value: &f32| value.is_finite() && accept(*value));
        if value.is_none() {
            self.unexpected(key, &format!("{expected} within f32"), raw);
        }
        value
    }

    fn positive(&self, key: &str) -> Option<f32> {
        self.number(key, "a finite positive number", |value| value > 0.0)
    }

    /// Checks a setting of which one value is implemented: an integer or a flag, as JSON text.
    fn exactly(&self, key: &str, expected: &str, reason: &str) {
        if let Some(raw) = self.raw(key)
            && raw != expected
        {
            self.unexpected(key, &format!("{expected} ({reason})"), raw);
        }
    }

    fn one_of<'k>(&self, key: &str, known: &[&'k str]) -> Option<&'k str> {
        let raw = self.raw(key)?;
        let found = decode(raw);
        let value = known.iter().copied().find(|known| found.as_deref() == Some(known));
        if value.is_none() {
            let quoted: Vec<String> = known.iter().map(|known| format!("\"{known}\"")).collect();
            self.unexpected(key, &quoted.join(" or "), raw);
        }
        value
    }

    /// Weights are bf16 wherever they are not experts; older files call the key `torch_dtype`.
    fn check_dtype(&self) {
        for key in ["dtype", "torch_dtype"] {
            if self.contains(key) {
                self.one_of(key, &["bfloat16"]);
            }
        }
    }

    fn check_width(&self, key: &str, what: &str, a: Option<usize>, b: Option<usize>) {
        let Some((a, b)) = a.zip(b) else { return };
        let width = (a as u64).checked_mul(b as u64);
        if width.is_none_or(|width| width > MAX_WIDTH as u64) {
            self.problem(
                key,
                format!("expected {what} to be at most {MAX_WIDTH}, found {a} · {b}"),
            );
        }
    }

    fn check_grouped(&self, key: &str, width: Option<usize>) {
        if let Some(width) = width.filter(|width| width % MXFP4_GROUP != 0) {
            let expected = format!("a multiple of {MXFP4_GROUP} (one MXFP4 scale)");
            self.problem(key, format!("expected {expected}, found {width}"));
        }
    }

    /// A list of one-based layers; `None` when some entry is none.
    fn layer_list(&self, key: &str, n_layers: Option<usize>) -> Option<Vec<usize>> {
        let list = self.list(key)?;
        if list.len() > MAX_LAYERS {
            self.problem(
                key,
                format!("expected at most {MAX_LAYERS} layers, found {}", list.len()),
            );
            return None;
        }
        let range = 1..=n_layers.unwrap_or(MAX_LAYERS);
        let (mut layers, mut bad) = (Vec::new(), Vec::new());
        for (i, raw) in list.iter().enumerate() {
            match parse_integer(raw, &range) {
                Some(layer) => layers.push(layer),
                None => bad.push(format!("{} as entry {}", describe(raw), i + 1)),
            }
        }
        if let Some(bad) = name_first(&bad) {
            let max = range.end();
            self.problem(key, format!("expected one-based layers from 1 to {max}, found {bad}"));
        }
        let repeated = (0..layers.len()).filter(|&i| layers[..i].contains(&layers[i]));
        if let Some(repeated) = name_layers(repeated.map(|i| layers[i])) {
            self.problem(key, format!("expected each layer once, found {repeated} again"));
        }
        if !bad.is_empty() {
            return None;
        }
        Some(layers)
    }
}

/// The keys and unparsed values of a JSON object.
struct Entries<'a>(BTreeMap<String, Entry<'a>>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
            let repeated = entries.contains_key(&key);
            entries.insert(key, Entry { raw: value.get(), repeated });
        }
        Ok(Entries(entries))
    }
}

/// Line and column, from one, of the first bracket that nests deeper than [`MAX_DEPTH`].
fn too_deep(bytes: &[u8]) -> Option<(usize, usize)> {
    let (mut line, mut line_start, mut depth) = (1, 0, 0usize);
    let (mut in_string, mut escaped) = (false, false);
    for (i, &byte) in bytes.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'\n' => (line, line_start) = (line + 1, i + 1),
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Some((line, i + 1 - line_start));
        }
    }
    None
}

fn parse_integer(raw: &str, range: &RangeInclusive<usize>) -> Option<usize> {
    raw.parse().ok().filter(|value| range.contains(value))
}

/// The content of a JSON string; `None` for any other value.
fn decode(raw: &str) -> Option<String> {
    serde_json::from_str(raw).ok()
}

/// A JSON value in the words of a message.
fn describe(raw: &str) -> String {
    match raw.as_bytes().first() {
        Some(b'{') => "an object".to_owned(),
        Some(b'[') => "a list".to_owned(),
        Some(b'"') => format!("the string {}", shorten(raw)),
        _ => shorten(raw),
    }
}

/// The start of a piece of the file, safe to print on a terminal.
fn shorten(text: &str) -> String {
    let mut short: String = text
        .chars()
        .take(QUOTED_CHARS)
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    if short.len() < text.len() && text.chars().nth(QUOTED_CHARS).is_some() {
        short.push('…');
    }
    short
}

fn name_layers(layers: impl Iterator<Item = usize>) -> Option<String> {
    name_first(&layers.map(|layer| layer.to_string()).collect::<Vec<_>>())
}

/// "4, 8 and 3 more", or `None` when there is nothing to name.
fn name_first(items: &[String]) -> Option<String> {
    let named = items.get(..NAMED_ITEMS).unwrap_or(items).join(", ");
    match items.len().saturating_sub(NAMED_ITEMS) {
        _ if items.is_empty() => None,
        0 => Some(named),
        more => Some(format!("{named} and {more} more")),
    }
}
