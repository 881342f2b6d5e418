//! The layers: per setting, every value that was given, by whom, and which one
//! holds.
//!
//! Values are checked against their type and range as they come in, so that an
//! error can point at the place; rules between settings wait for
//! [`Settings::resolve`], when all layers are there.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::ModelKind;
use crate::error::{ConfigError, Given};
use crate::file::ConfigFile;
use crate::nearest::nearest_key;
use crate::preset::Preset;
use crate::registry::{self, SETTINGS};
use crate::setting::{Meaning, Setting};
use crate::source::{Layer, Source};
use crate::value::{Kind, Refusal, Value};

/// Everything the user asked for, with its origins.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Per key, weakest first: the last one holds.
    assignments: BTreeMap<&'static str, Vec<Assignment>>,
    pub(crate) files: Vec<ConfigFile>,
}

#[derive(Clone, Debug)]
pub(crate) struct Assignment {
    pub layer: Layer,
    pub value: Value,
    pub source: Source,
    /// The key or alias that was written.
    spelled: String,
}

/// One setting's value, where it came from, and what it outweighed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explained {
    pub key: &'static str,
    pub value: Value,
    pub source: Source,
    /// Strongest first.
    pub overridden: Vec<Overridden>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overridden {
    pub value: Value,
    pub source: Source,
}

impl Default for Settings {
    fn default() -> Self {
        Self::new()
    }
}

impl Settings {
    /// Only defaults.
    pub fn new() -> Self {
        let mut settings = Settings {
            assignments: BTreeMap::new(),
            files: Vec::new(),
        };
        for setting in SETTINGS {
            // Defaults are checked against their types by a test of the registry.
            if let Some(value) = setting
                .default
                .and_then(|text| setting.kind.parse(text).ok())
            {
                settings.push(setting.key, Layer::Default, value, Source::Default);
            }
        }
        settings
    }

    /// Gives one setting a value, as text. The source decides its weight.
    pub fn set(&mut self, key: &str, text: &str, source: Source) -> Result<(), ConfigError> {
        let (setting, value) = parse(key, text, &source)?;
        self.assign(setting, key, value, source)
    }

    /// Applies a preset; it outweighs defaults and nothing else.
    pub fn apply_preset(&mut self, preset: Preset) -> Result<(), ConfigError> {
        for (key, value) in preset.values() {
            self.set(key, &value, Source::Preset(preset.title()))?;
        }
        Ok(())
    }

    /// Adds a value that a user or preset gave.
    pub(crate) fn assign(
        &mut self,
        setting: &'static Setting,
        spelled: &str,
        value: Value,
        source: Source,
    ) -> Result<(), ConfigError> {
        let layer = source.layer();
        let rival = self.assignments.get(setting.key).and_then(|given| {
            given
                .iter()
                .rev()
                .find(|earlier| earlier.value != value && contradicts(earlier, spelled, &source))
        });
        if let Some(rival) = rival {
            return Err(ConfigError::Disagreement {
                first: Box::new(Given {
                    key: rival.spelled.clone(),
                    value: rival.value.clone(),
                    source: rival.source.clone(),
                }),
                second: Box::new(Given {
                    key: spelled.to_owned(),
                    value,
                    source,
                }),
            });
        }
        self.insert(setting.key, layer, value, source, spelled);
        Ok(())
    }

    /// Adds a value that a rule supplies, at a layer of its choosing.
    pub(crate) fn push(&mut self, key: &'static str, layer: Layer, value: Value, source: Source) {
        self.insert(key, layer, value, source, key);
    }

    fn insert(
        &mut self,
        key: &'static str,
        layer: Layer,
        value: Value,
        source: Source,
        spelled: &str,
    ) {
        let given = self.assignments.entry(key).or_default();
        let index = given.partition_point(|earlier| earlier.layer <= layer);
        let spelled = spelled.to_owned();
        given.insert(
            index,
            Assignment {
                layer,
                value,
                source,
                spelled,
            },
        );
    }

    /// The value that holds, if there is one yet.
    pub(crate) fn effective(&self, key: &str) -> Option<&Assignment> {
        self.assignments.get(key).and_then(|given| given.last())
    }

    /// The strongest value below `layer`.
    pub(crate) fn effective_below(&self, key: &str, layer: Layer) -> Option<&Assignment> {
        let given = self.assignments.get(key)?;
        given.iter().rev().find(|earlier| earlier.layer < layer)
    }

