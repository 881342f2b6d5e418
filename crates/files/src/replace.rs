//! Replacing a file whole: whoever reads it sees the old contents or the new, never a mixture,
//! and a failure leaves the old.
//!
//! The new contents are written beside the place, under a hidden name that ends with the
//! process, and renamed. A writer that was killed leaves that file, which nobody takes for the
//! real one. The writer holds an advisory lock on it that ends with its process: by that
//! [`sweep`] tells what a killed one left from what is being written.

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
            let file = match options.write(true).create_new(true).open(&partial) {
                // Process numbers come back, and a dead one's file may have this name.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                opened => opened?,
            };
            // Between the two calls a sweep may have taken the file for a leftover.
            if is_held(&file)? {
                return Ok(Self {
                    file,
                    partial: Partial(partial),
                    path: path.to_path_buf(),
                });
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
        // Not every system renames an open file; where it can be done, the lock is held until
        // the file has its name.
        let lock = cfg!(unix).then_some(file);
        fs::rename(&partial.0, path)?;
        drop(lock);
        Ok(())
    }
}

/// Locks a file or folder that was just made and says whether it is still there. A file system without
/// locks has no sweep either.
pub(crate) fn is_held(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => has_name(file),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(_)) => Ok(true),
    }
}

#[cfg(unix)]
fn has_name(file: &File) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata()?.nlink() > 0)
}

/// Elsewhere an open file cannot be removed.
#[cfg(not(unix))]
fn has_name(_: &File) -> io::Result<bool> {
    Ok(true)
}

/// Removes the unfinished files in `folder` whose writer is gone, of those whose finished name
/// is `ours`. What cannot be looked at or removed stays: it is in nobody's way.
pub fn sweep(folder: &Path, ours: impl Fn(&str) -> bool) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_partial = name.to_str().and_then(finished_name).is_some_and(&ours);
        // A link is nobody's unfinished file, and opening a pipe would wait.
        if !is_partial || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        if let Ok(file) = File::open(entry.path())
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The name that an unfinished file is to have: what stands between the prefix and the two
/// numbers.
pub(crate) fn finished_name(partial: &str) -> Option<&str> {
    let (rest, process) = partial.strip_prefix(PARTIAL_PREFIX)?.rsplit_once('-')?;
    let (name, number) = rest.rsplit_once('-')?;
    let is_number = |part: &str| part.parse::<u64>().is_ok();
    (is_number(process) && is_number(number)).then_some(name)
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
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
pub(crate) fn next_number() -> u64 {
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

    #[test]
    fn a_sweep_takes_what_a_killed_writer_left_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let left = [".partial-old.tokens-0-4000000", ".partial-a-b.tokens-12-1"];
        let others = [
            ".partial-old.svg-0-4000000",
            ".partial-old.tokens-0-x",
            ".partial-old.tokens",
            "old.tokens-0-1",
        ];
        for name in left.iter().chain(&others) {
            fs::write(path(name), b"x").unwrap();
        }
        fs::create_dir(path(".partial-folder.tokens-0-1")).unwrap();
        let mut running = Replacement::create(&path("new.tokens")).unwrap();
        running.write_all(b"whole").unwrap();
        sweep(folder.path(), |name| name.ends_with(".tokens"));
        for name in left {
            assert!(!path(name).exists(), "{name}");
        }
        for name in others {
            assert!(path(name).exists(), "{name}");
        }
        assert!(path(".partial-folder.tokens-0-1").is_dir());
        running.put().unwrap();
        assert_eq!(fs::read(path("new.tokens")).unwrap(), b"whole");
        sweep(&path("absent"), |_| true);
    }

    #[test]
    fn writers_and_sweeps_at_once_lose_nothing() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = folder.path().join(format!("file-{writer}"));
                scope.spawn(move || {
                    for round in 0..200_u32 {
                        let mut file = Replacement::create(&path).unwrap();
                        file.write_all(&round.to_le_bytes()).unwrap();
                        file.put_unsynced().unwrap();
                        assert_eq!(fs::read(&path).unwrap(), round.to_le_bytes());
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| (0..400).for_each(|_| sweep(folder.path(), |_| true)));
            }
        });
        assert_eq!(names(folder.path()).len(), 4);
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
