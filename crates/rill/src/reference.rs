//! Comparing an engine with values that an independent implementation computed.

use std::ops::ControlFlow;

use safetensors::{Dtype, SafeTensors};

use crate::engine::Engine;
use crate::error::Error;
use crate::experts::LayerIdx;
use crate::step::{Logits, Observer};

/// Expected values for one sequence of tokens, from a safetensors file.
#[derive(Clone, Debug)]
pub struct Reference {
    /// (tokens)
    pub input_ids: Vec<u32>,
    /// (tokens, vocab)
    pub logits: Vec<f32>,
    /// (layers, tokens, hidden)
    pub hidden_after_layer: Vec<f32>,
    /// Whether the last of `hidden_after_layer` is after the final norm, as transformers
    /// returns it.
    pub last_is_normed: bool,
    /// (mixture layers, tokens, top_k), if the file has them.
    pub expert_ids: Option<Vec<u32>>,
    /// Same shape as `expert_ids`.
    pub expert_weights: Option<Vec<f32>>,
    /// (KDA layers, heads, head_dim, head_dim) after the last token, if the file has it.
    pub kda_state_final: Option<Vec<f32>>,
}

/// A reference file could not be understood.
#[derive(Debug, thiserror::Error)]
#[error("the reference values are unusable: {0}")]
pub struct ReferenceError(String);

impl Reference {
    /// Reads a reference file.
    pub fn parse(bytes: &[u8]) -> Result<Self, ReferenceError> {
        let file = SafeTensors::deserialize(bytes).map_err(|e| ReferenceError(e.to_string()))?;
        let has = |name: &str| file.tensor(name).is_ok();
        let (_, header) =
            SafeTensors::read_metadata(bytes).map_err(|e| ReferenceError(e.to_string()))?;
        let source = header.metadata().as_ref().and_then(|m| m.get("source"));
        Ok(Self {
            input_ids: ids(&file, "input_ids")?,
            logits: floats(&file, "logits")?,
            hidden_after_layer: floats(&file, "hidden_after_layer")?,
            last_is_normed: source.is_some_and(|s| s.starts_with("transformers")),
            expert_ids: has("expert_ids").then(|| ids(&file, "expert_ids")).transpose()?,
            expert_weights: has("expert_weights")
                .then(|| floats(&file, "expert_weights"))
                .transpose()?,
            kda_state_final: has("kda_state_final")
                .then(|| floats(&file, "kda_state_final"))
                .transpose()?,
        })
    }
}

/// Relative errors ‖got − expected‖ / ‖expected‖ over many vectors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Errors {
    /// Half of them are at most this.
    pub median: f64,
    /// None is above this; NaN if any value was.
    pub worst: f64,
}

/// How far an engine is from a [`Reference`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Over positions.
    pub logits: Errors,
    /// Over layers and positions.
    pub hidden: Errors,
    /// Positions whose most likely token differs.
    pub arg_max_differences: usize,
    /// (layer, position) pairs whose set of experts differs, and how many were compared.
    pub routing_differences: (usize, usize),
    /// Largest difference of a chosen expert's weight, where the sets agree.
    pub worst_expert_weight: f64,
    /// Over the heads of the final KDA states, if the reference has them.
    pub kda_state: Option<Errors>,
}

/// How the engine is led through the reference's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// Each layer gets what the engine computed.
    Free,
    /// Each layer gets the reference's input, so that errors do not add up.
    ExpectedInputs,
}

/// Runs the reference's tokens through an engine and measures the differences.
///
/// # Errors
/// When the reference's sizes are not the model's, or the engine fails.
pub fn compare(
    engine: &Engine,
    reference: &Reference,
    feed: Feed,
) -> Result<Comparison, CompareError> {
    let config = engine.config();
    let (n, hidden) = (reference.input_ids.len(), config.hidden_size);
    let [n_kda, _, _, n_moe] = config.layer_counts();
    let top_k = config.moe.top_k;
    let head = config.kda.head_dim * config.kda.head_dim;
    let sizes = [
        ("logits", Some(reference.logits.len()), n * config.vocab_size),
        (
            "hidden_after_layer",
            Some(reference.hidden_after_layer.len()),
            config.layers.len() * n * hidden,
        ),
        ("expert_ids", reference.expert_ids.as_ref().map(Vec::len), n_moe * n * top_k),
        ("expert_weights", reference.expert_weights.as_ref().map(Vec::len), n_moe * n * top_k),
        (
            "kda_state_final",
            reference.kda_state_final.as_ref().map(Vec::len),
            n_kda * config.kda.n_heads * head,
        ),
    ];
    for (tensor, found, expected) in sizes {
        if found.is_some_and(|found| found != expected) {
            let found = found.unwrap_or_default();
            let message = format!("{tensor} has {found} values, this model takes {expected}");
            return Err(CompareError::Reference(ReferenceError(message)));
        }
    }

    let mut session = engine.new_session();
    let n_layers = config.layers.len();
    let mut recorder = Recorder {
        reference,
        feed,
        hidden_size: hidden,
        hidden: vec![Vec::new(); n_layers],
        experts: vec![(Vec::new(), Vec::new()); n_layers],
    };
    let logits =
        engine.forward_observed(&mut session, &reference.input_ids, Logits::All, &mut recorder)?;
    let mut comparison = Comparison {
        logits: errors(&logits, &reference.logits, config.vocab_size),
        hidden: errors(&recorder.hidden.concat(), &reference.hidden_after_layer, hidden),
        arg_max_differences: logits
            .chunks_exact(config.vocab_size)
            .zip(reference.logits.chunks_exact(config.vocab_size))
            .filter(|(got, expected)| arg_max(got) != arg_max(expected))
            .count(),
        routing_differences: (0, 0),
        worst_expert_weight: 0.0,
        kda_state: reference.kda_state_final.as_ref().map(|expected| {
            let states = (0..n_layers).filter_map(|layer| session.kda_state(layer));
            errors(&states.flatten().copied().collect::<Vec<_>>(), expected, head)
        }),
    };
    if let (Some(ids), Some(weights)) = (&reference.expert_ids, &reference.expert_weights) {
        compare_routing(&mut comparison, &recorder, ids, weights, top_k);
    }
    Ok(comparison)
}

