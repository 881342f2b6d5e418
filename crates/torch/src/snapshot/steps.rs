//! The marked steps of a recorded run: which of its operations belong to which.

use serde::Serialize;

use super::Snapshot;
use crate::trace::Program;

/// A step, from its mark to the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// From 1.
    pub number: usize,
    /// Samples, if the mark says.
    pub batch: Option<u64>,
    /// Operations of the program.
    #[serde(skip)]
    pub start: usize,
    #[serde(skip)]
    pub end: usize,
}

/// The steps of a device, in order; none if nothing is marked or the events have no times.
pub(super) fn steps(snapshot: &Snapshot, device: usize, program: &Program) -> Vec<Step> {
    let events = &snapshot.devices[device].trace.events;
    if events.iter().all(|event| event.time == 0) {
        return Vec::new();
    }
    let place = |time| program.place_of_event(events.partition_point(|event| event.time < time));
    let mut marks: Vec<(usize, u64, Option<u64>)> = snapshot
        .marks
        .iter()
        .map(|mark| (place(mark.time), mark.time, mark.batch))
        .collect();
    // Out of order only in damaged files.
    marks.sort_unstable();
    let starts = marks.iter().map(|&(start, ..)| start);
    let ends = starts.clone().skip(1).chain([program.operations().len()]);
    marks
        .iter()
        .zip(starts.zip(ends))
        .enumerate()
        .map(|(index, (&(_, _, batch), (start, end)))| Step {
            number: index + 1,
            batch,
            start,
            end,
        })
        .collect()
}
