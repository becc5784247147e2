//! Beginnings of conversations on disk: later engines go on from them with the same bits, and nothing
//! else comes of them.

mod common;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use common::{convert, floor_bytes, k3_tiny, kimi_linear_tiny, within_a_minute};
use rill::{
    Engine, EngineOptions, Event, FinishReason, Folder, GenerateOptions, LatentFormat, Log, Prefix,
    PrefixDisk, Request, Sampling, Scheduler, SchedulerOptions,
};
use rill_convert::{ExpertCodec, TrunkCodec};
use rill_format::container::Checksum;

const CONTEXT: usize = 64;

/// Everything that one run of a program has.
struct Run {
    shared: Scheduler,
    /// What was logged.
    lines: Arc<Mutex<Vec<String>>>,
}

/// What a request gave.
#[derive(Debug, PartialEq)]
struct Given {
    tokens: Vec<u32>,
    /// Tokens of the prompt.
    ran: usize,
    reused: usize,
}

impl Run {
    /// With room in memory for so many snapshots of a full context.
    fn new(folder: Folder, snapshots: u64, disk: Option<PrefixDisk>) -> Self {
        Self::with(LatentFormat::F32, folder, snapshots, disk)
    }

    fn with(
        latents: LatentFormat,
        folder: Folder,
        snapshots: u64,
        disk: Option<PrefixDisk>,
    ) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let heard = lines.clone();
        let log =
            Log::to(move |line| heard.lock().expect("nobody panics with it").push(line.to_owned()));
        let options = EngineOptions {
            context: CONTEXT,
            sessions: 2,
            threads: 2,
            latents,
            log,
            ..Default::default()
        };
        let bytes = {
            let engine = Engine::open(folder.clone(), &options).expect("it opens");
            let mut session = engine.new_session();
            engine.forward(&mut session, &prompt(CONTEXT, 0), rill::Logits::None).expect("it runs");
            session.snapshot_bytes()
        };
        let options = EngineOptions { snapshot_bytes: snapshots * bytes, ..options };
        let budget_bytes = floor_bytes(&folder, &options) + (8 << 20);
        let options = EngineOptions { budget_bytes, ..options };
        let engine = Arc::new(Engine::open(folder, &options).expect("it opens"));
        let options = SchedulerOptions { prefix_disk: disk, ..Default::default() };
        let shared = Scheduler::new(engine, &options).expect("it starts");
        Self { shared, lines }
    }

    fn ask(&self, namespace: &str, prompt: &[u32], boundaries: &[usize]) -> Given {
        let engine = self.shared.engine();
        let mut request = Request::new(engine.new_session(), prompt.to_vec(), options());
        let boundaries = boundaries.to_vec();
        request.prefix = Some(Prefix { namespace: namespace.into(), boundaries });
        let mut tokens = Vec::new();
        for event in self.shared.submit(request).expect("it is taken") {
            match event {
                Event::Token(token) => tokens.push(token.id),
                Event::Ended(ended) => {
                    assert!(matches!(ended.outcome, Ok(FinishReason::Length)), "{ended:?}");
                    let snapshots = engine.plan().options.snapshot_bytes;
                    let held = engine.ledger().held();
                    let held = held.iter().find(|(what, _)| *what == "snapshots");
                    assert!(held.is_none_or(|(_, bytes)| *bytes <= snapshots));
                    let taken = ended.statistics;
                    let (ran, reused) = (taken.prompt_tokens, taken.reused_tokens);
                    return Given { tokens, ran, reused };
                }
                Event::Prefilled { .. } => {}
            }
        }
        panic!("it did not end");
    }

    /// What was logged about beginnings.
    fn lines(&self) -> Vec<String> {
        let lines = self.lines.lock().expect("nobody panics with it");
        lines.iter().filter(|line| line.contains("beginning")).cloned().collect()
    }
}

/// Four tokens, and which ones depends on every bit of the logits.
fn options() -> GenerateOptions {
    GenerateOptions {
        max_tokens: 4,
        sampling: Sampling { temperature: 1.0, seed: 5, ..Sampling::default() },
        stop_tokens: Some(Vec::new()),
        ..GenerateOptions::default()
    }
}

