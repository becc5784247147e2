//! Containers whose records differ in size: entropy-coded experts.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

use rill_convert::{
    Control, ConvertError, ConvertSource, ExpertCodec, Plan, Progress, Reclaim, TrunkCodec,
    convert, convert_and_reclaim, open_checkpoint, verify, weight_errors,
};
use rill_format::container::{ALIGN, Container, MANIFEST};
use rill_format::{Checkpoint, Folder};
use rill_kernels::Mxfp4zMatrix;
use tempfile::TempDir;

type Files = BTreeMap<String, Vec<u8>>;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A model with records of two to five units, in nine shards.
fn uneven() -> Checkpoint {
    static FOLDER: LazyLock<TempDir> = LazyLock::new(sharded);
    Checkpoint::open(Folder::Disk(FOLDER.path().to_owned())).unwrap()
}

fn plan(source: &dyn ConvertSource) -> Plan {
    Plan::new(source, ExpertCodec::Mxfp4z, TrunkCodec::Q4).unwrap()
}

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn finish(source: &dyn ConvertSource, to: &Path, jobs: usize) -> Result<(), ConvertError> {
    convert(source, &plan(source), to, &Control { jobs, progress: &go_on })
}

/// Stops after some tasks.
fn stop_after(n: usize) -> impl Fn(Progress) -> ControlFlow<()> + Sync {
    let done = AtomicUsize::new(0);
    move |_| match done.fetch_add(1, Ordering::Relaxed) {
        i if i >= n => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    }
}

fn files(folder: &Path) -> Files {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let read =
        |e: fs::DirEntry| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap());
    entries.filter(|e| e.path().is_file()).map(read).collect()
}

fn expected() -> Files {
    let dir = tempfile::tempdir().unwrap();
    finish(&uneven(), dir.path(), 1).unwrap();
    files(dir.path())
}

fn check(folder: &Path) -> Result<(), ConvertError> {
    verify(&Container::open(folder.to_owned())?, &Control { jobs: 2, progress: &go_on })
}

#[test]
fn every_nibble_comes_back_and_records_are_as_large_as_they_must_be() {
    let nano = Checkpoint::open(Folder::Disk(repository("models/k3-nano"))).unwrap();
    let units =
        [(nano, 1..2), (uneven(), 2..6)].map(|(source, units)| (round_trip(&source), units));
    for (found, units) in units {
        assert!(found.iter().all(|n| units.contains(n)), "{found:?}");
        assert_eq!(BTreeSet::from_iter(found).len(), units.len(), "all of these occur");
    }
}

/// Converts, compares every nibble, and returns every record's size in units.
fn round_trip(source: &Checkpoint) -> Vec<usize> {
    let dir = tempfile::tempdir().unwrap();
    finish(source, dir.path(), 2).unwrap();
    check(dir.path()).unwrap();
    let experts = ConvertSource::experts(source).unwrap().unwrap();
    let container = Container::open(dir.path().to_owned()).unwrap();
    let layout = container.layout().unwrap();
    let (mut units, mut published, mut coded, mut padded) = (Vec::new(), 0, 0, 0);
    for (bank, of) in container.bank_list().iter().enumerate() {
        for expert in 0..of.experts {
            let theirs = source.read_expert(&experts, bank, expert).unwrap();
            let mut record = vec![0; container.record_bytes(of.layer, expert)];
            container.read_record(of.layer, expert, true, &mut record).unwrap();
            let own = container.record_layout(of.layer, expert, &record).unwrap();
            for (index, (codes, scales)) in theirs.iter().enumerate() {
                let (rows, cols) = (layout.matrices[index].rows, layout.matrices[index].cols);
                let (bytes, none) = own.matrix(&record, index);
                assert!(none.is_empty() && bytes.len() as u64 <= layout.matrices[index].code_bytes);
                let packed = Mxfp4zMatrix::new(rows as usize, cols as usize, bytes).unwrap();
                let (mut found, mut found_scales) = (vec![0; codes.len()], vec![0; scales.len()]);
                packed.unpack(&mut found, &mut found_scales).unwrap();
                let merged = |nibble: u8| if nibble == 8 { 0 } else { nibble };
                let wanted = codes.iter().map(|c| merged(c & 15) | merged(c >> 4) << 4);
                assert!(found.into_iter().eq(wanted) && found_scales == *scales);
                published += codes.len() + scales.len();
                coded += packed.payload_bits() as usize / 8;
            }
            padded += record.len();
            units.push(record.len() / ALIGN);
        }
    }
    let lossless = Plan::new(source, ExpertCodec::Source, TrunkCodec::Q4).unwrap();
    println!(
        "{} records: mxfp4 {published} bytes, entropy-coded {coded}, records {padded}, as mxfp4 {}",
        units.len(),
        lossless.expert_bytes()
    );
    assert!(coded < published && layout.record_bytes.is_multiple_of(ALIGN));
    assert!(plan(source).expert_bytes() >= padded as u64, "an estimate is what it takes at most");
    // What `rill verify --source` says: −0 and +0 are equal weights.
    let control = Control { jobs: 2, progress: &go_on };
    let errors = weight_errors(&container, source, &control).unwrap();
    assert!(errors.iter().filter(|e| e.experts).all(|e| e.worst == 0.0), "{errors:?}");
    units
}

