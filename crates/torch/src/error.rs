//! What can be wrong with the files and settings of a PyTorch run.

use std::path::PathBuf;

use cinch_architecture::ArchitectureError;
use thiserror::Error;

use crate::allocator::ConfigError;

#[derive(Debug, Error)]
pub enum TorchError {
    #[error("{} cannot be read: {source}\nhint: the path is seen from the current folder", cinch_files::shown(&path))]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{}, byte {offset}: {problem}\nhint: the file must come from torch.cuda.memory._dump_snapshot or from the script of `cinch trace --script`, complete and unchanged", cinch_files::shown(&path))]
    Pickle {
        path: PathBuf,
        offset: u64,
        problem: String,
    },
    #[error("{}, line {line}: {problem}\nhint: one JSON object a line, as the script of `cinch trace --script` writes it", cinch_files::shown(&path))]
    JsonLine {
        path: PathBuf,
        line: u64,
        problem: String,
    },
    #[error("{}: {problem}", cinch_files::shown(&path))]
    Snapshot { path: PathBuf, problem: String },
    #[error(
        "this run cannot be replayed: {problem}\nhint: record a run with `cinch trace --script`, and explain it with `cinch plan --snapshot FILE`"
    )]
    Beyond { problem: String },
    #[error(
        "nothing to train on: batch {batch}, length {length}, {accumulation} micro batches\nhint: batch and micro batches are at least 1, the length at least 2"
    )]
    EmptyRun {
        batch: u64,
        length: u64,
        accumulation: u32,
    },
    #[error(
        "nothing is trained: quantised weights are frozen\nhint: train adapters on them (--lora-rank 16), or leave the weights in their type"
    )]
    NothingTrained,
    #[error(
        "this run cannot be replayed: {what} is {value}, and at most {most} is\nhint: the replay runs every op of the step, one by one"
    )]
    TooLarge {
        what: &'static str,
        value: u64,
        most: u64,
    },
    #[error(
        "{origin}, line {line}: {problem}\nhint: one measured run a line, in the format of peaks.jsonl"
    )]
    Truth {
        origin: String,
        line: usize,
        problem: String,
    },
    #[error(
        "{origin} holds no run that could be compared\nhint: one measured run a line, in the format of peaks.jsonl; failed and compiled runs do not count"
    )]
    NothingMeasured { origin: String },
    #[error("run {name}: {key} is {value}, and should be {wanted}")]
    Case {
        name: String,
        key: String,
        value: String,
        wanted: String,
    },
    #[error(
        "no permitted settings fit: the smallest, a micro batch of {batch} at length {length}, needs {} of {}\nhint: {remedy}",
        crate::choose::gibibytes(*needed), crate::choose::gibibytes(*budget)
    )]
    DoesNotFit {
        budget: u64,
        needed: u64,
        batch: u64,
        length: u64,
        remedy: String,
    },
    #[error("{file}: {problem}")]
    GuideFile { file: &'static str, problem: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Architecture(#[from] ArchitectureError),
}
