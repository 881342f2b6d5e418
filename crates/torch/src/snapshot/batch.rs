//! What another batch size would take, when the recording can tell.
//!
//! Two steps of different batch sizes that made the same requests in the same order give each
//! request's size as a line through two points: `size(b) = s₁ + (s₂ − s₁)·(b − b₁)/(b₂ − b₁)`.
//! Other steps, such as the first one, which also makes the optimizer's states, are laid beside
//! these: a request of the same stack and of the size that the line has for that step's batch is
//! the same request, and what is left over keeps its size. The whole run is then replayed as if
//! every step had had the asked batch. With one batch size, or with steps that did different
//! things, nothing is known of other batches, and the answer says so.

use serde::Serialize;
use thiserror::Error;

use super::align::matches;
use super::steps::{Step, steps};
use super::{LARGEST_SIZE, Snapshot};
use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::trace::{Operation, Program, StackId, replay};

/// Peaks with another batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BatchEffect {
    pub batch: u64,
    /// What tensors ask for, before the allocator rounds it.
    pub peak_requested: u64,
    pub peak_allocated: u64,
    pub peak_reserved: u64,
    /// Whether the run ends without running out of the card's memory, if that is known. If not,
    /// the peaks are those of a card without end.
    pub fits: Option<bool>,
    /// How often all cached segments go back to the driver because nothing else is left.
    pub num_alloc_retries: u64,
}

/// Why nothing can be said of another batch size.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CannotTell {
    #[error(
        "the recording has no marked steps\nhint: call step(batch_size=…) of the recorder (`cinch trace --script`) at the start of each step"
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
    #[error(
        "steps {first} and {second} have different batch sizes, but did different things\nhint: record two more steps, one of each batch size: the first step of a run also makes the optimizer's states"
    )]
    StepsDiffer { first: usize, second: usize },
}

/// A recorded run whose batch size can be changed.
pub struct Batches {
    program: Program,
    /// By allocation: its size at the two recorded batches; `None` if it has one size only.
    sizes: Vec<Option<(u64, u64)>>,
    /// The two batches whose steps were compared.
    pair: (u64, u64),
    /// The batches of all marked steps.
    recorded: Vec<u64>,
    num_scaling: usize,
    /// What the allocator can have of the card.
    capacity: Option<u64>,
}

impl Batches {
    pub fn new(snapshot: &Snapshot, device: usize) -> Result<Result<Self, CannotTell>, TorchError> {
        let program = snapshot.program(device)?;
        let capacity = snapshot.capacity(device);
        Ok(known_steps(snapshot, device, &program)
            .and_then(|steps| Self::compare(program, &steps, capacity)))
    }

    fn compare(
        program: Program,
        steps: &[Marked],
        capacity: Option<u64>,
    ) -> Result<Self, CannotTell> {
        let reference = pair(&program, steps)?;
        let mut sizes = vec![None; program.num_allocations()];
        for step in steps {
            reference.apply(&program, step, &mut sizes);
        }
        let mut recorded: Vec<u64> = steps.iter().map(|step| step.batch).collect();
        recorded.sort_unstable();
        recorded.dedup();
        Ok(Self {
            pair: reference.batches,
            num_scaling: reference.num_scaling(),
            program,
            sizes,
            recorded,
            capacity,
        })
    }

    /// The batch sizes of the marked steps, each once, ascending.
    pub fn recorded(&self) -> &[u64] {
        &self.recorded
    }

    /// Requests of a step that grow with the batch.
    pub fn num_scaling(&self) -> usize {
        self.num_scaling
    }

    pub fn num_operations(&self) -> usize {
        self.program.operations().len()
    }

    /// What the allocator can have of the card: all but what was in use outside of it when the
    /// recording was saved.
    pub fn capacity(&self) -> Option<u64> {
        self.capacity
    }

