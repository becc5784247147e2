//! `rill synth`, without ever writing as much as it would.

use std::fs;

use crate::common::{args, file, rill};

const K3: [&str; 3] = ["synth", "--like", "kimi-k3"];
const LINEAR: [&str; 3] = ["synth", "--like", "kimi-linear-48b"];

#[test]
fn an_estimate_says_how_large_it_gets() {
    let text = rill(K3.into_iter().chain(["--layers", "2", "--estimate"])).done();
    assert!(text.contains("15.74 GB in 896 records of 17.56 MB"), "{text}");
    let coded = ["--layers", "2", "--experts", "mxfp4z", "--estimate"];
    let text = rill(K3.into_iter().chain(coded)).done();
    assert!(text.contains("in 896 records of up to 14.97 MB"), "{text}");
    let text = rill(LINEAR.into_iter().chain(["--layers", "10", "--estimate"])).done();
    assert!(text.contains("in 2304 records of 3.65 MB"), "{text}");
    let ten = ["--layers", "10", "--format", "waste", "--estimate"];
    let text = rill(LINEAR.into_iter().chain(ten)).done();
    assert!(text.contains("container   7.20 GB"), "{text}");
    assert!(text.contains("6.14 GB in 2304 records of 2.67 MB"), "{text}");
    let published = ["--experts", "source", "--trunk", "source", "--estimate"];
    let text = rill(LINEAR.into_iter().chain(published)).done();
    assert!(text.contains("in 6656 records of 14.17 MB"), "{text}");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let missing = rill(["synth", "out"]).misused();
    assert!(missing.contains("--like"), "{missing}");
    let nowhere = rill(K3).misused();
    assert!(nowhere.contains("OUT"), "{nowhere}");
    let both = rill(K3.into_iter().chain(["--format", "waste", "--experts", "q4", "out"]));
    assert!(both.misused().contains("--experts"));
    let one = rill(K3.into_iter().chain(["--layers", "1", "--estimate"])).failed();
    assert!(one.contains("2 to 93 layers") && one.contains("found 1"), "{one}");
}

#[test]
fn a_folder_with_something_in_it_is_left_alone() {
    let (folder, path) = file("mine");
    let text = rill(args![LINEAR[0], LINEAR[1], LINEAR[2], "--layers", "2", folder.path()]);
    let message = text.failed();
    assert!(message.contains("not empty"), "{message}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    assert_eq!(fs::read(path).unwrap(), b"mine");
}

#[cfg(unix)]
#[test]
fn stopped_it_leaves_no_container_and_says_what_to_do() {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut command =
        crate::common::command(args![LINEAR[0], LINEAR[1], LINEAR[2], "--layers", "2", &out]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while !out.join("experts-00001.rill").exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited for it to begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    let kill = Command::new("kill").arg("-INT").arg(child.id().to_string()).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("is no container, remove it"), "{stderr}");
    assert!(!out.join("manifest.json").exists());
}

#[test]
fn a_loss_that_random_weights_cannot_choose_is_refused() {
    let args = args!["synth", "--like", "kimi-k3", "--experts", "mxfp4z:3.4", "--estimate"];
    let message = rill(args).misused();
    assert!(message.contains("take --experts mxfp4z"), "{message}");
}
