//! What can go wrong with a checkpoint, in words that name the folder, the file and the way out.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// An error while saving, listing, verifying or loading checkpoints.
#[derive(Debug, Error)]
pub enum CheckpointError {
    #[error("cannot {action} {}: {source}", cinch_files::shown(&path))]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[error(
        "the disk is full: saving {} needs {}, and {}\n\
         nothing of the unfinished save was kept; {}\n\
         hint: free some space, or keep fewer checkpoints (save_total_limit)",
        cinch_files::shown(&folder), Size(*needed), free_words(*free), previous_words(previous.as_deref())
    )]
    DiskFull {
        /// The checkpoint that was being saved.
        folder: PathBuf,
        /// Bytes of the whole checkpoint.
        needed: u64,
        /// Bytes free once the unfinished save was removed, where the system tells.
        free: Option<u64>,
        /// The newest complete checkpoint.
        previous: Option<PathBuf>,
        source: io::Error,
    },

    #[error("checkpoint {} is damaged: {file}: {damage}{}", cinch_files::shown(&folder), intact_hint(intact.as_deref()))]
    Damaged {
        folder: PathBuf,
        file: String,
        damage: Damage,
        /// The newest older checkpoint whose checksums all hold.
        intact: Option<PathBuf>,
    },

    #[error(
        "{} is not a checkpoint: {reason}\n\
         hint: a checkpoint is a folder such as <run>/checkpoints/step-00001000; \
         the run folder itself is accepted too and means its newest checkpoint",
        cinch_files::shown(&path)
    )]
    NotACheckpoint { path: PathBuf, reason: &'static str },

    #[error(
        "there is no checkpoint in {}\n\
         hint: leave --resume out to start from the beginning, or name a checkpoint folder",
        cinch_files::shown(&folder)
    )]
    NoCheckpoint { folder: PathBuf },

    /// About tensors that are to be written, or about a file that is not of a checkpoint.
    #[error(transparent)]
    Weights(#[from] cinch_weights::WeightError),

    /// A tensor that is saved could not be read from where it lies.
    #[error(transparent)]
    Engine(#[from] cinch_engine::EngineError),

    #[error(transparent)]
    Ranks(#[from] cinch_ranks::RanksError),

    #[error(
        "rank {rank} cannot write its part of a checkpoint, {}, which rank 0 has just made: {source}\n\
         hint: all ranks write the checkpoints of a run whose states are cut, so --output-dir must \
         be on a disk that every machine sees under the same name",
        cinch_files::shown(&path)
    )]
    NotSeen {
        rank: usize,
        path: PathBuf,
        source: io::Error,
    },

    #[error("cannot mark step {step} as best: its metric is {metric}, not a finite number")]
    MetricNotFinite { step: u64, metric: f64 },

    #[error("cannot mark step {step} as best: {} has no complete checkpoint of it", cinch_files::shown(&folder))]
    BestWithoutCheckpoint { step: u64, folder: PathBuf },

    #[error(
        "{} does not hold a step and a metric: {reason}\n\
         hint: remove the file; the next evaluation that improves writes it anew",
        cinch_files::shown(&path)
    )]
    BestFile { path: PathBuf, reason: String },
}

/// What is wrong with one file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Damage {
    #[error("the file is missing")]
    Missing,
    #[error("expected {expected} bytes, found {found}")]
    Length { expected: u64, found: u64 },
    #[error("expected sha256 {expected}, found {found}")]
    Checksum { expected: String, found: String },
    #[error("cannot be read: {reason}")]
    Unreadable { reason: String },
    #[error("not the JSON it should be: {reason}")]
    Json { reason: String },
    #[error("not a safetensors file: {reason}")]
    Tensors { reason: String },
}

/// Lets an `io::Result` say what was being done to which path.
pub(super) trait IoContext<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, CheckpointError>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, CheckpointError> {
        self.map_err(|source| CheckpointError::Io {
            action,
            path: path.to_path_buf(),
            source,
        })
    }
}

/// A number of bytes: exact, then rounded for the eye.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
        write!(formatter, "{} bytes", self.0)?;
        let mut rounded = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while rounded >= 1024.0 && unit + 1 < UNITS.len() {
            rounded /= 1024.0;
            unit += 1;
        }
        if rounded >= 1.0 {
            write!(formatter, " ({rounded:.1} {})", UNITS[unit])?;
        }
        Ok(())
    }
}

fn free_words(free: Option<u64>) -> String {
    match free {
        Some(bytes) => format!("{} are free", Size(bytes)),
        None => "how much is free could not be read".to_owned(),
    }
}

fn previous_words(previous: Option<&Path>) -> String {
    match previous {
        Some(path) => format!(
            "the previous checkpoint is untouched: {}",
            cinch_files::shown(&path)
        ),
        None => "there is no earlier checkpoint of this run".to_owned(),
    }
}

fn intact_hint(intact: Option<&Path>) -> String {
    match intact {
        Some(path) => format!(
            "\nhint: the newest older checkpoint that is intact: --resume {}",
            cinch_files::shown(&path)
        ),
        None => "\nhint: no older checkpoint beside it is intact".to_owned(),
    }
}
