//! Mamba as transformers has it: no positions, a convolution, and RMS norms.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Architecture;
use crate::adapter::Adapters;
use crate::describe::Describe;
use crate::error::ArchitectureError;
use crate::family::{Family, PLAIN};
use crate::fields::{Fields, LARGEST, MOST_STATES};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HuggingFaceMamba {
    pub vocabulary: u64,
    pub width: u64,
    pub layers: u64,
    /// Channels of the scan.
    pub inner: u64,
    /// States of each channel.
    pub states: u64,
    /// Timesteps that the convolution sees.
    pub kernel: u64,
    /// Rank of the projection to step sizes.
    pub rank: u64,
    /// Biases of the projections into and out of the scan.
    pub projection_bias: bool,
    pub convolution_bias: bool,
    /// Whether the stream between the layers is fp32 whatever the weights are.
    pub residual_in_float32: bool,
    pub tied: bool,
}

impl Describe for HuggingFaceMamba {
    const FAMILY: &'static Family = &MAMBA;

    fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    fn layers(&self) -> u64 {
        self.layers
    }

    fn set_layers(&mut self, layers: u64) {
        self.layers = layers;
    }

    fn scanned_states(&self) -> Option<u64> {
        Some(self.inner.saturating_mul(self.states))
    }

    fn parameters(&self) -> u64 {
        let (d, inner) = (self.width, self.inner);
        let bias = |is_there: bool, numbers: u64| if is_there { numbers } else { 0 };
        let input = d * 2 * inner + bias(self.projection_bias, 2 * inner);
        let convolution = inner * self.kernel + bias(self.convolution_bias, inner);
        let selection = inner * (self.rank + 2 * self.states);
        let step = self.rank * inner + inner;
        let decay = inner * self.states + inner;
        let output = inner * d + bias(self.projection_bias, d);
        let layer = d + input + convolution + selection + step + decay + output;
        let table = self.vocabulary * d;
        table + self.layers * layer + d + if self.tied { 0 } else { table }
    }
}

static MAMBA: Family = Family {
    name: "mamba-hf",
    title: "Mamba of transformers",
    model_types: &["mamba"],
    classes: &["MambaForCausalLM"],
    read: Some(|fields| read(fields).map(Architecture::HuggingFaceMamba)),
    // dt_proj and, in the kernels, out_proj are taken as bare weights: an adapter would do nothing,
    // and peft refuses the latter.
    adapters: Some(&Adapters {
        linear: &["in_proj", "x_proj"],
        usual: &["x_proj", "in_proj"],
    }),
    assumptions: &[
        "the kernels of mamba-ssm are not installed: transformers scans timestep by timestep in Python",
    ],
    ..PLAIN
};

fn read(fields: &Fields<'_>) -> Result<HuggingFaceMamba, ArchitectureError> {
    let width = fields.number(&["hidden_size"], 768)?;
    let expansion = fields.number(&["expand"], 2)?;
    let inner = match fields.optional(&["intermediate_size"], LARGEST)? {
        Some(inner) => inner,
        None if expansion * width <= LARGEST => expansion * width,
        None => {
            let most = format!("at most {LARGEST} / hidden_size {width}");
            return Err(fields.problem("expand", expansion, &most));
        }
    };
    let rank = match fields.0.get("time_step_rank") {
        Some(Value::String(text)) if text == "auto" => None,
        Some(Value::String(text)) => {
            return Err(fields.problem("time_step_rank", text, "a whole number or \"auto\""));
        }
        _ => fields.optional(&["time_step_rank"], LARGEST)?,
    };
    Ok(HuggingFaceMamba {
        vocabulary: fields.number(&["vocab_size"], 50_280)?,
        width,
        layers: fields.layers(&["num_hidden_layers"], 32)?,
        inner,
        states: fields.optional(&["state_size"], MOST_STATES)?.unwrap_or(16),
        kernel: fields.number(&["conv_kernel"], 4)?,
        rank: rank.unwrap_or(width.div_ceil(16)),
        projection_bias: fields.flag("use_bias", false)?,
        convolution_bias: fields.flag("use_conv_bias", true)?,
        residual_in_float32: fields.flag("residual_in_fp32", true)?,
        tied: fields.flag("tie_word_embeddings", true)?,
    })
}
