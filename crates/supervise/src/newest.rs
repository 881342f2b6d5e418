//! The newest checkpoint in a folder, for starting again from it.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Endings of files that are checkpoints.
const ENDINGS: [&str; 5] = ["ckpt", "pt", "pth", "safetensors", "bin"];

/// The entry that was changed last among those that look like checkpoints: folders with a number
/// in their name (`checkpoint-500`, `step-00001000`) and files with a checkpoint's ending. One
/// that has not been whole for long may still be in the making, and hidden ones are.
pub fn newest_checkpoint(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let candidates = entries.filter_map(|entry| {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_hidden = name.starts_with('.') || name.contains("tmp");
        let ending = path.extension().and_then(|ending| ending.to_str());
        let is_checkpoint = match path.is_dir() {
            true => name.bytes().any(|byte| byte.is_ascii_digit()),
            false => ending.is_some_and(|ending| ENDINGS.contains(&ending)),
        };
        let changed: SystemTime = entry.metadata().ok()?.modified().ok()?;
        (is_checkpoint && !is_hidden).then_some((number(&name), changed, path))
    });
    // By number where names have one, since a copy changes times.
    candidates.max().map(|(_, _, path)| path)
}

/// The last number in a name.
fn number(name: &str) -> Option<u64> {
    let digits = name.split(|one: char| !one.is_ascii_digit());
    let mut numbers = digits.filter_map(|digits| digits.parse().ok());
    numbers.next_back()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_highest_number_is_the_newest() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(newest_checkpoint(folder.path()), None);
        for name in ["checkpoint-500", "checkpoint-1000", "runs", ".partial-2000"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        fs::write(folder.path().join("log-9999.txt"), "").unwrap();
        let newest = newest_checkpoint(folder.path()).unwrap();
        assert!(newest.ends_with("checkpoint-1000"), "{newest:?}");
        assert_eq!(newest_checkpoint(&folder.path().join("nowhere")), None);
    }
}
