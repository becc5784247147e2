//! What the operating system says of the machine's memory. The only place that asks it.
//!
//! Linux tells everything through files; macOS is asked with two of its own programs, because its
//! calls are not safe ones. What a system does not tell is `None`, and the user has to name a
//! budget.

mod cgroup;
#[cfg(any(target_os = "macos", test))]
mod mac;
mod pressure;

use std::fmt;
use std::fs;
use std::path::Path;

pub use pressure::{Pressure, PressureSample, PressureWatch};

/// Largest file of the system that is read.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// A ceiling on memory, and what others hold under it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The machine, or the control group that sets it.
    pub scope: String,
    /// Bytes that all processes in it may hold together.
    pub limit_bytes: u64,
    /// Bytes held by other processes and by the system that cannot be had by dropping caches.
    pub others_bytes: u64,
}

impl MemoryLimit {
    /// Bytes that may be planned with: never above three quarters of the limit, minus what others
    /// hold. The last quarter is for what they will want next; a cache that the system pages out
    /// is slower than the disk.
    pub fn usable_bytes(&self) -> u64 {
        (self.limit_bytes / 4 * 3).saturating_sub(self.others_bytes)
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        write!(
            f,
            "{} has {:.1} GB, of which others hold {:.1} GB",
            self.scope,
            gigabytes(self.limit_bytes),
            gigabytes(self.others_bytes)
        )
    }
}

/// Every ceiling on this process's memory: the machine's, and those of its control group and all
/// groups above it, versions 1 and 2. Empty where the system does not tell.
pub fn memory_limits() -> Vec<MemoryLimit> {
    #[cfg(target_os = "linux")]
    return limits_under(Path::new("/"));
    #[cfg(target_os = "macos")]
    return mac::limit().into_iter().collect();
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    Vec::new()
}

/// The ceiling that leaves least, if there is any.
pub fn tightest(limits: &[MemoryLimit]) -> Option<&MemoryLimit> {
    limits.iter().min_by_key(|limit| limit.usable_bytes())
}

/// Memory that this process holds, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnMemory {
    /// Now.
    pub resident_bytes: u64,
    /// At most so far.
    pub peak_bytes: u64,
    /// Now, without pages of files, which the system can drop.
    pub anonymous_bytes: u64,
}

/// Memory that this process holds; `None` where the system does not tell in a file.
pub fn own_memory() -> Option<OwnMemory> {
    own_memory_under(Path::new("/"))
}

fn own_memory_under(root: &Path) -> Option<OwnMemory> {
    let status = read(root, "proc/self/status")?;
    let resident_bytes = kib_field(&status, "VmRSS:")?;
    Some(OwnMemory {
        resident_bytes,
        peak_bytes: kib_field(&status, "VmHWM:").unwrap_or(resident_bytes),
        // Kernels before 4.5 do not tell them apart.
        anonymous_bytes: kib_field(&status, "RssAnon:").unwrap_or(resident_bytes),
    })
}

/// The limits that the files of a Linux system tell; `root` is `/` outside tests.
#[cfg_attr(not(any(target_os = "linux", test)), expect(dead_code, reason = "Linux alone has them"))]
fn limits_under(root: &Path) -> Vec<MemoryLimit> {
    let own_bytes = own_memory_under(root).map_or(0, |own| own.anonymous_bytes);
    let machine = read(root, "proc/meminfo").and_then(|meminfo| {
        let limit_bytes = kib_field(&meminfo, "MemTotal:")?;
        let available = kib_field(&meminfo, "MemAvailable:")?;
        let others_bytes = limit_bytes.saturating_sub(available).saturating_sub(own_bytes);
        Some(MemoryLimit { scope: "the machine".to_owned(), limit_bytes, others_bytes })
    });
    let groups = cgroup::groups(root);
    machine.into_iter().chain(groups.iter().filter_map(|group| group.limit(own_bytes))).collect()
}

