//! The binder: which tensors a configuration asks for, decided from headers alone.
//!
//! The published models are bound at their real names and shapes. What is refused is shown on the
//! small ones, whose lists of tensors are generated from their configurations: every kind of
//! tensor is taken away, reshaped and retyped in turn.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use common::repository;
use rill::config::ModelConfig;
use rill::{Checkpoint, Engine, Error, Folder, ModelSummary};
use rill_testkit::{Dtype, Tensor, tensors, write_header_only};
use serde_json::{Value, json};

const K3: &str = "fixtures/k3-tiny/config.json";
const LINEAR: &str = "fixtures/kimi-linear-tiny/config.json";

/// A configuration and a list of tensors that may or may not fit it.
#[derive(Clone)]
struct Model {
    config: Value,
    tensors: Vec<Tensor>,
    /// Stored as F16, which generated lists never do.
    f16: Option<String>,
}

/// What was wrong, and where each tensor was.
struct Refusal {
    problems: Vec<String>,
    message: String,
    index: Value,
}

impl Model {
    /// The configuration and its own tensors.
    fn of(config: &str) -> Self {
        let bytes = fs::read(repository(config)).unwrap();
        Self::from_config(serde_json::from_slice(&bytes).unwrap())
    }

    fn from_config(config: Value) -> Self {
        Self { tensors: tensors(&config), config, f16: None }
    }

    /// The part of the configuration that describes the text model.
    fn text_config(&mut self) -> &mut Value {
        match self.config.get("text_config") {
            Some(_) => &mut self.config["text_config"],
            None => &mut self.config,
        }
    }

    fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).expect(name)
    }

    fn without(mut self, names: &[&str]) -> Self {
        let before = self.tensors.len();
        self.tensors.retain(|t| !names.contains(&t.name.as_str()));
        assert_eq!(before - self.tensors.len(), names.len(), "{names:?}");
        self
    }

    fn reshaped(mut self, name: &str, shape: &[u64]) -> Self {
        self.tensor(name).shape = shape.to_vec();
        self
    }

    fn retyped(mut self, name: &str, dtype: Dtype) -> Self {
        self.tensor(name).dtype = dtype;
        self
    }

    /// One tensor of each kind that the text model uses: the first of its name, layer and expert
    /// numbers aside, and shape (both kinds of attention have an `o_proj`).
    fn kinds(&self) -> Vec<Tensor> {
        let is_number = |part: &&str| part.bytes().all(|b| b.is_ascii_digit());
        let mut seen = BTreeSet::new();
        let mut kinds = text_model(&self.tensors).cloned().collect::<Vec<_>>();
        kinds.retain(|t| {
            let parts = t.name.split('.').filter(|part| !is_number(part));
            seen.insert((parts.collect::<Vec<_>>().join("."), t.shape.clone()))
        });
        kinds
    }

    fn write(&self, dir: &Path, n_shards: usize) {
        write_header_only(dir, &self.tensors, n_shards).unwrap();
        let Some(name) = &self.f16 else { return };
        let header = |dtype: &str| format!("\"{name}\":{{\"dtype\":\"{dtype}");
        let (bf16, f16) = (header("BF16\""), header("F16\" "));
        let mut edited = 0;
        for shard in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
            let mut bytes = fs::read(&shard).unwrap();
            if let Some(at) = bytes.windows(bf16.len()).position(|w| w == bf16.as_bytes()) {
                bytes[at..][..f16.len()].copy_from_slice(f16.as_bytes());
                fs::write(&shard, bytes).unwrap();
                edited += 1;
            }
        }
        assert_eq!(edited, 1, "{name}");
    }

    fn bind(&self, n_shards: usize) -> (Result<ModelSummary, Error>, Value) {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path(), n_shards);
        let index = fs::read(dir.path().join("model.safetensors.index.json")).unwrap();
        let config = ModelConfig::from_json(self.config.to_string().as_bytes()).unwrap();
        let checkpoint = Checkpoint::open(Folder::Disk(dir.path().to_owned())).unwrap();
        let result = Engine::check(&checkpoint, &config);
        (result, serde_json::from_slice(&index).unwrap())
    }

    fn accepted(&self, n_shards: usize) -> ModelSummary {
        self.bind(n_shards).0.unwrap_or_else(|e| panic!("{e}"))
    }

    fn refused(&self) -> Refusal {
        let (result, mut index) = self.bind(2);
        let Err(error) = result else { panic!("the tensors were accepted") };
        let message = error.to_string();
        let Error::Binding { problems, .. } = error else { panic!("{message}") };
        Refusal { problems, message, index: index["weight_map"].take() }
    }
}

