//! Converting, stopping, going on, and noticing every changed byte.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rill_convert::{
    Control, ConvertError, ExpertCodec, Plan, Progress, TrunkCodec, convert, verify, weight_errors,
};
use rill_format::container::{ALIGN, Container, MANIFEST};
use rill_format::{Checkpoint, Folder};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn source(path: &str) -> Checkpoint {
    Checkpoint::open(Folder::Disk(repository(path))).expect("a checkpoint of the repository")
}

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn run(
    path: &str,
    codecs: (ExpertCodec, TrunkCodec),
    to: &Path,
    jobs: usize,
) -> Result<(), ConvertError> {
    let checkpoint = source(path);
    let plan = Plan::new(&checkpoint, codecs.0, codecs.1)?;
    convert(&checkpoint, &plan, to, &Control { jobs, progress: &go_on })
}

fn check(folder: &Path) -> Result<(), ConvertError> {
    let container = Container::open(folder.to_owned())?;
    verify(&container, &Control { jobs: 2, progress: &go_on })
}

/// Every file of a folder, by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).expect("the folder is there").flatten();
    let read = |e: fs::DirEntry| {
        (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).expect("it reads"))
    };
    entries.map(read).collect()
}

const LOSSLESS: (ExpertCodec, TrunkCodec) = (ExpertCodec::Source, TrunkCodec::Source);
const SMALL: (ExpertCodec, TrunkCodec) = (ExpertCodec::Q8, TrunkCodec::Q4);
const THINNED: (ExpertCodec, TrunkCodec) =
    (ExpertCodec::Mxfp4zThinned { hundredths: 345 }, TrunkCodec::Source);
const TRELLIS: (ExpertCodec, TrunkCodec) = (ExpertCodec::Trellis { rate: 23 }, TrunkCodec::Source);

#[test]
fn a_lossless_container_holds_the_published_bytes() {
    for path in ["fixtures/k3-tiny", "fixtures/kimi-linear-tiny"] {
        let dir = tempfile::tempdir().unwrap();
        run(path, LOSSLESS, dir.path(), 2).unwrap();
        check(dir.path()).unwrap();
        let checkpoint = source(path);
        let container = Container::open(dir.path().to_owned()).unwrap();
        let layout = container.layout().unwrap();
        let mut record = vec![0; layout.record_bytes];
        assert!(record.len().is_multiple_of(ALIGN));
        let mut in_records = 0;
        for tensor in checkpoint.iter() {
            let Some((before, rest)) = tensor.name.split_once(".block_sparse_moe.experts.") else {
                let (codes, scales) = container.read_tensor(tensor.name).unwrap();
                assert!(scales.is_empty());
                assert_eq!(codes, checkpoint.read(tensor.id).unwrap(), "{}", tensor.name);
                let shape = &container.find(tensor.name).unwrap().shape;
                assert_eq!(shape[..], tensor.shape[..]);
                continue;
            };
            let layer = before.rsplit('.').next().unwrap().parse().unwrap();
            let mut rest = rest.split('.');
            let expert = rest.next().unwrap().parse().unwrap();
            container.read_record(layer, expert, true, &mut record).unwrap();
            let matrix = ["w1", "w3", "w2"].iter().position(|w| Some(*w) == rest.clone().next());
            let (codes, scales) = layout.matrix(&record, matrix.unwrap());
            let part = if tensor.name.ends_with("weight_scale") { scales } else { codes };
            assert_eq!(part, checkpoint.read(tensor.id).unwrap(), "{}", tensor.name);
            in_records += 1;
        }
        assert!(in_records > 100);
        for name in ["config.json", "tiktoken.model", "tokenizer_config.json"] {
            let bytes = fs::read(dir.path().join(name)).unwrap();
            assert_eq!(bytes, fs::read(repository(path).join(name)).unwrap());
        }
        assert!(files(dir.path()).keys().all(|name| !name.starts_with("convert")));
    }
}