#[test]
fn any_number_of_jobs_writes_the_same_bytes_and_counts_them_all() {
    let expected = expected();
    for jobs in [2, 5] {
        let (dir, last) = (tempfile::tempdir().unwrap(), Mutex::new((0, 0)));
        let progress = |p: Progress| {
            assert!(p.done_bytes <= p.total_bytes);
            let mut last = last.lock().unwrap();
            *last = (*last).max((p.done_bytes, p.total_bytes));
            ControlFlow::Continue(())
        };
        let source = uneven();
        convert(&source, &plan(&source), dir.path(), &Control { jobs, progress: &progress })
            .unwrap();
        assert!(files(dir.path()) == expected, "{jobs} jobs");
        let last = last.lock().unwrap();
        // Small files are written at the very end.
        let rest = |name: &&String| !name.ends_with(".rill") && *name != MANIFEST;
        let small: usize = expected.keys().filter(rest).map(|name| expected[name].len()).sum();
        assert_eq!(last.1 - last.0, small as u64);
    }
}

#[test]
fn a_stopped_conversion_goes_on_to_the_same_bytes_whoever_was_waiting() {
    let (source, expected) = (uneven(), expected());
    let plan = plan(&source);
    for (n, jobs) in [(0, 1), (3, 5), (9, 2), (20, 5), (50, 1), (77, 5)] {
        let dir = tempfile::tempdir().unwrap();
        let progress = stop_after(n);
        let stopped = convert(&source, &plan, dir.path(), &Control { jobs, progress: &progress });
        assert!(matches!(stopped, Err(ConvertError::Cancelled)), "{stopped:?}");
        assert!(!dir.path().join(MANIFEST).exists());
        finish(&source, dir.path(), jobs).unwrap();
        assert!(files(dir.path()) == expected, "stopped after {n} with {jobs} jobs");
    }
}

#[test]
fn whatever_pages_a_power_cut_loses_the_bytes_are_the_same_in_the_end() {
    let (source, expected) = (uneven(), expected());
    let plan = plan(&source);
    let mut random = 1u64;
    let mut below = |n: usize| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as usize % n
    };
    for n in [12, 40, 70] {
        let dir = tempfile::tempdir().unwrap();
        let progress = stop_after(n);
        let _ = convert(&source, &plan, dir.path(), &Control { jobs: 2, progress: &progress });
        let image = files(dir.path());
        for one_in in [3, 20] {
            for (name, bytes) in &image {
                let mut bytes = bytes.clone();
                if name.ends_with(".rill") {
                    for page in bytes.chunks_mut(4096).filter(|_| below(one_in) == 0) {
                        page.fill(0);
                    }
                    // The end may be lost, or be there as zeros.
                    let n = bytes.len();
                    bytes.resize(if below(2) == 0 { n + 9000 } else { n - n / 5 }, 0);
                }
                fs::write(dir.path().join(name), bytes).unwrap();
            }
            finish(&source, dir.path(), 2).unwrap();
            assert!(files(dir.path()) == expected, "after {n}, 1 in {one_in} lost");
            // Back to the interrupted state.
            for name in files(dir.path()).keys() {
                fs::remove_file(dir.path().join(name)).unwrap();
            }
        }
    }
}

