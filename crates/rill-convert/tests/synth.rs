//! Synthetic containers: what the engine makes of them, and what is written when.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use rill::{Engine, EngineOptions, Folder, LayerIdx, Logits, Observer};
use rill_convert::{
    Control, ConvertError, ExpertCodec, Progress, Synth, SynthFormat, SynthModel, SynthOptions,
    TrunkCodec, verify,
};
use rill_format::container::{Container, MANIFEST};
use rill_format::{ExpertDims, Waste, WasteFormat};
use serde_json::Value;

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A published configuration, made small.
fn small(model: SynthModel) -> Vec<u8> {
    let mut config: Value = serde_json::from_slice(model.config()).unwrap();
    let root = &mut config;
    for (key, id) in [("bos_token_id", 512), ("eos_token_id", 514), ("pad_token_id", 767)] {
        root[key] = id.into();
    }
    if model == SynthModel::KimiK3 {
        for (key, size) in [
            ("vt_hidden_size", 64),
            ("vt_intermediate_size", 128),
            ("vt_num_hidden_layers", 2),
            ("qkv_hidden_size", 96),
        ] {
            root["vision_config"][key] = size.into();
        }
        root["vision_config"]["text_hidden_size"] = 256.into();
        root["text_config"]["routed_expert_hidden_size"] = 128.into();
        root["text_config"]["q_lora_rank"] = 96.into();
        for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            root["text_config"][key] = root[key].clone();
        }
    }
    let text = match model {
        SynthModel::KimiK3 => &mut root["text_config"],
        SynthModel::KimiLinear48b => root,
    };
    for (key, size) in [
        ("vocab_size", 768),
        ("hidden_size", 256),
        ("intermediate_size", 512),
        ("moe_intermediate_size", 64),
        ("num_experts", 128),
        ("num_experts_per_token", 4),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 4),
        ("kv_lora_rank", 64),
    ] {
        text[key] = size.into();
    }
    text["linear_attn_config"]["num_heads"] = 4.into();
    text["linear_attn_config"]["head_dim"] = 64.into();
    serde_json::to_vec(&config).unwrap()
}

fn options(format: SynthFormat) -> SynthOptions {
    let experts = ExpertCodec::Source;
    SynthOptions { layers: Some(6), format, experts, trunk: TrunkCodec::Q4, seed: 7 }
}

fn write(model: SynthModel, options: &SynthOptions, to: &Path, jobs: usize) -> Synth {
    let synth = Synth::new(&small(model), options).unwrap();
    synth.write(to, &Control { jobs, progress: &go_on }).unwrap();
    synth
}

/// Every file of a folder, by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let read =
        |e: fs::DirEntry| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap());
    entries.map(read).collect()
}

const FORMATS: [SynthFormat; 2] = [SynthFormat::Rill, SynthFormat::Waste];

/// Experts by layer and token.
struct Routes {
    top_k: usize,
    layers: BTreeMap<usize, Vec<Vec<u32>>>,
}

impl Observer for Routes {
    fn routed(&mut self, layer: LayerIdx, ids: &[u32], _: &[f32]) {
        let layer = self.layers.entry(layer.0).or_default();
        layer.extend(ids.chunks_exact(self.top_k).map(<[u32]>::to_vec));
    }
}

impl Routes {
    /// Share of a token's experts that the token before had too.
    fn reuse(&self) -> f64 {
        let (mut both, mut all) = (0, 0);
        for pair in self.layers.values().flat_map(|layer| layer.windows(2)) {
            both += pair[1].iter().filter(|id| pair[0].contains(id)).count();
            all += self.top_k;
        }
        both as f64 / all as f64
    }

    /// Share of all uses that goes to the most used tenth of a layer's experts.
    fn popular(&self, n_experts: usize) -> f64 {
        let (mut popular, mut all) = (0, 0);
        for layer in self.layers.values() {
            let mut uses = vec![0; n_experts];
            layer.iter().flatten().for_each(|&id| uses[id as usize] += 1);
            uses.sort_unstable_by(|a, b| b.cmp(a));
            popular += uses[..n_experts / 10].iter().sum::<usize>();
            all += uses.iter().sum::<usize>();
        }
        popular as f64 / all as f64
    }
}

