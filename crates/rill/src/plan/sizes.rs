//! What a model takes: of memory, of disk and of reads, from its headers or from its
//! configuration alone.

use rill_format::Folder;
use rill_format::container::{ALIGN, HEADER_BYTES, PART_ALIGN};
use rill_kernels::{Codec, Trellis};
use serde_json::Value;

use crate::config::{AttentionKind, ExpertFormat, FfnKind, ModelConfig};
use crate::engine::{config_of, parse_config};
use crate::error::Error;
use crate::experts::expert_shapes;
use crate::session::Session;
use crate::source::{self, Form, Forms, WeightSource};
use crate::weights::{self, Needed};

/// Reads past the page cache begin and end at multiples of this.
const BLOCK: u64 = 4096;
/// Inputs that share a scale in a container that `rill convert` writes.
const GROUP: usize = 128;
/// Hundredths of a bit that a weight takes as mxfp4z, as measured on rows of Kimi K3 (`docs/quality.md`).
const MXFP4Z_CENTIBITS: usize = 362;

/// Number format that a conversion gives to routed experts, or to the trunk's matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recode {
    /// As published.
    #[default]
    Source,
    /// Plain numbers.
    F32,
    /// Bytes with f16 scales.
    Q8,
    /// Four bits with f16 scales. In the trunk embedding, head and vision get eight.
    Q4,
    /// Of MXFP4 experts the same without loss in fewer bytes, estimated; everything else is as published.
    Mxfp4z,
    /// Windows into a stream of bits: of MXFP4 experts the native profile, of everything else the rotated
    /// one. In the trunk embedding, head, vision and `kv_b_proj` get eight bits. What cannot be is as published.
    Trellis {
        /// Bits per 8 weights.
        rate: usize,
        /// Bits of a window that count.
        width: usize,
    },
}

/// What a model takes, in bytes. Nothing here depends on the machine or the budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Matrices of each layer's trunk, as read in whole blocks and as held: (layers).
    pub layer_bytes: Vec<u64>,
    /// Norms, convolutions, biases and decay rates of the whole trunk, as f32. Always held.
    pub vector_bytes: u64,
    /// The head, (vocab, hidden), as read in whole blocks and as held.
    pub head_bytes: u64,
    /// One row of it.
    pub head_row_bytes: u64,
    /// One routed expert, as read in whole blocks and as held in a slot; the largest, where they differ.
    pub record_bytes: u64,
    /// One on average.
    pub mean_record_bytes: u64,
    /// Whether these two are estimated, and with them what is on disk.
    pub estimated: bool,
    /// Layers with routed experts.
    pub moe_layers: usize,
    /// Routed experts of such a layer.
    pub n_experts: usize,
    /// Routed experts that a token uses in such a layer.
    pub top_k: usize,
    /// Recurrent state of one session and the copy it can go back to.
    pub session_bytes: u64,
    /// Cached values of one position of a session, all layers together.
    pub cache_values_per_token: u64,
    /// Activations of one token of a prompt's piece.
    pub scratch_bytes_per_token: u64,
    /// Logits of one position.
    pub logits_bytes: u64,
    /// What is kept to find tensors and experts by name.
    pub index_bytes: u64,
    /// All of the model's files.
    pub disk_bytes: u64,
    /// Longest context the model was made for, in tokens.
    pub max_context: usize,
}

/// What a source's way of storing things takes.
#[derive(Clone, Debug)]
pub(crate) struct Footprint {
    /// One routed expert, read in whole blocks; the largest.
    pub(crate) record_bytes: u64,
    /// One on average.
    pub(crate) mean_record_bytes: u64,
    /// Each layer's trunk where one read brings it; empty where tensors are read one by one.
    pub(crate) run_bytes: Vec<u64>,
    /// What is kept to find tensors and experts.
    pub(crate) index_bytes: u64,
    /// All files with weights.
    pub(crate) disk_bytes: u64,
}

/// Bytes that reading `bytes` from anywhere in a file takes, in whole blocks: up to one block
/// more than would hold them.
pub(crate) fn widened(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK).saturating_add(BLOCK)
}

impl Sizes {
    /// Of the model in a folder, a published checkpoint or a container, from headers alone.
    ///
    /// # Errors
    /// When it cannot be opened, or its headers do not fit its configuration.
    pub fn of_folder(folder: Folder) -> Result<Self, Error> {
        let source = source::open(folder)?;
        let config = config_of(&*source)?;
        weights::check(&*source, &config)?;
        Ok(Self::of_source(&*source, &config))
    }

