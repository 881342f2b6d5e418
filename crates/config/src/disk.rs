//! The file operations an application needs, behind a trait so that tests can
//! make any of them fail.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Where files are kept. Each call is one thing that can go wrong.
pub trait Disk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// Makes a file that must not exist yet, with the permissions and owner of
    /// `like`.
    fn create(&self, path: &Path, contents: &[u8], like: Option<&Path>) -> io::Result<()>;

    /// Brings a file's or a folder's contents onto the medium.
    fn sync(&self, path: &Path) -> io::Result<()>;

    /// Replaces `to` if it exists, at once.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The machine's own file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalDisk;

impl Disk for LocalDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        cinch_files::read_regular(path, cinch_files::MAX_READ)
    }

    fn create(&self, path: &Path, contents: &[u8], like: Option<&Path>) -> io::Result<()> {
        let Some(like) = like else {
            let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
            return file.write_all(contents);
        };
        let metadata = fs::metadata(like)?;
        let mut file = create_guarded(path, &metadata)?;
        file.write_all(contents)?;
        keep_owner(path, &metadata);
        file.set_permissions(metadata.permissions())
    }

    fn sync(&self, path: &Path) -> io::Result<()> {
        // Folders cannot be opened everywhere; where they can, a rename inside
        // is only sure to last after this.
        if cfg!(not(unix)) && path.is_dir() {
            return Ok(());
        }
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

/// Makes an empty file that nobody may read who may not read the one it is a copy
/// of. Group and others get their share when the file has its owner and group: until
/// then it has ours, who are not those of the original.
#[cfg(unix)]
fn create_guarded(path: &Path, like: &fs::Metadata) -> io::Result<File> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    const OWNER: u32 = 0o700;
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(like.permissions().mode() & OWNER)
        .open(path)
}

#[cfg(not(unix))]
fn create_guarded(path: &Path, _like: &fs::Metadata) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// A file of somebody else stays theirs where we may give it away; where not,
/// the system does not let us change owners at all, and ours it becomes.
#[cfg(unix)]
fn keep_owner(path: &Path, metadata: &fs::Metadata) {
    use std::os::unix::fs::{MetadataExt, chown};
    let _ = chown(path, Some(metadata.uid()), Some(metadata.gid()));
}

#[cfg(not(unix))]
fn keep_owner(_path: &Path, _metadata: &fs::Metadata) {}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_copy_is_never_more_readable_than_its_original() {
        let folder = tempfile::tempdir().unwrap();
        let original = folder.path().join("original");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        fs::write(&original, "secret").unwrap();
        for (index, (whole, guarded)) in [(0o600, 0o600), (0o644, 0o600), (0o400, 0o400)]
            .into_iter()
            .enumerate()
        {
            fs::set_permissions(&original, fs::Permissions::from_mode(whole)).unwrap();
            let metadata = fs::metadata(&original).unwrap();
            let empty = folder.path().join(format!("empty{index}"));
            create_guarded(&empty, &metadata).unwrap();
            assert_eq!(mode(&empty), guarded, "{whole:o}");
            create_guarded(&empty, &metadata).unwrap_err();
            let copy = folder.path().join(format!("copy{index}"));
            LocalDisk.create(&copy, b"secret", Some(&original)).unwrap();
            assert_eq!(mode(&copy), whole);
        }
    }
}
