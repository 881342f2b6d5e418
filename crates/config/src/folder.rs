//! Which files of a folder are configuration.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::ConfigError;
use crate::format::{EXTENSIONS, Format};

/// The folder that the stages of a curriculum lie in.
const CURRICULUM: &str = "text_curriculum";

/// The files a `--config-path` stands for. A folder: the config files in it and
/// in the folders directly below, its own first; of Python files those that are
/// called config or settings. A file: itself, and the stages in a
/// `text_curriculum` (or `curriculum`) folder beside it.
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
        let mut files = vec![path.to_owned()];
        let mut stages = [CURRICULUM, "curriculum"]
            .into_iter()
            .map(|name| path.with_file_name(name));
        if let Some(stages) = stages.find(|stages| stages.is_dir()) {
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

/// Why a file of a folder is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NotRead {
    OfNothingKnown,
    SecondCurriculum,
    BeginningOfStages,
}

impl NotRead {
    /// Says so of some files.
    pub(crate) fn told(self, files: &[PathBuf]) -> String {
        let names = files
            .iter()
            .map(|file| cinch_files::shown(file).to_string());
        let names: Vec<String> = names.collect();
        let why = match self {
            NotRead::OfNothingKnown => "nothing in it is about a model, a batch or a length",
            NotRead::SecondCurriculum => "the stages are those of text_curriculum",
            NotRead::BeginningOfStages => "it is what stages begin with, and no stage",
        };
        format!("not read, because {why}: {}", names.join(", "))
    }

    /// Whether a file, by its name among those of its folder, belongs to another run.
    pub(crate) fn by_name(path: &Path, all: &[PathBuf]) -> Option<NotRead> {
        let folder = |path: &Path| path.parent().and_then(Path::file_name).map(OsStr::to_owned);
        let is_text = |path: &Path| folder(path).is_some_and(|name| name == CURRICULUM);
        let name = folder(path)?;
        let name = name.to_string_lossy();
        if name != "curriculum" && !name.ends_with("_curriculum") {
            return None;
        }
        if !is_text(path) && all.iter().any(|other| is_text(other)) {
            return Some(NotRead::SecondCurriculum);
        }
        let is_default = path.file_stem().is_some_and(|stem| stem == "default");
        let beside = |other: &PathBuf| other != path && other.parent() == path.parent();
        (is_default && all.iter().any(beside)).then_some(NotRead::BeginningOfStages)
    }
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
