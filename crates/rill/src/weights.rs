//! The model's weights: an inventory of every tensor, bound once with its type and shape
//! checked, so that the forward pass looks nothing up and checks nothing.
//!
//! Tensor names and shapes are the published ones. Binding runs twice over the same inventory:
//! first over headers alone, collecting every disagreement and the bytes the trunk takes, then
//! loading.

use rill_kernels::{Codec, math};

use crate::compute::transpose;
use crate::config::{Architecture, AttentionKind, FfnKind, KdaOutputGate, ModelConfig};
use crate::error::Error;
use crate::source::{Findings, Form, Forms, Stored, WeightSource, to_f32};
use crate::trunk::{Linear, StoredMatrix};

/// Every weight but the routed experts: small tensors as numbers, matrices as their number within
/// their layer, because their bytes may be elsewhere until the layer runs.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Name of the embedding (vocab, hidden), read a row at a time and never resident.
    pub(crate) embed_tokens: String,
    pub(crate) layers: Vec<Layer>,
    /// (hidden)
    pub(crate) norm: Vec<f32>,
    /// Mix in front of `norm`, with attention residuals.
    pub(crate) output_mix: Option<Mix>,
}

#[derive(Debug)]
pub(crate) struct Layer {
    /// (hidden)
    pub(crate) input_layernorm: Vec<f32>,
    /// (hidden)
    pub(crate) post_attention_layernorm: Vec<f32>,
    pub(crate) attention: Attention,
    pub(crate) ffn: Ffn,
    /// In front of the attention and of the feed-forward, with attention residuals.
    pub(crate) mixes: Option<(Mix, Mix)>,
}

/// One residual mix: norm weight times projection, (hidden).
#[derive(Debug)]
pub(crate) struct Mix(pub(crate) Vec<f32>);

#[derive(Debug)]
pub(crate) enum Attention {
    Kda(Box<Kda>),
    Mla(Box<Mla>),
}

#[derive(Debug)]
pub(crate) enum Ffn {
    Dense(Box<Mlp>),
    Moe(Box<Moe>),
}

/// P = heads · head_dim.
#[derive(Debug)]
pub(crate) struct Kda {
    /// (P, hidden) each: q, k, v.
    pub(crate) qkv_proj: [Linear; 3],
    /// (kernel, P) each, oldest tap first: q, k, v.
    pub(crate) qkv_conv: [Vec<f32>; 3],
    /// (head_dim, hidden)
    pub(crate) f_a_proj: Linear,
    /// (P, head_dim)
    pub(crate) f_b_proj: Linear,
    /// `exp(A_log)`, one per **head**.
    pub(crate) decay_rate: Vec<f32>,
    /// (P)
    pub(crate) dt_bias: Vec<f32>,
    /// (heads, hidden)
    pub(crate) b_proj: Linear,
    pub(crate) gate: Gate,
    /// (head_dim)
    pub(crate) o_norm: Vec<f32>,
    /// (hidden, P)
    pub(crate) o_proj: Linear,
}

/// Projection of KDA's output gate, to (P).
#[derive(Debug)]
pub(crate) enum Gate {
    /// (P, hidden)
    FullRank(Linear),
    /// (head_dim, hidden), (P, head_dim)
    LowRank(Linear, Linear),
}

#[derive(Debug)]
pub(crate) struct Mla {
    pub(crate) query: Query,
    /// (kv_lora + rope, hidden)
    pub(crate) kv_a_proj_with_mqa: Linear,
    /// (kv_lora)
    pub(crate) kv_a_layernorm: Vec<f32>,
    /// (heads · (nope + v), kv_lora)
    pub(crate) kv_b_proj: Linear,
    /// (heads · v, hidden)
    pub(crate) g_proj: Option<Linear>,
    /// (hidden, heads · v)
    pub(crate) o_proj: Linear,
}

