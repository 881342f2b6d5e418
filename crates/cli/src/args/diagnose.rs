//! The flags of `cinch diagnose`.

use std::path::PathBuf;

use clap::Args;

use super::{Engine, SettingArguments};

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch diagnose train.log --config axolotl.yaml   with savings computed for that run\n  \
    python train.py 2>&1 | cinch diagnose            read what is printed\n  \
    cinch diagnose train.log --model Qwen/Qwen2.5-7B --lora-rank 128 --batch-size 2 --seq-len 2048\n  \
    cinch diagnose train.log --follow                a log that grows, until Ctrl-C\n\n\
    Settings that the log tells (of transformers, axolotl, LLaMA-Factory, Lightning) are used where\n\
    neither flags nor --config say otherwise.\n\
    Exit codes: 0 nothing found, 4 out of memory, 2 wrong usage.")]
pub struct DiagnoseArguments {
    /// A log or an error message; - or nothing for standard input
    #[arg(value_name = "FILE|-")]
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub settings: SettingArguments,
    /// Whose run it is [default: what the message is of]
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,
    /// Go on reading while the file grows, and tell each failure when it comes
    #[arg(long)]
    pub follow: bool,
    #[arg(long)]
    pub json: bool,
}