#[test]
fn the_error_of_each_layer_is_told_when_its_experts_are_done() {
    let told = |path: &str, experts| {
        let (dir, told) = (tempfile::tempdir().unwrap(), Mutex::new(Vec::new()));
        let progress = |p: Progress| {
            told.lock().unwrap().extend(p.layer);
            ControlFlow::Continue(())
        };
        let checkpoint = source(path);
        let plan = Plan::new(&checkpoint, experts, TrunkCodec::Source).unwrap();
        let control = Control { jobs: 2, progress: &progress };
        convert(&checkpoint, &plan, dir.path(), &control).unwrap();
        let container = Container::open(dir.path().to_owned()).unwrap();
        let errors = weight_errors(&container, &checkpoint, &control).unwrap();
        let errors = errors.into_iter().filter(|error| error.experts).map(|error| error.mean);
        (told.into_inner().unwrap(), errors.collect::<Vec<f64>>())
    };
    for (path, experts) in [
        ("fixtures/k3-tiny", TRELLIS.0),
        ("fixtures/k3-tiny", ExpertCodec::Q4),
        ("models/k3-nano", ExpertCodec::Mxfp4zThinned { hundredths: 345 }),
        ("fixtures/kimi-linear-tiny", ExpertCodec::Q8),
    ] {
        let (mut layers, errors) = told(path, experts);
        layers.sort_by_key(|layer| layer.layer);
        assert!(!layers.is_empty() && layers.len() == errors.len(), "{layers:?}");
        for (layer, error) in layers.iter().zip(errors) {
            assert!(layer.experts >= 4, "{layer:?}");
            // Of some rows of all experts, and a mean over tensors.
            assert!((layer.error / error - 1.0).abs() < 0.05, "{layer:?}, {error}");
        }
    }
    for lossless in [ExpertCodec::Source, ExpertCodec::Mxfp4z] {
        assert_eq!(told("fixtures/k3-tiny", lossless).0, []);
    }
}

#[test]
fn any_number_of_jobs_writes_the_same_bytes() {
    for codecs in [LOSSLESS, SMALL, TRELLIS, THINNED] {
        let one = tempfile::tempdir().unwrap();
        run("fixtures/k3-tiny", codecs, one.path(), 1).unwrap();
        let four = tempfile::tempdir().unwrap();
        run("fixtures/k3-tiny", codecs, four.path(), 4).unwrap();
        assert_eq!(files(one.path()), files(four.path()));
    }
}

