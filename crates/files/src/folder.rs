//! Folders whose entries outlast a power cut.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// The folder that holds `path`; `.` for a bare name.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

/// Forces a folder's entries to the disk: without it a finished rename can be undone by a power
/// cut. Systems that cannot sync a folder (Windows, some network mounts) order renames themselves.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    match File::open(folder)?.sync_all() {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        result => result,
    }
}

/// Creates a folder and its missing parents so that they survive a power cut.
pub fn create_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let parent = parent_of(folder);
    if parent != folder {
        create_folder(parent)?;
    }
    match fs::create_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        Err(error) => Err(error),
        Ok(()) => sync_folder(parent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_lies_in_its_folder_and_a_bare_name_here() {
        assert_eq!(parent_of(Path::new("a/b/c")), Path::new("a/b"));
        assert_eq!(parent_of(Path::new("c")), Path::new("."));
        assert_eq!(parent_of(Path::new("/")), Path::new("/"));
    }

    #[test]
    fn missing_folders_are_made_and_those_that_are_there_stay() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        create_folder(&deep).unwrap();
        fs::write(deep.join("file"), "x").unwrap();
        create_folder(&deep).unwrap();
        assert!(deep.join("file").exists());
        // Nothing is made inside of a file.
        assert!(create_folder(&deep.join("file/d")).is_err());
    }
}
