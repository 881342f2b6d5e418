//! Replacing a file: whoever reads it sees the old content or the new, and a failure leaves the old.

use std::path::Path;

use anyhow::Context;

/// Writes a file beside its place and then puts it there.
pub fn replace(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    let partial = path.with_file_name(name);
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        // What is not there need not be removed.
        let _ = std::fs::remove_file(&partial);
    }
    written.with_context(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::replace;

    #[test]
    fn a_failure_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture.svg");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        // A folder cannot be replaced by a file.
        let taken = folder.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        let message = replace(&taken, b"three").unwrap_err().to_string();
        assert!(message.contains("taken cannot be written"), "{message}");
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 2, "no partial file is left");
    }
}