#[test]
fn a_stopped_conversion_goes_on_to_the_same_bytes() {
    let whole = tempfile::tempdir().unwrap();
    run("fixtures/k3-tiny", SMALL, whole.path(), 1).unwrap();
    let expected = files(whole.path());
    let checkpoint = source("fixtures/k3-tiny");
    let plan = Plan::new(&checkpoint, SMALL.0, SMALL.1).unwrap();
    for stop_after in [0, 1, 5, 11, 40, 105] {
        let dir = tempfile::tempdir().unwrap();
        let done = AtomicUsize::new(0);
        let progress = |_| match done.fetch_add(1, Ordering::Relaxed) {
            n if n >= stop_after => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        let result =
            convert(&checkpoint, &plan, dir.path(), &Control { jobs: 2, progress: &progress });
        assert!(matches!(result, Err(ConvertError::Cancelled)));
        assert!(!dir.path().join(MANIFEST).exists(), "not a container before it is whole");
        // What a kill in the middle of a write leaves: half a record, half a line, half a run.
        tear(&dir.path().join("experts-00003.rill"), 9000);
        tear(&dir.path().join("trunk.rill"), 777);
        let log = dir.path().join("convert.log");
        let mut text = fs::read_to_string(&log).unwrap();
        text.push_str("4 0123");
        fs::write(&log, text).unwrap();

        let resumed = AtomicUsize::new(0);
        let progress = |p: Progress| {
            resumed.fetch_max(p.resumed_bytes as usize, Ordering::Relaxed);
            assert!(p.done_bytes <= p.total_bytes);
            ControlFlow::Continue(())
        };
        convert(&checkpoint, &plan, dir.path(), &Control { jobs: 2, progress: &progress }).unwrap();
        assert_eq!(files(dir.path()), expected, "stopped after {stop_after}");
        if stop_after > 20 {
            assert!(resumed.into_inner() > 0, "nothing of the first run was kept");
        }
    }
}

/// Overwrites some bytes.
fn tear(path: &Path, at: usize) {
    let mut bytes = fs::read(path).expect("the file is there");
    bytes[at..at + 64].iter_mut().for_each(|b| *b ^= 0x5a);
    fs::write(path, bytes).expect("the file is there");
}

#[test]
fn records_are_spread_over_folders_in_stated_proportions() {
    let whole = tempfile::tempdir().unwrap();
    run("fixtures/k3-tiny", (ExpertCodec::Q8, TrunkCodec::Source), whole.path(), 1).unwrap();
    let own = tempfile::tempdir().unwrap();
    let (b, c) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let checkpoint = source("fixtures/k3-tiny");
    let plan = Plan::new(&checkpoint, ExpertCodec::Q8, TrunkCodec::Source).unwrap();
    // k3-tiny's q8 records are 32 KiB: two units, of which `b` gets one and `c` none.
    let folders = [(b.path().to_owned(), 1.0), (c.path().join("new"), 0.1)];
    let plan = plan.spread(&folders).unwrap();
    for stop_after in [30, usize::MAX] {
        let done = AtomicUsize::new(0);
        let progress = |_| match done.fetch_add(1, Ordering::Relaxed) {
            n if n >= stop_after => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        let control = Control { jobs: 2, progress: &progress };
        let result = convert(&checkpoint, &plan, own.path(), &control);
        assert_eq!(result.is_ok(), stop_after == usize::MAX, "{result:?}");
    }
    check(own.path()).unwrap();
    let container = Container::open(own.path().to_owned()).unwrap();
    let reference = Container::open(whole.path().to_owned()).unwrap();
    assert_eq!(container.manifest().fingerprint, reference.manifest().fingerprint);
    let stripes: Vec<u64> = container.bank_list()[0].stripes.iter().map(|s| s.bytes).collect();
    assert_eq!(stripes, [ALIGN as u64, ALIGN as u64]);
    let (mut x, mut y) = (vec![0; 2 * ALIGN], vec![0; 2 * ALIGN]);
    for (layer, expert) in [(1, 0), (4, 11), (8, 5)] {
        container.read_record(layer, expert, true, &mut x).unwrap();
        reference.read_record(layer, expert, true, &mut y).unwrap();
        assert_eq!(x, y);
    }
    fs::remove_file(b.path().join("experts-00002.rill")).unwrap();
    let error = Container::open(own.path().to_owned()).unwrap_err().to_string();
    assert!(error.contains("experts-00002.rill"), "{error}");
}

#[test]
fn a_container_is_converted_into_another_one() {
    let convert_from = |from: &Path, codecs: (ExpertCodec, TrunkCodec)| {
        let container = Container::open(from.to_owned()).expect("it is a container");
        let plan = Plan::new(&container, codecs.0, codecs.1).expect("it can be planned");
        let dir = tempfile::tempdir().expect("a temporary folder");
        convert(&container, &plan, dir.path(), &Control { jobs: 2, progress: &go_on })
            .expect("it converts");
        dir
    };
    for path in ["fixtures/k3-tiny", "fixtures/kimi-linear-tiny"] {
        let lossless = tempfile::tempdir().unwrap();
        run(path, LOSSLESS, lossless.path(), 2).unwrap();
        let small = tempfile::tempdir().unwrap();
        run(path, SMALL, small.path(), 2).unwrap();
        // By way of a lossless container, or not: the same bytes.
        assert_eq!(files(convert_from(lossless.path(), LOSSLESS).path()), files(lossless.path()));
        assert_eq!(files(convert_from(lossless.path(), SMALL).path()), files(small.path()));
        // And a small one stays as it is.
        assert_eq!(files(convert_from(small.path(), LOSSLESS).path()), files(small.path()));
    }
}

#[test]
fn impossible_placements_are_refused() {
    let checkpoint = source("fixtures/k3-tiny");
    let dir = tempfile::tempdir().unwrap();
    let path = || dir.path().join("b");
    let cases = [
        (vec![(path(), 0.0)], "positive"),
        (vec![(path(), f64::NAN)], "positive"),
        (vec![(path(), 1.0), (path(), 2.0)], "twice"),
    ];
    for (folders, message) in cases {
        let plan = Plan::new(&checkpoint, LOSSLESS.0, LOSSLESS.1).unwrap();
        let error = plan.spread(&folders).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    // A folder with someone's file of the same name.
    fs::write(dir.path().join("experts-00001.rill"), "precious").unwrap();
    let plan = Plan::new(&checkpoint, ExpertCodec::Q8, TrunkCodec::Source).unwrap();
    let plan = plan.spread(&[(dir.path().to_owned(), 1.0)]).unwrap();
    let own = tempfile::tempdir().unwrap();
    let result = convert(&checkpoint, &plan, own.path(), &Control { jobs: 1, progress: &go_on });
    assert!(matches!(result, Err(ConvertError::NotEmpty { .. })), "{result:?}");
    assert_eq!(fs::read(dir.path().join("experts-00001.rill")).unwrap(), b"precious");
}

#[test]
fn every_byte_of_every_file_is_covered() {
    let dir = tempfile::tempdir().unwrap();
    run("fixtures/k3-tiny", LOSSLESS, dir.path(), 2).unwrap();
    let mut state = 1u64;
    let mut uncovered = Vec::new();
    for (name, bytes) in files(dir.path()) {
        // The ends, the seams between records, headers and padding, and places at random.
        let mut places: Vec<usize> = vec![0, bytes.len() - 1];
        places.extend((ALIGN..bytes.len()).step_by(ALIGN).flat_map(|at| [at - 1, at, at + 70]));
        places.extend((0..40).map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % bytes.len()
        }));
        places.truncate(160);
        let path = dir.path().join(&name);
        for at in places {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << (at % 8);
            fs::write(&path, changed).unwrap();
            match check(dir.path()) {
                Err(error) => {
                    assert!(error.to_string().contains(&name) || name == MANIFEST, "{error}")
                }
                Ok(()) => uncovered.push(format!("{name} byte {at}")),
            }
        }
        fs::write(&path, &bytes).unwrap();
    }
    assert_eq!(uncovered, Vec::<String>::new());
    check(dir.path()).unwrap();
}

#[test]
fn truncated_and_missing_files_are_refused_by_name_at_open() {
    let dir = tempfile::tempdir().unwrap();
    run("fixtures/k3-tiny", LOSSLESS, dir.path(), 2).unwrap();
    for (name, bytes) in files(dir.path()) {
        let path = dir.path().join(&name);
        for keep in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            fs::write(&path, &bytes[..keep]).unwrap();
            let error = Container::open(dir.path().to_owned()).expect_err(&name).to_string();
            assert!(error.contains(&name), "{error}");
        }
        fs::remove_file(&path).unwrap();
        let error = Container::open(dir.path().to_owned()).expect_err(&name).to_string();
        assert!(error.contains(&name), "{error}");
        fs::write(&path, &bytes).unwrap();
    }
}

