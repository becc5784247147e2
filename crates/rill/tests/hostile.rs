//! Whole engines on damaged checkpoints, bad requests and unruly expert sources. Whatever
//! happens ends as an error with a name in it; the session stays where it was, and the engine
//! serves the next request with the same bits as ever.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use common::{Copy, assert_same_bits, k3_tiny, kimi_linear_tiny, reference, repository};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{RngSeed, TestRunner};
use rill::{
    CacheCounters, Engine, EngineOptions, Error, Expert, ExpertError, ExpertId, ExpertSource,
    FinishReason, Folder, FormatError, GenerateOptions, KernelChoice, LayerIdx, Logits, Observer,
    ReadError, Sampler, Sampling, open_tokenizer, read_config,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const K3: &str = "fixtures/k3-tiny";
const LINEAR: &str = "fixtures/kimi-linear-tiny";

fn open(folder: Folder) -> Result<Engine, Error> {
    Engine::open(folder, &EngineOptions::default())
}

fn working(folder: Folder) -> Engine {
    open(folder).expect("the model opens")
}

fn copy(fixture: &str) -> Copy {
    Copy::of(&repository(fixture))
}

fn refused(folder: Folder) -> Error {
    open(folder).err().expect("a damaged model opened")
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut tree: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut tree);
    fs::write(path, tree.to_string()).unwrap();
}

/// Where a tensor's bytes are: shard, and positions in it.
type Place = (PathBuf, Range<usize>);

fn places(dir: &Path) -> BTreeMap<String, Place> {
    let mut places = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_string_lossy().starts_with("model-") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        for (name, range) in ranges(&bytes) {
            places.insert(name, (path.clone(), range));
        }
    }
    places
}

/// The tensors of a shard and where they are in it.
fn ranges(shard: &[u8]) -> BTreeMap<String, Range<usize>> {
    let (length, header) = SafeTensors::read_metadata(shard).unwrap();
    let absolute = |(begin, end)| 8 + length + begin..8 + length + end;
    let tensors = header.tensors().into_iter();
    tensors.map(|(name, info)| (name, absolute(info.data_offsets))).collect()
}

/// What the names of an expert's tensors start with.
fn expert_prefix(fixture: &str, layer: usize, expert: u32) -> String {
    let prefix = if fixture == K3 { "language_model." } else { "" };
    format!("{prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}.")
}

/// Notes every (layer, expert) that is used.
#[derive(Default)]
struct Used(BTreeSet<(usize, u32)>);

impl Observer for Used {
    fn routed(&mut self, layer: LayerIdx, ids: &[u32], _weights: &[f32]) {
        self.0.extend(ids.iter().map(|&id| (layer.0, id)));
    }
}

/// A prompt, a token after it, and what a whole checkpoint answers.
struct Undisturbed {
    prompt: Vec<u32>,
    token: u32,
    after_prompt: Vec<f32>,
    after_token: Vec<f32>,
    /// Of the next step: the same token again.
    after_repeat: Vec<f32>,
    used_by_prompt: BTreeSet<(usize, u32)>,
    /// And not by the prompt.
    used_by_token: BTreeSet<(usize, u32)>,
}

impl Undisturbed {
    fn run(fixture: &str, prompt: &[u32], token: u32) -> Self {
        let engine = working(Folder::Disk(repository(fixture)));
        let mut session = engine.new_session();
        let mut step = |tokens: &[u32]| {
            let mut used = Used::default();
            let logits = engine
                .forward_observed(&mut session, tokens, Logits::Last, &mut used)
                .expect("it runs");
            (logits, used.0)
        };
        let (after_prompt, used_by_prompt) = step(prompt);
        let (after_token, used) = step(&[token]);
        let (after_repeat, _) = step(&[token]);
        Self {
            prompt: prompt.to_vec(),
            token,
            after_prompt,
            after_token,
            after_repeat,
            used_by_token: used.difference(&used_by_prompt).copied().collect(),
            used_by_prompt,
        }
    }

    /// A new session takes the prompt with the usual bits.
    fn serves_the_prompt(&self, engine: &Engine) {
        let mut session = engine.new_session();
        let logits = engine.forward(&mut session, &self.prompt, Logits::Last).expect("it runs");
        assert_same_bits("another request", &logits, &self.after_prompt);
    }
}

/// Why this expert failed; any other error fails the test.
fn failure_of(layer: usize, expert: u32, error: Error) -> ExpertError {
    match error {
        Error::Expert { layer: l, expert: e, source } if (l.0, e.0) == (layer, expert) => *source,
        error => panic!("{error:?}"),
    }
}

