//! The arguments of `cinch embed` and `cinch eval`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Device, threads};

/// How embeddings are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EmbeddingFormat {
    Npy,
    Safetensors,
    Jsonl,
}

/// Which weights, and on what they run.
#[derive(Args, Clone, Debug)]
pub struct EmbedderArguments {
    /// Take the best checkpoint of the run, not the newest
    #[arg(long)]
    pub best: bool,
    /// Take the weights that the run began with
    #[arg(long, conflicts_with = "best")]
    pub initial: bool,
    /// Texts at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
    pub batch_size: u64,
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch embed runs/embedder codes.jsonl --output codes.npy\n  \
    echo \"soy bean farming\" | cinch embed runs/embedder -\n  \
    cinch embed models/all-MiniLM-L6-v2 sentences.txt --output sentences.safetensors\n\n\
    A .jsonl file has title, description, excluded and examples in each line, or text; of other\n\
    files each line is a text, which stands for title and description. A run gives points of\n\
    hyperbolic space, time first. A folder with a BERT model gives what its modules.json says:\n\
    the average of a text's tokens or the first one; without that file, averages at length 1.")]
pub struct EmbedArguments {
    /// A run's folder, a checkpoint, a folder with a BERT model's files, or its downloaded hub id
    pub subject: PathBuf,
    /// The texts, - for standard input
    pub texts: PathBuf,
    /// Where to write; without it, JSON lines on standard output
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// [default: by the file's ending]
    #[arg(long, value_enum)]
    pub format: Option<EmbeddingFormat>,
    #[command(flatten)]
    pub embedder: EmbedderArguments,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch eval runs/embedder\n  \
    cinch eval runs/embedder --initial\n  \
    cinch eval runs/embedder --best --k 1,10,50 --json\n\n\
    Each held-out pair is an anchor whose positive is looked for among all codes but the\n\
    anchor's other positives.")]
pub struct EvalArguments {
    /// A run's folder or a checkpoint
    pub subject: PathBuf,
    /// The taxonomy [default: the run's own]
    #[arg(long, value_name = "FILE")]
    pub data_dir: Option<PathBuf>,
    /// Recall among the first so many
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,5,10"
    )]
    pub k: Vec<NonZeroUsize>,
    #[command(flatten)]
    pub embedder: EmbedderArguments,
    #[arg(long)]
    pub json: bool,
}
