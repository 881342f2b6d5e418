//! How a run ended and what came of it.

use std::path::PathBuf;

use cinch_ranks::pace::RanksTable;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Finished,
    Interrupted,
}

/// A loss and the step after which it was measured; 0 is before the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredLoss {
    pub step: u64,
    pub loss: f64,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingOutcome {
    pub ending: Ending,
    /// Steps done.
    pub step: u64,
    pub max_steps: u64,
    /// Passes over the training data so far.
    pub epoch: f64,
    /// Before the first step of the run, or at it where no evaluation was due.
    pub first_loss: Option<MeasuredLoss>,
    /// The last that this process measured.
    pub last_loss: Option<MeasuredLoss>,
    /// Whether those two are validation losses.
    pub validated: bool,
    pub checkpoint: Option<PathBuf>,
    pub best: Option<MeasuredLoss>,
    pub seconds: f64,
    pub planned_bytes: u64,
    /// The most that the process had in host memory after a step.
    pub most_resident_bytes: Option<u64>,
    /// What each of several ranks took, on the first of them.
    pub ranks: Option<RanksTable>,
}
