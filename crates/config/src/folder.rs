//! Which files of a folder are configuration.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::ConfigError;
use crate::format::{EXTENSIONS, Format};

/// The files a `--config-path` stands for. A folder: the config files in it and
/// in the folders directly below, its own first; of Python files those that are
/// called config or settings. A file: itself, and the stages in a
/// `text_curriculum` folder beside it.
pub fn config_files(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |source| ConfigError::Unreadable { path, source }
    };
    let list = |folder: &Path| -> Result<(Vec<PathBuf>, Vec<PathBuf>), ConfigError> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
            entries.push(entry.map_err(unreadable(folder))?.path());
        }
        entries.sort();
        let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) =
            entries.into_iter().partition(|entry| entry.is_dir());
        Ok((
            files.into_iter().filter(|file| is_config(file)).collect(),
            folders,
        ))
    };
    if !path.exists() {
        return Err(ConfigError::NoSuchFile {
            path: path.to_owned(),
        });
    }
    if !path.is_dir() {
        let stages = path.with_file_name("text_curriculum");
        let mut files = vec![path.to_owned()];
        if stages.is_dir() {
            files.extend(list(&stages)?.0);
        }
        return Ok(files);
    }
    let (mut files, folders) = list(path)?;
    for folder in folders {
        files.extend(list(&folder)?.0);
    }
    if files.is_empty() {
        return Err(ConfigError::NoConfigFiles {
            path: path.to_owned(),
        });
    }
    Ok(files)
}

fn is_config(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let hidden = stem.starts_with('.');
    let format = EXTENSIONS
        .iter()
        .find(|(name, _)| Some(*name) == extension)
        .map(|(_, format)| *format);
    match format {
        Some(Format::Python) => !hidden && (stem.contains("config") || stem.contains("settings")),
        Some(_) => !hidden,
        None => false,
    }
}
