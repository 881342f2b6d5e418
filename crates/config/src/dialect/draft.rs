//! The reading of one file of another program: what each key was taken for, what was not
//! understood, and what cannot be computed.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;

use serde::Serialize;

use super::scalar::{is_auto, is_minus_one, items, switched_off, unset, value_of, word};
use super::{
    Dialect, EVALUATION, Keys, LOGGING, MODEL, Naming, OPTIMIZER, OPTIMIZER_STATES, OUTPUT,
    PACKING, Program, RATE, ROWS_PACKED, Rule, SAVED, SAVING, SEED, Says, TORCH_PRECISION, WARMUP,
    WARMUP_RATIO, is_slip, optimizer, speaks_of_memory, stands_for,
};
use crate::document::{Document, Entry, Position, Scalar};
use crate::error::ConfigError;
use crate::lossless;
use crate::registry;
use crate::setting::{Meaning, Setting};
use crate::settings::Settings;
use crate::source::Source;
use crate::unfollowed::{Instead, UnfollowedKey};
use crate::value::{Kind, Value};

/// What was read of one file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reading {
    #[serde(serialize_with = "lossless::shown")]
    pub path: PathBuf,
    pub dialect: &'static str,
    pub program: Program,
    /// The keys by which it was recognised.
    pub because_of: Vec<String>,
    pub read: Vec<ReadKey>,
    /// Keys that may bear on memory and were not understood.
    pub not_understood: Vec<UnreadKey>,
    /// Keys that save memory in a way that is not computed.
    pub savings: Vec<Saving>,
    /// Keys that change what a run learns or takes, and that cinch's own engine does not follow.
    pub not_followed: Vec<UnfollowedKey>,
    /// How many keys bear on nothing that is planned.
    pub num_harmless: usize,
    /// What the file does not say and was taken for granted.
    pub assumed: Vec<String>,
    /// What the program takes where the file is silent.
    #[serde(skip)]
    pub(crate) defaults: Vec<(&'static str, String)>,
    /// Files that this one names, with the key.
    #[serde(skip)]
    pub(crate) linked: Vec<Link>,
    /// What a run of cinch's own is refused for.
    #[serde(skip)]
    pub(crate) mistakes: Vec<Mistake>,
    /// What a prediction of PyTorch is refused for, with the reason.
    #[serde(skip)]
    pub(crate) not_predicted: Vec<(UnreadKey, &'static str)>,
}

/// A key that was understood.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReadKey {
    /// As the file has it.
    pub key: String,
    pub value: String,
    pub line: usize,
    /// The setting it was taken for, and its value there.
    pub setting: &'static str,
    pub means: String,
}

/// A key that was not.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnreadKey {
    pub key: String,
    pub value: String,
    pub line: usize,
}

/// A key that a run of cinch's own would go otherwise without: one with a value that it cannot
/// have, or a slip of the pen.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mistake {
    pub key: String,
    pub value: String,
    pub at: Position,
    /// What the value is expected to be, or the key that was meant.
    pub meant: Meant,
    /// The setting that is taken as if the file did not say it.
    pub setting: Option<&'static str>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Meant {
    Value(String),
    Key(&'static str),
}

/// A key that makes the figure an upper bound.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Saving {
    pub key: String,
    pub value: String,
    pub line: usize,
    pub why: &'static str,
}

/// A file that another one names.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Link {
    pub key: String,
    pub value: String,
    pub line: usize,
}

/// A value that a key gives a setting.
struct Statement {
    entry: usize,
    setting: &'static Setting,
    value: Value,
    /// A switch that is off says "not this one" where another key says which.
    is_off: bool,
}

/// A file while it is being read.
pub(crate) struct Draft<'a> {
    document: &'a Document,
    names: Vec<String>,
    statements: Vec<Statement>,
    reading: Reading,
}

