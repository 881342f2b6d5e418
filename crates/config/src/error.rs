//! Everything that can be wrong with what the user asked for.
//!
//! A message names the place, the key, the value found and the way out.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use cinch_architecture::ArchitectureError;

use crate::source::Source;
use crate::value::Value;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(
        "{} does not exist\nhint: --config takes the path of a JSON, YAML, TOML or Python file, --config-path also a folder of them, seen from the current folder",
        cinch_files::shown(&path)
    )]
    NoSuchFile { path: PathBuf },

    #[error("{} is a folder, not a config file\nhint: name the file inside it", cinch_files::shown(&path))]
    IsFolder { path: PathBuf },

    #[error("{} cannot be read: {source}", cinch_files::shown(&path))]
    Unreadable {
        path: PathBuf,
        source: std::io::Error,
    },

    #[error(
        "{} is not UTF-8 text: the byte at offset {offset} is no character\nhint: save the file as UTF-8",
        cinch_files::shown(&path)
    )]
    NotUtf8 { path: PathBuf, offset: usize },

    #[error("{} is empty\nhint: the smallest config is {smallest}", cinch_files::shown(&path))]
    EmptyFile {
        path: PathBuf,
        smallest: &'static str,
    },

    #[error("{} line {line} column {column}: {message}\nhint: {advice}", cinch_files::shown(&path))]
    Syntax {
        path: PathBuf,
        line: usize,
        column: usize,
        message: String,
        /// What most often is the matter in the file's language.
        advice: &'static str,
    },

    #[error("{} holds no sections\nhint: a config looks like {example}", cinch_files::shown(&path))]
    NotSections {
        path: PathBuf,
        example: &'static str,
    },

    #[error(
        "`{key}` stands twice in {}, on lines {first_line} and {line}\nhint: keep one of them",
        cinch_files::shown(&path)
    )]
    DuplicateKey {
        path: PathBuf,
        key: String,
        first_line: usize,
        line: usize,
    },

    #[error("{} line {line}: `{key}` cannot be changed: {reason}\nhint: {hint}", cinch_files::shown(&path))]
    NotEditable {
        path: PathBuf,
        line: usize,
        key: String,
        reason: String,
        hint: String,
    },

    #[error(
        "`{key}` has no place in {}: {reason}\nhint: add the key by hand, then it can be changed",
        cinch_files::shown(&path)
    )]
    NoPlace {
        path: PathBuf,
        key: String,
        reason: String,
    },

    #[error(
        "{ranks} ranks do not divide an effective batch of {effective}\n\
         hint: {nearby} ranks do; or state the batch of each rank, --batch-size and --grad-accum"
    )]
    WorldSize {
        ranks: u64,
        effective: u64,
        /// Numbers of ranks that do.
        nearby: String,
    },

    #[error(
        "micro batches of {micro} do not add up to a global batch of {whole}\nhint: {nearby} does"
    )]
    GlobalBatch {
        whole: u64,
        micro: u64,
        nearby: String,
    },

    #[error(
        "`{key}` could not be set to {value} in {} without harm: {problem}; nothing was written\nhint: change it by hand",
        cinch_files::shown(&path)
    )]
    EditRefused {
        path: PathBuf,
        key: String,
        value: String,
        problem: String,
    },

    #[error(
        "`{key}` stands in {} and in {}\nhint: name the file it is to be changed in",
        cinch_files::shown(&first),
        cinch_files::shown(&second)
    )]
    SeveralPlaces {
        key: String,
        first: PathBuf,
        second: PathBuf,
    },

    #[error("{} holds no config files\nhint: name a file, or the folder with config.yaml", cinch_files::shown(&path))]
    NoConfigFiles { path: PathBuf },

    #[error(
        "{} cannot be changed: the {what} {} is read-only; nothing was written\nhint: chmod u+w {}, or apply to a copy",
        cinch_files::shown(&path),
        cinch_files::shown(&place),
        cinch_files::shown(&place)
    )]
    ReadOnly {
        path: PathBuf,
        what: &'static str,
        place: PathBuf,
    },

    #[error("{} cannot {what}: {source}; no file was changed", cinch_files::shown(&path))]
    NotWritten {
        path: PathBuf,
        what: &'static str,
        source: std::io::Error,
    },

    #[error(
        "{} was changed by someone else in the meantime; no file was changed\nhint: run the command again",
        cinch_files::shown(&path)
    )]
    ChangedMeanwhile { path: PathBuf },

    #[error("{cause}\nthis could not be taken back for {}", stuck_files(stuck))]
    RollbackFailed {
        cause: Box<ConfigError>,
        /// Each file with where its former content lies.
        stuck: Vec<(PathBuf, Option<PathBuf>)>,
    },

    #[error(
        "nothing was applied to {paths} that could be undone\nhint: backups of former applications are beside the files, as NAME.backup"
    )]
    NothingToUndo { paths: String },

    #[error(
        "{} was edited since the settings were applied; undoing would lose that\nhint: the former content is {}; --force restores it and keeps the edited file as a backup",
        cinch_files::shown(&path),
        cinch_files::shown(&backup)
    )]
    EditedSince { path: PathBuf, backup: PathBuf },

    #[error("the backup {} cannot be read: {source}; nothing was undone", cinch_files::shown(&backup))]
    BackupGone {
        backup: PathBuf,
        source: std::io::Error,
    },

    #[error(
        "the backup {} is not what was saved; nothing was undone\nhint: look at it, and --force to restore it as it is",
        cinch_files::shown(&backup)
    )]
    BackupChanged { backup: PathBuf },

    #[error(
        "{} is damaged: {reason}\nhint: it lists what was applied; remove it, and restore files from their backups by hand",
        cinch_files::shown(&path)
    )]
    DamagedManifest { path: PathBuf, reason: String },

    #[error(
        "unknown key `{key}`{}{}",
        within(origin),
        did_you_mean(suggestion, known)
    )]
    UnknownKey {
        key: String,
        origin: Box<Source>,
        suggestion: Option<String>,
        /// What there is instead, for when nothing is near.
        known: String,
    },

    #[error(
        "unknown environment variable {name}{}",
        did_you_mean(
            suggestion,
            "unset it, or name a setting as CINCH_SECTION_KEY, for example CINCH_TRAINING_SEED"
        )
    )]
    UnknownVariable {
        name: String,
        suggestion: Option<String>,
    },

    #[error("{}: `{key}` is {found}; expected {accepted}{}", origin.place(), hint_line(hint))]
    WrongValue {
        origin: Box<Source>,
        key: String,
        found: String,
        accepted: String,
        hint: Option<String>,
    },

    #[error(
        "{text:?} is not a size: {reason}\nhint: write \"8gb\", \"512mb\" or \"24\"; a bare number means GiB"
    )]
    InvalidSize {
        text: String,
        reason: Cow<'static, str>,
    },

    #[error("{first}, but {second}\nhint: keep one of them")]
    Disagreement {
        first: Box<Given>,
        second: Box<Given>,
    },

    #[error("{source} ({origin})")]
    Model {
        origin: Box<Source>,
        source: ArchitectureError,
    },

    #[error(
        "`model.size` ({origin}) says nothing of {title}, whose shape its name or file gives\nhint: leave it out, or name a family that has sizes: {families}"
    )]
    SizeOfNamedModel {
        origin: Box<Source>,
        title: String,
        families: String,
    },

    #[error(
        "`{key}` ({origin}) is a setting of {belongs_to}, but the model is {model} ({model_origin})\nhint: set model.type to {belongs_to}, or leave {key} out"
    )]
    KeyOfOtherModel {
        key: &'static str,
        origin: Box<Source>,
        belongs_to: String,
        model: &'static str,
        model_origin: Box<Source>,
    },

    #[error(
        "{model} has no size \"{size}\" ({origin}){}\nhint: sizes of {model} are {known}",
        suggestion.as_ref().map_or_else(String::new, |name| format!("; did you mean \"{name}\"?"))
    )]
    UnknownSize {
        model: &'static str,
        size: String,
        origin: Box<Source>,
        suggestion: Option<String>,
        known: String,
    },

    #[error(
        "there is no {family} preset \"{name}\"{}\nhint: {family} presets are {known}",
        suggestion.as_ref().map_or_else(String::new, |name| format!("; did you mean \"{name}\"?"))
    )]
    UnknownPreset {
        family: &'static str,
        name: String,
        suggestion: Option<String>,
        known: String,
    },

    #[error("{first} does not go with {second}: {rule}\nhint: {hint}")]
    Relation {
        first: Box<Stated>,
        second: Box<Stated>,
        rule: &'static str,
        hint: String,
    },

    #[error(
        "{length}: the model has {positions} learned positions, and no sequence can be longer\nhint: {positions} tokens at most"
    )]
    BeyondPositions { length: Box<Stated>, positions: u64 },

    #[error(
        "{length}: a sequence of {title} is one image, {tokens} tokens\nhint: leave the length out; `image_size` and `patch_size` of the config.json decide it"
    )]
    OneLength {
        length: Box<Stated>,
        title: &'static str,
        tokens: u64,
    },

    #[error(
        "{} line {line}: `{key}: {value}` ({dialect}) contradicts other settings: {why}\nhint: {way_out}",
        cinch_files::shown(&path)
    )]
    Contradicts {
        path: PathBuf,
        line: usize,
        key: Box<str>,
        value: Box<str>,
        dialect: &'static str,
        why: Box<str>,
        way_out: Box<str>,
    },

    #[error(
        "{} line {line}: `{key}: {value}` ({dialect}) cannot be predicted: {why}\nhint: leave it out to plan the run without it, or record a run with `cinch trace --script` and explain the recording with `cinch plan --snapshot FILE`",
        cinch_files::shown(&path)
    )]
    NotComputed {
        path: PathBuf,
        line: usize,
        key: String,
        value: String,
        dialect: &'static str,
        why: String,
    },

    #[error(
        "{} names no model\nhint: say which with --model: a hub id, a folder, or the path of a config.json",
        cinch_files::shown(&path)
    )]
    NoModel { path: PathBuf },

    #[error(
        "{} line {line}: `{key}: {value}` names a file that is not here\nhint: paths are seen from the config's folder and from the current one",
        cinch_files::shown(&path)
    )]
    NoLinkedFile {
        path: PathBuf,
        line: usize,
        key: String,
        value: String,
    },

    #[error(
        "{} is of no program that is known here: none of its keys ({keys}) says anything about a model, a batch or a length\nhint: known are cinch's own files and those of {known}",
        cinch_files::shown(&path)
    )]
    NoDialect {
        path: PathBuf,
        keys: String,
        known: String,
    },

    #[error("{adapter}, but no rank is given\nhint: say --lora-rank N")]
    AdapterWithoutRank { adapter: Box<Stated> },

    #[error(
        "a saved config could not be read or written as JSON: {source}\nhint: it may come from another version; give the settings anew"
    )]
    Record {
        #[from]
        source: serde_json::Error,
    },
}

