//! What `cinch launch` is told.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    cinch launch --ranks 2 -- train --model-size tiny\n  \
    cinch launch --gpus 4 -- train --config run.yaml --shard zero2\n  \
    cinch launch --ranks 4 -- train --resume runs/mamba-tiny\n\n\
    Ranks are told who they are as torchrun tells them (RANK, WORLD_SIZE, …). torchrun, srun and\n\
    mpirun start `cinch train` as well, on several machines too:\n  \
    torchrun --nproc-per-node 4 --no-python cinch train …\n  \
    srun --ntasks 8 cinch train …\n\n\
    Exit code: that of the first rank that failed; 128 and the signal, if one was killed.")]
pub struct LaunchArguments {
    /// So many processes, on the CPU
    #[arg(long, value_name = "N", value_parser = super::count)]
    pub ranks: Option<usize>,
    /// So many processes, with a GPU of this machine each
    #[arg(long, value_name = "N", value_parser = super::count, conflicts_with = "ranks", required_unless_present = "ranks")]
    pub gpus: Option<usize>,
    /// Keep what every rank prints, as rank-1.log, … in this folder [default: logs]
    #[arg(long, value_name = "FOLDER", num_args = 0..=1, require_equals = true, default_missing_value = "logs")]
    pub log_all_ranks: Option<PathBuf>,
    /// `train` and its arguments
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "COMMAND"
    )]
    pub command: Vec<OsString>,
}