fn prompt(n: usize, seed: u64) -> Vec<u32> {
    (0..n as u64).map(|i| ((seed + 1) * (i + 3) * 7919 % 509) as u32).collect()
}

/// What an engine that keeps nothing gives.
fn alone(folder: Folder, prompt: &[u32]) -> Vec<u32> {
    let given = Run::new(folder, 0, None).ask("", prompt, &[]);
    assert_eq!((given.ran, given.reused), (prompt.len(), 0));
    given.tokens
}

/// A folder that is not there yet, with room for everything.
fn disk(dir: &tempfile::TempDir) -> PrefixDisk {
    PrefixDisk {
        folder: dir.path().join("beginnings"),
        max_bytes: 1 << 30,
        max_age: Duration::from_secs(3600),
    }
}

/// Files in the folder, in order of their tokens.
fn files(disk: &PrefixDisk) -> Vec<PathBuf> {
    let entries = fs::read_dir(&disk.folder).expect("it is there");
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.expect("it can be listed").path()).collect();
    files.sort_by_key(|path| tokens_of(path));
    files
}

fn tokens_of(path: &Path) -> usize {
    let name = path.file_stem().and_then(|name| name.to_str()).expect("it is a name");
    name.rsplit('-')
        .next()
        .and_then(|n| n.parse().ok())
        .expect("names end with the number of tokens")
}

/// A second turn after a first one of 20 tokens.
fn second_turn(first: &[u32], answer: &[u32]) -> Vec<u32> {
    [first, answer, &prompt(7, 99)].concat()
}

#[test]
fn a_later_engine_goes_on_from_the_disk_with_the_same_bits() {
    within_a_minute(|| {
        for folder in [k3_tiny(), kimi_linear_tiny()] {
            let dir = tempfile::tempdir().unwrap();
            let first = prompt(20, 1);
            let run = Run::new(folder.clone(), 9, Some(disk(&dir)));
            let answer = run.ask("alice", &first, &[8]).tokens;
            drop(run);
            assert_eq!(
                files(&disk(&dir)).iter().map(|f| tokens_of(f)).collect::<Vec<_>>(),
                [8, 23]
            );

            let second = second_turn(&first, &answer);
            let tokens = alone(folder.clone(), &second);
            let later = Run::new(folder.clone(), 9, Some(disk(&dir)));
            // The answer's last token has not been run.
            let expected = Given { tokens, ran: 1 + 7, reused: 20 + 3 };
            assert_eq!(later.ask("alice", &second, &[]), expected);
            // Nobody else's answer began like this one: only the first boundary.
            let other = [&first[..8], &prompt(9, 3)].concat();
            let expected = Given { tokens: alone(folder, &other), ran: 9, reused: 8 };
            assert_eq!(later.ask("alice", &other, &[]), expected);
            assert_eq!(later.lines(), [""; 0]);
        }
    });
}

#[test]
fn the_longest_beginning_wins_be_it_in_memory_or_on_disk() {
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        let ids = prompt(40, 1);
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        run.ask("", &[&ids[..20], &prompt(3, 7)].concat(), &[10, 20]);
        drop(run);
        let later = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        let ask = |alike, seed, boundaries| {
            later.ask("", &[&ids[..alike], &prompt(3, seed)].concat(), boundaries)
        };
        assert_eq!(ask(7, 8, &[5]).reused, 0);
        // Memory has 5, the disk 10 and 20.
        assert_eq!(ask(18, 9, &[18]).reused, 10);
        // Now memory has 18 as well.
        assert_eq!(ask(19, 10, &[]).reused, 18);
        let given = later.ask("", &ids, &[]);
        assert_eq!(given, Given { tokens: alone(k3_tiny(), &ids), ran: 20, reused: 20 });
        // What is in memory does not need the disk.
        files(&disk(&dir)).into_iter().for_each(|path| fs::remove_file(path).unwrap());
        assert_eq!(ask(19, 11, &[]).reused, 18);
    });
}

