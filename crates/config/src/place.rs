//! Finds where a setting stands in the user's files and how it is said there,
//! or where it belongs if it does not stand anywhere yet.

use std::path::{Path, PathBuf};

use crate::dialect::scalar::is_auto;
use crate::dialect::{ACCUMULATION, BATCH, CHECKPOINTING, Naming, plain_name};
use crate::document::{Document, Entry, Scalar};
use crate::edit::Edit;
use crate::error::ConfigError;
use crate::expression::{Expression, express, scalar};
use crate::format::Format;
use crate::literal::is_same;
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
    /// Named by another file.
    pub is_linked: bool,
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
    let left_open = wanted
        .iter()
        .find_map(|index| left_open(&candidates[*index], setting));
    match found {
        None if left_open.is_some() => Ok(Placement::Nowhere(format!(
            "`{}` is auto: it follows what the program is given elsewhere",
            left_open.unwrap_or_default()
        ))),
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

/// The other files of the same run that state what the changed one did, in their own terms: the
/// edits that keep them true, and a remark for a file that stated something else. A file that the
/// changed one names must agree with it.
pub(crate) fn echo(
    candidates: &[Candidate<'_>],
    changed: usize,
    change: &FileChange,
) -> Result<Vec<Placement>, ConfigError> {
    let Some((setting, _)) = registry::find(&change.key) else {
        return Ok(Vec::new());
    };
    let value_in = |index: usize| {
        let entries = said(&candidates[index], setting);
        entries.first().map(|(entry, _)| entry.scalar.clone())
    };
    let Some(old) = value_in(changed) else {
        return Ok(Vec::new());
    };
    let mut placements = Vec::new();
    for (index, candidate) in candidates.iter().enumerate() {
        let other = candidate.naming.name() != candidates[changed].naming.name();
        let foreign = matches!(candidate.naming, Naming::Foreign(_));
        if index == changed || !other || !foreign {
            continue;
        }
        let entries = said(candidate, setting);
        match entries.first() {
            Some((entry, _)) if is_same(&entry.scalar, &old) => {
                placements.push(rewrite(candidate, index, setting, &entries, &change.value));
            }
            Some((entry, _)) if !entry.scalar.is_composite() => {
                let other = candidates[changed].path.display();
                let differs = format!("it is {}, not {old} as in {other}", entry.scalar);
                if candidate.is_linked {
                    return Err(ConfigError::EditRefused {
                        path: candidate.path.to_owned(),
                        key: entry.key(),
                        value: change.value.to_string(),
                        problem: differs,
                    });
                }
                placements.push(Placement::Nowhere(format!(
                    "`{}` in {} is left as it is: {differs}",
                    entry.key(),
                    candidate.path.display(),
                )));
            }
            _ => {}
        }
    }
    Ok(placements)
}

/// The key of a setting that a file leaves to its program.
fn left_open(candidate: &Candidate<'_>, setting: &Setting) -> Option<String> {
    let mut entries = candidate.document.entries.iter();
    entries.find_map(|entry| {
        let (found, meaning) = candidate.naming.find(&entry.path)?;
        (found.key == setting.key && is_left_open(candidate, entry, meaning)).then(|| entry.key())
    })
}

fn is_left_open(candidate: &Candidate<'_>, entry: &Entry, meaning: Meaning) -> bool {
    let foreign = matches!(candidate.naming, Naming::Foreign(_));
    foreign && matches!(meaning, Meaning::Same) && is_auto(&entry.scalar)
}

/// The entries that say a setting: the literal ones, or else computed ones.
fn said<'a>(candidate: &'a Candidate<'_>, setting: &Setting) -> Vec<(&'a Entry, Meaning)> {
    let all: Vec<(&Entry, Meaning)> = candidate
        .document
        .entries
        .iter()
        .filter_map(|entry| {
            let (found, meaning) = candidate.naming.find(&entry.path)?;
            (found.key == setting.key && !is_left_open(candidate, entry, meaning))
                .then_some((entry, meaning))
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
        .filter(|index| is_ours(&candidates[*index]))
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
    let unknown = |index: &usize| matches!(candidates[*index].naming, Naming::Own);
    let mut reason = match wanted.iter().any(unknown) {
        true => "the file is of no program that is known here",
        false => "the program these files are for has no name for it",
    };
    for file in wanted {
        let candidate = &candidates[*file];
        let named = candidate.naming.spellings(setting.key).next().is_some();
        let Some(neighbour) = neighbour(candidate).filter(|_| named) else {
            continue;
        };
        if is_implied(candidate, setting, value) {
            return Placement::Implied;
        }
        if candidate.document.format == Format::Shell {
            reason = "a flag that the command does not have yet is added by hand";
            continue;
        }
        if !add_keys && !candidate.naming.adds_keys() {
            reason = "the file has no such key, and its program may not read one: --add-keys writes it all the same";
            continue;
        }
        if let Some((edit, remark)) = beside(candidate, setting, value, neighbour) {
            return Placement::Edits {
                file: *file,
                edits: vec![edit],
                remark,
            };
        }
    }
    Placement::Nowhere(reason.to_owned())
}

/// Whether a file is cinch's own, or could become it: it has a section of ours, or nothing.
fn is_ours(candidate: &Candidate<'_>) -> bool {
    let sections = &candidate.document.sections;
    let known = |name: &String| registry::sections().contains(&name.as_str());
    matches!(candidate.naming, Naming::Own) && (sections.is_empty() || sections.iter().any(known))
}

/// Whether a file says a value by leaving its key out: what the program takes by default, or else
/// the off of a switch.
fn is_implied(candidate: &Candidate<'_>, setting: &Setting, value: &Value) -> bool {
    if let Some(default) = candidate.naming.default(setting.key) {
        // Only all blocks or none can be said there.
        let some_blocks = matches!(value, Value::Unsigned(1..)) && setting.key == CHECKPOINTING;
        return default == value.to_string() || (default == "full" && some_blocks);
    }
    candidate.naming.spellings(setting.key).any(|(_, meaning)| {
        matches!(meaning, Meaning::Switch { off, .. } | Meaning::SwitchOr { off, .. }
            if off == value.to_string())
    })
}

/// The entry whose company a new key should have: the batch, as what is written
/// usually belongs to it, or else one about memory, about training, or any at the top.
fn neighbour<'a>(candidate: &'a Candidate<'_>) -> Option<&'a Entry> {
    let python = candidate.document.format == Format::Python;
    let adds = candidate.naming.adds_keys();
    // A constant of a program that reads arguments is one that nobody asked for: a new argument
    // goes where the others are given.
    let among_arguments = |entry: &&Entry| {
        let plain = plain_name(&entry.path);
        let section = plain.rsplit_once('.').map_or("", |(section, _)| section);
        !python || !adds || (entry.path.len() > 1 && !matches!(section, "model" | "sft_trainer"))
    };
    let literal = |entry: &&Entry| !entry.scalar.is_composite() && among_arguments(entry);
    let entries = || candidate.document.entries.iter().filter(literal);
    let setting = |entry: &&Entry| candidate.naming.find(&entry.path).map(|(one, _)| one);
    let says = |key: &str| {
        let mut entries = entries();
        entries.find(|entry| setting(entry).is_some_and(|one| one.key == key))
    };
    let about = |section: &str| {
        let mut entries = entries();
        entries.find(|entry| setting(entry).is_some_and(|one| one.section() == section))
    };
    let at_the_top = || {
        let known = |entry: &&Entry| match candidate.naming {
            Naming::Own => false,
            Naming::Foreign(dialect) => dialect.rule(&plain_name(&entry.path)).is_some(),
        };
        entries().find(|entry| entry.path.len() == 1 && known(entry))
    };
    says(BATCH)
        .or_else(|| says(ACCUMULATION))
        .or_else(|| about("vram"))
        .or_else(|| about("training"))
        .or_else(at_the_top)
}

/// The edit that says `value` under a new key, with what should be known of it.
fn beside(
    candidate: &Candidate<'_>,
    setting: &Setting,
    value: &Value,
    neighbour: &Entry,
) -> Option<(Edit, Option<String>)> {
    // Off is what a switch is without a word, unless the program takes something else.
    let off_is_news = candidate.naming.default(setting.key).is_some();
    let (name, expression) =
        candidate
            .naming
            .spellings(setting.key)
            .find_map(|(name, meaning)| {
                let expression = express(meaning, value, None)?;
                let says = !matches!(expression, Expression::NotThis)
                    && (off_is_news || expression.scalar() != Scalar::Bool(false));
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
    let together = path[..path.len() - 1] == neighbour.path[..neighbour.path.len() - 1];
    let edit = Edit {
        after: together.then(|| neighbour.path.clone()),
        ..set(&path, expression.scalar())
    };
    Some((edit, remark))
}
