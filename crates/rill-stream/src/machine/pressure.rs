//! Whether the system is paging. A cache that is paged out is slower than the disk it saves
//! reading, so whoever holds slots gives some back when this says so.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::{cgroup, read};

/// Shortest time between two samples that says anything, in milliseconds.
const MIN_INTERVAL_MS: u64 = 100;
/// Major faults of this process per second that mean paging. Weights are read past the page cache
/// and never mapped, so that a calm process has next to none after it has started.
const FAULTS_PER_SECOND: u64 = 50;
/// Share of the time, in percent, that some process waited for memory which means paging.
const STALLED_PERCENT: u64 = 5;

/// What the system does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pressure {
    /// Everybody has what they use.
    Calm,
    /// Pages are taken from processes that use them. Give memory back.
    Paging,
}

/// Counters of the system at one moment. What it does not tell is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PressureSample {
    /// Milliseconds since the watch began.
    pub at_ms: u64,
    /// Major faults of this process so far: pages that had to be read from a disk.
    pub major_faults: Option<u64>,
    /// Microseconds that some process of the machine waited for memory so far.
    pub machine_stalled_us: Option<u64>,
    /// The same for this process's innermost control group.
    pub group_stalled_us: Option<u64>,
    /// macOS: 1 calm, 2 warning, 4 critical.
    pub level: Option<u64>,
}

impl Pressure {
    /// What two samples tell, the older one first.
    pub fn between(before: &PressureSample, after: &PressureSample) -> Self {
        if after.level.is_some_and(|level| level > 1) {
            return Pressure::Paging;
        }
        let ms = after.at_ms.saturating_sub(before.at_ms);
        if ms < MIN_INTERVAL_MS {
            return Pressure::Calm;
        }
        let grown = |a: Option<u64>, b: Option<u64>| match (a, b) {
            (Some(a), Some(b)) => b.saturating_sub(a),
            _ => 0,
        };
        let faults = grown(before.major_faults, after.major_faults);
        let stalled_us = grown(before.machine_stalled_us, after.machine_stalled_us)
            .max(grown(before.group_stalled_us, after.group_stalled_us));
        let paging = faults.saturating_mul(1000) / ms >= FAULTS_PER_SECOND
            || stalled_us / ms >= 10 * STALLED_PERCENT;
        if paging { Pressure::Paging } else { Pressure::Calm }
    }
}

/// Watches the system from one look to the next.
#[derive(Debug)]
pub struct PressureWatch {
    start: Instant,
    group_file: Option<PathBuf>,
    last: PressureSample,
}

impl PressureWatch {
    /// Begins to watch.
    pub fn new() -> Self {
        let groups = cgroup::groups(Path::new("/"));
        let group_file = groups.first().and_then(cgroup::Group::pressure_file);
        let mut watch = Self { start: Instant::now(), group_file, last: PressureSample::default() };
        watch.last = watch.sample();
        watch
    }

    /// What has happened since the last look; a look after less than a tenth of a second sees
    /// nothing and is not counted. Reads three small files on Linux and runs a program on macOS,
    /// so once in a second or so is often enough.
    pub fn look(&mut self) -> Pressure {
        if (self.start.elapsed().as_millis() as u64).saturating_sub(self.last.at_ms)
            < MIN_INTERVAL_MS
        {
            return Pressure::Calm;
        }
        let now = self.sample();
        let pressure = Pressure::between(&self.last, &now);
        self.last = now;
        pressure
    }

    fn sample(&self) -> PressureSample {
        let root = Path::new("/");
        PressureSample {
            at_ms: self.start.elapsed().as_millis() as u64,
            major_faults: read(root, "proc/self/stat").and_then(|text| major_faults(&text)),
            machine_stalled_us: read(root, "proc/pressure/memory").and_then(|t| stalled_us(&t)),
            group_stalled_us: self
                .group_file
                .as_ref()
                .and_then(|file| read(root, file))
                .and_then(|text| stalled_us(&text)),
            level: level(),
        }
    }
}

impl Default for PressureWatch {
    fn default() -> Self {
        Self::new()
    }
}

fn level() -> Option<u64> {
    #[cfg(target_os = "macos")]
    return super::mac::pressure_level();
    #[cfg(not(target_os = "macos"))]
    None
}

/// The twelfth field of `/proc/self/stat`. The second is the program's name in brackets, which may
/// hold anything.
fn major_faults(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(9)?.parse().ok()
}

