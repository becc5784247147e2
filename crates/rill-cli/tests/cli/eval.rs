//! `rill eval`: distributions, logits and perplexity.

use std::fs;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::common::{args, copy_of, file, overwrite, repository, rill, rill_fed};

/// A tensor of four-byte elements: shape and elements.
fn tensor<T>(
    file: &[u8],
    name: &str,
    dtype: Dtype,
    read: fn([u8; 4]) -> T,
) -> (Vec<usize>, Vec<T>) {
    let file = SafeTensors::deserialize(file).unwrap();
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), dtype, "{name}");
    let elements = tensor.data().chunks_exact(4);
    let elements = elements.map(|b| read([b[0], b[1], b[2], b[3]])).collect();
    (tensor.shape().to_vec(), elements)
}

fn ids(file: &[u8]) -> (Vec<usize>, Vec<i32>) {
    tensor(file, "input_ids", Dtype::I32, i32::from_le_bytes)
}

fn logits(file: &[u8]) -> (Vec<usize>, Vec<f32>) {
    tensor(file, "logits", Dtype::F32, f32::from_le_bytes)
}

/// Expected values of a checkpoint, and its ids as an argument.
fn expected(checkpoint: &str) -> (Vec<u8>, String) {
    let expected = fs::read(repository(checkpoint).join("expected.safetensors")).unwrap();
    let list: Vec<String> = ids(&expected).1.iter().map(i32::to_string).collect();
    (expected, list.join(","))
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn the_distribution_is_ordered_and_adds_up_to_one() {
    let result = json(&rill(["eval", "--json", "--top", "5000", "The capital of"]).done());
    assert_eq!(result["input_ids"][0], 3840, "BOS comes first");
    let next = result["next"].as_array().unwrap();
    assert_eq!(next.len(), 4096, "the whole vocabulary and no more");
    let probabilities: Vec<f64> = next.iter().map(|t| t["probability"].as_f64().unwrap()).collect();
    assert!(probabilities.is_sorted_by(|a, b| a >= b));
    assert!((probabilities.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    let logits: Vec<f64> = next.iter().map(|t| t["logit"].as_f64().unwrap()).collect();
    let ratio = (logits[0] - logits[9]).exp();
    assert!((probabilities[0] / probabilities[9] / ratio - 1.0).abs() < 1e-9);

    // The most likely token is what greedy decoding prints.
    let greedy = rill(["run", "--raw", "-n", "1", "The capital of"]).done();
    assert_eq!(format!("{}\n", next[0]["text"].as_str().unwrap()), greedy);
    let id = next[0]["id"].to_string();
    assert_eq!(rill(["detokenize", &id]).done(), next[0]["text"].as_str().unwrap());
}

#[test]
fn the_table_shows_what_the_json_says() {
    let table = rill(["eval", "--top", "3", "The capital of"]).done();
    let result = json(&rill(["eval", "--top", "3", "--json", "The capital of"]).done());
    let (heading, rows) = table.split_once('\n').unwrap();
    let words: Vec<&str> = heading.split_whitespace().collect();
    assert_eq!(words, ["id", "probability", "logit", "token"]);
    assert_eq!(rows.lines().count(), 3);
    for (row, token) in rows.lines().zip(result["next"].as_array().unwrap()) {
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[0], token["id"].to_string());
        let probability: f64 = words[1].parse().unwrap();
        assert!((probability - token["probability"].as_f64().unwrap()).abs() <= 5e-7);
        assert!(row.ends_with(&format!("{:?}", token["text"].as_str().unwrap())), "{row}");
    }
    assert_eq!(rill(["eval", "x"]).done().lines().count(), 11, "ten unless asked otherwise");
    assert_eq!(rill(["eval", "--top", "0", "x"]).done().lines().count(), 1);
}

#[test]
fn text_is_the_same_from_an_argument_a_file_a_dash_a_pipe_and_as_ids() {
    let table = rill(["eval", "The capital"]).done();
    let (_folder, path) = file("The capital\n");
    assert_eq!(rill(args!["eval", "--file", path]).done(), table);
    assert_eq!(rill_fed(["eval", "-"], "The capital\n").done(), table);
    assert_eq!(rill_fed(["eval"], "The capital").done(), table);
    let ids = rill(["tokenize", "The capital"]).done();
    assert_eq!(rill(["eval", "--ids", &format!("3840,{}", ids.trim())]).done(), table);
    assert_eq!(rill(["eval", "--ids", &format!(" 3840, {}", ids.trim())]).done(), table);
    // Ids are taken as they are: without BOS the model expects something else.
    assert_ne!(rill(["eval", "--ids", ids.trim()]).done(), table);
}

#[test]
fn ids_need_no_tokenizer() {
    let folder = copy_of("fixtures/k3-tiny");
    fs::remove_file(folder.path().join("tiktoken.model")).unwrap();
    let result = rill(args!["eval", "-m", folder.path(), "--ids", "1,2,3", "--json"]).done();
    assert_eq!(json(&result)["next"].as_array().unwrap().len(), 10);
}

#[test]
fn dumped_logits_agree_with_the_reference() {
    for (checkpoint, vocab) in [("fixtures/k3-tiny", 512), ("fixtures/kimi-linear-tiny", 512)] {
        let (expected, list) = expected(checkpoint);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("logits.safetensors");
        let model = repository(checkpoint);
        let shown =
            rill(args!["eval", "-m", model, "--ids", list, "--dump-logits", &path, "--json"]);
        let shown = json(&shown.done());

        let dumped = fs::read(&path).unwrap();
        assert_eq!(ids(&dumped), ids(&expected));
        let (shape, got) = logits(&dumped);
        let (expected_shape, expected) = logits(&expected);
        assert_eq!(shape, expected_shape);
        assert_eq!(shape[1], vocab);
        for (position, (got, expected)) in
            got.chunks_exact(vocab).zip(expected.chunks_exact(vocab)).enumerate()
        {
            let square = |x: f32| f64::from(x).powi(2);
            let distance: f64 = got.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
            let size: f64 = expected.iter().map(|&x| square(x)).sum();
            let error = (distance / size).sqrt();
            // The reference's worst conditioned position reaches 2e-5.
            assert!(error <= 1e-4, "{checkpoint}, position {position}: {error:e}");
        }
        // What is shown is the last position of what is written.
        let last = &got[got.len() - vocab..];
        let best = (0..vocab).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
        assert_eq!(shown["next"][0]["id"], best);
        assert_eq!(shown["next"][0]["logit"], f64::from(last[best]));
        // Nothing else was left beside it.
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }
}

#[test]
fn dumped_logits_are_the_same_bits_however_they_were_computed() {
    let (_, list) = expected("fixtures/k3-tiny");
    let model = repository("fixtures/k3-tiny");
    let folder = tempfile::tempdir().unwrap();
    let dump = |options: [&str; 2]| {
        let path = folder.path().join("logits.safetensors");
        let base = args!["eval", "-m", &model, "--ids", &list, "--dump-logits", &path];
        let shown = rill(base.into_iter().chain(options.map(Into::into))).done();
        (shown, fs::read(path).unwrap())
    };
    let first = dump(["--threads", "2"]);
    for options in [
        ["--threads", "1"],
        ["--threads", "5"],
        ["--prefill-chunk", "1"],
        ["--prefill-chunk", "3"],
        ["--prefill-chunk", "64"],
        ["--kernels", "scalar"],
        ["--kernels", "fastest"],
    ] {
        assert!(dump(options) == first, "{options:?} changes the result");
    }
    // Without a file the last position is computed alone.
    let alone = rill(args!["eval", "-m", &model, "--ids", &list]).done();
    assert_eq!(alone, first.0);
}

#[test]
fn a_dump_of_text_longer_than_one_write_is_whole() {
    let text = "It was the best of times, it was the worst of times. ".repeat(12);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logits.safetensors");
    let shown = rill(args!["eval", "--json", &text, "--dump-logits", &path]).done();
    let dumped = fs::read(path).unwrap();
    let (shape, list) = ids(&dumped);
    assert!(shape[0] > 128, "{shape:?}");
    assert_eq!(json(&shown)["input_ids"], serde_json::json!(list));
    assert_eq!(logits(&dumped).0, [shape[0], 4096]);
    // Data starts at a multiple of eight, as readers that map the file want it.
    assert_eq!(u64::from_le_bytes(dumped[..8].try_into().unwrap()) % 8, 0);
}

#[test]
fn a_dump_replaces_an_older_file_and_takes_ordinary_permissions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logits.safetensors");
    fs::write(&path, "old").unwrap();
    rill(args!["eval", "x", "--dump-logits", &path]).done();
    assert_eq!(logits(&fs::read(&path).unwrap()).0[1], 4096);

    // A bare name is one in the current folder.
    let mut here = crate::common::command(["eval", "x", "--dump-logits", "here"]);
    crate::common::ended(here.current_dir(&folder)).done();
    let here = folder.path().join("here");
    assert_eq!(fs::read(&here).unwrap(), fs::read(&path).unwrap());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let usual = folder.path().join("usual");
        fs::write(&usual, "").unwrap();
        let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&here), mode(&usual));
    }
}