impl Refusal {
    /// Demands this problem and no other, with the tensor's shard filled in for `@`.
    fn only(&self, tensor: &str, problem: &str) {
        let shard = self.index[tensor].as_str().unwrap_or_default();
        assert_eq!(self.problems, [problem.replace('@', shard)]);
        assert!(self.message.contains(&self.problems[0]), "{}", self.message);
    }
}

fn text_model(tensors: &[Tensor]) -> impl Iterator<Item = &Tensor> {
    let vision =
        |t: &&Tensor| t.name.starts_with("vision_tower.") || t.name.starts_with("mm_projector.");
    tensors.iter().filter(move |t| !vision(t))
}

/// Bytes of everything that is neither a routed expert nor the embedding: matrices as stored,
/// everything else as f32.
fn trunk_bytes(tensors: &[Tensor]) -> u64 {
    let bytes = |t: &Tensor| {
        let is_matrix = t.shape.len() == 2 && t.shape[0] > 1;
        if is_matrix { t.bytes() } else { 4 * t.shape.iter().product::<u64>() }
    };
    text_model(tensors)
        .filter(|t| !t.name.contains(".experts.") && !t.name.contains("embed_tokens"))
        .map(bytes)
        .sum()
}

/// Not on Windows, where growing a file reserves its disk space.
#[cfg(not(windows))]
#[test]
fn kimi_k3_binds_whole_at_its_real_shapes() {
    let model = Model::of("fixtures/configs/kimi-k3.json");
    assert_eq!(model.tensors, rill_testkit::kimi_k3_tensors());
    let summary = model.accepted(96);
    assert_eq!(summary.bound_tensors, 497_220 - 168);
    assert_eq!(summary.bound_tensors, text_model(&model.tensors).count());
    assert_eq!(summary.trunk_bytes, trunk_bytes(&model.tensors));
    // 56.74 billion parameters with the embedding, nearly all of them bf16.
    let published = summary.trunk_bytes + 2 * 163_840 * 7168;
    assert!((113.4e9..113.6e9).contains(&(published as f64)), "{summary:?}");
}

#[cfg(not(windows))]
#[test]
fn kimi_linear_binds_whole_at_its_real_shapes() {
    let model = Model::of("fixtures/configs/kimi-linear-48b.json");
    assert_eq!(model.tensors, rill_testkit::kimi_linear_tensors());
    let summary = model.accepted(20);
    assert_eq!(summary.bound_tensors, model.tensors.len());
    assert_eq!(summary.trunk_bytes, trunk_bytes(&model.tensors));
}

#[test]
fn small_checkpoints_bind_whole() {
    for path in [K3, LINEAR, "models/k3-nano/config.json"] {
        let model = Model::of(path);
        let summary = model.accepted(1);
        assert_eq!(summary.bound_tensors, text_model(&model.tensors).count(), "{path}");
        assert_eq!(summary.trunk_bytes, trunk_bytes(&model.tensors), "{path}");
    }
}

#[test]
fn each_kind_of_tensor_is_missed_by_name() {
    for (path, n_kinds) in [(K3, 50), (LINEAR, 36)] {
        let model = Model::of(path);
        let kinds = model.kinds();
        assert_eq!(kinds.len(), n_kinds, "{path}");
        for Tensor { name, .. } in kinds {
            let refusal = model.clone().without(&[&name]).refused();
            refusal.only(&name, &format!("{name}: missing"));
        }
    }
}

#[test]
fn each_kind_of_tensor_is_refused_in_another_shape() {
    for path in [K3, LINEAR] {
        let model = Model::of(path);
        for Tensor { name, shape, .. } in model.kinds() {
            let transposed: Vec<u64> = shape.iter().rev().copied().collect();
            let mut shorter = shape.clone();
            *shorter.iter_mut().find(|dim| **dim > 1).unwrap() -= 1;
            let longer = [&shape[..], &[1]].concat();
            for found in [transposed, shorter, longer] {
                if found == shape {
                    continue; // a square matrix, or a vector
                }
                let expected = match name.rsplit_once('.') {
                    // Both releases' forms are read of either.
                    Some((_, "A_log")) => "[32] or [3] or [1, 1, 3, 1]".to_owned(),
                    _ => format!("{shape:?}"),
                };
                let refusal = model.clone().reshaped(&name, &found).refused();
                let problem = format!("{name} in @: has shape {found:?}, expected {expected}");
                refusal.only(&name, &problem);
            }
        }
    }
}

