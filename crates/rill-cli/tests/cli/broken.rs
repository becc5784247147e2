//! Checkpoints and texts that are missing or damaged: exit code 1, and a message that says where.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::common::{args, copy_of, file, overwrite, repository, rill, rill_fed};

/// Every command that opens a model fails with a message that has all the parts.
#[track_caller]
fn every_command_fails(model: &Path, parts: &[&str]) {
    for command in [&["run", "x"][..], &["eval", "x"], &["info"]] {
        let mut args: Vec<OsString> = command.iter().map(OsString::from).collect();
        if command[0] != "info" {
            args.push("-m".into());
        }
        args.push(model.into());
        let message = rill(&args).failed();
        for part in parts {
            assert!(message.contains(part), "{args:?}: no {part:?} in {message}");
        }
        for word in message.split(": ") {
            // No cause is told twice.
            let again = message.matches(word.trim()).count();
            assert!(word.len() < 12 || again == 1, "{args:?}: {message}");
        }
    }
}

fn display(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn a_folder_that_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("nowhere");
    every_command_fails(&missing, &[&format!("cannot open {}: ", missing.display())]);
}

#[test]
fn a_folder_without_a_configuration_is_named() {
    let folder = copy_of("fixtures/k3-tiny");
    let config = folder.path().join("config.json");
    fs::remove_file(&config).unwrap();
    every_command_fails(folder.path(), &[&display(folder.path()), "config.json"]);
    fs::create_dir(&config).unwrap();
    every_command_fails(folder.path(), &[&display(folder.path()), "config.json"]);
}

#[test]
fn a_folder_without_weights_is_named() {
    let folder = copy_of("fixtures/k3-tiny");
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("model") {
            fs::remove_file(path).unwrap();
        }
    }
    let parts = [&display(folder.path()), "model.safetensors.index.json"];
    every_command_fails(folder.path(), &parts);
}

#[test]
fn a_file_in_place_of_a_folder_is_named() {
    let path = repository("fixtures/k3-tiny/config.json");
    every_command_fails(&path, &[&display(&path), "is not a folder"]);
}

#[test]
fn a_missing_or_damaged_tokenizer_is_named() {
    let folder = copy_of("fixtures/k3-tiny");
    let path = folder.path().join("tiktoken.model");
    let commands = |model: &Path| {
        [
            args!["run", "-m", model, "x"],
            args!["eval", "-m", model, "x"],
            args!["tokenize", "-m", model, "x"],
            args!["detokenize", "-m", model, "1"],
        ]
    };
    fs::write(&path, "not a vocabulary\n").unwrap();
    for args in commands(folder.path()) {
        let message = rill(&args).failed();
        assert!(message.contains("tiktoken.model") && message.contains("line 1"), "{message}");
    }
    fs::remove_file(&path).unwrap();
    for args in commands(folder.path()) {
        let message = rill(&args).failed();
        assert!(message.contains(&format!("{} does not exist", path.display())), "{message}");
    }
    // The description needs none.
    rill(args!["info", folder.path()]).done();
}

#[test]
fn a_vocabulary_without_a_chat_format_can_still_continue_a_text() {
    let folder = copy_of("fixtures/k3-tiny");
    let path = folder.path().join("tokenizer_config.json");
    fs::write(path, r#"{"added_tokens_decoder": {}}"#).unwrap();
    let message = rill(args!["run", "-m", folder.path(), "x"]).failed();
    assert!(message.contains("--raw"), "{message}");
    rill(args!["run", "-m", folder.path(), "--raw", "-n", "2", "x"]).done();
}

#[test]
fn a_truncated_shard_is_named() {
    for (name, keep) in
        [("model-00002-of-000003.safetensors", 0.9), ("model-00003-of-000003.safetensors", 0.0)]
    {
        let folder = copy_of("fixtures/k3-tiny");
        let path = folder.path().join(name);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..(bytes.len() as f64 * keep) as usize]).unwrap();
        every_command_fails(folder.path(), &[&display(&path), "is cut off"]);
    }
}

