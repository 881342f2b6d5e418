//! What can go wrong before a command runs and between two of its attempts.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

#[derive(Debug, Error)]
pub enum SuperviseError {
    #[error("{command} cannot be started: {source}")]
    Start { command: String, source: io::Error },

    #[error("no terminal for the command: {0}")]
    Terminal(io::Error),

    #[error("signals cannot be passed on: {0}")]
    Signals(io::Error),

    #[error(
        "{given} does not say where a value stands\nhint: {name}=FILE:KEY, for example {name}=conf/config.yaml:trainer.batch_size"
    )]
    NotAPlace { given: String, name: &'static str },

    #[error("--set {name} is not known\nhint: batch_size=FILE:KEY and accumulation=FILE:KEY")]
    UnknownName { name: String },

    #[error("{} has no key {key}\nhint: a key below others is written with dots: trainer.batch_size", cinch_files::shown(&path))]
    NoKey { path: PathBuf, key: String },

    #[error("{}: {key} is {found}, which is no whole number above 0", cinch_files::shown(&path))]
    NotACount {
        path: PathBuf,
        key: String,
        found: String,
    },

    #[error("cannot {action} {}: {source}", cinch_files::shown(&path))]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[error(transparent)]
    Config(#[from] cinch_config::ConfigError),

    #[error(
        "{key} = {value} has no place in the file: {reason}\nhint: name the places with --set batch_size=FILE:KEY and --set accumulation=FILE:KEY"
    )]
    Unplaced {
        key: String,
        value: String,
        reason: String,
    },

    #[error(
        "the effective batch cannot be kept: nothing says where the accumulation stands\nhint: {{accum}} in the command, --set accumulation=FILE:KEY, or --config with a trainer's file"
    )]
    NoAccumulation,

    #[error(
        "nothing says where the batch stands, so nothing can be changed\nhint: {{batch}} and {{accum}} in the command, --set batch_size=FILE:KEY, or --config with a trainer's file"
    )]
    NoBatch,

    #[error("the batch to begin with is not known\nhint: --batch N, or --effective-batch N")]
    UnknownBatch,

    #[error(
        "an effective batch of {effective} is no multiple of the batch {batch}\nhint: --effective-batch, or a --batch that divides it"
    )]
    NotAMultiple { effective: usize, batch: usize },
}
