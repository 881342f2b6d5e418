//! `metrics.jsonl`: one JSON object per line, each with its `step`, written as it comes.
//!
//! A line goes out in one write, so a kill can tear only the last one. Resuming drops a torn last
//! line and all lines beyond the checkpoint, so that the file reads as if the run had never been
//! interrupted.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::error::{IoContext, RecordError};

const FILE_NAME: &str = "metrics.jsonl";

/// The open metrics file of a run.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    /// Length of the whole lines, to which a failed write is cut back.
    length: u64,
    /// What became of lines that could not be read.
    note: Option<String>,
}

/// The first line that could not be read, and why.
struct BadLine {
    number: usize,
    reason: String,
}

/// A line as it is written: the step first, then the caller's fields.
#[derive(Serialize)]
struct Line<'a, T> {
    step: u64,
    #[serde(flatten)]
    fields: &'a T,
}

/// What resuming needs to know of a line. Lines without a step (a user's notes) are kept.
#[derive(Deserialize)]
struct LineStep {
    step: Option<u64>,
    validation_loss: Option<IgnoredAny>,
}

impl MetricsLog {
    /// Starts the metrics of a new run. A file that is there already is kept under the first free
    /// name `metrics.1.jsonl`, `metrics.2.jsonl`, ….
    pub fn create(run_folder: impl AsRef<Path>) -> Result<Self, RecordError> {
        Self::create_as(FILE_NAME, run_folder)
    }

    /// The same for another file of lines.
    pub fn create_as(name: &str, run_folder: impl AsRef<Path>) -> Result<Self, RecordError> {
        let folder = run_folder.as_ref();
        prepare(folder, name)?;
        Self::set_aside(folder, name)?;
        Self::append_to(folder.join(name))
    }

    /// Keeps a file of lines that is there already under the first free name.
    pub fn set_aside(folder: &Path, name: &str) -> Result<(), RecordError> {
        let path = folder.join(name);
        match fs::symlink_metadata(&path) {
            Ok(_) => fs::rename(&path, free_name(folder, name)).at("move aside", &path),
            Err(_) => Ok(()),
        }
    }

    /// Continues the metrics of a run resumed after `step`: lines of later steps are dropped, and
    /// so is an evaluation of `step` itself unless the checkpoint is from after it (`evaluated`).
    /// Without a file it starts one. Lines that cannot be read keep no run from going on: they are
    /// left out, and the file as it was is kept under the next free name.
    pub fn resume(
        run_folder: impl AsRef<Path>,
        step: u64,
        evaluated: bool,
    ) -> Result<Self, RecordError> {
        Self::resume_as(FILE_NAME, run_folder, step, evaluated)
    }

    /// The same for another file of lines.
    pub fn resume_as(
        name: &str,
        run_folder: impl AsRef<Path>,
        step: u64,
        evaluated: bool,
    ) -> Result<Self, RecordError> {
        let folder = run_folder.as_ref();
        prepare(folder, name)?;
        let path = folder.join(name);
        let text = match cinch_files::read_regular(&path, u64::MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            result => result.at("read", &path)?,
        };
        let (kept, bad) = lines_up_to(&text, step, evaluated);
        let note = match bad {
            None => None,
            Some(BadLine { number, reason }) => {
                // Copied before it is changed: a kill in between loses nothing.
                let aside = free_name(folder, name);
                cinch_files::replace(&aside, &text).at("write", &aside)?;
                Some(format!(
                    "{} line {number} is damaged ({reason}): what cannot be read was left out, \
                     and the file as it was is kept as {}",
                    cinch_files::shown(&path),
                    cinch_files::shown(&aside)
                ))
            }
        };
        if kept != text {
            cinch_files::replace(&path, &kept).at("write", &path)?;
        }
        let mut log = Self::append_to(path)?;
        log.note = note;
        Ok(log)
    }

    /// What is worth telling of the file that was found.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    fn append_to(path: PathBuf) -> Result<Self, RecordError> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .at("open", &path)?;
        let length = file.metadata().at("read", &path)?.len();
        Ok(Self {
            path,
            file,
            length,
            note: None,
        })
    }

    /// `<run>/metrics.jsonl`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends one line with `step` and the fields of a struct or map, which must not have a
    /// `step` of their own. It is with the system when the call returns: a kill no longer loses
    /// it. JSON has no NaN and no infinity; both are written as `null`.
    pub fn append<T: Serialize>(&mut self, step: u64, fields: &T) -> Result<(), RecordError> {
        let mut line = serde_json::to_vec(&Line { step, fields }).map_err(|source| {
            RecordError::NotAnObject {
                path: self.path.clone(),
                step,
                source,
            }
        })?;
        line.push(b'\n');
        if let Err(error) = self.file.write_all(&line) {
            // Half a line on a full disk would make the next line unreadable too. If even cutting
            // back fails, the write's error is still the one to report.
            let _ = self.file.set_len(self.length);
            return Err(error).at("write", &self.path);
        }
        self.length += line.len() as u64;
        Ok(())
    }

    /// Forces all lines to the disk. Called before a checkpoint is saved, it keeps a power cut
    /// from losing metrics of steps that the checkpoint holds.
    pub fn sync(&self) -> Result<(), RecordError> {
        self.file.sync_data().at("sync", &self.path)
    }
}

