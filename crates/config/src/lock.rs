//! Keeps two applications out of one folder at a time, from reading the record of
//! what was applied there to writing it.
//!
//! The folder itself is locked, not a file in it: nothing is left behind, and the
//! record can be replaced by a rename. The system drops the lock with its process.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::ConfigError;

/// Far longer than an application takes; a holder that was stopped takes longer.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// Folders that are this process's until it is dropped.
#[derive(Debug)]
pub(crate) struct FolderLocks {
    folders: Vec<PathBuf>,
    held: Vec<(PathBuf, File)>,
}

impl FolderLocks {
    /// Waits for the folders of some files. They are taken in the same order by
    /// everybody, so that no two wait for each other.
    pub(crate) fn of<'a>(
        files: impl Iterator<Item = &'a Path>,
    ) -> Result<FolderLocks, ConfigError> {
        FolderLocks::within(files, PATIENCE)
    }

    fn within<'a>(
        files: impl Iterator<Item = &'a Path>,
        patience: Duration,
    ) -> Result<FolderLocks, ConfigError> {
        let mut folders: Vec<PathBuf> =
            files.filter_map(Path::parent).map(Path::to_owned).collect();
        folders.sort();
        folders.dedup();
        let mut held = Vec::new();
        for folder in &folders {
            let lock = wait_for(folder, patience).map_err(|source| ConfigError::NotWritten {
                path: folder.clone(),
                what: "be locked",
                source,
            })?;
            held.extend(lock.map(|lock| (folder.clone(), lock)));
        }
        Ok(FolderLocks { folders, held })
    }

    /// The folders that could be locked.
    pub(crate) fn held(&self) -> impl Iterator<Item = &Path> {
        self.held.iter().map(|(folder, _)| folder.as_path())
    }

    /// Whether the folder of a file is among them.
    pub(crate) fn cover(&self, file: &Path) -> bool {
        file.parent()
            .is_some_and(|folder| self.folders.iter().any(|locked| locked == folder))
    }
}

/// None where the system or the file system has no lock for a folder: there the
/// comparison right before the renames has to do.
fn wait_for(folder: &Path, patience: Duration) -> io::Result<Option<File>> {
    let Ok(file) = File::open(folder) else {
        return Ok(None);
    };
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::Error(_)) => return Ok(None),
            Err(TryLockError::WouldBlock) if start.elapsed() < patience => thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(
                    io::ErrorKind::WouldBlock,
                    "another program has locked it and does not end",
                ));
            }
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_held_by_one_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.yaml");
        let files = || std::iter::once(file.as_path());
        let first = FolderLocks::within(files(), PAUSE).unwrap();
        assert!(first.cover(&file) && !first.cover(folder.path()));
        let message = FolderLocks::within(files(), PAUSE).unwrap_err().to_string();
        assert!(message.contains("cannot be locked"), "{message}");
        drop(first);
        FolderLocks::within(files(), PAUSE).unwrap();
    }
}
