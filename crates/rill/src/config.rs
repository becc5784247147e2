//! The model's configuration: `config.json` parsed into one typed struct.
//!
//! Both published forms are read, flat (`kimi_linear`) and nested (`kimi_k3` with
//! `text_config`). Nothing is defaulted and every problem is reported at once.

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