impl<'a> Draft<'a> {
    pub(crate) fn read(
        document: &'a Document,
        dialect: &'static Dialect,
        because_of: Vec<String>,
    ) -> Result<Draft<'a>, ConfigError> {
        let defaults = dialect.defaults.iter();
        let mut draft = Draft {
            document,
            names: Keys::of(document).names,
            statements: Vec::new(),
            reading: Reading {
                path: document.path.clone(),
                dialect: dialect.name,
                program: dialect.program,
                because_of,
                read: Vec::new(),
                not_understood: Vec::new(),
                savings: Vec::new(),
                not_followed: Vec::new(),
                num_harmless: 0,
                assumed: Vec::new(),
                defaults: defaults
                    .map(|(key, value)| (*key, (*value).to_owned()))
                    .collect(),
                linked: Vec::new(),
                mistakes: Vec::new(),
                not_predicted: Vec::new(),
            },
        };
        let rules = draft.names.iter().map(|name| dialect.rule(name));
        let rules: Vec<Option<&Rule>> = rules.collect();
        // What a key that is known takes its value from is understood with it.
        let known = document.entries.iter().zip(&rules);
        let understood: HashSet<Position> = known
            .filter(|(_, rule)| rule.is_some())
            .map(|(entry, _)| entry.value_at)
            .collect();
        for (index, rule) in rules.iter().enumerate() {
            draft.key(index, *rule, &understood)?;
        }
        draft.slips(dialect, &rules);
        if let Some(arithmetic) = dialect.arithmetic {
            arithmetic(&mut draft)?;
        }
        Ok(draft)
    }

    fn key(
        &mut self,
        index: usize,
        rule: Option<&'static Rule>,
        understood: &HashSet<Position>,
    ) -> Result<(), ConfigError> {
        let entry = &self.document.entries[index];
        if unset(&entry.scalar) && !(is_minus_one(&entry.scalar) && must_be_set(rule)) {
            self.reading.num_harmless += 1;
            return Ok(());
        }
        let name = &self.names[index];
        let Some(rule) = rule else {
            let is_source = understood.contains(&entry.value_at);
            match speaks_of_memory(name) && !switched_off(&entry.scalar) && !is_source {
                true => self.reading.not_understood.push(unread(entry)),
                false => self.reading.num_harmless += 1,
            }
            return Ok(());
        };
        match rule.says {
            Says::Combined => {}
            Says::Harmless => self.reading.num_harmless += 1,
            Says::NotFollowed => {
                self.reading.num_harmless += 1;
                if !switched_off(&entry.scalar) {
                    self.not_followed(index);
                }
            }
            Says::Saves { .. } | Says::Refused { .. } | Says::NotPredicted(_)
                if switched_off(&entry.scalar) =>
            {
                self.reading.num_harmless += 1;
            }
            Says::NotPredicted(why) => self.reading.not_predicted.push((unread(entry), why)),
            Says::Saves { why, instead } => {
                self.saves(index, why);
                if let Some(instead) = instead {
                    self.done_instead(index, instead);
                }
            }
            Says::Refused { unless, why } => {
                let word = word(&entry.scalar);
                let allowed = word.is_some_and(|word| {
                    unless.iter().any(|known| known.eq_ignore_ascii_case(&word))
                });
                if !allowed {
                    return Err(self.refuse(index, why));
                }
                self.reading.num_harmless += 1;
            }
            Says::Setting { key, meaning } => {
                let Some((setting, _)) = registry::find(key) else {
                    unreachable!("{key} is in a rule and no setting");
                };
                match (value_of(setting, meaning, &entry.scalar), rule.otherwise) {
                    (Some(value), _) => self.state(index, setting, meaning, value),
                    (None, _) if is_auto(&entry.scalar) => self.reading.num_harmless += 1,
                    (None, Some(why))
                        if setting.key == OPTIMIZER
                            && word(&entry.scalar)
                                .is_some_and(|word| optimizer::is_eight_bit_here(&word)) =>
                    {
                        self.eight_bit_here(index, why);
                    }
                    (None, Some(why)) if !entry.scalar.is_composite() => {
                        return Err(self.refuse(index, why));
                    }
                    // A number that cannot be is a mistake, not something to take a default for,
                    // and so is a word where a model has a number.
                    (None, _)
                        if bears_on_memory(setting)
                            && (matches!(entry.scalar, Scalar::Number(_))
                                || is_word_for_a_number(setting, &entry.scalar)) =>
                    {
                        return Err(ConfigError::WrongValue {
                            origin: Box::new(Source::File {
                                path: self.document.path.clone(),
                                line: entry.value_at.line,
                                column: entry.value_at.column,
                            }),
                            key: entry.key(),
                            found: entry.scalar.to_string(),
                            accepted: setting.kind.accepts(),
                            hint: None,
                        });
                    }
                    // `--seed $RANDOM`, `--output_dir $1`: any will do.
                    (None, _) if WHATEVER.contains(&setting.key) && entry.scalar.is_composite() => {
                        self.reading.num_harmless += 1;
                        self.not_followed(index);
                    }
                    (None, _) if is_share_of_steps(rule, &entry.scalar) => {
                        self.reading.num_harmless += 1;
                        self.not_followed(index);
                    }
                    // The name of a split of the data that the program loads by itself.
                    (None, _)
                        if matches!(rule.name, "val_split" | "validation_split")
                            && matches!(entry.scalar, Scalar::Text(_)) =>
                    {
                        self.reading.num_harmless += 1;
                        self.not_followed(index);
                    }
                    (None, _) => {
                        self.reading.mistakes.push(Mistake {
                            key: entry.key(),
                            value: entry.scalar.to_string(),
                            at: entry.value_at,
                            meant: Meant::Value(match rule.name {
                                "val_size" | "val_set_size" => HELD_OUT_SHARE.to_owned(),
                                _ => accepted(setting, meaning),
                            }),
                            setting: Some(setting.key),
                        });
                        match bears_on_memory(setting) {
                            true => self.reading.not_understood.push(unread(entry)),
                            false => self.reading.num_harmless += 1,
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Slips of the pen, in the files of a model of its own: a key that no rule knows, a letter
    /// away from one that the file does not have.
    fn slips(&mut self, dialect: &'static Dialect, rules: &[Option<&'static Rule>]) {
        if dialect.defaults.iter().all(|(key, _)| *key != MODEL) {
            return;
        }
        let known: Vec<&'static Rule> = dialect
            .own_rules()
            .filter(|rule| matches!(rule.says, Says::Setting { .. } | Says::Combined))
            .collect();
        for (index, rule) in rules.iter().enumerate() {
            let entry = &self.document.entries[index];
            if rule.is_some_and(|rule| !rule.name.ends_with('*')) || unset(&entry.scalar) {
                continue;
            }
            let name = &self.names[index];
            let is_section = |rule: &&&Rule| {
                let rest = rule.name.strip_prefix(name.as_str());
                rest.is_some_and(|rest| rest.starts_with('.'))
            };
            if known.iter().any(|rule| is_section(&rule)) {
                self.reading.num_harmless -= usize::from(!self.is_told(index));
                self.mistaken(index, None, "a section with keys of its own".to_owned());
                continue;
            }
            let meant = known.iter().find(|rule| {
                let setting = match rule.says {
                    Says::Setting { key, .. } => Some(key),
                    _ => None,
                };
                is_slip(name, rule.name)
                    && self.find(rule.name).is_none()
                    && !setting.is_some_and(|key| self.says(key))
            });
            let Some(meant) = meant else {
                continue;
            };
            let setting = match meant.says {
                Says::Setting { key, .. } => registry::find(key).map(|(setting, _)| setting),
                _ => None,
            };
            if !self.is_told(index) && setting.is_some_and(bears_on_memory) {
                self.reading.num_harmless -= 1;
                self.not_understood(index);
            }
            self.reading.mistakes.push(Mistake {
                key: entry.key(),
                value: entry.scalar.to_string(),
                at: entry.name_at,
                meant: Meant::Key(meant.name),
                setting: setting.map(|setting| setting.key),
            });
        }
    }

    /// A key that is a slip of this one, which is at the top of the file and no setting.
    pub(crate) fn slip_of(&mut self, known: &'static str) {
        if self.find(known).is_some() {
            return;
        }
        let mut names = self.names.iter();
        let Some(index) = names.position(|name| is_slip(name, known)) else {
            return;
        };
        let entry = &self.document.entries[index];
        self.reading.mistakes.push(Mistake {
            key: entry.key(),
            value: entry.scalar.to_string(),
            at: entry.name_at,
            meant: Meant::Key(known),
            setting: None,
        });
    }

    fn is_told(&self, entry: usize) -> bool {
        let unread = unread(&self.document.entries[entry]);
        self.reading.not_understood.contains(&unread)
    }

    fn state(&mut self, entry: usize, setting: &'static Setting, meaning: Meaning, value: Value) {
        let off = match meaning {
            Meaning::Switch { off, .. } | Meaning::SwitchOr { off, .. } => Some(off),
            _ => None,
        };
        let scalar = &self.document.entries[entry].scalar;
        let is_off = off.is_some() && switched_off(scalar);
        self.statements.push(Statement {
            entry,
            setting,
            value,
            is_off,
        });
    }

    /// Says a setting on behalf of a key.
    pub(crate) fn say(&mut self, entry: usize, key: &str, text: &str) {
        let Some((setting, _)) = registry::find(key) else {
            unreachable!("{key} is no setting");
        };
        match setting.kind.parse(setting.plain_word(text)) {
            Ok(value) => self.state(entry, setting, Meaning::Same, value),
            Err(_) => self.mistaken(entry, Some(setting.key), setting.kind.accepts()),
        }
    }

    pub(crate) fn saves(&mut self, entry: usize, why: &'static str) {
        let UnreadKey { key, value, line } = unread(&self.document.entries[entry]);
        self.reading.savings.push(Saving {
            key,
            value,
            line,
            why,
        });
    }

    /// The error that a key asks for something that cannot be computed.
    pub(crate) fn refuse(&self, entry: usize, why: &str) -> ConfigError {
        let UnreadKey { key, value, line } = unread(&self.document.entries[entry]);
        ConfigError::NotComputed {
            path: self.document.path.clone(),
            line,
            key,
            value,
            dialect: self.reading.dialect,
            why: why.to_owned(),
        }
    }

    /// The error that a key and others of its file cannot all be met.
    pub(crate) fn contradiction(&self, entry: usize, why: &str, way_out: &str) -> ConfigError {
        let UnreadKey { key, value, line } = unread(&self.document.entries[entry]);
        ConfigError::Contradicts {
            path: self.document.path.clone(),
            line,
            key: key.into(),
            value: value.into(),
            dialect: self.reading.dialect,
            why: why.into(),
            way_out: way_out.into(),
        }
    }

    pub(crate) fn harmless(&mut self) {
        self.reading.num_harmless += 1;
    }

    /// A key with a value that it cannot have.
    pub(crate) fn mistaken(
        &mut self,
        entry: usize,
        setting: Option<&'static str>,
        accepted: String,
    ) {
        if !self.is_told(entry) {
            self.not_understood(entry);
        }
        let entry = &self.document.entries[entry];
        self.reading.mistakes.push(Mistake {
            key: entry.key(),
            value: entry.scalar.to_string(),
            at: entry.value_at,
            meant: Meant::Value(accepted),
            setting,
        });
    }

    pub(crate) fn not_understood(&mut self, entry: usize) {
        let unread = unread(&self.document.entries[entry]);
        self.reading.not_understood.push(unread);
    }

    /// A key that training here does not follow.
    pub(crate) fn not_followed(&mut self, entry: usize) {
        self.unfollowed(entry, None);
    }

    /// A key in whose place cinch's own engine does something else, which takes other memory.
    pub(crate) fn done_instead(&mut self, entry: usize, instead: Instead) {
        self.unfollowed(entry, Some(instead));
    }

    fn unfollowed(&mut self, entry: usize, instead: Option<Instead>) {
        let UnreadKey { key, value, line } = unread(&self.document.entries[entry]);
        self.reading.not_followed.push(UnfollowedKey {
            key,
            value,
            line,
            instead,
        });
    }

    /// States in eight bits that the replay of PyTorch does not know, and cinch's own engine has.
    pub(crate) fn eight_bit_here(&mut self, entry: usize, why: &'static str) {
        let key = unread(&self.document.entries[entry]);
        self.reading.not_predicted.push((key, why));
        self.say(entry, OPTIMIZER_STATES, "8bit");
    }

    pub(crate) fn assume(&mut self, sentence: impl Into<String>) {
        self.reading.assumed.push(sentence.into());
    }

    /// Replaces what the program takes where the file is silent.
    pub(crate) fn default(&mut self, key: &'static str, value: impl Into<String>) {
        let defaults = &mut self.reading.defaults;
        defaults.retain(|(known, _)| *known != key);
        defaults.push((key, value.into()));
    }

    pub(crate) fn link(&mut self, entry: usize) {
        let UnreadKey { key, line, .. } = unread(&self.document.entries[entry]);
        if let Some(value) = self.text(entry) {
            self.reading.linked.push(Link { key, value, line });
        }
    }

    /// The first key of a plain name that has a value.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        (0..self.names.len()).find(|&index| {
            stands_for(name, &self.names[index]) && !unset(&self.document.entries[index].scalar)
        })
    }

    /// All keys that begin so.
    pub(crate) fn beginning(&self, beginning: &str) -> Vec<usize> {
        (0..self.names.len())
            .filter(|&index| self.names[index].starts_with(beginning))
            .collect()
    }

    pub(crate) fn scalar(&self, entry: usize) -> &'a Scalar {
        &self.document.entries[entry].scalar
    }

    pub(crate) fn text(&self, entry: usize) -> Option<String> {
        word(self.scalar(entry))
    }

    /// Whether a key is there and not switched off.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.find(name)
            .is_some_and(|entry| !switched_off(self.scalar(entry)))
    }

    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.text(self.find(name)?)?.parse().ok()
    }

    /// The items of a list, or the parts of a text with commas.
    pub(crate) fn items(&self, entry: usize) -> Vec<String> {
        items(self.scalar(entry))
    }

    /// Whether a setting was said.
    pub(crate) fn says(&self, key: &str) -> bool {
        self.statements
            .iter()
            .any(|statement| statement.setting.key == key && !statement.is_off)
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.statements
            .iter()
            .rev()
            .find(|statement| statement.setting.key == key && !statement.is_off)
            .map(|statement| &statement.value)
    }

    /// Rows that hold several samples each, which a plan and training here have a key each for.
    pub(crate) fn packs(&mut self, names: &[&str]) {
        for name in names {
            let Some(entry) = self.find(name) else {
                continue;
            };
            match self.is_on(name) && !self.says(PACKING) {
                true => {
                    self.say(entry, PACKING, "true");
                    self.say(entry, ROWS_PACKED, "true");
                }
                false => self.harmless(),
            }
        }
    }

    /// Warm-up in steps, or as a share of the run where no steps are stated. Newer versions of
    /// transformers take a share in the place of steps too.
    pub(crate) fn warm_up(&mut self) {
        let is_share = |text: &str| text.parse().is_ok_and(|x: f64| 0.0 < x && x < 1.0);
        let steps = self.find("warmup_steps");
        if let Some(entry) = steps {
            let text = self.text(entry).unwrap_or_default();
            let key = match is_share(&text) {
                true => WARMUP_RATIO,
                false => WARMUP,
            };
            self.say(entry, key, &text);
        }
        let Some(entry) = self.find("warmup_ratio") else {
            return;
        };
        match self.is_on("warmup_ratio") && !self.is_on("warmup_steps") {
            true => {
                let text = self.text(entry).unwrap_or_default();
                self.say(entry, WARMUP_RATIO, &text);
            }
            false => self.harmless(),
        }
    }

    /// Drops what was said of a setting.
    pub(crate) fn unsay(&mut self, key: &str) {
        self.statements
            .retain(|statement| statement.setting.key != key);
    }

    /// Gives the settings what was read. On an error they are as far as it got.
    pub(crate) fn finish(mut self, settings: &mut Settings) -> Result<Reading, ConfigError> {
        let statements = std::mem::take(&mut self.statements);
        let outspoken = statements.iter().filter(|statement| !statement.is_off);
        let outspoken: BTreeSet<&str> = outspoken.map(|one| one.setting.key).collect();
        // What a program computes from a setting that another key gives is no mistake:
        // `model = load(MODEL_NAME)`.
        let entries = &self.document.entries;
        self.reading.mistakes.retain(|mistake| {
            let mut at = entries.iter().filter(|entry| entry.value_at == mistake.at);
            let is_computed = at.any(|entry| entry.scalar.is_composite());
            !is_computed || !mistake.setting.is_some_and(|key| outspoken.contains(key))
        });
        // The first entry of each path.
        let mut said: HashMap<&[String], usize> = HashMap::new();
        for statement in &statements {
            let entry = &self.document.entries[statement.entry];
            let earlier = *said.entry(&entry.path).or_insert(statement.entry);
            let first = &self.document.entries[earlier];
            // A variable and the flag that takes its value from it are one value, and so is what
            // two commands of a script say alike.
            if earlier != statement.entry && first.scalar == entry.scalar {
                self.reading.num_harmless += 1;
                continue;
            }
            if earlier != statement.entry {
                return Err(ConfigError::DuplicateKey {
                    path: self.document.path.clone(),
                    key: entry.key(),
                    first_line: first.name_at.line,
                    line: entry.name_at.line,
                });
            }
            if statement.is_off && outspoken.contains(statement.setting.key) {
                self.reading.num_harmless += 1;
                continue;
            }
            let source = Source::File {
                path: self.document.path.clone(),
                line: entry.value_at.line,
                column: entry.value_at.column,
            };
            if let Some(instead) = instead_of(statement) {
                let UnreadKey { key, value, line } = unread(entry);
                self.reading.not_followed.push(UnfollowedKey {
                    key,
                    value,
                    line,
                    instead,
                });
            }
            settings.assign(
                statement.setting,
                &entry.key(),
                statement.value.clone(),
                source,
            )?;
            self.reading.read.push(ReadKey {
                key: entry.key(),
                value: entry.scalar.to_string(),
                line: entry.name_at.line,
                setting: statement.setting.key,
                means: statement.value.to_string(),
            });
        }
        self.reading.read.sort_by_key(|read| read.line);
        Ok(self.reading)
    }
}

