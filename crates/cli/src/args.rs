//! What the user typed, word for word. What it means is decided in `settings`.

mod about;
mod data;
mod diagnose;
mod embed;
mod launch;
mod measure;
mod plan;
mod pytorch;
mod rehearse;
mod settings;
mod train;
mod watch;

use std::ffi::OsString;

pub use about::{
    CompletionsArguments, GpusArguments, InitArguments, ListArguments, ManArguments,
    ModelsArguments,
};
pub use data::{DataArguments, DataCommand, PrepareArguments, SynthArguments, TaxonomyArguments};
pub use diagnose::DiagnoseArguments;
pub use embed::{EmbedArguments, EmbedderArguments, EmbeddingFormat, EvalArguments};
pub use launch::LaunchArguments;
pub use measure::{BenchArguments, ProfileArguments};
pub use plan::{Allowed, CheckArguments, FitArguments, PlanArguments};
pub use pytorch::{Engine, TorchQuestions, TraceArguments, given};
pub use rehearse::{AskCudnnArguments, RehearseArguments};
pub use settings::{MemoryArguments, PYTORCH, PlainArguments, SettingArguments, SettingFlag};
pub use train::{
    ExportArguments, GenerateArguments, GeneratePrecision, MergeArguments, TrainArguments,
};
pub use watch::{MonitorArguments, ReportArguments, RunArguments};

use crate::voice::Verbosity;
use clap::{
    Args, Command as CommandLine, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum,
};

#[derive(Debug, Parser)]
#[command(
    name = "cinch",
    version = VERSION,
    about = "Plans the memory of a training step before it runs, and trains inside that plan.",
    after_help = "Examples:\n  \
        cinch train                                        train a small model on built-in text\n  \
        cinch plan --model-size medium --vram 16gb         what a model needs, to the byte\n  \
        cinch train --model-size small --vram 8gb --data-dir my_code\n  \
        cinch train --config config_16gb_safe.json --data-dir my_code\n\n\
        Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 does not fit,\n\
        4 a log shows that memory ran out (diagnose), 5 another rank ended, 130 interrupted (Ctrl-C, SIGTERM).\n\
        Flags may be written with - or _ (--model_size = --model-size).",
    disable_help_subcommand = false
)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
    /// Print the answer and errors only: no notes, no progress
    #[arg(
        long,
        short,
        global = true,
        conflicts_with = "verbose",
        display_order = 900
    )]
    pub quiet: bool,
    /// Print more: where each setting came from
    #[arg(long, short, global = true, display_order = 901)]
    pub verbose: bool,
}

/// The package's version, and what it was built from, as the build found it.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), env!("CINCH_BUILD"));

impl Arguments {
    pub fn verbosity(&self) -> Verbosity {
        match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (_, true) => Verbosity::Verbose,
            _ => Verbosity::Normal,
        }
    }

    /// Reads the command line; one that cannot be read ends the program with a message.
    pub fn read() -> Self {
        let typed = with_negative_values(with_dashes(std::env::args_os()));
        let matches = command_line().get_matches_from(typed);
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

/// The whole command line as clap knows it: for reading, and for completions and manual pages.
///
/// A number below zero is a value and not an unknown flag, so that the message about it names
/// the setting and its range.
pub fn command_line() -> CommandLine {
    fn with_negative_numbers(command: CommandLine) -> CommandLine {
        command
            .mut_args(|arg| {
                let takes_values = arg.get_action().takes_values();
                arg.allow_negative_numbers(takes_values)
            })
            .mut_subcommands(with_negative_numbers)
    }
    fn without_pytorch(command: CommandLine) -> CommandLine {
        command.mut_args(|arg| {
            let is_of_pytorch = arg.get_help_heading() == Some(PYTORCH);
            arg.hide(is_of_pytorch)
        })
    }
    let mut command = with_negative_numbers(Arguments::command());
    for name in ["train", "bench", "profile", "check"] {
        command = command.mut_subcommand(name, without_pytorch);
    }
    command
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// What a configuration needs, to the byte
    Plan(PlanArguments),
    /// The best settings for a GPU; --apply writes them into your files
    Fit(FitArguments),
    /// Plan, then train inside the plan
    Train(TrainArguments),
    /// Train by several processes on this machine
    Launch(LaunchArguments),
    /// Sample text from a checkpoint
    Generate(GenerateArguments),
    /// Turn texts into embeddings with a trained embedder
    Embed(EmbedArguments),
    /// How well an embedder finds the pairs that its run held out
    Eval(EvalArguments),
    /// Write a checkpoint as files that peft or transformers load
    Export(ExportArguments),
    /// Add adapters to the weights they were trained on
    Merge(MergeArguments),
    /// Measure a training step against the speed of a matrix product in the same run
    Bench(BenchArguments),
    /// Run real steps and compare memory and time with the plan
    Profile(ProfileArguments),
    /// Record a PyTorch run, or replay a recorded one under other allocator settings
    Trace(TraceArguments),
    /// Why memory ran out, from an error message or a log, and what to do about it
    Diagnose(DiagnoseArguments),
    /// Who holds GPU memory, whether it grows, and use against plan
    Monitor(MonitorArguments),
    /// Run a training command: watch its memory, and start it again smaller if it runs out
    Run(RunArguments),
    /// Write one page about a run, a plan, a snapshot, a recording or a log
    Report(ReportArguments),
    /// Run a PyTorch script on a card that is not there: what it would use, and whether it fits
    Rehearse(RehearseArguments),
    /// Answers for a rehearsed process what cuDNN says of a card
    #[command(name = "__cudnn", hide = true)]
    AskCudnn(AskCudnnArguments),
    /// Before a run: settings and their origin, GPU, free memory, disk, a dry plan
    Check(CheckArguments),
    /// Make or prepare training data
    Data(DataArguments),
    /// The models that are known: which can be trained, which predicted
    #[command(after_help = "Examples:\n  cinch models\n  cinch models --json")]
    Models(ModelsArguments),
    /// The GPUs that are known, and what this machine has
    Gpus(GpusArguments),
    /// Named settings: memory sizes, training presets
    #[command(after_help = "Examples:\n  cinch presets\n  \
        cinch train --vram-preset 8gb --training-preset fast --data-dir my_code")]
    Presets(ListArguments),
    /// Write a configuration for a model and a card, with settings that fit
    Init(InitArguments),
    /// Print a script that completes cinch's commands and flags in a shell
    Completions(CompletionsArguments),
    /// Print cinch's manual page, or write those of all commands into a folder
    Man(ManArguments),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// What fits the precision (plan), or what the machine has (train)
    #[default]
    Auto,
    Cpu,
    Cuda,
}

/// How steps are computed.
#[derive(Args, Debug)]
pub struct ProcessorArguments {
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// On a GPU in fp32: let the matrix units round to tf32
    #[arg(long)]
    pub tf32: bool,
    /// On a GPU: the same bits every time, even if that is slower
    #[arg(long)]
    pub deterministic: bool,
}

/// A whole number above zero.
fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("expected a whole number from 1 on".to_owned()),
    }
}

