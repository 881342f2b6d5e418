//! Which family of names a file speaks, and what a name in it means.
//!
//! A file is cinch's own unless something in it says otherwise, and in cinch's
//! own files an unknown key is a mistake. In the files of other programs most
//! keys concern only that program, so what is not known there is left alone.

use crate::document::Document;
use crate::format::Format;
use crate::registry::{self, FOREIGN_SECTIONS};
use crate::setting::{Meaning, Setting};
use crate::spelling::{DIALECTS, Dialect, Spelling};

/// How a file names its settings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Naming {
    /// `section.key`, as the registry has them.
    Own,
    Foreign(&'static Dialect),
}

/// Words that only say "this is a config".
const WRAPPINGS: [&str; 12] = [
    "config",
    "configs",
    "cfg",
    "conf",
    "settings",
    "options",
    "args",
    "arguments",
    "params",
    "hyperparameters",
    "hparams",
    "hp",
];

/// Sections in which names without a dot are looked for, besides the top.
const TRAINING: [&str; 4] = ["training", "train", "trainer", "training.trainer"];

impl Naming {
    pub(crate) fn of(document: &Document) -> Naming {
        let names: Vec<String> = document
            .entries
            .iter()
            .map(|entry| plain_name(&entry.path))
            .collect();
        let own = names.iter().any(|name| name.starts_with("vram."));
        if own && document.format != Format::Python {
            return Naming::Own;
        }
        let marked = |dialect: &Dialect| {
            dialect
                .marks
                .iter()
                .any(|mark| names.iter().any(|name| stands_for(mark, name)))
        };
        let flat = document.entries.iter().all(|entry| entry.path.len() == 1);
        let about_memory = |name: &String| {
            DIALECTS.iter().any(|dialect| {
                meaning_in(dialect, name).is_some_and(|found| found.key.starts_with("vram."))
            })
        };
        let foreign = document.format == Format::Python
            || foreign_section(document).is_some()
            || DIALECTS.iter().any(|dialect| marked(dialect))
            || flat && names.iter().any(about_memory);
        if !foreign {
            return Naming::Own;
        }
        // Its marks decide, then the number of names that are known.
        let score = |dialect: &&&'static Dialect| {
            let known = names
                .iter()
                .filter(|name| meaning_in(dialect, name).is_some());
            (marked(dialect), known.count())
        };
        let mut best = DIALECTS[0];
        for dialect in &DIALECTS[1..] {
            if score(&dialect) > score(&&best) {
                best = dialect;
            }
        }
        Naming::Foreign(best)
    }

    /// The setting that the value at `path` is.
    pub(crate) fn find(self, path: &[String]) -> Option<(&'static Setting, Meaning)> {
        let Naming::Foreign(dialect) = self else {
            return registry::find(&path.join("."));
        };
        let name = plain_name(path);
        let found = std::iter::once(dialect)
            .chain(DIALECTS)
            .find_map(|dialect| meaning_in(dialect, &name));
        match found {
            Some(spelling) => {
                registry::find(spelling.key).map(|(setting, _)| (setting, spelling.meaning))
            }
            None => registry::find(&name),
        }
    }

    /// The names a setting can be written under, the usual one first.
    pub(crate) fn spellings(self, key: &str) -> impl Iterator<Item = &'static Spelling> {
        let spellings: &[Spelling] = match self {
            Naming::Own => &[],
            Naming::Foreign(dialect) => dialect.spellings,
        };
        spellings.iter().filter(move |spelling| spelling.key == key)
    }
}

/// The section that makes a file one for a model of another system.
pub(crate) fn foreign_section(document: &Document) -> Option<(&str, &'static str)> {
    FOREIGN_SECTIONS.iter().find_map(|(section, model)| {
        let name = document
            .sections
            .iter()
            .find(|name| plain_section(name) == *section)?;
        Some((name.as_str(), *model))
    })
}