/// A setting as it stands, for errors about two of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Stated {
    pub key: &'static str,
    pub value: Value,
    pub source: Source,
}

impl fmt::Display for Stated {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "`{}` = {} ({})",
            self.key, self.value, self.source
        )
    }
}

/// A value as it was written, under the name it was written with.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    pub key: String,
    pub value: Value,
    pub source: Source,
}

impl fmt::Display for Given {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "`{}` ({}) means {}",
            self.key, self.source, self.value
        )
    }
}

fn stuck_files(stuck: &[(PathBuf, Option<PathBuf>)]) -> String {
    let files: Vec<String> = stuck
        .iter()
        .map(|(path, kept)| match kept {
            Some(kept) => format!(
                "{} (its former content is {})",
                cinch_files::shown(&path),
                cinch_files::shown(&kept)
            ),
            None => cinch_files::shown(&path).to_string(),
        })
        .collect();
    files.join(", ")
}

fn within(origin: &Source) -> String {
    match origin {
        Source::File { .. } => format!(" in {origin}"),
        other => format!(" ({other})"),
    }
}

fn did_you_mean(suggestion: &Option<String>, otherwise: &str) -> String {
    match suggestion {
        Some(name) => format!("; did you mean `{name}`?"),
        None => format!("\nhint: {otherwise}"),
    }
}

fn hint_line(hint: &Option<String>) -> String {
    hint.as_ref()
        .map_or_else(String::new, |hint| format!("\nhint: {hint}"))
}