/// Query projection, to (heads · (nope + rope)).
#[derive(Debug)]
pub(crate) enum Query {
    Full(Linear),
    Factorised {
        /// (q_lora, hidden)
        a_proj: Linear,
        /// (q_lora)
        a_layernorm: Vec<f32>,
        /// (heads · (nope + rope), q_lora)
        b_proj: Linear,
    },
}

/// A gated feed-forward of one width.
#[derive(Debug)]
pub(crate) struct Mlp {
    /// (intermediate, hidden)
    pub(crate) gate_proj: Linear,
    /// (intermediate, hidden)
    pub(crate) up_proj: Linear,
    /// (hidden, intermediate)
    pub(crate) down_proj: Linear,
}

#[derive(Debug)]
pub(crate) struct Moe {
    /// Router, (experts, hidden).
    pub(crate) gate: Linear,
    /// (experts)
    pub(crate) e_score_correction_bias: Vec<f32>,
    pub(crate) latent: Option<Latent>,
    /// All shared experts as one.
    pub(crate) shared_experts: Mlp,
}

/// Projections around the routed experts.
#[derive(Debug)]
pub(crate) struct Latent {
    /// (latent, hidden)
    pub(crate) down_proj: Linear,
    /// (latent)
    pub(crate) norm: Option<Vec<f32>>,
    /// (hidden, latent)
    pub(crate) up_proj: Linear,
}

/// A model whose headers agree with its configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    /// Bytes of everything that is held in memory: all but embedding and routed experts.
    pub(crate) trunk_bytes: u64,
    /// Tensors the model uses.
    pub(crate) tensors: usize,
}

/// Checks every tensor of the text model, from headers alone: what the configuration asks for is
/// there, and what is there the configuration asks for. A weight that is left out would make
/// another model, silently.
pub(crate) fn check(source: &dyn WeightSource, config: &ModelConfig) -> Result<Bound, Error> {
    let mut binder = Binder::new(source, config, false);
    binder.model()?;
    let Binder { mut findings, trunk_bytes, prefix, .. } = binder;
    source.check_experts(config, &mut findings);
    if !findings.enough() {
        findings.leftovers(source, prefix);
    }
    Ok(Bound { trunk_bytes, tensors: findings.finish(source.folder())? })
}

/// The small tensors of a model that [`check`] has accepted, and where its matrices are to be read.
pub(crate) struct Loaded {
    pub(crate) weights: Weights,
    /// Of each layer, in the order of their numbers.
    pub(crate) layers: Vec<Vec<StoredMatrix>>,
    /// (vocab, hidden)
    pub(crate) lm_head: StoredMatrix,
}

/// Reads the small tensors of a model that [`check`] has accepted.
pub(crate) fn load(source: &dyn WeightSource, config: &ModelConfig) -> Result<Loaded, Error> {
    let mut binder = Binder::new(source, config, true);
    let weights = binder.model()?;
    // The head is bound after the layers and belongs to none.
    let lm_head = binder.matrices.pop().expect("the head was bound");
    Ok(Loaded { weights, layers: binder.layers, lm_head })
}

/// What tensor names of the text model begin with.
pub(crate) fn prefix(config: &ModelConfig) -> &'static str {
    match config.architecture {
        Architecture::KimiK3 => "language_model.",
        Architecture::KimiLinear => "",
    }
}

/// A tensor of the trunk, as the configuration asks for it.
#[derive(Clone, Debug)]
pub(crate) struct Needed {
    pub(crate) name: String,
    /// `None` for what belongs to no layer.
    pub(crate) layer: Option<usize>,
    pub(crate) forms: Forms,
    /// Never empty; the first, where several are accepted.
    pub(crate) shape: Vec<usize>,
}

impl Needed {
    pub(crate) fn weights(&self) -> u64 {
        self.shape.iter().fold(1, |n: u64, &dim| n.saturating_mul(dim as u64))
    }
}