#[test]
fn both_formats_run_with_finite_varied_logits_and_routing_like_the_traces() {
    for model in SynthModel::ALL {
        for format in FORMATS {
            let dir = tempfile::tempdir().unwrap();
            write(model, &options(format), dir.path(), 2);
            let folder = Folder::Disk(dir.path().to_owned());
            let engine = Engine::open(folder, &EngineOptions::default()).unwrap();
            let config = engine.config();
            assert_eq!(config.layers.len(), 6);
            let ids: Vec<u32> = (0..40u32).map(|i| i * 211 % 512).collect();
            let mut routes = Routes { top_k: config.moe.top_k, layers: BTreeMap::new() };
            let mut session = engine.new_session();
            let logits =
                engine.forward_observed(&mut session, &ids, Logits::All, &mut routes).unwrap();
            for logits in logits.chunks_exact(config.vocab_size) {
                let n = logits.len() as f32;
                let mean = logits.iter().sum::<f32>() / n;
                let spread = logits.iter().map(|l| (l - mean).powi(2)).sum::<f32>() / n;
                // NaN is in no range.
                assert!((0.5..1.6).contains(&spread.sqrt()), "{model:?} {format:?}: {spread}");
            }
            let likeliest =
                |logits: &[f32]| (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            let mut best: Vec<_> =
                logits.chunks_exact(config.vocab_size).filter_map(likeliest).collect();
            best.sort_unstable();
            best.dedup();
            assert!(best.len() >= 10, "{model:?} {format:?}: one token wins: {best:?}");
            // Recorded traces of the real models: 34 % and, over their first 40 tokens, 64 %.
            let (reuse, popular) = (routes.reuse(), routes.popular(config.moe.n_experts));
            println!("{model:?} {format:?}: reuse {reuse:.3}, most used tenth {popular:.3}");
            assert!((0.15..0.5).contains(&reuse), "{model:?} {format:?}: {reuse}");
            assert!((0.35..0.8).contains(&popular), "{model:?} {format:?}: {popular}");
        }
    }
}

#[test]
fn the_seed_alone_decides_the_bytes() {
    for format in FORMATS {
        let written = |seed, jobs, experts| {
            let dir = tempfile::tempdir().unwrap();
            let options = SynthOptions { seed, experts, ..options(format) };
            write(SynthModel::KimiK3, &options, dir.path(), jobs);
            files(dir.path())
        };
        for experts in [ExpertCodec::Source, ExpertCodec::Mxfp4z, ExpertCodec::Trellis { rate: 23 }]
        {
            let one = written(7, 1, experts);
            assert_eq!(one, written(7, 3, experts));
            let other = written(8, 2, experts);
            assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
            for (name, bytes) in other.iter().filter(|(name, _)| name.contains("experts")) {
                assert_ne!(&one[name], bytes, "{name}");
            }
        }
    }
}

#[test]
fn every_byte_of_a_synthetic_container_is_verified() {
    for (experts, trunk) in [
        (ExpertCodec::Source, TrunkCodec::Source),
        (ExpertCodec::Q8, TrunkCodec::Q8),
        (ExpertCodec::Q4, TrunkCodec::Q4),
        (ExpertCodec::Mxfp4z, TrunkCodec::Q4),
        (ExpertCodec::Trellis { rate: 19 }, TrunkCodec::Trellis { rate: 28 }),
        (ExpertCodec::Trellis { rate: 24 }, TrunkCodec::Trellis { rate: 17 }),
    ] {
        for model in SynthModel::ALL {
            let dir = tempfile::tempdir().unwrap();
            let options = SynthOptions { experts, trunk, ..options(SynthFormat::Rill) };
            let synth = write(model, &options, dir.path(), 2);
            let container = Container::open(dir.path().to_owned()).unwrap();
            verify(&container, &Control { jobs: 1, progress: &go_on }).unwrap();
            let on_disk: usize = files(dir.path())
                .iter()
                .filter(|(n, _)| *n != MANIFEST)
                .map(|(_, b)| b.len())
                .sum();
            assert_eq!(on_disk as u64, synth.container_bytes());
            let folder = Folder::Disk(dir.path().to_owned());
            let engine = Engine::open(folder, &EngineOptions::default()).unwrap();
            let logits = engine.forward(&mut engine.new_session(), &[1, 2, 3], Logits::Last);
            let logits = logits.unwrap();
            let square = logits.iter().map(|l| l * l).sum::<f32>() / logits.len() as f32;
            // NaN is in no range.
            assert!((0.25..2.5).contains(&square), "{experts:?}: {square}");
        }
    }
}

#[test]
fn trunk_and_router_are_the_same_in_both_formats() {
    for model in SynthModel::ALL {
        let (rill, waste) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(model, &options(SynthFormat::Rill), rill.path(), 2);
        write(model, &options(SynthFormat::Waste), waste.path(), 2);
        let rill = Container::open(rill.path().to_owned()).unwrap();
        let waste = Waste::open(waste.path().to_owned()).unwrap();
        let (mut packed, mut plain, mut unpacked) = (0, 0, 0);
        for tensor in rill.manifest().trunk.runs.iter().flat_map(|run| &run.tensors) {
            let twin = waste.find(&tensor.name).unwrap();
            assert_eq!(twin.shape, tensor.shape, "{}", tensor.name);
            let (codes, scales) = rill.read_tensor(&tensor.name).unwrap();
            let data = waste.read_trunk(twin).unwrap();
            match (twin.format, tensor.codec.name.as_str()) {
                (WasteFormat::Q8 | WasteFormat::Q4, _) => {
                    assert_eq!((codes, scales), (data.codes, data.scales), "{}", tensor.name);
                    packed += 1;
                }
                (_, "f32") => {
                    assert_eq!(codes, data.codes, "{}", tensor.name);
                    plain += 1;
                }
                (_, "bf16") => {
                    let wide = codes.chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]);
                    assert_eq!(wide.collect::<Vec<_>>(), data.codes, "{}", tensor.name);
                    plain += 1;
                }
                // Packed in one, too small for that in the other.
                _ => {
                    let cols = *tensor.shape.last().unwrap() as usize;
                    let rows = tensor.shape[0] as usize;
                    let codec = rill_kernels::Codec::parse(
                        tensor.codec.name.as_str(),
                        tensor.codec.group as usize,
                    );
                    let matrix =
                        rill_kernels::Matrix::new(codec.unwrap(), rows, cols, &codes, &scales);
                    let mut row = vec![0.0; cols];
                    for (r, bytes) in data.codes.chunks_exact(4 * cols).enumerate() {
                        matrix.unwrap().decode_row(r, &mut row);
                        let expected: Vec<u8> = row.iter().flat_map(|w| w.to_le_bytes()).collect();
                        assert_eq!(bytes, expected, "{} row {r}", tensor.name);
                    }
                    unpacked += 1;
                }
            }
        }
        assert!(packed > 5 && plain > 20 && unpacked > 5, "{packed} {plain} {unpacked}");
        // Every record says who it is and has the checksum of what it holds.
        let width = if model == SynthModel::KimiK3 { 128 } else { 256 };
        let mut record = Vec::new();
        for (&layer, bank) in waste.layers() {
            for expert in [0, bank.experts - 1] {
                let dims = ExpertDims { inter: 64, width };
                waste.read_expert(layer, expert, dims, true, &mut record).unwrap();
            }
        }
    }
}

