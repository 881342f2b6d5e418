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
        fs::read(path)
    }

    fn create(&self, path: &Path, contents: &[u8], like: Option<&Path>) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.write_all(contents)?;
        let Some(like) = like else {
            return Ok(());
        };
        let metadata = fs::metadata(like)?;
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

/// A file of somebody else stays theirs where we may give it away; where not,
/// the system does not let us change owners at all, and ours it becomes.
#[cfg(unix)]
fn keep_owner(path: &Path, metadata: &fs::Metadata) {
    use std::os::unix::fs::{MetadataExt, chown};
    let _ = chown(path, Some(metadata.uid()), Some(metadata.gid()));
}

#[cfg(not(unix))]
fn keep_owner(_path: &Path, _metadata: &fs::Metadata) {}
