//! `config.json`: what the published and the small configurations say, and what broken ones get told.

use std::path::Path;

use proptest::prelude::*;
use rill::config::{
    Activation, Architecture, AttentionKind, ConfigError, DecayGate, ExpertFormat, FfnKind,
    KdaConfig, KdaOutputGate, LatentMoe, MlaConfig, ModelConfig, MoeConfig,
};
use serde_json::Value;

const K3: &str = "fixtures/configs/kimi-k3.json";
const LINEAR: &str = "fixtures/configs/kimi-linear-48b.json";

fn read(path: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn parse(path: &str) -> ModelConfig {
    ModelConfig::from_json(&read(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn tree(path: &str) -> Value {
    serde_json::from_slice(&read(path)).expect("the fixtures are JSON")
}

/// One-based MLA layers, as the file lists them.
fn mla_layers(config: &ModelConfig) -> Vec<usize> {
    let is_mla = |layer: &usize| config.layers[layer - 1].attention == AttentionKind::Mla;
    (1..=config.layers.len()).filter(is_mla).collect()
}

fn n_dense(config: &ModelConfig) -> usize {
    config.layers.iter().take_while(|layer| layer.ffn == FfnKind::Dense).count()
}

#[test]
fn kimi_k3_parses_to_the_published_numbers() {
    let config = parse(K3);
    let full: Vec<usize> = (1..=23).map(|i| 4 * i).chain([93]).collect();
    assert_eq!(mla_layers(&config), full);
    assert_eq!(n_dense(&config), 1);
    let expected = ModelConfig {
        architecture: Architecture::KimiK3,
        hidden_size: 7168,
        vocab_size: 163840,
        rms_norm_eps: 1e-5,
        max_position_embeddings: 1048576,
        bos_token_id: 163584,
        eos_token_id: 163586,
        pad_token_id: 163839,
        layers: config.layers.clone(),
        kda: KdaConfig {
            n_heads: 96,
            head_dim: 128,
            conv_kernel_size: 4,
            decay_gate: DecayGate::Bounded { lower_bound: -5.0 },
            output_gate: KdaOutputGate::FullRank,
        },
        mla: MlaConfig {
            n_heads: 96,
            q_lora_rank: Some(1536),
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            output_gate: true,
        },
        dense_intermediate_size: 33792,
        moe: MoeConfig {
            n_experts: 896,
            top_k: 16,
            n_shared_experts: 2,
            intermediate_size: 3072,
            latent: Some(LatentMoe { size: 3584, norm: true }),
            routed_scaling_factor: 1.0,
            renormalize: true,
            expert_format: ExpertFormat::Mxfp4,
        },
        activation: Activation::Situ { beta: 4.0, linear_beta: 25.0 },
        attn_res_block_size: Some(12),
    };
    assert_eq!(config, expected);
    assert_eq!(config.layers.len(), 93);
}

#[test]
fn kimi_linear_parses_to_the_published_numbers() {
    let config = parse(LINEAR);
    assert_eq!(mla_layers(&config), [4, 8, 12, 16, 20, 24, 27]);
    assert_eq!(n_dense(&config), 1);
    let expected = ModelConfig {
        architecture: Architecture::KimiLinear,
        hidden_size: 2304,
        vocab_size: 163840,
        rms_norm_eps: 1e-5,
        max_position_embeddings: 1048576,
        bos_token_id: 163584,
        eos_token_id: 163586,
        pad_token_id: 163839,
        layers: config.layers.clone(),
        kda: KdaConfig {
            n_heads: 32,
            head_dim: 128,
            conv_kernel_size: 4,
            decay_gate: DecayGate::Unbounded,
            output_gate: KdaOutputGate::LowRank,
        },
        mla: MlaConfig {
            n_heads: 32,
            q_lora_rank: None,
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            output_gate: false,
        },
        dense_intermediate_size: 9216,
        moe: MoeConfig {
            n_experts: 256,
            top_k: 8,
            n_shared_experts: 1,
            intermediate_size: 1024,
            latent: None,
            routed_scaling_factor: 2.446,
            renormalize: true,
            expert_format: ExpertFormat::Bf16,
        },
        activation: Activation::Silu,
        attn_res_block_size: None,
    };
    assert_eq!(config, expected);
    assert_eq!(config.layers.len(), 27);
}

#[test]
fn small_checkpoints_parse_to_their_own_numbers() {
    let nano = parse("models/k3-nano/config.json");
    assert_eq!((nano.layers.len(), nano.hidden_size, nano.vocab_size), (13, 128, 4096));
    assert_eq!(mla_layers(&nano), [4, 8, 12, 13]);
    assert_eq!((nano.kda.n_heads, nano.kda.head_dim), (4, 32));
    assert_eq!(
        (nano.mla.q_lora_rank, nano.mla.kv_lora_rank, nano.mla.v_head_dim),
        (Some(64), 32, 32)
    );
    assert_eq!((nano.moe.n_experts, nano.moe.top_k, nano.moe.intermediate_size), (64, 4, 64));
    assert_eq!(nano.moe.latent, Some(LatentMoe { size: 64, norm: true }));
    assert_eq!(nano.attn_res_block_size, Some(4));
    assert_eq!((nano.bos_token_id, nano.eos_token_id, nano.pad_token_id), (3840, 3842, 4095));

    let k3 = parse("fixtures/k3-tiny/config.json");
    assert_eq!((k3.layers.len(), k3.hidden_size, k3.vocab_size), (9, 96, 512));
    assert_eq!(mla_layers(&k3), [4, 8, 9]);
    assert_eq!((k3.kda.n_heads, k3.mla.n_heads, k3.mla.q_lora_rank), (3, 4, Some(40)));
    assert_eq!((k3.mla.qk_nope_head_dim, k3.mla.qk_rope_head_dim, k3.mla.v_head_dim), (24, 8, 16));
    assert_eq!(
        (k3.moe.n_experts, k3.moe.top_k, k3.moe.expert_format),
        (12, 4, ExpertFormat::Mxfp4)
    );
    assert_eq!(k3.max_position_embeddings, 4096);

    let linear = parse("fixtures/kimi-linear-tiny/config.json");
    assert_eq!((linear.layers.len(), linear.hidden_size, linear.vocab_size), (5, 96, 512));
    assert_eq!(mla_layers(&linear), [3, 5]);
    assert_eq!((linear.kda.n_heads, linear.mla.n_heads, linear.mla.q_lora_rank), (3, 3, None));
    assert_eq!(
        (linear.moe.n_experts, linear.moe.top_k, linear.moe.expert_format),
        (10, 3, ExpertFormat::Bf16)
    );
    assert_eq!(linear.max_position_embeddings, 4096);
}

/// Replaces, or with `None` deletes, the value at a dotted path. The replacement is raw text, so
/// that it can be a number no JSON library would write.
fn edit(tree: &mut Value, edits: &[(&str, Option<&str>)]) -> String {
    for (i, (path, replacement)) in edits.iter().enumerate() {
        let (parent, key) = path.rsplit_once('.').unwrap_or(("", path));
        let pointer: String = parent.split_terminator('.').map(|part| format!("/{part}")).collect();
        let parent = tree.pointer_mut(&pointer).and_then(Value::as_object_mut);
        let parent = parent.expect("the edited object exists");
        match replacement {
            Some(_) => parent.insert(key.to_owned(), Value::String(format!("@{i}@"))),
            None => Some(parent.remove(key).expect("the path exists")),
        };
    }
    let mut text = tree.to_string();
    for (i, (_, replacement)) in edits.iter().enumerate() {
        text = text.replace(&format!("\"@{i}@\""), replacement.unwrap_or_default());
    }
    text
}

fn refused(text: &str) -> ConfigError {
    ModelConfig::from_json(text.as_bytes()).expect_err("a broken file was accepted")
}

fn problems_of(error: &ConfigError) -> Vec<(&str, &str)> {
    error.problems().iter().map(|p| (p.field.as_str(), p.message.as_str())).collect()
}

#[test]
fn each_broken_field_is_named_with_what_was_expected_and_found() {
    // (file, field, its new value, what the message must hold): exactly one problem each.
    #[rustfmt::skip] // one case a line
    let cases: &[(&str, &str, &str, &str)] = &[
        // Wrong types.
        (K3, "text_config.hidden_size", "\"7168\"", "integer from 1 to 131072, found the string \"7168\""),
        (K3, "text_config.hidden_size", "7168.0", "expected an integer from 1 to 131072, found 7168.0"),
        (K3, "text_config.kv_lora_rank", "-512", "expected an integer from 1 to 131072, found -512"),
        (K3, "text_config.num_attention_heads", "null", "expected an integer from 1 to 4096, found null"),
        (K3, "text_config.v_head_dim", "1e400", "expected an integer from 1 to 4096, found 1e400"),
        (K3, "text_config.rms_norm_eps", "1e400", "expected a finite positive number within f32, found 1e400"),
        (K3, "text_config.rms_norm_eps", "1e39", "expected a finite positive number within f32, found 1e39"),
        (K3, "text_config.rms_norm_eps", "1e-60", "expected a finite positive number within f32, found 1e-60"),
        (K3, "text_config.rms_norm_eps", "\"1e-5\"", "found the string \"1e-5\""),
        (K3, "text_config.moe_renormalize", "1", "expected true or false, found 1"),
        (K3, "text_config.mla_use_output_gate", "\"true\"", "expected true or false, found the string"),
        (K3, "text_config.hidden_act", "7", "expected \"silu\" or \"situ\", found 7"),
        (K3, "text_config.linear_attn_config.kda_layers", "{}", "expected a list, found an object"),
        (K3, "text_config.linear_attn_config", "[]", "expected an object, found a list"),
        (K3, "text_config", "null", "expected an object, found null"),
        (K3, "architectures", "\"KimiK3ForConditionalGeneration\"", "expected a list, found the string"),
        (LINEAR, "q_lora_rank", "false", "expected an integer from 1 to 131072, or null, found false"),
        // Absurd sizes.
        (K3, "text_config.hidden_size", "131104", "found 131104"),
        (K3, "text_config.num_hidden_layers", "1025", "expected an integer from 1 to 1024, found 1025"),
        (LINEAR, "num_experts", "99999999999999999999999999", "found 99999999999999999999999999"),
        (LINEAR, "vocab_size", "18446744073709551616", "expected an integer from 1 to 2097152"),
        (LINEAR, "first_k_dense_replace", "4294967297", "expected an integer from 0 to 1024"),
        (LINEAR, "linear_attn_config.num_heads", "0", "expected an integer from 1 to 4096, found 0"),
        (LINEAR, "linear_attn_config.head_dim", "0", "expected an integer from 1 to 4096, found 0"),
        (K3, "text_config.moe_intermediate_size", "1048576", "num_shared_experts · moe_intermediate_size to be at most 1048576"),
        (LINEAR, "num_shared_experts", "257", "expected an integer from 1 to 256, found 257"),
        (K3, "text_config.max_position_embeddings", "1073741825", "expected an integer from 1 to 1073741824"),
        // Contradictions.
        (K3, "text_config.num_key_value_heads", "8", "expected num_attention_heads = 96, found 8"),
        (K3, "text_config.num_expert_group", "8", "expected 1 (experts are not routed in groups), found 8"),
        (K3, "text_config.topk_group", "4", "expected 1 (experts are not routed in groups), found 4"),
        (K3, "text_config.topk_method", "\"greedy\"", "expected \"noaux_tc\", found the string \"greedy\""),
        (K3, "text_config.moe_layer_freq", "2", "expected 1 (every layer after the dense ones"),
        (K3, "text_config.moe_router_activation_func", "\"softmax\"", "expected \"sigmoid\", found"),
        (K3, "text_config.mla_use_nope", "false", "expected true (rotary positions are not computed)"),
        (LINEAR, "tie_word_embeddings", "true", "expected false (the head has weights of its own)"),
        (K3, "tie_word_embeddings", "true", "expected false (the head has weights of its own)"),
        (LINEAR, "num_nextn_predict_layers", "1", "expected 0 (draft heads are not run), found 1"),
        (LINEAR, "num_experts_per_token", "257", "expected at most num_experts = 256, found 257"),
        (LINEAR, "first_k_dense_replace", "28", "expected at most num_hidden_layers = 27, found 28"),
        (LINEAR, "eos_token_id", "163840", "expected an id below vocab_size = 163840, found 163840"),
        (LINEAR, "eos_token_id", "[163586]", "expected an integer from 0 to 2097151, found a list"),
        (K3, "text_config.pad_token_id", "0", "is 0, but the outer pad_token_id is 163839"),
        (LINEAR, "max_position_embeddings", "4096", ""),
        (LINEAR, "linear_attn_config.short_conv_kernel_size", "65", "expected an integer from 1 to 64, found 65"),
        (K3, "text_config.linear_attn_config.gate_lower_bound", "0.0", "expected a finite negative number"),
        (K3, "text_config.linear_attn_config.gate_lower_bound", "-1e400", "expected a finite negative number"),
        (K3, "text_config.linear_attn_config.gate_lower_bound", "null", "a finite negative number within f32, found null"),
        (K3, "text_config.activation_situ_beta", "-4.0", "expected a finite positive number"),
        (LINEAR, "activation_situ_beta", "4.0", "expected only with hidden_act \"situ\""),
        (LINEAR, "latent_moe_use_norm", "true", "expected only beside routed_expert_hidden_size"),
        (LINEAR, "routed_scaling_factor", "0", "expected a finite positive number"),
        (LINEAR, "dtype", "\"float16\"", "expected \"bfloat16\", found the string \"float16\""),
        (K3, "text_config.torch_dtype", "\"float32\"", "expected \"bfloat16\""),
        (K3, "text_config.attn_res_block_size", "0", "expected an integer from 1 to 1024, found 0"),
        // Layer lists.
        (LINEAR, "linear_attn_config.full_attn_layers", "[0,4,8,12,16,20,24,27]", "one-based layers from 1 to 27, found 0 as entry 1"),
        (LINEAR, "linear_attn_config.full_attn_layers", "[4,8,12,16,20,24,28]", "from 1 to 27, found 28 as entry 7"),
        (LINEAR, "linear_attn_config.full_attn_layers", "[4,\"8\",1.5]", "found the string \"8\" as entry 2, 1.5 as entry 3"),
        (LINEAR, "linear_attn_config.full_attn_layers", "[4,8,12,16,20,24,24,27]", "expected each layer once, found 24 again"),
        // Quantisation.
        (K3, "text_config.quantization_config.format", "\"int-quantized\"", "expected \"mxfp4-pack-quantized\""),
        (K3, "text_config.quantization_config.quant_method", "\"fp8\"", "expected \"compressed-tensors\""),
        (K3, "text_config.quantization_config.config_groups.group_0.weights.num_bits", "8", "expected 4"),
        (K3, "text_config.quantization_config.config_groups.group_0.weights.group_size", "16", "expected 32"),
        (K3, "text_config.quantization_config.config_groups.group_0.weights.type", "\"int\"", "expected \"float\""),
        (K3, "text_config.quantization_config.config_groups", "{}", ""),
        (K3, "text_config.routed_expert_hidden_size", "3600", "expected a multiple of 32 (one MXFP4 scale), found 3600"),
        (K3, "text_config.moe_intermediate_size", "3080", "expected a multiple of 32"),
        (K3, "quantization_config", "{}", "expected under text_config"),
        // Identity.
        (LINEAR, "model_type", "\"llama\"", "expected \"kimi_linear\" in a file without text_config, found \"llama\""),
        (K3, "model_type", "\"kimi_linear\"", "expected \"kimi_k3\" in a file with text_config"),
        (K3, "architectures", "[\"KimiLinearForCausalLM\"]", "expected [\"KimiK3ForConditionalGeneration\"]"),
        (LINEAR, "architectures", "[]", "expected [\"KimiLinearForCausalLM\"]"),
        (K3, "text_config.model_type", "\"deepseek_v3\"", "expected \"kimi_linear\""),
    ];
    for (file, field, value, message) in cases {
        let text = edit(&mut tree(file), &[(field, Some(value))]);
        let Err(error) = ModelConfig::from_json(text.as_bytes()) else {
            panic!("{field} = {value} was accepted");
        };
        let problems = problems_of(&error);
        // Two edits surface at another field than the one that was edited.
        let (field, message) = match *field {
            "max_position_embeddings" => {
                ("model_max_length", "is 1048576, but max_position_embeddings is 4096")
            }
            "text_config.quantization_config.config_groups" => {
                ("text_config.quantization_config.config_groups.group_0", "is required, but absent")
            }
            field => (field, *message),
        };
        assert_eq!(problems.len(), 1, "{field} = {value}: {problems:?}");
        assert_eq!(problems[0].0, field, "{value}");
        assert!(problems[0].1.contains(message), "{field} = {value}: {}", problems[0].1);
    }
}

#[test]
fn heads_times_head_width_is_bounded_too() {
    let field = "linear_attn_config.num_heads";
    let edits = [(field, Some("4096")), ("linear_attn_config.head_dim", Some("4096"))];
    let error = refused(&edit(&mut tree(LINEAR), &edits));
    let message = "expected num_heads · head_dim to be at most 1048576, found 4096 · 4096";
    assert_eq!(problems_of(&error), [(field, message)]);
}

#[test]
fn layers_in_both_lists_or_in_neither_are_named() {
    let edits = [
        ("linear_attn_config.full_attn_layers", Some("[3,4,8,12,16,20,24]")),
        ("linear_attn_config.kda_layers", Some("[1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21]")),
    ];
    let error = refused(&edit(&mut tree(LINEAR), &edits));
    let field = "linear_attn_config.kda_layers";
    let both = "expected no layer that is also in full_attn_layers, found 3";
    let neither = "expected every layer here or in full_attn_layers, missing 22, 23, 25, 26, 27";
    assert_eq!(problems_of(&error), [(field, both), (field, neither)]);
}

#[test]
fn lists_with_many_faults_name_the_first_eight() {
    let field = "linear_attn_config.full_attn_layers";
    let error = refused(&edit(&mut tree(LINEAR), &[(field, Some("[4,8,12,16,20,24,27,0,0,4,8]"))]));
    let range = "expected one-based layers from 1 to 27, found 0 as entry 8, 0 as entry 9";
    let again = "expected each layer once, found 4, 8 again";
    assert_eq!(problems_of(&error), [(field, range), (field, again)]);
    let error = refused(&edit(
        &mut tree(LINEAR),
        &[(field, Some("[]")), ("num_hidden_layers", Some("31"))],
    ));
    let missing = "missing 4, 8, 12, 16, 20, 24, 27, 28 and 3 more";
    assert_eq!(error.problems().len(), 1);
    assert!(error.problems()[0].message.ends_with(missing), "{error}");
}

#[test]
fn absurdly_long_layer_lists_are_refused_by_count() {
    let list = format!("[{}1]", "1,".repeat(100_000));
    let field = "linear_attn_config.kda_layers";
    let error = refused(&edit(&mut tree(LINEAR), &[(field, Some(&list))]));
    assert_eq!(problems_of(&error), [(field, "expected at most 1024 layers, found 100001")]);
}

#[test]
fn bf16_experts_need_no_multiple_of_32_and_mxfp4_experts_on_the_hidden_state_do() {
    let mut tree = tree(LINEAR);
    assert!(
        ModelConfig::from_json(edit(&mut tree, &[("hidden_size", Some("2300"))]).as_bytes())
            .is_ok()
    );
    let quantization = r#"{"format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}"#;
    let edits = [("hidden_size", Some("2300")), ("quantization_config", Some(quantization))];
    let error = refused(&edit(&mut tree, &edits));
    let message = "expected a multiple of 32 (one MXFP4 scale), found 2300";
    assert_eq!(problems_of(&error), [("hidden_size", message)]);
}

#[test]
fn five_faults_are_reported_together_and_the_message_ends_with_what_to_do() {
    let edits = [
        ("text_config.hidden_size", Some("\"wide\"")),
        ("text_config.linear_attn_config.num_heads", None),
        ("text_config.num_experts_per_token", Some("897")),
        ("text_config.quantization_config.format", Some("\"int4\"")),
        ("eos_token_id", Some("-1")),
    ];
    let error = refused(&edit(&mut tree(K3), &edits));
    let mut fields: Vec<&str> = error.problems().iter().map(|p| p.field.as_str()).collect();
    let mut expected: Vec<&str> = edits.iter().map(|(field, _)| *field).collect();
    fields.sort_unstable();
    expected.sort_unstable();
    assert_eq!(fields, expected);
    let text = error.to_string();
    assert!(
        text.starts_with("config.json has 5 problems:\n  1. text_config.hidden_size: "),
        "{text}"
    );
    let lines = text.lines().count();
    assert_eq!(lines, 7, "{text}");
    assert!(
        text.lines().last().unwrap().starts_with("Correct the file, or fetch it again"),
        "{text}"
    );
}

#[test]
fn files_that_are_no_json_object_are_one_problem_with_line_and_column() {
    let deep = format!("{{\"a\":\n{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let shallow_again = format!("{{\n \"[[[[\": \"{}\\\"\", \"x\": 1,}}", "[".repeat(100));
    let cases: &[(&[u8], &str)] = &[
        (b"", "line 1 column 0"),
        (b"\n {\"a\": 1", "line 2 column 8"),
        (b"{\"a\": 1}\n}", "line 2 column 1"),
        (b"{\"a\": NaN}", "line 1 column 7"),
        (b"{\"a\": 01}", "line 1 column 8"),
        (b"{\"a\": \"\xff\"}", "line 1 column"),
        (b"[1, 2]", "expected a JSON object, found another value at line 1, column 1"),
        (b"\n\n  \"kimi\"", "expected a JSON object, found another value at line 3, column"),
        (
            deep.as_bytes(),
            "expected at most 32 nested objects and lists, found more at line 2, column 32",
        ),
        (shallow_again.as_bytes(), "line 2 column 123"),
    ];
    for (bytes, message) in cases {
        let name = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
        let error = ModelConfig::from_json(bytes).expect_err(&name);
        let problems = problems_of(&error);
        assert_eq!(problems.len(), 1, "{name}: {problems:?}");
        assert_eq!(problems[0].0, "", "{name}");
        assert!(problems[0].1.contains(message), "{name}: {}", problems[0].1);
    }
}

#[test]
fn file_larger_than_any_configuration_is_refused() {
    let mut bytes = read(K3);
    bytes.resize((1 << 20) + 1, b' ');
    let error = ModelConfig::from_json(&bytes).expect_err("too large");
    assert_eq!(problems_of(&error), [("", "expected at most 1048576 bytes, found 1048577")]);
    bytes.truncate(1 << 20);
    assert!(ModelConfig::from_json(&bytes).is_ok());
}

#[test]
fn repeated_field_is_refused_and_repeated_unknown_key_is_ignored() {
    let text = String::from_utf8(read(LINEAR)).unwrap();
    let error = refused(&text.replacen('{', "{\"hidden_size\": 64,", 1));
    assert_eq!(error.problems().len(), 1);
    assert_eq!(error.problems()[0].field, "hidden_size");
    let ignored = text.replacen('{', "{\"note\": 1, \"note\": [1e400, \"\\ud800\"],", 1);
    assert!(ModelConfig::from_json(ignored.as_bytes()).is_ok());
}

#[test]
fn kimi_k3_without_its_text_model_asks_for_just_that() {
    let error = refused(&edit(&mut tree(K3), &[("text_config", None)]));
    assert_eq!(problems_of(&error), [("text_config", "is required, but absent")]);
}

#[test]
fn token_ids_are_taken_from_whichever_level_has_them() {
    let inner = [("text_config.eos_token_id", None)];
    let outer = [("eos_token_id", None)];
    for edits in [inner, outer] {
        let text = edit(&mut tree(K3), &edits);
        assert_eq!(ModelConfig::from_json(text.as_bytes()), Ok(parse(K3)));
    }
    let error = refused(&edit(&mut tree(K3), &[inner[0], outer[0]]));
    assert_eq!(problems_of(&error), [("text_config.eos_token_id", "is required, but absent")]);
}

#[test]
fn quoted_values_are_short_and_safe_to_print() {
    let value = format!("\"\u{9b}{}\"", "é".repeat(1000));
    let error = refused(&edit(&mut tree(LINEAR), &[("hidden_act", Some(&value))]));
    let message = &error.problems()[0].message;
    assert!(message.ends_with("ééé…") && message.chars().count() < 100, "{message}");
    assert!(!message.contains('\u{9b}'), "{message}");
}

/// Dotted paths of every key of every object in the tree.
fn keys(tree: &Value, prefix: &str, out: &mut Vec<String>) {
    for (key, value) in tree.as_object().into_iter().flatten() {
        let path = format!("{prefix}{key}");
        keys(value, &format!("{path}."), out);
        out.push(path);
    }
}

#[test]
fn every_deleted_key_is_reported_by_name_unless_its_absence_means_something() {
    const MAY_BE_ABSENT: &[&str] = &[
        "dtype",
        "use_grouped_topk",
        "topk_method",
        "mla_use_output_gate",
        "gate_lower_bound",
        "use_full_rank_gate",
        "attn_res_block_size",
        "quantization_config",
        "quant_method",
        "group_0.format",
        "targets",
        "type",
        "media_placeholder_token_id",
        "vision_config",
    ];
    for file in [K3, LINEAR] {
        let mut paths = Vec::new();
        keys(&tree(file), "", &mut paths);
        assert!(paths.len() >= 30, "{file}");
        for path in paths {
            let text = edit(&mut tree(file), &[(&path, None)]);
            let result = ModelConfig::from_json(text.as_bytes());
            let absent_at_one_level = file == K3 && path.ends_with("_token_id");
            let has_meaning = MAY_BE_ABSENT.iter().any(|key| {
                path.strip_suffix(key).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            });
            if has_meaning || absent_at_one_level || path.starts_with("vision_config.") {
                assert!(result.is_ok(), "{path}: {}", result.unwrap_err());
                continue;
            }
            let error = result.expect_err(&path);
            let expected = match path.as_str() {
                // Absence means no latent, which the norm's flag then contradicts.
                "text_config.routed_expert_hidden_size" => "text_config.latent_moe_use_norm",
                path => path,
            };
            let fields: Vec<&str> = error.problems().iter().map(|p| p.field.as_str()).collect();
            assert_eq!(fields, [expected], "{path}");
        }
    }
}

#[test]
fn absent_optional_keys_mean_what_the_specification_says() {
    let edits = [
        ("text_config.linear_attn_config.gate_lower_bound", None),
        ("text_config.linear_attn_config.use_full_rank_gate", None),
        ("text_config.mla_use_output_gate", None),
        ("text_config.attn_res_block_size", None),
        ("text_config.routed_expert_hidden_size", None),
        ("text_config.latent_moe_use_norm", None),
        ("text_config.quantization_config", None),
        ("text_config.q_lora_rank", Some("null")),
    ];
    let text = edit(&mut tree(K3), &edits);
    let config = ModelConfig::from_json(text.as_bytes()).unwrap();
    assert_eq!(config.kda.decay_gate, DecayGate::Unbounded);
    assert_eq!(config.kda.output_gate, KdaOutputGate::LowRank);
    assert!(!config.mla.output_gate);
    assert_eq!(config.attn_res_block_size, None);
    assert_eq!(config.moe.latent, None);
    assert_eq!(config.moe.expert_format, ExpertFormat::Bf16);
    assert_eq!(config.mla.q_lora_rank, None);
}

/// A JSON value, absurd more often than not.
fn fragment() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0..200u64).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(".{0,8}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// The n-th value of a tree, counted modulo their number.
fn nth_value(tree: &mut Value, n: usize) -> &mut Value {
    fn pointers(tree: &Value, prefix: &str, out: &mut Vec<String>) {
        out.push(prefix.to_owned());
        let children: Vec<(String, &Value)> = match tree {
            Value::Array(list) => {
                list.iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect()
            }
            Value::Object(map) => {
                let escape = |key: &String| key.replace('~', "~0").replace('/', "~1");
                map.iter().map(|(key, v)| (escape(key), v)).collect()
            }
            _ => Vec::new(),
        };
        for (key, value) in children {
            pointers(value, &format!("{prefix}/{key}"), out);
        }
    }
    let mut all = Vec::new();
    pointers(tree, "", &mut all);
    tree.pointer_mut(&all[n % all.len()]).expect("the pointers were listed from this tree")
}

/// A parsed configuration keeps its promises; a refused one says why.
fn check(bytes: &[u8]) {
    match ModelConfig::from_json(bytes) {
        Ok(config) => {
            assert!((1..=1024).contains(&config.layers.len()));
            assert!(config.moe.top_k <= config.moe.n_experts);
            assert!((config.eos_token_id as usize) < config.vocab_size);
            assert!(config.rms_norm_eps > 0.0 && config.rms_norm_eps.is_finite());
            let latent = config.moe.latent.map_or(config.hidden_size, |latent| latent.size);
            assert!(config.moe.expert_format == ExpertFormat::Bf16 || latent % 32 == 0);
        }
        Err(error) => {
            assert!(!error.problems().is_empty());
            assert!(error.problems().iter().all(|problem| !problem.message.is_empty()));
        }
    }
}

proptest! {
    #[test]
    fn mutated_configurations_parse_soundly_or_say_why_not(
        file in prop_oneof![Just(K3), Just(LINEAR)],
        edits in prop::collection::vec((any::<usize>(), fragment()), 1..6),
    ) {
        let mut tree = tree(file);
        for (n, value) in edits {
            *nth_value(&mut tree, n) = value;
        }
        check(tree.to_string().as_bytes());
    }

    #[test]
    fn configurations_with_changed_bytes_parse_soundly_or_say_why_not(
        file in prop_oneof![Just(K3), Just(LINEAR)],
        edits in prop::collection::vec((any::<usize>(), any::<u8>()), 0..8),
        length in any::<usize>(),
    ) {
        let mut bytes = read(file);
        for (at, byte) in edits {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len().min(length % (2 * bytes.len())));
        check(&bytes);
    }
}
