//! Making a folder whole: it has its name once everything is in it, or never.
//!
//! It is filled beside its place, under a hidden name that ends with the process, and renamed. A
//! writer that was killed leaves that folder, which nobody takes for the real one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;

use crate::folder::{create_folder, parent_of, sync_folder};
use crate::replace::{PARTIAL_PREFIX, next_number};

/// A folder under construction. Dropped without being put in place, it removes itself.
#[derive(Debug)]
pub struct NewFolder {
    path: PathBuf,
    partial: Partial,
}

impl NewFolder {
    /// Begins a folder that is to be put at `path`, where there is nothing yet but an empty folder
    /// at most. Missing parents are made.
    pub fn create(path: &Path) -> io::Result<Self> {
        refuse_taken(path)?;
        let parent = parent_of(path);
        create_folder(parent)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        loop {
            let number = next_number();
            let process = process::id();
            let partial = parent.join(format!("{PARTIAL_PREFIX}{name}-{number}-{process}"));
            match fs::create_dir(&partial) {
                // Process numbers come back, and a dead one's folder may have this name.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => {
                    made?;
                    return Ok(Self {
                        path: path.to_path_buf(),
                        partial: Partial(partial),
                    });
                }
            }
        }
    }

    /// Where it is filled.
    pub fn path(&self) -> &Path {
        &self.partial.0
    }

    /// Puts the folder in its place, to stay there after a power cut if its files do.
    pub fn put(self) -> io::Result<()> {
        let Self { path, partial } = self;
        sync_folder(&partial.0)?;
        refuse_taken(&path)?;
        // Not every system renames over an empty folder; one that is not empty stays.
        if path.is_dir() {
            fs::remove_dir(&path)?;
        }
        fs::rename(&partial.0, &path)?;
        sync_folder(parent_of(&path))
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