#[test]
fn records_spread_over_folders_are_the_same_records() {
    let whole = tempfile::tempdir().unwrap();
    finish(&uneven(), whole.path(), 1).unwrap();
    let source = uneven();
    let mut placed = Vec::new();
    let folders: Vec<TempDir> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    for jobs in [1, 5] {
        for folder in &folders {
            for name in files(folder.path()).keys() {
                fs::remove_file(folder.path().join(name)).unwrap();
            }
        }
        let shares = [(folders[1].path().to_owned(), 2.0)];
        let plan = plan(&source).spread(&shares).unwrap();
        let to = folders[0].path();
        let progress = stop_after(30);
        let _ = convert(&source, &plan, to, &Control { jobs, progress: &progress });
        convert(&source, &plan, to, &Control { jobs, progress: &go_on }).unwrap();
        check(to).unwrap();
        placed.push([files(to), files(folders[1].path())]);
    }
    assert!(placed[0] == placed[1], "any number of jobs");
    let open = |folder: &Path| Container::open(folder.to_owned()).unwrap();
    let (spread, whole) = (open(folders[0].path()), open(whole.path()));
    assert_eq!(spread.manifest().fingerprint, whole.manifest().fingerprint);
    for bank in whole.bank_list() {
        for expert in 0..bank.experts {
            let mut x = vec![0; whole.record_bytes(bank.layer, expert)];
            let mut y = vec![0; spread.record_bytes(bank.layer, expert)];
            whole.read_record(bank.layer, expert, true, &mut x).unwrap();
            spread.read_record(bank.layer, expert, true, &mut y).unwrap();
            assert!(x == y);
        }
    }
}

#[test]
fn a_container_of_such_records_is_a_source_like_any_other() {
    let coded = tempfile::tempdir().unwrap();
    finish(&uneven(), coded.path(), 2).unwrap();
    let container = Container::open(coded.path().to_owned()).unwrap();
    for experts in [ExpertCodec::Source, ExpertCodec::Mxfp4z] {
        let again = tempfile::tempdir().unwrap();
        let plan = Plan::new(&container, experts, TrunkCodec::Source).unwrap();
        convert(&container, &plan, again.path(), &Control { jobs: 2, progress: &go_on }).unwrap();
        assert!(files(again.path()) == files(coded.path()), "{experts:?}");
    }
    // Other formats are made from its weights, which are the checkpoint's.
    let (direct, around) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let to_q8 = |source: &dyn ConvertSource, trunk, to: &Path| {
        let plan = Plan::new(source, ExpertCodec::Q8, trunk).unwrap();
        convert(source, &plan, to, &Control { jobs: 2, progress: &go_on }).unwrap();
    };
    to_q8(&uneven(), TrunkCodec::Q4, direct.path());
    to_q8(&container, TrunkCodec::Source, around.path());
    assert!(files(direct.path()) == files(around.path()));
}

#[test]
fn experts_that_are_not_mxfp4_are_refused_with_advice() {
    let path = repository("fixtures/kimi-linear-tiny");
    let source = Checkpoint::open(Folder::Disk(path)).unwrap();
    let error = Plan::new(&source, ExpertCodec::Mxfp4z, TrunkCodec::Source).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("mxfp4") && error.contains("--experts source"), "{error}");
}

