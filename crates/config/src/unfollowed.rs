//! Keys of another program's file that cinch's own engine does not follow, and what it does in
//! their place where that takes other memory.

use serde::Serialize;

use crate::config::{Config, Precision, StateFormat};
use crate::pytorch::{Sharding, TorchPrecision};

/// A key that is not followed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnfollowedKey {
    /// As the file has it.
    pub key: String,
    pub value: String,
    pub line: usize,
    /// What is done in its place, where that bears on memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instead: Option<Instead>,
}

/// What cinch's own engine does in place of what a file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Instead {
    /// It updates by AdamW alone.
    AdamW,
    /// Optimizer states that could be elsewhere are on the device.
    StatesOnDevice,
    /// So are activations.
    ActivationsOnDevice,
    /// Gradients are there all at once.
    WholeGradients,
    /// What is trained in half precision has fp32 masters.
    Masters,
}

impl Instead {
    /// In words, with the way to what was asked; none where a run does that after all.
    pub fn told(self, config: &Config) -> Option<String> {
        let batch = &config.batch;
        let (is_so, told) = match self {
            Instead::AdamW => {
                let told = match batch.states {
                    StateFormat::Weights => {
                        "it is AdamW here, with states in the type of the weights".to_owned()
                    }
                    format => format!("it is AdamW here, with {} states", format.name()),
                };
                (true, told)
            }
            Instead::StatesOnDevice => (
                !batch.offload,
                "optimizer states stay on the device here; --offload keeps them in host memory"
                    .to_owned(),
            ),
            Instead::ActivationsOnDevice => (
                batch.offload_activations == 0,
                "activations stay on the device here; --offload-activations keeps those of some \
                 blocks in host memory"
                    .to_owned(),
            ),
            Instead::WholeGradients => (
                !batch.update_in_backward,
                "gradients are there all at once here; --update-in-backward updates each weight \
                 as soon as its gradient is complete"
                    .to_owned(),
            ),
            Instead::Masters => {
                let states = match (batch.states, batch.precision) {
                    (StateFormat::Fp32, Precision::Bf16) => " --optimizer-states weights",
                    _ => "",
                };
                let told = format!(
                    "what is trained has fp32 masters here; --master-weights false{states} trains \
                     without"
                );
                (has_masters(config), told)
            }
        };
        is_so.then_some(told)
    }
}

/// Whether weights have fp32 masters here and nowhere in a PyTorch run: those that are trained
/// whole, in half precision. Who divides states keeps masters there too.
fn has_masters(config: &Config) -> bool {
    let in_half = matches!(
        config.torch.precision,
        TorchPrecision::Bf16
            | TorchPrecision::Bf16Amp
            | TorchPrecision::Fp16
            | TorchPrecision::Fp16Amp
    );
    let is_whole = matches!(config.torch.sharding, Sharding::None | Sharding::Replicated);
    let tuning = &config.tuning;
    let trains_whole = match &tuning.lora {
        Some(lora) => !lora.modules_to_save.is_empty() && !config.torch.whole_in_float32,
        None => true,
    };
    in_half
        && is_whole
        && trains_whole
        && tuning.has_masters()
        && config.batch.precision != Precision::Fp32
}