/// Every tensor of the trunk that a configuration asks for, embedding included.
pub(crate) fn inventory(config: &ModelConfig) -> Vec<Needed> {
    let mut binder = Binder {
        source: None,
        config,
        prefix: prefix(config),
        load: false,
        findings: Findings::default(),
        inventory: Vec::new(),
        trunk_bytes: 0,
        matrices: Vec::new(),
        layers: Vec::new(),
    };
    binder.model().expect("nothing is read, so nothing can fail");
    binder.inventory
}

struct Binder<'a> {
    /// `None`: nothing is looked up, only listed.
    source: Option<&'a dyn WeightSource>,
    config: &'a ModelConfig,
    prefix: &'static str,
    /// False: headers only, and everything bound stays empty.
    load: bool,
    findings: Findings,
    inventory: Vec<Needed>,
    trunk_bytes: u64,
    /// Matrices bound since the last layer ended.
    matrices: Vec<StoredMatrix>,
    /// Those of the layers that have ended.
    layers: Vec<Vec<StoredMatrix>>,
}

impl<'a> Binder<'a> {
    fn new(source: &'a dyn WeightSource, config: &'a ModelConfig, load: bool) -> Self {
        let (findings, inventory) = (Findings::default(), Vec::new());
        let prefix = prefix(config);
        Self {
            source: Some(source),
            config,
            prefix,
            load,
            findings,
            inventory,
            trunk_bytes: 0,
            matrices: Vec::new(),
            layers: Vec::new(),
        }
    }

    fn model(&mut self) -> Result<Weights, Error> {
        let config = self.config;
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let prefix = self.prefix;
        let residuals = config.attn_res_block_size.is_some();
        let embed_tokens = self.embedding(format!("{prefix}model.embed_tokens.weight"));
        let mut layers = Vec::new();
        for index in 0..config.layers.len() {
            layers.push(self.layer(index)?);
            self.layers.push(std::mem::take(&mut self.matrices));
        }
        self.matrix(&format!("{prefix}lm_head.weight"), vocab, hidden);
        Ok(Weights {
            embed_tokens,
            layers,
            norm: self.vector(&format!("{prefix}model.norm.weight"), hidden)?,
            output_mix: match residuals {
                true => Some(self.mix(&format!("{prefix}model.output_attn"))?),
                false => None,
            },
        })
    }

    fn layer(&mut self, index: usize) -> Result<Layer, Error> {
        let config = self.config;
        let hidden = config.hidden_size;
        let at = format!("{}model.layers.{index}.", self.prefix);
        let kind = config.layers[index];
        Ok(Layer {
            input_layernorm: self.vector(&format!("{at}input_layernorm.weight"), hidden)?,
            post_attention_layernorm: self
                .vector(&format!("{at}post_attention_layernorm.weight"), hidden)?,
            attention: match kind.attention {
                AttentionKind::Kda => {
                    Attention::Kda(Box::new(self.kda(&format!("{at}self_attn."))?))
                }
                AttentionKind::Mla => {
                    Attention::Mla(Box::new(self.mla(&format!("{at}self_attn."))?))
                }
            },
            ffn: match kind.ffn {
                FfnKind::Dense => Ffn::Dense(Box::new(
                    self.mlp(&format!("{at}mlp."), config.dense_intermediate_size)?,
                )),
                FfnKind::Moe => Ffn::Moe(Box::new(self.moe(&format!("{at}block_sparse_moe."))?)),
            },
            mixes: match config.attn_res_block_size {
                Some(_) => Some((
                    self.mix(&format!("{at}self_attention"))?,
                    self.mix(&format!("{at}mlp"))?,
                )),
                None => None,
            },
        })
    }

