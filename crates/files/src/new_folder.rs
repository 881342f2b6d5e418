//! Making a folder whole: it has its name once everything is in it, or never.
//!
//! It is filled beside its place, under a hidden name that ends with the process, and renamed. A
//! writer that was killed leaves that folder, which nobody takes for the real one. On Unix the
//! writer holds an advisory lock on it that ends with its process: the next folder that is made for
//! the same place removes what a killed writer left.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process;

use crate::folder::{create_folder, parent_of, sync_folder};
use crate::replace::{PARTIAL_PREFIX, finished_name, is_held, next_number};

/// A folder under construction. Dropped without being put in place, it removes itself.
#[derive(Debug)]
pub struct NewFolder {
    path: PathBuf,
    partial: Partial,
    /// Held until the folder has its name.
    lock: Option<File>,
}

impl NewFolder {
    /// Begins a folder that is to be put at `path`, where there is nothing yet but an empty folder
    /// at most. Missing parents are made.
    pub fn create(path: &Path) -> io::Result<Self> {
        refuse_taken(path)?;
        let parent = parent_of(path);
        create_folder(parent)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        sweep(parent, &name);
        loop {
            let number = next_number();
            let process = process::id();
            let partial = parent.join(format!("{PARTIAL_PREFIX}{name}-{number}-{process}"));
            match fs::create_dir(&partial) {
                // Process numbers come back, and a dead one's folder may have this name.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
            // From here on it is removed where something fails.
            let partial = Partial(partial);
            let lock = match opened(&partial.0) {
                // Between the two calls a sweep may have taken the folder for a leftover.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            if lock.as_ref().map_or(Ok(true), is_held)? {
                return Ok(Self {
                    path: path.to_path_buf(),
                    partial,
                    lock,
                });
            }
        }
    }

    /// Where it is filled.
    pub fn path(&self) -> &Path {
        &self.partial.0
    }

    /// Puts the folder in its place, to stay there after a power cut if its files do.
    pub fn put(self) -> io::Result<()> {
        let Self {
            path,
            partial,
            lock,
        } = self;
        sync_folder(&partial.0)?;
        refuse_taken(&path)?;
        // Not every system renames over an empty folder; one that is not empty stays.
        if path.is_dir() {
            fs::remove_dir(&path)?;
        }
        fs::rename(&partial.0, &path)?;
        drop(lock);
        sync_folder(parent_of(&path))
    }
}

/// An open folder, where the system opens folders.
fn opened(path: &Path) -> io::Result<Option<File>> {
    cfg!(unix).then(|| File::open(path)).transpose()
}

/// Removes the unfinished folders that killed writers of `name` left in `parent`. What cannot be
/// looked at or removed stays: it is in nobody's way.
fn sweep(parent: &Path, name: &str) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let file_name = entry.file_name();
        let is_ours = file_name.to_str().and_then(finished_name) == Some(name);
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if let Ok(Some(folder)) = opened(&entry.path())
            && folder.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn refuse_taken(path: &Path) -> io::Result<()> {
    let is_empty = |path| fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if found.is_dir() && is_empty(path) => Ok(()),
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
    }
}

/// The folder's name until it has its own.
#[derive(Debug)]
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        // After the rename there is nothing left under this name.
        let _ = fs::remove_dir_all(&self.0);
    }
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
    fn a_folder_appears_with_all_its_files() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("a/model");
        let folder = NewFolder::create(&target).unwrap();
        fs::write(folder.path().join("one"), "1").unwrap();
        assert!(!target.exists());
        folder.put().unwrap();
        assert_eq!(names(&target), ["one"]);
        assert_eq!(names(&place.path().join("a")), ["model"]);
    }

    #[test]
    fn what_is_not_put_in_place_leaves_nothing() {
        let place = tempfile::tempdir().unwrap();
        let folder = NewFolder::create(&place.path().join("model")).unwrap();
        fs::write(folder.path().join("one"), "1").unwrap();
        drop(folder);
        assert!(names(place.path()).is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn what_a_killed_writer_left_goes_with_the_next() {
        let place = tempfile::tempdir().unwrap();
        let others = [".partial-model-x-1", ".partial-other-0-4000000"];
        for name in others.iter().chain(&[".partial-model-0-4000000"]) {
            let folder = place.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("model.safetensors"), "half").unwrap();
        }
        let target = place.path().join("model");
        let running = NewFolder::create(&target).unwrap();
        let name = running.path().file_name().unwrap().to_str().unwrap();
        let mut expected = [name, others[0], others[1]];
        expected.sort_unstable();
        assert_eq!(names(place.path()), expected);
        // One that is being filled is held by its lock.
        sweep(place.path(), "model");
        assert!(running.path().exists());
        running.put().unwrap();
        assert!(names(&target).is_empty());
    }

    #[test]
    fn a_place_that_is_taken_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("model");
        // An empty folder makes room, one that was filled meanwhile does not.
        fs::create_dir(&target).unwrap();
        NewFolder::create(&target).unwrap().put().unwrap();
        let folder = NewFolder::create(&target).unwrap();
        fs::write(target.join("file"), "x").unwrap();
        let error = folder.put().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert!(NewFolder::create(&target).is_err());
        assert!(NewFolder::create(&target.join("file")).is_err());
        assert_eq!(names(place.path()), ["model"]);
        assert_eq!(names(&target), ["file"]);
    }
}
