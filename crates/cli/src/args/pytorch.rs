//! The flags about PyTorch: what its run is like, and what is to be told of it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Whose memory is planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// cinch's own engine
    #[default]
    Cinch,
    /// An eager PyTorch run, predicted without PyTorch
    Pytorch,
}

/// A run in PyTorch, as far as the settings of a configuration file do not say it.
#[derive(Args, Clone, Debug, Default)]
pub struct TorchArguments {
    /// Types of weights and computation [default: autocast in the --precision]
    #[arg(
        long,
        value_enum,
        value_name = "TYPE",
        help_heading = "PyTorch (--engine pytorch)"
    )]
    pub torch_precision: Option<TorchPrecision>,
    /// How attention is computed [default: sdpa]
    #[arg(
        long,
        value_enum,
        value_name = "KIND",
        help_heading = "PyTorch (--engine pytorch)"
    )]
    pub attention: Option<TorchAttention>,
    /// [default: adamw]
    #[arg(
        long,
        value_enum,
        value_name = "NAME",
        help_heading = "PyTorch (--engine pytorch)"
    )]
    pub optimizer: Option<TorchOptimizer>,
    /// Train adapters of this rank on all linear layers, as peft does it
    #[arg(long, value_name = "N", help_heading = "PyTorch (--engine pytorch)")]
    pub lora_rank: Option<u64>,
    /// Settings of the allocator, as in PYTORCH_ALLOC_CONF [default: that variable]
    #[arg(long, value_name = "TEXT", help_heading = "PyTorch (--engine pytorch)")]
    pub alloc_conf: Option<String>,
    /// Whose training loop runs [default: plain]
    #[arg(
        long = "loop",
        value_enum,
        value_name = "KIND",
        help_heading = "PyTorch (--engine pytorch)"
    )]
    pub training_loop: Option<TorchLoop>,
    /// Sizes of each rank under DeepSpeed's ZeRO: stage 1, 2 or 3
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u8).range(1..=3), requires = "ranks", conflicts_with = "fsdp", help_heading = "PyTorch (--engine pytorch)")]
    pub zero: Option<u8>,
    /// Sizes of each rank under FSDP, fully sharded
    #[arg(long, requires = "ranks", help_heading = "PyTorch (--engine pytorch)")]
    pub fsdp: bool,
    /// GPUs that share the states
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20), help_heading = "PyTorch (--engine pytorch)")]
    pub ranks: Option<u64>,
    /// Of the model naics: negatives for each anchor [default: 24]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 16), help_heading = "PyTorch (--engine pytorch)")]
    pub negatives: Option<u64>,
}

impl TorchArguments {
    /// The flags that were given, by name.
    pub fn given(&self) -> Vec<&'static str> {
        let flags = [
            ("--torch-precision", self.torch_precision.is_some()),
            ("--attention", self.attention.is_some()),
            ("--optimizer", self.optimizer.is_some()),
            ("--lora-rank", self.lora_rank.is_some()),
            ("--alloc-conf", self.alloc_conf.is_some()),
            ("--loop", self.training_loop.is_some()),
            ("--zero", self.zero.is_some()),
            ("--fsdp", self.fsdp),
            ("--ranks", self.ranks.is_some()),
            ("--negatives", self.negatives.is_some()),
        ];
        given(&flags)
    }
}

/// What `cinch plan` can tell of PyTorch besides the plan of one run.
#[derive(Args, Clone, Debug, Default)]
pub struct TorchQuestions {
    /// What each remedy of the guides would do to this run, in bytes
    #[arg(long, help_heading = "PyTorch (--engine pytorch)")]
    pub what_if: bool,
    /// Predict measured runs, a JSON line each, and compare
    #[arg(long, value_name = "FILE", conflicts_with_all = ["guides", "snapshot"], help_heading = "PyTorch (--engine pytorch)")]
    pub truth: Option<PathBuf>,
    /// What the guides say beside what is computed
    #[arg(
        long,
        conflicts_with = "snapshot",
        help_heading = "PyTorch (--engine pytorch)"
    )]
    pub guides: bool,
    /// Explain a recorded run (see `cinch trace --script`)
    #[arg(long, value_name = "FILE", help_heading = "PyTorch (--engine pytorch)")]
    pub snapshot: Option<PathBuf>,
}

impl TorchQuestions {
    /// The flags that were given and need the engine to be named.
    pub fn given(&self) -> Vec<&'static str> {
        given(&[
            ("--what-if", self.what_if),
            ("--truth", self.truth.is_some()),
            ("--guides", self.guides),
        ])
    }
}

/// The names of those that are set.
pub fn given(flags: &[(&'static str, bool)]) -> Vec<&'static str> {
    let given = flags.iter().filter(|(_, is_given)| *is_given);
    given.map(|(name, _)| *name).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TorchPrecision {
    Fp32,
    /// fp32 weights under autocast
    #[value(name = "amp_bf16")]
    AmpBf16,
    /// fp32 weights under autocast, with a gradient scaler
    #[value(name = "amp_fp16")]
    AmpFp16,
    /// Weights in bf16
    Bf16,
    /// Weights in fp16
    Fp16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TorchAttention {
    /// torch's scaled_dot_product_attention
    Sdpa,
    /// Matrix products and a softmax
    Eager,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TorchOptimizer {
    /// All weights at once, torch's default
    Adamw,
    /// One kernel
    #[value(name = "adamw_fused")]
    AdamwFused,
    /// Weight by weight
    #[value(name = "adamw_loop")]
    AdamwLoop,
    /// bitsandbytes' with states of eight bits
    #[value(name = "adamw_8bit", alias = "adamw8bit")]
    Adamw8bit,
    Adam,
    Sgd,
    /// SGD with momentum
    Sgdm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TorchLoop {
    /// forward, backward, clip, step, in the user's own code
    Plain,
    /// Hugging Face's Trainer
    Trainer,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch trace --script > cinch_recorder.py      a recorder for your own training script\n  \
    cinch plan --snapshot run.pickle              what the recorded run used its memory for\n  \
    cinch trace run.pickle --alloc-conf expandable_segments:True --alloc-conf max_split_size_mb:128")]
pub struct TraceArguments {
    /// A recorded run: a pickle of torch.cuda.memory._dump_snapshot, or the recorder's JSON lines
    #[arg(required_unless_present = "script", conflicts_with = "script")]
    pub file: Option<PathBuf>,
    /// Print the Python module that records a run
    #[arg(long)]
    pub script: bool,
    /// Replay under these settings of the allocator too; may be given several times
    #[arg(long, value_name = "TEXT", conflicts_with = "script")]
    pub alloc_conf: Vec<String>,
    #[arg(long, conflicts_with = "script")]
    pub json: bool,
}