/// Makes the folder where it is missing, and clears what a killed process left unfinished in it.
fn prepare(folder: &Path, file: &str) -> Result<(), RecordError> {
    fs::create_dir_all(folder).at("create", folder)?;
    cinch_files::sweep(folder, |name| name == file);
    Ok(())
}

/// The first free name among `metrics.1.jsonl`, `metrics.2.jsonl`, ….
fn free_name(folder: &Path, name: &str) -> PathBuf {
    let stem = name.strip_suffix(".jsonl").unwrap_or(name);
    let mut number = 1_u32;
    loop {
        let candidate = folder.join(format!("{stem}.{number}.jsonl"));
        if fs::symlink_metadata(&candidate).is_err() {
            return candidate;
        }
        number += 1;
    }
}

/// The lines of `text` that a checkpoint of `step` holds, without the last line if it is torn and
/// without those that cannot be read, and the first of these.
fn lines_up_to(text: &[u8], step: u64, evaluated: bool) -> (Vec<u8>, Option<BadLine>) {
    let mut kept = Vec::with_capacity(text.len());
    let mut bad = None;
    for (index, line) in text.split_inclusive(|&byte| byte == b'\n').enumerate() {
        // Without a line end it was torn, even if what is there happens to parse: `"step":12`
        // may be the beginning of `"step":120`.
        if !line.ends_with(b"\n") {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match read_line(line) {
            Ok(found) => {
                let is_pending = |at| at == step && !evaluated && found.validation_loss.is_some();
                if found.step.is_none_or(|at| at <= step && !is_pending(at)) {
                    kept.extend_from_slice(line);
                }
            }
            Err(reason) => {
                bad.get_or_insert(BadLine {
                    number: index + 1,
                    reason,
                });
            }
        }
    }
    (kept, bad)
}

fn read_line(line: &[u8]) -> Result<LineStep, String> {
    // An array would pass for the struct, its first element for the step.
    if line.trim_ascii_start().first() != Some(&b'{') {
        return Err("it does not begin with `{`".to_owned());
    }
    serde_json::from_slice(line).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[derive(Serialize)]
    struct Measured {
        loss: f32,
        learning_rate: f64,
    }

    fn read(folder: &Path) -> Vec<Value> {
        fs::read_to_string(folder.join(FILE_NAME))
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    fn steps(folder: &Path) -> Vec<u64> {
        read(folder)
            .iter()
            .map(|line| line["step"].as_u64().unwrap())
            .collect()
    }

    fn write_steps(log: &mut MetricsLog, steps: impl IntoIterator<Item = u64>) {
        for step in steps {
            log.append(step, &json!({ "loss": 0.5 })).unwrap();
        }
    }

    #[test]
    fn a_line_is_there_as_soon_as_it_is_appended() {
        let run = tempfile::tempdir().unwrap();
        let folder = run.path().join("new");
        let mut log = MetricsLog::create(&folder).unwrap();
        let measured = Measured {
            loss: 0.1,
            learning_rate: 3e-4,
        };
        log.append(10, &measured).unwrap();
        // An f32 keeps its short decimal form.
        assert_eq!(
            fs::read_to_string(log.path()).unwrap(),
            "{\"step\":10,\"loss\":0.1,\"learning_rate\":0.0003}\n"
        );
        log.append(
            11,
            &Measured {
                loss: f32::NAN,
                learning_rate: 0.0,
            },
        )
        .unwrap();
        log.sync().unwrap();
        assert_eq!(read(&folder)[1]["loss"], Value::Null);
    }

    #[test]
    fn resuming_drops_later_steps_and_a_torn_line() {
        let run = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::create(run.path()).unwrap();
        write_steps(&mut log, 1..=5);
        drop(log);
        let path = run.path().join(FILE_NAME);
        let mut text = fs::read_to_string(&path).unwrap();
        // Torn, and yet it parses: its end may be missing.
        text.push_str("\n{\"note\":\"by hand\"}\n{\"step\":3}");
        fs::write(&path, text).unwrap();

        let mut log = MetricsLog::resume(run.path(), 3, true).unwrap();
        assert_eq!(read(run.path()).len(), 4);
        write_steps(&mut log, 4..=6);
        let lines = read(run.path());
        assert_eq!(lines[3], json!({ "note": "by hand" }));
        let numbered: Vec<u64> = lines
            .iter()
            .filter_map(|line| line["step"].as_u64())
            .collect();
        assert_eq!(numbered, [1, 2, 3, 4, 5, 6]);
        assert!(!run.path().join("metrics.jsonl.partial").exists());
    }

    #[cfg(unix)]
    #[test]
    fn what_a_killed_process_left_unfinished_is_cleared() {
        let run = tempfile::tempdir().unwrap();
        let left = run
            .path()
            .join(format!("{}{FILE_NAME}-0-1", cinch_files::PARTIAL_PREFIX));
        fs::write(&left, "{\"step\"").unwrap();
        MetricsLog::resume(run.path(), 3, true).unwrap();
        assert!(!left.exists());
    }

    #[test]
    fn an_evaluation_that_comes_again_is_dropped() {
        let run = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::create(run.path()).unwrap();
        for step in [1, 2] {
            log.append(step, &json!({ "loss": 0.5 })).unwrap();
            log.append(step, &json!({ "validation_loss": 0.6 }))
                .unwrap();
        }
        drop(log);
        MetricsLog::resume(run.path(), 2, true).unwrap();
        assert_eq!(steps(run.path()), [1, 1, 2, 2]);
        MetricsLog::resume(run.path(), 2, false).unwrap();
        assert_eq!(steps(run.path()), [1, 1, 2]);
        assert_eq!(read(run.path())[2]["loss"], 0.5);
    }

    #[test]
    fn every_possible_tear_of_the_last_line_is_tolerated() {
        let run = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::create(run.path()).unwrap();
        write_steps(&mut log, 1..=2);
        let whole = fs::read(log.path()).unwrap();
        let first = whole.iter().position(|&byte| byte == b'\n').unwrap() + 1;
        for length in first..whole.len() {
            fs::write(log.path(), &whole[..length]).unwrap();
            let mut log = MetricsLog::resume(run.path(), 2, true).unwrap();
            write_steps(&mut log, [3]);
            assert_eq!(steps(run.path()), [1, 3], "torn at byte {length}");
        }
    }

    #[test]
    fn a_new_run_keeps_the_old_metrics() {
        let run = tempfile::tempdir().unwrap();
        for last in [1, 2, 3] {
            let mut log = MetricsLog::create(run.path()).unwrap();
            write_steps(&mut log, 1..=last);
        }
        assert_eq!(steps(run.path()), [1, 2, 3]);
        let kept = |name: &str| fs::read_to_string(run.path().join(name)).unwrap();
        assert_eq!(kept("metrics.1.jsonl").lines().count(), 1);
        assert_eq!(kept("metrics.2.jsonl").lines().count(), 2);
    }

    #[test]
    fn a_bad_line_in_the_middle_is_set_aside_and_named() {
        for bad in ["{\"step\":", "17", "[1]", "{\"step\":-1}", "\u{0}\u{0}"] {
            let run = tempfile::tempdir().unwrap();
            let path = run.path().join(FILE_NAME);
            let text = format!("{{\"step\":1}}\n{bad}\n{{\"step\":2}}\n");
            fs::write(&path, &text).unwrap();
            let mut log = MetricsLog::resume(run.path(), 2, true).unwrap();
            write_steps(&mut log, [3]);
            let note = log.note().unwrap();
            for part in ["metrics.jsonl line 2", "metrics.1.jsonl"] {
                assert!(note.contains(part), "{note}");
            }
            assert_eq!(steps(run.path()), [1, 2, 3]);
            let aside = fs::read_to_string(run.path().join("metrics.1.jsonl")).unwrap();
            assert_eq!(aside, text);
            // It is told once.
            let log = MetricsLog::resume(run.path(), 3, true).unwrap();
            assert_eq!(log.note(), None);
        }
    }

    #[test]
    fn only_objects_are_accepted() {
        let run = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::create(run.path()).unwrap();
        let error = log.append(1, &17_u32).unwrap_err();
        assert!(matches!(error, RecordError::NotAnObject { step: 1, .. }));
        assert_eq!(fs::read(log.path()).unwrap(), b"");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error() {
        let path = PathBuf::from("/dev/full");
        let mut log = MetricsLog::append_to(path).unwrap();
        let message = log.append(1, &json!({})).unwrap_err().to_string();
        assert!(message.starts_with("cannot write /dev/full"), "{message}");
    }
}