fn sharded() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let tiny = repository("fixtures/k3-tiny");
    rill_testkit::write_uneven_experts(dir.path(), &tiny, 9).unwrap();
    dir
}

fn shards(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().flatten().map(|e| e.path());
    let mut shards: Vec<_> =
        entries.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    shards.sort();
    shards
}

#[test]
fn shards_go_while_records_grow_and_a_stopped_conversion_needs_none_of_them_again() {
    let expected = {
        let (from, to) = (sharded(), tempfile::tempdir().unwrap());
        let source = Checkpoint::open(Folder::Disk(from.path().to_owned())).unwrap();
        finish(&source, to.path(), 2).unwrap();
        files(to.path())
    };
    for (n, jobs) in [(usize::MAX, 3), (25, 5), (60, 1), (80, 2)] {
        let (from, to) = (sharded(), tempfile::tempdir().unwrap());
        let reclaim = |progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync)| {
            let folder = Folder::Disk(from.path().to_owned());
            let source = open_checkpoint(folder, to.path())?;
            let reclaim = Reclaim::new(&source, true)?;
            let control = Control { jobs, progress };
            convert_and_reclaim(&source, &plan(&source), to.path(), &control, &reclaim)
        };
        if n < usize::MAX {
            let stopped = reclaim(&stop_after(n));
            assert!(matches!(stopped, Err(ConvertError::Cancelled)), "{stopped:?}");
        }
        let left = shards(from.path()).len();
        assert_eq!(reclaim(&go_on).unwrap().files, left);
        assert!(shards(from.path()).is_empty());
        assert!(files(to.path()) == expected, "stopped after {n} with {jobs} jobs");
    }
}

#[test]
fn what_was_made_from_a_changed_shard_and_all_that_follows_it_is_made_anew() {
    let (from, to) = (sharded(), tempfile::tempdir().unwrap());
    let open = || Checkpoint::open(Folder::Disk(from.path().to_owned())).unwrap();
    let good_to = tempfile::tempdir().unwrap();
    finish(&open(), good_to.path(), 2).unwrap();
    let path = shards(from.path()).swap_remove(3);
    let good = fs::read(&path).unwrap();
    let mut other = good.clone();
    let end = other.len();
    // Other nibbles take other bytes.
    other[end - 100_000..].iter_mut().for_each(|b| *b &= 0x11);
    fs::write(&path, other).unwrap();
    let source = open();
    let progress = stop_after(60);
    let control = Control { jobs: 2, progress: &progress };
    let stopped = convert(&source, &plan(&source), to.path(), &control);
    assert!(matches!(stopped, Err(ConvertError::Cancelled)), "{stopped:?}");
    fs::write(&path, good).unwrap();
    // Also when that is interrupted in turn.
    let progress = stop_after(0);
    let control = Control { jobs: 2, progress: &progress };
    let stopped = convert(&open(), &plan(&open()), to.path(), &control);
    assert!(matches!(stopped, Err(ConvertError::Cancelled)), "{stopped:?}");
    finish(&open(), to.path(), 5).unwrap();
    assert!(files(to.path()) == files(good_to.path()));
}

#[test]
fn flipped_bits_and_cut_files_of_such_records_are_noticed_by_name() {
    let dir = tempfile::tempdir().unwrap();
    finish(&uneven(), dir.path(), 2).unwrap();
    let name = files(dir.path()).into_keys().find(|name| name.starts_with("experts")).unwrap();
    let path = dir.path().join(&name);
    let good = fs::read(&path).unwrap();
    for at in [0, 24, 33, 40, 44, 52, 60, 64, 90, 120, 128, 4000, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&path, bad).unwrap();
        let error = check(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&name), "byte {at}: {error}");
    }
    for keep in [0, good.len() / 2, good.len() - 1] {
        fs::write(&path, &good[..keep]).unwrap();
        let error = Container::open(dir.path().to_owned()).unwrap_err().to_string();
        assert!(error.contains(&name) && error.contains("its size"), "{error}");
    }
}
