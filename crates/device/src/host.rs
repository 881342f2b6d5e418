//! The host: cores, memory, swap, and what a container may use of them.
//!
//! In a container `/proc/meminfo` is that of the whole machine. A process that goes over the
//! limit of its control group is killed however much the machine has left, so the limit counts:
//! that of the process's own group and of every group above it.

use serde::{Deserialize, Serialize};

use crate::probe::Probe;

/// Memory and cores of the host as far as this process may use them. A reading that is not to
/// be had is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    pub cores: Option<usize>,
    /// Memory of the machine, or less where a container is limited to less.
    pub total_bytes: Option<u64>,
    /// What can be used now without swapping and without reaching a container's limit.
    pub available_bytes: Option<u64>,
    /// The tightest limit of a container, where it is below the machine's memory.
    pub limit_bytes: Option<u64>,
    pub swap_bytes: Option<u64>,
    pub swap_free_bytes: Option<u64>,
}

/// What a control group allows and what is used of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    bytes: u64,
    /// Without file pages that the kernel would give back first.
    used: u64,
}

impl Limit {
    fn left(self) -> u64 {
        self.bytes.saturating_sub(self.used)
    }
}

pub(crate) fn read(probe: &dyn Probe) -> Host {
    let table = probe.file("/proc/meminfo").unwrap_or_default();
    let machine = field(&table, "MemTotal:");
    let available = field(&table, "MemAvailable:");
    let limits = limits(probe, machine.unwrap_or(u64::MAX));
    let limit = limits.iter().map(|limit| limit.bytes).min();
    let left = limits.into_iter().map(Limit::left).min();
    Host {
        cores: probe.cores(),
        total_bytes: least(machine, limit),
        available_bytes: least(available, left),
        limit_bytes: limit,
        swap_bytes: field(&table, "SwapTotal:"),
        swap_free_bytes: field(&table, "SwapFree:"),
    }
}

/// The smaller of two readings, or the one that there is.
fn least(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}

/// The limits of the groups this process is in, from its own to the root, that are below the
/// memory of the machine: an unlimited group has a limit of some exabytes.
fn limits(probe: &dyn Probe, machine: u64) -> Vec<Limit> {
    let groups = probe.file("/proc/self/cgroup").unwrap_or_default();
    let mut limits = Vec::new();
    for line in groups.lines() {
        // `4:memory:/docker/abc` in version 1, `0::/user.slice/session` in version 2.
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let version = if controllers.is_empty() {
            &VERSION_2
        } else if controllers.split(',').any(|name| name == "memory") {
            &VERSION_1
        } else {
            continue;
        };
        // Inside a container the path can be one of the host's that is not mounted here; the
        // walk to the root then meets the group of the container, which is the root seen here.
        let mut path = path.trim_end_matches('/');
        loop {
            limits.extend(version.read(probe, path));
            match path.rsplit_once('/') {
                Some((parent, _)) => path = parent,
                None => break,
            }
        }
    }
    limits.retain(|limit| limit.bytes < machine);
    limits
}

/// The names of a version's files.
struct Version {
    root: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// File pages not used lately, in `memory.stat`.
    reclaimable: &'static str,
}

const VERSION_1: Version = Version {
    root: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
};

const VERSION_2: Version = Version {
    root: "/sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: "inactive_file ",
};

impl Version {
    /// The limit of one group; `None` where there is none (`max`) or the file is not there.
    fn read(&self, probe: &dyn Probe, group: &str) -> Option<Limit> {
        let file = |name| probe.file(&format!("{}{group}/{name}", self.root));
        let bytes = file(self.limit)?.trim().parse().ok()?;
        let usage = file(self.usage).and_then(|text| text.trim().parse().ok());
        let reclaimable = file("memory.stat").and_then(|text| {
            let line = text
                .lines()
                .find(|line| line.starts_with(self.reclaimable))?;
            line.split_whitespace().nth(1)?.parse().ok()
        });
        let used = usage
            .unwrap_or(0_u64)
            .saturating_sub(reclaimable.unwrap_or(0));
        Some(Limit { bytes, used })
    }
}

