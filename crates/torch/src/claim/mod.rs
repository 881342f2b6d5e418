//! What five memory guides say about PyTorch, beside what is computed for the same runs.
//!
//! Every computed figure comes from replaying the run that the guide speaks of; only the guides' own numbers are
//! written down here. Guides do not say whether their GB are 10⁹ or 2³⁰ bytes: they are read as 10⁹, and a tenth either
//! way counts as right.

mod gsa;
mod mamba;
mod mu;
mod naics;
mod qwen;

use cinch_architecture::Architecture;

use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::{Precision, Recipe};
use crate::holdings::Holdings;
use crate::model::Workload;
use crate::model::mask::Attention;
use crate::overhead::H200;

/// A statement of a guide, and what holds.
#[derive(Clone, Debug)]
pub struct GuideClaim {
    /// The guide's number, `000` to `004`.
    pub guide: &'static str,
    /// What is claimed about, in a few words.
    pub quote: String,
    pub claimed: String,
    /// The figure that the claim is held against, where it is one.
    pub computed_bytes: Option<u64>,
    pub computed: String,
    pub verdict: String,
}

/// The claims of all five guides, in their order.
pub fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    let guides = [
        mamba::claims,
        gsa::claims,
        qwen::claims,
        mu::claims,
        naics::claims,
    ];
    let mut all = Vec::new();
    for guide in guides {
        all.extend(guide()?);
    }
    Ok(all)
}

/// How far from the claimed range a figure may be and still agree with it.
const TOLERANCE: f64 = 0.1;

/// A claimed range of sizes, in GB.
#[derive(Clone, Copy)]
struct Gigabytes(f64, f64);

impl Gigabytes {
    fn text(self) -> String {
        if self.0 == self.1 {
            size(self.0 * 1e9)
        } else {
            format!("{} to {}", size(self.0 * 1e9), size(self.1 * 1e9))
        }
    }

    fn verdict(self, bytes: u64) -> String {
        let gigabytes = bytes as f64 / 1e9;
        if bytes == 0 {
            "wrong, it is nothing".into()
        } else if gigabytes > self.1 * (1.0 + TOLERANCE) {
            format!("{:.1} times too low", gigabytes / self.1)
        } else if gigabytes < self.0 * (1.0 - TOLERANCE) {
            format!("{:.1} times too high", self.0 / gigabytes)
        } else {
            "right".into()
        }
    }
}

fn size(bytes: f64) -> String {
    if bytes.abs() < 1e9 {
        format!("{:.0} MB", bytes / 1e6)
    } else {
        format!("{:.2} GB", bytes / 1e9)
    }
}

/// A share of a whole, for a sentence.
fn percent(part: u64, whole: u64) -> String {
    format!("{:.0} %", 100.0 * part as f64 / whole as f64)
}

/// Builds the claims of one guide.
struct Guide(&'static str);

impl Guide {
    /// A size, with the reason for the difference.
    fn bytes(&self, quote: &str, claimed: Gigabytes, computed: u64, reason: &str) -> GuideClaim {
        GuideClaim {
            guide: self.0,
            quote: quote.into(),
            claimed: claimed.text(),
            computed_bytes: Some(computed),
            computed: size(computed as f64),
            verdict: with_reason(claimed.verdict(computed), reason),
        }
    }

    /// What a whole run takes: held against the tensors' peak, which is the least that the guide can have meant.
    fn run(
        &self,
        quote: &str,
        claimed: Gigabytes,
        workload: &Workload,
        reason: &str,
    ) -> Result<GuideClaim, TorchError> {
        let prediction = workload.predict()?;
        let computed = format!(
            "{} in tensors, {} reserved, {} of the card",
            size(prediction.peak_allocated as f64),
            size(prediction.peak_reserved as f64),
            size(H200.device_bytes(&prediction) as f64)
        );
        Ok(GuideClaim {
            computed,
            ..self.bytes(quote, claimed, prediction.peak_allocated, reason)
        })
    }

    /// A statement that is no single size.
    fn statement(&self, quote: &str, claimed: &str, computed: String, verdict: &str) -> GuideClaim {
        GuideClaim {
            guide: self.0,
            quote: quote.into(),
            claimed: claimed.into(),
            computed_bytes: None,
            computed,
            verdict: verdict.into(),
        }
    }

    /// What going from one run to another saves, in the tensors' peak.
    fn saving(
        &self,
        quote: &str,
        claimed: Gigabytes,
        before: &Workload,
        after: &Workload,
        reason: &str,
    ) -> Result<GuideClaim, TorchError> {
        let (before, after) = (before.predict()?, after.predict()?);
        let saved = before.peak_allocated.saturating_sub(after.peak_allocated);
        let computed = format!(
            "{} of {} in tensors ({}); {} on the card",
            size(saved as f64),
            size(before.peak_allocated as f64),
            percent(saved, before.peak_allocated),
            size(before.peak_reserved as f64 - after.peak_reserved as f64)
        );
        Ok(GuideClaim {
            computed,
            ..self.bytes(quote, claimed, saved, reason)
        })
    }
}

fn with_reason(verdict: String, reason: &str) -> String {
    if reason.is_empty() {
        verdict
    } else {
        format!("{verdict}: {reason}")
    }
}

/// A run with AdamW and clipping, as all five systems train.
fn run(architecture: Architecture, batch: u64, length: u64, precision: Precision) -> Workload {
    Workload {
        architecture,
        batch,
        length,
        attention: Attention::Sdpa,
        checkpoints: Checkpointing::Off,
        lora: None,
        recipe: Recipe {
            precision,
            optimizer: Optimizer::Adam(Execution::Foreach),
            accumulation: 1,
            clips_gradients: true,
        },
        allocator: AllocatorConfig::default(),
        memory_limit: None,
    }
}

/// Gradients of everything that is trained, and the moments of Adam once all of it has had a gradient.
struct Trained {
    values: u64,
    bytes: u64,
    moments: u64,
}

impl Trained {
    fn of(workload: &Workload) -> Result<Trained, TorchError> {
        let trainable = workload.weights()?.trainable;
        let bytes = trainable.iter().map(|(n, dtype)| n * dtype.size()).sum();
        Ok(Trained {
            values: trainable.iter().map(|(n, _)| n).sum(),
            bytes,
            moments: 2 * bytes,
        })
    }
}

fn activations(workload: &Workload) -> Result<u64, TorchError> {
    Ok(Holdings::of(workload)?.activations)
}
