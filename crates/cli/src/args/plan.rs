//! Plans, searches and what is checked before a run.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Device, Engine, SettingArguments, TorchQuestions, count};

/// What changes the result of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Allowed {
    /// Eight-bit optimizer states
    #[value(name = "8bit")]
    EightBit,
    /// Shorter sequences
    #[value(name = "seq-len")]
    SequenceLength,
    /// Any precision that the device has
    Precision,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch plan --model mamba --model-size large --batch-size 4 --seq-len 1024\n  \
    cinch plan --config my.json --gpu-memory 24 --json\n  \
    cinch plan --model gpt2 --precision bf16 --device cuda --graph\n  \
    cinch plan axolotl.yaml --gpu \"RTX 4090\"            what a PyTorch run of another trainer takes\n  \
    cinch plan Qwen/Qwen2.5-7B-Instruct --lora-rank 16 --gpu-memory 24\n  \
    cinch plan my_model/config.json --batch-size 4 --what-if\n  \
    cinch plan --model meta-llama/Llama-3.1-8B --world 16 --nodes 2 --gpu \"H100 SXM5\"\n  \
    cinch plan --engine pytorch --truth measured.jsonl\n  \
    cinch plan --snapshot run.pickle                    explain a recorded PyTorch run")]
pub struct PlanArguments {
    /// A configuration file, a folder, a hub id or a model's name
    #[arg(value_name = "FILE|MODEL")]
    pub subject: Option<String>,
    #[command(flatten)]
    pub settings: SettingArguments,
    /// Whose memory to plan [default: what the file is for, or what can run the model]
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,
    #[command(flatten)]
    pub questions: TorchQuestions,
    /// What to plan for
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// Print the step as a graph
    #[arg(long)]
    pub graph: bool,
    /// Print live memory over the step
    #[arg(long)]
    pub timeline: bool,
    /// Draw live memory over the step into a file: .svg or .png
    #[arg(long, value_name = "FILE")]
    pub picture: Vec<PathBuf>,
    /// A table of speed and memory from one GPU to so many, each with the same batch
    #[arg(long, value_name = "N", value_parser = count)]
    pub scaling: Option<usize>,
    /// Where each setting came from
    #[arg(long)]
    pub explain: bool,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug, Default)]
#[command(after_help = "Examples:\n  \
    cinch fit --gpu-memory 24 --model-size medium       the fastest settings for a card\n  \
    cinch fit --gpu \"A100 80GB\" --model gpt2 --target-effective-batch 256\n  \
    cinch fit --auto --config my.json --apply           write them into my.json, after a diff\n  \
    cinch fit --config my.json --undo                   and take that back\n  \
    cinch fit --auto --profile                          run real steps of what is recommended\n  \
    cinch fit --guide                                   settings of docs/guides/000-mamba.md\n  \
    cinch fit axolotl.yaml --gpu-memory 24 --apply      the same for another trainer's file\n\n\
    What flags state is kept; batch, recomputation and memory settings of a file may change.\n\
    The effective batch is kept exactly. Sequences get shorter, and states 8-bit, only where\n\
    nothing else fits (which is said) or with --allow.")]
pub struct FitArguments {
    /// A configuration file, a folder, a hub id or a model's name
    #[arg(value_name = "FILE|MODEL")]
    pub subject: Option<String>,
    #[command(flatten)]
    pub settings: SettingArguments,
    /// Whose memory to plan [default: what the file is for, or what can run the model]
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// Sequences per optimizer step, kept exactly
    #[arg(long, alias = "effective-batch", value_name = "N", value_parser = count)]
    pub target_effective_batch: Option<usize>,
    /// The best settings for each number of GPUs up to N that divides the effective batch
    #[arg(long, alias = "max-world", value_name = "N", value_parser = count)]
    pub max_ranks: Option<usize>,
    /// Choices that change the result and may be taken for speed
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    pub allow: Vec<Allowed>,
    /// Never take one of those, even where nothing else fits
    #[arg(long, conflicts_with = "allow")]
    pub strict: bool,
    /// On a GPU in fp32: let the matrix units round to tf32
    #[arg(long)]
    pub tf32: bool,
    /// Draw live memory over the step into a file: .svg or .png
    #[arg(long, value_name = "FILE")]
    pub picture: Vec<PathBuf>,
    /// Draw memory against speed into a file: .svg or .png
    #[arg(long, value_name = "FILE")]
    pub front_picture: Vec<PathBuf>,
    /// The settings in docs/guides/000-mamba.md, their plans, and what is recommended instead
    #[arg(long)]
    pub guide: bool,
    /// Show all that was found: breakdown, changes, ladder, memory against speed
    #[arg(long)]
    pub details: bool,
    /// Run real steps of the recommended settings and compare with the plan
    #[arg(long)]
    pub profile: bool,
    /// Write the recommended settings into --config or the files of --config-path
    #[arg(long)]
    pub apply: bool,
    /// With --apply: also keys that the file's program may not read
    #[arg(long, requires = "apply")]
    pub add_keys: bool,
    /// Write without asking
    #[arg(long, requires = "apply")]
    pub yes: bool,
    /// Put back what the files held before the last --apply
    #[arg(long, conflicts_with = "apply")]
    pub undo: bool,
    /// With --undo: even where a file was changed since
    #[arg(long, requires = "undo")]
    pub force: bool,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch check --config my.json --data-dir my_code\n  \
    cinch check --model-size medium --vram 16gb --json\n\n\
    Exit codes: 0 go; 1 no go; 2 wrong usage or configuration; 3 the plan does not fit.\n\
    Nothing is started or ended: programs that hold the GPU are named.")]
pub struct CheckArguments {
    /// A configuration file, a folder or a model's name
    #[arg(value_name = "FILE|MODEL")]
    pub subject: Option<String>,
    #[command(flatten)]
    pub settings: SettingArguments,
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// Show every setting, not only those about memory and those that were given
    #[arg(long)]
    pub all: bool,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}
