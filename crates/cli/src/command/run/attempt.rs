//! What is told of attempts: a line each while they go on, and all of them at the end.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;

use cinch_config::Bytes;
use cinch_diagnose::Failure;
use cinch_monitor::text::span;
use cinch_supervise::{Batch, End, Search};
use serde_json::{Value, json};

use super::recorder::Peaks;
use crate::command::diagnose;

/// One process from its start to its end.
pub struct Attempt {
    pub number: usize,
    pub values: Option<Batch>,
    /// What it went on from.
    pub checkpoint: Option<PathBuf>,
    pub status: ExitStatus,
    pub end: End,
    /// Stopped by us, because it had run for as long as a trial takes.
    pub is_probe: bool,
    pub seconds: f64,
    pub output_bytes: u64,
    pub peaks: Peaks,
    /// What its output tells of memory.
    pub diagnosis: Vec<Failure>,
}

impl Attempt {
    pub fn works(&self) -> bool {
        self.end == End::Success
    }

    fn batch(&self) -> String {
        let values = self
            .values
            .map(|values| format!(" with batch {} × {}", values.batch, values.accumulation));
        values.unwrap_or_default()
    }

    /// What is said when it is over; nothing where it ended as one that ran alone.
    pub fn note(&self) -> Option<String> {
        if self.end == End::Failed && self.status.signal() == Some(9) {
            return Some(
                "cinch run: ended by signal 9, and the kernel counted no process ended for want of memory meanwhile: a person or a scheduler may have sent it".to_owned(),
            );
        }
        let End::OutOfMemory(evidence) = &self.end else {
            return None;
        };
        let peaks = self
            .peaks
            .text()
            .map_or_else(String::new, |peaks| format!("\n  {peaks}"));
        Some(format!(
            "cinch run: attempt {}{} ran out of memory after {}: {evidence}{peaks}",
            self.number,
            self.batch(),
            span(self.seconds),
        ))
    }

    fn outcome(&self) -> String {
        match (&self.end, self.status.code(), self.status.signal()) {
            (End::Success, ..) if self.is_probe => "works, stopped to try a larger one".to_owned(),
            (End::Success, ..) => "works, finished".to_owned(),
            (End::OutOfMemory(_), ..) => "out of memory".to_owned(),
            (End::Interrupted, ..) => "interrupted".to_owned(),
            (End::Failed, Some(code), _) => format!("failed with exit code {code}, not for memory"),
            (End::Failed, _, Some(9)) => {
                "ended by signal 9; the kernel counted no end for want of memory".to_owned()
            }
            (End::Failed, _, signal) => format!("ended by signal {}", signal.unwrap_or(0)),
        }
    }

    fn as_json(&self) -> Value {
        json!({
            "attempt": self.number,
            "batch": self.values.map(|values| values.batch),
            "accumulation": self.values.map(|values| values.accumulation),
            "resumed_from": self.checkpoint.as_ref().map(|path| path.display().to_string()),
            "end": match &self.end {
                End::Success => "success",
                End::OutOfMemory(_) => "out_of_memory",
                End::Failed => "failed",
                End::Interrupted => "interrupted",
            },
            "evidence": match &self.end {
                End::OutOfMemory(evidence) => Some(evidence.to_string()),
                _ => None,
            },
            "stopped_as_trial": self.is_probe,
            "exit_code": self.status.code(),
            "signal": self.status.signal(),
            "seconds": self.seconds,
            "output_bytes": self.output_bytes,
            "peak_gpu_bytes": self.peaks.gpus,
            "peak_host_bytes": self.peaks.host,
            "diagnosis": { "failures": self.diagnosis },
        })
    }
}

/// All attempts.
#[derive(Default)]
pub struct Story {
    pub attempts: Vec<Attempt>,
    effective: Option<usize>,
    chosen: Option<usize>,
    is_largest: bool,
}

impl Story {
    pub fn finish(&mut self, search: Option<&Search>, chosen: Option<usize>) {
        self.effective = search.map(Search::effective);
        self.is_largest = search.is_some_and(Search::is_settled);
        self.chosen = chosen;
    }

    /// What is told at the end where there was more than one attempt.
    pub fn summary(&self) -> Option<String> {
        let [_, _, ..] = &self.attempts[..] else {
            return None;
        };
        let mut text = format!("cinch run: {} attempts", self.attempts.len());
        for attempt in &self.attempts {
            let resumed = attempt
                .checkpoint
                .as_ref()
                .map_or_else(String::new, |path| format!(", from {}", path.display()));
            text += &format!(
                "\n  {}{}{resumed}: {} ({})",
                attempt.number,
                attempt.batch(),
                attempt.outcome(),
                span(attempt.seconds)
            );
        }
        match (self.chosen, self.effective) {
            (Some(batch), Some(effective)) => {
                text += &format!(
                    "\n  batch {batch} × {} works: effective batch {effective}, as before",
                    effective / batch
                );
            }
            (None, Some(_)) => text += "\n  no batch that was tried works",
            _ => {}
        }
        Some(text)
    }

    /// Why memory ran out and what to do, where the last attempt ended so.
    pub fn diagnosis(&self) -> Option<String> {
        let last = self.attempts.last()?;
        let is_told = matches!(last.end, End::OutOfMemory(_)) && !last.diagnosis.is_empty();
        is_told.then(|| diagnose::text_of(&last.diagnosis).trim_end().to_owned())
    }

    pub fn as_json(&self) -> Value {
        json!({
            "attempts": self.attempts.iter().map(Attempt::as_json).collect::<Vec<_>>(),
            "effective_batch": self.effective,
            "batch": self.chosen,
            "accumulation": self.chosen.zip(self.effective).map(|(batch, all)| all / batch),
            "search_is_over": self.is_largest,
        })
    }
}

impl Peaks {
    /// Nothing where the command ended before a second sample: the first is taken as it starts.
    fn text(&self) -> Option<String> {
        if self.num_samples < 2 {
            return None;
        }
        let gpus = self
            .gpus
            .iter()
            .map(|(index, bytes)| format!("{} on GPU {index}", Bytes::new(*bytes)));
        let host = self
            .host
            .map(|bytes| format!("{} of host memory by the process", Bytes::new(bytes)));
        let parts: Vec<String> = gpus.chain(host).collect();
        (!parts.is_empty()).then(|| format!("in use at the peak: {}", parts.join(", ")))
    }
}
