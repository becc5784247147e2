//! Linux control groups: which ones this process is in, and what they allow.

use std::path::{Path, PathBuf};

use super::{MemoryLimit, read};

/// Deepest nesting that is looked at; the kernel's own default is far below.
const MAX_DEPTH: usize = 128;

/// Numbers from here on mean no limit: version 1 writes the largest number of whole pages.
const UNLIMITED: u64 = 1 << 62;

/// A control group that limits memory, or may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// Its files.
    folder: PathBuf,
    /// As the system names it.
    name: String,
    version_2: bool,
}

impl Group {
    /// Its limit, if it has one. `own_bytes` of what it holds are this process's.
    pub(super) fn limit(&self, own_bytes: u64) -> Option<MemoryLimit> {
        let number = |file: &str| {
            let text = read(&self.folder, file)?;
            text.trim().parse::<u64>().ok()
        };
        let finite = |file: &str| number(file).filter(|bytes| *bytes < UNLIMITED);
        let (limit_bytes, usage_file, stats) = if self.version_2 {
            // Beyond `high` the group is throttled and pages, which is a limit to us.
            let limits = [finite("memory.max"), finite("memory.high")];
            let limit = limits.into_iter().flatten().min()?;
            (limit, "memory.current", ["inactive_file ", "active_file "])
        } else {
            let limit = finite("memory.limit_in_bytes")?;
            (limit, "memory.usage_in_bytes", ["total_inactive_file ", "total_active_file "])
        };
        let stat = read(&self.folder, "memory.stat").unwrap_or_default();
        let cached = stats.into_iter().filter_map(|name| {
            let value = stat.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().parse::<u64>().ok()
        });
        let reclaimable = cached.fold(own_bytes, u64::saturating_add);
        Some(MemoryLimit {
            scope: format!("control group {}", self.name),
            limit_bytes,
            others_bytes: number(usage_file).unwrap_or(0).saturating_sub(reclaimable),
        })
    }

    /// Where version 2 tells how long its processes waited for memory.
    pub(super) fn pressure_file(&self) -> Option<PathBuf> {
        self.version_2.then(|| self.folder.join("memory.pressure"))
    }
}

/// The groups this process is in, innermost first, that can be seen below a mount of theirs.
pub(super) fn groups(root: &Path) -> Vec<Group> {
    let own = read(root, "proc/self/cgroup").unwrap_or_default();
    let mounts = read(root, "proc/self/mountinfo").unwrap_or_default();
    let mut groups = Vec::new();
    for line in own.lines() {
        // hierarchy number : controllers : path
        let mut fields = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let version_2 = number == "0" && controllers.is_empty();
        if !path.starts_with('/') || !(version_2 || controllers.split(',').any(|c| c == "memory")) {
            continue;
        }
        let mount = mounts.lines().find_map(|line| Mount::parse(line, version_2));
        if let Some(mount) = mount {
            groups.extend(mount.chain(root, path, version_2));
        }
    }
    groups
}

/// Where a hierarchy of groups can be seen.
struct Mount {
    /// The group at its top.
    top: String,
    point: String,
}

impl Mount {
    /// A line of `mountinfo`, if it mounts version 2, or version 1's memory controller.
    fn parse(line: &str, version_2: bool) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let (kind, _device, options) =
            (file_system.next()?, file_system.next()?, file_system.next().unwrap_or(""));
        let wanted = match version_2 {
            true => kind == "cgroup2",
            false => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
        };
        let mut mount = mount.split(' ').skip(3);
        let (top, point) = (unescape(mount.next()?), unescape(mount.next()?));
        wanted.then_some(Self { top, point })
    }

    /// The group at `path` and those above it, up to the mount's top.
    fn chain(&self, root: &Path, path: &str, version_2: bool) -> Vec<Group> {
        let top = self.top.trim_end_matches('/');
        let inside = path.strip_prefix(top).filter(|rest| rest.is_empty() || rest.starts_with('/'));
        let names: Vec<&str> = inside.unwrap_or("").split('/').filter(|n| !n.is_empty()).collect();
        // A group outside our view is shown with dots; then the top is the nearest there is.
        let odd = names.iter().any(|name| [".", ".."].contains(name)) || names.len() > MAX_DEPTH;
        let names = if odd { &[][..] } else { &names[..] };
        let point = root.join(self.point.trim_start_matches('/'));
        let group = |depth: usize| {
            let names = &names[..depth];
            let name = names.iter().fold(top.to_owned(), |path, name| format!("{path}/{name}"));
            Group {
                folder: names.iter().fold(point.clone(), |folder, name| folder.join(name)),
                name: if name.is_empty() { "/".to_owned() } else { name },
                version_2,
            }
        };
        (0..=names.len()).rev().map(group).collect()
    }
}

/// Spaces and the like are written as a backslash and three octal digits.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let octal = |d: &u8| (b'0'..=b'7').contains(d).then(|| u32::from(d - b'0'));
        let digits = match (first, tail) {
            (b'\\', [a, b, c, ..]) => octal(a).zip(octal(b)).zip(octal(c)),
            _ => None,
        };
        let code = digits.and_then(|((a, b), c)| u8::try_from(64 * a + 8 * b + c).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