    fn kda(&mut self, at: &str) -> Result<Kda, Error> {
        let hidden = self.config.hidden_size;
        let kda = self.config.kda;
        let (heads, dim, p) = (kda.n_heads, kda.head_dim, kda.n_heads * kda.head_dim);
        Ok(Kda {
            qkv_proj: [
                self.matrix(&format!("{at}q_proj.weight"), p, hidden),
                self.matrix(&format!("{at}k_proj.weight"), p, hidden),
                self.matrix(&format!("{at}v_proj.weight"), p, hidden),
            ],
            qkv_conv: [
                self.conv(&format!("{at}q_conv1d.weight"))?,
                self.conv(&format!("{at}k_conv1d.weight"))?,
                self.conv(&format!("{at}v_conv1d.weight"))?,
            ],
            f_a_proj: self.matrix(&format!("{at}f_a_proj.weight"), dim, hidden),
            f_b_proj: self.matrix(&format!("{at}f_b_proj.weight"), p, dim),
            decay_rate: {
                // K3 pads to head_dim values, of which the first `heads` count.
                let padded = [dim];
                let shapes = [&padded[..], &[heads], &[1, 1, heads, 1]];
                let shapes = if dim > heads { &shapes[..] } else { &shapes[1..] };
                let a_log = self.any_vector(&format!("{at}A_log"), shapes)?;
                a_log.iter().take(heads).map(|&a| math::exp(a)).collect()
            },
            dt_bias: self.vector(&format!("{at}dt_bias"), p)?,
            b_proj: self.matrix(&format!("{at}b_proj.weight"), heads, hidden),
            gate: match kda.output_gate {
                KdaOutputGate::FullRank => {
                    Gate::FullRank(self.matrix(&format!("{at}g_proj.weight"), p, hidden))
                }
                KdaOutputGate::LowRank => Gate::LowRank(
                    self.matrix(&format!("{at}g_a_proj.weight"), dim, hidden),
                    self.matrix(&format!("{at}g_b_proj.weight"), p, dim),
                ),
            },
            o_norm: self.vector(&format!("{at}o_norm.weight"), dim)?,
            o_proj: self.matrix(&format!("{at}o_proj.weight"), hidden, p),
        })
    }

    fn mla(&mut self, at: &str) -> Result<Mla, Error> {
        let hidden = self.config.hidden_size;
        let mla = self.config.mla;
        let q_out = mla.n_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
        let kv_lora = mla.kv_lora_rank;
        let v_out = mla.n_heads * mla.v_head_dim;
        Ok(Mla {
            query: match mla.q_lora_rank {
                None => Query::Full(self.matrix(&format!("{at}q_proj.weight"), q_out, hidden)),
                Some(q_lora) => Query::Factorised {
                    a_proj: self.matrix(&format!("{at}q_a_proj.weight"), q_lora, hidden),
                    a_layernorm: self.vector(&format!("{at}q_a_layernorm.weight"), q_lora)?,
                    b_proj: self.matrix(&format!("{at}q_b_proj.weight"), q_out, q_lora),
                },
            },
            kv_a_proj_with_mqa: self.matrix(
                &format!("{at}kv_a_proj_with_mqa.weight"),
                kv_lora + mla.qk_rope_head_dim,
                hidden,
            ),
            kv_a_layernorm: self.vector(&format!("{at}kv_a_layernorm.weight"), kv_lora)?,
            kv_b_proj: self.matrix(
                &format!("{at}kv_b_proj.weight"),
                mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
                kv_lora,
            ),
            g_proj: match mla.output_gate {
                true => Some(self.matrix(&format!("{at}g_proj.weight"), v_out, hidden)),
                false => None,
            },
            o_proj: self.matrix(&format!("{at}o_proj.weight"), hidden, v_out),
        })
    }

    fn mlp(&mut self, at: &str, intermediate: usize) -> Result<Mlp, Error> {
        let hidden = self.config.hidden_size;
        Ok(Mlp {
            gate_proj: self.matrix(&format!("{at}gate_proj.weight"), intermediate, hidden),
            up_proj: self.matrix(&format!("{at}up_proj.weight"), intermediate, hidden),
            down_proj: self.matrix(&format!("{at}down_proj.weight"), hidden, intermediate),
        })
    }

