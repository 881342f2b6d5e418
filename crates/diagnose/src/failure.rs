//! What is told of a failure.

use cinch_config::remedy::RemedyKind;
use serde::{Deserialize, Serialize};

use crate::frame::Phase;
use crate::message::{Framework, Numbers};

/// Why memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The working set is too large.
    Capacity,
    /// Enough is reserved and idle, in pieces.
    Fragmentation,
    OtherProcess,
    /// A limit that somebody set.
    Cap,
    /// Of this process, beside PyTorch's allocator.
    NonPytorch,
    /// Usage climbs step by step.
    Leak,
    /// A moment that needs more than the steps before.
    Spike,
    Host,
    Unclear,
    NotOom,
}

impl Cause {
    pub fn name(self) -> &'static str {
        match self {
            Self::Capacity => "capacity",
            Self::Fragmentation => "fragmentation",
            Self::OtherProcess => "other_process",
            Self::Cap => "cap",
            Self::NonPytorch => "non_pytorch",
            Self::Leak => "leak",
            Self::Spike => "spike",
            Self::Host => "host",
            Self::Unclear => "unclear",
            Self::NotOom => "not_oom",
        }
    }

    /// In words.
    pub fn said(self) -> &'static str {
        match self {
            Self::Capacity => "the run needs more than there is",
            Self::Fragmentation => "enough is reserved and idle, but in pieces",
            Self::OtherProcess => "another process holds memory of the card",
            Self::Cap => "a limit that was set is in the way",
            Self::NonPytorch => "this process holds memory outside PyTorch's allocator",
            Self::Leak => "memory climbs from step to step",
            Self::Spike => "this moment needs more than the steps before it",
            Self::Host => "host memory, not the GPU's",
            Self::Unclear => "the text does not say",
            Self::NotOom => "memory did not run out",
        }
    }
}

/// Something to do, with what it saves where that was computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fix {
    pub what: String,
    pub saves_bytes: Option<u64>,
    pub command: Option<String>,
}

impl Fix {
    pub fn new(what: impl Into<String>, command: &str) -> Self {
        Self {
            what: what.into(),
            saves_bytes: None,
            command: (!command.is_empty()).then(|| command.to_owned()),
        }
    }
}

/// One failure, diagnosed.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    pub framework: Framework,
    pub is_oom: bool,
    pub cause: Cause,
    /// From 0 to 1.
    pub confidence: f64,
    pub numbers: Numbers,
    pub evidence: Vec<String>,
    pub fixes: Vec<Fix>,
    pub will_not_help: Vec<String>,
    /// What happened, in a sentence.
    pub summary: String,
    /// The line of the log in which the message begins.
    pub line: u64,
    pub rank: Option<u32>,
    pub phase: Option<Phase>,
    pub step: Option<u64>,
    /// How often it was printed.
    pub times: u64,
}

/// A run whose memory was computed: by the planner for cinch, by the replay for PyTorch.
#[derive(Clone, Debug)]
pub struct Run {
    /// The model and its settings, in a line.
    pub title: String,
    /// What computed it.
    pub by: &'static str,
    pub predicted: u64,
    /// The memory of the card, where the user named one.
    pub card: Option<u64>,
    pub priced: Vec<Priced>,
    /// Changes that fit together, where none of them does alone.
    pub together: Option<Together>,
    /// What nobody said of the run, in sentences.
    pub assumed: Vec<String>,
}

/// Changes with which a run fits, at the effective batch that it has.
#[derive(Clone, Debug)]
pub struct Together {
    /// What to set, one setting each.
    pub changes: Vec<String>,
    /// What the run takes then.
    pub leaves: u64,
    pub command: Option<String>,
}

/// A change, and what it does to a run.
#[derive(Clone, Debug)]
pub struct Priced {
    pub kind: RemedyKind,
    /// What to set, with this run's values.
    pub change: String,
    /// Bytes that the run takes less; below zero where it takes more.
    pub saves: i64,
    /// What the run takes then.
    pub leaves: u64,
    /// The figure to plan with then.
    pub safe: u64,
    /// The exact lines or the command.
    pub command: Option<String>,
}
