//! What a run tells whoever watches it.

use std::path::Path;

use cinch_engine::Engine;
use cinch_step::StepPlan;
use serde::{Serialize, Serializer};

use crate::data::DataReport;
use crate::terms::TermValue;

/// One line of progress, and of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Steps done.
    #[serde(skip)]
    pub step: u64,
    #[serde(skip)]
    pub max_steps: u64,
    pub loss: f64,
    /// Where the loss has more than one term: each of them by its name.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "by_name")]
    pub terms: Vec<TermValue>,
    pub learning_rate: f64,
    pub gradient_norm: f64,
    /// In half precision: what the loss is multiplied by, and how many steps were skipped
    /// because gradients overflowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    pub tokens_per_second: f64,
    /// Tokens seen since the start of training.
    pub tokens: u64,
    /// Passes over the training data so far.
    pub epoch: f64,
    /// What this step took.
    pub step_seconds: f64,
    #[serde(flatten)]
    pub memory: MemoryUse,
    #[serde(skip)]
    pub seconds_left: f64,
}

fn by_name<S: Serializer>(terms: &[TermValue], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(terms.iter().map(|term| (&*term.name, term)))
}

/// Memory at a step: what was planned, and what is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryUse {
    /// The one allocation that holds all tensors.
    pub arena_bytes: u64,
    /// The arena and what the plan has outside it.
    pub planned_bytes: u64,
    /// What the process has in host memory; null where the system does not say.
    pub resident_bytes: Option<u64>,
    /// On a GPU what is used of the card, by other programs too. Read where a line is logged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_used_bytes: Option<u64>,
}

pub enum Event<'a> {
    /// The data is there.
    Data(DataReport),
    /// The arena is allocated, weights are in place, step `step` comes next.
    Ready {
        plan: &'a StepPlan,
        step: u64,
        engine: &'a Engine,
    },
    /// After every step; `log` where the settings ask for a log line.
    Step {
        report: StepReport,
        log: bool,
    },
    Evaluated {
        step: u64,
        loss: f64,
        best: bool,
    },
    /// A text that the model has written.
    Sample {
        step: u64,
        text: &'a str,
    },
    Saved {
        step: u64,
        path: &'a Path,
    },
    /// Something worth saying that is not an error.
    Note(&'a str),
}

pub trait Observer {
    fn event(&mut self, event: Event<'_>);
}

impl<F: FnMut(Event<'_>)> Observer for F {
    fn event(&mut self, event: Event<'_>) {
        self(event);
    }
}
