//! What measured steps said about predicted ones on this machine, kept in the cache folder.

use std::path::{Path, PathBuf};

use cinch_files::cache_folder;
use cinch_fit::search::Calibration;

use crate::files;

/// What was measured so far; nothing where nothing can be read.
pub fn known() -> Calibration {
    path().map_or_else(Calibration::default, |path| load(&path))
}

/// Keeps a measurement. Where the cache cannot be written, later predictions go on without it.
pub fn keep(record: impl FnOnce(&mut Calibration)) {
    let Some(path) = path() else { return };
    let mut calibration = load(&path);
    record(&mut calibration);
    let _ = store(&path, &calibration);
}

fn path() -> Option<PathBuf> {
    Some(cache_folder()?.join("calibration.json"))
}

fn load(path: &Path) -> Calibration {
    let text = cinch_files::read_regular_text(path, cinch_files::MAX_READ).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

fn store(path: &Path, calibration: &Calibration) -> anyhow::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    files::replace(path, serde_json::to_string_pretty(calibration)?.as_bytes())
}

#[cfg(test)]
mod tests {
    use cinch_config::Precision;

    use super::*;

    #[test]
    fn a_measurement_is_read_back_and_a_damaged_file_holds_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/calibration.json");
        assert_eq!(load(&path), Calibration::default());
        let mut calibration = Calibration::default();
        calibration.record("A", "gpt2", Precision::Bf16, 3.0, 2.0);
        store(&path, &calibration).unwrap();
        assert_eq!(load(&path), calibration);
        std::fs::write(&path, "[{").unwrap();
        assert_eq!(load(&path), Calibration::default());
    }
}
