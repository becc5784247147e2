//! Disks that are too small, fill up or cannot be written, as small file systems in memory. Where
//! this process may not mount one, these report as ignored, by name; they never pass unrun.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use libtest_mimic::{Arguments, Failed, Trial};
use rill_convert::{
    Control, ConvertError, ExpertCodec, Plan, Progress, Reclaim, TrunkCodec, convert,
    convert_and_reclaim,
};
use rill_format::container::MANIFEST;
use rill_format::{Checkpoint, Folder};
use tempfile::TempDir;

/// What a conversion makes.
type Codecs = (ExpertCodec, TrunkCodec);

const Q8: Codecs = (ExpertCodec::Q8, TrunkCodec::Q4);
const MXFP4Z: Codecs = (ExpertCodec::Mxfp4z, TrunkCodec::Q8);
const TRELLIS: Codecs = (ExpertCodec::Trellis { rate: 23 }, TrunkCodec::Trellis { rate: 28 });

/// Bytes of the small disk: room for k3-tiny, and not for k3-nano.
const DISK_BYTES: u64 = 6 << 20;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // One after another: a program that another test starts to mount its disk has this one's open files until it runs, and with
    // them the space of deleted ones.
    args.test_threads = Some(1);
    let refused = !args.list && Disk::mount().is_none();
    if refused {
        eprintln!("SKIP: no file system can be mounted here, so no disk can be made to fill up");
    }
    let on_disk = |name: &str, run: fn() -> Result<(), Failed>| {
        Trial::test(name, run).with_ignored_flag(refused)
    };
    let trials = vec![
        on_disk("a_disk_that_is_too_small_is_refused_with_numbers", too_small),
        on_disk("a_disk_that_fills_up_keeps_what_is_written", || fills_up(Q8, &CASES)),
        on_disk("so_it_does_of_entropy_coded_experts", || fills_up(MXFP4Z, &CASES[1..4])),
        on_disk("so_it_does_of_trellis_codes", || fills_up(TRELLIS, &CASES[3..4])),
        on_disk("a_disk_without_a_byte_to_spare_is_refused_with_numbers", full_before),
        on_disk("a_read_only_disk_is_named", read_only),
        on_disk("room_for_one_copy_is_enough_when_shards_are_deleted", || one_copy(Q8)),
        on_disk("so_it_is_of_entropy_coded_experts", || one_copy(MXFP4Z)),
        on_disk("so_it_is_of_trellis_codes", || one_copy(TRELLIS)),
    ];
    libtest_mimic::run(&args, trials).exit_code()
}

fn too_small() -> Result<(), Failed> {
    let disk = Disk::mount().ok_or("it could be mounted before")?;
    let nano = source("models/k3-nano");
    let large = Plan::new(&nano, ExpertCodec::Q8, TrunkCodec::Source)?;
    let folder = disk.path().join("container");
    let error = convert(&nano, &large, &folder, &go_on()).unwrap_err();
    let message = error.to_string();
    match error {
        ConvertError::NoSpace { needed_bytes, available_bytes, .. } => {
            assert_eq!(needed_bytes, large.container_bytes() + large.manifest_bytes());
            assert!(available_bytes <= DISK_BYTES && available_bytes > DISK_BYTES / 2);
            for number in [needed_bytes, available_bytes] {
                assert!(message.contains(&number.to_string()), "{message}");
            }
        }
        error => return Err(format!("{error:?}").into()),
    }
    assert_eq!(fs::read_dir(&folder)?.count(), 0, "nothing is begun");
    // What the message advises can be done: something smaller, in the same place.
    let tiny = source("fixtures/k3-tiny");
    convert(&tiny, &small(&tiny, Q8), &folder, &go_on())?;
    assert_eq!(files(&folder), expected(Q8));
    Ok(())
}

/// Jobs, and tasks after which the disk is full.
const CASES: [(usize, usize); 7] = [(1, 0), (1, 4), (1, 10), (2, 30), (1, 70), (1, 104), (1, 105)];

fn fills_up(codecs: Codecs, cases: &[(usize, usize)]) -> Result<(), Failed> {
    let tiny = source("fixtures/k3-tiny");
    let plan = small(&tiny, codecs);
    let expected = expected(codecs);
    for &(jobs, full_after) in cases {
        let disk = Disk::mount().ok_or("it could be mounted before")?;
        let folder = disk.path().join("container");
        let ballast = disk.path().join("ballast");
        let done = AtomicUsize::new(0);
        let progress = |_: Progress| {
            if done.fetch_add(1, Ordering::Relaxed) == full_after {
                fill(&ballast);
            }
            ControlFlow::Continue(())
        };
        let result = convert(&tiny, &plan, &folder, &Control { jobs, progress: &progress });
        let message = result.expect_err("the disk is full").to_string();
        let path = folder.display().to_string();
        assert!(message.starts_with(&path), "full after {full_after}: {message}");
        assert!(message.contains("free some space and run it again"), "{message}");
        assert!(!folder.join(MANIFEST).exists());
        // Still full: the same again, now with the numbers or from the system.
        let message = convert(&tiny, &plan, &folder, &go_on()).expect_err("still full").to_string();
        assert!(message.starts_with(&path) && message.contains("free some"), "{message}");
        assert!(!folder.join(MANIFEST).exists());
        fs::remove_file(&ballast)?;
        convert(&tiny, &plan, &folder, &go_on())?;
        assert!(files(&folder) == expected, "full after {full_after}");
    }
    Ok(())
}