impl Reading {
    /// A file of cinch's own, every key of which is a setting.
    pub(crate) fn own(document: &Document, because_of: Vec<String>) -> Reading {
        let key = |entry: &Entry| {
            let (setting, _) = Naming::Own.find(&entry.path)?;
            Some(ReadKey {
                key: entry.key(),
                value: entry.scalar.to_string(),
                line: entry.name_at.line,
                setting: setting.key,
                means: entry.scalar.to_string(),
            })
        };
        Reading {
            path: document.path.clone(),
            dialect: Naming::Own.name(),
            program: Program::Cinch,
            because_of,
            read: document.entries.iter().filter_map(key).collect(),
            not_understood: Vec::new(),
            savings: Vec::new(),
            not_followed: Vec::new(),
            num_harmless: 0,
            assumed: Vec::new(),
            defaults: Vec::new(),
            linked: Vec::new(),
            mistakes: Vec::new(),
            not_predicted: Vec::new(),
        }
    }

    /// Whether the file names a model.
    pub fn names_a_model(&self) -> bool {
        self.read.iter().any(|read| read.setting == MODEL)
    }
}

/// Whether a value that was read for PyTorch is one that cinch's own engine does not follow, and
/// what it does in its place.
fn instead_of(statement: &Statement) -> Option<Option<Instead>> {
    let word = statement.value.to_string();
    match statement.setting.key {
        OPTIMIZER => optimizer::instead_of(&word),
        // Weights in half precision, under autocast or not.
        TORCH_PRECISION if !word.starts_with("amp_") && word != "fp32" => {
            Some(Some(Instead::Masters))
        }
        _ => None,
    }
}

