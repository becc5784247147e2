//! What a kill or a power cut can leave behind, and that the next run ends with the same bytes. The
//! kills of a real process are in `rill-cli`'s tests.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;

use rill_convert::{Control, ConvertError, ExpertCodec, Plan, Progress, TrunkCodec, convert};
use rill_format::container::MANIFEST;
use rill_format::{Checkpoint, Folder};

const NOTE: &str = "convert.json";
/// Bytes that a drive loses or keeps together.
const PAGE_BYTES: usize = 4096;

fn source() -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/k3-tiny");
    Checkpoint::open(Folder::Disk(path)).expect("a checkpoint of the repository")
}

fn plan(checkpoint: &Checkpoint) -> Plan {
    Plan::new(checkpoint, ExpertCodec::Q8, TrunkCodec::Q4).expect("it can be planned")
}

fn finish(plan: &Plan, to: &Path) -> Result<(), ConvertError> {
    let progress = |_: Progress| ControlFlow::Continue(());
    convert(&source(), plan, to, &Control { jobs: 2, progress: &progress })
}

type Files = BTreeMap<String, Vec<u8>>;

fn files(folder: &Path) -> Files {
    let entries = fs::read_dir(folder).expect("the folder is there").flatten();
    let read = |e: fs::DirEntry| {
        (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).expect("it reads"))
    };
    entries.map(read).collect()
}

fn folder_of(files: &Files) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).expect("there is room");
    }
    dir
}

/// What lies on disk after every task of a conversion, and at its end.
fn images() -> (Vec<Files>, Files) {
    let checkpoint = source();
    let dir = tempfile::tempdir().expect("a temporary folder");
    let images = Mutex::new(Vec::new());
    let progress = |_: Progress| {
        images.lock().expect("one thread").push(files(dir.path()));
        ControlFlow::Continue(())
    };
    let control = Control { jobs: 1, progress: &progress };
    convert(&checkpoint, &plan(&checkpoint), dir.path(), &control).expect("it converts");
    (images.into_inner().expect("one thread"), files(dir.path()))
}

#[test]
fn a_power_cut_after_any_task_is_survived_whatever_pages_it_loses() {
    let (images, expected) = images();
    assert!(images.len() > 100, "{}", images.len());
    let plan = plan(&source());
    let mut random = 1u64;
    let mut below = |n: usize| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as usize % n
    };
    for (task, image) in images.iter().enumerate().step_by(12) {
        assert!(!image.contains_key(MANIFEST), "not a container before it is whole");
        for lose_one_in in [usize::MAX, 40, 3] {
            let mut image = image.clone();
            for (name, bytes) in image.iter_mut().filter(|(name, _)| name.ends_with(".rill")) {
                assert_eq!(bytes.len(), expected[name].len(), "files have their final size");
                for page in bytes.chunks_mut(PAGE_BYTES).filter(|_| below(lose_one_in) == 0) {
                    page.fill(0);
                }
            }
            let dir = folder_of(&image);
            finish(&plan, dir.path()).unwrap();
            assert!(files(dir.path()) == expected, "after task {task}, 1 in {lose_one_in} lost");
        }
    }
}

#[test]
fn notes_cut_off_at_any_byte_are_survived() {
    let (images, expected) = images();
    let plan = plan(&source());
    let image = &images[8];
    for name in [NOTE, "convert.log"] {
        let bytes = &image[name];
        for keep in (0..bytes.len()).step_by(13) {
            let mut image = image.clone();
            image.insert(name.to_owned(), bytes[..keep].to_vec());
            let dir = folder_of(&image);
            finish(&plan, dir.path()).unwrap();
            assert!(files(dir.path()) == expected, "{name} cut off after {keep} bytes");
        }
    }
}

#[test]
fn a_container_that_is_whole_but_for_its_notes_needs_one_more_call() {
    let (images, expected) = images();
    let checkpoint = source();
    let notes = images.last().unwrap();
    for left in [&[NOTE, "convert.log"][..], &[NOTE]] {
        let mut image = expected.clone();
        for name in left {
            image.insert((*name).to_owned(), notes[*name].clone());
        }
        let dir = folder_of(&image);
        let other = Plan::new(&checkpoint, ExpertCodec::Source, TrunkCodec::Q4).unwrap();
        let result = finish(&other, dir.path());
        assert!(matches!(result, Err(ConvertError::OtherPlan { .. })), "{result:?}");
        finish(&plan(&checkpoint), dir.path()).unwrap();
        assert!(files(dir.path()) == expected, "{left:?} were left");
        let result = finish(&plan(&checkpoint), dir.path());
        assert!(matches!(result, Err(ConvertError::Exists { .. })), "{result:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_destination_in_the_source_is_refused_under_any_name() {
    let dir = folder_of(&files(&match source().folder() {
        Folder::Disk(path) => path.clone(),
        Folder::Memory { .. } => unreachable!("it is on disk"),
    }));
    let checkpoint = Checkpoint::open(Folder::Disk(dir.path().to_owned())).unwrap();
    let before = files(dir.path());
    let outside = tempfile::tempdir().unwrap();
    let link = outside.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    let inside = dir.path().join("out");
    let name = dir.path().file_name().unwrap();
    let progress = |_: Progress| ControlFlow::Continue(());
    let refused = |plan: &Plan, to: &Path| {
        let result = convert(&checkpoint, plan, to, &Control { jobs: 1, progress: &progress });
        assert!(
            matches!(result, Err(ConvertError::InSource { .. })),
            "{}: {result:?}",
            to.display()
        );
        assert!(files(dir.path()) == before, "{}", to.display());
    };
    for to in [
        dir.path().to_owned(),
        inside.clone(),
        dir.path().join("a/b/../c"),
        dir.path().join("../new").join("..").join(name).join("out"),
        link.clone(),
        link.join("out"),
    ] {
        refused(&plan(&checkpoint), &to);
    }
    // Nor may a part of the records go there.
    let spread = plan(&checkpoint).spread(&[(inside, 1.0)]).unwrap();
    refused(&spread, &outside.path().join("apart"));
    assert!(!outside.path().join("apart").exists());
}
