//! The flags of `cinch rehearse`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  \
    cinch rehearse --gpu \"RTX 4090\" -- python train.py --batch-size 8\n  \
    cinch rehearse --gpu H100 --until-step 3 --report r.json -- python train.py\n  \
    cinch rehearse --gpu A100 --world 8 -- python train_fsdp.py\n  \
    cinch rehearse --gpu L4 --fit batch_size=--batch-size -- python train.py --batch-size 4\n  \
    cinch rehearse --gpu L4 --fit batch_size=c.yaml:train.batch_size -- python train.py c.yaml\n  \
    cinch rehearse --script > cinch_rehearse.py      to rehearse from within the script\n\n\
    The script runs as it is, with its own PyTorch; nothing is computed on a card. Files that it\n\
    writes, it writes. Its output and its exit code pass through.")]
pub struct RehearseArguments {
    /// The card to rehearse on (see `cinch gpus`)
    #[arg(
        long,
        value_name = "NAME",
        required_unless_present = "script",
        default_value = "",
        hide_default_value = true
    )]
    pub gpu: String,
    /// Print a Python module that rehearses a script from within: a callback for transformers' Trainer, and a context
    #[arg(long, conflicts_with = "command")]
    pub script: bool,
    /// Write the answer as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// End the script after this many optimizer steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub until_step: Option<u32>,
    /// End a script that runs longer than this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub timeout: Option<u32>,
    /// Run as one rank of this many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub world: Option<u32>,
    /// Which rank of them
    #[arg(long, value_name = "R", requires = "world", default_value_t = 0)]
    pub rank: u32,
    /// Tensors at the peak by line, and what other allocator settings would do
    #[arg(long)]
    pub explain: bool,
    /// The timeline of the run's memory
    #[arg(long)]
    pub timeline: bool,
    /// Keep the recording, for `cinch plan --snapshot` and `cinch trace`
    #[arg(long, value_name = "FILE")]
    pub recording: Option<PathBuf>,
    /// Find the largest batch that fits: batch_size=FLAG or batch_size=FILE:KEY, with the flag of the script or the key
    /// of a file that its command names; with accumulation=FLAG|FILE:KEY after a comma the effective batch is kept
    #[arg(long, value_name = "batch_size=FLAG|FILE:KEY", conflicts_with_all = ["explain", "timeline", "recording"])]
    pub fit: Option<String>,
    /// The command, after `--`
    #[arg(
        last = true,
        required_unless_present = "script",
        value_name = "COMMAND"
    )]
    pub command: Vec<OsString>,
}

/// What a rehearsed process says when it starts another to ask cuDNN.
#[derive(Args, Clone, Debug)]
pub struct AskCudnnArguments {
    /// The user's libcudnn
    pub library: PathBuf,
}