#[test]
fn a_beginning_that_is_there_is_not_written_again_and_counts_as_used() {
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        let ids = prompt(20, 1);
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        run.ask("", &ids, &[10]);
        drop(run);
        let path = files(&disk(&dir)).remove(0);
        let long_ago = SystemTime::now() - Duration::from_secs(1800);
        let age = || {
            File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
        };
        let used = || fs::metadata(&path).unwrap().modified().unwrap() > long_ago;
        #[cfg(unix)]
        let file_number = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(&path).unwrap());
        #[cfg(not(unix))]
        let file_number = || 0;
        let before = file_number();
        age();
        let later = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        assert_eq!(later.ask("", &ids, &[10]).reused, 10);
        assert!(used(), "from disk");
        age();
        assert_eq!(later.ask("", &ids, &[10]).reused, 10);
        assert!(used(), "from memory");
        drop(later);
        assert_eq!(file_number(), before);
        assert_eq!(files(&disk(&dir)).len(), 2);
    });
}

#[test]
fn nobody_finds_the_files_of_another_name_space_or_reads_its_name_in_them() {
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        let ids = prompt(20, 1);
        let names = ["the-key-of-alice", "the-key-of-bob"];
        for name in names {
            let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
            assert_eq!(run.ask(name, &ids, &[10]).reused, 0, "{name}");
        }
        let files = files(&disk(&dir));
        assert_eq!(files.len(), 4);
        for path in &files {
            let name = path.file_name().unwrap().to_str().unwrap();
            let content = fs::read(path).unwrap();
            for namespace in names {
                let found =
                    |bytes: &[u8]| bytes.windows(4).any(|w| w == &namespace.as_bytes()[..4]);
                assert!(!found(name.as_bytes()) && !found(&content), "{name}");
            }
        }
        // Each under the other's name: found, and refused.
        let (one, other) = (&files[0], &files[1]);
        let aside = dir.path().join("aside");
        fs::rename(one, &aside).unwrap();
        fs::rename(other, one).unwrap();
        fs::rename(&aside, other).unwrap();
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        for name in names {
            assert_eq!(run.ask(name, &ids, &[]).reused, 0, "{name}");
        }
        assert_eq!(run.lines().len(), 2, "{:?}", run.lines());
        assert!(!one.exists() && !other.exists());
    });
}

#[test]
fn other_weights_do_not_find_the_files_and_refuse_them() {
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        let ids = prompt(20, 1);
        let [q8, q4] = [TrunkCodec::Q8, TrunkCodec::Q4]
            .map(|trunk| convert("fixtures/k3-tiny", ExpertCodec::Source, trunk));
        let models = [&q8, &q4].map(|dir| Folder::Disk(dir.path().to_owned()));
        for model in &models {
            let run = Run::new(model.clone(), 9, Some(disk(&dir)));
            assert_eq!(run.ask("", &ids, &[10]).reused, 0);
            drop(run);
            let run = Run::new(model.clone(), 9, Some(disk(&dir)));
            assert_eq!(run.ask("", &ids, &[10]).reused, 10);
        }
        // The one's file under the other's name, in both directions.
        let files = files(&disk(&dir));
        let [one, other] = [0, 1].map(|i| fs::read(&files[i]).unwrap());
        fs::write(&files[0], other).unwrap();
        fs::write(&files[1], one).unwrap();
        for model in models {
            let run = Run::new(model, 9, Some(disk(&dir)));
            assert_eq!(run.ask("", &ids, &[]).reused, 0);
            assert!(run.lines()[0].contains("its model"), "{:?}", run.lines());
        }
    });
}

#[test]
fn engines_that_keep_latents_in_other_formats_do_not_share_files() {
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        let ids = prompt(20, 1);
        for (latents, reused) in
            [(LatentFormat::F32, 0), (LatentFormat::Bf16, 0), (LatentFormat::F32, 10)]
        {
            let run = Run::with(latents, k3_tiny(), 9, Some(disk(&dir)));
            assert_eq!(run.ask("", &ids, &[10]).reused, reused, "{latents}");
            assert_eq!(run.lines(), [""; 0]);
        }
        let run = Run::with(LatentFormat::Bf16, k3_tiny(), 9, Some(disk(&dir)));
        let given = run.ask("", &ids, &[10]);
        let fresh = Run::with(LatentFormat::Bf16, k3_tiny(), 9, None).ask("", &ids, &[]);
        assert_eq!((given.reused, given.tokens), (10, fresh.tokens));
    });
}

