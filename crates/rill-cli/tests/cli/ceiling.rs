//! The budget is a ceiling: the most that a process ever holds, while it loads, takes a prompt and
//! writes, on a model many times as large as the least budget.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{args, command, rill};

const PROMPT: &str = "1,2,3,4,5,6,7,8,9,10,11,12";
/// What a control group counts beyond what is resident: page tables and pages of files that have
/// not been dropped yet.
const GROUP_MARGIN_BYTES: u64 = 16 << 20;

/// The arguments of a request with this budget.
fn request(model: &Path, what: &[&str], budget_bytes: u64) -> Vec<String> {
    let (model, budget) = (model.display().to_string(), budget_bytes.to_string());
    let fixed = ["-m", &model, "--budget", &budget, "--ctx", "64", "--threads", "2"];
    what.iter().chain(&fixed).map(|arg| (*arg).to_owned()).collect()
}

/// Runs it and returns the most that was ever resident, in bytes.
fn peak_bytes(command: Command) -> u64 {
    let (peak, failed) = run(command);
    assert_eq!(failed, None);
    peak
}

/// The same, and how it failed if it did.
fn run(mut command: Command) -> (u64, Option<String>) {
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    let ended = loop {
        // It never falls, and is gone when the process has ended.
        let lines = fs::read_to_string(&status).unwrap_or_default();
        let kib = lines.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
        peak = kib.map_or(peak, |kib| kib.trim().parse::<u64>().unwrap() << 10);
        if let Some(ended) = child.try_wait().unwrap() {
            break ended;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let stderr = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    (peak, (!ended.success()).then(|| format!("{command:?}: {ended}: {stderr}")))
}

/// A control group for one process, removed when dropped.
struct Group(PathBuf);

impl Group {
    /// Below the own one; the reason if this system does not allow it.
    fn new(limit_bytes: u64) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
        let memory = own.lines().find_map(|line| line.split_once(":memory:"));
        let (above, limit) = match (memory, own.lines().find_map(|l| l.strip_prefix("0::/"))) {
            (Some((_, path)), _) => {
                (Path::new("/sys/fs/cgroup/memory").join(&path[1..]), "memory.limit_in_bytes")
            }
            (None, Some(path)) => (Path::new("/sys/fs/cgroup").join(path), "memory.max"),
            (None, None) => return Err("the process is in no group".to_owned()),
        };
        let path = above.join(format!("rill-test-{}", std::process::id()));
        fs::create_dir(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let group = Self(path);
        // With write alone: a group without the controller has no such file, and none can be made.
        let limit = group.0.join(limit);
        let written = fs::File::options().write(true).open(&limit);
        let written = written.and_then(|mut file| write!(file, "{limit_bytes}"));
        written.map_err(|e| format!("{}: {e}", limit.display()))?;
        Ok(group)
    }

    /// The program in the group.
    fn command(&self, args: &[String]) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        shell.arg(self.0.join("cgroup.procs")).arg(env!("CARGO_BIN_EXE_rill")).args(args);
        shell
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn peak_memory_stays_within_six_budgets_from_the_floor_up() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    let synth = ["synth", "--like", "kimi-linear-48b", "--layers", "4"];
    rill(args![synth[0], synth[1], synth[2], synth[3], synth[4], &model]).done();
    let bytes = fs::read_dir(&model).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    assert!(bytes.sum::<u64>() >= 3_000_000_000);

    let prompt: &[&str] = &["eval", "--ids", PROMPT];
    let write: &[&str] = &["run", "-n", "4", "one two"];
    let refused = rill(request(&model, prompt, 1)).failed();
    let floor = refused.split_once("below the floor of ").expect(&refused).1;
    let floor: u64 = floor.split(' ').next().unwrap().parse().unwrap();
    assert!(floor < 300_000_000, "a tenth of the model: {floor}");
    for more in [0, 10, 60, 250, 500, 2500] {
        let budget = floor + more * 1_000_000;
        for what in [prompt, write] {
            let peak = peak_bytes(command(request(&model, what, budget)));
            println!("{}: {peak} bytes of a budget of {budget}", what[0]);
            assert!(peak <= budget, "{}: {peak} bytes of a budget of {budget}", what[0]);
            // A peak that was not seen would prove nothing.
            assert!(peak > floor / 2, "{}: only {peak} of {budget} bytes", what[0]);
        }
    }

    // And where the system enforces it.
    match Group::new(floor + GROUP_MARGIN_BYTES) {
        Ok(group) => {
            for what in [prompt, write] {
                peak_bytes(group.command(&request(&model, what, floor)));
            }
            drop(group);
            // Half of what is needed is enforced too, or else the group proved nothing.
            let group = Group::new(floor / 2).unwrap();
            let (_, failed) = run(group.command(&request(&model, prompt, floor)));
            assert!(failed.is_some(), "the system did not enforce the limit");
        }
        Err(reason) => {
            // Past the capture, because a check that was left out must be seen.
            let skip = format!("SKIP: no control group to limit memory with: {reason}\n");
            let _ = std::io::stderr().write_all(skip.as_bytes());
        }
    }
}