#[test]
fn a_missing_shard_is_named() {
    let folder = copy_of("fixtures/k3-tiny");
    let path = folder.path().join("model-00002-of-000003.safetensors");
    fs::remove_file(&path).unwrap();
    every_command_fails(folder.path(), &[&display(&path), "does not exist"]);
}

#[test]
fn an_experts_missing_tensor_is_named() {
    const TENSOR: &str = "language_model.model.layers.4.block_sparse_moe.experts.7.w2.weight_scale";
    let folder = copy_of("fixtures/k3-tiny");
    let index_path = folder.path().join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&index_path).unwrap()).unwrap();
    let shard = index["weight_map"].as_object_mut().unwrap().remove(TENSOR).unwrap();
    fs::write(&index_path, index.to_string()).unwrap();
    let path = folder.path().join(shard.as_str().unwrap());
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let rest = tensors.into_iter().filter(|(name, _)| name != TENSOR);
    fs::write(&path, safetensors::serialize(rest, None).unwrap()).unwrap();
    every_command_fails(folder.path(), &[&display(folder.path()), TENSOR]);
}

#[test]
fn a_damaged_expert_ends_the_text_where_it_is_first_needed() {
    let whole = rill(args!["run", "-m", repository("fixtures/k3-tiny"), "--raw", "-n", "12", "x"]);
    let whole = whole.done();
    let mut kept = 0;
    for expert in 0..12 {
        let tensor = format!(
            "language_model.model.layers.4.block_sparse_moe.experts.{expert}.w1.weight_scale"
        );
        let folder = copy_of("fixtures/k3-tiny");
        // The one scale that stands for no number.
        overwrite(folder.path(), &tensor, 255);
        let ended = rill(args!["run", "-m", folder.path(), "--raw", "-n", "12", "x"]);
        if ended.code == Some(0) {
            assert_eq!(ended.done(), whole, "{tensor} is not needed");
            continue;
        }
        assert_eq!(ended.code, Some(1), "{tensor}: {}", ended.stderr);
        let last_line = ended.stderr.lines().last().unwrap();
        let named = last_line.starts_with("rill: ") && last_line.contains(&tensor);
        assert!(named, "{}", ended.stderr);
        if let Some(text) = ended.text().strip_suffix('\n') {
            // A character whose end is missing is shown as one that cannot be read.
            assert!(whole.starts_with(text.trim_end_matches('\u{fffd}')), "{text:?}, {whole:?}");
            kept += 1;
        }
    }
    assert!(kept > 0, "no expert was needed only after the first token");
}

#[test]
fn a_flipped_byte_of_the_configuration_is_survived_or_named() {
    let folder = copy_of("fixtures/k3-tiny");
    let path = folder.path().join("config.json");
    let config = fs::read(&path).unwrap();
    let mut refused = 0;
    for (at, flip) in (0..config.len()).step_by(61).zip((0..8).cycle()) {
        let mut bytes = config.clone();
        bytes[at] ^= 1 << flip;
        fs::write(&path, &bytes).unwrap();
        let ended = rill(args!["run", "--raw", "-n", "1", "-q", "-m", folder.path(), "x"]);
        if ended.code != Some(0) {
            let message = ended.failed();
            assert!(message.contains(&display(folder.path())), "byte {at}, bit {flip}: {message}");
            refused += 1;
        }
    }
    assert!(refused >= 10, "only {refused} were noticed");
    fs::write(&path, &config[1..]).unwrap();
    every_command_fails(folder.path(), &[&display(folder.path()), "config.json"]);
}

#[test]
fn a_missing_text_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("nothing.txt"), folder.path().to_owned()] {
        for args in [
            args!["run", "--file", &path],
            args!["eval", "--file", &path],
            args!["tokenize", "--file", &path],
            args!["eval", "--perplexity", &path],
        ] {
            let message = rill(&args).failed();
            let expected = format!("cannot read {}: ", path.display());
            assert!(message.contains(&expected), "{args:?}: {message}");
        }
    }
}