#[test]
fn each_kind_of_tensor_is_refused_in_another_type() {
    for path in [K3, LINEAR] {
        let model = Model::of(path);
        for Tensor { name, dtype, shape } in model.kinds() {
            let is_expert = name.contains(".experts.");
            let is_matrix = shape.len() == 2 && shape[0] > 1;
            let expected = match (is_expert, dtype) {
                (true, Dtype::U8) => "U8",
                (true, _) => "BF16",
                (false, _) if is_matrix => "BF16 or F32",
                (false, _) => "BF16 or F32 or F16",
            };
            let problem = |found| format!("{name} in @: stored as {found}, expected {expected}");
            for wrong in [Dtype::Bf16, Dtype::F32, Dtype::U8] {
                if expected.split(" or ").any(|right| right == wrong.name()) {
                    continue;
                }
                let refusal = model.clone().retyped(&name, wrong).refused();
                refusal.only(&name, &problem(wrong.name()));
            }
            if is_matrix && dtype == Dtype::Bf16 {
                let f16 = Model { f16: Some(name.clone()), ..model.clone() };
                f16.refused().only(&name, &problem("F16"));
            }
        }
    }
}

#[test]
fn f32_matrices_are_accepted_and_counted() {
    for path in [K3, LINEAR] {
        let mut model = Model::of(path);
        for tensor in &mut model.tensors {
            if !tensor.name.contains(".experts.") {
                tensor.dtype = Dtype::F32;
            }
        }
        assert_eq!(model.accepted(1).trunk_bytes, trunk_bytes(&model.tensors));
    }
}

#[test]
fn a_log_with_fewer_values_than_heads_is_refused() {
    // More heads than values per head, so that K3's padded form is too short.
    let mut config = Model::of(K3);
    config.text_config()["linear_attn_config"]["num_heads"] = json!(40);
    let model = Model::from_config(config.config);
    let names: Vec<String> = model
        .tensors
        .iter()
        .map(|t| t.name.clone())
        .filter(|name| name.ends_with("A_log"))
        .collect();
    let refusal = model.refused();
    assert_eq!(refusal.problems.len(), names.len());
    for (problem, name) in refusal.problems.iter().zip(&names) {
        let shard = refusal.index[name].as_str().unwrap();
        let shapes = "has shape [32], expected [40] or [1, 1, 40, 1]";
        assert_eq!(*problem, format!("{name} in {shard}: {shapes}"));
    }
    let whole = names.iter().fold(model, |model, name| model.reshaped(name, &[40]));
    whole.accepted(1);
}

#[test]
fn experts_of_another_width_are_refused() {
    // 96 inputs where config.json says the latent has 64.
    let at = "language_model.model.layers.5.block_sparse_moe.experts.7.w1.weight_";
    let (packed, scale) = (format!("{at}packed"), format!("{at}scale"));
    let model = Model::of(K3).reshaped(&packed, &[96, 48]).reshaped(&scale, &[96, 3]);
    let refusal = model.refused();
    let shard = refusal.index[&packed].as_str().unwrap();
    let expected = [
        format!("{packed} in {shard}: has shape [96, 48], expected [96, 32]"),
        format!("{scale} in {shard}: has shape [96, 3], expected [96, 2]"),
    ];
    assert_eq!(refusal.problems, expected);

    let name = "model.layers.4.block_sparse_moe.experts.9.w2.weight";
    let refusal = Model::of(LINEAR).reshaped(name, &[64, 64]).refused();
    refusal.only(name, &format!("{name} in @: has shape [64, 64], expected [96, 64]"));
}

#[test]
fn layer_lists_shifted_by_one_miss_the_other_kind_of_attention() {
    // K3's full-attention layers are 4, 8 and 9 of nine, Kimi-Linear's 3 and 5 of five.
    let shifts: [(&str, &[u64], usize, usize); 3] =
        [(K3, &[3, 7, 8], 2, 3), (K3, &[5, 9], 4, 3), (LINEAR, &[2, 4], 1, 2)];
    for (path, full, mla_layer, kda_layer) in shifts {
        let mut model = Model::of(path);
        let text = model.text_config();
        let n_layers = text["num_hidden_layers"].as_u64().unwrap();
        let kda: Vec<u64> = (1..=n_layers).filter(|layer| !full.contains(layer)).collect();
        text["linear_attn_config"]["full_attn_layers"] = json!(full);
        text["linear_attn_config"]["kda_layers"] = json!(kda);
        let problems = model.refused().problems;
        let prefix = if path == K3 { "language_model." } else { "" };
        for (layer, tensor) in [(mla_layer, "kv_b_proj.weight"), (kda_layer, "A_log")] {
            let problem = format!("{prefix}model.layers.{layer}.self_attn.{tensor}: missing");
            assert!(problems.contains(&problem), "{full:?}: {problem} not in {problems:#?}");
        }
        let first = format!("{prefix}model.layers.0.");
        assert!(!problems.iter().any(|p| p.starts_with(&first)), "{full:?}: {problems:#?}");
    }
}

