//! What another batch size would take, when the recording can tell.
//!
//! Two steps of different batch sizes that made the same requests in the same order give each
//! request's size as a line through two points: `size(b) = s₁ + (s₂ − s₁)·(b − b₁)/(b₂ − b₁)`.
//! With one batch size, or with steps that did different things, nothing is known of other
//! batches, and the answer says so.

use serde::Serialize;
use thiserror::Error;

use super::Snapshot;
use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::trace::{Operation, Program, replay};

/// Peaks with another batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BatchEffect {
    pub batch: u64,
    pub peak_allocated: u64,
    pub peak_reserved: u64,
    /// Requests of a step that grow with the batch.
    pub num_scaling: usize,
}

/// Why nothing can be said of another batch size.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CannotTell {
    #[error(
        "the recording has no marked steps\nhint: call step(batch_size=…) of the recorder at the start of each step"
    )]
    NoSteps,
    #[error(
        "the events have no times, so marks cannot be placed\nhint: PyTorch 2.2 or later records them"
    )]
    NoTimes,
    #[error(
        "all marked steps have the same batch size\nhint: record one more step with another batch size"
    )]
    OneBatchSize,
    #[error("steps of different batch sizes made different requests: {first} against {second}")]
    StepsDiffer { first: usize, second: usize },
}

/// A step: its batch and its operations.
struct Step {
    batch: u64,
    start: usize,
    end: usize,
}

/// Peaks of the recorded program with a further step of `batch` samples.
pub fn batch_effect(
    snapshot: &Snapshot,
    device: usize,
    config: &AllocatorConfig,
    batch: u64,
) -> Result<Result<BatchEffect, CannotTell>, TorchError> {
    let program = snapshot.program(device)?;
    Ok(steps(snapshot, device, &program)
        .and_then(|steps| pair(&program, &steps))
        .map(|(first, second)| extend(&program, &first, &second, config, batch)))
}

fn steps(snapshot: &Snapshot, device: usize, program: &Program) -> Result<Vec<Step>, CannotTell> {
    let events = &snapshot.devices[device].trace.events;
    let marks: Vec<_> = snapshot
        .marks
        .iter()
        .filter_map(|mark| Some((mark.time, mark.batch?)))
        .collect();
    if marks.len() < 2 {
        return Err(CannotTell::NoSteps);
    }
    if events.iter().all(|event| event.time == 0) {
        return Err(CannotTell::NoTimes);
    }
    let place = |time| program.place_of_event(events.partition_point(|event| event.time < time));
    let mut places: Vec<usize> = marks.iter().map(|&(time, _)| place(time)).collect();
    // Clocks go backwards only in damaged files.
    places.sort_unstable();
    let end = program.operations().len();
    Ok(marks
        .iter()
        .enumerate()
        .map(|(index, &(_, batch))| Step {
            batch,
            start: places[index],
            end: places.get(index + 1).copied().unwrap_or(end),
        })
        .collect())
}

/// A request of a step, with allocations named from the step's start.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Request {
    Allocate,
    /// Freed, by its number within the step, or one from before it.
    Free(Option<u32>),
    Other,
}

fn requests(program: &Program, step: &Step) -> (Vec<Request>, Vec<u64>) {
    let before = program.operations()[..step.start]
        .iter()
        .filter(|operation| matches!(operation, Operation::Allocate { .. }))
        .count() as u32;
    let mut sizes = Vec::new();
    let requests = program.operations()[step.start..step.end]
        .iter()
        .filter_map(|operation| match *operation {
            Operation::Allocate { bytes, .. } => {
                sizes.push(bytes);
                Some(Request::Allocate)
            }
            Operation::RequestFree { allocation } => {
                Some(Request::Free(allocation.checked_sub(before)))
            }
            // It follows its request.
            Operation::CompleteFree { .. } => None,
            Operation::ReleaseCached => Some(Request::Other),
        })
        .collect();
    (requests, sizes)
}

/// What a step's requests need beyond their order: the batch and the sizes.
struct Sizes {
    batch: u64,
    start: usize,
    end: usize,
    bytes: Vec<u64>,
}

/// The last two steps of different batch sizes that made the same requests.
fn pair(program: &Program, steps: &[Step]) -> Result<(Sizes, Sizes), CannotTell> {
    let mut differ = None;
    for (later, second) in steps.iter().enumerate().rev() {
        for (earlier, first) in steps[..later].iter().enumerate().rev() {
            if first.batch == second.batch {
                continue;
            }
            let (first_requests, first_sizes) = requests(program, first);
            let (second_requests, second_sizes) = requests(program, second);
            if first_requests == second_requests && !first_sizes.is_empty() {
                let sizes = |step: &Step, bytes| Sizes {
                    batch: step.batch,
                    start: step.start,
                    end: step.end,
                    bytes,
                };
                return Ok((sizes(first, first_sizes), sizes(second, second_sizes)));
            }
            differ.get_or_insert(CannotTell::StepsDiffer {
                first: earlier,
                second: later,
            });
        }
    }
    Err(differ.unwrap_or(CannotTell::OneBatchSize))
}

/// The recorded program up to the later step, whose requests are then made at the new sizes.
fn extend(
    program: &Program,
    first: &Sizes,
    second: &Sizes,
    config: &AllocatorConfig,
    batch: u64,
) -> BatchEffect {
    let span = i128::from(second.batch) - i128::from(first.batch);
    let distance = i128::from(batch) - i128::from(first.batch);
    let mut sizes = first.bytes.iter().zip(&second.bytes).map(|(&one, &two)| {
        let growth = (i128::from(two) - i128::from(one)) * distance;
        let bytes = i128::from(one) + growth.div_euclid(span);
        u64::try_from(bytes.max(0)).unwrap_or(u64::MAX)
    });
    let mut extended = Program::default();
    for (place, &operation) in program.operations()[..second.end].iter().enumerate() {
        if place == second.start {
            extended.end_prelude();
        }
        match operation {
            Operation::Allocate { bytes, stream } => {
                let bytes = if place < second.start {
                    bytes
                } else {
                    sizes.next().unwrap_or(bytes)
                };
                extended.allocate(bytes, stream, None);
            }
            other => extended.push(other),
        }
    }
    let outcome = replay(&extended, config, None);
    BatchEffect {
        batch,
        peak_allocated: outcome.statistics.allocated.peak,
        peak_reserved: outcome.statistics.reserved.peak,
        num_scaling: first
            .bytes
            .iter()
            .zip(&second.bytes)
            .filter(|(one, two)| one != two)
            .count(),
    }
}
