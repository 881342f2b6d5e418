//! Measured runs, one JSON line each, beside what is predicted for them.
//!
//! The format is that of the fixture `peaks.jsonl`; anyone can add their own measurements.

use std::borrow::Cow;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::convention::Convention;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::{Precision, Recipe};
use crate::model::gsa::GsaConfig;
use crate::model::hugging_face;
use crate::model::mamba::MambaConfig;
use crate::model::mask::Attention;
use crate::model::module::Lora;
use crate::model::mu::MuConfig;
use crate::model::naics::NaicsConfig;
use crate::model::{Architecture, Workload};
use crate::overhead::{H200, Overhead};

/// What ran. Fields that do not decide memory are not read.
#[derive(Clone, Debug, Deserialize)]
pub struct Case {
    pub name: String,
    #[serde(default = "default_family")]
    pub family: String,
    #[serde(default)]
    pub model: Option<String>,
    #[serde(default)]
    pub size: Option<String>,
    #[serde(default)]
    pub arch: Map<String, Value>,
    pub batch: u64,
    pub seq: u64,
    #[serde(default)]
    pub n_negatives: Option<u64>,
    #[serde(default)]
    pub precision: Option<String>,
    #[serde(default)]
    pub ckpt: Option<bool>,
    /// Checkpointing with `use_reentrant=True`.
    #[serde(default)]
    pub reentrant: Option<bool>,
    /// Whose loop ran: `plain`, the file's own, or `trainer`.
    #[serde(default, rename = "loop")]
    pub convention: Option<String>,
    #[serde(default)]
    pub attn: Option<String>,
    #[serde(default)]
    pub optimizer: Option<String>,
    #[serde(default)]
    pub accum: Option<u32>,
    #[serde(default)]
    pub clip: Option<f64>,
    #[serde(default)]
    pub lora: Option<CaseLora>,
    /// A cap on what may be reserved, in GiB.
    #[serde(default)]
    pub cap_gb: Option<f64>,
    #[serde(default)]
    pub alloc_conf: Option<String>,
    #[serde(default)]
    pub compile: Option<bool>,
}

fn default_family() -> String {
    "hf-causal".into()
}

#[derive(Clone, Debug, Deserialize)]
pub struct CaseLora {
    pub r: u64,
    #[serde(default)]
    pub dropout: f64,
    pub targets: Vec<String>,
    #[serde(default = "default_adapter")]
    pub adapter_fp32: bool,
}

fn default_adapter() -> bool {
    true
}

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

impl Case {
    fn problem(&self, key: &str, value: impl ToString, wanted: &str) -> TorchError {
        TorchError::Case {
            name: self.name.clone(),
            key: key.into(),
            value: value.to_string(),
            wanted: wanted.into(),
        }
    }

    /// The run that was measured.
    pub fn workload(&self) -> Result<Workload, TorchError> {
        let accumulation = self.accum.unwrap_or(1);
        Ok(Workload {
            architecture: self.architecture()?,
            batch: self.batch,
            length: self.seq,
            attention: match self.attn.as_deref() {
                None | Some("sdpa") => Attention::Sdpa,
                Some("eager") => Attention::Eager,
                Some(other) => return Err(self.problem("attn", other, "sdpa or eager")),
            },
            checkpoints: match self.ckpt.unwrap_or(self.family == "gsa") {
                true if self.reentrant == Some(true) => Checkpointing::Reentrant,
                true => Checkpointing::NonReentrant,
                false => Checkpointing::Off,
            },
            lora: self.lora.as_ref().map(|lora| Lora {
                rank: lora.r,
                dropout: lora.dropout,
                targets: lora.targets.clone(),
                in_float32: lora.adapter_fp32,
            }),
            recipe: self.convention()?.recipe(Recipe {
                precision: self.precision()?,
                optimizer: self.optimizer()?,
                accumulation,
                clips_gradients: self.clip.is_none_or(|clip| clip != 0.0),
            }),
            memory_limit: self
                .cap_gb
                .map(|cap| (cap.max(0.0) * (1u64 << 30) as f64) as u64),
            allocator: match &self.alloc_conf {
                Some(text) => AllocatorConfig::parse(text)?,
                None => AllocatorConfig::default(),
            },
        })
    }

