//! Finding, verifying and opening a checkpoint. A damaged one is refused, never used in part; the
//! refusal names the newest older one that is intact, so that the way on is one flag away.

use std::path::{Path, PathBuf};

use cinch_weights::{WeightError, WeightFiles};
use serde_json::Value;

use super::checksums::{Checksums, Finding, unreadable};
use super::error::{CheckpointError, Damage};
use super::store::Store;
use super::{CHECKSUMS_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, folder};

/// An open checkpoint whose checksums held.
#[derive(Debug)]
pub struct Loaded {
    pub path: PathBuf,
    /// What the save was given as state.
    pub state: Value,
    pub model: WeightFiles,
    pub optimizer: WeightFiles,
}

/// Compares every file of a checkpoint with its checksum.
pub fn verify(path: &Path) -> Result<(), CheckpointError> {
    require_checkpoint(path)?;
    check(path).map_err(|finding| damaged(path, finding))
}

/// Verifies a checkpoint and opens all of it.
pub fn load(path: &Path) -> Result<Loaded, CheckpointError> {
    verify(path)?;
    open(path).map_err(|finding| damaged(path, finding))
}

/// Verifies and reads the state only.
pub fn load_state(path: &Path) -> Result<Value, CheckpointError> {
    require_checkpoint(path)?;
    Checksums::read(path)
        .and_then(|checksums| checksums.check_file(path, STATE_FILE))
        .and_then(|()| read_state(path))
        .map_err(|finding| damaged(path, finding))
}

/// Opens weights only: those of a checkpoint folder, which are verified, or any other
/// safetensors file, which has no checksum to be verified by.
pub fn load_weights(path: &Path) -> Result<WeightFiles, CheckpointError> {
    if path.is_file() {
        return Ok(WeightFiles::open(path)?);
    }
    require_checkpoint(path)?;
    Checksums::read(path)
        .and_then(|checksums| checksums.check_file(path, MODEL_FILE))
        .and_then(|()| open_tensors(path, MODEL_FILE))
        .map_err(|finding| damaged(path, finding))
}

/// The checkpoint to resume from: the one given, or the newest of the run. A run folder or its
/// `checkpoints` folder stands for its newest checkpoint.
///
/// A newest checkpoint with files missing or cut short is an error and not skipped: going on from
/// an older one throws steps away, which is for the user to decide.
pub fn resolve(store: &Store, what: Option<&Path>) -> Result<PathBuf, CheckpointError> {
    let Some(path) = what else {
        return newest_in(store.folder());
    };
    if path.is_dir() && !has_checkpoint_files(path) {
        for folder in [&path.join("checkpoints"), path] {
            match newest_in(folder) {
                Err(CheckpointError::NoCheckpoint { .. }) => {}
                result => return result,
            }
        }
    }
    require_checkpoint(path)?;
    Ok(path.to_path_buf())
}

fn newest_in(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let mut steps = folder::steps_in(folder).map_err(|source| CheckpointError::Io {
        action: "read",
        path: folder.to_path_buf(),
        source,
    })?;
    let Some((_, path)) = steps.pop() else {
        return Err(CheckpointError::NoCheckpoint {
            folder: folder.to_path_buf(),
        });
    };
    match Checksums::read(&path).and_then(|checksums| checksums.check_lengths(&path)) {
        Ok(()) => Ok(path),
        Err(finding) => Err(damaged(&path, finding)),
    }
}

fn has_checkpoint_files(path: &Path) -> bool {
    [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, CHECKSUMS_FILE]
        .iter()
        .any(|name| path.join(name).exists())
}

/// Tells a wrong path from a damaged checkpoint: the first needs another path, the second another
/// checkpoint.
fn require_checkpoint(path: &Path) -> Result<(), CheckpointError> {
    let is_step = path
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| folder::step_of(name).is_some());
    let reason = if path.is_file() {
        "it is a file"
    } else if !path.exists() {
        "it does not exist"
    } else if !is_step && !has_checkpoint_files(path) {
        "it holds none of a checkpoint's files"
    } else {
        return Ok(());
    };
    Err(CheckpointError::NotACheckpoint {
        path: path.to_path_buf(),
        reason,
    })
}

fn check(path: &Path) -> Result<(), Finding> {
    Checksums::read(path)?.check_contents(path)
}

fn read_state(path: &Path) -> Result<Value, Finding> {
    let text = cinch_files::read_regular(&path.join(STATE_FILE), cinch_files::MAX_READ)
        .map_err(|error| Finding::new(STATE_FILE, unreadable(&error)))?;
    serde_json::from_slice(&text).map_err(|error| {
        let reason = error.to_string();
        Finding::new(STATE_FILE, Damage::Json { reason })
    })
}

fn open(path: &Path) -> Result<Loaded, Finding> {
    Ok(Loaded {
        path: path.to_path_buf(),
        state: read_state(path)?,
        model: open_tensors(path, MODEL_FILE)?,
        optimizer: open_tensors(path, OPTIMIZER_FILE)?,
    })
}

fn open_tensors(path: &Path, name: &str) -> Result<WeightFiles, Finding> {
    WeightFiles::open(&path.join(name)).map_err(|error| {
        let damage = match error {
            WeightError::Io { source, .. } => unreadable(&source),
            error => Damage::Tensors {
                reason: error.to_string(),
            },
        };
        Finding::new(name, damage)
    })
}

fn damaged(path: &Path, finding: Finding) -> CheckpointError {
    CheckpointError::Damaged {
        folder: path.to_path_buf(),
        file: finding.file,
        damage: finding.damage,
        intact: newest_intact_before(path),
    }
}

/// Looks through the older checkpoints beside `path`, newest first, for one that verifies.
fn newest_intact_before(path: &Path) -> Option<PathBuf> {
    let step = folder::step_of(path.file_name()?.to_str()?)?;
    let steps = folder::steps_in(cinch_files::parent_of(path)).ok()?;
    steps
        .into_iter()
        .rev()
        .filter(|(older, _)| *older < step)
        .map(|(_, path)| path)
        .find(|path| check(path).is_ok())
}

#[cfg(test)]
mod tests;
