//! Measured runs, one JSON line each, beside what is predicted for them.
//!
//! The format is that of the fixture `peaks.jsonl`; anyone can add their own measurements.

mod case;

use std::borrow::Cow;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::TorchError;
use crate::overhead::Overhead;

pub use case::{Case, CaseLora, CaseQuantization};

/// One measured run.
#[derive(Clone, Debug, Deserialize)]
pub struct Measurement {
    pub case: Case,
    #[serde(default)]
    pub context_bytes: Option<u64>,
    #[serde(default)]
    pub peak_allocated: Option<u64>,
    #[serde(default)]
    pub peak_reserved: Option<u64>,
    #[serde(default)]
    pub device_used: Option<u64>,
    #[serde(default)]
    pub phases: std::collections::BTreeMap<String, MeasuredPhase>,
}

/// The allocator's counters after a phase.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct MeasuredPhase {
    pub allocated: u64,
    pub peak_allocated: u64,
    pub reserved: u64,
    pub peak_reserved: u64,
    #[serde(default)]
    pub requested: Option<u64>,
}

/// A predicted number beside the measured one.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Compared {
    pub predicted: u64,
    pub measured: Option<u64>,
}

impl Compared {
    /// (predicted − measured) / measured.
    pub fn error(&self) -> Option<f64> {
        let measured = self.measured.filter(|measured| *measured > 0)? as f64;
        Some((self.predicted as f64 - measured) / measured)
    }
}

/// One line of the comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    pub name: String,
    pub allocated: Compared,
    pub reserved: Compared,
    pub device: Compared,
    /// The figure to plan with: never below what the run takes of the card.
    pub safe_bytes: u64,
    pub milliseconds: f64,
}

/// The errors of all lines.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Summary {
    pub allocated: Spread,
    pub reserved: Spread,
    pub device: Spread,
}

/// Sizes of errors, without sign.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Spread {
    pub median: f64,
    pub worst: f64,
}

impl Spread {
    fn of(errors: impl Iterator<Item = Option<f64>>) -> Spread {
        let mut errors: Vec<f64> = errors.flatten().map(f64::abs).collect();
        errors.sort_by(f64::total_cmp);
        let Some(&worst) = errors.last() else {
            return Spread::default();
        };
        let middle = errors.len() / 2;
        let median = if errors.len() % 2 == 1 {
            errors[middle]
        } else {
            (errors[middle - 1] + errors[middle]) / 2.0
        };
        Spread { median, worst }
    }
}

/// A run that is not compared.
#[derive(Clone, Debug)]
pub struct Skipped {
    pub name: String,
    pub reason: String,
}

/// Reads measured runs. Skipped are lines that hold an error instead of a measurement, and compiled runs: what a compiler
/// allocates is not eager PyTorch.
pub fn read(text: &str, origin: &str) -> Result<(Vec<Measurement>, Vec<Skipped>), TorchError> {
    let (mut measurements, mut skipped) = (Vec::new(), Vec::new());
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let wrong = |problem: serde_json::Error| TorchError::Truth {
            origin: origin.into(),
            line: index + 1,
            problem: problem.to_string(),
        };
        let value: Value = serde_json::from_str(&finite(line)).map_err(wrong)?;
        let reason = if value.get("error").is_some() {
            "it ended in an error"
        } else if value["case"]["compile"] == true {
            "it was compiled, and what a compiler allocates is not eager PyTorch"
        } else {
            measurements.push(serde_json::from_value(value).map_err(wrong)?);
            continue;
        };
        let name = value["case"]["name"].as_str();
        skipped.push(Skipped {
            name: name.map_or_else(|| format!("line {}", index + 1), String::from),
            reason: reason.into(),
        });
    }
    if measurements.is_empty() {
        return Err(TorchError::NothingMeasured {
            origin: origin.into(),
        });
    }
    Ok((measurements, skipped))
}

/// The runs of [`read`] alone.
pub fn parse(text: &str, origin: &str) -> Result<Vec<Measurement>, TorchError> {
    read(text, origin).map(|(measurements, _)| measurements)
}

/// Python writes numbers that JSON does not have, such as the loss of a run that diverged: they become null.
fn finite(line: &str) -> Cow<'_, str> {
    const NUMBERS: [&str; 3] = ["NaN", "-Infinity", "Infinity"];
    if !NUMBERS.iter().any(|number| line.contains(number)) {
        return Cow::Borrowed(line);
    }
    let mut out = String::with_capacity(line.len());
    let (mut rest, mut in_string) = (line, false);
    while let Some(first) = rest.chars().next() {
        let number = NUMBERS.iter().find(|number| rest.starts_with(**number));
        let taken = match number {
            Some(number) if !in_string => {
                out.push_str("null");
                number.len()
            }
            _ => {
                let escape = in_string && first == '\\';
                let escaped = rest[first.len_utf8()..].chars().next().filter(|_| escape);
                in_string ^= first == '"';
                let taken = first.len_utf8() + escaped.map_or(0, char::len_utf8);
                out.push_str(&rest[..taken]);
                taken
            }
        };
        rest = &rest[taken..];
    }
    Cow::Owned(out)
}

/// Predicts a measured run, on the card that it ran on.
pub fn judge(measurement: &Measurement) -> Result<Verdict, TorchError> {
    let workload = measurement.case.workload()?;
    let overhead = Overhead::of(workload.chip.capability.generation());
    let start = Instant::now();
    let prediction = workload.predict()?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    let device = overhead.device_bytes(&prediction);
    Ok(Verdict {
        name: measurement.case.name.clone(),
        allocated: Compared {
            predicted: prediction.peak_allocated,
            measured: measurement.peak_allocated,
        },
        reserved: Compared {
            predicted: prediction.peak_reserved,
            measured: measurement.peak_reserved,
        },
        device: Compared {
            predicted: device,
            measured: measurement.device_used,
        },
        safe_bytes: overhead.safe_bytes(&prediction),
        milliseconds,
    })
}

/// Measured runs beside what is predicted for them.
pub struct Comparison {
    pub verdicts: Vec<Verdict>,
    pub summary: Summary,
    /// Runs that cannot be predicted: of an unknown model, say.
    pub skipped: Vec<Skipped>,
}

/// Predicts every measured run. An error only where none of them can be predicted.
pub fn compare(measurements: &[Measurement]) -> Result<Comparison, TorchError> {
    let (mut verdicts, mut skipped) = (Vec::new(), Vec::new());
    let mut first_problem = None;
    for measurement in measurements {
        match judge(measurement) {
            Ok(verdict) => verdicts.push(verdict),
            Err(problem) => {
                skipped.push(Skipped {
                    name: measurement.case.name.clone(),
                    reason: problem.to_string(),
                });
                first_problem.get_or_insert(problem);
            }
        }
    }
    if let (true, Some(problem)) = (verdicts.is_empty(), first_problem) {
        return Err(problem);
    }
    let summary = Summary {
        allocated: Spread::of(verdicts.iter().map(|verdict| verdict.allocated.error())),
        reserved: Spread::of(verdicts.iter().map(|verdict| verdict.reserved.error())),
        device: Spread::of(verdicts.iter().map(|verdict| verdict.device.error())),
    };
    Ok(Comparison {
        verdicts,
        summary,
        skipped,
    })
}
