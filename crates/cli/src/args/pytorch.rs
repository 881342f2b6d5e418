//! The flags about PyTorch: what its run is like, and what is to be told of it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Whose memory is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// cinch's own engine
    Cinch,
    /// An eager PyTorch run, predicted without PyTorch
    Pytorch,
}

/// What `cinch plan` can tell of PyTorch besides the plan of one run.
#[derive(Args, Clone, Debug, Default)]
pub struct TorchQuestions {
    /// What each remedy would do to this run, in bytes
    #[arg(long, help_heading = super::PYTORCH)]
    pub what_if: bool,
    /// Predict measured runs, a JSON line each, and compare
    #[arg(long, value_name = "FILE", conflicts_with_all = ["guides", "snapshot"], help_heading = super::PYTORCH)]
    pub truth: Option<PathBuf>,
    /// What five guides to GPU memory on the web say, beside what is computed
    #[arg(
        long,
        conflicts_with = "snapshot",
        help_heading = super::PYTORCH
    )]
    pub guides: bool,
    /// Explain a recorded run (see `cinch trace --script`)
    #[arg(long, value_name = "FILE", help_heading = super::PYTORCH)]
    pub snapshot: Option<PathBuf>,
}

impl TorchQuestions {
    /// The flags that were given and need the engine to be named.
    pub fn given(&self) -> Vec<&'static str> {
        given(&[
            ("--what-if", self.what_if),
            ("--truth", self.truth.is_some()),
            ("--guides", self.guides),
        ])
    }
}

/// The names of those that are set.
pub fn given(flags: &[(&'static str, bool)]) -> Vec<&'static str> {
    let given = flags.iter().filter(|(_, is_given)| *is_given);
    given.map(|(name, _)| *name).collect()
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    cinch trace --script > cinch_recorder.py      a recorder for your own training script\n  \
    cinch plan --snapshot run.pickle              what the recorded run used its memory for\n  \
    cinch trace run.pickle --alloc-conf expandable_segments:True --alloc-conf max_split_size_mb:128")]
pub struct TraceArguments {
    /// A recorded run: a pickle of torch.cuda.memory._dump_snapshot, or the recorder's JSON lines
    #[arg(required_unless_present = "script", conflicts_with = "script")]
    pub file: Option<PathBuf>,
    /// Print the Python module that records a run
    #[arg(long)]
    pub script: bool,
    /// Replay under these settings of the allocator too; may be given several times
    #[arg(long, value_name = "TEXT", conflicts_with = "script")]
    pub alloc_conf: Vec<String>,
    #[arg(long, conflicts_with = "script")]
    pub json: bool,
}
