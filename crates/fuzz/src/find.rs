//! An input that must not do what it does, kept on disk with the reason.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

#[derive(Clone, Debug)]
pub struct Find {
    /// Where it lies; the reason is beside it, as `.txt`.
    pub path: PathBuf,
    pub reason: String,
}

impl Find {
    /// Keeps an input under a name that its cause has, so that one cause is one file.
    pub fn keep(folder: &Path, cause: &str, input: &[u8], reason: &str) -> io::Result<Find> {
        fs::create_dir_all(folder)?;
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let path = folder.join(cause.chars().map(plain).collect::<String>());
        fs::write(&path, input)?;
        fs::write(path.with_extension("txt"), reason)?;
        Ok(Find {
            path,
            reason: reason.to_owned(),
        })
    }

    /// All that a folder keeps.
    pub fn list(folder: &Path) -> Vec<Find> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut finds: Vec<Find> = entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_none())
            .map(|path| Find {
                reason: fs::read_to_string(path.with_extension("txt")).unwrap_or_default(),
                path,
            })
            .collect();
        finds.sort_by(|left, right| left.path.cmp(&right.path));
        finds
    }
}

/// A name for an input: the first digits of its SHA-256.
pub fn digest(input: &[u8]) -> String {
    format!("{:x}", Sha256::digest(input))
        .chars()
        .take(16)
        .collect()
}