fn meaning_in(dialect: &'static Dialect, name: &str) -> Option<&'static Spelling> {
    dialect
        .spellings
        .iter()
        .find(|spelling| stands_for(spelling.name, name))
}

/// Whether a name of the table is the name in a file, both plain.
fn stands_for(spelling: &str, name: &str) -> bool {
    if spelling == name {
        return true;
    }
    let inside = name
        .strip_suffix(spelling)
        .and_then(|section| section.strip_suffix('.'));
    !spelling.contains('.') && inside.is_some_and(|section| TRAINING.contains(&section))
}

/// A path in lower case without wrappings: `TRAINING_CONFIG.Batch-Size` is
/// `training.batch_size`, and `Config.lr` is `lr`.
fn plain_name(path: &[String]) -> String {
    let Some((leaf, sections)) = path.split_last() else {
        return String::new();
    };
    let mut parts: Vec<String> = sections
        .iter()
        .map(|section| plain_section(section))
        .filter(|section| !section.is_empty())
        .collect();
    parts.push(leaf.to_lowercase().replace('-', "_"));
    parts.join(".")
}

fn plain_section(name: &str) -> String {
    let words = words_of(name);
    let kept: Vec<&str> = words
        .iter()
        .map(String::as_str)
        .filter(|word| !WRAPPINGS.contains(word))
        .collect();
    kept.join("_")
}

/// The words of `TrainingConfig`, `TRAINING_CONFIG` or `training-config`.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut small_before = false;
    for c in name.chars() {
        let boundary = matches!(c, '_' | '-' | ' ' | '.');
        if boundary || (c.is_uppercase() && small_before) {
            words.push(String::new());
        }
        if let (false, Some(word)) = (boundary, words.last_mut()) {
            word.extend(c.to_lowercase());
        }
        small_before = c.is_lowercase() || c.is_ascii_digit();
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn settings(name: &str, text: &str) -> Option<Vec<(String, &'static str)>> {
        let document = Document::read(Path::new(name), text).unwrap();
        let naming = Naming::of(&document);
        matches!(naming, Naming::Foreign(_)).then(|| {
            document
                .entries
                .iter()
                .filter_map(|entry| Some((entry.key(), naming.find(&entry.path)?.0.key)))
                .collect()
        })
    }

    #[test]
    fn wrappings_fall_away() {
        for (path, plain) in [
            (vec!["TRAINING_CONFIG", "Batch-Size"], "training.batch_size"),
            (vec!["Config", "lr"], "lr"),
            (vec!["TrainingArguments", "bf16"], "training.bf16"),
            (vec!["ModelConfig", "d_model"], "model.d_model"),
            (vec!["EVAL_CONFIG", "batch_size"], "eval.batch_size"),
            (vec!["MAX_SEQ_LENGTH"], "max_seq_length"),
        ] {
            let path: Vec<String> = path.into_iter().map(str::to_owned).collect();
            assert_eq!(plain_name(&path), plain);
        }
    }

    #[test]
    fn cinchs_own_shape_stays_its_own() {
        for text in [
            "vram:\n  batch_size: 1\n  micro: 2\n",
            "vram: {batch_size: 1}\ntraining: {micro_batch_size: 2}\n",
            "max_steps: 4\n",
            "training:\n  batch_size: 4\n",
            "model: {d_model: 8}\noutput: {colour: 1}\n",
        ] {
            assert!(settings("run.yaml", text).is_none(), "{text}");
        }
    }

    #[test]
    fn other_programs_are_understood() {
        let found = |name: &str, text: &str| -> Vec<String> {
            let found = settings(name, text).unwrap_or_default();
            found
                .into_iter()
                .map(|(name, key)| format!("{name}={key}"))
                .collect()
        };
        assert_eq!(
            found(
                "a.yaml",
                "model: {d_model: 8, ffn: 1}\ntraining: {micro_batch_size: 2, max_seq_len: 8}\neval: {batch_size: 2}\n"
            ),
            [
                "model.d_model=model.d_model",
                "training.micro_batch_size=vram.batch_size",
                "training.max_seq_len=vram.max_seq_len"
            ]
        );
        assert_eq!(
            found(
                "a.py",
                "BATCH_SIZE = 2\nEVAL = {'batch_size': 3}\nTRAINING_CONFIG = {'fp16': True}\n"
            ),
            [
                "BATCH_SIZE=vram.batch_size",
                "TRAINING_CONFIG.fp16=vram.precision"
            ]
        );
        assert_eq!(
            found(
                "a.yaml",
                "data_loader: {batch_size: 4}\ntraining: {trainer: {accumulate_grad_batches: 2, precision: 16-mixed}}\n"
            ),
            [
                "data_loader.batch_size=vram.batch_size",
                "training.trainer.accumulate_grad_batches=vram.gradient_accumulation_steps",
                "training.trainer.precision=vram.precision"
            ]
        );
        assert_eq!(
            found("a.json", "{\"batch_size\": 4, \"epochs\": 2}"),
            ["batch_size=vram.batch_size"]
        );
    }
}