#[test]
fn damaged_files_are_refused_by_name_when_the_model_is_opened() {
    for fixture in [K3, LINEAR] {
        let shard = if fixture == K3 {
            "model-00002-of-000003.safetensors"
        } else {
            "model-00002-of-000002.safetensors"
        };
        let places = places(&repository(fixture));
        let in_shard = places.iter().filter(|(_, (path, _))| path.ends_with(shard));
        let (last, _) = in_shard.max_by_key(|(_, (_, range))| range.end).unwrap();
        let cut = |path: PathBuf, bytes: u64| {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            let length = file.metadata().unwrap().len();
            file.set_len(if bytes == 1 { length - 1 } else { bytes }).unwrap();
        };
        type Damage<'a> = &'a dyn Fn(&Path);
        let cases: &[(Damage, &[&str])] = &[
            (&|dir| cut(dir.join(shard), 1), &[shard, last, "is cut off"]),
            (&|dir| cut(dir.join(shard), 1000), &[shard, "is cut off"]),
            (&|dir| cut(dir.join(shard), 0), &[shard, "is cut off"]),
            (&|dir| fs::remove_file(dir.join(shard)).unwrap(), &[shard, "does not exist"]),
            (
                &|dir| fs::remove_file(dir.join("model.safetensors.index.json")).unwrap(),
                &["holds neither model.safetensors.index.json nor model.safetensors"],
            ),
            (
                &|dir| fs::remove_file(dir.join("config.json")).unwrap(),
                &["config.json", "does not exist"],
            ),
            (&|dir| cut(dir.join("config.json"), 700), &["config.json", "EOF"]),
        ];
        for (damage, named) in cases {
            let copy = copy(fixture);
            damage(copy.dir.path());
            let message = refused(copy.folder()).to_string();
            for name in *named {
                assert!(message.contains(name), "{name} not in: {message}");
            }
            let dir = copy.dir.path().display().to_string();
            assert!(message.contains(&dir), "{dir} not in: {message}");
        }
    }
}

#[test]
fn nan_scale_fails_only_the_requests_that_use_its_expert() {
    let ids = reference(&k3_tiny()).input_ids;
    let whole = Undisturbed::run(K3, &ids[..2], ids[2]);
    let &(layer, expert) = whole.used_by_token.last().expect("the token uses experts of its own");
    // Two scales a row for w1 and w3 (64 inputs), three for w2 (96).
    for (part, row, first) in [("w1", 3, 32), ("w3", 3, 32), ("w2", 2, 32)] {
        let tensor = format!("{}{part}.weight_scale", expert_prefix(K3, layer, expert));
        let copy = copy(K3);
        assert_eq!(copy.edit(|name| name == tensor, |bytes| bytes[7] = 255), 1);
        let engine = working(copy.folder());
        let mut session = engine.new_session();
        engine.forward(&mut session, &whole.prompt, Logits::Last).expect("it is not used yet");
        // Twice: the first failure must not let the second one through.
        for _ in 0..2 {
            let error = engine.forward(&mut session, &[whole.token], Logits::Last).unwrap_err();
            let message = error.to_string();
            assert!(message.contains(&tensor), "{message}");
            assert!(message.contains(".safetensors"), "{message}");
            let scale = format!("the scale of row {row}, inputs from {first} on, is NaN");
            assert!(message.contains(&scale), "{message}");
            let source = failure_of(layer, expert, error);
            assert!(matches!(source, ExpertError::Layout { .. }), "{source:?}");
            assert_eq!(session.position(), whole.prompt.len());
        }
        whole.serves_the_prompt(&engine);
    }
}

/// On Windows a file cannot be cut while it is open.
#[cfg(unix)]
#[test]
fn expert_cut_off_after_opening_fails_its_requests_until_it_is_restored() {
    for fixture in [K3, LINEAR] {
        let copy = copy(fixture);
        let places = places(copy.dir.path());
        let ids = reference(&copy.folder()).input_ids;
        let tensors_of = |&(layer, expert): &(usize, u32)| {
            let prefix = expert_prefix(fixture, layer, expert);
            places.iter().filter(move |(name, _)| name.starts_with(&prefix)).map(|(_, place)| place)
        };
        // A token with an expert that lies behind everything else that is read: cutting the file
        // inside it leaves the rest whole.
        let found = ids[1..].iter().find_map(|&token| {
            let whole = Undisturbed::run(fixture, &ids[..1], token);
            let victim = whole.used_by_token.iter().copied().find_map(|victim| {
                let (path, range) = tensors_of(&victim).max_by_key(|(_, range)| range.end)?;
                let used = || whole.used_by_prompt.iter().chain(&whole.used_by_token);
                let others = used().filter(|used| **used != victim).flat_map(tensors_of);
                let embedding = places.iter().find(|(name, _)| name.contains("embed_tokens"));
                let mut read = others.chain(embedding.map(|(_, place)| place));
                let cut = range.end - 1;
                let is_last = read.all(|(p, r)| p != path || r.end <= cut);
                is_last.then(|| (victim, path.clone(), cut))
            })?;
            Some((whole, victim))
        });
        let (whole, ((layer, expert), path, cut)) = found.expect("some token has such an expert");

        // Without reading ahead, which may have brought the expert while it was whole.
        let options = EngineOptions { prefill_chunk: 1, lookahead: 0, ..EngineOptions::default() };
        let engine = Engine::open(copy.folder(), &options).expect("the model opens");
        let mut session = engine.new_session();
        engine.forward(&mut session, &whole.prompt, Logits::Last).expect("nothing is cut off yet");
        let original = fs::read(&path).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(cut as u64).unwrap();

        let fails = |session: &mut rill::Session, tokens: &[u32]| {
            let error = engine.forward(session, tokens, Logits::Last).unwrap_err();
            let message = error.to_string();
            let source = failure_of(layer, expert, error);
            let ExpertError::Stream(error) = source else { panic!("{source:?}") };
            let ReadError::Short { file, byte, expected: 1.. } = &*error else {
                panic!("{error:?}")
            };
            assert_eq!((Path::new(file), *byte), (&*path, cut as u64));
            let named = format!("expert {expert} of layer {layer}: {file}: ends at byte {cut}");
            assert!(message.contains(&named), "{message}");
        };
        for _ in 0..2 {
            fails(&mut session, &[whole.token]);
            assert_eq!(session.position(), whole.prompt.len());
        }
        // In one call the session stands at the last whole token.
        let mut together = engine.new_session();
        fails(&mut together, &[&whole.prompt[..], &[whole.token]].concat());
        assert_eq!(together.position(), whole.prompt.len());
        whole.serves_the_prompt(&engine);

        fs::write(&path, original).unwrap();
        for session in [&mut session, &mut together] {
            for expected in [&whole.after_token, &whole.after_repeat] {
                let logits = engine.forward(session, &[whole.token], Logits::Last).unwrap();
                assert_same_bits("restored", &logits, expected);
            }
        }
    }
}

