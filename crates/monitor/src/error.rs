//! What can go wrong with recordings and addresses. A reading that is not to be had is no error.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

#[derive(Debug, Error)]
pub enum MonitorError {
    #[error("cannot {action} {}: {source}", cinch_files::shown(&path))]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[error(
        "{} line {line} is no sample of a recording: {reason}\nhint: recordings are what `cinch monitor --record FILE` and `cinch run` write",
        cinch_files::shown(&path)
    )]
    NotASample {
        path: PathBuf,
        line: u64,
        reason: String,
    },

    #[error("{} holds no sample", cinch_files::shown(&path))]
    Empty { path: PathBuf },

    #[error("cannot listen on {address}: {source}\nhint: name another port, or 0 for a free one")]
    Listen { address: String, source: io::Error },
}

/// Lets an `io::Result` say what was being done to which path.
pub(crate) trait IoContext<T> {
    fn at(self, action: &'static str, path: &std::path::Path) -> Result<T, MonitorError>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &std::path::Path) -> Result<T, MonitorError> {
        self.map_err(|source| MonitorError::Io {
            action,
            path: path.to_owned(),
            source,
        })
    }
}
