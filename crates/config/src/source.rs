//! Where a value came from, and which source outweighs which.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::lossless;

/// The origin of one value, precise enough to go there and change it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Default,
    /// Worked out from another setting, named here by its key.
    Derived(String),
    /// Read off the data that the run is about.
    Data(#[serde(serialize_with = "lossless::shown")] PathBuf),
    Preset(String),
    /// What the program of a file takes where the file is silent.
    Program(String),
    File {
        #[serde(serialize_with = "lossless::shown")]
        path: PathBuf,
        line: usize,
        column: usize,
    },
    /// The variable's name.
    Environment(String),
    /// The flag as typed, with its dashes.
    Flag(String),
}

impl Source {
    pub(crate) fn layer(&self) -> Layer {
        match self {
            Source::Default | Source::Derived(_) | Source::Data(_) => Layer::Default,
            Source::Preset(_) => Layer::Preset,
            Source::Program(_) => Layer::Program,
            Source::File { .. } => Layer::File,
            Source::Environment(_) => Layer::Environment,
            Source::Flag(_) => Layer::Flag,
        }
    }

    /// The start of a sentence about this place, with the column if it has one.
    pub(crate) fn place(&self) -> String {
        match self {
            Source::File { path, line, column } => {
                format!("{} line {line} column {column}", cinch_files::shown(&path))
            }
            other => other.to_string(),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Default => formatter.write_str("default"),
            Source::Derived(key) => write!(formatter, "follows {key}"),
            Source::Data(path) => write!(formatter, "rows of {}", cinch_files::shown(&path)),
            Source::Preset(name) => write!(formatter, "preset {name}"),
            Source::Program(name) => formatter.write_str(name),
            Source::File { path, line, .. } => {
                write!(formatter, "{} line {line}", cinch_files::shown(&path))
            }
            Source::Environment(name) => write!(formatter, "environment {name}"),
            Source::Flag(name) => formatter.write_str(name),
        }
    }
}

/// Weakest first: a later layer overrides an earlier one, and inside one layer
/// the later assignment wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Layer {
    Default,
    /// What a model size implies. Below presets, because a preset may say
    /// something about a size, never the other way round.
    Size,
    Preset,
    /// What the program of a file takes where the file is silent.
    Program,
    File,
    Environment,
    Flag,
    /// A value moved by a rule between settings, such as a preset's warm-up that
    /// is longer than the run. Never without a note that says so.
    Adjusted,
}

impl Layer {
    /// Stated by the user, key by key.
    pub(crate) fn is_explicit(self) -> bool {
        matches!(self, Layer::File | Layer::Environment | Layer::Flag)
    }
}