/// Threads beyond the cores only wait for each other, and each has memory of its own: so many for
/// a core leave room to measure that, and far more are a slip of the keyboard.
const MOST_THREADS_A_CORE: usize = 8;

fn threads(text: &str) -> Result<usize, String> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let most = cores * MOST_THREADS_A_CORE;
    let number = text.parse::<usize>().ok();
    number
        .filter(|number| (1..=most).contains(number))
        .ok_or_else(|| {
            format!(
                "expected from 1 to {most}: {MOST_THREADS_A_CORE} for each core that may be used \
                 ({cores})\nhint: leave --threads out for one on each core"
            )
        })
}

/// `--model_size=x` as `--model-size=x`: only the flag's name is touched.
fn with_dashes(arguments: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut is_another_programs = false;
    arguments.map(move |argument| match argument.to_str() {
        // What follows is another program's command line.
        _ if is_another_programs => argument,
        Some("--") => {
            is_another_programs = true;
            argument
        }
        Some(text) if text.starts_with("--") => {
            let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
            (name.replace('_', "-") + value).into()
        }
        _ => argument,
    })
}

/// `--vram -8gb` as `--vram=-8gb`: nothing that begins with a dash and a digit is a flag, so it is
/// the value of the one before, and the message about it is that of the setting.
fn with_negative_values(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let is_negative = |text: &str| {
        let mut letters = text.chars();
        letters.next() == Some('-') && letters.next().is_some_and(|one| one.is_ascii_digit())
    };
    let is_open_flag = |text: &str| text.len() > 2 && text.starts_with("--") && !text.contains('=');
    let mut joined: Vec<OsString> = Vec::new();
    let mut is_another_programs = false;
    for argument in arguments {
        is_another_programs |= argument == "--";
        if is_another_programs {
            joined.push(argument);
            continue;
        }
        let value = argument.to_str().filter(|text| is_negative(text));
        let flag = joined
            .last_mut()
            .filter(|last| last.to_str().is_some_and(is_open_flag));
        match (flag, value) {
            (Some(flag), Some(value)) => {
                flag.push("=");
                flag.push(value);
            }
            _ => joined.push(argument),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        command_line().debug_assert();
    }

    #[test]
    fn a_size_below_zero_is_the_value_of_its_flag() {
        let read = |typed: &[&str]| with_negative_values(typed.iter().map(OsString::from));
        assert_eq!(read(&["plan", "--vram", "-8gb"]), ["plan", "--vram=-8gb"]);
        assert_eq!(read(&["--vram=1", "-8gb"]), ["--vram=1", "-8gb"]);
        assert_eq!(
            read(&["--vram", "-q", "--", "-8"]),
            ["--vram", "-q", "--", "-8"]
        );
    }

    #[test]
    fn underscores_become_dashes_in_names_only() {
        let typed = ["--model_size", "a_b", "--set=model.d_state=3", "-x_y"];
        let read: Vec<OsString> = with_dashes(typed.map(OsString::from).into_iter()).collect();
        assert_eq!(
            read,
            ["--model-size", "a_b", "--set=model.d_state=3", "-x_y"]
        );
    }
}
