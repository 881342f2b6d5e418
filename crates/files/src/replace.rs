//! Replacing a file whole: whoever reads it sees the old contents or the new, never a mixture,
//! and a failure leaves the old.
//!
//! The new contents are written beside the place, under a hidden name that ends with the
//! process, and renamed. A writer that was killed leaves that file, which nobody takes for the
//! real one. It is locked while its writer lives, so that one without a lock is known to be
//! abandoned.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::folder::{parent_of, sync_folder};

/// How names of unfinished files begin; they end with `-` and the number of the process.
pub const PARTIAL_PREFIX: &str = ".partial-";

/// A file under construction. Dropped without being put in place, it removes itself.
#[derive(Debug)]
pub struct Replacement {
    path: PathBuf,
    partial: Partial,
    file: File,
}

/// Replaces a file so that it survives a power cut.
pub fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut replacement = Replacement::create(path)?;
    replacement.write_all(contents)?;
    replacement.put()
}

impl Replacement {
    /// Begins a file that is to be put at `path`, whose folder exists.
    pub fn create(path: &Path) -> io::Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        loop {
            let number = next_number();
            let process = process::id();
            let partial = format!("{PARTIAL_PREFIX}{name}-{number}-{process}");
            let partial = parent_of(path).join(partial);
            let mut options = OpenOptions::new();
            match options.write(true).create_new(true).open(&partial) {
                // Process numbers come back, and a dead one's file may have this name.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                opened => {
                    let file = opened?;
                    let partial = Partial(partial);
                    if is_kept(&file, &partial.0) {
                        return Ok(Self {
                            file,
                            partial,
                            path: path.to_path_buf(),
                        });
                    }
                }
            }
        }
    }

    /// Puts the file in its place, to stay there after a power cut.
    pub fn put(self) -> io::Result<()> {
        self.file.sync_all()?;
        let folder = parent_of(&self.path).to_path_buf();
        self.put_unsynced()?;
        sync_folder(&folder)
    }

    /// Puts the file in its place and leaves it to the system when it reaches the disk: for many
    /// files that can be made again.
    pub fn put_unsynced(self) -> io::Result<()> {
        let Self {
            path,
            partial,
            file,
        } = self;
        if cfg!(not(unix)) {
            // Not every system renames an open file.
            drop(file);
            return fs::rename(&partial.0, path);
        }
        // Open, and so locked, until it has its name.
        let renamed = fs::rename(&partial.0, path);
        drop(file);
        renamed
    }
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Removes the unfinished files of a folder whose writers are gone. What cannot be locked or
/// removed stays: it is in nobody's way.
pub fn clear_abandoned(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_partial)
            && entry.file_type().is_ok_and(|kind| kind.is_file())
            && let Ok(file) = File::open(entry.path())
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether a name is one that [`Replacement::create`] gives.
fn is_partial(name: &str) -> bool {
    let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<u64>().is_ok());
    let mut parts = name.rsplitn(3, '-');
    is_number(parts.next()) && is_number(parts.next()) && name.starts_with(PARTIAL_PREFIX)
}

/// Locks a new file. False where somebody took it for an abandoned one before it was locked.
fn is_kept(file: &File, path: &Path) -> bool {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => false,
        Ok(()) => fs::symlink_metadata(path).is_ok(),
        // Where there are no locks, nothing is taken to be abandoned.
        Err(TryLockError::Error(_)) => true,
    }
}

/// The file's name until it has its own.
#[derive(Debug)]
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        // After the rename there is nothing left under this name.
        let _ = fs::remove_file(&self.0);
    }
}

/// Threads that write the same file at once do not share a name.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_failure_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture.svg");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        // A folder cannot be replaced by a file.
        let taken = folder.path().join("taken");
        fs::create_dir(&taken).unwrap();
        assert!(replace(&taken, b"three").is_err());
        assert_eq!(names(folder.path()), ["picture.svg", "taken"]);
        assert!(replace(&folder.path().join("absent/file"), b"").is_err());
    }

    #[test]
    fn what_is_not_put_in_place_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        replace(&path, b"old").unwrap();
        let mut unfinished = Replacement::create(&path).unwrap();
        unfinished.write_all(b"ne").unwrap();
        let both = names(folder.path());
        assert!(both[0].starts_with(".partial-tokens-"), "{both:?}");
        let process = format!("-{}", process::id());
        assert!(both[0].ends_with(&process), "{both:?}");
        drop(unfinished);
        assert_eq!(names(folder.path()), ["tokens"]);
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[cfg(unix)]
    #[test]
    fn only_what_nobody_writes_any_more_is_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let mut written = Replacement::create(&path).unwrap();
        let abandoned = format!("{PARTIAL_PREFIX}tokens-0-{}", u32::MAX);
        for name in [&abandoned, ".partial-theirs"] {
            fs::write(folder.path().join(name), b"x").unwrap();
        }
        clear_abandoned(folder.path());
        let left = names(folder.path());
        assert!(left.len() == 2 && !left.contains(&abandoned), "{left:?}");
        written.write_all(b"new").unwrap();
        written.put().unwrap();
        assert_eq!(names(folder.path()), [".partial-theirs", "tokens"]);
        clear_abandoned(&folder.path().join("absent"));
    }

    #[test]
    fn many_writers_of_one_file_do_not_mix() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shared");
        let contents: Vec<Vec<u8>> = (0..8).map(|byte| vec![byte; 1 << 16]).collect();
        std::thread::scope(|scope| {
            for contents in &contents {
                scope.spawn(|| {
                    let mut file = Replacement::create(&path).unwrap();
                    file.write_all(contents).unwrap();
                    file.put_unsynced().unwrap();
                });
            }
        });
        assert!(contents.contains(&fs::read(&path).unwrap()));
        assert_eq!(names(folder.path()), ["shared"]);
    }

    /// A file that others may read stays one, unlike what temporary folders make.
    #[cfg(unix)]
    #[test]
    fn a_new_file_has_the_rights_of_any_other() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (ours, plain) = (folder.path().join("ours"), folder.path().join("plain"));
        replace(&ours, b"x").unwrap();
        fs::write(&plain, b"x").unwrap();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&plain));
    }
}
