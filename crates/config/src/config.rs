//! What the user asked for, resolved: typed, complete and consistent.
//!
//! Everything after this crate reads a [`Config`] and never a key by name. It
//! is also what a checkpoint stores, so it reads back exactly as written.

use std::path::PathBuf;

use cinch_architecture::{Architecture, Quantization, TypeOfWeights};
use serde::{Deserialize, Serialize};

use crate::curriculum::Stage;
use crate::lossless;
use crate::pytorch::TorchConfig;
use crate::tuning::TuningConfig;
use crate::{Bytes, ConfigError};

/// What [`Config::weights`] says of weights that are made from the seed.
pub const INITIAL_WEIGHTS: &str = "initial";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    pub model: Architecture,
    /// What its name or file says of it besides the shape.
    #[serde(default)]
    pub named: NamedModel,
    pub batch: BatchConfig,
    /// Where the first weights come from: a folder, a file, or `initial`; none for the model's
    /// own files, where it was named by them.
    #[serde(default)]
    pub weights: Option<String>,
    #[serde(default)]
    pub tuning: TuningConfig,
    pub training: TrainingConfig,
    pub data: DataConfig,
    pub output: OutputConfig,
    /// What only a run in PyTorch has.
    #[serde(default)]
    pub torch: TorchConfig,
}

impl Config {
    pub fn to_json(&self) -> Result<String, ConfigError> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    pub fn from_json(text: &str) -> Result<Config, ConfigError> {
        Ok(serde_json::from_str(text)?)
    }
}

/// A model that was named by a hub id or a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NamedModel {
    /// The id or path; none for a family in one of its sizes.
    pub title: Option<String>,
    /// The type of the weights as they are saved.
    pub weights: Option<TypeOfWeights>,
    /// How the saved weights are quantised.
    pub quantization: Option<Quantization>,
    /// How the shape was found, in words.
    pub found_in: Option<String>,
    /// Where its files are, if they are here.
    #[serde(default)]
    pub folder: Option<PathBuf>,
}

impl Config {
    /// The model in words: "mamba small", "Qwen/Qwen2.5-7B".
    pub fn model_title(&self) -> String {
        let size = self.model.size().map(|size| size.name);
        match (&self.named.title, size) {
            (Some(title), _) => title.clone(),
            (None, Some(size)) if size == self.model.name() => size.to_owned(),
            (None, size) => format!("{} {}", self.model.name(), size.unwrap_or("(custom)")),
        }
    }
}

/// How one optimizer step is cut up, and what it may cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchConfig {
    /// Sequences in one forward and backward pass (the micro batch).
    pub batch_size: usize,
    /// Passes whose gradients are added up before the optimizer steps.
    pub accumulation: usize,
    /// Who else takes such passes meanwhile.
    #[serde(default)]
    pub world: WorldConfig,
    /// True when the user stated neither the micro batch nor the accumulation
    /// key by key: a planner may then split the effective batch otherwise.
    pub micro_is_free: bool,
    /// Tokens of a training sequence, at most the model's positions.
    pub seq_len: usize,
    /// Shorter lengths that rows are padded to where they fit; the longest is `seq_len`.
    #[serde(default)]
    pub buckets: Vec<usize>,
    pub precision: Precision,
    pub checkpointing: Checkpointing,
    /// Keep the optimizer's state in host memory.
    pub offload: bool,
    /// Keep the frozen matrices of blocks in host memory and fetch them block by block.
    #[serde(default)]
    pub offload_frozen: bool,
    /// Of the recomputed blocks, how many keep in host memory what takes longest to make again.
    #[serde(default)]
    pub offload_activations: usize,
    #[serde(default)]
    pub states: StateFormat,
    #[serde(default)]
    pub gradients: GradientType,
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
    /// Sequences per optimizer step, of all ranks. A state that somebody changed may have factors
    /// that no setting allows; such a batch is larger than any, not a small one.
    pub fn effective_batch(&self) -> usize {
        self.rank_batch().saturating_mul(self.world.ranks)
    }

    /// Micro batches of a step, of all ranks.
    pub fn effective_micros(&self) -> usize {
        self.accumulation.saturating_mul(self.world.ranks)
    }

    /// Those of the sequences that one rank has.
    pub fn rank_batch(&self) -> usize {
        self.batch_size.saturating_mul(self.accumulation)
    }

    /// The lengths that rows are padded to, the shortest first and `seq_len` last.
    pub fn lengths(&self) -> Vec<usize> {
        let shorter = self.buckets.iter().copied();
        let shorter = shorter.filter(|length| (1..self.seq_len).contains(length));
        let mut lengths: Vec<usize> = shorter.chain([self.seq_len]).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths
    }
}