    /// The run with `batch` samples in each marked step.
    pub fn effect(&self, config: &AllocatorConfig, batch: u64) -> BatchEffect {
        let program = self.with_batch(batch);
        let limited = self
            .capacity
            .map(|capacity| replay(&program, config, Some(capacity)));
        let fits = limited.as_ref().map(|run| run.out_of_memory.is_none());
        let run = limited
            .filter(|run| run.out_of_memory.is_none())
            .unwrap_or_else(|| replay(&program, config, None));
        BatchEffect {
            batch,
            peak_requested: run.statistics.requested.peak,
            peak_allocated: run.statistics.allocated.peak,
            peak_reserved: run.statistics.reserved.peak,
            fits,
            num_alloc_retries: run.statistics.num_alloc_retries,
        }
    }

    /// The largest batch up to `most` that fits the card, `None` if not even 1 does or the card
    /// is not known.
    pub fn largest_that_fits(&self, config: &AllocatorConfig, most: u64) -> Option<BatchEffect> {
        let fitting = |batch| {
            let effect = self.effect(config, batch);
            (effect.fits == Some(true)).then_some(effect)
        };
        let mut largest = fitting(1)?;
        let mut too_large = most.saturating_add(1);
        while largest.batch.saturating_mul(2) < too_large {
            match fitting(largest.batch * 2) {
                Some(effect) => largest = effect,
                None => too_large = largest.batch * 2,
            }
        }
        while largest.batch + 1 < too_large {
            let middle = largest.batch.midpoint(too_large);
            match fitting(middle) {
                Some(effect) => largest = effect,
                None => too_large = middle,
            }
        }
        Some(largest)
    }

    fn with_batch(&self, batch: u64) -> Program {
        let mut changed = Program::default();
        let mut sizes = self.sizes.iter();
        for (place, &operation) in self.program.operations().iter().enumerate() {
            if place == self.program.num_prelude() {
                changed.end_prelude();
            }
            match operation {
                Operation::Allocate { bytes, stream } => {
                    let bytes = match sizes.next().copied().flatten() {
                        Some(sizes) => on_line(self.pair, sizes, batch),
                        None => bytes,
                    };
                    changed.allocate(bytes, stream, None);
                }
                other => changed.push(other),
            }
        }
        changed
    }
}

/// The size at a batch, on the line through the sizes at two.
fn on_line(batches: (u64, u64), (one, two): (u64, u64), batch: u64) -> u64 {
    let span = i128::from(batches.1) - i128::from(batches.0);
    let distance = i128::from(batch) - i128::from(batches.0);
    let growth = (i128::from(two) - i128::from(one)).saturating_mul(distance);
    let bytes = i128::from(one).saturating_add(growth.div_euclid(span));
    bytes.clamp(0, i128::from(LARGEST_SIZE)) as u64
}

/// A step whose batch is known.
#[derive(Clone, Copy)]
struct Marked {
    number: usize,
    batch: u64,
    start: usize,
    end: usize,
    /// Allocations before it.
    first_allocation: u32,
}

fn known_steps(
    snapshot: &Snapshot,
    device: usize,
    program: &Program,
) -> Result<Vec<Marked>, CannotTell> {
    let with_batch = snapshot.marks.iter().filter(|mark| mark.batch.is_some());
    if with_batch.count() < 2 {
        return Err(CannotTell::NoSteps);
    }
    let steps = steps(snapshot, device, program);
    if steps.is_empty() {
        return Err(CannotTell::NoTimes);
    }
    let mut place = 0;
    let mut first_allocation = 0;
    let mut marked = Vec::new();
    for Step {
        number,
        batch,
        start,
        end,
    } in steps
    {
        let between = &program.operations()[place..start];
        first_allocation += between.iter().filter(|one| is_allocation(one)).count() as u32;
        place = start;
        if let Some(batch) = batch {
            marked.push(Marked {
                number,
                batch,
                start,
                end,
                first_allocation,
            });
        }
    }
    Ok(marked)
}

fn is_allocation(operation: &Operation) -> bool {
    matches!(operation, Operation::Allocate { .. })
}

/// A request of a step, with allocations named from the step's start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Request {
    /// By its stack.
    Allocate(usize),
    /// Freed, by its number within the step, or one from before it.
    Free(Option<u32>),
    ReleaseCached,
}

