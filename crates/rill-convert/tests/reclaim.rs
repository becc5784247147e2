//! Deleting the shards of a checkpoint while it is converted: never too early, and resumable. The
//! kills of a real process are in `rill-cli`'s tests.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rill_convert::{
    Control, ConvertError, ExpertCodec, Plan, Progress, Reclaim, Reclaimed, TrunkCodec, convert,
    convert_and_reclaim, deletions, open_checkpoint,
};
use rill_format::container::{Container, MANIFEST};
use rill_format::{Checkpoint, Folder, FormatError};
use rill_testkit::{tensors, write_checkpoint};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

const SHARDS: usize = 7;
const LEDGER: &str = "reclaim.log";

type Files = BTreeMap<String, Vec<u8>>;

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/k3-tiny")
}

/// k3-tiny in seven shards, so that records, runs and even experts lie in two.
fn source() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let original = Checkpoint::open(Folder::Disk(fixture())).unwrap();
    for name in ["config.json", "tiktoken.model", "tokenizer_config.json"] {
        fs::copy(fixture().join(name), dir.path().join(name)).unwrap();
    }
    let config = serde_json::from_slice(&fs::read(fixture().join("config.json")).unwrap()).unwrap();
    let read = |t: &rill_testkit::Tensor| original.read(original.require(&t.name).unwrap().id);
    write_checkpoint(dir.path(), &tensors(&config), SHARDS, |t| read(t).unwrap()).unwrap();
    dir
}

fn shard(number: usize) -> String {
    format!("model-{number:05}-of-{SHARDS:06}.safetensors")
}

fn shards_left(source: &Path) -> usize {
    (1..=SHARDS).filter(|&n| source.join(shard(n)).exists()).count()
}

fn files(folder: &Path) -> Files {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let read =
        |e: fs::DirEntry| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap());
    entries.map(read).collect()
}

fn plan(source: &Checkpoint) -> Plan {
    Plan::new(source, ExpertCodec::Q8, TrunkCodec::Q4).unwrap()
}

/// What a conversion that deletes nothing writes.
fn expected() -> Files {
    let source = source();
    let source = Checkpoint::open(Folder::Disk(source.path().to_owned())).unwrap();
    let to = tempfile::tempdir().unwrap();
    convert(&source, &plan(&source), to.path(), &Control { jobs: 2, progress: &go_on }).unwrap();
    files(to.path())
}

fn reclaim(
    from: &Path,
    to: &Path,
    trust: bool,
    control: &Control<'_>,
) -> Result<Reclaimed, ConvertError> {
    let source = open_checkpoint(Folder::Disk(from.to_owned()), to)?;
    let reclaim = Reclaim::new(&source, trust)?;
    convert_and_reclaim(&source, &plan(&source), to, control, &reclaim)
}

/// Runs a conversion to its end, and downloads again what that needs.
fn fetch_and_finish(from: &Path, to: &Path) {
    let download = source();
    for _ in 0..SHARDS {
        match reclaim(from, to, true, &Control { jobs: 1, progress: &go_on }) {
            Err(ConvertError::Source(FormatError::ShardGone { shard, .. })) => {
                let name = Path::new(&shard).file_name().unwrap();
                fs::copy(download.path().join(name), &shard).unwrap();
            }
            result => {
                result.unwrap();
                assert_eq!(shards_left(from), 0);
                return;
            }
        }
    }
    panic!("it wants more than all shards");
}

/// Stops after some tasks.
fn stop_after(n: usize) -> impl Fn(Progress) -> ControlFlow<()> + Sync {
    let done = AtomicUsize::new(0);
    move |_| match done.fetch_add(1, Ordering::Relaxed) {
        i if i >= n => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    }
}

#[test]
fn shards_go_one_by_one_each_after_its_line_and_the_container_is_the_same() {
    let expected = expected();
    for jobs in [1, 3] {
        let (from, to) = (source(), tempfile::tempdir().unwrap());
        let bytes: u64 =
            (1..=SHARDS).map(|n| fs::metadata(from.path().join(shard(n))).unwrap().len()).sum();
        let counts = Mutex::new(vec![SHARDS]);
        let progress = |_: Progress| {
            let ledger = fs::read_to_string(to.path().join(LEDGER)).unwrap();
            let gone: Vec<_> =
                (1..=SHARDS).filter(|&n| !from.path().join(shard(n)).exists()).collect();
            assert!(gone.iter().all(|&n| ledger.contains(&shard(n))), "{gone:?}\n{ledger}");
            assert!(!to.path().join(MANIFEST).exists());
            let mut counts = counts.lock().unwrap();
            if counts.last() != Some(&(SHARDS - gone.len())) {
                counts.push(SHARDS - gone.len());
            }
            ControlFlow::Continue(())
        };
        let control = Control { jobs, progress: &progress };
        let reclaimed = reclaim(from.path(), to.path(), true, &control).unwrap();
        assert_eq!(reclaimed, Reclaimed { files: SHARDS, bytes });
        assert_eq!(shards_left(from.path()), 0);
        assert!(from.path().join("config.json").exists(), "only shards are deleted");
        assert!(files(to.path()) == expected, "with {jobs} jobs");
        if jobs == 1 {
            assert!(counts.lock().unwrap().len() >= SHARDS - 1, "most go long before the end");
        }
        Container::open(to.path().to_owned()).unwrap();
        // Once more, with nothing left to convert.
        let error = reclaim(from.path(), to.path(), true, &control).unwrap_err();
        assert!(matches!(error, ConvertError::Exists { .. }), "{error}");
    }
}