/// A line `name   123 kB`.
pub(crate) fn field(table: &str, name: &str) -> Option<u64> {
    let line = table.lines().find(|line| line.starts_with(name))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::recorded::Recorded;

    const MEMINFO: &str = "MemTotal:       65536000 kB\nMemFree:         1024000 kB\n\
        MemAvailable:   32768000 kB\nSwapTotal:       2048000 kB\nSwapFree:        1024000 kB\n";
    const KIB: u64 = 1024;
    const GIB: u64 = 1 << 30;

    fn host(files: &[(&str, &str)]) -> Host {
        let mut recorded = Recorded::default();
        recorded.write("/proc/meminfo", MEMINFO);
        for (path, text) in files {
            recorded.write(path, text);
        }
        read(&recorded)
    }

    #[test]
    fn a_machine_without_limits() {
        let expected = Host {
            cores: Some(4),
            total_bytes: Some(65_536_000 * KIB),
            available_bytes: Some(32_768_000 * KIB),
            limit_bytes: None,
            swap_bytes: Some(2_048_000 * KIB),
            swap_free_bytes: Some(1_024_000 * KIB),
        };
        assert_eq!(host(&[]), expected);
        let unlimited = host(&[
            ("/proc/self/cgroup", "0::/user.slice/user-0.slice\n"),
            ("/sys/fs/cgroup/user.slice/memory.max", "max\n"),
            ("/sys/fs/cgroup/user.slice/user-0.slice/memory.max", "max\n"),
        ]);
        assert_eq!(unlimited, expected);
        let version_1 = host(&[
            ("/proc/self/cgroup", "4:memory:/\n3:cpu,cpuacct:/\n"),
            (
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
        ]);
        assert_eq!(version_1, expected);
    }

    /// Docker with version 2: the group of the container is the root it sees.
    #[test]
    fn a_container_of_version_2() {
        let host = host(&[
            ("/proc/self/cgroup", "0::/\n"),
            ("/sys/fs/cgroup/memory.max", "8589934592\n"),
            ("/sys/fs/cgroup/memory.current", "3221225472\n"),
            (
                "/sys/fs/cgroup/memory.stat",
                "anon 1073741824\nfile 2147483648\nactive_file 0\ninactive_file 1073741824\n",
            ),
        ]);
        assert_eq!(host.total_bytes, Some(8 * GIB));
        assert_eq!(host.limit_bytes, Some(8 * GIB));
        // Of 3 GiB in use one would be given back: 8 - (3 - 1).
        assert_eq!(host.available_bytes, Some(6 * GIB));
    }

    /// Docker with version 1: the path is the host's and is not mounted in the container.
    #[test]
    fn a_container_of_version_1() {
        let host = host(&[
            (
                "/proc/self/cgroup",
                "5:cpu,cpuacct:/docker/4f2a\n4:hugetlb,memory:/docker/4f2a\n0::/docker/4f2a\n",
            ),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824"),
            (
                "/sys/fs/cgroup/memory/memory.stat",
                "inactive_file 7\ntotal_inactive_file 536870912\n",
            ),
        ]);
        assert_eq!(host.total_bytes, Some(4 * GIB));
        assert_eq!(host.available_bytes, Some(3 * GIB + GIB / 2));
    }

    /// A job of a batch system: its own group has no limit, the one above has.
    #[test]
    fn the_tightest_group_above_counts() {
        let host = host(&[
            ("/proc/self/cgroup", "0::/slurm/job_7/step_0\n"),
            ("/sys/fs/cgroup/slurm/job_7/step_0/memory.max", "max"),
            ("/sys/fs/cgroup/slurm/job_7/memory.max", "17179869184"),
            ("/sys/fs/cgroup/slurm/job_7/memory.current", "1073741824"),
            ("/sys/fs/cgroup/slurm/memory.max", "34359738368"),
            ("/sys/fs/cgroup/slurm/memory.current", "34359738368"),
        ]);
        assert_eq!(host.limit_bytes, Some(16 * GIB));
        // The group of all jobs is full, whatever this job may use.
        assert_eq!(host.available_bytes, Some(0));
    }

    #[test]
    fn unreadable_tables_are_no_readings() {
        let nothing = read(&Recorded::default());
        assert_eq!(nothing.total_bytes, None);
        assert_eq!(nothing.available_bytes, None);
        let broken = host(&[
            ("/proc/meminfo", "MemTotal: lots\nMemAvailable:\n"),
            ("/proc/self/cgroup", "nonsense\n::\n4:memory"),
            ("/sys/fs/cgroup/memory.max", "-1"),
        ]);
        assert_eq!(broken.total_bytes, None);
        assert_eq!(broken.available_bytes, None);
        assert_eq!(field("VmRSS:\t 99999999999999999999 kB", "VmRSS:"), None);
        assert_eq!(field("A: 18446744073709551615 kB", "A:"), None);
    }
}