#[test]
fn sizes_at_true_shape_are_known_without_writing() {
    let plan = |model: SynthModel, options: SynthOptions| {
        let trunk = TrunkCodec::Q4;
        Synth::new(model.config(), &SynthOptions { trunk, ..options }).unwrap()
    };
    let whole = SynthOptions::default();
    let k3 = plan(SynthModel::KimiK3, whole);
    assert_eq!(k3.n_experts(), 82_432);
    // 17,547,264 bytes of weights, a header, and padding to 16 KiB.
    assert_eq!(k3.record_bytes(), 17_563_648);
    let linear = SynthOptions { layers: Some(10), experts: ExpertCodec::Q4, ..whole };
    let linear = plan(SynthModel::KimiLinear48b, linear);
    assert_eq!((linear.n_experts(), linear.record_bytes()), (2304, 3_653_632));
    let published = plan(SynthModel::KimiLinear48b, whole);
    assert_eq!((published.n_experts(), published.record_bytes()), (6656, 14_172_160));
    // The sizes that the format's own converter arrives at.
    let waste = SynthOptions { format: SynthFormat::Waste, ..whole };
    assert_eq!(plan(SynthModel::KimiK3, waste).record_bytes(), 12_406_784);
    let ten = plan(SynthModel::KimiLinear48b, SynthOptions { layers: Some(10), ..waste });
    assert_eq!(ten.record_bytes(), 2_666_496);
    println!("Kimi-Linear, 10 layers: {} and {}", linear.container_bytes(), ten.container_bytes());
    assert!((7_000_000_000..8_000_000_000).contains(&ten.container_bytes()));
    assert!((9_000_000_000..10_000_000_000).contains(&linear.container_bytes()));
}

/// Real rows take 3.62.
#[test]
fn an_entropy_coded_expert_of_true_shape_takes_about_as_much_as_a_real_one() {
    let options = SynthOptions {
        layers: Some(2),
        experts: ExpertCodec::Mxfp4z,
        trunk: TrunkCodec::Q4,
        ..SynthOptions::default()
    };
    let synth = Synth::new(SynthModel::KimiK3.config(), &options).unwrap();
    assert!(synth.varies());
    let weights = 3.0 * 3072.0 * 3584.0 * synth.n_experts() as f64;
    let bits = 8.0 * synth.expert_bytes() as f64 / weights;
    println!("{bits:.4} bits a weight, records of at most {}", synth.record_bytes());
    assert!((3.55..3.7).contains(&bits), "{bits}");
    assert!(synth.expert_bytes() <= synth.n_experts() * synth.record_bytes());
}

