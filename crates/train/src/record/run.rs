//! Everything that a run writes down: the same numbers as lines of `metrics.jsonl` and as
//! TensorBoard's curves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cinch_ranks::pace::{FILE_NAME as RANKS_FILE, RanksBegin, RanksLine};
use serde::Serialize;

use super::error::RecordError;
use super::metrics::MetricsLog;
use super::tensorboard::EventWriter;
use crate::event::StepReport;
use crate::terms::TermValue;

const CURVES_FOLDER: &str = "tensorboard";

/// The open record of a run.
pub(crate) struct RunRecord {
    metrics: MetricsLog,
    /// Where several ranks train, or did before.
    ranks: Option<MetricsLog>,
    events: EventWriter,
    folder: PathBuf,
}

/// One line of `metrics.jsonl` for an evaluation.
#[derive(Serialize)]
struct Validation<'a> {
    validation_loss: f64,
    validation_perplexity: f64,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    validation_terms: BTreeMap<&'a str, f64>,
}

impl RunRecord {
    pub fn create(run_folder: &Path) -> Result<Self, RecordError> {
        MetricsLog::set_aside(run_folder, RANKS_FILE)?;
        Ok(Self {
            metrics: MetricsLog::create(run_folder)?,
            ranks: None,
            events: EventWriter::create(run_folder.join(CURVES_FOLDER))?,
            folder: run_folder.to_owned(),
        })
    }

    /// Goes on after `step`; `evaluated` says whether the evaluation of that step, if one was
    /// due, is over.
    pub fn resume(run_folder: &Path, step: u64, evaluated: bool) -> Result<Self, RecordError> {
        let ranks = match run_folder.join(RANKS_FILE).is_file() {
            true => Some(MetricsLog::resume_as(RANKS_FILE, run_folder, step, true)?),
            false => None,
        };
        Ok(Self {
            metrics: MetricsLog::resume(run_folder, step, evaluated)?,
            ranks,
            folder: run_folder.to_owned(),
            events: EventWriter::resume(run_folder.join(CURVES_FOLDER), step)?,
        })
    }

    /// What is worth telling of the record that was found.
    pub fn note(&self) -> Option<&str> {
        self.metrics.note()
    }

    /// Who trains from a step on. Where one does and always did, there is nothing to say.
    pub fn begin_ranks(&mut self, step: u64, begin: &RanksBegin) -> Result<(), RecordError> {
        let log = match &mut self.ranks {
            Some(log) => log,
            None if begin.members.is_empty() => return Ok(()),
            none => none.insert(MetricsLog::create_as(RANKS_FILE, &self.folder)?),
        };
        log.append(step, begin)
    }

    /// What each of several ranks did since the line before.
    pub fn ranks(&mut self, step: u64, line: &RanksLine) -> Result<(), RecordError> {
        match &mut self.ranks {
            Some(log) => log.append(step, line),
            None => Ok(()),
        }
    }

    pub fn step(&mut self, report: &StepReport) -> Result<(), RecordError> {
        self.metrics.append(report.step, report)?;
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        let memory = &report.memory;
        for (tag, value) in [
            ("train/loss", Some(report.loss)),
            ("train/learning_rate", Some(report.learning_rate)),
            ("train/gradient_norm", Some(report.gradient_norm)),
            ("train/tokens_per_second", Some(report.tokens_per_second)),
            ("train/loss_scale", report.loss_scale),
            ("train/epoch", Some(report.epoch)),
            ("train/step_seconds", Some(report.step_seconds)),
            ("memory/arena_bytes", bytes(Some(memory.arena_bytes))),
            ("memory/planned_bytes", bytes(Some(memory.planned_bytes))),
            ("memory/resident_bytes", bytes(memory.resident_bytes)),
            ("memory/device_used_bytes", bytes(memory.device_used_bytes)),
        ] {
            if let Some(value) = value {
                self.events.scalar(tag, report.step, value as f32)?;
            }
        }
        for term in &report.terms {
            let tag = format!("train/loss/{}", term.name);
            self.events.scalar(&tag, report.step, term.value as f32)?;
        }
        self.events.flush()
    }