#[cfg(unix)]
#[test]
fn embedding_cut_off_after_opening_fails_the_tokens_beyond_the_cut() {
    let copy = copy(LINEAR);
    let engine = working(copy.folder());
    let (path, range) = places(copy.dir.path()).remove("model.embed_tokens.weight").unwrap();
    let original = fs::read(&path).unwrap();
    // Row 100 is whole, row 101 is not; 96 bf16 a row.
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len((range.start + 102 * 192 - 1) as u64).unwrap();
    let mut session = engine.new_session();
    let error = engine.forward(&mut session, &[101], Logits::Last).unwrap_err();
    assert!(matches!(error, Error::Format(FormatError::ShortRead { .. })), "{error:?}");
    assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
    assert_eq!(session.position(), 0);
    fs::write(&path, original).unwrap();
    let logits = engine.forward(&mut session, &[101], Logits::Last).unwrap();
    let engine = working(kimi_linear_tiny());
    let expected = engine.forward(&mut engine.new_session(), &[101], Logits::Last).unwrap();
    assert_same_bits("restored", &logits, &expected);
}

#[test]
fn generation_config_of_wrong_types_is_refused_by_name() {
    let broken = [
        r#"{"eos_token_id": "258"}"#,
        r#"{"eos_token_id": -1}"#,
        r#"{"eos_token_id": 258.0}"#,
        r#"{"eos_token_id": 4294967296}"#,
        r#"{"eos_token_id": [258, "259"]}"#,
        r#"{"eos_token_id": [[258]]}"#,
        r#"{"eos_token_id": {"id": 258}}"#,
        r#"{"eos_token_id": true}"#,
        r#"{"eos_token_id": 258"#,
        "[258]",
        "[]",
        "258",
        "null",
        "",
    ];
    for text in broken {
        let copy = copy(LINEAR);
        let file = copy.dir.path().join("generation_config.json");
        fs::write(&file, text).unwrap();
        let error = refused(copy.folder());
        assert!(matches!(error, Error::GenerationConfig { .. }), "{text}: {error:?}");
        let message = error.to_string();
        assert!(message.starts_with(&file.display().to_string()), "{text}: {message}");
        assert!(message.contains("eos_token_id must be a token id or a list"), "{message}");
        if let Some((_, found)) = text.strip_suffix('}').and_then(|t| t.split_once(": ")) {
            assert!(message.contains(&format!("eos_token_id is {found};")), "{message}");
        }
    }
    let sound: [(&str, &[u32]); 5] = [
        (r#"{"temperature": 1.0}"#, &[258]),
        (r#"{"eos_token_id": null}"#, &[258]),
        (r#"{"eos_token_id": 7, "eos": "x"}"#, &[7, 258]),
        (r#"{"eos_token_id": [400, 258, 7, 7]}"#, &[7, 258, 400]),
        (r#"{"eos_token_id": [], "max_length": 1e400}"#, &[258]),
    ];
    for (text, stop_tokens) in sound {
        let copy = copy(LINEAR);
        fs::write(copy.dir.path().join("generation_config.json"), text).unwrap();
        assert_eq!(working(copy.folder()).stop_tokens(), stop_tokens, "{text}");
    }
}

#[test]
fn tokenizer_larger_than_the_model_is_refused_by_file_and_number() {
    let larger = copy(LINEAR);
    let path = larger.dir.path().join("tiktoken.model");
    let mut model = fs::read_to_string(&path).unwrap();
    // Four digits are base64 for three bytes.
    (256..600).for_each(|rank| model.push_str(&format!("{rank:04} {rank}\n")));
    fs::write(&path, model).unwrap();
    let reserved = copy(LINEAR);
    edit_json(&reserved.dir.path().join("tokenizer_config.json"), |tree| {
        tree["added_tokens_decoder"]["512"] = json!({"content": "<|one too many|>"});
    });
    for (copy, named) in [
        (larger, "tiktoken.model line 513: rank 512, but config.json says vocab_size is 512"),
        (reserved, "tokenizer_config.json: id 512 (\"<|one too many|>\"), but config.json says"),
    ] {
        // The weights are whole, and can be run without a tokenizer.
        let engine = working(copy.folder());
        let error = engine.open_tokenizer().err().expect("the tokenizer opened");
        assert!(matches!(error, Error::Text(_)), "{error:?}");
        assert!(error.to_string().starts_with(named), "{error}");
        let config = read_config(&copy.folder()).unwrap();
        assert!(open_tokenizer(&copy.folder(), &config).is_err());
    }
}

#[test]
fn requests_that_make_no_sense_leave_the_session_alone() {
    let (k3, linear) = (working(k3_tiny()), working(kimi_linear_tiny()));
    let mut session = k3.new_session();
    k3.forward(&mut session, &[1, 2], Logits::Last).unwrap();
    for (tokens, token, position) in
        [(&[1, 512, 600][..], 512, 1), (&[u32::MAX], u32::MAX, 0), (&[511, 1, 513], 513, 2)]
    {
        let error = k3.forward(&mut session, tokens, Logits::Last).unwrap_err();
        let Error::TokenOutOfRange { token: t, position: p, vocab_size } = error else {
            panic!("{error:?}")
        };
        assert_eq!((t, p, vocab_size), (token, position, 512));
    }
    let error = k3.forward(&mut session, &[], Logits::All).unwrap_err();
    assert!(matches!(error, Error::EmptyPrompt), "{error:?}");
    assert!(k3.generate(&mut session, &[], GenerateOptions::default()).is_err());
    // Another model, and another engine of the same model.
    for other in [&linear, &working(k3_tiny())] {
        let error = other.forward(&mut session, &[3], Logits::Last).unwrap_err();
        assert!(matches!(error, Error::ForeignSession), "{error:?}");
    }
    assert_eq!(session.position(), 2);
    let logits = k3.forward(&mut session, &[3], Logits::Last).unwrap();
    let expected = k3.forward(&mut k3.new_session(), &[1, 2, 3], Logits::Last).unwrap();
    assert_same_bits("after bad requests", &logits, &expected);
}

#[test]
fn context_fills_to_the_last_position_and_no_further() {
    let copy = copy(K3);
    edit_json(&copy.dir.path().join("config.json"), |tree| {
        tree["text_config"]["max_position_embeddings"] = json!(6);
    });
    let engine = working(copy.folder());
    let full = |session: &mut rill::Session, tokens: &[u32], expected| {
        let error = engine.forward(session, tokens, Logits::Last).unwrap_err();
        let Error::ContextFull { positions, max_positions } = error else { panic!("{error:?}") };
        assert_eq!((positions, max_positions), (expected, 6));
    };
    let mut session = engine.new_session();
    full(&mut session, &[1; 7], 7);
    assert_eq!(session.position(), 0);
    engine.forward(&mut session, &[1, 2, 3, 4], Logits::Last).unwrap();
    full(&mut session, &[5, 6, 7], 7);
    assert_eq!(session.position(), 4);
    engine.forward(&mut session, &[5, 6], Logits::Last).unwrap();
    full(&mut session, &[7], 7);
    assert_eq!(session.position(), 6);

    // The sixth position yields one more token, which there is no room to run.
    let mut session = engine.new_session();
    let options = GenerateOptions { stop_tokens: Some(vec![]), ..GenerateOptions::default() };
    let mut generation = engine.generate(&mut session, &[1, 2, 3, 4], options).unwrap();
    assert_eq!(generation.by_ref().map(Result::unwrap).count(), 3);
    assert_eq!(generation.finish_reason(), Some(FinishReason::ContextFull));
}

/// Bits, with every NaN alike: which of several NaN an operation hands on is up to the compiler.
fn canonical(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

#[test]
fn weights_of_nan_and_infinity_run_deterministically_and_sample_valid_tokens() {
    // Fit bf16 and f32 alike.
    let nan: &[u8] = &[0xc0, 0x7f];
    let infinities: &[u8] = &[0, 0, 0x80, 0x7f, 0, 0, 0x80, 0xff];
    let mut n_kinds = 0;
    for fixture in [K3, LINEAR] {
        let copy = copy(fixture);
        let mut kinds = BTreeSet::new();
        // Backwards: the first layer's attention reads no residual mix.
        for (name, (path, range)) in places(copy.dir.path()).iter().rev() {
            let is_number = |part: &&str| part.bytes().all(|b| b.is_ascii_digit());
            let kind: Vec<&str> = name.split('.').filter(|part| !is_number(part)).collect();
            let unused = ["experts", "vision_tower", "mm_projector"];
            if unused.iter().any(|part| kind.contains(part)) || !kinds.insert(kind.join(".")) {
                continue;
            }
            n_kinds += 1;
            let original = fs::read(path).unwrap();
            for pattern in [nan, infinities] {
                let mut damaged = original.clone();
                let fill = pattern.iter().cycle();
                damaged[range.clone()].iter_mut().zip(fill).for_each(|(b, &fill)| *b = fill);
                fs::write(path, damaged).unwrap();
                let logits = runs_deterministically(&copy, name);
                // An expert whose bias is NaN is chosen last, and weighs what it always did.
                if pattern == nan && !name.ends_with("e_score_correction_bias") {
                    assert!(logits.iter().any(|x| x.is_nan()), "{name} has no effect");
                }
            }
            fs::write(path, original).unwrap();
        }
    }
    assert_eq!(n_kinds, 73);
}

/// Runs in two ways that must agree, and samples; returns the logits.
fn runs_deterministically(copy: &Copy, damaged: &str) -> Vec<f32> {
    let run = |engine: &Engine| {
        let mut session = engine.new_session();
        let mut logits = engine.forward(&mut session, &[1, 2, 3], Logits::All).expect(damaged);
        logits.extend(engine.forward(&mut session, &[4], Logits::All).expect(damaged));
        assert_eq!((session.position(), logits.len()), (4, 4 * 512));
        logits
    };
    let engine = working(copy.folder());
    let logits = run(&engine);
    let plain = EngineOptions {
        threads: 1,
        prefill_chunk: 1,
        kernels: KernelChoice::Named("scalar".to_owned()),
        ..Default::default()
    };
    let plain = Engine::open(copy.folder(), &plain).expect("the model opens");
    assert_eq!(canonical(&run(&plain)), canonical(&logits), "{damaged}");

    for temperature in [0.0, 0.8] {
        let sampling = Sampling { temperature, top_p: 0.9, top_k: 50, ..Sampling::default() };
        let mut sampler = Sampler::new(sampling, 512).unwrap();
        for row in logits.chunks_exact(512) {
            assert!(sampler.sample(row).is_some_and(|token| token < 512), "{damaged}");
        }
    }
    let mut session = engine.new_session();
    let options = GenerateOptions { max_tokens: 2, ..GenerateOptions::default() };
    for token in engine.generate(&mut session, &[1], options).expect(damaged) {
        assert!(token.expect(damaged).id < 512, "{damaged}");
    }
    logits
}

#[test]
fn configurations_that_contradict_the_weights_are_refused() {
    // (field, its new value, tensor, what is wrong with it)
    #[rustfmt::skip] // one case a line
    let cases: &[(&str, Value, &str, &str)] = &[
        ("/hidden_size", json!(128), "model.embed_tokens.weight", "has shape [512, 96], expected [512, 128]"),
        ("/vocab_size", json!(768), "lm_head.weight", "has shape [512, 96], expected [768, 96]"),
        ("/intermediate_size", json!(192), "model.layers.0.mlp.down_proj.weight", "has shape [96, 160], expected [96, 192]"),
        ("/moe_intermediate_size", json!(64), "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", "has shape [192, 96], expected [128, 96]"),
        ("/first_k_dense_replace", json!(2), "model.layers.1.mlp.gate_proj.weight", "missing"),
        ("/first_k_dense_replace", json!(0), "model.layers.0.block_sparse_moe.gate.weight", "missing"),
        ("/num_experts", json!(11), "model.layers.1.block_sparse_moe.gate.weight", "has shape [12, 96], expected [11, 96]"),
        ("/num_experts", json!(13), "model.layers.8.block_sparse_moe.gate.e_score_correction_bias", "has shape [12], expected [13]"),
        ("/num_shared_experts", json!(3), "model.layers.2.block_sparse_moe.shared_experts.gate_proj.weight", "has shape [192, 96], expected [288, 96]"),
        ("/routed_expert_hidden_size", json!(96), "model.layers.1.block_sparse_moe.routed_expert_norm.weight", "has shape [64], expected [96]"),
        ("/latent_moe_use_norm", json!(false), "model.layers.1.block_sparse_moe.routed_expert_norm.weight", "config.json has no place for it"),
        ("/quantization_config", Value::Null, "model.layers.1.block_sparse_moe.experts.0.w1.weight", "missing"),
        ("/attn_res_block_size", Value::Null, "model.layers.0.self_attention_res_proj.weight", "config.json has no place for it"),
        ("/num_attention_heads", json!(8), "model.layers.3.self_attn.kv_b_proj.weight", "has shape [160, 32], expected [320, 32]"),
        ("/q_lora_rank", json!(32), "model.layers.3.self_attn.q_a_layernorm.weight", "has shape [40], expected [32]"),
        ("/kv_lora_rank", json!(40), "model.layers.7.self_attn.kv_a_proj_with_mqa.weight", "has shape [40, 96], expected [48, 96]"),
        ("/qk_nope_head_dim", json!(16), "model.layers.8.self_attn.q_b_proj.weight", "has shape [128, 40], expected [96, 40]"),
        ("/qk_rope_head_dim", json!(16), "model.layers.8.self_attn.kv_a_proj_with_mqa.weight", "has shape [40, 96], expected [48, 96]"),
        ("/v_head_dim", json!(24), "model.layers.3.self_attn.o_proj.weight", "has shape [96, 64], expected [96, 96]"),
        ("/mla_use_output_gate", json!(false), "model.layers.3.self_attn.g_proj.weight", "config.json has no place for it"),
        ("/linear_attn_config/use_full_rank_gate", json!(false), "model.layers.0.self_attn.g_a_proj.weight", "missing"),
        ("/linear_attn_config/num_heads", json!(4), "model.layers.0.self_attn.dt_bias", "has shape [96], expected [128]"),
        ("/linear_attn_config/head_dim", json!(48), "model.layers.0.self_attn.o_norm.weight", "has shape [32], expected [48]"),
    ];
    for (field, value, tensor, problem) in cases {
        let mut tree: Value = serde_json::from_slice(file("config.json")).unwrap();
        let (parent, key) = field.rsplit_once('/').unwrap();
        let parent = tree["text_config"].pointer_mut(parent).unwrap().as_object_mut().unwrap();
        match value {
            Value::Null => parent.remove(key).expect(field),
            value => parent.insert(key.to_owned(), value.clone()).expect(field),
        };
        if key == "num_attention_heads" {
            parent.insert("num_key_value_heads".to_owned(), value.clone());
        }
        let folder = in_memory(&[("config.json", tree.to_string().into_bytes())]);
        let message = refused(folder.clone()).to_string();
        let checkpoint = rill::Checkpoint::open(folder).unwrap();
        let name = format!("language_model.{tensor}");
        let named = match checkpoint.find(&name) {
            Some(info) => format!("\n  {name} in {}: {problem}\n", info.shard),
            None => format!("\n  {name}: {problem}\n"),
        };
        assert!(message.contains(&named), "{field} = {value}: {named} not in: {message}");
    }
}

#[test]
fn two_models_in_one_process_do_not_affect_each_other() {
    let folders = [k3_tiny(), kimi_linear_tiny()];
    let ids = folders.each_ref().map(|folder| reference(folder).input_ids[..12].to_vec());
    let alone: Vec<Vec<f32>> = folders
        .iter()
        .zip(&ids)
        .map(|(folder, ids)| {
            let engine = working(folder.clone());
            engine.forward(&mut engine.new_session(), ids, Logits::All).unwrap()
        })
        .collect();

    let engines = folders.map(working);
    let mut sessions = engines.each_ref().map(Engine::new_session);
    let mut interleaved = [vec![], vec![]];
    for tokens in ids[0].iter().zip(&ids[1]) {
        for (model, &token) in [tokens.0, tokens.1].into_iter().enumerate() {
            let logits = engines[model].forward(&mut sessions[model], &[token], Logits::Last);
            interleaved[model].extend(logits.unwrap());
        }
    }
    // And all at once: two sessions of each.
    let concurrent: Vec<(usize, Vec<f32>)> = std::thread::scope(|scope| {
        let run = |model: usize| {
            let (engine, ids) = (&engines[model], &ids[model]);
            let run = move || engine.forward(&mut engine.new_session(), ids, Logits::All);
            (model, scope.spawn(run))
        };
        let threads: Vec<_> = [0, 1, 0, 1].into_iter().map(run).collect();
        let join = |(model, thread): (usize, std::thread::ScopedJoinHandle<'_, _>)| {
            let logits: Result<Vec<f32>, Error> = thread.join().expect("it does not panic");
            (model, logits.unwrap())
        };
        threads.into_iter().map(join).collect()
    });
    for (model, alone) in alone.iter().enumerate() {
        assert_same_bits("token by token in turn", &interleaved[model], alone);
    }
    for (model, logits) in &concurrent {
        assert_same_bits("all at once", logits, &alone[*model]);
    }
}

/// What an expert source does wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mischief {
    Reverses,
    DeliversTwice,
    DeliversUnwanted,
    LeavesOutTheLast,
    DeliversNothing,
    SwapsUpAndDown,
    FailsAtOnce,
    FailsHalfWay,
}

/// Does it in layer 2 and later, while it is armed.
struct Unruly {
    inner: Box<dyn ExpertSource>,
    mischief: Mischief,
    armed: Arc<AtomicBool>,
    n_experts: u32,
}

impl ExpertSource for Unruly {
    fn fetch(
        &self,
        layer: LayerIdx,
        experts: &[ExpertId],
        consume: &mut dyn FnMut(ExpertId, Expert<'_>),
    ) -> Result<(), Error> {
        if !self.armed.load(Ordering::Relaxed) || layer < LayerIdx(2) {
            return self.inner.fetch(layer, experts, consume);
        }
        let broken = || {
            let file = "the drive that was pulled".to_owned();
            Err(Error::Format(FormatError::MissingFile { file }))
        };
        match self.mischief {
            Mischief::Reverses => {
                experts.iter().rev().try_for_each(|&id| self.inner.fetch(layer, &[id], consume))
            }
            Mischief::DeliversTwice => {
                self.inner.fetch(layer, experts, consume)?;
                self.inner.fetch(layer, experts, consume)
            }
            Mischief::DeliversUnwanted => {
                let all = (0..self.n_experts).map(ExpertId);
                let unwanted: Vec<_> = all.filter(|id| !experts.contains(id)).collect();
                assert!(!unwanted.is_empty());
                self.inner.fetch(layer, &unwanted, consume)?;
                self.inner.fetch(layer, experts, consume)?;
                self.inner.fetch(layer, &unwanted[..1], &mut |_, expert| {
                    consume(ExpertId(self.n_experts), expert);
                    consume(ExpertId(u32::MAX), expert);
                })
            }
            Mischief::LeavesOutTheLast => {
                self.inner.fetch(layer, &experts[..experts.len() - 1], consume)
            }
            Mischief::DeliversNothing => Ok(()),
            Mischief::SwapsUpAndDown => self.inner.fetch(layer, experts, &mut |id, expert| {
                consume(id, Expert { gate: expert.gate, up: expert.down, down: expert.up });
            }),
            Mischief::FailsAtOnce => broken(),
            Mischief::FailsHalfWay => {
                self.inner.fetch(layer, &experts[..experts.len() / 2], consume)?;
                broken()
            }
        }
    }

    fn counters(&self) -> CacheCounters {
        self.inner.counters()
    }
}

/// The model with an unruly source, and the switch that arms it.
fn unruly(folder: Folder, mischief: Mischief) -> (Engine, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let engine = working(folder);
    let n_experts = engine.config().moe.n_experts as u32;
    let switch = armed.clone();
    let wrap =
        |inner| -> Box<dyn ExpertSource> { Box::new(Unruly { inner, mischief, armed, n_experts }) };
    (engine.with_experts(wrap), switch)
}

#[test]
fn order_repeats_and_extras_of_delivered_experts_do_not_change_bits() {
    for folder in [k3_tiny(), kimi_linear_tiny()] {
        let ids = reference(&folder).input_ids;
        let whole = working(folder.clone());
        // One token leaves most experts unwanted; many want several tokens' experts at once.
        for prompt in [&ids[..1], &ids[..3]] {
            let expected = whole.forward(&mut whole.new_session(), prompt, Logits::All).unwrap();
            for mischief in
                [Mischief::Reverses, Mischief::DeliversTwice, Mischief::DeliversUnwanted]
            {
                let (engine, armed) = unruly(folder.clone(), mischief);
                armed.store(true, Ordering::Relaxed);
                let logits = engine.forward(&mut engine.new_session(), prompt, Logits::All);
                assert_same_bits(&format!("{mischief:?}"), &logits.unwrap(), &expected);
            }
        }
    }
}

#[test]
fn experts_that_do_not_come_fail_the_request_and_nothing_else() {
    for (fixture, folder) in [(K3, k3_tiny()), (LINEAR, kimi_linear_tiny())] {
        let ids = reference(&folder).input_ids;
        let whole = Undisturbed::run(fixture, &ids[..5], ids[5]);
        for mischief in [
            Mischief::LeavesOutTheLast,
            Mischief::DeliversNothing,
            Mischief::SwapsUpAndDown,
            Mischief::FailsAtOnce,
            Mischief::FailsHalfWay,
        ] {
            let (engine, armed) = unruly(folder.clone(), mischief);
            let mut session = engine.new_session();
            engine.forward(&mut session, &whole.prompt, Logits::Last).unwrap();
            armed.store(true, Ordering::Relaxed);
            let mut used = Used::default();
            let error = engine
                .forward_observed(&mut session, &[whole.token], Logits::Last, &mut used)
                .unwrap_err();
            match (mischief, &error) {
                (
                    Mischief::LeavesOutTheLast | Mischief::DeliversNothing,
                    Error::Expert { layer: LayerIdx(2), source, .. },
                ) => assert!(matches!(**source, ExpertError::Missing), "{source:?}"),
                (Mischief::SwapsUpAndDown, Error::Expert { layer: LayerIdx(2), source, .. }) => {
                    assert!(matches!(**source, ExpertError::Shape), "{source:?}")
                }
                (
                    Mischief::FailsAtOnce | Mischief::FailsHalfWay,
                    Error::Format(FormatError::MissingFile { .. }),
                ) => {}
                _ => panic!("{mischief:?}: {error:?}"),
            }
            // Layer 1 ran, layer 2 did not: there is something to roll back.
            assert_eq!(used.0.iter().map(|(layer, _)| *layer).max(), Some(1));
            assert_eq!(session.position(), whole.prompt.len());
            armed.store(false, Ordering::Relaxed);
            whole.serves_the_prompt(&engine);
            for expected in [&whole.after_token, &whole.after_repeat] {
                let logits = engine.forward(&mut session, &[whole.token], Logits::Last).unwrap();
                assert_same_bits(&format!("{mischief:?}"), &logits, expected);
            }
        }
    }
}

#[test]
fn missing_expert_is_named() {
    let (engine, armed) = unruly(k3_tiny(), Mischief::LeavesOutTheLast);
    let mut used = Used::default();
    engine.forward_observed(&mut engine.new_session(), &[9], Logits::Last, &mut used).unwrap();
    let last = used.0.iter().filter(|(layer, _)| *layer == 2).max().unwrap().1;
    armed.store(true, Ordering::Relaxed);
    let error = engine.forward(&mut engine.new_session(), &[9], Logits::Last).unwrap_err();
    let expected = format!("expert {last} of layer 2: the source of experts did not deliver it");
    assert_eq!(error.to_string(), expected);
}

/// The files of k3-tiny that opening it reads.
static FILES: LazyLock<Vec<(&str, &[u8])>> = LazyLock::new(|| {
    let names = [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-000003.safetensors",
        "model-00002-of-000003.safetensors",
        "model-00003-of-000003.safetensors",
    ];
    let read = |name| &*fs::read(repository(K3).join(name)).expect("it is there").leak();
    names.into_iter().map(|name| (name, read(name))).collect()
});

fn file(name: &str) -> &'static [u8] {
    FILES.iter().find(|(n, _)| *n == name).expect("it is one of them").1
}

/// k3-tiny with some files replaced. Never freed, like anything that is built in.
fn in_memory(replaced: &[(&str, Vec<u8>)]) -> Folder {
    let mut files = FILES.clone();
    for (name, bytes) in replaced {
        let place = files.iter_mut().find(|(n, _)| n == name).expect("it is one of them");
        place.1 = bytes.clone().leak();
    }
    Folder::Memory { name: "damaged", files: files.leak() }
}

/// Which bytes are damaged.
#[derive(Clone, Copy, Debug)]
enum Part {
    Config,
    Index,
    Header(usize),
    Experts(usize),
    Scales(usize),
}

impl Part {
    fn file(self) -> &'static str {
        FILES[match self {
            Self::Config => 0,
            Self::Index => 1,
            Self::Header(shard) | Self::Experts(shard) | Self::Scales(shard) => 2 + shard,
        }]
        .0
    }

    /// Positions in the file.
    fn bytes(self) -> Vec<usize> {
        let bytes = file(self.file());
        let with = |part: &str| {
            let of_part = ranges(bytes).into_iter().filter(|(name, _)| name.contains(part));
            of_part.flat_map(|(_, range)| range).collect()
        };
        match self {
            Self::Config | Self::Index => (0..bytes.len()).collect(),
            Self::Header(_) => {
                let (length, _) = SafeTensors::read_metadata(bytes).unwrap();
                (0..8 + length).collect()
            }
            Self::Experts(_) => with(".experts."),
            Self::Scales(_) => with(".weight_scale"),
        }
    }
}

fn part() -> impl Strategy<Value = Part> {
    let shard = 0..3usize;
    prop_oneof![
        Just(Part::Config),
        Just(Part::Index),
        shard.clone().prop_map(Part::Header),
        shard.clone().prop_map(Part::Experts),
        shard.prop_map(Part::Scales),
    ]
}

#[test]
fn changed_bytes_end_in_logits_or_in_an_error() {
    let config = ProptestConfig {
        cases: 160,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(20),
        ..ProptestConfig::default()
    };
    let options = EngineOptions { threads: 1, ..EngineOptions::default() };
    let edits = prop::collection::vec((any::<Index>(), any::<u8>()), 1..4);
    let [refused, failed, ran] = [(); 3].map(|()| Cell::new(0));
    let count = |counter: &Cell<u32>| counter.set(counter.get() + 1);
    let result = TestRunner::new(config).run(&(part(), edits), |(part, edits)| {
        let in_expert = matches!(part, Part::Experts(_) | Part::Scales(_));
        let positions = part.bytes();
        let mut bytes = file(part.file()).to_vec();
        for (at, byte) in edits {
            // Of all the values a scale can have, one is refused.
            let byte = if matches!(part, Part::Scales(_)) && byte > 127 { 255 } else { byte };
            bytes[*at.get(&positions)] = byte;
        }
        let engine = match Engine::open(in_memory(&[(part.file(), bytes)]), &options) {
            Ok(engine) => engine,
            Err(error) => {
                prop_assert!(!in_expert, "{}", error);
                prop_assert!(!error.to_string().is_empty());
                count(&refused);
                return Ok(());
            }
        };
        let mut session = engine.new_session();
        match engine.forward(&mut session, &[5, 300, 17, 511], Logits::Last) {
            Ok(logits) => {
                prop_assert_eq!(logits.len(), 512);
                prop_assert_eq!(session.position(), 4);
                count(&ran);
            }
            Err(error) => {
                prop_assert!(matches!(error, Error::Expert { .. }) && in_expert, "{:?}", error);
                prop_assert_eq!(session.position(), 0);
                count(&failed);
            }
        }
        Ok(())
    });
    println!("{refused:?} refused, {failed:?} failed, {ran:?} ran");
    result.unwrap();
    // All three ends were seen.
    assert!([refused, failed, ran].iter().all(|counter| counter.get() > 10));
}
