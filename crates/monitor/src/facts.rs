//! What the host knows of a process: its command, its user, its container, its memory and how
//! busy it and its workers are. Read from `/proc`, where other users' processes tell less.
//!
//! What never changes is read once a process. What does is read for the largest processes of each
//! sample, so that two hundred of them cost no more than sixty.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::run_folder;
use crate::sample::Planned;

/// A process as the host sees it. What is not to be had is `None`: a process of another user, or
/// one outside of this container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessFacts {
    pub pid: u32,
    pub command: Option<String>,
    pub user: Option<String>,
    /// A container's id or a job's number.
    pub container: Option<String>,
    pub resident_bytes: Option<u64>,
    /// Cores that it kept busy since the sample before.
    pub cores_busy: Option<f64>,
    /// Cores that its children kept busy: the workers of a data loader.
    pub children_busy: Option<f64>,
    pub num_children: Option<usize>,
    /// Waits for a disk just now.
    pub waits_for_disk: Option<bool>,
    pub plan: Option<Planned>,
}

/// The kernel's table of processes, or a copy of its form.
#[derive(Clone, Debug)]
pub struct ProcessTable {
    root: PathBuf,
    users: HashMap<u32, String>,
    ticks_per_second: f64,
}

/// Facts of processes over time.
#[derive(Debug)]
pub struct Facts {
    table: ProcessTable,
    known: HashMap<u32, Known>,
    /// When all processes were last searched for cinch's runs.
    searched_at: Option<f64>,
    /// Processes of runs without a GPU.
    runs: Vec<u32>,
}

#[derive(Clone, Debug, Default)]
struct Known {
    /// Since the machine started, in ticks: another process has another one.
    start: u64,
    facts: ProcessFacts,
    /// Folders of runs that it owns.
    folders: Vec<PathBuf>,
    at: f64,
    ticks: u64,
    children_ticks: HashMap<u32, u64>,
}

/// Processes whose changing facts are read at a sample.
const MOST_READ: usize = 64;
/// Seconds between two searches of all processes for runs of cinch.
const SEARCH_EVERY: f64 = 5.0;
/// The longest command that is kept.
const LONGEST_COMMAND: usize = 400;

/// What a line of `/proc/PID/stat` tells.
struct Stat {
    state: char,
    ticks: u64,
    start: u64,
    resident_pages: u64,
}

impl ProcessTable {
    pub fn of_this_machine() -> Self {
        Self::new(
            Path::new("/proc"),
            &std::fs::read_to_string("/etc/passwd").unwrap_or_default(),
            rustix::param::clock_ticks_per_second() as f64,
        )
    }