/// The bytes of a file with the checksum that is right for them.
fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - 8;
    let mut sum = Checksum::default();
    sum.update(&bytes[..end]);
    bytes[end..].copy_from_slice(&sum.finish().to_le_bytes());
    bytes
}

#[test]
fn a_file_that_is_not_what_it_was_is_removed_and_the_answer_is_right() {
    type Damage = fn(Vec<u8>) -> Vec<u8>;
    /// With a byte changed.
    fn flipped(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
        bytes[at] ^= 1;
        bytes
    }
    /// Where the tokens begin.
    fn tokens_at(bytes: &[u8]) -> usize {
        16 + u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize
    }
    let damages: [(&str, Damage); 10] = [
        ("a flip in the states", |bytes| {
            let middle = bytes.len() / 2;
            flipped(bytes, middle)
        }),
        ("a flip in the tokens", |bytes| {
            let at = tokens_at(&bytes);
            flipped(bytes, at)
        }),
        ("a flip in the checksum", |bytes| {
            let last = bytes.len() - 1;
            flipped(bytes, last)
        }),
        ("other tokens with a right checksum", |bytes| {
            let at = tokens_at(&bytes);
            summed(flipped(bytes, at))
        }),
        ("another version with a right checksum", |bytes| summed(flipped(bytes, 8))),
        ("another kind of file", |_| b"something else".to_vec()),
        ("cut off", |bytes| bytes[..bytes.len() - 1].to_vec()),
        ("cut off early", |bytes| bytes[..20].to_vec()),
        ("empty", |_| Vec::new()),
        ("longer", |bytes| [bytes, vec![0]].concat()),
    ];
    within_a_minute(move || {
        let dir = tempfile::tempdir().unwrap();
        let first = prompt(20, 1);
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        let answer = run.ask("", &first, &[8]).tokens;
        drop(run);
        let second = second_turn(&first, &answer);
        let expected = alone(k3_tiny(), &second);
        let longest = files(&disk(&dir)).pop().unwrap();
        let whole = fs::read(&longest).unwrap();
        for (damage, change) in damages {
            fs::write(&longest, change(whole.clone())).unwrap();
            let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
            // The next best is there still.
            let given = run.ask("", &second, &[]);
            assert_eq!(given, Given { tokens: expected.clone(), ran: 23, reused: 8 }, "{damage}");
            assert!(!longest.exists(), "{damage}");
            assert_eq!(run.lines().len(), 1, "{damage}: {:?}", run.lines());
        }
        fs::write(&longest, &whole).unwrap();
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        assert_eq!(run.ask("", &second, &[]).reused, 23);
        // Removed by somebody while the engine runs: nobody's fault.
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        fs::remove_file(&longest).unwrap();
        for path in files(&disk(&dir)) {
            fs::remove_file(path).unwrap();
        }
        assert_eq!(run.ask("", &second, &[]), Given { tokens: expected, ran: 31, reused: 0 });
        assert_eq!(run.lines(), [""; 0]);
    });
}

#[test]
fn files_take_no_more_than_they_may_and_what_was_used_longest_ago_goes_first() {
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        run.ask("", &prompt(20, 1), &[]);
        drop(run);
        let bytes = fs::metadata(&files(&disk(&dir))[0]).unwrap().len();
        // Room for two and a half.
        let small = PrefixDisk { max_bytes: 5 * bytes / 2, ..disk(&dir) };
        let held = || files(&small).iter().map(|f| fs::metadata(f).unwrap().len()).sum::<u64>();
        let ask = |seed| {
            let run = Run::new(k3_tiny(), 1, Some(small.clone()));
            let answer = run.ask("", &prompt(20, seed), &[]).tokens;
            drop(run);
            assert!(held() <= small.max_bytes, "{} bytes", held());
            second_turn(&prompt(20, seed), &answer)
        };
        let reused = |prompt: &[u32]| {
            // Without room for snapshots it only reads.
            let run = Run::new(k3_tiny(), 0, Some(small.clone()));
            run.ask("", prompt, &[]).reused
        };
        let [one, two] = [1, 2].map(ask);
        assert_eq!(files(&small).len(), 2);
        // The first is used again, so the second goes.
        assert_eq!(reused(&one), 23);
        let three = ask(3);
        assert_eq!([&one, &two, &three].map(|prompt| reused(prompt)), [23, 0, 23]);
        // A limit that was lowered holds from opening on.
        let smaller = PrefixDisk { max_bytes: bytes, ..small.clone() };
        drop(Run::new(k3_tiny(), 1, Some(smaller)));
        assert_eq!(files(&small).len(), 1);
        assert_eq!(reused(&three), 23);
        // What is larger than all that is allowed is not written at all.
        let run =
            Run::new(k3_tiny(), 9, Some(PrefixDisk { max_bytes: bytes + 500, ..small.clone() }));
        run.ask("", &prompt(60, 4), &[]);
        drop(run);
        assert_eq!(files(&small).len(), 1);
        assert_eq!(reused(&three), 23);
    });
}

