//! One file a command.

pub mod bench;
pub mod check;
pub mod completions;
pub mod data;
pub mod diagnose;
pub mod embed;
pub mod eval;
pub mod export;
pub mod fit;
pub mod generate;
pub mod gpus;
pub mod init;
pub mod launch;
pub mod man;
pub mod merge;
pub mod models;
pub mod monitor;
pub mod plan;
pub mod presets;
pub mod profile;
pub mod rehearse;
pub mod report;
pub mod run;
pub mod trace;
pub mod train;

use std::io::Write;
use std::path::Path;

use cinch_train::checkpoint::{CheckpointError, Store};
use serde::Serialize;

use crate::failure::is_broken_pipe;
use crate::table;

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

/// Writes to standard output, on a terminal with lines broken between words; a closed pipe is an
/// error, not a panic.
pub fn print(text: &str) -> anyhow::Result<()> {
    match table::terminal_width() {
        Some(width) => print_raw(table::broken(text, width).as_bytes()),
        None => print_raw(text.as_bytes()),
    }
}

/// Of what is printed before something is done: a reader who has seen enough keeps nobody from
/// doing it.
pub fn ahead(printed: anyhow::Result<()>) -> anyhow::Result<()> {
    match printed {
        Err(error) if is_broken_pipe(&error) => Ok(()),
        printed => printed,
    }
}

/// Writes to standard output as it is, for programs and for copying.
pub fn print_raw(text: &[u8]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text)?;
    if text.last() != Some(&b'\n') {
        out.write_all(b"\n")?;
    }
    Ok(out.flush()?)
}

/// Writes lines that are whole already; nothing for none.
pub fn print_all(lines: &str) -> anyhow::Result<()> {
    match lines.is_empty() {
        true => Ok(()),
        false => print(lines),
    }
}

pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print_raw(serde_json::to_string_pretty(value)?.as_bytes())
}
