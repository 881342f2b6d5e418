//! What a checkpoint holds besides tensors.

use std::collections::BTreeMap;
use std::path::Path;

use cinch_config::Config;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// `state.json`. Everything a run needs to go on exactly where it was: the random state is the
/// seed and the step, the data position is the number of sequences seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub format: u32,
    /// Steps done.
    pub step: u64,
    /// Sequences seen.
    pub samples: u64,
    /// Tokens seen.
    pub tokens: u64,
    pub seed: u64,
    /// The lowest validation loss so far.
    pub best_loss: Option<f64>,
    /// The step it was measured at.
    #[serde(default)]
    pub best_step: Option<u64>,
    /// The first loss of the run, to compare the last one with.
    pub first_loss: Option<f64>,
    /// What the data and the tokenizer were.
    pub corpus: String,
    /// As it was run.
    pub config: Config,
    /// As it was asked for, key by key: what `--resume` starts from.
    pub settings: BTreeMap<String, String>,
}

impl State {
    pub const FORMAT: u32 = 1;

    pub fn from_json(path: &Path, value: serde_json::Value) -> Result<Self, TrainError> {
        let fail = |problem: String| TrainError::State {
            path: path.to_owned(),
            problem,
        };
        let format = value.get("format").and_then(serde_json::Value::as_u64);
        if format != Some(u64::from(Self::FORMAT)) {
            return Err(fail(format!(
                "format {} is not {}, the one this version reads",
                format.map_or_else(|| "(none)".to_owned(), |f| f.to_string()),
                Self::FORMAT
            )));
        }
        serde_json::from_value(value).map_err(|error| fail(error.to_string()))
    }

    pub fn to_json(&self) -> Result<serde_json::Value, serde_json::Error> {
        serde_json::to_value(self)
    }
}