#[test]
fn files_that_nobody_used_for_too_long_and_what_a_killed_writer_left_are_removed() {
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        let ids = prompt(20, 1);
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        run.ask("", &ids, &[10]);
        drop(run);
        let disk = disk(&dir);
        let [short, long] = files(&disk).try_into().unwrap();
        let file = File::options().write(true).open(&short).unwrap();
        file.set_modified(SystemTime::now() - disk.max_age - Duration::from_secs(60)).unwrap();
        fs::write(disk.folder.join(".rill-killed.part"), "half").unwrap();
        fs::write(disk.folder.join("notes-7.txt"), "the user's").unwrap();
        let later = Run::new(k3_tiny(), 9, Some(disk.clone()));
        assert!(!short.exists() && long.exists());
        assert!(!disk.folder.join(".rill-killed.part").exists());
        assert!(disk.folder.join("notes-7.txt").exists());
        assert_eq!(later.ask("", &ids, &[]).reused, 0);
    });
}

#[cfg(unix)]
#[test]
fn files_and_folder_are_their_owners_alone_and_an_open_folder_is_told() {
    use std::os::unix::fs::PermissionsExt;
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        let nested = PrefixDisk { folder: dir.path().join("new/beginnings"), ..disk(&dir) };
        let run = Run::new(k3_tiny(), 9, Some(nested.clone()));
        run.ask("", &prompt(20, 1), &[10]);
        drop(run);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&nested.folder), 0o700);
        assert_eq!(files(&nested).iter().map(|file| mode(file)).collect::<Vec<_>>(), [0o600; 2]);
        fs::set_permissions(&nested.folder, PermissionsExt::from_mode(0o755)).unwrap();
        let run = Run::new(k3_tiny(), 9, Some(nested));
        assert!(run.lines()[0].contains("chmod 700"), "{:?}", run.lines());
    });
}

#[test]
fn nothing_is_written_unless_it_is_asked_for_and_there_is_room_for_a_snapshot() {
    within_a_minute(|| {
        assert_eq!(SchedulerOptions::default().prefix_disk, None);
        let dir = tempfile::tempdir().unwrap();
        let run = Run::new(k3_tiny(), 0, Some(disk(&dir)));
        run.ask("", &prompt(20, 1), &[10]);
        drop(run);
        assert!(!disk(&dir).folder.exists());
    });
}

#[test]
fn a_folder_that_takes_no_files_is_told_once_and_the_answers_go_on() {
    within_a_minute(|| {
        let dir = tempfile::tempdir().unwrap();
        // A file is where the folder would be.
        fs::write(disk(&dir).folder, "in the way").unwrap();
        let run = Run::new(k3_tiny(), 9, Some(disk(&dir)));
        let ids = [1, 2].map(|seed| prompt(20, seed));
        for ids in &ids {
            assert_eq!(run.ask("", ids, &[10]).tokens, alone(k3_tiny(), ids));
            assert_eq!(run.ask("", ids, &[10]).reused, 10, "memory does without");
        }
        let lines = run.lines.clone();
        drop(run);
        let lines = lines.lock().unwrap();
        let told = lines.iter().filter(|line| line.contains("not kept on disk"));
        assert_eq!(told.count(), 1, "{lines:?}");
    });
}