    /// Whether the user stated this key, in a file, the environment or a flag.
    pub fn is_explicit(&self, key: &str) -> bool {
        self.assignments
            .get(key)
            .is_some_and(|given| given.iter().any(|one| one.layer.is_explicit()))
    }

    pub(crate) fn listing(&self, model: Option<ModelKind>) -> Vec<Explained> {
        let relevant = |setting: &&Setting| model.is_none_or(|model| setting.belongs_to(model));
        SETTINGS
            .iter()
            .filter(relevant)
            .filter_map(|setting| {
                let mut given = self.assignments.get(setting.key)?.iter().rev();
                let holds = given.next()?;
                Some(Explained {
                    key: setting.key,
                    value: holds.value.clone(),
                    source: holds.source.clone(),
                    overridden: given
                        .map(|weaker| Overridden {
                            value: weaker.value.clone(),
                            source: weaker.source.clone(),
                        })
                        .collect(),
                })
            })
            .collect()
    }
}

/// Two values of equal weight contradict each other when one file gives both,
/// or when they go by different names; the same flag given twice is a change
/// of mind, and a second file is meant to override the first.
fn contradicts(earlier: &Assignment, spelled: &str, source: &Source) -> bool {
    match (&earlier.source, source) {
        (Source::File { path: first, .. }, Source::File { path: second, .. }) => first == second,
        (Source::Environment(_), Source::Environment(_)) | (Source::Flag(_), Source::Flag(_)) => {
            earlier.spelled != spelled
        }
        _ => false,
    }
}

/// A setting and its value, from a word on a command line or in a variable.
pub(crate) fn parse(
    key: &str,
    text: &str,
    source: &Source,
) -> Result<(&'static Setting, Value), ConfigError> {
    let Some((setting, meaning)) = registry::find(key) else {
        return Err(unknown_key(key, source.clone()));
    };
    let value = interpret(setting, meaning, |kind| kind.parse(text));
    let value = value.map_err(|(kind, refusal)| {
        wrong_value(key, text.to_owned(), kind, refusal, source.clone())
    })?;
    Ok((setting, value))
}

/// Reads a value through an alias's meaning; on refusal also tells the type
/// that was expected under that name.
pub(crate) fn interpret(
    setting: &Setting,
    meaning: Meaning,
    read: impl Fn(&Kind) -> Result<Value, Refusal>,
) -> Result<Value, (Kind, Refusal)> {
    let kind = match meaning {
        Meaning::Same => setting.kind,
        Meaning::Switch { .. } => Kind::Bool,
        Meaning::Words(_) => Kind::Text,
    };
    let value = read(&kind).map_err(|refusal| (kind, refusal))?;
    match (meaning, value) {
        (Meaning::Switch { on, off }, Value::Bool(flipped)) => setting
            .kind
            .parse(if flipped { on } else { off })
            .map_err(|refusal| (setting.kind, refusal)),
        (Meaning::Words(words), Value::Text(text)) => {
            let own = words
                .iter()
                .find(|(word, _)| word.eq_ignore_ascii_case(&text))
                .map_or(text.as_str(), |(_, own)| own);
            setting
                .kind
                .parse(own)
                .map_err(|refusal| (setting.kind, refusal))
        }
        (_, value) => Ok(value),
    }
}

pub(crate) fn wrong_value(
    key: &str,
    found: String,
    kind: Kind,
    refusal: Refusal,
    origin: Source,
) -> ConfigError {
    ConfigError::WrongValue {
        origin: Box::new(origin),
        key: key.to_owned(),
        found,
        accepted: kind.accepts(),
        hint: refusal.hint,
    }
}

pub(crate) fn unknown_key(key: &str, origin: Source) -> ConfigError {
    let section = key.split('.').next().unwrap_or(key);
    let known = if registry::sections().contains(&section) {
        format!("the keys of `{section}` are {}", keys_of(section))
    } else {
        format!("the sections are {}", registry::sections().join(", "))
    };
    ConfigError::UnknownKey {
        key: key.to_owned(),
        origin: Box::new(origin),
        suggestion: nearest_key(key, registry::keys()).map(str::to_owned),
        known,
    }
}

pub(crate) fn keys_of(section: &str) -> String {
    let keys: Vec<&str> = SETTINGS
        .iter()
        .filter(|setting| setting.section() == section)
        .map(|setting| &setting.key[section.len() + 1..])
        .collect();
    keys.join(", ")
}