/// `total` of the line `some` of a pressure file.
fn stalled_us(text: &str) -> Option<u64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_ascii_whitespace().find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Recorded on Linux 6.18 with a program that touches random pages of a mapped file: one that
    // is in memory, then one of 256 MiB in a control group of 64 MiB. Milliseconds, `stat`,
    // `pressure/memory`.
    const CALM: [(u64, &str, &str); 2] = [
        (
            1002,
            "25500 (python3) R 25491 25491 19213 0 -1 4194304 3393 6574 2 0 54 105 4 3 20 0 1 0",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=53489959\n\
             full avg10=0.00 avg60=0.00 avg300=0.00 total=46221373\n",
        ),
        (
            3002,
            "25500 (python3) R 25491 25491 19213 0 -1 4194304 3393 6574 2 0 151 105 4 3 20 0 1 0",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=53489959\n\
             full avg10=0.00 avg60=0.00 avg300=0.00 total=46221373\n",
        ),
    ];
    const PAGING: [(u64, &str, &str); 2] = [
        (
            1149,
            "27082 (python3) R 27081 27081 19213 0 -1 4194304 3434 6579 147 0 4 131 6 0 20 0 1 0",
            "some avg10=0.54 avg60=0.09 avg300=0.02 total=53563860\n\
             full avg10=0.54 avg60=0.09 avg300=0.02 total=46286323\n",
        ),
        (
            3993,
            "27082 (python3) R 27081 27081 19213 0 -1 4194304 3528 6579 452 0 5 211 6 0 20 0 1 0",
            "some avg10=1.89 avg60=0.35 avg300=0.07 total=53814819\n\
             full avg10=1.53 avg60=0.29 avg300=0.06 total=46463498\n",
        ),
    ];

    fn samples(recorded: [(u64, &str, &str); 2]) -> [PressureSample; 2] {
        recorded.map(|(at_ms, stat, pressure)| PressureSample {
            at_ms,
            major_faults: major_faults(stat),
            machine_stalled_us: stalled_us(pressure),
            ..Default::default()
        })
    }

    fn judge([before, after]: [PressureSample; 2]) -> Pressure {
        Pressure::between(&before, &after)
    }

    #[test]
    fn recorded_calm_is_calm() {
        assert_eq!(samples(CALM)[1].major_faults, Some(2));
        assert_eq!(judge(samples(CALM)), Pressure::Calm);
    }

    #[test]
    fn recorded_paging_is_noticed_by_faults_and_by_stalls_alone() {
        let recorded = samples(PAGING);
        assert_eq!(recorded[1].major_faults, Some(452));
        assert_eq!(recorded[1].machine_stalled_us, Some(53_814_819));
        assert_eq!(judge(recorded), Pressure::Paging);
        let faults = recorded.map(|s| PressureSample { machine_stalled_us: None, ..s });
        assert_eq!(judge(faults), Pressure::Paging);
        let stalls = recorded.map(|s| PressureSample { major_faults: None, ..s });
        assert_eq!(judge(stalls), Pressure::Paging);
        let group = recorded.map(|s| PressureSample {
            at_ms: s.at_ms,
            group_stalled_us: s.machine_stalled_us,
            ..Default::default()
        });
        assert_eq!(judge(group), Pressure::Paging);
    }

    #[test]
    fn a_few_faults_a_second_are_calm() {
        let [before, mut after] = samples(CALM);
        after.major_faults = Some(60);
        assert_eq!(judge([before, after]), Pressure::Calm);
    }

    #[test]
    fn what_the_system_does_not_tell_and_counters_that_go_back_are_calm() {
        let unknown = PressureSample { at_ms: 5000, ..Default::default() };
        assert_eq!(judge([PressureSample::default(), unknown]), Pressure::Calm);
        let [before, after] = samples(PAGING);
        let appeared = PressureSample { major_faults: None, machine_stalled_us: None, ..before };
        assert_eq!(judge([appeared, after]), Pressure::Calm);
        let back = [PressureSample { at_ms: 0, ..after }, PressureSample { at_ms: 2000, ..before }];
        assert_eq!(judge(back), Pressure::Calm);
        // Too soon to tell, and time that stands still.
        assert_eq!(
            judge([before, PressureSample { at_ms: before.at_ms, ..after }]),
            Pressure::Calm
        );
    }

    #[test]
    fn macos_warns_by_level() {
        let level =
            |level| PressureSample { at_ms: 1000, level: Some(level), ..Default::default() };
        assert_eq!(judge([level(1), level(1)]), Pressure::Calm);
        assert_eq!(judge([level(1), level(2)]), Pressure::Paging);
        assert_eq!(judge([level(4), level(4)]), Pressure::Paging);
    }

    #[test]
    fn a_program_may_be_called_anything() {
        let odd = "7 (a) R 1 2 (b) c) S 1 2 3 4 5 6 7 8 99 10";
        assert_eq!(major_faults(odd), Some(99));
        for nothing in ["", "7 (x", "7 (x) R 1 2"] {
            assert_eq!(major_faults(nothing), None);
        }
        for nothing in ["", "full total=7\n", "some avg10=0.00\n", "some total=x\n"] {
            assert_eq!(stalled_us(nothing), None);
        }
    }
}
