//! What five memory guides say about PyTorch, beside what is computed for the same runs.
//!
//! What a guide says is data, in the file beside the module that computes the figures; every computed figure comes from
//! replaying the run that the guide speaks of. Guides do not say whether their GB are 10⁹ or 2³⁰ bytes: they are read as
//! 10⁹, and a tenth either way counts as right.

mod file;
mod gsa;
mod mamba;
mod mu;
mod naics;
mod qwen;

use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::chip::Chip;
use crate::convention::Convention;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::{Precision, Recipe};
use crate::holdings::Holdings;
use crate::model::Workload;
use crate::model::frozen::Frozen;
use crate::model::liger::Liger;
use crate::model::mask::Attention;
use cinch_architecture::Architecture;

/// A statement of a guide, and what holds.
#[derive(Clone, Debug)]
pub struct GuideClaim {
    /// The guide's number, `000` to `004`.
    pub guide: String,
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

/// A run with AdamW and clipping, as all five systems train.
fn run(architecture: Architecture, batch: u64, length: u64, precision: Precision) -> Workload {
    Workload {
        architecture,
        batch,
        length,
        attention: Attention::Sdpa,
        checkpoints: Checkpointing::Off,
        liger: Liger::default(),
        lora: None,
        frozen: Frozen::InTheirType,
        prepared: false,
        recipe: Recipe {
            precision,
            optimizer: Optimizer::Adam(Execution::Foreach),
            accumulation: 1,
            clips_gradients: true,
            convention: Convention::PlainLoop,
        },
        allocator: AllocatorConfig::default(),
        chip: Chip::H200,
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
        let weights = workload.weights()?;
        let trainable = weights.trainable.iter();
        let bytes = trainable.map(|(n, dtype)| n * dtype.size()).sum();
        Ok(Trained {
            values: weights.num_trainable(),
            bytes,
            moments: 2 * bytes,
        })
    }
}

fn activations(workload: &Workload) -> Result<u64, TorchError> {
    Ok(Holdings::of(workload)?.activations)
}
