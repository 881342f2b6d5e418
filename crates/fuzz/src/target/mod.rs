//! What is fuzzed: everything that reads a file which somebody else may have written.
//!
//! A target takes bytes and must come back, whatever they are: no panic, no abort, no more
//! memory than [`memory_bound`], no more time than the watching process allows. What it asserts
//! about an answer is a panic as well.

mod application;
mod checkpoint;
mod config;
mod generation;
mod log;
mod record;
mod sentences;
mod snapshot;
mod tokenizer;

use std::fs;
use std::path::{Path, PathBuf};

/// One kind of file, and what is done with it.
pub struct Target {
    pub name: &'static str,
    pub about: &'static str,
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words besides those of the seeds.
    pub words: fn() -> Vec<String>,
    /// Reads an input; the folder is empty and its own.
    pub run: fn(&[u8], &Path),
}

pub static TARGETS: [Target; 16] = [
    config::JSON,
    config::YAML,
    config::TOML,
    config::PYTHON,
    config::SHELL,
    application::DIALECTS,
    application::UNDO,
    checkpoint::STATE,
    checkpoint::SAFETENSORS,
    generation::GENERATION,
    log::LOG,
    record::METRICS,
    sentences::SENTENCES,
    snapshot::PICKLE,
    snapshot::TRACE,
    tokenizer::TOKENIZER,
];

/// Bytes that an input of some length may take at most.
pub fn memory_bound(length: usize) -> usize {
    const BASE: usize = 64 << 20;
    const PER_BYTE: usize = 64;
    BASE + PER_BYTE * length
}

fn no_words() -> Vec<String> {
    Vec::new()
}

/// The files below some folders of the repository that have one of these endings, in order.
fn files(folders: &[&str], endings: &[&str]) -> Vec<(PathBuf, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Vec::new();
    let mut pending: Vec<PathBuf> = folders.iter().map(|folder| root.join(folder)).collect();
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let ending = path.extension().and_then(|ending| ending.to_str());
            if path.is_dir() {
                pending.push(path);
            } else if ending.is_some_and(|ending| endings.contains(&ending))
                && let Ok(bytes) = fs::read(&path)
            {
                found.push((path, bytes));
            }
        }
    }
    found.sort();
    found
}

/// The contents of [`files`].
fn contents(folders: &[&str], endings: &[&str]) -> Vec<Vec<u8>> {
    files(folders, endings)
        .into_iter()
        .map(|(_, bytes)| bytes)
        .collect()
}