    /// Of a source whose headers were checked.
    pub(crate) fn of_source(source: &dyn WeightSource, config: &ModelConfig) -> Self {
        let footprint = source.footprint(config);
        let form = |needed: &Needed| source.find(&needed.name).map(|stored| stored.form);
        let mut sizes = Self::new(config, &footprint, form);
        let head = format!("{}lm_head.weight", weights::prefix(config));
        if source.extents(&head).is_none() {
            // It cannot be read in pieces, so the ring has to hold all of it.
            sizes.head_row_bytes = sizes.head_bytes;
        }
        sizes
    }

    /// Of the `.rill` container that a conversion with these formats makes of a model with this
    /// `config.json`; `file` names it in messages. Small files are not counted, and small tensors
    /// as if all were stored as f32.
    ///
    /// # Errors
    /// When the configuration is not that of a model that can be run.
    pub fn of_config(
        config_json: &[u8],
        file: String,
        experts: Recode,
        trunk: Recode,
    ) -> Result<Self, Error> {
        let config = parse_config(config_json, file)?;
        let inventory = weights::inventory(&config);
        let form = |needed: &Needed| Some(Form::Codec(trunk_codec(needed, trunk)));
        let record_bytes = record_bytes(&config, experts);
        // A layer's run: each part begins at a multiple of 64, the run ends at one of 16 KiB.
        let mut run_bytes = vec![0u64; config.layers.len()];
        let mut globals = 0u64;
        for needed in &inventory {
            let (codes, scales) = matrix_bytes(needed, form(needed))
                .unwrap_or((needed.weights().saturating_mul(4), 0));
            let run = needed.layer.and_then(|layer| run_bytes.get_mut(layer));
            let run = run.unwrap_or(&mut globals);
            for part in [codes, scales] {
                *run = run.saturating_add(part.next_multiple_of(PART_ALIGN as u64));
            }
        }
        for run in &mut run_bytes {
            *run = run.next_multiple_of(ALIGN as u64);
        }
        let vision = vision_weights(config_json).unwrap_or(0);
        let vision_bytes = match trunk {
            Recode::Source | Recode::Mxfp4z => vision.saturating_mul(2),
            Recode::F32 => vision.saturating_mul(4),
            // Eight bits and a scale of sixteen for every 128.
            Recode::Q8 | Recode::Q4 | Recode::Trellis { .. } => vision.saturating_add(vision / 64),
        };
        let moe_layers = config.layer_counts()[3] as u64;
        let n_records = moe_layers * config.moe.n_experts as u64;
        let disk_bytes = run_bytes.iter().fold(0u64, |sum, run| sum.saturating_add(*run));
        let footprint = Footprint {
            record_bytes,
            mean_record_bytes: record_bytes,
            index_bytes: 0,
            disk_bytes: [globals, vision_bytes, n_records.saturating_mul(record_bytes)]
                .into_iter()
                .fold(disk_bytes, u64::saturating_add),
            run_bytes,
        };
        let is_mxfp4 = config.moe.expert_format == ExpertFormat::Mxfp4;
        let estimated = experts == Recode::Mxfp4z && is_mxfp4;
        Ok(Self { estimated, ..Self::new(&config, &footprint, form) })
    }

    fn new(
        config: &ModelConfig,
        footprint: &Footprint,
        form: impl Fn(&Needed) -> Option<Form>,
    ) -> Self {
        let mut layer_bytes = vec![0u64; config.layers.len()];
        let (mut vector_bytes, mut head_bytes, mut head_row_bytes) = (0u64, 0, 0);
        for needed in &weights::inventory(config) {
            // Codes and scales may be two reads.
            let parts = matrix_bytes(needed, form(needed)).unwrap_or_default();
            let [codes, scales] = [parts.0, parts.1].map(|n| if n > 0 { widened(n) } else { 0 });
            match (needed.forms, needed.layer) {
                (Forms::Matrix, Some(layer)) => {
                    let layer = &mut layer_bytes[layer];
                    *layer = layer.saturating_add(codes).saturating_add(scales);
                }
                (Forms::Matrix, None) if needed.name.ends_with("lm_head.weight") => {
                    head_bytes = codes.saturating_add(scales);
                    head_row_bytes = parts.0.saturating_add(parts.1) / config.vocab_size as u64;
                }
                // The embedding: its rows are read when they are used.
                (Forms::Matrix, None) => {}
                _ => vector_bytes = vector_bytes.saturating_add(4 * needed.weights()),
            }
        }
        if !footprint.run_bytes.is_empty() {
            layer_bytes.clone_from(&footprint.run_bytes);
        }
        let [_, mla_layers, _, moe_layers] = config.layer_counts();
        let width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim;
        Self {
            layer_bytes,
            vector_bytes,
            head_bytes,
            head_row_bytes,
            record_bytes: footprint.record_bytes,
            mean_record_bytes: footprint.mean_record_bytes,
            estimated: false,
            moe_layers,
            n_experts: config.moe.n_experts,
            top_k: config.moe.top_k,
            session_bytes: Session::recurrent_bytes(config),
            cache_values_per_token: (mla_layers * width) as u64,
            scratch_bytes_per_token: scratch_bytes_per_token(config),
            logits_bytes: 4 * config.vocab_size as u64,
            index_bytes: footprint.index_bytes,
            disk_bytes: footprint.disk_bytes,
            max_context: config.max_position_embeddings,
        }
    }