#[test]
fn names_without_the_prefix_of_their_release_are_all_missing() {
    let mut k3 = Model::of(K3);
    for tensor in &mut k3.tensors {
        if let Some(name) = tensor.name.strip_prefix("language_model.") {
            tensor.name = name.to_owned();
        }
    }
    let mut linear = Model::of(LINEAR);
    for tensor in &mut linear.tensors {
        tensor.name.insert_str(0, "language_model.");
    }
    for (model, prefix) in [(k3, "language_model."), (linear, "")] {
        let Refusal { problems, .. } = model.refused();
        assert_eq!(problems[0], format!("{prefix}model.embed_tokens.weight: missing"));
        assert_eq!(problems.len(), Error::MAX_PROBLEMS + 1);
        assert!(problems[..Error::MAX_PROBLEMS].iter().all(|p| p.ends_with(": missing")));
        let rest = text_model(&model.tensors).count() - Error::MAX_PROBLEMS;
        assert_eq!(problems[Error::MAX_PROBLEMS], format!("… and {rest} more"));
    }
}

#[test]
fn all_problems_are_listed_up_to_the_cap_and_the_rest_are_counted() {
    let scales: Vec<String> = Model::of(K3)
        .tensors
        .iter()
        .filter(|t| t.name.ends_with("weight_scale"))
        .map(|t| t.name.clone())
        .collect();
    let norm = "language_model.model.norm.weight";
    for n_missing in [1, Error::MAX_PROBLEMS - 1, Error::MAX_PROBLEMS, 100] {
        let missing: Vec<&str> = scales[..n_missing].iter().map(String::as_str).collect();
        let model = Model::of(K3).without(&missing).retyped(norm, Dtype::U8);
        let Refusal { problems, message, .. } = model.refused();
        let n_all = n_missing + 1;
        let n_named = n_all.min(Error::MAX_PROBLEMS);
        assert!(problems[0].starts_with(norm), "{problems:#?}");
        for (problem, name) in problems[1..n_named].iter().zip(&missing) {
            assert_eq!(*problem, format!("{name}: missing"));
        }
        let rest: Vec<String> = match n_all - n_named {
            0 => vec![],
            n => vec![format!("… and {n} more")],
        };
        assert_eq!(problems[n_named..], rest);
        for problem in &problems {
            assert!(message.contains(&format!("\n  {problem}\n")), "{message}");
        }
        assert!(message.ends_with("fetch both again."), "{message}");
    }
}

#[test]
fn tensors_that_the_configuration_has_no_place_for_are_refused() {
    // Each leaves every tensor it asks for in place, and would run another model than was trained.
    let at = "language_model.model.layers";
    let mut cases = Vec::new();
    let mut edit = |unused: String, edit: &dyn Fn(&mut Value)| {
        let mut model = Model::of(K3);
        edit(model.text_config());
        cases.push((model, unused));
    };
    edit(format!("{at}.0.mlp_res_norm.weight"), &|text| {
        text.as_object_mut().unwrap().remove("attn_res_block_size");
    });
    edit(format!("{at}.3.self_attn.g_proj.weight"), &|text| {
        text["mla_use_output_gate"] = json!(false);
    });
    edit(format!("{at}.1.block_sparse_moe.routed_expert_norm.weight"), &|text| {
        text["latent_moe_use_norm"] = json!(false);
    });
    edit(format!("{at}.8.input_layernorm.weight"), &|text| {
        text["num_hidden_layers"] = json!(8);
        text["linear_attn_config"]["full_attn_layers"] = json!([4, 8]);
    });
    for (model, unused) in cases {
        let Refusal { problems, index, .. } = model.refused();
        let shard = index[&unused].as_str().unwrap();
        let problem = format!("{unused} in {shard}: config.json has no place for it");
        assert!(problems.contains(&problem), "{problem} not in {problems:#?}");
    }
    // What lies outside the text model is none of the binder's business.
    let mut model = Model::of(K3);
    model.tensor("vision_tower.encoder.final_layernorm.weight").name = "vision_tower.new".into();
    model.accepted(1);
}