/// Whether a key is of those that no program leaves open by -1: numbers of a model, and the rate.
fn must_be_set(rule: Option<&Rule>) -> bool {
    rule.is_some_and(|rule| match rule.says {
        Says::Setting { key, .. } => key == RATE || key.starts_with("model."),
        _ => false,
    })
}

/// Settings that change nothing that is learned but by chance: what a program computes for them is
/// no reason to refuse it.
const WHATEVER: &[&str] = &[SEED, OUTPUT, LOGGING, EVALUATION, SAVING, SAVED];

/// axolotl and LLaMA-Factory hold out so many samples too.
const HELD_OUT_SHARE: &str =
    "a share of the samples, from 0 to just below 1: how many they are is not read";

/// Steps as a share of the run, which transformers takes beside counts; and 0, which it takes where
/// nothing is done by steps. When something is written or measured changes nothing that is learned.
fn is_share_of_steps(rule: &Rule, scalar: &Scalar) -> bool {
    let share = word(scalar).and_then(|text| text.parse().ok());
    matches!(rule.name, "logging_steps" | "eval_steps" | "save_steps")
        && share.is_some_and(|share: f64| (0.0..1.0).contains(&share))
}

/// A word in place of a number of the model, or of its switch, that nothing is put in for when
/// the program runs, as in `${width}`.
fn is_word_for_a_number(setting: &Setting, scalar: &Scalar) -> bool {
    let takes_no_words = matches!(
        setting.kind,
        Kind::Bool | Kind::Unsigned { .. } | Kind::Float(_)
    );
    let plain = |text: &str| {
        text.chars()
            .all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ' '))
    };
    setting.section() == "model"
        && takes_no_words
        && matches!(scalar, Scalar::Text(text) if plain(text))
}

/// What a key can have, in words.
fn accepted(setting: &Setting, meaning: Meaning) -> String {
    match meaning {
        Meaning::Words(words) => {
            let words: Vec<String> = words
                .iter()
                .map(|(word, _)| format!("\"{word}\""))
                .collect();
            format!("one of {}", words.join(", "))
        }
        Meaning::Switch { .. } | Meaning::SwitchOr { .. } => Kind::Bool.accepts(),
        Meaning::Same | Meaning::List => setting.kind.accepts(),
    }
}

/// Settings that decide memory; what is wrong with others is none of a plan's business.
pub(crate) fn bears_on_memory(setting: &Setting) -> bool {
    matches!(setting.section(), "model" | "vram" | "lora" | "pytorch")
}

fn unread(entry: &Entry) -> UnreadKey {
    UnreadKey {
        key: entry.key(),
        value: entry.scalar.to_string(),
        line: entry.name_at.line,
    }
}
