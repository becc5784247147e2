//! `rill info` and `rill selftest`.

use std::fs;

use serde_json::Value;

use crate::common::{args, repository, rill};

#[test]
fn the_demo_model_is_described_in_words() {
    let text = rill(["info"]).done();
    for part in [
        "built-in k3-nano\n",
        "Kimi K3, attention residuals over blocks of 4, SiTU",
        "13 (9 KDA, 4 MLA; 1 dense, 12 mixture of experts)",
        "hidden size    128, vocabulary 4096, context 1048576",
        "64 per layer, 4 used and 2 shared, on a latent of 64, stored as mxfp4",
        "12.63 million in all",
        "4948 tensors and 2 shards",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
}

#[test]
fn a_checkpoint_on_disk_is_described_like_the_built_in_one() {
    let path = repository("models/k3-nano");
    let (built_in, on_disk) = (rill(["info"]).done(), rill(args!["info", &path]).done());
    let (name, facts) = on_disk.split_once('\n').unwrap();
    assert_eq!(name, path.display().to_string());
    assert_eq!(facts, built_in.split_once('\n').unwrap().1);
    let json = rill(["info", "--json"]).done();
    assert_eq!(rill(args!["info", "--json", path]).done(), json);
}

#[test]
fn json_has_every_fact() {
    let facts = |path: &str| -> Value {
        let text = rill(args!["info", "--json", repository(path)]).done();
        serde_json::from_str(&text).unwrap()
    };
    let k3 = facts("fixtures/k3-tiny");
    let linear = facts("fixtures/kimi-linear-tiny");
    for (key, expected_k3, expected_linear) in [
        ("architecture", Value::from("Kimi K3"), Value::from("Kimi-Linear")),
        ("hidden_size", 96.into(), 96.into()),
        ("vocab_size", 512.into(), 512.into()),
        ("layers", 9.into(), 5.into()),
        ("kda_layers", 6.into(), 3.into()),
        ("mla_layers", 3.into(), 2.into()),
        ("dense_layers", 1.into(), 1.into()),
        ("moe_layers", 8.into(), 4.into()),
        ("n_experts", 12.into(), 10.into()),
        ("top_k", 4.into(), 3.into()),
        ("n_shared_experts", 2.into(), 1.into()),
        ("expert_format", "mxfp4".into(), "bf16".into()),
        ("max_position_embeddings", 4096.into(), 4096.into()),
        ("shards", 3.into(), 2.into()),
        ("tensors", 834.into(), 211.into()),
        // The vision tower is not part of the text model.
        ("bound_tensors", 810.into(), 211.into()),
        // 4 of 12 experts of 3 × 96 × 64 elements in 8 layers, 17 bytes for 32 elements; and
        // 3 of 10 experts of 3 × 96 × 64 bf16 in 4 layers.
        ("expert_bytes_per_token", 313_344.into(), 442_368.into()),
    ] {
        assert_eq!(k3[key], expected_k3, "k3-tiny {key}");
        assert_eq!(linear[key], expected_linear, "kimi-linear-tiny {key}");
    }
    for (path, facts) in [("fixtures/k3-tiny", &k3), ("fixtures/kimi-linear-tiny", &linear)] {
        let config = fs::read(repository(path).join("config.json")).unwrap();
        let tensors = rill_testkit::tensors(&serde_json::from_slice(&config).unwrap());
        // A packed byte is two parameters, a scale is none.
        let parameters = |tensor: &rill_testkit::Tensor| match &tensor.name {
            name if name.ends_with("_packed") => 2 * tensor.bytes(),
            name if name.ends_with("_scale") => 0,
            _ => tensor.shape.iter().product(),
        };
        let all: u64 = tensors.iter().map(parameters).sum();
        assert_eq!(facts["parameters"], all, "{path}");
        let not_used = |tensor: &&rill_testkit::Tensor| {
            ["vision_tower.", "mm_projector."].iter().any(|part| tensor.name.starts_with(part))
                || tensor.name.ends_with("embed_tokens.weight")
        };
        let not_used: u64 = tensors.iter().filter(not_used).map(parameters).sum();
        let experts = tensors.iter().filter(|t| t.name.contains(".experts."));
        let experts: u64 = experts.map(parameters).sum();
        let (top_k, n_experts) =
            (facts["top_k"].as_u64().unwrap(), facts["n_experts"].as_u64().unwrap());
        let active = all - not_used - experts + experts * top_k / n_experts;
        assert_eq!(facts["active_parameters"], active, "{path}");
        let bytes: u64 = tensors.iter().map(rill_testkit::Tensor::bytes).sum();
        assert_eq!(facts["payload_bytes"], bytes, "{path}");
        let trunk = facts["trunk_bytes"].as_u64().unwrap();
        assert!(trunk > 0 && trunk < bytes, "{path}: {trunk}");
        assert!(facts["session_bytes"].as_u64().unwrap() > 0, "{path}");
    }
}

/// Not on Windows, where growing a file reserves its disk space.
#[cfg(not(windows))]
#[test]
fn a_checkpoint_of_kimi_k3s_size_is_described_from_its_headers() {
    let folder = tempfile::tempdir().unwrap();
    let config = repository("fixtures/configs/kimi-k3.json");
    fs::copy(config, folder.path().join("config.json")).unwrap();
    let tensors = rill_testkit::kimi_k3_tensors();
    rill_testkit::write_header_only(folder.path(), &tensors, 96).unwrap();

    let text = rill(args!["info", folder.path()]).done();
    for part in [
        "93 (69 KDA, 24 MLA; 1 dense, 92 mixture of experts)",
        "896 per layer, 16 used and 2 shared, on a latent of 3584, stored as mxfp4",
        "2.78 trillion in all",
        "1.56 TB in 497220 tensors and 96 shards",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
}

#[test]
fn the_selftest_passes_check_by_check() {
    let text = rill(["selftest"]).done();
    let lines: Vec<&str> = text.lines().collect();
    let [checks @ .., summary] = &lines[..] else { panic!("no output") };
    assert_eq!(*summary, "all 5 checks passed");
    assert_eq!(checks.len(), 5);
    assert!(checks.iter().all(|line| line.starts_with("ok   ")), "{text}");
    for name in ["k3-nano", "k3-tiny", "kimi-linear-tiny", "The capital of Italy is Rome."] {
        assert!(text.contains(name), "{text}");
    }
}

#[test]
fn the_selftest_needs_no_files_and_leaves_none() {
    let elsewhere = tempfile::tempdir().unwrap();
    let mut command = crate::common::command(["selftest", "--threads", "1"]);
    crate::common::ended(command.env_clear().current_dir(&elsewhere)).done();
    assert_eq!(fs::read_dir(elsewhere).unwrap().count(), 0);
}
