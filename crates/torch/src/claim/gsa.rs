//! Guide 001: a language model with gated sparse attention.

use cinch_architecture::{Architecture, Gsa};
use serde::Deserialize;

use super::file::{self, Figure};
use super::{GuideClaim, Trained, activations, run, size};
use crate::TorchError;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::training::Precision;
use crate::model::Workload;

const HALF: Precision = Precision::AutocastBFloat16;

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Asked {
    /// With the number of parameters.
    Weights(Run),
    /// Of the optimizer.
    Moments(Run),
    Activations(Run),
    Peak(Run),
    /// fp16 with a gradient scaler, beside bf16.
    ScaledHalf(Run),
    /// What attending to fewer keys saves.
    FewerKeys {
        run: Run,
        keys: u64,
    },
    /// A claimed size as a share of a card.
    ShareOfCard {
        gigabytes: (f64, f64),
        card_gigabytes: f64,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    batch: u64,
    length: u64,
}

impl Run {
    fn workload(&self) -> Workload {
        self.with(Gsa::default(), HALF)
    }

    fn with(&self, config: Gsa, precision: Precision) -> Workload {
        let architecture = Architecture::Gsa(config);
        Workload {
            checkpoints: Checkpointing::NonReentrant,
            ..run(architecture, self.batch, self.length, precision)
        }
    }
}

pub(super) fn claims() -> Result<Vec<GuideClaim>, TorchError> {
    file::answer("gsa.json", include_str!("gsa.json"), |asked| {
        Ok(match asked {
            Asked::Weights(run) => {
                let workload = run.workload();
                let millions = Trained::of(&workload)?.values / 1_000_000;
                Figure::bytes(workload.weights()?.bytes).with("parameters", millions)
            }
            Asked::Moments(run) => Figure::bytes(Trained::of(&run.workload())?.moments),
            Asked::Activations(run) => Figure::bytes(activations(&run.workload())?),
            Asked::Peak(run) => Figure::peak(&run.workload())?,
            Asked::ScaledHalf(run) => {
                let scaled = run.with(Gsa::default(), Precision::AutocastFloat16);
                let (fp16, bf16) = (scaled.predict()?, run.workload().predict()?);
                Figure::words(format!(
                    "{} against {} in tensors",
                    size(fp16.peak_allocated as f64),
                    size(bf16.peak_allocated as f64)
                ))
            }
            Asked::FewerKeys { run, keys } => {
                let config = Gsa {
                    most_keys: keys,
                    ..Gsa::default()
                };
                Figure::saved_share(&run.workload(), &run.with(config, HALF))?
            }
            Asked::ShareOfCard {
                gigabytes: (low, high),
                card_gigabytes,
            } => Figure::words(format!(
                "{:.0} to {:.0} %",
                100.0 * low / card_gigabytes,
                100.0 * high / card_gigabytes
            )),
        })
    })
}
