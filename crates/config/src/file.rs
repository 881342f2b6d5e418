//! Config files: reading one from disk, taking over its settings, and
//! recognising which model it was written for.

use std::path::{Path, PathBuf};

use cinch_architecture::{ARCHITECTURES, Family};
use cinch_files::{MAX_READ, read_regular};

use crate::ConfigError;
use crate::curriculum::Stage;
use crate::dialect::draft::{Draft, Link, Meant, Reading, UnreadKey, bears_on_memory};
use crate::dialect::{Dialect, Naming, Program, Recognised, SHARDING, known_dialects};
use crate::document::{Document, Entry, Position, Scalar};
use crate::registry;
use crate::setting::{Meaning, Setting};
use crate::settings::{Settings, interpret, keys_of, unknown_key, wrong_value};
use crate::source::{Layer, Source};
use crate::value::Value;

/// What is asked of a run: what it takes, or what it learns as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matters {
    Memory,
    Training,
}

impl Settings {
    /// Reads a config file from disk, and those that it names.
    pub fn load_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = read_text(path)?;
        let first = self.files.len();
        self.load_text(path, &text)?;
        self.hub.beside = path.parent().map(Path::to_owned);
        let links: Vec<Link> = self.files[first..]
            .iter()
            .flat_map(|reading| reading.linked.clone())
            .collect();
        for link in links {
            self.load_link(path, &link)?;
        }
        Ok(())
    }

    /// Reads a config from text; `path` names it in messages and, by its
    /// extension, the format.
    pub fn load_text(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        self.load_document(&Document::read(path, text)?)
    }

    /// Takes over what a reader found. On an error nothing has changed.
    pub fn load_document(&mut self, document: &Document) -> Result<(), ConfigError> {
        let mut loaded = self.clone();
        let Recognised { naming, evidence } = Recognised::of(document);
        let reading = match naming {
            Naming::Own => loaded.load_own(document, evidence)?,
            Naming::Foreign(dialect) => loaded.load_foreign(document, dialect, evidence)?,
        };
        loaded.files.push(reading);
        *self = loaded;
        Ok(())
    }

    /// What was read of each file, in the order in which they were loaded.
    pub fn readings(&self) -> &[Reading] {
        &self.files
    }

    /// Refuses what no prediction of a PyTorch run covers.
    pub fn refuse_not_predicted(&self) -> Result<(), ConfigError> {
        let mut keys = self.files.iter().flat_map(|reading| {
            let keys = reading.not_predicted.iter();
            keys.map(move |(unread, why)| (reading, unread, why))
        });
        let Some((reading, unread, why)) = keys.next() else {
            return Ok(());
        };
        let UnreadKey { key, value, line } = unread.clone();
        Err(ConfigError::NotComputed {
            path: reading.path.clone(),
            line,
            key,
            value,
            dialect: reading.dialect,
            why: (*why).to_owned(),
        })
    }

    /// Refuses what a run of cinch's own would go without: in another program's file, keys with
    /// values that they cannot have, and slips of the pen. What is said besides, in the
    /// environment or by a flag, does not depend on the file.
    pub fn refuse_mistakes(&self, matters: Matters) -> Result<(), ConfigError> {
        let mistakes = self.files.iter().flat_map(|reading| {
            let mistakes = reading.mistakes.iter();
            mistakes.map(move |mistake| (reading, mistake))
        });
        for (reading, mistake) in mistakes {
            let setting = mistake.setting.and_then(registry::find);
            let setting = setting.map(|(setting, _)| setting);
            let is_said = setting.is_some_and(|setting| {
                let given = self.effective(setting.key);
                given.is_some_and(|given| given.layer > Layer::File)
            });
            let is_meant = match matters {
                Matters::Training => true,
                Matters::Memory => setting.is_none_or(bears_on_memory),
            };
            if is_said || !is_meant {
                continue;
            }
            let origin = Box::new(Source::File {
                path: reading.path.clone(),
                line: mistake.at.line,
                column: mistake.at.column,
            });
            let key = mistake.key.clone();
            return Err(match &mistake.meant {
                Meant::Value(accepted) => ConfigError::WrongValue {
                    origin,
                    key,
                    found: mistake.value.clone(),
                    accepted: accepted.clone(),
                    hint: setting.map(|setting| {
                        let flag = setting.flag.map(|flag| format!("--{}", flag.name));
                        let flag = flag.unwrap_or_else(|| format!("--set {}=VALUE", setting.key));
                        format!("write such a value, or say it with {flag}")
                    }),
                },
                Meant::Key(name) => ConfigError::UnknownKey {
                    key,
                    origin,
                    suggestion: Some((*name).to_owned()),
                    known: String::new(),
                },
            });
        }
        Ok(())
    }

    /// Whose run the files describe: PyTorch's as soon as one of them is.
    pub fn program(&self) -> Option<Program> {
        let programs = self.files.iter().map(|reading| reading.program);
        programs.max_by_key(|program| *program == Program::PyTorch)
    }

    /// A file that another one names, such as DeepSpeed's.
    fn load_link(&mut self, from: &Path, link: &Link) -> Result<(), ConfigError> {
        if let Some(found) = linked_file(from, &link.value) {
            let text = read_text(&found)?;
            return self.load_text(&found, &text);
        }
        // The name itself says most of it: `zero2.json`, `ds_z3_config.json`.
        let name = link.value.to_lowercase();
        let stage = ('1'..='3').find(|stage| {
            [
                format!("zero{stage}"),
                format!("zero_{stage}"),
                format!("z{stage}"),
                format!("stage{stage}"),
            ]
            .iter()
            .any(|mark| name.contains(mark.as_str()))
        });
        let Some(stage) = stage else {
            return Err(ConfigError::NoLinkedFile {
                path: from.to_owned(),
                line: link.line,
                key: link.key.clone(),
                value: link.value.clone(),
            });
        };
        if name.contains("offload") {
            return Err(ConfigError::NotComputed {
                path: from.to_owned(),
                line: link.line,
                key: link.key.clone(),
                value: link.value.clone(),
                dialect: "DeepSpeed",
                why:
                    "the file is not here, and its name says that something is kept in host memory"
                        .to_owned(),
            });
        }
        let source = Source::File {
            path: from.to_owned(),
            line: link.line,
            column: 1,
        };
        self.set(SHARDING, &format!("zero{stage}"), source)?;
        if let Some(reading) = self.files.last_mut() {
            reading.assumed.push(format!(
                "{} is not here: ZeRO stage {stage} by its name",
                link.value
            ));
        }
        Ok(())
    }

    fn load_own(
        &mut self,
        document: &Document,
        because_of: Vec<String>,
    ) -> Result<Reading, ConfigError> {
        let known = |entry: &Entry| {
            let section = entry
                .path
                .first()
                .is_some_and(|first| registry::sections().contains(&first.as_str()));
            section || registry::find(&entry.key()).is_some()
        };
        if !document.entries.is_empty() && !document.entries.iter().any(known) {
            let keys: Vec<String> = document.entries.iter().take(6).map(Entry::key).collect();
            let more = if document.entries.len() > keys.len() {
                ", …"
            } else {
                ""
            };
            return Err(ConfigError::NoDialect {
                path: document.path.clone(),
                keys: keys.join(", ") + more,
                known: known_dialects().join(", "),
            });
        }
        for entry in &document.entries {
            self.load_entry(document, entry)?;
        }
        // A file that never says `model.type` but speaks of heads or states is
        // a config for that model all the same.
        if let Some((name, entry)) = model_of_keys(document) {
            let source = source_at(document, entry.name_at);
            let name = Value::Text(name.to_owned());
            self.push("model.type", Layer::File, name, source);
        }
        Ok(Reading::own(document, because_of))
    }

    /// Takes over what another program's file says.
    fn load_foreign(
        &mut self,
        document: &Document,
        dialect: &'static Dialect,
        because_of: Vec<String>,
    ) -> Result<Reading, ConfigError> {
        let reading = Draft::read(document, dialect, because_of)?.finish(self)?;
        self.stages.extend(Stage::of(document));
        for (key, value) in &reading.defaults {
            let (setting, _) = crate::settings::parse(key, value, &Source::Default)?;
            let source = Source::Program(format!("{}'s default", dialect.name));
            let value = setting
                .kind
                .parse(value)
                .unwrap_or(Value::Text(value.clone()));
            self.push(setting.key, Layer::Program, value, source);
        }
        Ok(reading)
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
        let scalar = match (&entry.scalar, meaning) {
            (Scalar::Text(text), Meaning::Same) => {
                Scalar::Text(setting.plain_word(text).to_owned())
            }
            // `checkpointing: true` is one of its words.
            (Scalar::Bool(on), Meaning::Same) => {
                let word = on.to_string();
                match setting.plain_word(&word) {
                    plain if plain == word => Scalar::Bool(*on),
                    plain => Scalar::Text(plain.to_owned()),
                }
            }
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

/// The only family that all keys of a file about its shape can be of, where it names none.
fn model_of_keys(document: &Document) -> Option<(&'static str, &Entry)> {
    let mut families: Option<Vec<&'static Family>> = None;
    let mut evidence = None;
    let stated = document
        .entries
        .iter()
        .filter(|entry| entry.scalar != Scalar::Null);
    for entry in stated {
        let (setting, _) = registry::find(&entry.key())?;
        if setting.key == "model.type" {
            return None;
        }
        if setting.families.is_empty() {
            continue;
        }
        let narrowed = match families.take() {
            None => setting.families.clone(),
            Some(known) => known
                .into_iter()
                .filter(|family| setting.families.contains(family))
                .collect(),
        };
        if only_one(&narrowed).is_some() && evidence.is_none() {
            evidence = Some(entry);
        }
        families = Some(narrowed);
    }
    Some((only_one(&families?)?.name, evidence?))
}

/// Of several families, a file of cinch's own is for the one that cinch trains and that need not be
/// named.
fn only_one(families: &[&'static Family]) -> Option<&'static Family> {
    let trained = |family: &Family| {
        let mut listed = ARCHITECTURES.iter();
        !family.is_named && listed.any(|one| one.family == family && one.is_trained)
    };
    if let [only] = families {
        return Some(only);
    }
    let mut among = families.iter().filter(|family| trained(family));
    match (among.next(), among.next()) {
        (Some(only), None) => Some(only),
        _ => None,
    }
}

/// A file that a config names, seen from the config's folder, those above it, and the current one.
pub(crate) fn linked_file(from: &Path, name: &str) -> Option<PathBuf> {
    const ABOVE: usize = 4;
    let beside = from
        .parent()
        .into_iter()
        .flat_map(Path::ancestors)
        .take(ABOVE);
    let candidates = beside.map(|folder| folder.join(name));
    let mut candidates = candidates.chain([PathBuf::from(name)]);
    candidates.find(|path| path.is_file())
}

pub(crate) fn read_text(path: &Path) -> Result<String, ConfigError> {
    if path.is_dir() {
        return Err(ConfigError::IsFolder {
            path: path.to_owned(),
        });
    }
    let bytes = read_regular(path, MAX_READ).map_err(|source| match source.kind() {
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