    /// Routed experts in all.
    pub fn n_records(&self) -> u64 {
        self.moe_layers as u64 * self.n_experts as u64
    }

    /// Bytes of the routed experts of one token.
    pub fn working_set_bytes(&self) -> u64 {
        (self.moe_layers as u64 * self.top_k as u64).saturating_mul(self.mean_record_bytes)
    }
}

/// Weights that one token is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenWeights {
    /// Of the routed experts it uses.
    pub experts: u64,
    /// Of the layers' other matrices.
    pub trunk: u64,
    /// Of the head.
    pub head: u64,
}

impl ModelConfig {
    /// How much one token has to be multiplied with.
    pub fn token_weights(&self) -> TokenWeights {
        let expert: u64 = expert_shapes(self).iter().map(|&(r, c)| r as u64 * c as u64).sum();
        let uses = (self.layer_counts()[3] * self.moe.top_k) as u64;
        let mut weights = TokenWeights { experts: uses * expert, trunk: 0, head: 0 };
        for needed in weights::inventory(self) {
            match (needed.forms, needed.layer) {
                (Forms::Matrix, Some(_)) => weights.trunk += needed.weights(),
                (Forms::Matrix, None) if needed.name.ends_with("lm_head.weight") => {
                    weights.head = needed.weights();
                }
                _ => {}
            }
        }
        weights
    }
}

/// One expert of a published checkpoint: each of its tensors is read in blocks of its own.
pub(crate) fn checkpoint_record_bytes(config: &ModelConfig) -> u64 {
    let bytes = expert_shapes(config).map(|(rows, cols)| {
        let weights = rows as u64 * cols as u64;
        match config.moe.expert_format {
            ExpertFormat::Bf16 => widened(2 * weights),
            ExpertFormat::Mxfp4 => widened(weights / 2) + widened(weights / 32),
        }
    });
    bytes.into_iter().sum()
}

/// One record of a `.rill` container.
fn record_bytes(config: &ModelConfig, experts: Recode) -> u64 {
    let published = match config.moe.expert_format {
        ExpertFormat::Bf16 => Codec::Bf16,
        ExpertFormat::Mxfp4 => Codec::Mxfp4,
    };
    let codec = recoded(experts, published);
    let layouts = expert_shapes(config).map(|(rows, cols)| match codec {
        Codec::Mxfp4z => (rows.saturating_mul(cols) / 800 * MXFP4Z_CENTIBITS, 0),
        _ => codec.layout(rows, cols).map_or((0, 0), |l| (l.codes, l.scales)),
    });
    // All codes, then all scales.
    let parts = layouts.iter().map(|l| l.0).chain(layouts.iter().map(|l| l.1));
    let end = parts.filter(|&bytes| bytes > 0).fold(HEADER_BYTES as u64, |end, bytes| {
        end.next_multiple_of(PART_ALIGN as u64).saturating_add(bytes as u64)
    });
    end.next_multiple_of(ALIGN as u64)
}

fn recoded(recode: Recode, published: Codec) -> Codec {
    match recode {
        Recode::Source => published,
        Recode::F32 => Codec::F32,
        Recode::Q8 => Codec::Q8 { group: GROUP },
        Recode::Q4 => Codec::Q4 { group: GROUP },
        Recode::Mxfp4z if published == Codec::Mxfp4 => Codec::Mxfp4z,
        Recode::Mxfp4z => published,
        Recode::Trellis { rate, width } => {
            let profile = if published == Codec::Mxfp4 { Trellis::new } else { Trellis::rotated };
            profile(rate, width).map_or(published, Codec::Trellis)
        }
    }
}

/// What `rill convert` makes of a matrix of the trunk; `place.rs` there has the table.
fn trunk_codec(needed: &Needed, trunk: Recode) -> Codec {
    let is_end =
        |name: &str| ["embed_tokens.weight", "lm_head.weight"].iter().any(|e| name.ends_with(e));
    let small = needed.shape[0] < 2 || needed.shape.last().is_none_or(|&cols| cols < 16);
    match needed.name.as_str() {
        name if small || name.ends_with("block_sparse_moe.gate.weight") => Codec::Bf16,
        name if is_end(name) && trunk == Recode::Q4 => Codec::Q8 { group: GROUP },
        name if matches!(trunk, Recode::Trellis { .. })
            && (is_end(name)
                || name.ends_with("kv_b_proj.weight")
                || needed.shape.last().is_none_or(|&cols| !cols.is_multiple_of(32))) =>
        {
            Codec::Q8 { group: GROUP }
        }
        _ => recoded(trunk, Codec::Bf16),
    }
}