/// Why a comparison could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompareError {
    /// The reference is for another model.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] Error),
}

/// Keeps what the engine computed at every layer.
struct Recorder<'a> {
    reference: &'a Reference,
    feed: Feed,
    hidden_size: usize,
    /// Per layer, (tokens so far, hidden).
    hidden: Vec<Vec<f32>>,
    /// Per layer, ids and weights, (tokens so far, top_k).
    experts: Vec<(Vec<u32>, Vec<f32>)>,
}

impl Observer for Recorder<'_> {
    fn after_layer(&mut self, layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        let seen = self.hidden[layer.0].len();
        self.hidden[layer.0].extend_from_slice(hidden);
        if self.feed == Feed::ExpectedInputs {
            let per_layer = self.reference.input_ids.len() * self.hidden_size;
            let expected = &self.reference.hidden_after_layer[layer.0 * per_layer + seen..];
            hidden.copy_from_slice(&expected[..hidden.len()]);
        }
        ControlFlow::Continue(())
    }

    fn normed(&mut self, hidden: &[f32]) {
        let Some(last) = self.hidden.last_mut().filter(|_| self.reference.last_is_normed) else {
            return;
        };
        // Takes the place of what `after_layer` kept for these positions.
        let seen = last.len() - hidden.len();
        last[seen..].copy_from_slice(hidden);
    }

    fn routed(&mut self, layer: LayerIdx, ids: &[u32], weights: &[f32]) {
        self.experts[layer.0].0.extend_from_slice(ids);
        self.experts[layer.0].1.extend_from_slice(weights);
    }
}

fn compare_routing(
    comparison: &mut Comparison,
    recorder: &Recorder<'_>,
    expected_ids: &[u32],
    expected_weights: &[f32],
    top_k: usize,
) {
    let routed: Vec<_> = recorder.experts.iter().filter(|(ids, _)| !ids.is_empty()).collect();
    let got_ids: Vec<u32> = routed.iter().flat_map(|(ids, _)| ids).copied().collect();
    let got_weights: Vec<f32> = routed.iter().flat_map(|(_, w)| w).copied().collect();
    // A set: the reference lists experts in an order of its own.
    let sorted = |ids: &[u32], weights: &[f32]| {
        let mut pairs: Vec<(u32, f32)> = ids.iter().copied().zip(weights.iter().copied()).collect();
        pairs.sort_by_key(|pair| pair.0);
        pairs
    };
    for start in (0..expected_ids.len()).step_by(top_k) {
        let at = start..start + top_k;
        let expected = sorted(&expected_ids[at.clone()], &expected_weights[at.clone()]);
        let got = match got_ids.get(at.clone()) {
            Some(ids) => sorted(ids, &got_weights[at]),
            None => Vec::new(),
        };
        comparison.routing_differences.1 += 1;
        if got.iter().map(|p| p.0).eq(expected.iter().map(|p| p.0)) {
            for (got, expected) in got.iter().zip(&expected) {
                let difference = f64::from(got.1 - expected.1).abs();
                comparison.worst_expert_weight = comparison.worst_expert_weight.max(difference);
            }
        } else {
            comparison.routing_differences.0 += 1;
        }
    }
}

/// Relative error of every vector of `width` values.
fn errors(got: &[f32], expected: &[f32], width: usize) -> Errors {
    let relative = |(got, expected): (&[f32], &[f32])| {
        let difference = |(&a, &b): (&f32, &f32)| (f64::from(a) - f64::from(b)).powi(2);
        let distance: f64 = got.iter().zip(expected).map(difference).sum();
        let size: f64 = expected.iter().map(|&x| f64::from(x).powi(2)).sum();
        (distance / size).sqrt()
    };
    let pairs = got.chunks_exact(width).zip(expected.chunks_exact(width));
    let mut all: Vec<f64> = pairs.map(relative).collect();
    // NaN sorts last, so that it shows as the worst.
    all.sort_by(f64::total_cmp);
    let worst = all.iter().copied().find(|e| e.is_nan()).or(all.last().copied());
    Errors {
        median: all.get(all.len() / 2).copied().unwrap_or(f64::NAN),
        worst: if got.len() == expected.len() { worst.unwrap_or(f64::NAN) } else { f64::NAN },
    }
}

fn arg_max(x: &[f32]) -> usize {
    (1..x.len()).fold(0, |best, i| if x[i] > x[best] { i } else { best })
}

fn bytes<'a>(
    file: &'a SafeTensors<'_>,
    name: &str,
    dtype: Dtype,
) -> Result<&'a [u8], ReferenceError> {
    let tensor = file.tensor(name).map_err(|e| ReferenceError(format!("{name}: {e}")))?;
    if tensor.dtype() != dtype {
        let found = tensor.dtype();
        return Err(ReferenceError(format!("{name} is {found:?}, expected {dtype:?}")));
    }
    Ok(tensor.data())
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>, ReferenceError> {
    let bytes = bytes(file, name, Dtype::F32)?.chunks_exact(4);
    Ok(bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn ids(file: &SafeTensors<'_>, name: &str) -> Result<Vec<u32>, ReferenceError> {
    let bytes = bytes(file, name, Dtype::I32)?.chunks_exact(4);
    Ok(bytes.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}
