//! The one process that uses a run folder.
//!
//! It holds an advisory lock on `owner.lock` inside. The system releases the lock when the process
//! ends, however it ends, so a file that stays behind keeps nobody out. The file's contents only
//! tell others whom to look for.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;

use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::host::host_name;

const FILE_NAME: &str = "owner.lock";

/// A process, as others can find it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub process: u32,
    pub host: String,
}

impl Owner {
    fn this_process() -> Self {
        Self {
            process: process::id(),
            host: host_name(),
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "process {} on {}", self.process, self.host)
    }
}

/// Ownership of a run folder, until it is dropped.
#[derive(Debug)]
pub struct Ownership {
    /// Without links, so that it can be compared.
    folder: PathBuf,
    file: File,
    /// Why other processes are not kept out.
    unlocked: Option<String>,
}

impl Ownership {
    /// Takes the folder, which is created where it is missing.
    pub fn take(folder: &Path) -> Result<Self, TrainError> {
        let path = folder.join(FILE_NAME);
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error: io::Error| TrainError::Output {
                path,
                problem: error.to_string(),
            }
        };
        cinch_files::create_folder(folder).map_err(|source| TrainError::Folder {
            folder: folder.to_owned(),
            source,
        })?;
        // A pipe of that name would be waited for without end.
        if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(TrainError::Output {
                path,
                problem: "it is not a regular file".to_owned(),
            });
        }
        // Not truncated: until the lock is held, the contents are another's.
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(failed(&path))?;
        let unlocked = match file.try_lock() {
            Ok(()) => None,
            Err(TryLockError::WouldBlock) => {
                return Err(TrainError::InUse {
                    folder: folder.to_owned(),
                    owner: owner_in(&path),
                });
            }
            Err(TryLockError::Error(error)) => Some(unlocked_note(folder, &error)),
        };
        let folder = fs::canonicalize(folder).map_err(failed(folder))?;
        let mut ownership = Self {
            folder,
            file,
            unlocked,
        };
        // The lock keeps others out with or without a name to tell them.
        let _ = ownership.sign();
        Ok(ownership)
    }

    /// Whether it is that folder which is owned.
    pub(crate) fn is_of(&self, folder: &Path) -> bool {
        fs::canonicalize(folder).is_ok_and(|folder| folder == self.folder)
    }

    /// What to tell where the file system has no locks.
    pub(crate) fn note(&self) -> Option<&str> {
        self.unlocked.as_deref()
    }

    fn sign(&mut self) -> io::Result<()> {
        let mut text = serde_json::to_vec(&Owner::this_process())?;
        text.push(b'\n');
        self.file.set_len(0)?;
        self.file.write_all(&text)
    }
}

impl Drop for Ownership {
    fn drop(&mut self) {
        // The lock goes with the file's handle; a name without a lock would only mislead.
        let _ = self.file.set_len(0);
    }
}

/// Who signed the file; none where it cannot be read or was not signed yet.
fn owner_in(path: &Path) -> Option<Owner> {
    serde_json::from_slice(&cinch_files::read_regular(path, cinch_files::MAX_READ).ok()?).ok()
}

fn unlocked_note(folder: &Path, error: &io::Error) -> String {
    format!(
        "{} cannot be locked ({error}): start no second run in it while this one lasts",
        cinch_files::shown(&folder)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_owner_at_a_time() {
        let run = tempfile::tempdir().unwrap();
        let folder = run.path().join("runs/first");
        let owner = Ownership::take(&folder).unwrap();
        assert_eq!(owner.note(), None);
        let message = Ownership::take(&folder).unwrap_err().to_string();
        for part in [
            "is in use",
            &format!("process {} on {}", process::id(), host_name()),
            "hint:",
            "--output-dir",
        ] {
            assert!(message.contains(part), "{message}");
        }
        drop(owner);
        assert_eq!(owner_in(&folder.join(FILE_NAME)), None);
        Ownership::take(&folder).unwrap();
    }

    #[test]
    fn a_file_that_a_dead_process_left_keeps_nobody_out() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join(FILE_NAME);
        fs::write(&path, "{\"process\":1,\"host\":\"far-away.example\"}\nmore").unwrap();
        let _owner = Ownership::take(run.path()).unwrap();
        assert_eq!(owner_in(&path), Some(Owner::this_process()));
    }

    #[test]
    fn an_owner_without_a_name_is_refused_too() {
        let run = tempfile::tempdir().unwrap();
        let _owner = Ownership::take(run.path()).unwrap();
        fs::write(run.path().join(FILE_NAME), "\u{0}").unwrap();
        let message = Ownership::take(run.path()).unwrap_err().to_string();
        assert!(message.contains("another process"), "{message}");
        assert!(message.contains("hint:"), "{message}");
    }

    #[test]
    fn a_folder_without_locks_is_told_of() {
        let error = io::Error::from(io::ErrorKind::Unsupported);
        let note = unlocked_note(Path::new("runs/a"), &error);
        assert!(note.starts_with("runs/a cannot be locked"), "{note}");
    }
}
