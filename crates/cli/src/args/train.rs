//! Training, and what is done with its checkpoints.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Device, ProcessorArguments, SettingArguments, threads};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GeneratePrecision {
    #[default]
    Fp32,
    Bf16,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch train                                   a small model on built-in text\n  \
    cinch train --model-size small --vram 8gb --data-dir my_code\n  \
    cinch train --resume runs/mamba-small         go on where a run ended\n\n\
    Ctrl-C saves a checkpoint of the last whole step and exits with 130; the resumed run ends\n\
    with the same bits as one that was never stopped. A second Ctrl-C ends without saving.")]
pub struct TrainArguments {
    /// A configuration file or a model's name
    #[arg(value_name = "FILE|MODEL")]
    pub subject: Option<String>,
    #[command(flatten)]
    pub settings: SettingArguments,
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// Go on from a checkpoint or a run's newest one (by default of --output-dir)
    #[arg(long, alias = "resume-from", value_name = "FOLDER")]
    pub resume: Option<Option<PathBuf>>,
    #[command(flatten)]
    pub processor: ProcessorArguments,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch export runs/qwen2 --to my-adapter\n  \
    cinch export runs/qwen2 --best --to my-model")]
pub struct ExportArguments {
    /// A run's folder or a checkpoint
    pub checkpoint: PathBuf,
    /// A folder that is not there yet
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
    /// Take the best checkpoint of the run, not the newest
    #[arg(long)]
    pub best: bool,
    /// Print what was written as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch merge runs/qwen2 --to merged\n  \
    cinch merge my-adapter --base models/Qwen2.5-0.5B --to merged")]
pub struct MergeArguments {
    /// A folder that peft or `cinch export` wrote, or a run's folder
    pub adapter: PathBuf,
    /// The model that the adapters belong to [default: the one they name]
    #[arg(long, value_name = "FOLDER")]
    pub base: Option<PathBuf>,
    /// A folder that is not there yet
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
    /// Print what was written as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch generate runs/mamba-tiny --prompt \"The weights\"\n  \
    cinch generate runs/gpt2/checkpoints/step-00001000 --max-tokens 100 --temperature 0\n  \
    cinch generate runs/gpt2 --chat\n  \
    echo \"What is a weight?\" | cinch generate runs/gpt2 --chat --quiet\n\n\
    A text that outgrows the context loses its oldest half; what is left is read again.")]
pub struct GenerateArguments {
    /// A run's folder, a checkpoint, or a folder with a model's files
    pub checkpoint: PathBuf,
    /// What the text begins with
    #[arg(long, default_value = "")]
    pub prompt: String,
    /// Talk with the model: lines are read, answers written as they come; Ctrl-C ends an answer,
    /// Ctrl-D the conversation
    #[arg(long, conflicts_with_all = ["prompt", "json"])]
    pub chat: bool,
    /// What a conversation begins with, as a message of the system
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// gpt2, bytes, or the path of a tokenizer [default: the run's or the model's own]
    #[arg(long, value_name = "NAME")]
    pub tokenizer: Option<String>,
    /// Tokens to write at the most, in each answer
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub max_tokens: usize,
    /// Tokens in sight, which the cache has room for; at most the model's positions [default: the
    /// prompt's and --max-tokens, or 4096 with --chat]
    #[arg(long, value_name = "N")]
    pub context: Option<usize>,
    /// What weights and activations are in: bf16, on a GPU, takes half the memory
    #[arg(long, value_enum, default_value = "fp32")]
    pub precision: GeneratePrecision,
    /// 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Choose among the likeliest so many; 0 for all
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub top_k: usize,
    /// Choose among the likeliest that together have this probability
    #[arg(long, value_name = "SHARE", default_value_t = 0.95)]
    pub top_p: f64,
    /// Above 1, tokens that occurred become less likely
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub repetition_penalty: f64,
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Take the best checkpoint of the run, not the newest
    #[arg(long)]
    pub best: bool,
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}