/// The ranks that train together: one process with one device each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorldConfig {
    pub ranks: usize,
    /// Machines, each with as many of the ranks.
    pub nodes: usize,
    pub shard: ShardedPart,
    /// Between GPUs of a machine; none for what the card has.
    #[serde(default)]
    pub link: Option<String>,
    /// Between machines; none for what is usual with the card.
    #[serde(default)]
    pub network: Option<String>,
}

impl Default for WorldConfig {
    fn default() -> Self {
        Self {
            ranks: 1,
            nodes: 1,
            shard: ShardedPart::None,
            link: None,
            network: None,
        }
    }
}

impl WorldConfig {
    pub fn is_alone(&self) -> bool {
        self.ranks <= 1
    }

    /// Of one machine.
    pub fn ranks_per_node(&self) -> usize {
        self.ranks.div_ceil(self.nodes.max(1)).max(1)
    }
}

/// What each rank keeps only its part of; each cuts what the one before does.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum ShardedPart {
    /// Every rank keeps all of it.
    #[default]
    None,
    /// Optimizer states and masters: ZeRO's stage 1.
    Optimizer,
    /// And gradients: stage 2.
    Gradients,
    /// And weights: stage 3, FSDP.
    Weights,
}

impl ShardedPart {
    pub const ALL: [Self; 4] = [Self::None, Self::Optimizer, Self::Gradients, Self::Weights];

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Optimizer => "optimizer",
            Self::Gradients => "gradients",
            Self::Weights => "weights",
        }
    }

    /// As the setting has it, in the words of other programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Optimizer => "zero1",
            Self::Gradients => "zero2",
            Self::Weights => "zero3",
        }
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
    /// In the type in which the weight itself is kept.
    #[serde(rename = "weights")]
    Weights,
}

impl StateFormat {
    pub const NAMES: [&'static str; 3] = ["fp32", "8bit", "weights"];

    pub fn name(self) -> &'static str {
        match self {
            StateFormat::Fp32 => "fp32",
            StateFormat::EightBit => "8bit",
            StateFormat::Weights => "weights",
        }
    }
}

/// How the gradients of weights are kept that are trained without an fp32 master; all others are
/// fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientType {
    /// Rounded once to the weights' type where a step is one micro batch, and fp32 where several
    /// are added up.
    #[default]
    Auto,
    Fp32,
    Weights,
}

impl GradientType {
    pub const NAMES: [&'static str; 3] = ["auto", "fp32", "weights"];
}

/// The type activations and matrix products are computed in. Master weights, where there are
/// any, are fp32.
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
    /// Up by a cosine during the warm-up, down by another to next to nothing: PyTorch's
    /// `OneCycleLR`.
    OneCycle,
}

impl Schedule {
    pub const NAMES: [&'static str; 4] = ["linear", "cosine", "constant", "onecycle"];

    pub fn name(self) -> &'static str {
        match self {
            Schedule::Linear => "linear",
            Schedule::Cosine => "cosine",
            Schedule::Constant => "constant",
            Schedule::OneCycle => "onecycle",
        }
    }
}

/// A share of steps, as whole ones.
pub(crate) fn share_of(steps: u64, share: f64) -> u64 {
    (steps as f64 * share).ceil() as u64
}

