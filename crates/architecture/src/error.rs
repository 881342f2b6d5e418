//! What can be wrong with a model's name or its `config.json`.

use std::path::PathBuf;

use thiserror::Error;

#[derive(Debug, Error)]
pub enum ArchitectureError {
    #[error("{} cannot be read: {source}\nhint: the path is seen from the current folder", cinch_files::shown(&path))]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{} has no config.json\nhint: a folder stands for the model that is saved in it", cinch_files::shown(&path))]
    NoConfig { path: PathBuf },
    #[error("{}: {problem}\nhint: the config.json of a Hugging Face model is one JSON object", cinch_files::shown(&path))]
    NotJson { path: PathBuf, problem: String },
    #[error("{origin}: {key} is {value}, and should be {wanted}")]
    Field {
        /// The file, or what stands for it.
        origin: String,
        key: String,
        value: String,
        wanted: String,
    },
    #[error(
        "{title} is of the family {family}, which is known by name only: it can be neither trained nor predicted yet\nhint: record a run of it with `cinch trace --script`, and explain the recording with `cinch plan --snapshot FILE`; `cinch models` lists what can be predicted"
    )]
    KnownByName { title: String, family: String },
    #[error(
        "no model is known by the name {name}{}\nhint: give the path of its config.json (--model path/to/config.json), or record a run with `cinch trace --script`; `cinch models` lists the known names",
        suggestion.as_ref().map_or_else(String::new, |name| format!("; did you mean {name}?"))
    )]
    UnknownModel {
        name: String,
        suggestion: Option<String>,
    },
}

impl ArchitectureError {
    /// The same error, said of a file or a name.
    pub(crate) fn of(self, place: impl Into<String>) -> ArchitectureError {
        match self {
            ArchitectureError::Field {
                key, value, wanted, ..
            } => ArchitectureError::Field {
                origin: place.into(),
                key,
                value,
                wanted,
            },
            other => other,
        }
    }
}
