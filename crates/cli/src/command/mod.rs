//! One file a command.

pub mod bench;
pub mod check;
pub mod data;
pub mod fit;
pub mod generate;
pub mod gpus;
pub mod models;
pub mod plan;
pub mod presets;
pub mod profile;
pub mod trace;
pub mod train;

use std::io::Write;
use std::path::Path;

use cinch_train::checkpoint::{CheckpointError, Store};
use serde::Serialize;

/// The checkpoints of the run in a folder; a path to a file is told what a checkpoint is.
pub fn open_run(path: &Path) -> Result<Store, CheckpointError> {
    if path.is_file() {
        return Err(CheckpointError::NotACheckpoint {
            path: path.to_owned(),
            reason: "it is a file",
        });
    }
    Store::open(path)
}

/// Writes to standard output; a closed pipe is an error, not a panic.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    Ok(out.flush()?)
}

pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}
