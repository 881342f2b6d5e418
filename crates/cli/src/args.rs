//! What the user typed, word for word. What it means is decided in `settings`.

mod diagnose;
mod embed;
mod launch;
mod pytorch;
mod rehearse;
mod watch;

use std::ffi::OsString;
use std::path::PathBuf;

pub use diagnose::DiagnoseArguments;
pub use embed::{EmbedArguments, EmbedderArguments, EmbeddingFormat, EvalArguments};
pub use launch::LaunchArguments;
pub use pytorch::{Engine, TorchQuestions, TraceArguments, given};
pub use rehearse::{AskCudnnArguments, RehearseArguments};
pub use watch::{MonitorArguments, ReportArguments, RunArguments};

use crate::voice::Verbosity;
use cinch_config::{Kind, SETTINGS};
use cinch_data::synth::TaxonomyShape;
use clap::{Arg, ArgAction, ArgMatches, Args, Command as CommandLine, CommandFactory};
use clap::{FromArgMatches, Parser, Subcommand, ValueEnum};

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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GeneratePrecision {
    #[default]
    Fp32,
    Bf16,
}

/// Settings that every command about a model takes: the flags that the registry declares, and
/// what sets several at once.
#[derive(Clone, Debug, Default)]
pub struct SettingArguments {
    pub plain: PlainArguments,
    /// Each flag of a setting that was given: the flag with its dashes, the key, the text.
    pub flags: Vec<SettingFlag>,
}

/// A setting that was typed.
#[derive(Clone, Debug)]
pub struct SettingFlag {
    pub flag: String,
    pub key: &'static str,
    /// A path need not be text.
    pub text: OsString,
}

/// Arguments about settings that are no setting themselves.
#[derive(Args, Clone, Debug, Default)]
pub struct PlainArguments {
    /// Configuration file: JSON, YAML, TOML, Python constants or a shell script, of cinch or of
    /// another trainer
    #[arg(long, value_name = "FILE", help_heading = "Settings")]
    pub config: Option<PathBuf>,
    /// A folder of configuration files, or the main one of several
    #[arg(long, value_name = "PATH", help_heading = "Settings")]
    pub config_path: Option<PathBuf>,
    #[command(flatten)]
    pub memory: MemoryArguments,
    /// Batch, length and precision for a card's memory: 8gb, 12gb, … (see `cinch presets`)
    #[arg(long, value_name = "NAME", help_heading = "Settings")]
    pub vram_preset: Option<String>,
    /// Training preset: default, fast or careful
    #[arg(long, value_name = "NAME", help_heading = "Settings")]
    pub training_preset: Option<String>,
    /// Any other setting by its key, for example --set model.d_state=32
    #[arg(long = "set", value_name = "KEY=VALUE", help_heading = "Settings")]
    pub set: Vec<String>,
    /// Cut by DeepSpeed's ZeRO: stage 1, 2 or 3 (as --shard zero1 …)
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u8).range(1..=3), conflicts_with = "fsdp", help_heading = "Settings")]
    pub zero: Option<u8>,
    /// Cut by FSDP (as --shard fsdp)
    #[arg(long, help_heading = "Settings")]
    pub fsdp: bool,
}

/// The heading of flags that only a PyTorch run has.
pub const PYTORCH: &str = "PyTorch";

impl Args for SettingArguments {
    fn augment_args(command: CommandLine) -> CommandLine {
        let mut command = PlainArguments::augment_args(command);
        for setting in SETTINGS.iter() {
            let Some(flag) = setting.flag else { continue };
            let mut arg = Arg::new(flag.name)
                .long(flag.name)
                .aliases(flag.aliases)
                .help(flag.help.unwrap_or(setting.help))
                .help_heading(flag.heading);
            arg = match flag.value {
                Some(name) if matches!(setting.kind, Kind::Path) => arg
                    .value_name(name)
                    .action(ArgAction::Set)
                    .value_parser(clap::value_parser!(OsString)),
                Some(name) => arg.value_name(name).action(ArgAction::Set),
                None => arg.action(ArgAction::SetTrue),
            };
            command = command.arg(arg);
        }
        command
    }

    fn augment_args_for_update(command: CommandLine) -> CommandLine {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Vec::new();
        for setting in SETTINGS.iter() {
            let Some(flag) = setting.flag else { continue };
            let text = match flag.value {
                Some(_) if matches!(setting.kind, Kind::Path) => {
                    matches.get_one::<OsString>(flag.name).cloned()
                }
                Some(_) => matches.get_one::<String>(flag.name).map(OsString::from),
                None => matches.get_flag(flag.name).then(|| "true".into()),
            };
            flags.extend(text.map(|text| SettingFlag {
                flag: format!("--{}", flag.name),
                key: setting.key,
                text,
            }));
        }
        Ok(Self {
            plain: PlainArguments::from_arg_matches(matches)?,
            flags,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// How much memory there is. At most one of them.
#[derive(Args, Clone, Debug, Default)]
#[group(multiple = true)]
pub struct MemoryArguments {
    /// Memory to stay within, on any device: 8gb, 512mb, 24 (GiB)
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub vram: Option<String>,
    /// The memory of a GPU, of which the margin stays free: 24 (GiB), 80gb
    #[arg(
        long,
        value_name = "SIZE",
        conflicts_with = "vram",
        help_heading = "Memory"
    )]
    pub gpu_memory: Option<String>,
    /// A GPU by name, for example "A100 80GB" (see `cinch gpus`)
    #[arg(
        long,
        value_name = "NAME",
        conflicts_with = "vram",
        help_heading = "Memory"
    )]
    pub gpu: Option<String>,
    /// What is free now: on the GPU, else in host memory
    #[arg(
        long,
        alias = "vram-auto",
        conflicts_with_all = ["vram", "gpu_memory", "gpu"],
        help_heading = "Memory"
    )]
    pub auto: bool,
    /// What stays free: a share (0.15) or a size (2gb) [default: 0.1; none with --vram]
    #[arg(
        long,
        alias = "vram-safety-margin",
        value_name = "SHARE|SIZE",
        help_heading = "Memory"
    )]
    pub safety_margin: Option<String>,
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
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// On a GPU in fp32: let the matrix units round to tf32
    #[arg(long)]
    pub tf32: bool,
    /// On a GPU: the same bits every time, even if that is slower
    #[arg(long)]
    pub deterministic: bool,
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

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch bench --model mamba --model-size small --batch-size 1 --grad-accum 1 --seq-len 256\n  \
    cinch bench --model gpt2 --batch-size 1 --grad-accum 1 --seq-len 256 --steps 5")]