#[test]
fn a_stopped_conversion_goes_on_without_the_shards_that_are_gone() {
    let expected = expected();
    let mut most_gone = 0;
    for n in [0, 3, 20, 33, 50, 75, 100, 105] {
        let (from, to) = (source(), tempfile::tempdir().unwrap());
        let progress = stop_after(n);
        let stopped =
            reclaim(from.path(), to.path(), true, &Control { jobs: 2, progress: &progress });
        assert!(matches!(stopped, Err(ConvertError::Cancelled)), "{stopped:?}");
        let left = shards_left(from.path());
        most_gone = most_gone.max(SHARDS - left);
        // A line that a crash cut off, and one after which the shard was not deleted.
        let ledger = to.path().join(LEDGER);
        let mut text = fs::read_to_string(&ledger).unwrap();
        let last = (1..=SHARDS).rev().find(|&n| from.path().join(shard(n)).exists()).unwrap();
        text.push_str(&format!(
            "{{\"file\":\"{}\",\"bytes\":1,\"covered_by\":[]}}\n{{\"file\":\"model",
            shard(last)
        ));
        fs::write(&ledger, text).unwrap();
        if left < SHARDS {
            let error = Checkpoint::open(Folder::Disk(from.path().to_owned())).unwrap_err();
            assert!(matches!(error, FormatError::MissingShard { .. }), "{error}");
        }
        let again = Control { jobs: 1, progress: &go_on };
        let reclaimed = reclaim(from.path(), to.path(), true, &again).unwrap();
        assert_eq!(reclaimed.files, left, "those that were left, {} of them", shard(last));
        assert_eq!(shards_left(from.path()), 0);
        assert!(files(to.path()) == expected, "stopped after {n}");
    }
    assert!(most_gone >= SHARDS - 2, "{most_gone}");
}

#[test]
fn a_conversion_that_deleted_shards_can_end_without_deleting_more() {
    let (from, to) = (source(), tempfile::tempdir().unwrap());
    let progress = stop_after(60);
    let _ = reclaim(from.path(), to.path(), true, &Control { jobs: 1, progress: &progress });
    let left = shards_left(from.path());
    assert!(left > 0 && left < SHARDS);
    let source = open_checkpoint(Folder::Disk(from.path().to_owned()), to.path()).unwrap();
    convert(&source, &plan(&source), to.path(), &Control { jobs: 1, progress: &go_on }).unwrap();
    assert_eq!(shards_left(from.path()), left);
    assert!(files(to.path()) == expected());
}

#[test]
fn damage_that_needs_a_deleted_shard_names_it_and_is_repaired_from_a_new_download() {
    let (from, to) = (source(), tempfile::tempdir().unwrap());
    let progress = stop_after(60);
    let _ = reclaim(from.path(), to.path(), true, &Control { jobs: 1, progress: &progress });
    let bank = to.path().join("experts-00001.rill");
    let mut bytes = fs::read(&bank).unwrap();
    bytes[20_000] ^= 1;
    fs::write(&bank, bytes).unwrap();
    let again = || reclaim(from.path(), to.path(), true, &Control { jobs: 1, progress: &go_on });
    let error = again().unwrap_err();
    let ConvertError::Source(FormatError::ShardGone { shard: gone, tensor }) = &error else {
        panic!("{error:?}")
    };
    assert!(tensor.contains(".layers.1.block_sparse_moe.experts.0."), "{tensor}");
    assert!(error.to_string().contains("download the shard once more"), "{error}");
    assert!(!Path::new(gone).exists());
    fetch_and_finish(from.path(), to.path());
    assert!(files(to.path()) == expected());
}

