//! Finds where a setting stands in the user's files and how it is said there,
//! or where it belongs if it does not stand anywhere yet.

use std::path::{Path, PathBuf};

use crate::dialect::Naming;
use crate::document::{Document, Entry, Scalar};
use crate::edit::Edit;
use crate::error::ConfigError;
use crate::expression::{Expression, express, scalar};
use crate::format::Format;
use crate::outline::KeyPath;
use crate::registry;
use crate::setting::{Meaning, Setting};
use crate::settings;
use crate::source::Source;
use crate::value::Value;

/// A value to write: a setting by its key, or any other key of the files by its
/// path, such as a curriculum stage's `n_negatives`.
#[derive(Clone, Debug, PartialEq)]
pub struct FileChange {
    pub key: String,
    pub value: Value,
    /// The file to write it in, where several have the key.
    pub file: Option<PathBuf>,
}

impl FileChange {
    pub fn new(key: impl Into<String>, value: Value) -> FileChange {
        FileChange {
            key: key.into(),
            value,
            file: None,
        }
    }

    /// The value of a setting as a user would write it.
    pub fn parse(key: &str, text: &str) -> Result<FileChange, ConfigError> {
        let source = Source::Flag("--set".to_owned());
        Ok(FileChange::new(key, settings::parse(key, text, &source)?.1))
    }

    pub fn in_file(mut self, path: impl Into<PathBuf>) -> FileChange {
        self.file = Some(path.into());
        self
    }
}

/// A file as places are looked for in it.
pub(crate) struct Candidate<'a> {
    /// As the user named it.
    pub path: &'a Path,
    pub document: Document,
    pub naming: Naming,
}

/// What is to be done about a change.
pub(crate) enum Placement {
    /// Edits of the candidate with this index, and what should be known of them.
    Edits {
        file: usize,
        edits: Vec<Edit>,
        remark: Option<String>,
    },
    /// The files say so already, without a word.
    Implied,
    Nowhere(String),
}