/// Codes and scales of a matrix; `None` for what is no matrix. A format that the shape cannot
/// have was refused when the headers were checked.
fn matrix_bytes(needed: &Needed, form: Option<Form>) -> Option<(u64, u64)> {
    let (Forms::Matrix, Some(Form::Codec(codec))) = (needed.forms, form) else { return None };
    let layout = codec.layout(needed.shape[0], *needed.shape.last()?).ok()?;
    Some((layout.codes as u64, layout.scales as u64))
}

/// The most f32 values that are alive at once for each token that passes a layer, times four.
/// Every product is counted twice: it is computed by rows and then transposed.
fn scratch_bytes_per_token(config: &ModelConfig) -> u64 {
    let hidden = config.hidden_size as u64;
    let layers = config.layers.len() as u64;
    let blocks = config.attn_res_block_size.map_or(0, |size| layers.div_ceil(size as u64));
    // The running sum, what a layer reads, its norm and its output, and the sums set aside.
    let stream = hidden * (5 + blocks);
    let kda = {
        let (heads, dim) = (config.kda.n_heads as u64, config.kda.head_dim as u64);
        // q, k, v, decay, gate, mixed heads, joined heads; one of them being transposed.
        8 * heads * dim + 2 * dim + 2 * heads
    };
    let mla = {
        let mla = &config.mla;
        let heads = mla.n_heads as u64;
        let q = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) as u64;
        let row = (mla.kv_lora_rank + mla.qk_rope_head_dim) as u64;
        let low = mla.q_lora_rank.unwrap_or(0) as u64;
        let v = heads * mla.v_head_dim as u64;
        // Around attention, and during it: every head's absorbed query and mean latent.
        let attending = q + v + heads * (row + mla.kv_lora_rank as u64);
        attending.max(2 * (q + low + row) + 4 * v)
    };
    let dense = 4 * config.dense_intermediate_size as u64;
    let moe = {
        let moe = &config.moe;
        let width = moe.latent.map_or(hidden, |latent| latent.size as u64);
        let inner = moe.intermediate_size as u64;
        // Scores twice, latents, one result per expert chosen, and one expert that every token
        // chose; the shared experts run after those.
        let routed = (moe.top_k as u64 + 6) * width + 4 * inner;
        2 * moe.n_experts as u64 + routed.max(2 * width + 4 * moe.n_shared_experts as u64 * inner)
    };
    let has_kda = config.layers.iter().any(|layer| layer.attention == AttentionKind::Kda);
    let has_dense = config.layers.iter().any(|layer| layer.ffn == FfnKind::Dense);
    let parts = [if has_kda { kda } else { 0 }, mla, if has_dense { dense } else { 0 }, moe];
    4 * (stream + parts.into_iter().max().unwrap_or(0))
}

/// Weights of the vision tower, which lies in the container but is not loaded; `None` when there
/// is none, or its section cannot be understood.
fn vision_weights(config_json: &[u8]) -> Option<u64> {
    let root: Value = serde_json::from_slice(config_json).ok()?;
    let vision = root.get("vision_config")?;
    let get = |key: &str| vision[key].as_u64().filter(|n| *n <= 1 << 13);
    let (dim, inter) = (get("vt_hidden_size")?, get("vt_intermediate_size")?);
    let (qkv, patch) = (get("qkv_hidden_size")?, get("patch_size")?);
    let (rows, columns) = (get("init_pos_emb_height")?, get("init_pos_emb_width")?);
    let merge = vision["merge_kernel_size"].as_array()?.iter().filter_map(Value::as_u64);
    let wide = merge.fold(1, |n: u64, m| n.saturating_mul(m)).min(256) * dim;
    let block = 4 * qkv * dim + 2 * inter * dim;
    Some(
        3 * patch * patch * dim
            + rows * columns * dim
            + get("vt_num_hidden_layers")? * block
            + wide * wide
            + get("text_hidden_size")? * wide,
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rill_stream::{Extent, Placement};

    use super::widened;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn parts_that_lie_anywhere_never_take_more_than_is_counted(
            parts in prop::collection::vec((0u32..3, 0u64..100_000, 1u64..20_000), 1..8)
        ) {
            let extents = parts.iter().map(|&(file, offset, bytes)| Extent { file, offset, bytes });
            let extents: Vec<Extent> = extents.collect();
            let counted: u64 = extents.iter().map(|extent| widened(extent.bytes)).sum();
            prop_assert!(Placement::new(&extents).bytes as u64 <= counted);
        }
    }
}