#[test]
fn a_shard_stays_when_a_task_that_reads_it_fails() {
    let (from, to) = (source(), tempfile::tempdir().unwrap());
    let whole = files(from.path());
    let tensor = "language_model.model.layers.3.block_sparse_moe.experts.5.w2.weight_scale";
    let checkpoint = Checkpoint::open(Folder::Disk(from.path().to_owned())).unwrap();
    let damaged = checkpoint.require(tensor).unwrap().shard.to_owned();
    let scales = checkpoint.read(checkpoint.require(tensor).unwrap().id).unwrap();
    let path = from.path().join(&damaged);
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(scales.len()).position(|w| w == scales).unwrap();
    bytes[at] = 255;
    fs::write(&path, bytes).unwrap();
    let again = || reclaim(from.path(), to.path(), true, &Control { jobs: 2, progress: &go_on });
    for _ in 0..2 {
        let error = again().unwrap_err().to_string();
        assert!(error.contains("layers.3.block_sparse_moe.experts.5.w2"), "{error}");
        assert!(path.exists());
    }
    assert!(shards_left(from.path()) < SHARDS, "those before it are gone");
    // Without checksums nobody knows since when it was wrong: what it shares with its neighbour is
    // made anew too.
    fs::write(&path, &whole[&damaged]).unwrap();
    fetch_and_finish(from.path(), to.path());
    assert!(files(to.path()) == expected());
}

#[test]
fn what_does_not_read_back_as_written_is_made_again_from_a_shard_that_is_still_there() {
    let (from, to) = (source(), tempfile::tempdir().unwrap());
    let bank = to.path().join("experts-00001.rill");
    let damaged = AtomicUsize::new(0);
    let progress = |_: Progress| {
        let mut bytes = fs::read(&bank).unwrap();
        // As soon as the third record is there.
        let third = 2 * bytes.len() / 12;
        if bytes[third] != 0 && damaged.fetch_add(1, Ordering::Relaxed) == 0 {
            bytes[third + 300] ^= 1;
            fs::write(&bank, bytes).unwrap();
        }
        ControlFlow::Continue(())
    };
    let control = Control { jobs: 1, progress: &progress };
    let error = reclaim(from.path(), to.path(), true, &control).unwrap_err();
    let ConvertError::ReadBack { what, shard, .. } = &error else { panic!("{error:?}") };
    assert_eq!(what, "expert 2 of layer 1");
    assert!(from.path().join(shard).exists());
    reclaim(from.path(), to.path(), true, &Control { jobs: 1, progress: &go_on }).unwrap();
    assert!(files(to.path()) == expected());
}

#[test]
fn a_source_that_changed_while_nobody_looked_is_converted_anew() {
    let expected = expected();
    for with_reclaim in [false, true] {
        let (from, to) = (source(), tempfile::tempdir().unwrap());
        let path = from.path().join(shard(2));
        let good = fs::read(&path).unwrap();
        let mut other = good.clone();
        // Weights of the same shape; only the last bytes, which are some expert's.
        let end = other.len();
        other[end - 200_000..].iter_mut().for_each(|b| *b ^= 1);
        fs::write(&path, other).unwrap();
        let run = |progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync)| {
            let control = Control { jobs: 1, progress };
            if with_reclaim {
                return reclaim(from.path(), to.path(), true, &control).map(|_| ());
            }
            let source = Checkpoint::open(Folder::Disk(from.path().to_owned())).unwrap();
            convert(&source, &plan(&source), to.path(), &control)
        };
        // The shard is converted in part.
        let stopped = run(&stop_after(18));
        assert!(matches!(stopped, Err(ConvertError::Cancelled)), "{stopped:?}");
        assert!(path.exists());
        fs::write(&path, good).unwrap();
        // Also when that is interrupted in turn.
        let stopped = run(&stop_after(0));
        assert!(matches!(stopped, Err(ConvertError::Cancelled)), "{stopped:?}");
        match with_reclaim {
            false => run(&go_on).unwrap(),
            true => fetch_and_finish(from.path(), to.path()),
        }
        assert!(files(to.path()) == expected, "reclaim: {with_reclaim}");
    }
}

