//! A cinch run seen from outside: who writes into its folder, and what its `metrics.jsonl` says.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use cinch_config::Bytes;
use serde::Deserialize;

use crate::error::{IoContext, MonitorError};

const METRICS: &str = "metrics.jsonl";
const OWNER: &str = "owner.lock";
/// The end of the file in which the last line is looked for.
const TAIL: u64 = 64 << 10;
/// Lines of a curve that are kept; of more, every second is dropped, again and again.
const MOST_POINTS: usize = 4096;
/// The longest line that is read.
const LONGEST_LINE: u64 = 1 << 20;

/// A line of `metrics.jsonl`. Lines of evaluations have a validation loss alone.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, serde::Serialize)]
#[serde(default)]
pub struct RunPoint {
    pub step: u64,
    pub loss: Option<f64>,
    pub validation_loss: Option<f64>,
    pub learning_rate: Option<f64>,
    pub gradient_norm: Option<f64>,
    pub tokens_per_second: Option<f64>,
    pub step_seconds: Option<f64>,
    pub epoch: Option<f64>,
    pub arena_bytes: Option<u64>,
    pub planned_bytes: Option<u64>,
    pub resident_bytes: Option<u64>,
    pub device_used_bytes: Option<u64>,
}

impl RunPoint {
    /// What was measured where the plan is: on the card, or in the host's memory.
    pub fn measured(&self) -> Option<u64> {
        self.device_used_bytes.or(self.resident_bytes)
    }

    /// In a line.
    pub fn summary(&self) -> String {
        let mut text = format!("step {}", self.step);
        let mut say = |part: Option<String>| {
            if let Some(part) = part {
                text += ", ";
                text += &part;
            }
        };
        say(self.loss.map(|loss| format!("loss {loss:.4}")));
        say(self
            .tokens_per_second
            .map(|rate| format!("{rate:.0} tokens/s")));
        say(self.epoch.map(|epoch| format!("epoch {epoch:.2}")));
        let against_plan = self.measured().zip(self.planned_bytes);
        say(against_plan.map(|(used, planned)| {
            let share = 100.0 * used as f64 / planned.max(1) as f64;
            format!(
                "{} used of {} planned ({share:.1} %)",
                Bytes::new(used),
                Bytes::new(planned)
            )
        }));
        text
    }
}

/// Whether a folder is one that a run writes to.
pub fn is_run(folder: &Path) -> bool {
    [METRICS, OWNER]
        .iter()
        .any(|name| folder.join(name).is_file())
}

/// What a run has written so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunCurve {
    pub steps: Vec<RunPoint>,
    pub evaluations: Vec<RunPoint>,
    /// Lines that could not be read.
    pub num_unread: u64,
}

impl RunCurve {
    pub fn last(&self) -> Option<&RunPoint> {
        self.steps.last()
    }
}

/// The run folders that a process owns: it holds their lock open. Only the user's own processes
/// show what they have open.
pub fn owned_by(process: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(process.join("fd")) else {
        return Vec::new();
    };
    let links = entries
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let owned = links.filter(|path| path.file_name().is_some_and(|name| name == OWNER));
    let mut folders: Vec<PathBuf> = owned
        .filter_map(|path| path.parent().map(Path::to_owned))
        .collect();
    folders.sort();
    folders.dedup();
    folders
}

/// The newest whole line of a run's metrics.
pub(crate) fn last_point(folder: &Path) -> Option<RunPoint> {
    let mut file = cinch_files::open_regular(&folder.join(METRICS)).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))
        .ok()?;
    let mut tail = Vec::new();
    file.take(TAIL).read_to_end(&mut tail).ok()?;
    let lines = tail.split(|&byte| byte == b'\n').rev();
    let mut points = lines.filter_map(|line| serde_json::from_slice::<RunPoint>(line).ok());
    points.find(|point| point.planned_bytes.is_some())
}

/// All of a run's metrics, thinned where there are very many. Lines that cannot be read are
/// counted and left out.
pub fn read_curve(folder: &Path) -> Result<RunCurve, MonitorError> {
    let path = folder.join(METRICS);
    let file = cinch_files::open_regular(&path).at("read", &path)?;
    let mut reader = BufReader::new(file);
    let mut curve = RunCurve::default();
    let (mut stride, mut count) = (1_u64, 0_u64);
    loop {
        let mut line = Vec::new();
        let mut limited = reader.by_ref().take(LONGEST_LINE);
        let read = limited.read_until(b'\n', &mut line).at("read", &path)?;
        if read == 0 {
            return Ok(curve);
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let Ok(point) = serde_json::from_slice::<RunPoint>(&line) else {
            // The last line may just be being written.
            curve.num_unread += u64::from(line.ends_with(b"\n"));
            continue;
        };
        if point.validation_loss.is_some() {
            curve.evaluations.push(point);
        } else {
            if count.is_multiple_of(stride) {
                curve.steps.push(point);
            }
            count += 1;
        }
        if curve.steps.len() > MOST_POINTS {
            thin(&mut curve.steps);
            stride *= 2;
        }
        if curve.evaluations.len() > MOST_POINTS {
            thin(&mut curve.evaluations);
        }
    }
}

fn thin(points: &mut Vec<RunPoint>) {
    let mut keep = false;
    points.retain(|_| {
        keep = !keep;
        keep
    });
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    #[test]
    fn a_curve_is_thinned_and_damaged_lines_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let mut text = String::new();
        for step in 1..=20_000 {
            writeln!(
                text,
                "{{\"step\":{step},\"loss\":2.5,\"planned_bytes\":{}}}",
                1 << 20
            )
            .unwrap();
            if step % 1000 == 0 {
                writeln!(text, "{{\"step\":{step},\"validation_loss\":3.0}}").unwrap();
            }
        }
        text += "not json\n{\"step\":20001,\"lo";
        std::fs::write(folder.path().join(METRICS), text).unwrap();
        let curve = read_curve(folder.path()).unwrap();
        assert!(
            (2000..=4096).contains(&curve.steps.len()),
            "{}",
            curve.steps.len()
        );
        assert_eq!((curve.evaluations.len(), curve.num_unread), (20, 1));
        assert_eq!(last_point(folder.path()).unwrap().step, 20_000);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_open_lock_tells_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let _lock = std::fs::File::create(folder.join(OWNER)).unwrap();
        assert!(owned_by(Path::new("/proc/self")).contains(&folder));
    }
}
