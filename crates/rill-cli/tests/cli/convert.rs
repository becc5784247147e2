//! `rill convert`, `rill verify`, and containers wherever a model can be named.

use std::fs;
use std::path::{Path, PathBuf};

use rill_testkit::{tensors, write_uneven_experts};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{
    ANSWER, QUESTION, args, command, copy_of, ended, file, overwrite, repository, rill,
};
use crate::kills::{files, kill_and_resume};
use crate::mutations::{answer, mutate};

/// Kills in the middle, and damages, of one run of the tests; `.ci/soak` does more.
const KILLS: usize = 12;
const MUTATIONS: usize = 150;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_rill"))
}

/// A container of a model of the repository, in a folder of its own.
fn container(model: &str, options: &[&str]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("container");
    let mut args = args!["convert", repository(model), &path];
    args.extend(options.iter().map(Into::into));
    rill(args).done();
    (folder, path)
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_conversion_killed_at_random_moments_ends_with_the_same_bytes() {
    let source = repository("models/k3-nano");
    let kills = kill_and_resume(program(), &source, KILLS, 20, "q8", false).unwrap();
    println!("{kills:?}");
}

#[test]
fn a_conversion_that_deletes_its_source_is_survived_at_random_moments_too() {
    // Three shards; the demo has two.
    let source = repository("fixtures/k3-tiny");
    let kills = kill_and_resume(program(), &source, KILLS, 22, "q8", true).unwrap();
    println!("{kills:?}");
}

#[test]
fn records_that_differ_in_size_are_at_their_places_after_any_kill() {
    // Records of two to five units of 16 KiB, in three files of the source.
    let source = tempfile::tempdir().unwrap();
    write_uneven_experts(source.path(), &repository("fixtures/k3-tiny"), 3).unwrap();
    for (seed, reclaim) in [(24, false), (25, true)] {
        let kills = kill_and_resume(program(), source.path(), KILLS, seed, "mxfp4z", reclaim);
        println!("{:?}", kills.unwrap());
    }
}

#[test]
fn reclaim_says_what_it_would_delete_and_deletes_it() {
    let source = copy_of("models/k3-nano");
    let whole = files(source.path()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("new");
    let convert = |when: &str, trust: bool| {
        let mut args = args!["convert", source.path(), &to, "--reclaim", when];
        args.extend(trust.then_some("--trust-source").map(Into::into));
        rill(args)
    };
    for when in ["dry", "on"] {
        let message = convert(when, false).failed();
        assert!(message.contains("SHA256SUMS") && message.contains("--trust-source"), "{message}");
    }
    let text = convert("dry", true).done();
    let shards: Vec<&String> = whole.keys().filter(|name| name.contains("-of-")).collect();
    assert_eq!(shards.len(), 2);
    for shard in &shards {
        assert!(text.contains(*shard) && text.contains(" after "), "{text}");
    }
    assert!(text.ends_with("nothing was written or deleted\n"), "{text}");
    assert!(!to.exists() && files(source.path()).unwrap() == whole);

    let text = convert("on", true).done();
    assert!(text.contains("deleted 2 shards of "), "{text}");
    let left = files(source.path()).unwrap();
    assert!(shards.iter().all(|shard| !left.contains_key(*shard)));
    assert_eq!(left.len(), whole.len() - 2);
    let (_folder, expected) = container("models/k3-nano", &[]);
    assert!(files(&to).unwrap() == files(&expected).unwrap());
    // A second time there is nothing to do, and that is what it says.
    let message = convert("on", true).failed();
    assert!(message.contains("is a container already"), "{message}");
    let message = rill(args!["convert", &to, folder.path().join("x"), "--reclaim", "on"]).failed();
    assert!(message.contains("published checkpoints only"), "{message}");
}

#[test]
fn a_damaged_container_is_an_error_that_names_the_file_or_changes_nothing() {
    let source = repository("fixtures/k3-tiny");
    let found = mutate(program(), &source, MUTATIONS, 21).unwrap();
    println!("{found:?}");
    assert!(found.refused_by_eval > 0 && found.not_needed > 0, "{found:?}");
}

#[test]
fn a_container_whose_manifest_is_damaged_is_not_taken_for_something_else() {
    let (_folder, path) = container("fixtures/k3-tiny", &[]);
    let manifest = path.join("manifest.json");
    let bytes = fs::read(&manifest).unwrap();
    let mut without_format = bytes.clone();
    without_format[..64].fill(0);
    for damaged in [&b""[..], b"{}", &without_format, &bytes[..bytes.len() - 1]] {
        fs::write(&manifest, damaged).unwrap();
        for args in [
            args!["run", "-m", &path, QUESTION],
            args!["eval", "-m", &path, "--ids", "1"],
            args!["info", &path],
            args!["verify", &path],
            args!["convert", &path, path.join("../new")],
        ] {
            let message = rill(&args).failed();
            assert!(message.contains("manifest.json"), "{args:?}: {message}");
        }
    }
}

#[test]
fn a_container_answers_like_its_checkpoint() {
    let checkpoint = repository("models/k3-nano");
    let (_folder, path) = container("models/k3-nano", &[]);
    assert_eq!(rill(args!["run", "-m", &path, QUESTION]).done(), ANSWER);
    for command in [
        &["run", "--raw", "--temp", "1", "--seed", "3", "-n", "20", "-q", "It was"][..],
        &["tokenize", "--json", "<|sep|>The whale"],
        &["tokenize", "--markup", "<|sep|>The whale"],
        &["eval", "--json", "The capital of"],
    ] {
        let run = |model: &Path| {
            let mut args: Vec<_> = command.iter().map(Into::into).collect();
            args.extend(args!["-m", model]);
            answer(rill(args).done())
        };
        assert_eq!(run(&path), run(&checkpoint), "{command:?}");
    }
    // Coarser, and still an answer that ends at the stop token.
    let (_folder, path) = container("models/k3-nano", &["--experts", "q8", "--trunk", "q8"]);
    assert_eq!(rill(args!["run", "-m", &path, QUESTION]).done(), ANSWER);
}

#[test]
fn qualities_are_formats_that_belong_together() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("container");
    let tiny = repository("fixtures/k3-tiny");
    let told = rill(args!["convert", tiny, to, "--quality", "standard"]);
    assert!(told.stderr.contains("layer 1: error of "), "{}", told.stderr);

    for (quality, experts, trunk, errors_of_experts) in [
        ("lossless", "mxfp4z", "bf16", 0.0..=0.0),
        ("high", "trellis of 3.25 bits", "q4", 0.05..=0.10),
        ("standard", "trellis of 2.875 bits", "q4", 0.10..=0.14),
        ("small", "trellis of 2.375 bits", "q4", 0.15..=0.20),
    ] {
        let (_folder, path) = container("fixtures/k3-tiny", &["--quality", quality]);
        let source = repository("fixtures/k3-tiny");
        let text = rill(args!["verify", "--json", &path, "--source", source]).done();
        let errors = json(&text)["weight_errors"].as_array().unwrap().clone();
        let of = |error: &Value| error["format"].as_str().unwrap().to_owned();
        let (expert, other): (Vec<&Value>, Vec<&Value>) =
            errors.iter().partition(|error| error["experts"] == true);
        assert!(!expert.is_empty() && expert.iter().all(|e| of(e) == experts), "{text}");
        for error in expert {
            let mean = error["mean"].as_f64().unwrap();
            assert!(errors_of_experts.contains(&mean), "{quality}: {error}");
        }
        assert!(other.iter().any(|error| of(error).starts_with(trunk)), "{text}");
    }
    let to = tempfile::tempdir().unwrap();
    let source = repository("fixtures/k3-tiny");
    let both = args!["convert", &source, to.path(), "--quality", "high", "--experts", "q8"];
    let message = rill(both).misused();
    assert!(message.contains("--quality") && message.contains("--experts"), "{message}");
    for wrong in [
        "q5",
        "trellis",
        "trellis:3.1",
        "trellis:4.125",
        "trellis:x",
        "q8:3",
        "mxfp4z:3.1",
        "mxfp4z:3.7",
        "mxfp4z:3.455",
        "mxfp4z:x",
        "mxfp4z:",
    ] {
        let message = rill(args!["convert", &source, to.path(), "--experts", wrong]).misused();
        assert!(message.contains("trellis:2.875") && message.contains(wrong), "{message}");
    }
    rill(args!["convert", &source, to.path(), "--experts", "mxfp4z:3.45", "--estimate"]).done();
    let message = rill(args!["convert", &source, to.path(), "--experts", "trellis:4"]).failed();
    assert!(message.contains("mxfp4") && message.contains("3.5 bits"), "{message}");
    // What is in plain numbers is rotated, the trunk too.
    let options = ["--quality", "standard", "--trunk", "trellis:3.5"];
    let (_folder, path) = container("fixtures/kimi-linear-tiny", &options);
    let linear = repository("fixtures/kimi-linear-tiny");
    let text = rill(args!["verify", "--json", &path, "--source", linear]).done();
    let errors = json(&text)["weight_errors"].as_array().unwrap().clone();
    let rotated = |bits: &str, experts: bool| {
        let format = format!("trellis-rotated of {bits} bits");
        let of = errors.iter().filter(|e| e["format"] == format && e["experts"] == experts);
        of.map(|e| e["mean"].as_f64().unwrap()).collect::<Vec<f64>>()
    };
    let (experts, others) = (rotated("3", true), rotated("3.5", false));
    assert!(experts.len() > 1 && others.len() > 4, "{text}");
    assert!(experts.iter().all(|e| (0.11..0.16).contains(e)), "{experts:?}");
    assert!(others.iter().all(|e| (0.08..0.13).contains(e)), "{others:?}");
    // Copied as it is, and not packed twice.
    let copy = to.path().join("copy");
    rill(args!["convert", &path, &copy]).done();
    assert!(files(&copy).unwrap() == files(&path).unwrap());
    let again = args!["convert", &path, to.path().join("again"), "--trunk", "trellis:3"];
    let message = rill(again).failed();
    assert!(message.contains("trellis of a trellis"), "{message}");
}

#[test]
fn a_container_is_described_with_its_fingerprint_and_bits() {
    for (options, trunk, experts) in
        [(&[][..], "bf16", "mxfp4 "), (&["--experts", "q4", "--trunk", "q8"], "q8", "q4 ")]
    {
        let (_folder, path) = container("fixtures/k3-tiny", options);
        let fingerprint = json(&rill(args!["verify", "--json", &path]).done())["fingerprint"]
            .as_str()
            .unwrap()
            .to_owned();
        assert_eq!(fingerprint.len(), 32);
        let text = rill(args!["info", &path]).done();
        for part in [".rill container", &fingerprint, "stored as", experts, " bits"] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        let facts = json(&rill(args!["info", "--json", &path]).done());
        let of_checkpoint = repository("fixtures/k3-tiny");
        let of_checkpoint = json(&rill(args!["info", "--json", of_checkpoint]).done());
        assert_eq!(facts["source"], ".rill container");
        assert_eq!(facts["fingerprint"], fingerprint);
        assert_eq!(of_checkpoint["fingerprint"], Value::Null);
        for same in ["architecture", "parameters", "active_parameters", "layers", "n_experts"] {
            assert_eq!(facts[same], of_checkpoint[same], "{same}");
        }
        // 3 matrices of 96 × 64 of 12 experts in 8 layers.
        let weights = &facts["expert_formats"][experts.trim()]["weights"];
        assert_eq!(*weights, 8 * 12 * 3 * 96 * 64, "{facts:#}");
        assert!(facts["trunk_formats"][trunk]["bytes"].as_u64() > Some(0), "{facts:#}");
        let on_disk: u64 = files(&path).unwrap().values().map(|bytes| bytes.len() as u64).sum();
        let told = facts["file_bytes"].as_u64().unwrap();
        assert!(told <= on_disk && told * 10 > on_disk * 9, "{told} of {on_disk}");
    }
}

#[test]
fn an_estimate_is_what_is_then_written() {
    for (model, options) in [
        ("models/k3-nano", &["--experts", "q8", "--trunk", "q4"][..]),
        ("fixtures/kimi-linear-tiny", &[]),
        ("fixtures/kimi-linear-tiny", &["--experts", "q4"]),
    ] {
        let mut args = args!["convert", repository(model), "--estimate"];
        args.extend(options.iter().map(Into::into));
        let estimate = rill(args).done();
        let (_folder, path) = container(model, options);
        let sizes = |part: &str| -> u64 {
            let files = files(&path).unwrap().into_iter();
            files.filter(|(name, _)| name.contains(part)).map(|(_, b)| b.len() as u64).sum()
        };
        let manifest = sizes("manifest.json");
        for (line, bytes) in [
            ("container", sizes("") - manifest),
            ("trunk", sizes("trunk.rill")),
            ("experts", sizes("experts-")),
        ] {
            let found = estimate.lines().find(|l| l.starts_with(line)).unwrap();
            let expected = match bytes {
                0..1_000_000 => format!("{:.2} kB", bytes as f64 / 1e3),
                _ => format!("{:.2} MB", bytes as f64 / 1e6),
            };
            assert!(found[line.len()..].trim_start().starts_with(&expected), "{found}: {expected}");
        }
    }
    // What is not known before is at least not less.
    let tiny = repository("fixtures/k3-tiny");
    let text = rill(args!["convert", tiny, "--estimate", "--quality", "lossless"]).done();
    assert!(text.starts_with("container   at most "), "{text}");
}

#[test]
fn the_first_layers_of_a_model_run_and_are_verified_against_it() {
    let source = repository("fixtures/k3-tiny");
    for experts in ["source", "mxfp4z"] {
        the_first_layers(&source, experts);
    }
}

fn the_first_layers(source: &Path, experts: &str) {
    let (_folder, path) = container("fixtures/k3-tiny", &["--layers", "3", "--experts", experts]);
    let facts = json(&rill(args!["info", "--json", &path]).done());
    assert_eq!(facts["layers"], 3);
    rill(args!["eval", "-m", &path, "--ids", "1,2,3"]).done();
    let found = json(&rill(args!["verify", &path, "--source", source, "--json"]).done());
    assert_eq!(found["differing_files"], serde_json::json!([]));
    assert!(found["weight_errors"].as_array().unwrap().iter().all(|c| c["worst"] == 0.0));
    let message = rill(args!["convert", source, path.join("../x"), "--layers", "99"]).failed();
    assert!(message.contains("2 to 9 layers"), "{message}");
}

#[test]
fn a_peers_container_is_converted_verified_and_run() {
    let source = repository("fixtures/k3-tiny.waste");
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("new");
    let message = rill(args!["convert", &source, &to]).failed();
    assert!(message.contains("--experts q8"), "{message}");
    let message = rill(args!["convert", &source, &to, "--reclaim", "on"]).failed();
    assert!(message.contains("--experts q8") || message.contains("checkpoints only"), "{message}");
    rill(args!["convert", &source, &to, "--experts", "q8"]).done();
    rill(args!["eval", "-m", &to, "--ids", "1,2,3"]).done();
    let text = rill(args!["verify", &to, "--source", &source]).done();
    assert!(text.contains("every byte is as written") && text.contains(", q8 in groups"), "{text}");
    let text = rill(args!["verify", &to, "--source", &to]).done();
    assert!(!text.contains("is not the source's"), "{text}");
    // A release that has changed since is told from what was converted.
    let changed = copy_of("fixtures/k3-tiny.waste");
    fs::write(changed.path().join("chat_template.jinja"), "{{ x }}").unwrap();
    let text = rill(args!["verify", &to, "--source", changed.path()]).done();
    assert!(text.contains("chat_template.jinja is not the source's"), "{text}");
}

#[test]
fn arguments_that_make_no_sense_are_refused_before_anything_is_written() {
    let source = repository("fixtures/k3-tiny");
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("new");
    for (args, named) in [
        (args!["convert"], "<SRC>"),
        (args!["convert", &source], "--estimate"),
        (args!["convert", &source, &to, "--experts", "q3"], "--experts"),
        (args!["convert", &source, &to, "--experts", "mxfp4"], "--experts"),
        (args!["convert", &source, &to, "--trunk", "Q8"], "--trunk"),
        (args!["convert", &source, &to, "--jobs", "-1"], "'-1'"),
        (args!["convert", &source, &to, "--jobs", "1025"], "--jobs"),
        (args!["convert", &source, &to, "--spread", "x"], "--spread"),
        (args!["convert", &source, &to, "--spread", "x=0"], "--spread"),
        (args!["convert", &source, &to, "--layers", "few"], "--layers"),
        (args!["convert", &source, &to, "--layers", "3", "--reclaim", "on"], "--reclaim"),
        (args!["convert", &source, &to, "--reclaim", "yes"], "--reclaim"),
        (args!["convert", &source, "--reclaim", "dry"], "<DST>"),
        (args!["convert", &source, &to, "--trust-source"], "--reclaim"),
        (args!["convert", &source, &to, "more"], "'more'"),
        (args!["verify"], "<PATH>"),
        (args!["verify", &source, "--jobs", "many"], "--jobs"),
        (args!["verify", &source, "--source"], "--source"),
    ] {
        let message = rill(&args).misused();
        assert!(message.contains(named), "{args:?}: {message}");
        assert!(!to.exists());
    }
}

#[test]
fn a_source_that_is_incomplete_or_damaged_is_refused_before_anything_is_written() {
    const SHARD: &str = "model-00002-of-000003.safetensors";
    let to = tempfile::tempdir().unwrap();
    let to = to.path().join("new");
    let refused = |source: &Path, named: &str| {
        for options in [&[][..], &["--experts", "q4"]] {
            let mut args = args!["convert", source, &to];
            args.extend(options.iter().map(Into::into));
            let message = rill(args).failed();
            assert!(message.contains(named), "no {named:?} in {message}");
            assert!(!to.exists());
        }
    };
    let missing = copy_of("fixtures/k3-tiny");
    fs::remove_file(missing.path().join(SHARD)).unwrap();
    refused(missing.path(), SHARD);
    let cut_off = copy_of("fixtures/k3-tiny");
    let bytes = fs::read(cut_off.path().join(SHARD)).unwrap();
    fs::write(cut_off.path().join(SHARD), &bytes[..bytes.len() - 1]).unwrap();
    refused(cut_off.path(), SHARD);
    let unknown = copy_of("fixtures/k3-tiny");
    fs::remove_file(unknown.path().join("config.json")).unwrap();
    refused(unknown.path(), "config.json");
    refused(&to.join("nowhere"), "nowhere");
    let (_folder, text) = file("not a folder");
    refused(&text, "is not a folder");
}

#[test]
fn a_scale_that_is_no_number_ends_a_conversion_that_goes_on_when_it_is_repaired() {
    const TENSOR: &str = "language_model.model.layers.5.block_sparse_moe.experts.7.w2.weight_scale";
    let source = copy_of("fixtures/k3-tiny");
    let whole = files(source.path()).unwrap();
    overwrite(source.path(), TENSOR, 255);
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("new");
    let convert = || rill(args!["convert", source.path(), &to, "--jobs", "1"]);
    let message = convert().failed();
    let named = TENSOR.trim_start_matches("language_model.").trim_end_matches(".weight_scale");
    assert!(message.contains(named), "{message}");
    assert!(!to.join("manifest.json").exists());
    for (name, bytes) in whole {
        fs::write(source.path().join(name), bytes).unwrap();
    }
    convert().done();
    let (_folder, expected) = container("fixtures/k3-tiny", &[]);
    assert!(files(&to).unwrap() == files(&expected).unwrap());
}

#[test]
fn a_destination_that_is_taken_is_refused_and_left_alone() {
    let source = repository("fixtures/k3-tiny");
    let refused = |to: &Path, named: &str| {
        let before = files(to).unwrap();
        let message = rill(args!["convert", &source, to]).failed();
        assert!(
            message.contains(named) && message.contains(&to.display().to_string()),
            "{message}"
        );
        assert!(files(to).unwrap() == before);
    };
    let (_folder, path) = container("fixtures/k3-tiny", &[]);
    refused(&path, "is a container already");
    let (folder, _) = file("precious");
    refused(folder.path(), "is not empty");
    // The beginning of something else.
    let begun = tempfile::tempdir().unwrap();
    fs::write(begun.path().join("convert.json"), "{}\n").unwrap();
    refused(begun.path(), "conversion of another source or with other options");
}

#[test]
fn a_destination_that_cannot_be_written_is_named() {
    let (_folder, text) = file("not a folder");
    for to in [text.clone(), text.join("inside")] {
        let message = rill(args!["convert", repository("fixtures/k3-tiny"), &to]).failed();
        assert!(message.contains(&to.display().to_string()), "{message}");
        assert_eq!(fs::read_to_string(&text).unwrap(), "not a folder");
    }
}

#[test]
fn a_destination_in_the_source_is_refused_and_the_source_is_unharmed() {
    let (_folder, of_container) = container("fixtures/k3-tiny", &[]);
    let of_checkpoint = copy_of("fixtures/k3-tiny");
    for source in [of_checkpoint.path(), &of_container] {
        let before = files(source).unwrap();
        for to in [source.to_owned(), source.join("new"), source.join("new/../other")] {
            let message = rill(args!["convert", source, &to, "--trunk", "q8"]).failed();
            assert!(message.contains("never written to"), "{message}");
            assert!(files(source).unwrap() == before);
        }
        // Named from inside.
        let mut command = command(args!["convert", source, "new"]);
        assert!(ended(command.current_dir(source)).failed().contains("never written to"));
        assert!(files(source).unwrap() == before);
    }
}

#[test]
fn verify_wants_a_container() {
    let checkpoint = repository("fixtures/k3-tiny");
    let message = rill(args!["verify", &checkpoint]).failed();
    assert!(message.contains("manifest.json does not exist"), "{message}");
    let nowhere = checkpoint.join("nowhere");
    let message = rill(args!["verify", &nowhere]).failed();
    assert!(message.contains(&nowhere.display().to_string()), "{message}");
    // A source that is not there is found out at once.
    let (_folder, path) = container("fixtures/k3-tiny", &[]);
    let message = rill(args!["verify", &path, "--source", &nowhere]).failed();
    assert!(message.contains(&nowhere.display().to_string()), "{message}");
    let other = repository("fixtures/kimi-linear-tiny");
    let message = rill(args!["verify", &path, "--source", other]).failed();
    assert!(message.contains("name the source that the container was made from"), "{message}");
}

#[test]
fn weight_errors_are_zero_without_loss_and_told_by_class_otherwise() {
    let source = repository("fixtures/k3-tiny");
    let (_folder, lossless) = container("fixtures/k3-tiny", &[]);
    let verify = |path: &Path| {
        let found = json(&rill(args!["verify", path, "--source", &source, "--json"]).done());
        found["weight_errors"].as_array().unwrap().clone()
    };
    let classes = verify(&lossless);
    assert!(classes.iter().all(|c| c["mean"] == 0.0 && c["worst"] == 0.0), "{classes:#?}");
    // Every weight of the checkpoint is in some class.
    let config: Value = json(&fs::read_to_string(source.join("config.json")).unwrap());
    let weights = tensors(&config).into_iter().map(|tensor| match &tensor.name {
        name if name.ends_with("_scale") => 0,
        name if name.ends_with("_packed") => 2 * tensor.bytes(),
        _ => tensor.shape.iter().product(),
    });
    let counted: u64 = classes.iter().filter_map(|c| c["weights"].as_u64()).sum();
    assert_eq!(counted, weights.sum::<u64>());
    let experts = classes.iter().filter(|c| c["experts"] == true);
    assert_eq!(experts.count(), 8, "a class for each layer");

    let (_folder, packed) = container("fixtures/k3-tiny", &["--experts", "q4", "--trunk", "q8"]);
    for class in verify(&packed) {
        let (mean, worst) = (class["mean"].as_f64().unwrap(), class["worst"].as_f64().unwrap());
        let (low, high) = match class["format"].as_str().unwrap() {
            format if format.starts_with("q4") => (0.02, 0.25),
            format if format.starts_with("q8") => (0.002, 0.02),
            _ => (0.0, 0.0),
        };
        assert!(low <= mean && mean <= worst && worst <= high, "{class:#}");
    }
    let text = rill(args!["verify", &packed, "--source", &source]).done();
    for part in [
        "every byte is as written",
        "model.layers.*.self_attn.o_proj.weight, q8 in groups of 128",
        "model.layers.3.block_sparse_moe.experts.*, q4 in groups of 128",
        "model.norm.weight, bf16",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    // The other way round, a container can be what it is measured against.
    let found = rill(args!["verify", &packed, "--source", &packed, "--json"]).done();
    let found = json(&found)["weight_errors"].clone();
    assert!(found.as_array().unwrap().iter().all(|c| c["worst"] == 0.0));
}

#[cfg(unix)]
mod unix {
    use std::process::{Child, Command};
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::kills::start_conversion;

    /// Enough for the slowest machine.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn send(signal: &str, child: &Child) {
        let status = Command::new("kill").arg(signal).arg(child.id().to_string()).status();
        assert!(status.unwrap().success());
    }

    /// A conversion that stands still in the middle, and its folder.
    fn paused() -> (Child, TempDir) {
        loop {
            let folder = tempfile::tempdir().unwrap();
            let source = repository("models/k3-nano");
            let mut child =
                start_conversion(program(), &source, folder.path(), "q8", 1, false).unwrap();
            let start = Instant::now();
            // The first run is noted when it is whole.
            while fs::read(folder.path().join("convert.log")).is_ok_and(|log| log.is_empty())
                || !folder.path().join("convert.log").exists()
            {
                assert!(start.elapsed() < PATIENCE, "it does not begin");
                if child.try_wait().unwrap().is_some() {
                    break;
                }
            }
            send("-STOP", &child);
            sleep(Duration::from_millis(20));
            if !folder.path().join("manifest.json").exists() {
                return (child, folder);
            }
            // It was too quick to be caught.
            send("-CONT", &child);
            child.wait().unwrap();
        }
    }

    #[test]
    fn an_interrupted_conversion_says_how_to_go_on_and_does() {
        let (_whole, expected) = container("models/k3-nano", &["--experts", "q8", "--trunk", "q4"]);
        for signal in ["-INT", "-TERM"] {
            let (child, folder) = paused();
            send(signal, &child);
            send("-CONT", &child);
            let output = child.wait_with_output().unwrap();
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(130), "{signal}: {stderr}");
            // Layers that were done before are told.
            let mut lines = stderr.lines().skip_while(|line| line.starts_with("layer "));
            let stopped = "rill: stopped; the same command goes on where it stopped";
            assert_eq!((lines.next(), lines.next()), (Some(stopped), None), "{stderr}");
            assert!(output.stdout.is_empty());
            assert!(!folder.path().join("manifest.json").exists());
            // With other options it does not.
            let source = repository("models/k3-nano");
            let message = rill(args!["convert", &source, folder.path()]).failed();
            assert!(message.contains("other options"), "{message}");
            let ours = ["--experts", "q8", "--trunk", "q4"];
            let mut args = args!["convert", &source, folder.path()];
            args.extend(ours.iter().map(Into::into));
            rill(args).done();
            assert!(files(folder.path()).unwrap() == files(&expected).unwrap());
        }
    }

    #[test]
    fn a_second_conversion_into_the_same_folder_is_told_to_wait() {
        let (child, folder) = paused();
        let source = repository("models/k3-nano");
        let mut args = args!["convert", &source, folder.path()];
        args.extend(["--experts", "q8", "--trunk", "q4"].iter().map(Into::into));
        let message = rill(args).failed();
        assert!(message.contains("another conversion is writing to"), "{message}");
        send("-CONT", &child);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        rill(args!["verify", folder.path()]).done();
    }

    #[test]
    fn a_limit_on_the_size_of_files_is_an_error_or_an_end_and_nothing_is_lost() {
        // Blocks of 512 bytes, or of 1024: more than a bank and less than the trunk either way.
        const BLOCKS: u32 = 2200;
        let (_whole, expected) = container("models/k3-nano", &[]);
        // The system's answer is a signal, and where that is ignored an error.
        for ignore in ["", "trap '' XFSZ; "] {
            let folder = tempfile::tempdir().unwrap();
            let to = folder.path().join("new");
            let script = format!("{ignore}ulimit -f {BLOCKS} && exec \"$@\"");
            let mut limited = Command::new("sh");
            limited.args(["-c", &script, "sh"]).arg(program());
            limited.args(args!["convert", repository("models/k3-nano"), &to]);
            let limited = ended(&mut limited);
            match ignore {
                "" => assert_ne!(limited.code, Some(0), "{}", limited.stderr),
                _ => {
                    let message = limited.failed();
                    let named =
                        message.contains("trunk.rill: ") && message.contains("run it again");
                    assert!(named, "{message}");
                }
            }
            assert!(!to.join("manifest.json").exists());
            rill(args!["convert", repository("models/k3-nano"), &to]).done();
            assert!(files(&to).unwrap() == files(&expected).unwrap());
        }
    }
}