#[test]
fn a_model_cut_to_any_layers_is_one_that_the_engine_reads() {
    for (model, most) in [(SynthModel::KimiK3, 93), (SynthModel::KimiLinear48b, 27)] {
        for layers in 2..=most {
            let options = SynthOptions { layers: Some(layers), ..SynthOptions::default() };
            let synth = Synth::new(model.config(), &options).unwrap();
            let config = rill::config::ModelConfig::from_json(synth.config_json()).unwrap();
            assert_eq!(config.layers.len(), layers as usize);
        }
    }
}

#[test]
fn a_full_folder_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    let synth = Synth::new(&small(SynthModel::KimiK3), &options(SynthFormat::Rill)).unwrap();
    let control = Control { jobs: 1, progress: &go_on };
    let error = synth.write(dir.path(), &control).unwrap_err();
    assert!(matches!(error, ConvertError::NotEmpty { .. }), "{error}");
    assert_eq!(files(dir.path()).len(), 1);
    let inside = dir.path().join("new");
    synth.write(&inside, &control).unwrap();
    let before = files(&inside);
    let error = synth.write(&inside, &control).unwrap_err();
    assert!(matches!(error, ConvertError::Exists { .. }), "{error}");
    assert_eq!(files(&inside), before);
}

#[test]
fn stopped_in_the_middle_it_is_no_container() {
    for format in FORMATS {
        let dir = tempfile::tempdir().unwrap();
        let synth = Synth::new(&small(SynthModel::KimiLinear48b), &options(format)).unwrap();
        let done = AtomicUsize::new(0);
        let progress = |p: Progress| {
            assert!(p.done_bytes <= p.total_bytes);
            match done.fetch_add(1, Ordering::Relaxed) {
                100.. => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        let error = synth.write(dir.path(), &Control { jobs: 2, progress: &progress });
        assert!(matches!(error, Err(ConvertError::Cancelled)));
        assert!(!dir.path().join(MANIFEST).exists());
        let control = Control { jobs: 1, progress: &go_on };
        let error = synth.write(dir.path(), &control).unwrap_err();
        assert!(matches!(error, ConvertError::NotEmpty { .. }), "{error}");
    }
}

#[test]
fn a_drive_that_is_too_small_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    // 4 EB: more and larger experts than any drive holds.
    let mut config: Value = serde_json::from_slice(SynthModel::KimiK3.config()).unwrap();
    config["text_config"]["num_experts"] = 65_536.into();
    config["text_config"]["moe_intermediate_size"] = 131_072.into();
    let config = serde_json::to_vec(&config).unwrap();
    let synth = Synth::new(&config, &SynthOptions::default()).unwrap();
    let error = synth.write(dir.path(), &Control { jobs: 1, progress: &go_on });
    if cfg!(unix) {
        assert!(matches!(error, Err(ConvertError::NoSpace { .. })), "{error:?}");
        assert_eq!(files(dir.path()).len(), 0);
    }
}

#[test]
fn its_vocabulary_reads_text_and_asks_questions() {
    for format in FORMATS {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::Disk(dir.path().to_owned());
        let mut config: Value = serde_json::from_slice(&small(SynthModel::KimiK3)).unwrap();
        // The published vocabulary.
        let published: Value = serde_json::from_slice(SynthModel::KimiK3.config()).unwrap();
        for key in ["bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"] {
            config["text_config"][key] = published["text_config"][key].clone();
            if key != "vocab_size" {
                config[key] = published[key].clone();
            }
        }
        let config = serde_json::to_vec(&config).unwrap();
        let synth = Synth::new(&config, &SynthOptions { layers: Some(2), ..options(format) });
        synth.unwrap().write(dir.path(), &Control { jobs: 2, progress: &go_on }).unwrap();
        let tokenizer =
            Engine::open(folder, &EngineOptions::default()).unwrap().open_tokenizer().unwrap();
        assert_eq!((tokenizer.n_ranks(), tokenizer.vocab_size()), (163_584, 163_840));
        let text = "The quick brown fox jumps over the lazy dog; größer als 1,024 – 你好.";
        let ids = tokenizer.encode_text(text);
        assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes());
        assert!(ids.len() < 3 * text.len() / 4, "words are put together: {ids:?}");
        let chat = rill::chat::ChatFormat::detect(&tokenizer).expect("it has the names");
        let question = chat.render_question(&tokenizer, "Why?", true).unwrap();
        assert!(question.iter().any(|&id| tokenizer.is_special(id)));
        for (name, id) in [("<|end_of_msg|>", 163_586), ("<|media_pad|>", 163_605)] {
            assert_eq!(tokenizer.special_id(name), Some(id), "{name}");
        }
    }
}