    fn architecture(&self) -> Result<Architecture, TorchError> {
        match self.family.as_str() {
            "hf-causal" | "hf-mlm" => {
                let name = self.model.as_deref().unwrap_or_default();
                let architecture = hugging_face::preset(name, &self.arch)?;
                let masked = matches!(architecture, Architecture::Bert(_));
                if masked != (self.family == "hf-mlm") {
                    return Err(self.problem(
                        "family",
                        &self.family,
                        "hf-mlm for BERT, hf-causal for the others",
                    ));
                }
                Ok(architecture)
            }
            "mamba" => {
                let size = self.size.as_deref().unwrap_or_default();
                match MambaConfig::named(size) {
                    Some(config) => Ok(Architecture::Mamba(config)),
                    None => Err(self.problem("size", size, "small, medium or large")),
                }
            }
            "gsa" => Ok(Architecture::Gsa(GsaConfig::default())),
            "mu" => Ok(Architecture::Mu(MuConfig::default())),
            "naics" => match self.n_negatives {
                Some(negatives) if negatives > 0 => {
                    Ok(Architecture::Naics(NaicsConfig::new(negatives)))
                }
                other => {
                    Err(self.problem("n_negatives", other.unwrap_or(0), "the number of negatives"))
                }
            },
            other => Err(self.problem(
                "family",
                other,
                "one of hf-causal, hf-mlm, mamba, gsa, mu, naics",
            )),
        }
    }

    fn convention(&self) -> Result<Convention, TorchError> {
        match self.convention.as_deref() {
            None | Some("plain") => Ok(Convention::PlainLoop),
            Some("trainer") => Ok(Convention::Trainer),
            Some(other) => Err(self.problem("loop", other, "plain or trainer")),
        }
    }

    fn precision(&self) -> Result<Precision, TorchError> {
        Ok(match self.precision.as_deref() {
            None | Some("fp32") => Precision::Float32,
            Some("amp_bf16") => Precision::AutocastBFloat16,
            Some("amp_fp16") => Precision::AutocastFloat16,
            Some("bf16") => Precision::BFloat16,
            Some("fp16") => Precision::Float16,
            Some(other) => {
                return Err(self.problem(
                    "precision",
                    other,
                    "one of fp32, amp_bf16, amp_fp16, bf16, fp16",
                ));
            }
        })
    }

    fn optimizer(&self) -> Result<Optimizer, TorchError> {
        let sgd = |momentum| Optimizer::Sgd {
            momentum,
            execution: Execution::Foreach,
        };
        Ok(match self.optimizer.as_deref() {
            None | Some("adamw" | "adam") => Optimizer::Adam(Execution::Foreach),
            Some("adamw_fused") => Optimizer::Adam(Execution::Fused),
            Some("adamw_loop") => Optimizer::Adam(Execution::Loop),
            Some("adamw_8bit") => Optimizer::Adam8Bit,
            Some("sgd") => sgd(false),
            Some("sgdm") => sgd(true),
            Some(other) => {
                let known = "one of adamw, adamw_fused, adamw_loop, adamw_8bit, adam, sgd, sgdm";
                return Err(self.problem("optimizer", other, known));
            }
        })
    }
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

/// Predicts a measured run.
pub fn judge(measurement: &Measurement, overhead: &Overhead) -> Result<Verdict, TorchError> {
    let workload = measurement.case.workload()?;
    let start = Instant::now();
    let prediction = workload.predict()?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    let device = prediction.reserved_at_end + overhead.bytes(prediction.libraries);
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

/// Predicts every measured run on the card that the fixtures come from. An error only where none of them can be predicted.
pub fn compare(measurements: &[Measurement]) -> Result<Comparison, TorchError> {
    let (mut verdicts, mut skipped) = (Vec::new(), Vec::new());
    let mut first_problem = None;
    for measurement in measurements {
        match judge(measurement, &H200) {
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