/// A file of the system as text; `None` when it cannot be read.
fn read(root: &Path, path: impl AsRef<Path>) -> Option<String> {
    use std::io::Read;
    let mut text = Vec::new();
    let file = fs::File::open(root.join(path)).ok()?;
    file.take(MAX_FILE_BYTES).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// The value of a line such as `MemTotal:  24683720 kB`, in bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files such as a Linux system has.
    struct System(tempfile::TempDir);

    impl System {
        /// 16 GiB, of which 10 are available; this process holds 1 GiB.
        fn new() -> Self {
            let system = System(tempfile::tempdir().unwrap());
            system.file(
                "proc/meminfo",
                "MemTotal:       16777216 kB\nMemFree:         1048576 kB\n\
                 MemAvailable:   10485760 kB\n",
            );
            system.file(
                "proc/self/status",
                "Name:\trill\nVmHWM:\t 2097152 kB\nVmRSS:\t 1179648 kB\nRssAnon:\t 1048576 kB\n",
            );
            system
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn limits(&self) -> Vec<(String, u64, u64)> {
            let limits = limits_under(self.0.path());
            limits
                .into_iter()
                .map(|l| (l.scope, l.limit_bytes >> 20, l.others_bytes >> 20))
                .collect()
        }
    }

    const MACHINE: (&str, u64, u64) = ("the machine", 16 << 10, 5 << 10);
    const V2_MOUNT: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1_MOUNT: &str =
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

    fn named(limits: &[(String, u64, u64)]) -> Vec<(&str, u64, u64)> {
        limits.iter().map(|(scope, limit, others)| (scope.as_str(), *limit, *others)).collect()
    }

    #[test]
    fn without_groups_the_machine_is_the_limit() {
        let system = System::new();
        assert_eq!(named(&system.limits()), [MACHINE]);
        let own = own_memory_under(system.0.path()).unwrap();
        assert_eq!((own.resident_bytes, own.peak_bytes), (1152 << 20, 2048 << 20));
        assert_eq!(own.anonymous_bytes, 1024 << 20);
    }

    #[test]
    fn a_system_that_tells_nothing_has_no_limits() {
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(limits_under(empty.path()), []);
        assert_eq!(own_memory_under(empty.path()), None);
        assert_eq!(tightest(&[]), None);
    }

    #[test]
    fn every_ancestor_of_a_version_2_group_counts_and_max_does_not() {
        let system = System::new();
        system.file("proc/self/cgroup", "0::/user.slice/user@1000.service/app.scope\n");
        system.file("proc/self/mountinfo", V2_MOUNT);
        let at = "sys/fs/cgroup/user.slice";
        // The root group has no limit file at all.
        system.file("sys/fs/cgroup/memory.stat", "anon 5\n");
        system.file(&format!("{at}/memory.max"), "8589934592\n");
        system.file(&format!("{at}/memory.current"), "4294967296\n");
        system.file(
            &format!("{at}/memory.stat"),
            "anon 1\nfile 99\ninactive_file 536870912\nactive_file 536870912\n",
        );
        system.file(&format!("{at}/user@1000.service/memory.max"), "max\n");
        let leaf = format!("{at}/user@1000.service/app.scope");
        system.file(&format!("{leaf}/memory.max"), "6442450944\n");
        system.file(&format!("{leaf}/memory.high"), "5368709120\n");
        system.file(&format!("{leaf}/memory.current"), "1073741824\n");
        assert_eq!(
            named(&system.limits()),
            [
                MACHINE,
                ("control group /user.slice/user@1000.service/app.scope", 5 << 10, 0),
                // Four GiB less one of files and one of this process.
                ("control group /user.slice", 8 << 10, 2 << 10),
            ]
        );
        let limits = limits_under(system.0.path());
        let tight = tightest(&limits).unwrap();
        assert_eq!((tight.limit_bytes, tight.usable_bytes()), (5 << 30, 15 << 28));
    }

    #[test]
    fn a_version_1_group_counts_and_its_largest_number_is_no_limit() {
        let system = System::new();
        system.file("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/batch/job 7\n0::/\n");
        system.file(
            "proc/self/mountinfo",
            &format!("{V1_MOUNT}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"),
        );
        let at = "sys/fs/cgroup/memory";
        system.file(&format!("{at}/memory.limit_in_bytes"), "9223372036854771712\n");
        system.file(&format!("{at}/batch/memory.limit_in_bytes"), "4294967296\n");
        system.file(&format!("{at}/batch/memory.usage_in_bytes"), "3221225472\n");
        system.file(
            &format!("{at}/batch/memory.stat"),
            "inactive_file 1\ntotal_inactive_file 1073741824\ntotal_active_file 0\n",
        );
        system.file(&format!("{at}/batch/job 7/memory.limit_in_bytes"), "9223372036854771712\n");
        assert_eq!(named(&system.limits()), [MACHINE, ("control group /batch", 4 << 10, 1 << 10)]);
    }

    #[test]
    fn both_versions_at_once_both_count() {
        let system = System::new();
        system.file("proc/self/cgroup", "4:memory:/one\n0::/two\n");
        system.file(
            "proc/self/mountinfo",
            &format!("{V1_MOUNT}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"),
        );
        system.file("sys/fs/cgroup/memory/one/memory.limit_in_bytes", "3221225472\n");
        system.file("sys/fs/cgroup/unified/two/memory.max", "2147483648\n");
        let limits = system.limits();
        let mut groups = named(&limits[1..]);
        groups.sort_unstable();
        assert_eq!(
            groups,
            [("control group /one", 3 << 10, 0), ("control group /two", 2 << 10, 0)]
        );
    }

    #[test]
    fn inside_a_container_the_mount_shows_only_the_groups_below_it() {
        // The host's path is in both files, and the mount begins in the middle of it.
        let system = System::new();
        system.file("proc/self/cgroup", "4:memory:/docker/abc/inner\n");
        system.file(
            "proc/self/mountinfo",
            "35 31 0:32 /docker/abc /sys/fs/cgroup/me\\040mory ro master:9 - cgroup cgroup rw,memory\n",
        );
        system.file("sys/fs/cgroup/me mory/memory.limit_in_bytes", "1073741824\n");
        system.file("sys/fs/cgroup/me mory/inner/memory.limit_in_bytes", "536870912\n");
        assert_eq!(
            named(&system.limits()),
            [
                MACHINE,
                ("control group /docker/abc/inner", 512, 0),
                ("control group /docker/abc", 1024, 0)
            ]
        );
        // A path that leads outside the mount: its root is the nearest that can be seen.
        for outside in ["4:memory:/elsewhere\n", "4:memory:/docker/abc/../../x\n"] {
            system.file("proc/self/cgroup", outside);
            assert_eq!(named(&system.limits()), [MACHINE, ("control group /docker/abc", 1024, 0)]);
        }
    }

    #[test]
    fn nonsense_in_the_files_is_no_limit_and_no_panic() {
        let system = System::new();
        system.file("proc/meminfo", "MemTotal: 99999999999999999999 kB\nMemAvailable: x kB\n");
        system.file("proc/self/status", "VmRSS: 18446744073709551615 kB\n");
        system.file("proc/self/cgroup", "::\n0:\n0::\nx:memory\n0::relative\n4:memory:/a\n");
        system.file("proc/self/mountinfo", &format!("- - -\n1 2 3\n{V2_MOUNT}{V1_MOUNT}"));
        system.file("sys/fs/cgroup/memory.max", "-1\n");
        system.file("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "\n");
        assert_eq!(system.limits(), []);
    }

    #[test]
    fn what_others_hold_never_makes_usable_memory_negative() {
        let limit = |limit_bytes, others_bytes| MemoryLimit {
            scope: String::new(),
            limit_bytes,
            others_bytes,
        };
        assert_eq!(limit(1000, 200).usable_bytes(), 550);
        assert_eq!(limit(1000, 2000).usable_bytes(), 0);
        assert_eq!(limit(u64::MAX, 0).usable_bytes(), u64::MAX / 4 * 3);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_tells_its_memory() {
        let limits = memory_limits();
        assert_eq!(limits[0].scope, "the machine");
        assert!(limits[0].limit_bytes > limits[0].others_bytes);
        let own = own_memory().unwrap();
        assert!(own.resident_bytes > 0 && own.peak_bytes >= own.anonymous_bytes);
    }
}
