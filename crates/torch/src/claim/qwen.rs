//! Guide 002: Qwen2.5-7B with adapters of rank 128.

use cinch_architecture::configured;
use cinch_config::remedy::RemedyKind;
use serde::Deserialize;
use serde_json::Map;

use super::file::{self, Figure};
use super::{GuideClaim, Trained, activations, run, size};
use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::change;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::training::Precision;
use crate::model::Workload;

const RANK: u64 = 128;

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Asked {
    /// How many parameters are trained.
    TrainedValues(Run),
    /// Bytes of what is trained, and of its gradients.
    Trained(Run),
    /// Bytes of what is not.
    Base(Run),
    /// Of the optimizer.
    Moments(Run),
    Activations(Run),
    Peak(Run),
    Saving {
        before: Run,
        after: Run,
    },
    /// What checkpointing saves.
    Checkpointing(Run),
    /// Two settings of the allocator together, beside the one of them that helps.
    Allocator {
        run: Run,
        unsplit: String,
        expandable: String,
    },
    /// How much less is trained.
    TrainedDifference {
        before: Run,
        after: Run,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    batch: u64,
    length: u64,
}

impl Run {
    /// The base in half precision, adapters in fp32 on every linear layer, checkpointed.
    fn workload(&self) -> Result<Workload, TorchError> {
        let architecture = configured("qwen2.5-7b", &Map::new())?.architecture;
        let base = run(architecture, self.batch, self.length, Precision::BFloat16);
        let mut tuned = change::apply(RemedyKind::Adapters, &base).unwrap_or(base);
        tuned.checkpoints = Checkpointing::NonReentrant;
        if let Some(lora) = &mut tuned.lora {
            lora.rank = RANK;
            lora.dropout = 0.05;
        }
        Ok(tuned)
    }

    fn trained(&self) -> Result<Trained, TorchError> {
        Trained::of(&self.workload()?)
    }
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    file::answer("qwen.json", include_str!("qwen.json"), |asked| {
        Ok(match asked {
            Asked::TrainedValues(run) => {
                Figure::words(format!("{} M", run.trained()?.values / 1_000_000))
            }
            Asked::Trained(run) => Figure::bytes(run.trained()?.bytes),
            Asked::Base(run) => {
                let workload = run.workload()?;
                Figure::bytes(workload.weights()?.bytes - Trained::of(&workload)?.bytes)
            }
            Asked::Moments(run) => Figure::bytes(run.trained()?.moments),
            Asked::Activations(run) => Figure::bytes(activations(&run.workload()?)?),
            Asked::Peak(run) => Figure::peak(&run.workload()?)?,
            Asked::Saving { before, after } => {
                Figure::saving(&before.workload()?, &after.workload()?)?
            }
            Asked::Checkpointing(run) => {
                let after = run.workload()?;
                let whole = Workload {
                    checkpoints: Checkpointing::Off,
                    ..after.clone()
                };
                Figure::saving(&whole, &after)?
            }
            Asked::Allocator {
                run,
                unsplit,
                expandable,
            } => allocator(&run.workload()?, &unsplit, &expandable)?,
            Asked::TrainedDifference { before, after } => {
                Figure::bytes(before.trained()?.bytes - after.trained()?.bytes)
            }
        })
    })
}

fn allocator(run: &Workload, unsplit: &str, expandable: &str) -> Result<Figure, TorchError> {
    let reserved = |settings: &str| {
        let workload = Workload {
            allocator: AllocatorConfig::parse(settings)?,
            ..run.clone()
        };
        Ok::<_, TorchError>(workload.predict()?.peak_reserved)
    };
    let (plain, alone) = (reserved("")?, reserved(expandable)?);
    let both = reserved(&format!("{unsplit},{expandable}"))?;
    let words = format!(
        "reserved: {} by default, {} with both, {} with expandable segments alone",
        size(plain as f64),
        size(both as f64),
        size(alone as f64)
    );
    Ok(Figure::words(words).holding(both < plain))
}