#[test]
fn a_destination_that_is_not_ours_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.txt"), "precious").unwrap();
    let result = run("fixtures/k3-tiny", LOSSLESS, dir.path(), 1);
    assert!(matches!(result, Err(ConvertError::NotEmpty { .. })));

    let dir = tempfile::tempdir().unwrap();
    run("fixtures/k3-tiny", LOSSLESS, dir.path(), 1).unwrap();
    let result = run("fixtures/k3-tiny", LOSSLESS, dir.path(), 1);
    assert!(matches!(result, Err(ConvertError::Exists { .. })));
}

#[test]
fn another_plan_or_a_second_process_cannot_go_on_with_a_conversion() {
    let checkpoint = source("fixtures/k3-tiny");
    let plan = Plan::new(&checkpoint, LOSSLESS.0, LOSSLESS.1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    // While it runs, the folder is locked.
    let progress = |_| {
        let second = run("fixtures/k3-tiny", LOSSLESS, dir.path(), 1);
        assert!(matches!(second, Err(ConvertError::Busy { .. })), "{second:?}");
        ControlFlow::Break(())
    };
    let stopped =
        convert(&checkpoint, &plan, dir.path(), &Control { jobs: 1, progress: &progress });
    assert!(matches!(stopped, Err(ConvertError::Cancelled)));
    for (path, codecs) in [("fixtures/k3-tiny", SMALL), ("fixtures/kimi-linear-tiny", LOSSLESS)] {
        let result = run(path, codecs, dir.path(), 1);
        assert!(matches!(result, Err(ConvertError::OtherPlan { .. })), "{result:?}");
    }
    run("fixtures/k3-tiny", LOSSLESS, dir.path(), 1).unwrap();
}

#[test]
fn the_fingerprint_names_the_weights() {
    let of = |path, codecs| {
        let dir = tempfile::tempdir().unwrap();
        run(path, codecs, dir.path(), 2).unwrap();
        Container::open(dir.path().to_owned()).unwrap().manifest().fingerprint.clone()
    };
    let lossless = of("fixtures/k3-tiny", LOSSLESS);
    assert_eq!(lossless, of("fixtures/k3-tiny", LOSSLESS));
    assert_ne!(lossless, of("fixtures/k3-tiny", SMALL));
    assert_ne!(lossless, of("fixtures/kimi-linear-tiny", LOSSLESS));
}
