//! What a run holds, by kind: the parts that stay from step to step, and the most that each passing part takes.
//!
//! Sums of what tensors ask for, before the allocator rounds. The parts have their peaks at different times, so they do
//! not add up to the run's peak.

use crate::TorchError;
use crate::eager::{AllocationCategory, Event};
use crate::model::Workload;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Parameters and buffers, frozen ones included.
    pub parameters: u64,
    /// States that the optimizer keeps between steps.
    pub optimizer: u64,
    /// The most that an optimizer step takes besides.
    pub optimizer_temporaries: u64,
    /// What leaves take as gradients: those of parameters, and of embeddings where adapters are checkpointed.
    pub gradients: u64,
    /// The most that a batch, what is kept for backward and what backward makes take at once.
    pub activations: u64,
    /// The part of these that is the batch.
    pub batch: u64,
    /// Workspaces of matrix products.
    pub workspaces: u64,
}

impl Holdings {
    pub fn of(workload: &Workload) -> Result<Holdings, TorchError> {
        Ok(Holdings::from_events(&workload.events()?))
    }

    pub fn from_events(events: &[Event]) -> Holdings {
        // What a block was for is known for certain when it is freed: a gradient is made as any other tensor.
        let mut purpose: Vec<AllocationCategory> =
            events.iter().map(|event| event.category).collect();
        for event in events.iter().filter(|event| event.is_free) {
            if let Some(category) = purpose.get_mut(event.id as usize) {
                *category = event.category;
            }
        }
        let mut counters = [Counter::default(); CATEGORIES];
        let mut activations = Counter::default();
        for event in events {
            let category = purpose
                .get(event.id as usize)
                .copied()
                .unwrap_or(event.category);
            counters[category as usize].count(event);
            if matches!(
                category,
                AllocationCategory::Batch
                    | AllocationCategory::Activation
                    | AllocationCategory::Backward
            ) {
                activations.count(event);
            }
        }
        let of = |category: AllocationCategory| counters[category as usize];
        let optimizer = of(AllocationCategory::Optimizer);
        Holdings {
            parameters: of(AllocationCategory::Parameter).current,
            optimizer: optimizer.current,
            optimizer_temporaries: optimizer.peak - optimizer.current,
            gradients: of(AllocationCategory::Gradient).peak,
            activations: activations.peak,
            batch: of(AllocationCategory::Batch).peak,
            workspaces: of(AllocationCategory::Workspace).peak,
        }
    }
}

/// Kinds of memory: one more than the last of them.
const CATEGORIES: usize = AllocationCategory::Workspace as usize + 1;

#[derive(Clone, Copy, Default)]
struct Counter {
    current: u64,
    peak: u64,
}

impl Counter {
    fn count(&mut self, event: &Event) {
        if event.is_free {
            self.current = self.current.saturating_sub(event.bytes);
        } else {
            self.current += event.bytes;
            self.peak = self.peak.max(self.current);
        }
    }
}