impl TrainingConfig {
    /// Steps of warm-up in a run of so many.
    pub fn warmup_of(&self, steps: u64) -> u64 {
        match self.warmup_ratio {
            Some(ratio) => share_of(steps, ratio),
            None => self.warmup_steps,
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
    /// Passes over the data that the run makes, where no steps are stated.
    #[serde(default)]
    pub epochs: Option<f64>,
    pub warmup_steps: u64,
    /// The share of the run that warm-up takes, in place of steps.
    #[serde(default)]
    pub warmup_ratio: Option<f64>,
    pub weight_decay: f64,
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_epsilon: f64,
    /// Gradients are scaled down to this norm; 0 means no clipping.
    pub max_grad_norm: f64,
    pub label_smoothing: f64,
    /// Steps between evaluations; 0 means none.
    pub eval_interval: u64,
    /// Epochs between evaluations, in place of steps.
    #[serde(default)]
    pub eval_epochs: Option<f64>,
    /// Evaluations without a better one after which a run, or its stage, ends; 0 for never.
    #[serde(default)]
    pub patience: u64,
    /// Checkpoints with the lowest validation losses that are kept besides the newest; 0 keeps the
    /// newest ones instead.
    #[serde(default)]
    pub save_top: usize,
    /// Micro batches of the validation split read per evaluation.
    pub eval_batches: usize,
    /// Steps between checkpoints; 0 means only the last.
    pub save_interval: u64,
    /// Checkpoints kept; 0 keeps all.
    pub save_total_limit: usize,
    pub logging_steps: u64,
    pub seed: u64,
    /// Tokens of the text that is written after each pass over the data; 0 means none.
    #[serde(default)]
    pub sample_tokens: usize,
    /// What that text begins with.
    #[serde(default)]
    pub sample_prompt: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataConfig {
    /// A folder or a file; `None` is the text built into the program.
    #[serde(with = "lossless::optional", default)]
    pub source: Option<PathBuf>,
    /// The field that holds the text in files with fields.
    pub text_column: String,
    /// `gpt2`, `bytes`, `train`, or the path of a tokenizer.
    pub tokenizer: String,
    pub val_split: f64,
    /// Whether several samples share a row, none of which sees another.
    #[serde(default)]
    pub packing: bool,
    /// Of samples that are longer than a row.
    #[serde(default)]
    pub too_long: TooLong,
    /// Whether rows are padded to one length or to several.
    #[serde(default)]
    pub buckets: BucketChoice,
    /// Samples that are read at most.
    #[serde(default)]
    pub max_samples: Option<usize>,
    /// Positives of each anchor that pairs are made of at most, of texts in a taxonomy.
    #[serde(default = "usual_positives")]
    pub positives: usize,
    /// Stages that follow each other, each with its pairs; none is one stage of all pairs.
    #[serde(default)]
    pub curriculum: Vec<Stage>,
    /// The epoch of a stage from which negatives in the anchor's cluster are left out; 0 for never.
    #[serde(default)]
    pub cluster_epoch: u64,
    /// Clusters of embeddings; none for as many as the taxonomy has groups of leaves.
    #[serde(default)]
    pub clusters: Option<usize>,
    /// Whether prompts are learned too, not only what follows them.
    #[serde(default)]
    pub train_on_inputs: bool,
    #[serde(with = "lossless::optional", default)]
    pub cache_dir: Option<PathBuf>,
}

/// Positives of an anchor in the first stage of the published curriculum.
pub(crate) const USUAL_POSITIVES: &str = "32";

fn usual_positives() -> usize {
    USUAL_POSITIVES.parse().unwrap_or(1)
}

/// To how many lengths rows are padded. The lengths themselves are in [`BatchConfig::buckets`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BucketChoice {
    /// To those that the lengths of the samples suggest, where that saves enough.
    #[default]
    Auto,
    /// To one.
    Off,
    /// To those that were stated.
    Stated,
}

/// What becomes of a sample that is longer than a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TooLong {
    /// Its beginning is kept.
    #[default]
    Truncate,
    /// It is left out.
    Drop,
    /// It ends the run before it starts.
    Error,
}

impl TooLong {
    pub const NAMES: [&'static str; 3] = ["truncate", "drop", "error"];
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputConfig {
    #[serde(with = "lossless")]
    pub output_dir: PathBuf,
}
