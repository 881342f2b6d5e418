//! What is known, and what describes cinch itself.

use std::path::PathBuf;

use clap::Args;

use super::SettingArguments;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch gpus                                    all cards, and those of this machine\n  \
    cinch gpus \"a100 80\"                          one card, by any of its names\n  \
    cinch gpus --json")]
pub struct GpusArguments {
    /// Only this card
    pub name: Option<String>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct ModelsArguments {
    /// Also those that are known by name only
    #[arg(long)]
    pub all: bool,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct ListArguments {
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch init                                    cinch.yaml for what this machine has\n  \
    cinch init mamba --model-size medium --gpu \"RTX 4090\"\n  \
    cinch init Qwen/Qwen2.5-0.5B --gpu-memory 24 --output qwen.toml\n\n\
    The file's ending says how it is written: .yaml, .json or .toml. A file that is there is\n\
    left alone. `cinch plan FILE` and `cinch train FILE` read it.")]
pub struct InitArguments {
    /// A model's name, a hub id or a config.json
    #[arg(value_name = "MODEL")]
    pub subject: Option<String>,
    #[command(flatten)]
    pub settings: SettingArguments,
    /// The file to write
    #[arg(long, short, value_name = "FILE", default_value = "cinch.yaml")]
    pub output: PathBuf,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch completions bash > ~/.local/share/bash-completion/completions/cinch\n  \
    cinch completions zsh > ~/.zfunc/_cinch\n  \
    cinch completions fish > ~/.config/fish/completions/cinch.fish")]
pub struct CompletionsArguments {
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch man | man -l -                          read it now\n  \
    cinch man --output ~/.local/share/man/man1    a page for each command")]
pub struct ManArguments {
    /// The folder for the pages of all commands
    #[arg(long, short, value_name = "FOLDER")]
    pub output: Option<PathBuf>,
}
