//! What the user asked for, resolved: typed, complete and consistent.
//!
//! Everything after this crate reads a [`Config`] and never a key by name. It
//! is also what a checkpoint stores, so it reads back exactly as written.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Bytes, ConfigError};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    pub model: ModelConfig,
    pub batch: BatchConfig,
    pub training: TrainingConfig,
    pub data: DataConfig,
    pub output: OutputConfig,
}

impl Config {
    pub fn to_json(&self) -> Result<String, ConfigError> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    pub fn from_json(text: &str) -> Result<Config, ConfigError> {
        Ok(serde_json::from_str(text)?)
    }
}

/// The architectures that can be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    Mamba,
    Gpt2,
}

impl ModelKind {
    pub const ALL: [ModelKind; 2] = [ModelKind::Mamba, ModelKind::Gpt2];
    /// Their names, as `model.type` and `--model` take them.
    pub const NAMES: [&'static str; 2] = ["mamba", "gpt2"];

    pub fn name(self) -> &'static str {
        match self {
            ModelKind::Mamba => "mamba",
            ModelKind::Gpt2 => "gpt2",
        }
    }

    pub fn from_name(name: &str) -> Option<ModelKind> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum ModelConfig {
    Mamba(MambaConfig),
    Gpt2(Gpt2Config),
}

impl ModelConfig {
    pub fn kind(&self) -> ModelKind {
        match self {
            ModelConfig::Mamba(_) => ModelKind::Mamba,
            ModelConfig::Gpt2(_) => ModelKind::Gpt2,
        }
    }

    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// The name of the size whose shape this is; `None` for a shape of its own.
    pub fn size(&self) -> Option<&str> {
        match self {
            ModelConfig::Mamba(model) => model.size.as_deref(),
            ModelConfig::Gpt2(model) => model.size.as_deref(),
        }
    }

    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Mamba(model) => model.vocab_size,
            ModelConfig::Gpt2(model) => model.vocab_size,
        }
    }

    /// Positions of the position embedding: the longest sequence it can take.
    pub fn max_seq_len(&self) -> usize {
        match self {
            ModelConfig::Mamba(model) => model.max_seq_len,
            ModelConfig::Gpt2(model) => model.max_seq_len,
        }
    }

    pub fn num_blocks(&self) -> usize {
        match self {
            ModelConfig::Mamba(model) => model.n_layers,
            ModelConfig::Gpt2(model) => model.n_layers,
        }
    }

    pub fn dropout(&self) -> f64 {
        match self {
            ModelConfig::Mamba(model) => model.dropout,
            ModelConfig::Gpt2(model) => model.dropout,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MambaConfig {
    pub size: Option<String>,
    pub d_model: usize,
    pub n_layers: usize,
    /// N, the state kept per channel.
    pub d_state: usize,
    /// d_inner = expand_factor · d_model.
    pub expand_factor: usize,
    /// Width of the causal depthwise convolution; 0 means there is none.
    pub d_conv: usize,
    pub dropout: f64,
    pub max_seq_len: usize,
    pub vocab_size: usize,
    /// Timesteps between two kept states of the scan; inside a chunk the state
    /// is recomputed in backward.
    pub scan_chunk: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpt2Config {
    pub size: Option<String>,
    pub d_model: usize,
    pub n_layers: usize,
    pub n_heads: usize,
    /// One rate for embedding, attention and residual dropout.
    pub dropout: f64,
    pub max_seq_len: usize,
    pub vocab_size: usize,
    pub layer_norm_eps: f64,
}

/// How one optimizer step is cut up, and what it may cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchConfig {
    /// Sequences in one forward and backward pass (the micro batch).
    pub batch_size: usize,
    /// Passes whose gradients are added up before the optimizer steps.
    pub accumulation: usize,
    /// True when the user stated neither the micro batch nor the accumulation
    /// key by key: a planner may then split the effective batch otherwise.
    pub micro_is_free: bool,
    /// Tokens of a training sequence, at most the model's positions.
    pub seq_len: usize,
    pub precision: Precision,
    pub checkpointing: Checkpointing,
    /// Keep the optimizer's state in host memory.
    pub offload: bool,
    #[serde(default)]
    pub states: StateFormat,
    /// Update each weight as soon as its gradient is complete, so that gradients never exist
    /// all at once. Takes an effective batch in one micro batch.
    #[serde(default)]
    pub update_in_backward: bool,
    /// What the plan must stay within; `None`: whatever it takes.
    pub budget: Option<Bytes>,
    /// Rows of logits that exist at once in the loss; `None`: the planner's choice.
    pub loss_chunk: Option<usize>,
}

impl BatchConfig {
    /// Sequences per optimizer step.
    pub fn effective_batch(&self) -> usize {
        self.batch_size * self.accumulation
    }
}

/// How the optimizer's two moments are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StateFormat {
    #[default]
    #[serde(rename = "fp32")]
    Fp32,
    /// A byte a number, with one scale for every block of them.
    #[serde(rename = "8bit")]
    EightBit,
}

impl StateFormat {
    pub const NAMES: [&'static str; 2] = ["fp32", "8bit"];

    pub fn name(self) -> &'static str {
        match self {
            StateFormat::Fp32 => "fp32",
            StateFormat::EightBit => "8bit",
        }
    }
}

/// The type activations and matrix products are computed in. Master weights are fp32
/// throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    Fp32,
    Bf16,
    Fp16,
}

impl Precision {
    pub const NAMES: [&'static str; 3] = ["fp32", "bf16", "fp16"];

    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
        }
    }
}

/// Which blocks forget their activations and compute them again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Checkpointing {
    /// As many blocks as the budget asks for.
    Auto,
    None,
    Full,
    Blocks(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    Linear,
    Cosine,
    Constant,
}

impl Schedule {
    pub const NAMES: [&'static str; 3] = ["linear", "cosine", "constant"];

    pub fn name(self) -> &'static str {
        match self {
            Schedule::Linear => "linear",
            Schedule::Cosine => "cosine",
            Schedule::Constant => "constant",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingConfig {
    pub learning_rate: f64,
    /// Where the schedule ends.
    pub min_learning_rate: f64,
    pub schedule: Schedule,
    pub max_steps: u64,
    pub warmup_steps: u64,
    pub weight_decay: f64,
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_epsilon: f64,
    /// Gradients are scaled down to this norm; 0 means no clipping.
    pub max_grad_norm: f64,
    pub label_smoothing: f64,
    /// Steps between evaluations; 0 means none.
    pub eval_interval: u64,
    /// Micro batches of the validation split read per evaluation.
    pub eval_batches: usize,
    /// Steps between checkpoints; 0 means only the last.
    pub save_interval: u64,
    /// Checkpoints kept; 0 keeps all.
    pub save_total_limit: usize,
    pub logging_steps: u64,
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataConfig {
    /// A folder or a file; `None` is the text built into the program.
    pub source: Option<PathBuf>,
    /// The field that holds the text in files with fields.
    pub text_column: String,
    /// `gpt2`, `bytes`, or the path of a tokenizer.
    pub tokenizer: String,
    pub val_split: f64,
    pub cache_dir: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputConfig {
    pub output_dir: PathBuf,
}