    /// The loss of an evaluation, and its terms where there are several.
    pub fn evaluation(
        &mut self,
        step: u64,
        loss: f64,
        terms: &[TermValue],
    ) -> Result<(), RecordError> {
        let terms = if terms.len() > 1 { terms } else { &[] };
        let values = terms.iter().map(|term| (&*term.name, term.value));
        let line = Validation {
            validation_loss: loss,
            validation_perplexity: loss.exp(),
            validation_terms: values.collect(),
        };
        self.metrics.append(step, &line)?;
        self.events.scalar("validation/loss", step, loss as f32)?;
        for term in terms {
            let tag = format!("validation/loss/{}", term.name);
            self.events.scalar(&tag, step, term.value as f32)?;
        }
        self.events.flush()
    }

    /// Forces what was written to the disk, before a checkpoint that goes with it.
    pub fn sync(&mut self) -> Result<(), RecordError> {
        self.metrics.sync()?;
        if let Some(ranks) = &self.ranks {
            ranks.sync()?;
        }
        self.events.flush()
    }

    /// Hands everything to the system.
    pub fn flush(&mut self) -> Result<(), RecordError> {
        self.events.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::event::MemoryUse;

    fn report(device_used_bytes: Option<u64>) -> StepReport {
        StepReport {
            step: 10,
            max_steps: 100,
            loss: 2.5,
            terms: Vec::new(),
            learning_rate: 1e-3,
            gradient_norm: 1.0,
            loss_scale: None,
            skipped_steps: None,
            tokens_per_second: 1000.0,
            tokens: 5000,
            epoch: 0.5,
            step_seconds: 0.25,
            memory: MemoryUse {
                arena_bytes: 4096,
                planned_bytes: 8192,
                resident_bytes: None,
                device_used_bytes,
            },
            seconds_left: 9.0,
        }
    }

    #[test]
    fn lines_and_curves_carry_time_and_memory() {
        let run = tempfile::tempdir().unwrap();
        let mut record = RunRecord::create(run.path()).unwrap();
        record.step(&report(None)).unwrap();
        record.step(&report(Some(1 << 30))).unwrap();
        let text = fs::read_to_string(run.path().join("metrics.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines[0]["step_seconds"], 0.25);
        assert_eq!(lines[0]["arena_bytes"], 4096);
        assert_eq!(lines[0]["planned_bytes"], 8192);
        // Unknown is null; without a GPU there is nothing to know.
        assert!(lines[0]["resident_bytes"].is_null() && text.contains("\"resident_bytes\":null"));
        assert!(lines[0].get("device_used_bytes").is_none());
        assert_eq!(lines[1]["device_used_bytes"], 1_u64 << 30);

        // One term is the loss itself.
        assert!(lines[0].get("terms").is_none());
        let term = |name: &str, value| TermValue {
            name: name.into(),
            value,
            weight: 0.5,
        };
        let several = StepReport {
            terms: vec![term("tokens", 4.0), term("balance", 1.0)],
            ..report(None)
        };
        record.step(&several).unwrap();
        record.evaluation(10, 2.5, &several.terms).unwrap();
        let text = fs::read_to_string(run.path().join("metrics.jsonl")).unwrap();
        let parsed = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(parsed).collect();
        assert_eq!(lines[2]["terms"]["balance"]["value"], 1.0);
        assert_eq!(lines[2]["terms"]["tokens"]["weight"], 0.5);
        assert_eq!(lines[3]["validation_terms"]["tokens"], 4.0);

        let folder = run.path().join(CURVES_FOLDER);
        let file = fs::read_dir(folder).unwrap().next().unwrap().unwrap();
        let curves = fs::read(file.path()).unwrap();
        let count = |tag: &str| {
            let windows = curves.windows(tag.len());
            windows.filter(|window| *window == tag.as_bytes()).count()
        };
        for (tag, points) in [
            ("train/step_seconds", 3),
            ("train/loss/balance", 1),
            ("validation/loss/balance", 1),
            ("memory/arena_bytes", 3),
            ("memory/planned_bytes", 3),
            ("memory/resident_bytes", 0),
            ("memory/device_used_bytes", 1),
        ] {
            assert_eq!(count(tag), points, "{tag}");
        }
    }
}
