//! Config files: reading one from disk, taking over its settings, and
//! recognising which model it was written for.

use std::path::{Path, PathBuf};

use crate::dialect::{Naming, foreign_section};
use crate::document::{Document, Entry, Position, Scalar};
use crate::registry;
use crate::setting::{Meaning, Setting};
use crate::settings::{Settings, interpret, keys_of, unknown_key, wrong_value};
use crate::source::{Layer, Source};
use crate::spelling::Dialect;
use crate::value::Value;
use crate::{ConfigError, ModelKind};

/// What is remembered of a file besides its values.
#[derive(Clone, Debug)]
pub(crate) struct ConfigFile {
    pub path: PathBuf,
    /// Empty for files of other programs, which leave out most of our keys.
    pub sections: Vec<String>,
    pub model: Option<FileModel>,
    /// The other program's way of naming settings, and its keys that stand for
    /// none of ours.
    pub dialect: Option<&'static str>,
    pub ignored: Vec<String>,
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

    /// Reads a config from text; `path` names it in messages and, by its
    /// extension, the format.
    pub fn load_text(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        self.load_document(&Document::read(path, text)?)
    }

    /// Takes over what a reader found. On an error nothing has changed.
    pub fn load_document(&mut self, document: &Document) -> Result<(), ConfigError> {
        let mut loaded = self.clone();
        let file = match Naming::of(document) {
            Naming::Own => loaded.load_own(document)?,
            Naming::Foreign(dialect) => loaded.load_foreign(document, dialect)?,
        };
        loaded.files.push(file);
        *self = loaded;
        Ok(())
    }

    fn load_own(&mut self, document: &Document) -> Result<ConfigFile, ConfigError> {
        for entry in &document.entries {
            self.load_entry(document, entry)?;
        }
        let model = native_model(document);
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
            self.push("model.type", Layer::File, name, source);
        }
        Ok(ConfigFile {
            path: document.path.clone(),
            sections: document.sections.clone(),
            model,
            dialect: None,
            ignored: Vec::new(),
        })
    }

    /// Takes over what another program's file says about training. If it is for
    /// a model we do not have, its shape and data are none of ours.
    fn load_foreign(
        &mut self,
        document: &Document,
        dialect: &'static Dialect,
    ) -> Result<ConfigFile, ConfigError> {
        let naming = Naming::Foreign(dialect);
        let model = foreign_model(document);
        let mut ignored = Vec::new();
        let mut known: Vec<(&Entry, &'static Setting, Meaning)> = Vec::new();
        for entry in &document.entries {
            let found = naming.find(&entry.path).filter(|(setting, _)| {
                model.is_none() || matches!(setting.section(), "vram" | "training")
            });
            match found {
                _ if unset(&entry.scalar) => {}
                Some((setting, meaning)) if understood(&entry.scalar, meaning) => {
                    known.push((entry, setting, meaning));
                }
                _ => ignored.push(entry.key()),
            }
        }
        for (index, (entry, setting, meaning)) in known.iter().enumerate() {
            if let Some((earlier, ..)) = known[..index]
                .iter()
                .find(|(earlier, ..)| earlier.path == entry.path)
            {
                return Err(ConfigError::DuplicateKey {
                    path: document.path.clone(),
                    key: entry.key(),
                    first_line: earlier.name_at.line,
                    line: entry.name_at.line,
                });
            }
            // `bf16: false` beside `fp16: true` only says "not this one".
            let outspoken = known.iter().any(|(other, same, meaning)| {
                same.key == setting.key && !switched_off(&other.scalar, *meaning)
            });
            if !(switched_off(&entry.scalar, *meaning) && outspoken) {
                self.load_value(document, entry, setting, *meaning)?;
            }
        }
        Ok(ConfigFile {
            path: document.path.clone(),
            sections: Vec::new(),
            model,
            dialect: Some(dialect.name),
            ignored,
        })
    }

    fn load_entry(&mut self, document: &Document, entry: &Entry) -> Result<(), ConfigError> {
        let key = entry.key();
        let Some((setting, meaning)) = registry::find(&key) else {
            if registry::sections().contains(&key.as_str()) {
                // YAML's `vram:` with every key below it commented out.
                if entry.scalar == Scalar::Null {
                    return Ok(());
                }
                return Err(ConfigError::WrongValue {
                    origin: Box::new(source_at(document, entry.value_at)),
                    accepted: format!("a section, {{…}}, with the keys {}", keys_of(&key)),
                    key,
                    found: entry.scalar.to_string(),
                    hint: None,
                });
            }
            return Err(unknown_key(&key, source_at(document, entry.name_at)));
        };
        self.load_value(document, entry, setting, meaning)
    }

    fn load_value(
        &mut self,
        document: &Document,
        entry: &Entry,
        setting: &'static Setting,
        meaning: Meaning,
    ) -> Result<(), ConfigError> {
        // null stands for "not given", as programs write out unset values.
        if entry.scalar == Scalar::Null {
            return Ok(());
        }
        let key = entry.key();
        let source = source_at(document, entry.value_at);
        let scalar = match (meaning, word(&entry.scalar)) {
            (Meaning::Words(_), Some(word)) => Scalar::Text(word),
            _ => entry.scalar.clone(),
        };
        let value = interpret(setting, meaning, |kind| kind.read(&scalar));
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

fn source_at(document: &Document, at: Position) -> Source {
    Source::File {
        path: document.path.clone(),
        line: at.line,
        column: at.column,
    }
}

/// A word as another program would read it: `precision: 16` is the word `16`.
pub(crate) fn word(scalar: &Scalar) -> Option<String> {
    match scalar {
        Scalar::Text(text) | Scalar::Number(text) => Some(text.clone()),
        // YAML reads accelerate's `no` as a switch.
        Scalar::Bool(false) => Some("no".to_owned()),
        _ => None,
    }
}

/// Whether we can say what a foreign value means: words we know, and anything
/// that is not computed.
fn understood(scalar: &Scalar, meaning: Meaning) -> bool {
    match (meaning, word(scalar)) {
        (Meaning::Words(words), Some(word)) => words
            .iter()
            .any(|(known, _)| known.eq_ignore_ascii_case(&word)),
        _ => !matches!(scalar, Scalar::Composite(_)),
    }
}

/// Other programs write -1 where a count is not set.
fn unset(scalar: &Scalar) -> bool {
    matches!(scalar, Scalar::Null) || *scalar == Scalar::Number("-1".to_owned())
}

fn switched_off(scalar: &Scalar, meaning: Meaning) -> bool {
    matches!(
        (meaning, scalar),
        (Meaning::Switch { .. }, Scalar::Bool(false))
    )
}

/// The other system a file is written for, by a section only that system has.
fn foreign_model(document: &Document) -> Option<FileModel> {
    let (section, name) = foreign_section(document)?;
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

pub(crate) fn read_text(path: &Path) -> Result<String, ConfigError> {
    if path.is_dir() {
        return Err(ConfigError::IsFolder {
            path: path.to_owned(),
        });
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
    String::from_utf8(bytes).map_err(|error| ConfigError::NotUtf8 {
        path: path.to_owned(),
        offset: error.utf8_error().valid_up_to(),
    })
}