impl Marked {
    /// From the first allocation to the last: marks are a few microseconds off, so that a free
    /// at either end may have fallen to the neighbour. Frees in a row are in the order of their
    /// allocations: autocast drops its casts in the order of a hash table of addresses, another
    /// one in each step.
    fn requests(&self, program: &Program) -> Vec<Request> {
        let mut allocation = self.first_allocation;
        let mut requests: Vec<Request> = program.operations()[self.start..self.end]
            .iter()
            .filter_map(|operation| match *operation {
                Operation::Allocate { .. } => {
                    allocation += 1;
                    Some(Request::Allocate(program.stack(allocation - 1).index()))
                }
                Operation::RequestFree { allocation } => {
                    Some(Request::Free(allocation.checked_sub(self.first_allocation)))
                }
                // It follows its request.
                Operation::CompleteFree { .. } => None,
                Operation::ReleaseCached => Some(Request::ReleaseCached),
            })
            .collect();
        let is_allocation = |request: &Request| matches!(request, Request::Allocate(_));
        let last = requests.iter().rposition(is_allocation);
        requests.truncate(last.map_or(0, |last| last + 1));
        let first = requests.iter().position(is_allocation).unwrap_or(0);
        let mut requests = requests.split_off(first);
        let is_free = |request: &Request| matches!(request, Request::Free(_));
        for run in requests.chunk_by_mut(|one, two| is_free(one) && is_free(two)) {
            run.sort_unstable();
        }
        requests
    }

    /// Who allocated how much, in order.
    fn allocations(&self, program: &Program) -> Vec<(StackId, u64)> {
        let operations = program.operations()[self.start..self.end].iter();
        let sizes = operations.filter_map(|operation| match *operation {
            Operation::Allocate { bytes, .. } => Some(bytes),
            _ => None,
        });
        (self.first_allocation..)
            .zip(sizes)
            .map(|(allocation, bytes)| (program.stack(allocation), bytes))
            .collect()
    }
}

/// What a step asks for at two batch sizes.
struct Reference {
    batches: (u64, u64),
    allocations: Vec<(StackId, (u64, u64))>,
}

/// The last two steps of different batch sizes that made the same requests.
fn pair(program: &Program, steps: &[Marked]) -> Result<Reference, CannotTell> {
    let requests: Vec<_> = steps.iter().map(|step| step.requests(program)).collect();
    let mut differ = None;
    for (later, second) in steps.iter().enumerate().rev() {
        for (earlier, first) in steps[..later].iter().enumerate().rev() {
            if first.batch == second.batch {
                continue;
            }
            if requests[earlier] == requests[later] && !requests[later].is_empty() {
                let sizes = second.allocations(program).into_iter();
                let allocations = first.allocations(program).into_iter().zip(sizes);
                return Ok(Reference {
                    batches: (first.batch, second.batch),
                    allocations: allocations
                        .map(|((stack, one), (_, two))| (stack, (one, two)))
                        .collect(),
                });
            }
            differ.get_or_insert(CannotTell::StepsDiffer {
                first: first.number,
                second: second.number,
            });
        }
    }
    Err(differ.unwrap_or(CannotTell::OneBatchSize))
}

impl Reference {
    fn num_scaling(&self) -> usize {
        let scaling = |(_, (one, two)): &&(StackId, (u64, u64))| one != two;
        self.allocations.iter().filter(scaling).count()
    }

    /// Gives a step's allocations the sizes of the requests that they are.
    fn apply(&self, program: &Program, step: &Marked, sizes: &mut [Option<(u64, u64)>]) {
        let recorded = step.allocations(program);
        let expected: Vec<(StackId, u64)> = self
            .allocations
            .iter()
            .map(|&(stack, sizes)| (stack, on_line(self.batches, sizes, step.batch)))
            .collect();
        for (place, same) in matches(&recorded, &expected) {
            sizes[step.first_allocation as usize + place] = Some(self.allocations[same].1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_lie_on_a_line() {
        assert_eq!(on_line((8, 16), (100, 180), 32), 340);
        assert_eq!(on_line((16, 8), (180, 100), 32), 340);
        assert_eq!(on_line((8, 16), (100, 180), 1), 30);
        assert_eq!(on_line((8, 16), (100, 500), 1), 0);
        assert_eq!(on_line((0, 1), (0, u64::MAX), u64::MAX), LARGEST_SIZE);
    }
}
