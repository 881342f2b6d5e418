//! What each remedy of the guides would do to a run, in bytes: the run is predicted with and without it.

use cinch_config::remedy::{REMEDIES, RemedyKind};

use crate::TorchError;
use crate::change;
use crate::model::{Prediction, Workload};
use crate::overhead::Overhead;
use crate::parallel;

/// A run's figures on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Totals {
    /// The most that tensors hold.
    pub allocated: u64,
    /// The most that the allocator holds from the driver.
    pub reserved: u64,
    /// What the driver shows for the process.
    pub device: u64,
    /// The figure to plan with.
    pub safe: u64,
}

impl Totals {
    pub fn of(prediction: &Prediction, overhead: &Overhead) -> Totals {
        Totals {
            allocated: prediction.peak_allocated,
            reserved: prediction.peak_reserved,
            device: overhead.device_bytes(prediction),
            safe: overhead.safe_bytes(prediction),
        }
    }
}

/// One change, and what it does to the run's memory. Differences are after minus before: a saving is negative.
#[derive(Clone, Debug)]
pub struct Remedy {
    pub kind: RemedyKind,
    pub name: &'static str,
    /// What to set, with this run's values.
    pub change: String,
    /// The run with the change.
    pub workload: Workload,
    pub allocated: i64,
    pub reserved: i64,
    pub device: i64,
    /// The run's figures with the change.
    pub totals: Totals,
    /// What else it does, or why it does nothing.
    pub note: Option<String>,
}

/// Every remedy that applies to this run, the largest saving on the card first.
pub fn remedies(workload: &Workload, overhead: &Overhead) -> Result<Vec<Remedy>, TorchError> {
    // Under a limit the replay would end where memory does; what is asked here is how much it takes.
    let workload = &Workload {
        memory_limit: None,
        ..workload.clone()
    };
    let before = Totals::of(&workload.predict()?, overhead);
    let changed: Vec<(RemedyKind, Workload)> = REMEDIES
        .iter()
        .filter_map(|declared| Some((declared.kind, change::apply(declared.kind, workload)?)))
        .collect();
    let totals: Vec<Result<Totals, TorchError>> =
        parallel::map(&changed, |(kind, changed)| match kind {
            // The two that only drop names and free segments leave the replay as it is.
            RemedyKind::EmptyCache | RemedyKind::DeleteNames => Ok(before),
            _ => Ok(Totals::of(&changed.predict()?, overhead)),
        });
    let mut remedies = Vec::new();
    for ((kind, changed), totals) in changed.into_iter().zip(totals) {
        let totals = totals?;
        remedies.push(Remedy {
            kind,
            name: kind.declaration().name,
            change: change::describe(kind, workload, &changed),
            workload: changed,
            allocated: difference(totals.allocated, before.allocated),
            reserved: difference(totals.reserved, before.reserved),
            device: difference(totals.device, before.device),
            totals,
            note: note(kind, workload),
        });
    }
    // Stable: equal savings stay in the order of their cost.
    remedies.sort_by_key(|remedy| remedy.device);
    Ok(remedies)
}

/// What a remedy does besides, to this run.
fn note(kind: RemedyKind, workload: &Workload) -> Option<String> {
    let model = &workload.architecture;
    let depends = model
        .depends_on_micro_batch()
        .or(model.mean_of_micro_batches())
        .filter(|_| kind == RemedyKind::MicroBatch);
    match depends {
        Some(why) => Some(format!(
            "the effective batch stays, but {why}: the gradients are not quite the same"
        )),
        None => kind.declaration().note.map(String::from),
    }
}

fn difference(after: u64, before: u64) -> i64 {
    after as i64 - before as i64
}