fn sha256(path: &Path) -> String {
    let sum = Sha256::digest(fs::read(path).unwrap());
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn shards_are_compared_once_with_published_checksums() {
    let expected = expected();
    for with_list in [true, false] {
        let (from, to) = (source(), tempfile::tempdir().unwrap());
        let control = Control { jobs: 2, progress: &go_on };
        let error = reclaim(from.path(), to.path(), false, &control).unwrap_err();
        assert!(matches!(error, ConvertError::Unverified { .. }), "{error}");
        assert!(error.to_string().contains(&shard(1)), "{error}");
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);

        let sum = |n| sha256(&from.path().join(shard(n)));
        if with_list {
            let lines = (1..=SHARDS).map(|n| format!("{}  {}\n", sum(n), shard(n)));
            fs::write(from.path().join("SHA256SUMS"), lines.collect::<String>()).unwrap();
        } else {
            let notes = from.path().join(".cache/huggingface/download");
            fs::create_dir_all(&notes).unwrap();
            for n in 1..=SHARDS {
                let text = format!("0123abcd\n{}\n1700000000.0\n", sum(n));
                fs::write(notes.join(format!("{}.metadata", shard(n))), text).unwrap();
            }
        }
        // One that is not as published stays, and so does all that reads it.
        let path = from.path().join(shard(4));
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        let end = bad.len();
        bad[end - 10] ^= 1;
        fs::write(&path, bad).unwrap();
        let error = reclaim(from.path(), to.path(), false, &control).unwrap_err();
        assert!(matches!(error, ConvertError::WrongShard { .. }), "{error}");
        assert!(error.to_string().contains(&shard(4)), "{error}");
        assert!(path.exists() && shards_left(from.path()) < SHARDS);
        let log = fs::read_to_string(to.path().join("convert.log")).unwrap();
        assert!(log.contains("checked 0 ") && !log.contains("checked 3 "), "{log}");
        fs::write(&path, good).unwrap();
        reclaim(from.path(), to.path(), false, &control).unwrap();
        assert_eq!(shards_left(from.path()), 0);
        assert!(files(to.path()) == expected);
    }
}

#[test]
fn sources_that_must_not_be_deleted_are_refused_before_anything_is_written() {
    let to = tempfile::tempdir().unwrap();
    let to = to.path().join("new");
    let control = Control { jobs: 1, progress: &go_on };
    let refused = |from: &Path, named: &str| {
        let before = files(from);
        let error = reclaim(from, &to, true, &control).unwrap_err().to_string();
        assert!(error.contains(named), "no {named:?} in {error}");
        assert!(!to.exists() && files(from) == before);
    };
    let missing = source();
    fs::remove_file(missing.path().join(shard(3))).unwrap();
    refused(missing.path(), &shard(3));
    let cut_off = source();
    let file = fs::OpenOptions::new().write(true).open(cut_off.path().join(shard(3))).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    refused(cut_off.path(), &shard(3));

    const EMPTY: &[u8] = b"\x02\0\0\0\0\0\0\0{}";
    let memory = Folder::Memory { name: "demo", files: &[("model.safetensors", EMPTY)] };
    let error = Reclaim::new(&open_checkpoint(memory, &to).unwrap(), true).unwrap_err();
    assert!(matches!(error, ConvertError::NotReclaimable { .. }), "{error}");

    let own = source();
    let error = reclaim(own.path(), &own.path().join("new"), true, &control).unwrap_err();
    assert!(matches!(error, ConvertError::InSource { .. }), "{error}");
    assert_eq!(shards_left(own.path()), SHARDS);
}

#[cfg(unix)]
#[test]
fn links_are_refused_because_deleting_them_would_not_free_anything() {
    let to = tempfile::tempdir().unwrap();
    let control = Control { jobs: 1, progress: &go_on };
    for hard in [false, true] {
        let (from, elsewhere) = (source(), tempfile::tempdir().unwrap());
        let (here, there) = (from.path().join(shard(5)), elsewhere.path().join("blob"));
        let (reason, link): (_, fn(&Path, &Path) -> std::io::Result<()>) = match hard {
            true => ("hard link", |a, b| fs::hard_link(a, b)),
            false => ("is a link", |a, b| std::os::unix::fs::symlink(a, b)),
        };
        fs::rename(&here, &there).unwrap();
        link(&there, &here).unwrap();
        let error = reclaim(from.path(), to.path(), true, &control).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains(&shard(5)), "{error}");
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
        assert_eq!(shards_left(from.path()), SHARDS);
    }
}

#[test]
fn a_schedule_lists_every_shard_in_order_and_touches_nothing() {
    let from = source();
    let before = files(from.path());
    let checkpoint = Checkpoint::open(Folder::Disk(from.path().to_owned())).unwrap();
    let plan = plan(&checkpoint);
    let list = deletions(&checkpoint, &plan, &Reclaim::new(&checkpoint, true).unwrap());
    let names: Vec<String> = list.iter().map(|d| d.file.clone()).collect();
    let mut sorted = names.clone();
    sorted.sort();
    assert_eq!(sorted, (1..=SHARDS).map(shard).collect::<Vec<_>>());
    assert!(list.is_sorted_by_key(|d| d.written_bytes));
    assert!(list[0].written_bytes < plan.container_bytes() / 3, "{list:?}");
    assert!(list.iter().all(|d| before[&d.file].len() as u64 == d.bytes));
    assert!(files(from.path()) == before);
}
