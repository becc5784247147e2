//! macOS, asked with its own programs.

#[cfg(target_os = "macos")]
use std::process::Command;

use super::MemoryLimit;

/// The machine's memory and what others hold of it.
#[cfg(target_os = "macos")]
pub(super) fn limit() -> Option<MemoryLimit> {
    let total = run("/usr/sbin/sysctl", &["-n", "hw.memsize"])?;
    parse_limit(&total, &run("/usr/bin/vm_stat", &[]).unwrap_or_default())
}

/// Whether the system says that memory is short: 1 no, 2 rather, 4 very.
#[cfg(target_os = "macos")]
pub(super) fn pressure_level() -> Option<u64> {
    run("/usr/sbin/sysctl", &["-n", "kern.memorystatus_vm_pressure_level"])?.trim().parse().ok()
}

#[cfg(target_os = "macos")]
fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// From the number of `sysctl -n hw.memsize` and the table of `vm_stat`, which may be empty. What
/// this process holds counts with others: it is little when a plan is made.
fn parse_limit(memsize: &str, vm_stat: &str) -> Option<MemoryLimit> {
    let limit_bytes: u64 = memsize.trim().parse().ok()?;
    let page_bytes: Option<u64> = vm_stat
        .split_once("page size of ")
        .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    let pages = |name: &str| {
        let value = vm_stat.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().trim_end_matches('.').parse::<u64>().ok()
    };
    // Anonymous pages, those the kernel keeps, and those that were squeezed together.
    let held = ["Anonymous pages:", "Pages wired down:", "Pages occupied by compressor:"];
    let held = held.into_iter().filter_map(pages).fold(0, u64::saturating_add);
    let others_bytes = held.saturating_mul(page_bytes.unwrap_or(0));
    Some(MemoryLimit { scope: "the machine".to_owned(), limit_bytes, others_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_vm_stat_is_read() {
        let vm_stat = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n\
            Pages free:                               51230.\n\
            Pages active:                            720000.\n\
            Pages wired down:                        131072.\n\
            Anonymous pages:                         262144.\n\
            Pages occupied by compressor:             65536.\n";
        let limit = parse_limit("34359738368\n", vm_stat).unwrap();
        assert_eq!((limit.limit_bytes, limit.others_bytes), (32 << 30, 7 << 30));
        assert_eq!(parse_limit("34359738368\n", "").unwrap().others_bytes, 0);
        assert_eq!(parse_limit("?", vm_stat), None);
    }
}
