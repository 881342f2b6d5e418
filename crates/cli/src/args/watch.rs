//! The flags of the commands that watch: monitor, run, report.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch monitor                                 all GPUs, live; ? shows the keys\n  \
    cinch monitor --once                          one look, as text\n  \
    cinch monitor --json --interval 5             a line of JSON every five seconds\n  \
    cinch monitor --run runs/gpt2                 loss, speed and memory of a cinch run\n  \
    cinch monitor --pid 4711 --config axolotl.yaml    a PyTorch run against its prediction\n  \
    cinch monitor --record day.jsonl              and then: cinch report day.jsonl\n\n\
    No process is ever ended.")]
pub struct MonitorArguments {
    /// Look once and print
    #[arg(long)]
    pub once: bool,
    /// Print a line of JSON for each sample
    #[arg(long)]
    pub json: bool,
    /// Write a table of comma-separated values too
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write every sample down, for `cinch report` and --replay
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Show a recording instead of this machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["record", "pid", "config"])]
    pub replay: Option<PathBuf>,
    /// Only this process
    #[arg(long, value_name = "PID")]
    pub pid: Option<u32>,
    /// Seconds between two samples
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    pub interval: f64,
    /// Answer Prometheus on this address; a port alone is of this machine only
    #[arg(long, value_name = "ADDRESS")]
    pub prometheus: Option<String>,
    /// Show a cinch run by its folder
    #[arg(long, value_name = "FOLDER")]
    pub run: Option<PathBuf>,
    /// The configuration of a PyTorch run, whose prediction is shown beside it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch run -- python train.py                  watch a run; say why if memory runs out\n  \
    cinch run --retry 5 --effective-batch 64 -- python train.py --batch {batch} --accum {accum}\n  \
    cinch run --retry 5 --set batch_size=conf/config.yaml:data_loader.batch_size \\\n    \
    --set accumulation=conf/config.yaml:training.accumulate_grad_batches -- python train.py\n  \
    cinch run --retry 5 --config axolotl.yaml -- axolotl train axolotl.yaml\n\n\
    Exit code, signals and terminal are those of the command. Only running out of memory is\n\
    tried again. {checkpoint} stands for the newest checkpoint below --checkpoints.")]
pub struct RunArguments {
    /// Start again with a smaller batch when memory runs out, at most so many times
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub retry: u32,
    /// Where the batch and the accumulation stand: batch_size=FILE:KEY, accumulation=FILE:KEY
    #[arg(long = "set", value_name = "NAME=FILE:KEY")]
    pub set: Vec<String>,
    /// A trainer's own configuration, in which the batch is changed
    #[arg(long, value_name = "FILE", conflicts_with = "set")]
    pub config: Option<PathBuf>,
    /// The batch to begin with [default: what the file says, or the effective batch]
    #[arg(long, value_name = "N", value_parser = super::count)]
    pub batch: Option<usize>,
    /// Samples of an optimizer step, which stay the same [default: batch × accumulation of the
    /// file]
    #[arg(long, value_name = "N", value_parser = super::count)]
    pub effective_batch: Option<usize>,
    /// Find the largest batch that works: a trial that has run for so many seconds works, and is
    /// stopped while larger ones are left to try
    #[arg(long, value_name = "SECONDS", requires = "retry", value_parser = interval)]
    pub largest: Option<f64>,
    /// A folder whose newest entry {checkpoint} stands for
    #[arg(long, value_name = "FOLDER")]
    pub checkpoints: Option<PathBuf>,
    /// Arguments added where a checkpoint is there, for example --resume={checkpoint}
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub resume_with: Vec<String>,
    /// Keep samples of memory here, for `cinch report`
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Write what happened, attempt by attempt, as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Seconds between two samples of memory
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    pub interval: f64,
    /// The command and its arguments
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "COMMAND"
    )]
    pub command: Vec<OsString>,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch report runs/gpt2                        a page about a run: runs/gpt2.html\n  \
    cinch report my.yaml --gpu \"RTX 4090\" --output plan.html     a plan, with the ladder for a card\n  \
    cinch report run.pickle                       a recorded PyTorch run\n  \
    cinch report day.jsonl                        what `cinch monitor --record` kept\n  \
    cinch report train.log                        a training log: steps, and why memory ran out\n  \
    cinch report attempts.json                    what `cinch run --report` wrote\n  \
    cinch report runs/gpt2 --serve                a live run, on this machine alone")]
pub struct ReportArguments {
    /// A run's folder, a configuration, a snapshot of PyTorch, a recording, a log, or attempts
    #[arg(value_name = "RUN|PLAN|SNAPSHOT|RECORDING|LOG|ATTEMPTS")]
    pub subject: PathBuf,
    /// The page to write [default: the subject's name with .html]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Serve the page and keep it up to date, on this address
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "0")]
    pub serve: Option<String>,
    #[command(flatten)]
    pub memory: super::MemoryArguments,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected seconds from 0.1 to 86400".to_owned()),
    }
}