#[test]
fn an_empty_prompt_is_not_a_question() {
    let (_folder, path) = file("\n");
    for args in [
        args!["run", ""],
        args!["run", "--raw", ""],
        args!["run"],
        args!["run", "-"],
        args!["run", "--file", &path],
        args!["eval", ""],
        args!["eval"],
    ] {
        assert!(rill(&args).failed().contains("the text is empty"), "{args:?}");
        assert!(rill_fed(&args, "\r\n").failed().contains("the text is empty"), "{args:?}");
    }
    for space in [" ", "\n\n", "\t \n"] {
        rill_fed(["run", "-n", "2"], space).done();
    }
}

#[test]
fn ids_outside_the_vocabulary_are_named() {
    let message = rill(["eval", "--ids", "1,2,4096"]).failed();
    assert!(message.contains("token 4096 at position 2"), "{message}");
    assert!(message.contains("vocabulary size 4096"), "{message}");
}

#[test]
fn a_prompt_longer_than_the_context_is_refused() {
    let model = repository("fixtures/k3-tiny");
    let prompt = "The quick brown fox. ".repeat(1000);
    for command in [&["run", "--raw"][..], &["run"], &["eval"]] {
        let mut args: Vec<OsString> = command.iter().map(OsString::from).collect();
        args.extend(args!["-m", &model, "-"]);
        let message = rill_fed(&args, &prompt).failed();
        assert!(message.contains("do not fit a context of 4096"), "{message}");
    }
}

#[test]
fn text_of_any_bytes_is_taken() {
    let noise: Vec<u8> = (0..=255).rev().take(100).chain(0..50).collect();
    let (_folder, path) = file(&noise);
    for args in [args!["run", "-n", "1", "--file", &path], args!["eval", "--file", &path]] {
        rill(&args).done();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn text_without_end_is_refused_before_it_fills_memory() {
    for args in [
        ["run", "--file", "/dev/zero"],
        ["tokenize", "--file", "/dev/zero"],
        ["eval", "--perplexity", "/dev/zero"],
    ] {
        let message = rill(args).failed();
        assert!(message.contains("/dev/zero has more than 64 MiB of text"), "{message}");
    }
}

#[cfg(unix)]
#[test]
fn a_named_pipe_is_a_file_and_a_link_is_a_folder() {
    use crate::common::{ANSWER, QUESTION};
    use std::process::Command;
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let writer = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::write(pipe, QUESTION).unwrap()
    });
    assert_eq!(rill(args!["run", "--file", &pipe]).done(), ANSWER);
    writer.join().unwrap();
    // A pipe in place of a file of the checkpoint is refused, not waited for.
    every_command_fails(&pipe, &[&display(&pipe), "is not a folder"]);
    let checkpoint = copy_of("fixtures/k3-tiny");
    for file in ["config.json", "model.safetensors.index.json", "model-00002-of-000003.safetensors"]
    {
        let kept = fs::read(checkpoint.path().join(file)).unwrap();
        fs::rename(&pipe, checkpoint.path().join(file)).unwrap();
        every_command_fails(checkpoint.path(), &[&display(checkpoint.path())]);
        fs::rename(checkpoint.path().join(file), &pipe).unwrap();
        fs::write(checkpoint.path().join(file), kept).unwrap();
    }

    let link = folder.path().join("link");
    std::os::unix::fs::symlink(repository("models/k3-nano"), &link).unwrap();
    assert_eq!(rill(args!["run", "-m", &link, QUESTION]).done(), ANSWER);
    let circle = folder.path().join("circle");
    std::os::unix::fs::symlink(&circle, &circle).unwrap();
    every_command_fails(&circle, &[&format!("cannot open {}: ", circle.display())]);
}
