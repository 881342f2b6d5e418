//! What can go wrong with the record of a run.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// An error while writing metrics or TensorBoard events.
#[derive(Debug, Error)]
pub enum RecordError {
    #[error("cannot {action} {}: {source}", cinch_files::shown(&path))]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[error("the metrics of step {step} cannot be written to {} as one JSON object: {source}", cinch_files::shown(&path))]
    NotAnObject {
        path: PathBuf,
        step: u64,
        source: serde_json::Error,
    },
}

/// Lets an `io::Result` say what was being done to which path.
pub(super) trait IoContext<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, RecordError>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, RecordError> {
        self.map_err(|source| RecordError::Io {
            action,
            path: path.to_path_buf(),
            source,
        })
    }
}
