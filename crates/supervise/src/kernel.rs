//! Whether the kernel ended processes for want of memory: it counts them, for the whole machine
//! and for each control group with a limit.

use std::path::{Path, PathBuf};

/// The counters at one moment. What cannot be read counts as none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelKills {
    machine: Option<u64>,
    group: Option<u64>,
}

impl KernelKills {
    /// The counters of this machine and of this process's control groups.
    pub fn now() -> Self {
        Self::under(Path::new("/"))
    }

    fn under(root: &Path) -> Self {
        let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        let groups = text(root.join("proc/self/cgroup"));
        let mut group = None;
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
                continue;
            };
            let (base, file) = match controllers {
                "" => ("sys/fs/cgroup", "memory.events"),
                names if names.split(',').any(|name| name == "memory") => {
                    ("sys/fs/cgroup/memory", "memory.oom_control")
                }
                _ => continue,
            };
            // Inside a container the path can be the host's: then its root is the group.
            let own = text(
                root.join(base)
                    .join(path.trim_start_matches('/'))
                    .join(file),
            );
            let outer = text(root.join(base).join(file));
            let counts = [own, outer];
            let count = counts.iter().filter_map(|text| counter(text)).max();
            group = group.max(count);
        }
        Self {
            machine: counter(&text(root.join("proc/vmstat"))),
            group,
        }
    }

    /// Processes that were ended since `before`: those of our control groups where these are
    /// counted, else those of the whole machine, which may be others'.
    pub fn since(&self, before: &Self) -> u64 {
        let (now, then) = match self.group {
            Some(now) => (now, before.group),
            None => (self.machine.unwrap_or(0), before.machine),
        };
        now.saturating_sub(then.unwrap_or(0))
    }
}

/// The line `oom_kill 3`.
fn counter(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn kills_are_counted_by_machine_and_by_group() {
        for (groups, file) in [
            ("0::/job\n", "sys/fs/cgroup/job/memory.events"),
            ("0::/docker/4f2a\n", "sys/fs/cgroup/memory.events"),
            (
                "4:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.oom_control",
            ),
        ] {
            let root = tempfile::tempdir().unwrap();
            let before = KernelKills::under(root.path());
            assert_eq!(before, KernelKills::default());
            write(root.path(), "proc/self/cgroup", groups);
            write(
                root.path(),
                file,
                "low 0\noom 1\noom_kill 2\noom_group_kill 0\n",
            );
            let after = KernelKills::under(root.path());
            assert_eq!(after.since(&before), 2, "{file}");
            // Others of the machine do not count where our own do.
            write(root.path(), "proc/vmstat", "pgfault 7\noom_kill 9\n");
            assert_eq!(KernelKills::under(root.path()).since(&after), 0);
            fs::remove_file(root.path().join("proc/self/cgroup")).unwrap();
            assert_eq!(KernelKills::under(root.path()).since(&before), 9);
        }
    }
}