#[cfg(unix)]
#[test]
fn a_dump_goes_through_a_link_and_never_over_a_device() {
    let folder = tempfile::tempdir().unwrap();
    let (target, link) = (folder.path().join("target"), folder.path().join("link"));
    fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    rill(args!["eval", "x", "--dump-logits", &link]).done();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(logits(&fs::read(&target).unwrap()).0[1], 4096);

    let device = folder.path().join("device");
    std::os::unix::fs::symlink("/dev/null", &device).unwrap();
    for path in [&device, folder.path()] {
        let message = rill(args!["eval", "x", "--dump-logits", path]).failed();
        assert!(message.contains(&format!("cannot write {}", path.display())), "{message}");
        assert!(message.contains("not a regular file"), "{message}");
    }
    let nowhere = folder.path().join("missing/file");
    let message = rill(args!["eval", "x", "--dump-logits", &nowhere]).failed();
    assert_eq!(message.matches(&*nowhere.display().to_string()).count(), 1, "{message}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 3);
}

#[test]
fn a_failed_dump_leaves_the_old_file_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logits.safetensors");
    fs::write(&path, "old").unwrap();
    // The 65th id is the first of the second part that is computed.
    let list = "1,".repeat(65) + "4096";
    let message = rill(args!["eval", "--ids", list, "--dump-logits", &path]).failed();
    assert_eq!(message, "rill: token 4096 at position 65 is not below the vocabulary size 4096\n");

    // More than its context; the demo's is too long for a quick test. Nothing is computed, or the
    // first position that does not fit would be named instead of the last.
    let list = "1,".repeat(4999) + "1";
    let model = repository("fixtures/k3-tiny");
    let message = rill(args!["eval", "-m", model, "--ids", list, "--dump-logits", &path]).failed();
    assert!(message.contains("5000 tokens do not fit a context of 4096"), "{message}");

    // What happens while it is being written is not the file's fault.
    let damaged = copy_of("fixtures/k3-tiny");
    for expert in 0..12 {
        let at = "language_model.model.layers.4.block_sparse_moe.experts";
        overwrite(damaged.path(), &format!("{at}.{expert}.w1.weight_scale"), 255);
    }
    let args = args!["eval", "-m", damaged.path(), "--ids", "1,2", "--dump-logits", &path];
    let message = rill(args).failed();
    assert!(message.starts_with("rill: expert "), "{message}");

    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn a_dump_into_a_folder_that_does_not_exist_names_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no/logits.safetensors");
    let message = rill(args!["eval", "x", "--dump-logits", &path]).failed();
    assert!(message.contains(&format!("cannot write {}", path.display())), "{message}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

/// The signal that the limit raises is ignored, so that the write fails as on a full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_under_a_dump_leaves_the_old_file_and_nothing_else() {
    use crate::common::ended;
    use std::process::{Command, Stdio};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logits.safetensors");
    fs::write(&path, "old").unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", r#"trap "" XFSZ; ulimit -f 8; exec "$@""#, "sh"]);
    command.arg(env!("CARGO_BIN_EXE_rill")).args(["eval", "one two three", "--dump-logits"]);
    let message = ended(command.arg(&path).stdin(Stdio::null())).failed();
    assert!(message.contains(&format!("cannot write {}", path.display())), "{message}");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn a_model_is_compared_with_the_one_it_was_made_from() {
    let folder = tempfile::tempdir().unwrap();
    let (text, container) = (folder.path().join("text"), folder.path().join("container"));
    let held_out = std::fs::read(repository("models/k3-nano/heldout.txt")).unwrap();
    std::fs::write(&text, &held_out[..2000]).unwrap();
    let nano = repository("models/k3-nano");
    rill(args!["convert", &nano, &container, "--experts", "q4"]).done();
    let compare = |model: &std::path::Path| {
        let args = args!["eval", "--perplexity", &text, "--window", "100", "-m", model];
        let args = [args, args!["--against", &nano, "--json"]].concat();
        json(&rill(args).done())
    };
    let number = |found: &Value, name: &str| found[name].as_f64().unwrap();
    let same = compare(&nano);
    assert_eq!(number(&same, "perplexity"), number(&same, "reference_perplexity"));
    assert!(number(&same, "kl_divergence").abs() < 1e-12 && number(&same, "agreement") == 1.0);
    let layers = |found: &Value| -> Vec<f64> {
        found["layer_errors"].as_array().unwrap().iter().map(|e| e.as_f64().unwrap()).collect()
    };
    assert!(layers(&same).iter().all(|&error| error == 0.0), "{same}");

    let packed = compare(&container);
    assert_eq!(number(&packed, "reference_perplexity"), number(&same, "perplexity"));
    assert!((1e-6..0.1).contains(&number(&packed, "kl_divergence")), "{packed}");
    assert!((0.5..1.0).contains(&number(&packed, "agreement")), "{packed}");
    // Of those layers that have experts.
    let errors = layers(&packed);
    assert_eq!(errors[0], 0.0, "the first layer is dense");
    assert!(errors[1..].iter().all(|error| (1e-4..0.2).contains(error)), "{errors:?}");

    let args = args!["eval", "--perplexity", &text, "--window", "100", "-m", &container];
    let text = rill([args, args!["--against", &nano]].concat()).done();
    assert!(text.contains("nats a token") && text.contains("error of its output"), "{text}");
    let tiny = repository("fixtures/k3-tiny");
    let args = args!["eval", "--perplexity", repository("models/k3-nano/heldout.txt")];
    let message = rill([args, args!["--against", tiny]].concat()).failed();
    assert!(message.contains("layers"), "{message}");
}

/// The other model's latents stay f32, so a model can be compared with itself.
#[test]
fn latents_as_halves_diverge_a_little_from_those_that_are_not() {
    let (_folder, text) =
        file("Whoever keeps half of everything has it all nearly right.\n".repeat(20));
    let model = repository("models/k3-nano");
    let diverges = |latents: &str| {
        let args =
            args!["eval", "--perplexity", &text, "-m", &model, "--against", &model, "--json"];
        let found = rill([args, args!["--latents", latents]].concat()).done();
        json(&found)["kl_divergence"].as_f64().unwrap()
    };
    let [f32, f16, bf16] = ["f32", "f16", "bf16"].map(diverges);
    assert!(f32.abs() < 1e-12 && 1e-12 < f16 && f16 < bf16 && bf16 < 1e-3, "{f32}, {f16}, {bf16}");
}

#[test]
fn the_perplexity_of_the_held_out_text_is_what_float64_found() {
    let text = repository("models/k3-nano/heldout.txt");
    let result = json(&rill(args!["eval", "--json", "--perplexity", text]).done());
    let perplexity = result["perplexity"].as_f64().unwrap();
    assert!((perplexity / 64.55132569720898 - 1.0).abs() < 1e-3, "{perplexity}");
    assert_eq!(result["tokens"], 9945);
    assert_eq!(result["windows"], 39);
}

#[test]
fn a_smaller_window_measures_a_shorter_text() {
    let text = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea.";
    let (_folder, path) = file(text);
    let ended = rill(args!["eval", "--perplexity", &path]);
    let message = ended.failed();
    assert!(message.contains(&path.display().to_string()), "{message}");
    assert!(message.contains("one window takes 255"), "{message}");

    let line = rill(args!["eval", "--perplexity", &path, "--window", "5"]).done();
    let result = rill(args!["eval", "--json", "--perplexity", &path, "--window", "5"]).done();
    let result = json(&result);
    assert_eq!(result["tokens"], 5 * result["windows"].as_u64().unwrap());
    let perplexity = result["perplexity"].as_f64().unwrap();
    assert!(perplexity > 1.0 && perplexity < 4096.0, "{perplexity}");
    let expected = format!(
        "perplexity {perplexity:.4} over {} tokens in {} windows\n",
        result["tokens"], result["windows"]
    );
    assert_eq!(line, expected);
}