pub(crate) fn place(
    candidates: &[Candidate<'_>],
    change: &FileChange,
    add_keys: bool,
) -> Result<Placement, ConfigError> {
    let wanted: Vec<usize> = (0..candidates.len())
        .filter(|index| {
            let file = change.file.as_deref();
            file.is_none_or(|file| names_the_same(file, candidates[*index].path))
        })
        .collect();
    let Some((setting, _)) = registry::find(&change.key) else {
        return place_path(candidates, &wanted, change);
    };
    // Of several files the last one holds.
    let found = wanted.iter().rev().find_map(|index| {
        let entries = said(&candidates[*index], setting);
        (!entries.is_empty()).then_some((*index, entries))
    });
    match found {
        Some((index, entries)) => Ok(rewrite(
            &candidates[index],
            index,
            setting,
            &entries,
            &change.value,
        )),
        None => Ok(add(candidates, &wanted, setting, &change.value, add_keys)),
    }
}

fn names_the_same(wanted: &Path, path: &Path) -> bool {
    wanted == path || path.ends_with(wanted)
}

/// A key that is no setting: it must stand in exactly one file.
fn place_path(
    candidates: &[Candidate<'_>],
    wanted: &[usize],
    change: &FileChange,
) -> Result<Placement, ConfigError> {
    let holds = |index: &&usize| {
        let entries = &candidates[**index].document.entries;
        entries.iter().any(|entry| entry.key() == change.key)
    };
    let files: Vec<usize> = wanted.iter().filter(holds).copied().collect();
    let [file] = files.as_slice() else {
        return match files.as_slice() {
            [first, second, ..] => Err(ConfigError::SeveralPlaces {
                key: change.key.clone(),
                first: candidates[*first].path.to_owned(),
                second: candidates[*second].path.to_owned(),
            }),
            _ => Ok(Placement::Nowhere(
                "it stands in none of the files".to_owned(),
            )),
        };
    };
    let entries = &candidates[*file].document.entries;
    let edits = entries
        .iter()
        .filter(|entry| entry.key() == change.key)
        .take(1)
        .map(|entry| set(&entry.path, scalar(&change.value)))
        .collect();
    Ok(Placement::Edits {
        file: *file,
        edits,
        remark: None,
    })
}

/// The entries that say a setting: the literal ones, or else computed ones.
fn said<'a>(candidate: &'a Candidate<'_>, setting: &Setting) -> Vec<(&'a Entry, Meaning)> {
    let all: Vec<(&Entry, Meaning)> = candidate
        .document
        .entries
        .iter()
        .filter_map(|entry| {
            let (found, meaning) = candidate.naming.find(&entry.path)?;
            (found.key == setting.key).then_some((entry, meaning))
        })
        .collect();
    let literal: Vec<(&Entry, Meaning)> = all
        .iter()
        .filter(|(entry, _)| !entry.scalar.is_composite())
        .copied()
        .collect();
    if literal.is_empty() { all } else { literal }
}

fn set(path: &KeyPath, value: Scalar) -> Edit {
    Edit {
        path: path.clone(),
        value,
        rename: None,
        after: None,
    }
}

/// Says a setting anew where it is said already, under every name it has there.
fn rewrite(
    candidate: &Candidate<'_>,
    file: usize,
    setting: &Setting,
    entries: &[(&Entry, Meaning)],
    value: &Value,
) -> Placement {
    let mut edits = Vec::new();
    let mut remark = None;
    let mut said = false;
    for (entry, meaning) in entries {
        let own = matches!(candidate.naming, Naming::Own);
        let expression = express(*meaning, value, Some(&entry.scalar))
            .filter(|expression| !own || matches!(expression, Expression::Exact(_)));
        match expression {
            Some(expression) => {
                // A switch that is off for another reason leaves it unsaid.
                said |= !matches!(expression, Expression::NotThis);
                remark = remark.or(expression.remark(&entry.key(), value));
                edits.push(set(&entry.path, expression.scalar()));
            }
            // Our own files have a key that says it all.
            None if own => {
                let name = setting.key.rsplit('.').next().unwrap_or(setting.key);
                edits.push(Edit {
                    rename: Some(name.to_owned()),
                    ..set(&entry.path, scalar(value))
                });
                said = true;
            }
            None => {}
        }
    }
    if said {
        return Placement::Edits {
            file,
            edits,
            remark,
        };
    }
    // All switches are off now; the one that says it is missing.
    match entries.first().and_then(|(neighbour, _)| {
        beside(candidate, setting, value, neighbour).filter(|_| !edits.is_empty())
    }) {
        Some((edit, _)) => {
            edits.push(edit);
            Placement::Edits {
                file,
                edits,
                remark,
            }
        }
        None => Placement::Nowhere(format!(
            "{} has no way to say {value}",
            candidate.path.display()
        )),
    }
}

/// A setting that no file says yet.
fn add(
    candidates: &[Candidate<'_>],
    wanted: &[usize],
    setting: &Setting,
    value: &Value,
    add_keys: bool,
) -> Placement {
    let own: Vec<usize> = wanted
        .iter()
        .copied()
        .filter(|index| matches!(candidates[*index].naming, Naming::Own))
        .collect();
    let with_section = own.iter().find(|index| {
        let sections = &candidates[**index].document.sections;
        sections.iter().any(|name| name == setting.section())
    });
    if let Some(file) = with_section.or(own.first()) {
        let path: KeyPath = setting.key.split('.').map(str::to_owned).collect();
        return Placement::Edits {
            file: *file,
            edits: vec![set(&path, scalar(value))],
            remark: None,
        };
    }
    for file in wanted {
        let candidate = &candidates[*file];
        let Some(neighbour) = neighbour(candidate) else {
            continue;
        };
        // Where there is a switch, leaving it out means off.
        let implied = candidate.naming.spellings(setting.key).any(|(_, meaning)| {
            matches!(meaning, Meaning::Switch { off, .. } | Meaning::SwitchOr { off, .. }
                if off == value.to_string())
        });
        if implied {
            return Placement::Implied;
        }
        if candidate.document.format == Format::Shell {
            return Placement::Nowhere(
                "a flag that the command does not have yet is added by hand".to_owned(),
            );
        }
        if !add_keys && !candidate.naming.adds_keys() {
            return Placement::Nowhere(
                "the file has no such key, and its program may not read one: --add-keys writes it all the same".to_owned(),
            );
        }
        if let Some((edit, remark)) = beside(candidate, setting, value, neighbour) {
            return Placement::Edits {
                file: *file,
                edits: vec![edit],
                remark,
            };
        }
    }
    Placement::Nowhere("the program these files are for has no name for it".to_owned())
}

/// The entry whose company a new key should have: one about memory, as what is
/// written usually is, or else any setting.
fn neighbour<'a>(candidate: &'a Candidate<'_>) -> Option<&'a Entry> {
    let literal = |entry: &&Entry| !entry.scalar.is_composite();
    let entries = || candidate.document.entries.iter().filter(literal);
    let about = |entry: &&Entry, section: &str| {
        let found = candidate.naming.find(&entry.path);
        found.is_some_and(|(setting, _)| setting.section() == section)
    };
    entries()
        .find(|entry| about(entry, "vram"))
        .or_else(|| entries().find(|entry| about(entry, "training")))
}

/// The edit that says `value` under a new key, with what should be known of it.
fn beside(
    candidate: &Candidate<'_>,
    setting: &Setting,
    value: &Value,
    neighbour: &Entry,
) -> Option<(Edit, Option<String>)> {
    let (name, expression) =
        candidate
            .naming
            .spellings(setting.key)
            .find_map(|(name, meaning)| {
                let expression = express(meaning, value, None)?;
                let says = !matches!(expression, Expression::NotThis)
                    && expression.scalar() != Scalar::Bool(false);
                says.then_some((name, expression))
            })?;
    let dotted = name.contains('.');
    if dotted && candidate.document.format == Format::Python {
        return None;
    }
    let leaf = neighbour.path.last()?;
    let shouted = leaf.chars().any(char::is_uppercase) && !leaf.chars().any(char::is_lowercase);
    let path: KeyPath = if dotted {
        name.split('.').map(str::to_owned).collect()
    } else {
        let mut path = neighbour.path.clone();
        path.pop();
        path.push(if shouted {
            name.to_uppercase()
        } else {
            name.to_owned()
        });
        path
    };
    let remark = expression.remark(&path.join("."), value);
    let edit = Edit {
        after: (!dotted).then(|| neighbour.path.clone()),
        ..set(&path, expression.scalar())
    };
    Some((edit, remark))
}
