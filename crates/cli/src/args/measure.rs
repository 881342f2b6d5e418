//! Steps that are measured.

use clap::Args;

use super::{Device, ProcessorArguments, SettingArguments, threads};

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
    #[command(flatten)]
    pub processor: ProcessorArguments,
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
