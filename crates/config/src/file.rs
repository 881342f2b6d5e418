//! Config files: reading one from disk, taking over its settings, and
//! recognising which model it was written for.

use std::path::{Path, PathBuf};

use crate::document::{Document, Entry, Position, Scalar};
use crate::json::read_json;
use crate::registry::{self, FOREIGN_SECTIONS};
use crate::settings::{Settings, interpret, keys_of, unknown_key, wrong_value};
use crate::source::{Layer, Source};
use crate::value::Value;
use crate::{ConfigError, ModelKind};

/// What is remembered of a file besides its values.
#[derive(Clone, Debug)]
pub(crate) struct ConfigFile {
    pub path: PathBuf,
    pub sections: Vec<String>,
    pub model: Option<FileModel>,
}

/// The model a file is written for, and how that was recognised.
#[derive(Clone, Debug)]
pub(crate) struct FileModel {
    pub name: String,
    pub evidence: String,
    pub line: usize,
}

impl Settings {
    /// Reads a config file from disk.
    pub fn load_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = read_text(path)?;
        self.load_text(path, &text)
    }

    /// Reads a config from text; `path` names it in messages.
    pub fn load_text(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        self.load_document(&read_json(path, text)?)
    }

    /// Takes over what a reader found. On an error nothing has changed.
    pub fn load_document(&mut self, document: &Document) -> Result<(), ConfigError> {
        let mut loaded = self.clone();
        let foreign = foreign_model(document);
        if foreign.is_none() {
            for entry in &document.entries {
                loaded.load_entry(document, entry)?;
            }
        }
        let model = foreign.or_else(|| native_model(document));
        // A file that never says `model.type` but speaks of heads or states is
        // a config for that model all the same.
        if let Some(model) = &model
            && ModelKind::from_name(&model.name).is_some()
            && model.evidence != "model.type"
        {
            let source = Source::File {
                path: document.path.clone(),
                line: model.line,
                column: 1,
            };
            let name = Value::Text(model.name.clone());
            loaded.push("model.type", Layer::File, name, source);
        }
        loaded.files.push(ConfigFile {
            path: document.path.clone(),
            sections: document.sections.clone(),
            model,
        });
        *self = loaded;
        Ok(())
    }

    fn load_entry(&mut self, document: &Document, entry: &Entry) -> Result<(), ConfigError> {
        let source_at = |at: Position| Source::File {
            path: document.path.clone(),
            line: at.line,
            column: at.column,
        };
        let key = entry.key();
        let Some((setting, meaning)) = registry::find(&key) else {
            if registry::sections().contains(&key.as_str()) {
                return Err(ConfigError::WrongValue {
                    origin: Box::new(source_at(entry.value_at)),
                    accepted: format!("a section, {{…}}, with the keys {}", keys_of(&key)),
                    key,
                    found: entry.scalar.to_string(),
                    hint: None,
                });
            }
            return Err(unknown_key(&key, source_at(entry.name_at)));
        };
        // null stands for "not given", as programs write out unset values.
        if entry.scalar == Scalar::Null {
            return Ok(());
        }
        let source = source_at(entry.value_at);
        let value = interpret(setting, meaning, |kind| kind.read(&entry.scalar));
        let value = value.map_err(|(kind, refusal)| {
            wrong_value(
                &key,
                entry.scalar.to_string(),
                kind,
                refusal,
                source.clone(),
            )
        })?;
        self.assign(setting, &key, value, source)
    }
}

/// The other system a file is written for, by a section only that system has.
fn foreign_model(document: &Document) -> Option<FileModel> {
    let (section, name) = FOREIGN_SECTIONS
        .into_iter()
        .find(|(section, _)| document.sections.iter().any(|one| one == section))?;
    let line = document
        .entries
        .iter()
        .find(|entry| entry.path[0] == section)
        .map_or(1, |entry| entry.name_at.line);
    Some(FileModel {
        name: name.to_owned(),
        evidence: section.to_owned(),
        line,
    })
}

/// The model a file names, or else the only one all of whose keys it can be.
fn native_model(document: &Document) -> Option<FileModel> {
    let mut peculiar: Vec<(ModelKind, &Entry)> = Vec::new();
    for entry in document
        .entries
        .iter()
        .filter(|entry| entry.scalar != Scalar::Null)
    {
        let (setting, _) = registry::find(&entry.key())?;
        if let (true, Scalar::Text(name)) = (setting.key == "model.type", &entry.scalar) {
            return Some(FileModel {
                name: name.trim().to_ascii_lowercase(),
                evidence: "model.type".to_owned(),
                line: entry.name_at.line,
            });
        }
        if let [only] = setting.models {
            peculiar.push((*only, entry));
        }
    }
    let (model, entry) = *peculiar.first()?;
    peculiar
        .iter()
        .all(|(other, _)| *other == model)
        .then(|| FileModel {
            name: model.name().to_owned(),
            evidence: entry.key(),
            line: entry.name_at.line,
        })
}

fn read_text(path: &Path) -> Result<String, ConfigError> {
    let path_owned = path.to_owned();
    let extension = path.extension().and_then(|extension| extension.to_str());
    if path.is_dir() {
        return Err(ConfigError::IsFolder { path: path_owned });
    }
    let bytes = std::fs::read(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => ConfigError::NoSuchFile {
            path: path.to_owned(),
        },
        _ => ConfigError::Unreadable {
            path: path.to_owned(),
            source,
        },
    })?;
    if let Some(extension @ ("yaml" | "yml" | "toml" | "py")) = extension {
        return Err(ConfigError::UnknownFormat {
            path: path_owned,
            extension: extension.to_owned(),
        });
    }
    String::from_utf8(bytes).map_err(|error| ConfigError::NotUtf8 {
        path: path_owned,
        offset: error.utf8_error().valid_up_to(),
    })
}
