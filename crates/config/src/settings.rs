//! The layers: per setting, every value that was given, by whom, and which one
//! holds.
//!
//! Values are checked against their type and range as they come in, so that an
//! error can point at the place; rules between settings wait for
//! [`Settings::resolve`], when all layers are there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::curriculum::Stage;
use crate::dialect::draft::Reading;
use crate::dialect::{ACCUMULATION, BATCH, NODES, RANKS};
use crate::error::{ConfigError, Given};
use crate::folder::NotRead;
use crate::preset::Preset;
use crate::registry::{self, SETTINGS};
use crate::rules::nearby_ranks;
use crate::setting::{Meaning, Setting};
use crate::source::{Layer, Source};
use crate::value::{Kind, Refusal, Value};
use cinch_architecture::{Family, HubFolders, nearest_key};

/// Everything the user asked for, with its origins.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Per key, weakest first: the last one holds.
    assignments: BTreeMap<&'static str, Vec<Assignment>>,
    pub(crate) files: Vec<Reading>,
    /// Of the files, those that are stages of a curriculum.
    pub(crate) stages: Vec<Stage>,
    /// Which files of a folder were not read, and why.
    pub(crate) not_read: BTreeMap<NotRead, Vec<PathBuf>>,
    /// Where a model that is named may lie.
    pub(crate) hub: HubFolders,
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
            stages: Vec::new(),
            not_read: BTreeMap::new(),
            hub: HubFolders::default(),
        };
        for setting in SETTINGS.iter() {
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

    /// Says where models that are named may lie; without it only the catalogue is known.
    pub fn look_for_models_in(&mut self, folders: HubFolders) {
        self.hub = folders;
    }

    /// Gives one setting a value, as text. The source decides its weight.
    pub fn set(&mut self, key: &str, text: &str, source: Source) -> Result<(), ConfigError> {
        let (setting, value) = parse(key, text, &source)?;
        self.assign(setting, key, value, source)
    }

    /// The same for a path, which need not be text. Only settings that are paths take one.
    pub fn set_path(&mut self, key: &str, path: &Path, source: Source) -> Result<(), ConfigError> {
        match (registry::find(key), path.to_str()) {
            (Some((setting, Meaning::Same)), None) if matches!(setting.kind, Kind::Path) => {
                self.assign(setting, key, Value::Path(path.to_owned()), source)
            }
            (_, Some(text)) => self.set(key, text, source),
            (_, None) => Err(ConfigError::WrongValue {
                origin: Box::new(source),
                key: key.to_owned(),
                found: cinch_files::shown(path).to_string(),
                accepted: "UTF-8 text".to_owned(),
                hint: None,
            }),
        }
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

    /// Lets so many ranks do what was stated for another number of them: with as many more or
    /// fewer micro batches, so that the global batch is the same. A typed micro batch keeps it
    /// too, and a typed accumulation is taken as it is. Where no number was stated, what was stated
    /// of a batch is each rank's. Returns the number of ranks that were stated, if it is another.
    pub fn on_ranks(&mut self, ranks: u64) -> Result<Option<u64>, ConfigError> {
        let number = |given: Option<&Assignment>| match given.map(|given| &given.value) {
            Some(Value::Unsigned(number)) => Some(*number),
            _ => None,
        };
        let stated = number(self.effective(RANKS)).unwrap_or(1);
        let is_stated = self.effective(RANKS).is_some();
        if stated == ranks {
            return Ok(None);
        }
        let source = || Source::Derived(RANKS.to_owned());
        let typed = |key: &str| {
            let given = self.effective(key);
            given.is_some_and(|given| given.layer > Layer::File)
        };
        let is_given = self
            .effective(BATCH)
            .or(self.effective(ACCUMULATION))
            .is_some();
        if is_stated && is_given && !typed(ACCUMULATION) {
            let below = |key: &str| {
                let below = self.effective_below(key, Layer::Environment);
                number(below).unwrap_or(1)
            };
            let whole = below(BATCH)
                .saturating_mul(below(ACCUMULATION))
                .saturating_mul(stated);
            if !whole.is_multiple_of(ranks.max(1)) {
                return Err(ConfigError::WorldSize {
                    ranks,
                    effective: whole,
                    nearby: nearby_ranks(whole, ranks),
                });
            }
            let each = whole / ranks.max(1);
            let micro = number(self.effective(BATCH)).unwrap_or(1).max(1);
            if !each.is_multiple_of(micro) {
                let divides = |micro: &u64| each.is_multiple_of(*micro);
                let below = (1..micro).rev().find(divides);
                let above = (micro + 1..=each).find(divides);
                return Err(ConfigError::GlobalBatch {
                    whole,
                    micro,
                    nearby: nearby(below.into_iter().chain(above), each),
                });
            }
            let steps = Value::Unsigned(each / micro);
            self.push(ACCUMULATION, Layer::Adjusted, steps, source());
        }
        self.push(RANKS, Layer::Adjusted, Value::Unsigned(ranks), source());
        if ranks == 1 {
            self.push(NODES, Layer::Adjusted, Value::Unsigned(1), source());
        }
        Ok(is_stated.then_some(stated))
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

    /// What the program of a file takes for a key where the file is silent.
    pub fn program_says(&self, key: &str) -> Option<&Value> {
        let given = self.assignments.get(key)?;
        let program = given.iter().find(|one| one.layer == Layer::Program);
        program.map(|one| &one.value)
    }

    /// Whether anything above the defaults gives this key a value.
    pub(crate) fn is_stated(&self, key: &str) -> bool {
        self.effective(key)
            .is_some_and(|one| !matches!(one.layer, Layer::Default | Layer::Size))
    }

    /// Reads several files that belong together, such as a folder of stages. Of numbers that the
    /// stages differ in, the one that takes most memory decides.
    pub fn load_files(&mut self, paths: &[PathBuf]) -> Result<(), ConfigError> {
        let first = self.stages.len();
        let mut of_nothing = Vec::new();
        for path in paths {
            if let Some(why) = NotRead::by_name(path, paths) {
                self.not_read.entry(why).or_default().push(path.clone());
                continue;
            }
            match self.load_file(path) {
                Err(error @ ConfigError::NoDialect { .. }) => of_nothing.push((path, error)),
                loaded => loaded?,
            }
        }
        // What lies beside or below a file that was read may be of another program; what is named
        // by itself may not.
        for (path, error) in of_nothing {
            let below = |reading: &Reading| {
                let folder = reading.path.parent();
                folder.is_some_and(|folder| path.starts_with(folder))
            };
            if !self.files.iter().any(below) {
                return Err(error);
            }
            let files = self.not_read.entry(NotRead::OfNothingKnown).or_default();
            files.push(path.clone());
        }
        if self.stages.len() > first {
            let text = serde_json::to_string(&self.stages)?;
            let file = paths.last().cloned().unwrap_or_default();
            let folder = file.parent().map(Path::to_owned).unwrap_or(file);
            let source = Source::File {
                path: folder,
                line: 1,
                column: 1,
            };
            self.push("data.curriculum", Layer::File, Value::Text(text), source);
        }
        for key in ["model.negatives"] {
            let Some(given) = self.assignments.get(key) else {
                continue;
            };
            let stages = given.iter().filter(|one| one.layer == Layer::File);
            let most = stages.max_by_key(|one| match one.value {
                Value::Unsigned(number) => number,
                _ => 0,
            });
            if let (Some(most), Some(last)) = (most.cloned(), given.last())
                && last.layer == Layer::File
                && last.value != most.value
            {
                let assumed = format!(
                    "{key} = {} ({}) decides: of the stages it takes most memory",
                    most.value, most.source
                );
                if let Some(reading) = self.files.last_mut() {
                    reading.assumed.push(assumed);
                }
                self.push("model.negatives", Layer::File, most.value, most.source);
            }
        }
        Ok(())
    }

    pub(crate) fn listing(&self, family: Option<&Family>) -> Vec<Explained> {
        let relevant = |setting: &&Setting| family.is_none_or(|family| setting.belongs_to(family));
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
    let plain = match meaning {
        Meaning::Same => setting.plain_word(text),
        _ => text,
    };
    let value = interpret(setting, meaning, |kind| kind.parse(plain));
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
        Meaning::Switch { .. } | Meaning::SwitchOr { .. } => Kind::Bool,
        Meaning::Words(_) | Meaning::List => Kind::Text,
    };
    let value = read(&kind).map_err(|refusal| (kind, refusal))?;
    let ours = |word: &str| {
        setting
            .kind
            .parse(word)
            .map_err(|refusal| (setting.kind, refusal))
    };
    let among = |words: &[(&str, &'static str)], text: &str| {
        let mut words = words.iter();
        words
            .find(|(word, _)| word.eq_ignore_ascii_case(text))
            .map(|(_, own)| *own)
    };
    match (meaning, value) {
        (Meaning::Switch { on, off } | Meaning::SwitchOr { on, off, .. }, Value::Bool(flipped)) => {
            ours(if flipped { on } else { off })
        }
        (Meaning::Switch { on, off }, Value::Text(text)) => match text.to_lowercase().as_str() {
            "true" | "yes" | "1" | "on" => ours(on),
            "false" | "no" | "0" | "off" => ours(off),
            _ => Err((kind, Refusal::default())),
        },
        (Meaning::SwitchOr { on, off, words }, Value::Text(text)) => {
            match (among(words, &text), text.to_lowercase().as_str()) {
                (Some(own), _) => ours(own),
                (None, "true" | "yes" | "1" | "on") => ours(on),
                (None, "false" | "no" | "0" | "off") => ours(off),
                _ => Err((kind, Refusal::default())),
            }
        }
        (Meaning::Words(words), Value::Text(text)) => {
            ours(among(words, &text).unwrap_or(text.as_str()))
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

/// Micro batches with the accumulation that each takes to give a global batch.
pub(crate) fn nearby(micros: impl IntoIterator<Item = u64>, whole: u64) -> String {
    let pair = |micro: u64| format!("micro batch {micro} with accumulation {}", whole / micro);
    let pairs: Vec<String> = micros.into_iter().map(pair).collect();
    pairs.join(" or ")
}
