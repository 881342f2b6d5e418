//! What is trained: all weights, or adapters on frozen ones.

use serde::{Deserialize, Serialize};

use crate::pytorch::FrozenWeights;

/// Which weights are trained, and how the others are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TuningConfig {
    /// Adapters; none where all weights are trained.
    pub lora: Option<LoraConfig>,
    pub frozen: FrozenWeights,
    pub double_quantization: bool,
    /// Trained weights are kept in the type of the computation alone, without fp32 masters.
    #[serde(default)]
    pub without_masters: bool,
}

impl TuningConfig {
    /// Whether what is trained has masters in fp32.
    pub fn has_masters(&self) -> bool {
        let adapters = self.lora.as_ref().is_none_or(|lora| lora.in_float32);
        adapters && !self.without_masters
    }
}

/// Adapters on linear layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    pub rank: u64,
    /// What an adapter adds is multiplied by this over the rank, or over its root.
    pub alpha: f64,
    pub rank_stabilised: bool,
    pub dropout: f64,
    pub targets: LoraTargets,
    /// Ends of the names of modules that are trained whole and kept with the adapters.
    #[serde(default)]
    pub modules_to_save: Vec<String>,
    /// The folder of adapters to begin with; none for new ones.
    #[serde(default)]
    pub from: Option<String>,
    /// In fp32, as peft makes them; else in the type of the weights.
    pub in_float32: bool,
}

impl LoraConfig {
    /// The factor of what an adapter adds.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha
            / if self.rank_stabilised {
                rank.sqrt()
            } else {
                rank
            }
    }
}

/// Which layers get adapters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LoraTargets {
    /// Every linear layer of the blocks.
    AllLinear,
    /// Ends of modules' names.
    Names(Vec<String>),
    /// A regular expression that a module's whole name matches.
    Pattern(String),
}

impl LoraTargets {
    /// `all-linear`, names with commas between them, or a regular expression.
    pub(crate) fn parse(text: &str) -> LoraTargets {
        let is_pattern = |c: char| "*+?|()[]^$\\".contains(c);
        if text.contains(is_pattern) {
            return LoraTargets::Pattern(text.trim().to_owned());
        }
        let names = names(text);
        match names.as_slice() {
            [] => LoraTargets::AllLinear,
            [one] if is_all_linear(one) => LoraTargets::AllLinear,
            _ => LoraTargets::Names(names),
        }
    }
}

/// Names with commas or spaces between them.
pub(crate) fn names(text: &str) -> Vec<String> {
    text.split([',', ' '])
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Case is no matter, as in peft.
fn is_all_linear(name: &str) -> bool {
    let names = ["all", "all-linear", "all_linear"];
    names.iter().any(|all| name.eq_ignore_ascii_case(all))
}
