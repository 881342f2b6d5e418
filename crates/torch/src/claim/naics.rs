//! Guide 004: an embedder of four channels, and a script that estimates its memory.

use cinch_architecture::{Architecture, Naics};
use serde::Deserialize;

use super::file::{self, Figure};
use super::{GuideClaim, Trained, activations, percent, run};
use crate::TorchError;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::context::Libraries;
use crate::eager::training::Precision;
use crate::holdings::Holdings;
use crate::model::Workload;
use crate::overhead::H200;

const LENGTH: u64 = 512;

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Asked {
    Peak(Run),
    Weights(Run),
    /// Of the optimizer.
    Moments(Run),
    Gradients(Run),
    Activations(Run),
    Batch(Run),
    /// What the process takes before any tensor.
    Context,
    /// Of the weights.
    TrainedShare(Run),
    /// What checkpointing saves of the activations.
    Checkpointing(Run),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    batch: u64,
    negatives: u64,
}

impl Run {
    fn workload(&self) -> Workload {
        self.checkpointed(Checkpointing::NonReentrant)
    }

    fn checkpointed(&self, checkpoints: Checkpointing) -> Workload {
        let architecture = Architecture::Naics(Naics::new(self.negatives));
        Workload {
            checkpoints,
            ..run(architecture, self.batch, LENGTH, Precision::AutocastFloat16)
        }
    }
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    file::answer("naics.json", include_str!("naics.json"), |asked| {
        Ok(match asked {
            Asked::Peak(run) => Figure::peak(&run.workload())?,
            Asked::Weights(run) => Figure::bytes(run.workload().weights()?.bytes),
            Asked::Moments(run) => Figure::bytes(Trained::of(&run.workload())?.moments),
            Asked::Gradients(run) => Figure::bytes(Trained::of(&run.workload())?.bytes),
            Asked::Activations(run) => Figure::bytes(activations(&run.workload())?),
            Asked::Batch(run) => Figure::bytes(Holdings::of(&run.workload())?.batch),
            Asked::Context => Figure::bytes(H200.bytes(Libraries::default())),
            Asked::TrainedShare(run) => {
                let workload = run.workload();
                let (trained, weights) = (Trained::of(&workload)?, workload.weights()?.bytes);
                let share = percent(trained.bytes, weights);
                Figure::words(format!("{share} of the weights"))
            }
            Asked::Checkpointing(run) => {
                let kept = activations(&run.checkpointed(Checkpointing::Off))?;
                let recomputed = activations(&run.checkpointed(Checkpointing::NonReentrant))?;
                let saved = percent(kept.saturating_sub(recomputed), kept);
                Figure::words(format!("saves {saved}"))
            }
        })
    })
}