fn full_before() -> Result<(), Failed> {
    let disk = Disk::mount().ok_or("it could be mounted before")?;
    let folder = disk.path().join("container");
    fs::create_dir(&folder)?;
    fill(&disk.path().join("ballast"));
    let tiny = source("fixtures/k3-tiny");
    let error = convert(&tiny, &small(&tiny, Q8), &folder, &go_on()).unwrap_err();
    assert!(matches!(error, ConvertError::NoSpace { available_bytes: 0, .. }), "{error:?}");
    assert_eq!(fs::read_dir(&folder)?.count(), 0);
    Ok(())
}

fn read_only() -> Result<(), Failed> {
    let disk = Disk::mount().ok_or("it could be mounted before")?;
    let empty = disk.path().join("empty");
    fs::create_dir(&empty)?;
    assert!(run("mount", &["-o", "remount,ro"], disk.path()), "it cannot be made read-only");
    let tiny = source("fixtures/k3-tiny");
    for folder in [empty, disk.path().join("new")] {
        let error = convert(&tiny, &small(&tiny, Q8), &folder, &go_on()).unwrap_err().to_string();
        assert!(error.starts_with(&folder.display().to_string()), "{error}");
        assert!(error.contains("Read-only") && error.contains("permissions"), "{error}");
    }
    Ok(())
}

fn one_copy(codecs: Codecs) -> Result<(), Failed> {
    let disk = Disk::mount().ok_or("it could be mounted before")?;
    let (from, to) = (disk.path().join("from"), disk.path().join("to"));
    let tiny = in_nine_shards(&from)?;
    let plan = small(&tiny, codecs);
    // Records that differ in size lie in the order of the shards, so only these give the same bytes.
    let elsewhere = tempfile::tempdir()?;
    let copy = in_nine_shards(&elsewhere.path().join("from"))?;
    convert(&copy, &plan, &elsewhere.path().join("to"), &go_on())?;
    let error = convert(&tiny, &plan, &to, &go_on()).unwrap_err();
    assert!(matches!(error, ConvertError::NoSpace { .. }), "{error:?}");
    let reclaim = Reclaim::new(&tiny, true)?;
    let reclaimed = convert_and_reclaim(&tiny, &plan, &to, &go_on(), &reclaim)?;
    assert_eq!(reclaimed.files, 9);
    assert!(files(&to) == files(&elsewhere.path().join("to")));
    Ok(())
}

/// The tiny model in so many files that they can go one by one.
fn in_nine_shards(folder: &Path) -> Result<Checkpoint, Failed> {
    fs::create_dir(folder)?;
    let original = source("fixtures/k3-tiny");
    for name in ["config.json", "tiktoken.model", "tokenizer_config.json"] {
        fs::write(folder.join(name), original.folder().read(name, 1 << 20)?)?;
    }
    let config = serde_json::from_slice(&original.folder().read("config.json", 1 << 20)?)?;
    let read = |t: &rill_testkit::Tensor| original.read(original.require(&t.name).unwrap().id);
    rill_testkit::write_checkpoint(folder, &rill_testkit::tensors(&config), 9, |t| {
        read(t).unwrap()
    })?;
    Ok(Checkpoint::open(Folder::Disk(folder.to_owned()))?)
}

fn source(path: &str) -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    Checkpoint::open(Folder::Disk(path)).unwrap()
}

fn small(checkpoint: &Checkpoint, (experts, trunk): Codecs) -> Plan {
    Plan::new(checkpoint, experts, trunk).unwrap()
}

fn go_on() -> Control<'static> {
    Control { jobs: 2, progress: &|_| ControlFlow::Continue(()) }
}

/// What a conversion with room enough writes.
fn expected(codecs: Codecs) -> BTreeMap<String, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let tiny = source("fixtures/k3-tiny");
    convert(&tiny, &small(&tiny, codecs), dir.path(), &go_on()).unwrap();
    files(dir.path())
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let read = |e: fs::DirEntry| {
        (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).unwrap())
    };
    entries.map(read).collect()
}

/// Takes every byte that is left.
fn fill(path: &Path) {
    let mut file = File::create(path).unwrap();
    while file.write(&[0x5a; 4096]).is_ok_and(|n| n > 0) {}
}

/// A small file system in memory, gone when dropped.
struct Disk(TempDir);

impl Disk {
    /// `None` where that is not allowed.
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={DISK_BYTES}");
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs"], dir.path()).then_some(Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        run("umount", &[], self.path());
    }
}

fn run(program: &str, args: &[&str], path: &Path) -> bool {
    let mut command = Command::new(program);
    command.args(args).arg(path);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
