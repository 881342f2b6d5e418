//! Files that the user asked for.

use std::path::Path;

use anyhow::Context;

/// Replaces a file whole, or says which one cannot be written.
pub fn replace(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    cinch_files::replace(path, bytes)
        .with_context(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::replace;

    #[test]
    fn the_file_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let message = replace(folder.path(), b"three").unwrap_err().to_string();
        let name = folder.path().display();
        assert_eq!(message, format!("{name} cannot be written"));
    }
}
