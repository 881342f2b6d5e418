//! Guide 000: a Mamba language model whose scan runs step by step.

use cinch_architecture::{Architecture, Describe, Mamba};
use serde::Deserialize;

use super::file::{self, Figure};
use super::{GuideClaim, Trained, activations, run, size};
use crate::TorchError;
use crate::eager::training::Precision;
use crate::model::Workload;

const HALF: Precision = Precision::AutocastFloat16;

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Asked {
    Weights(Run),
    Activations(Run),
    /// Of the optimizer.
    Moments(Run),
    /// With what the gradients are.
    Peak(Run),
    /// What half precision saves.
    Autocast(Run),
    /// What one more timestep costs, from a short run and a long one.
    Timestep {
        short: Run,
        long: Run,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    model: String,
    batch: u64,
    length: u64,
}

impl Run {
    fn workload(&self, precision: Precision) -> Result<Workload, TorchError> {
        let family = Mamba::FAMILY;
        let size = family.size(&self.model).ok_or_else(|| TorchError::Beyond {
            problem: format!("{} has no size {}", family.title, self.model),
        })?;
        Ok(run((size.shape)(), self.batch, self.length, precision))
    }
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    file::answer("mamba.json", include_str!("mamba.json"), |asked| {
        Ok(match asked {
            Asked::Weights(run) => Figure::bytes(run.workload(HALF)?.weights()?.bytes),
            Asked::Activations(run) => Figure::bytes(activations(&run.workload(HALF)?)?),
            Asked::Moments(run) => Figure::bytes(Trained::of(&run.workload(HALF)?)?.moments),
            Asked::Peak(run) => {
                let workload = run.workload(HALF)?;
                let gradients = Trained::of(&workload)?.bytes;
                Figure::peak(&workload)?.with("gradients", size(gradients as f64))
            }
            Asked::Autocast(run) => {
                let whole = run.workload(Precision::Float32)?;
                Figure::saved_share(&whole, &run.workload(HALF)?)?
            }
            Asked::Timestep { short, long } => {
                timestep(&short.workload(HALF)?, &long.workload(HALF)?)?
            }
        })
    })
}

/// For every value of the state [B, T, d_inner, N] in every layer.
fn timestep(short: &Workload, long: &Workload) -> Result<Figure, TorchError> {
    let more = activations(long)? - activations(short)?;
    let values = match &long.architecture {
        Architecture::Mamba(config) => {
            let inner = config.expansion * config.width;
            long.batch * (long.length - short.length) * inner * config.states * config.layers
        }
        _ => 1,
    };
    Ok(Figure::words(format!(
        "another timestep makes backward hold {:.1} bytes more for every value of its state [B, d_inner, N], all of the layer counted",
        more as f64 / values as f64
    )))
}