pub struct BenchArguments {
    #[command(flatten)]
    pub settings: SettingArguments,
    /// Every system, one after the other, at sizes that two cores run in seconds
    #[arg(long)]
    pub all: bool,
    /// Steps to measure, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub steps: usize,
    /// Time by op
    #[arg(long)]
    pub trace: bool,
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// On a GPU in fp32: let the matrix units round to tf32
    #[arg(long)]
    pub tf32: bool,
    /// On a GPU: the same bits every time, even if that is slower
    #[arg(long)]
    pub deterministic: bool,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch profile --model gpt2 --batch-size 1 --grad-accum 1 --seq-len 256\n  \
    cinch profile --model mamba --model-size medium --precision bf16 --device cuda --steps 200\n\n\
    Exit code 1 where a GPU's memory differs from the plan by more than 16 MiB.")]
pub struct ProfileArguments {
    #[command(flatten)]
    pub settings: SettingArguments,
    /// Steps to run after the first
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub steps: usize,
    /// Predicted and measured time by op, from one more step that runs op by op
    #[arg(long)]
    pub trace: bool,
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// On a GPU in fp32: let the matrix units round to tf32
    #[arg(long)]
    pub tf32: bool,
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

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch data synth synthetic_data               a folder to train on when there is none\n  \
    cinch data prepare my_code                    tokenise now, train later")]
pub struct DataArguments {
    #[command(subcommand)]
    pub command: DataCommand,
}

#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Write a folder of code-like files in several languages
    Synth(SynthArguments),
    /// Tokenise a folder or file into the cache and say what is in it
    Prepare(PrepareArguments),
    /// Write a made-up taxonomy of codes, for embedders
    Taxonomy(TaxonomyArguments),
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch data synth synthetic_data --files 500\n  \
    cinch data synth synthetic_data --languages python,rust --seed 7")]
pub struct SynthArguments {
    /// The folder to write
    pub folder: PathBuf,
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub files: usize,
    /// About so many bytes a file
    #[arg(long, value_name = "N", default_value_t = 4000)]
    pub bytes: usize,
    /// Only these, for example python,rust
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub languages: Vec<String>,
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Replace files that an earlier call wrote
    #[arg(long)]
    pub overwrite: bool,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch data taxonomy codes.jsonl --sectors 12")]
pub struct TaxonomyArguments {
    /// The .jsonl file to write; it must not be there yet
    pub file: PathBuf,
    /// Codes of two digits, at most 89
    #[arg(long, value_name = "N", default_value_t = TaxonomyShape::USUAL.sectors)]
    pub sectors: usize,
    /// Codes below each code, at most 9
    #[arg(long, value_name = "N", default_value_t = TaxonomyShape::USUAL.children)]
    pub children: usize,
    /// Digits of the longest codes
    #[arg(long, value_name = "N", default_value_t = TaxonomyShape::USUAL.digits as u8, value_parser = clap::value_parser!(u8).range(2..=6))]
    pub digits: u8,
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch data prepare my_code\n  \
    cinch data prepare texts.jsonl --text-column content --tokenizer bytes\n\n\
    Limits: a .jsonl line of 64 MiB, a tokenizer.json of 64 MiB with tokens of up\n\
    to 4 KiB, folders 256 levels deep. Text files may have any size. Text is cut\n\
    into pieces of 256 KiB where no token changes; where there is no such place (in\n\
    a longer word, or with many a tokenizer.json) a note tells how often. Memory\n\
    stays below 512 MiB; a tokenizer.json takes some 100 MiB for each core more, and\n\
    at most 1 GiB if its rules make text grow.")]
pub struct PrepareArguments {
    /// A folder, a text file or a .jsonl file
    pub path: PathBuf,
    /// gpt2, bytes, train (byte pairs of the data), or the path of a tokenizer.json
    #[arg(long, value_name = "NAME", default_value = "gpt2")]
    pub tokenizer: String,
    /// Tokens that a trained tokenizer has at the most
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    pub vocab_size: usize,
    /// The field of .jsonl lines that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub text_column: String,
    /// Where tokenised data is kept
    #[arg(long, value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

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