    fn moe(&mut self, at: &str) -> Result<Moe, Error> {
        let hidden = self.config.hidden_size;
        let moe = self.config.moe;
        Ok(Moe {
            gate: self.matrix(&format!("{at}gate.weight"), moe.n_experts, hidden),
            e_score_correction_bias: self
                .vector(&format!("{at}gate.e_score_correction_bias"), moe.n_experts)?,
            latent: match moe.latent {
                None => None,
                Some(latent) => Some(Latent {
                    down_proj: self.matrix(
                        &format!("{at}routed_expert_down_proj.weight"),
                        latent.size,
                        hidden,
                    ),
                    norm: match latent.norm {
                        true => Some(
                            self.vector(&format!("{at}routed_expert_norm.weight"), latent.size)?,
                        ),
                        false => None,
                    },
                    up_proj: self.matrix(
                        &format!("{at}routed_expert_up_proj.weight"),
                        hidden,
                        latent.size,
                    ),
                }),
            },
            shared_experts: self.mlp(
                &format!("{at}shared_experts."),
                moe.n_shared_experts * moe.intermediate_size,
            )?,
        })
    }

    /// `{at}_res_norm` times `{at}_res_proj`.
    fn mix(&mut self, at: &str) -> Result<Mix, Error> {
        let hidden = self.config.hidden_size;
        let norm = self.vector(&format!("{at}_res_norm.weight"), hidden)?;
        let proj = self.any_vector(&format!("{at}_res_proj.weight"), &[&[1, hidden]])?;
        Ok(Mix(norm.iter().zip(&proj).map(|(n, w)| n * w).collect()))
    }

    /// (P, 1, kernel) as stored → (kernel, P).
    fn conv(&mut self, name: &str) -> Result<Vec<f32>, Error> {
        let kda = self.config.kda;
        let (channels, kernel) = (kda.n_heads * kda.head_dim, kda.conv_kernel_size);
        let taps = self.any_vector(name, &[&[channels, 1, kernel]])?;
        Ok(if self.load { transpose(&taps, channels, kernel) } else { taps })
    }

    /// Only its place is checked: rows are read when they are used.
    fn embedding(&mut self, name: String) -> String {
        let shape = [self.config.vocab_size, self.config.hidden_size];
        self.tensor(&name, Forms::Matrix, &[&shape]);
        name
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Linear {
        let linear = Linear(self.matrices.len());
        let mut codec = Codec::Bf16;
        let stored = self.tensor(name, Forms::Matrix, &[&[rows, cols]]);
        if let Some(Stored { form: Form::Codec(found), .. }) = stored {
            codec = found;
            match codec.layout(rows, cols) {
                Ok(layout) => self.trunk_bytes += (layout.codes + layout.scales) as u64,
                Err(error) => self.findings.problem(format!("{name}: {error}")),
            }
        }
        self.matrices.push(StoredMatrix { name: name.to_owned(), rows, cols, codec });
        linear
    }

    fn vector(&mut self, name: &str, n: usize) -> Result<Vec<f32>, Error> {
        self.any_vector(name, &[&[n]])
    }

    /// A small tensor of one of the shapes, as f32.
    fn any_vector(&mut self, name: &str, shapes: &[&[usize]]) -> Result<Vec<f32>, Error> {
        let Some(stored) = self.tensor(name, Forms::Vector, shapes) else {
            return Ok(Vec::new());
        };
        self.trunk_bytes += 4 * stored.shape.iter().product::<u64>();
        let Some(source) = self.source.filter(|_| self.load) else { return Ok(Vec::new()) };
        let (codes, _) = source.read(name)?;
        Ok(to_f32(stored.form, &codes).expect("vectors are plain numbers"))
    }

    fn tensor(&mut self, name: &str, forms: Forms, shapes: &[&[usize]]) -> Option<Stored> {
        let Some(source) = self.source else {
            let at = name.strip_prefix(self.prefix).and_then(|n| n.strip_prefix("model.layers."));
            self.inventory.push(Needed {
                name: name.to_owned(),
                layer: at.and_then(|at| at.split('.').next()?.parse().ok()),
                forms,
                shape: shapes[0].to_vec(),
            });
            return None;
        };
        self.findings.tensor(source, name, forms, shapes)
    }
}