    /// A table in another folder, with the text of a user list.
    pub fn new(root: &Path, users: &str, ticks_per_second: f64) -> Self {
        let user = |line: &str| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            Some((fields.nth(1)?.parse().ok()?, name))
        };
        Self {
            root: root.to_owned(),
            users: users.lines().filter_map(user).collect(),
            ticks_per_second,
        }
    }

    fn folder(&self, pid: u32) -> PathBuf {
        self.root.join(pid.to_string())
    }

    fn text(&self, pid: u32, name: &str) -> Option<String> {
        let bytes = std::fs::read(self.folder(pid).join(name)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn stat(&self, pid: u32) -> Option<Stat> {
        let text = self.text(pid, "stat")?;
        // The name, in brackets, may itself hold blanks and brackets.
        let (_, after) = text.rsplit_once(')')?;
        let fields: Vec<&str> = after.split_whitespace().collect();
        let number = |place: usize| fields.get(place)?.parse::<u64>().ok();
        Some(Stat {
            state: fields.first()?.chars().next()?,
            ticks: number(11)?.saturating_add(number(12)?),
            start: number(19)?,
            resident_pages: number(21)?,
        })
    }

    /// Direct children; `None` where the kernel does not list them.
    fn children(&self, pid: u32) -> Option<Vec<u32>> {
        let text = self.text(pid, &format!("task/{pid}/children"))?;
        Some(
            text.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect(),
        )
    }

    fn command(&self, pid: u32) -> Option<String> {
        let text = self.text(pid, "cmdline")?;
        let words = text.split('\0').filter(|word| !word.is_empty());
        let line = words.collect::<Vec<_>>().join(" ");
        // Control characters of a command would move a terminal's cursor.
        let plain = line
            .chars()
            .map(|one| if one.is_control() { ' ' } else { one });
        let line: String = plain.take(LONGEST_COMMAND).collect();
        (!line.is_empty()).then_some(line)
    }

    fn user(&self, pid: u32) -> Option<String> {
        let id = std::fs::metadata(self.folder(pid)).ok()?.uid();
        Some(
            self.users
                .get(&id)
                .cloned()
                .unwrap_or_else(|| id.to_string()),
        )
    }

    fn container(&self, pid: u32) -> Option<String> {
        self.text(pid, "cgroup").as_deref().and_then(container_of)
    }

    fn is_cinch(&self, pid: u32) -> bool {
        self.text(pid, "comm")
            .is_some_and(|name| name.starts_with("cinch"))
    }

    fn all(&self) -> Vec<u32> {
        let entries = std::fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect()
    }
}

impl Facts {
    pub fn new(table: ProcessTable) -> Self {
        Self {
            table,
            known: HashMap::new(),
            searched_at: None,
            runs: Vec::new(),
        }
    }

    /// The facts of these processes (with what each holds on GPUs), and of cinch's runs.
    pub fn read(&mut self, pids: &[(u32, u64)], now: f64) -> Vec<ProcessFacts> {
        self.search(now);
        let mut wanted: Vec<(u32, u64)> = pids.to_vec();
        wanted.extend(self.runs.iter().map(|&pid| (pid, u64::MAX)));
        wanted.sort_by_key(|&(pid, bytes)| (std::cmp::Reverse(bytes), pid));
        let mut seen = HashSet::new();
        wanted.retain(|&(pid, _)| seen.insert(pid));
        self.known.retain(|pid, _| seen.contains(pid));
        for (place, &(pid, _)) in wanted.iter().enumerate() {
            if place < MOST_READ || !self.known.contains_key(&pid) {
                self.refresh(pid, now);
            }
        }
        let facts = wanted.iter().filter_map(|(pid, _)| self.known.get(pid));
        let mut facts: Vec<ProcessFacts> = facts.map(|known| known.facts.clone()).collect();
        facts.sort_by_key(|facts| facts.pid);
        facts
    }

    /// Looks through all processes for those that own a run's folder.
    fn search(&mut self, now: f64) {
        if self.searched_at.is_some_and(|at| now - at < SEARCH_EVERY) {
            return;
        }
        self.searched_at = Some(now);
        let all = self.table.all().into_iter();
        let runs = all.filter(|&pid| {
            self.table.is_cinch(pid) && !run_folder::owned_by(&self.table.folder(pid)).is_empty()
        });
        self.runs = runs.collect();
        for pid in &self.runs {
            if let Some(known) = self.known.get_mut(pid) {
                known.folders = run_folder::owned_by(&self.table.folder(*pid));
            }
        }
    }

    fn refresh(&mut self, pid: u32, now: f64) {
        let Some(stat) = self.table.stat(pid) else {
            // Outside of this container, or just ended: it is still on the GPU.
            self.known.entry(pid).or_default().facts.pid = pid;
            return;
        };
        let is_same = self
            .known
            .get(&pid)
            .is_some_and(|known| known.start == stat.start);
        if !is_same {
            self.known.insert(pid, self.first(pid, &stat));
        }
        let Some(known) = self.known.get_mut(&pid) else {
            return;
        };
        let seconds = now - known.at;
        let cores = |ticks: u64| ticks as f64 / self.table.ticks_per_second / seconds;
        let is_later = is_same && seconds > 0.0;
        let children = self.table.children(pid);
        let mut children_ticks = HashMap::new();
        for &child in children.iter().flatten() {
            let ticks = self.table.stat(child).map(|stat| stat.ticks);
            children_ticks.extend(ticks.map(|ticks| (child, ticks)));
        }
        let grown: u64 = children_ticks
            .iter()
            .filter_map(|(child, ticks)| {
                Some(ticks.saturating_sub(*known.children_ticks.get(child)?))
            })
            .sum();
        let facts = &mut known.facts;
        facts.cores_busy = is_later.then(|| cores(stat.ticks.saturating_sub(known.ticks)));
        facts.children_busy = (is_later && children.is_some()).then(|| cores(grown));
        facts.num_children = children.map(|children| children.len());
        facts.waits_for_disk = Some(stat.state == 'D');
        let page = rustix::param::page_size() as u64;
        facts.resident_bytes = stat.resident_pages.checked_mul(page);
        facts.plan = known.folders.iter().find_map(|folder| planned(folder));
        (known.at, known.ticks, known.children_ticks) = (now, stat.ticks, children_ticks);
    }

    fn first(&self, pid: u32, stat: &Stat) -> Known {
        let folders = match self.table.is_cinch(pid) {
            true => run_folder::owned_by(&self.table.folder(pid)),
            false => Vec::new(),
        };
        Known {
            start: stat.start,
            facts: ProcessFacts {
                pid,
                command: self.table.command(pid),
                user: self.table.user(pid),
                container: self.table.container(pid),
                ..ProcessFacts::default()
            },
            folders,
            ..Known::default()
        }
    }
}

/// What a run says was planned for it.
fn planned(folder: &Path) -> Option<Planned> {
    let point = run_folder::last_point(folder)?;
    Some(Planned {
        bytes: point.planned_bytes?,
        of: folder.display().to_string(),
        on_gpu: point.device_used_bytes.is_some(),
    })
}

/// The container or job that a line of `/proc/PID/cgroup` names: twelve digits of a container's
/// id, `job 17` of Slurm, the name of an LXC container.
fn container_of(text: &str) -> Option<String> {
    /// Digits of an id that people know containers by.
    const SHOWN: usize = 12;
    for line in text.lines() {
        let path = line.splitn(3, ':').nth(2)?;
        for part in path.split('/') {
            let part = part.strip_suffix(".scope").unwrap_or(part);
            let id = part.rsplit('-').next().unwrap_or(part);
            if id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Some(id[..SHOWN].to_owned());
            }
            if let Some(job) = part.strip_prefix("job_") {
                return Some(format!("job {job}"));
            }
        }
        let mut parts = path.split('/');
        if parts.any(|part| part == "lxc") {
            return parts.next().map(str::to_owned);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn process(root: &Path, pid: u32, ticks: u64, state: char) {
        let folder = root.join(pid.to_string());
        fs::create_dir_all(folder.join(format!("task/{pid}"))).unwrap();
        let stat = format!(
            "{pid} (py) thon 3) {state} 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 77 900 512 0\n"
        );
        fs::write(folder.join("stat"), stat).unwrap();
        fs::write(folder.join("cmdline"), "python\0train.py\0--x=\u{1b}[2J\0").unwrap();
        fs::write(folder.join("cgroup"), "0::/user.slice\n").unwrap();
        fs::write(folder.join("comm"), "python\n").unwrap();
    }

    #[test]
    fn a_process_is_described_and_its_business_measured() {
        let root = tempfile::tempdir().unwrap();
        let id = fs::metadata(root.path()).unwrap().uid();
        let users = format!("ann:x:{id}:0::/:/bin/sh\nbroken line\n");
        process(root.path(), 41, 100, 'R');
        process(root.path(), 42, 10, 'D');
        fs::write(root.path().join("41/task/41/children"), "42 ").unwrap();
        let mut facts = Facts::new(ProcessTable::new(root.path(), &users, 100.0));
        let first = facts.read(&[(41, 5), (99, 3)], 0.0);
        assert_eq!(
            first[0].command.as_deref(),
            Some("python train.py --x= [2J")
        );
        assert_eq!(first[0].user.as_deref(), Some("ann"));
        assert_eq!(first[0].cores_busy, None);
        assert_eq!(first[0].num_children, Some(1));
        // One that this container does not see is still there.
        assert_eq!((first[1].pid, &first[1].command), (99, &None));
        process(root.path(), 41, 190, 'R');
        process(root.path(), 42, 60, 'D');
        let second = facts.read(&[(41, 5)], 1.0);
        assert_eq!(second[0].cores_busy, Some(0.9));
        assert_eq!(second[0].children_busy, Some(0.5));
        assert_eq!(second.len(), 1);
    }

    #[test]
    fn containers_are_known_by_their_control_group() {
        let id = "4f2a".repeat(16);
        for (text, expected) in [
            (format!("0::/docker/{id}"), Some("4f2a4f2a4f2a".to_owned())),
            (
                format!("0::/system.slice/docker-{id}.scope"),
                Some("4f2a4f2a4f2a".to_owned()),
            ),
            (
                format!("12:memory:/kubepods/burstable/pod1-2/{id}\n0::/"),
                Some("4f2a4f2a4f2a".to_owned()),
            ),
            (
                "0::/slurm/uid_7/job_81/step_0".to_owned(),
                Some("job 81".to_owned()),
            ),
            ("4:cpu:/lxc/box/ns".to_owned(), Some("box".to_owned())),
            ("0::/user.slice/user-0.slice".to_owned(), None),
            ("nonsense".to_owned(), None),
        ] {
            assert_eq!(container_of(&text), expected, "{text}");
        }
    }
}
