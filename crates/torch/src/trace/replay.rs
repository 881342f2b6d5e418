//! Runs a program through the allocator: to see that the copy does what PyTorch did, and what
//! PyTorch would have done under other settings.

use serde::Serialize;
use std::collections::HashMap;

use super::{Operation, Program};
use crate::allocator::{
    Allocator, AllocatorConfig, BlockId, OutOfMemory, SegmentEvent, Statistics,
};
use crate::snapshot::restore;

/// What a program needs under some settings.
#[derive(Clone, Debug)]
pub struct ReplayOutcome {
    pub statistics: Statistics,
    /// The request at which memory ran out, with its place in the program.
    pub out_of_memory: Option<(usize, OutOfMemory)>,
}

/// Runs a program from an empty allocator. Blocks that were alive when the recording began are
/// allocated first, in the order of their addresses.
pub fn replay(
    program: &Program,
    config: &AllocatorConfig,
    device_total: Option<u64>,
) -> ReplayOutcome {
    let mut allocator = Allocator::new(config.clone(), device_total);
    let mut blocks: Vec<Option<BlockId>> = Vec::with_capacity(program.num_allocations());
    let mut out_of_memory = None;
    for (place, &operation) in program.operations().iter().enumerate() {
        if place == program.num_prelude as usize {
            allocator.reset_peaks();
        }
        if let Err(error) = operation.run(&mut allocator, &mut blocks) {
            out_of_memory = Some((place, error));
            break;
        }
        // Nobody compares them here.
        allocator.take_segment_events();
    }
    ReplayOutcome {
        statistics: *allocator.statistics(),
        out_of_memory,
    }
}

/// Where the copy and the recording part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// Asked of the driver at other moments or in other sizes.
    Segments {
        operation: usize,
        recorded: Vec<SegmentEvent>,
        replayed: Vec<SegmentEvent>,
    },
    /// A request got another block: the recorded address is not where the copy put it.
    Place {
        operation: usize,
        allocation: u32,
        recorded: u64,
        replayed: u64,
    },
}

/// A replay beside its recording.
#[derive(Clone, Debug)]
pub struct Comparison {
    pub num_operations: usize,
    /// Events of the driver in the recording, and how many the copy produced at the same moment
    /// with the same size.
    pub num_segment_events: usize,
    pub num_matched_segment_events: usize,
    /// Requests with a recorded address, and how many got that very block.
    pub num_places: usize,
    pub num_matched_places: usize,
    /// The first differences, up to a handful.
    pub differences: Vec<Difference>,
    /// Reserved bytes after the last event, as recorded (the start's and the events' sum) and as
    /// replayed.
    pub reserved_recorded: u64,
    pub reserved_replayed: u64,
    /// The highest value of each.
    pub peak_reserved_recorded: u64,
    pub peak_reserved_replayed: u64,
    pub statistics: Statistics,
}

impl Comparison {
    /// Every event of the driver and every block are the same.
    pub fn is_exact(&self) -> bool {
        self.differences.is_empty()
            && self.num_matched_segment_events == self.num_segment_events
            && self.num_matched_places == self.num_places
    }
}

const NUM_DIFFERENCES_KEPT: usize = 8;

/// Runs a program under the settings it was recorded with and compares event by event. New
/// segments take the recorded addresses. Addresses in segments from before the recording are
/// compared up to one shift for each segment, unless the segments themselves are known.
pub fn compare(program: &Program, config: &AllocatorConfig) -> Comparison {
    let mut allocator = Allocator::new(config.clone(), None);
    let mut blocks: Vec<Option<BlockId>> = Vec::with_capacity(program.num_allocations());
    let mut comparison = Comparison {
        num_operations: program.operations().len(),
        num_segment_events: program.segment_events.len(),
        num_matched_segment_events: 0,
        num_places: 0,
        num_matched_places: 0,
        differences: Vec::new(),
        reserved_recorded: 0,
        reserved_replayed: 0,
        peak_reserved_recorded: 0,
        peak_reserved_replayed: 0,
        statistics: Statistics::default(),
    };
    let mut start = 0;
    let mut shifts = Shifts::default();
    if let Some(initial) = &program.initial {
        let restored = restore(&mut allocator, initial);
        blocks.extend(restored);
        start = program.num_prelude as usize;
        shifts.exact = true;
    }
    let mut recorded_reserved = None;
    let mut segment_events = program.segment_events.iter().peekable();
    for (place, &operation) in program.operations().iter().enumerate().skip(start) {
        if place >= program.num_prelude as usize && recorded_reserved.is_none() {
            allocator.reset_peaks();
            recorded_reserved = Some(allocator.statistics().reserved.current);
            comparison.peak_reserved_recorded = allocator.statistics().reserved.current;
        }
        let mut recorded = Vec::new();
        while let Some((_, event)) = segment_events.next_if(|(at, event)| {
            // A release is the operation before its own events; a segment for the next request
            // may follow them.
            let at = *at as usize;
            let released = matches!(
                event,
                SegmentEvent::Free { .. } | SegmentEvent::Unmap { .. }
            );
            at == place || (operation == Operation::ReleaseCached && at == place + 1 && released)
        }) {
            recorded.push(*event);
        }
        allocator.place_next_segment(recorded.iter().find_map(|event| match event {
            SegmentEvent::Alloc { address, .. } => Some(*address),
            SegmentEvent::Map { address, .. } if shifts.exact => Some(*address),
            _ => None,
        }));
        // Without a device nothing runs out.
        let _ = operation.run(&mut allocator, &mut blocks);
        allocator.place_next_segment(None);
        let replayed = allocator.take_segment_events();
        if place < program.num_prelude as usize {
            continue;
        }
        let matched = matched_events(&recorded, &replayed);
        comparison.num_matched_segment_events += matched;
        if let Some(reserved) = recorded_reserved.as_mut() {
            *reserved = recorded.iter().fold(*reserved, |sum, event| match *event {
                SegmentEvent::Alloc { bytes, .. } | SegmentEvent::Map { bytes, .. } => {
                    sum.saturating_add(bytes)
                }
                SegmentEvent::Free { bytes, .. } | SegmentEvent::Unmap { bytes, .. } => {
                    sum.saturating_sub(bytes)
                }
            });
            comparison.peak_reserved_recorded = comparison.peak_reserved_recorded.max(*reserved);
        }
        let mut differs = None;
        if matched != recorded.len() || matched != replayed.len() {
            differs = Some(Difference::Segments {
                operation: place,
                recorded,
                replayed,
            });
        }
        if let Operation::Allocate { .. } = operation {
            let allocation = (blocks.len() - 1) as u32;
            if let (Some(recorded), Some(id)) = (
                program.addresses[allocation as usize],
                blocks[allocation as usize],
            ) {
                comparison.num_places += 1;
                let (segment, replayed) = allocator.segment_of(id);
                if shifts.agree(segment, recorded, replayed) {
                    comparison.num_matched_places += 1;
                } else if differs.is_none() {
                    differs = Some(Difference::Place {
                        operation: place,
                        allocation,
                        recorded,
                        replayed,
                    });
                }
            }
        }
        if let Some(difference) = differs
            && comparison.differences.len() < NUM_DIFFERENCES_KEPT
        {
            comparison.differences.push(difference);
        }
    }
    comparison.statistics = *allocator.statistics();
    comparison.reserved_replayed = allocator.statistics().reserved.current;
    comparison.peak_reserved_replayed = allocator.statistics().reserved.peak;
    comparison.reserved_recorded = recorded_reserved.unwrap_or(comparison.reserved_replayed);
    comparison
}

/// How many events have the same kind and size, regardless of order: the order in which free
/// segments go back is the driver's affair.
fn matched_events(recorded: &[SegmentEvent], replayed: &[SegmentEvent]) -> usize {
    let key = |event: &SegmentEvent| match *event {
        SegmentEvent::Alloc { bytes, .. } => (0, bytes),
        SegmentEvent::Free { bytes, .. } => (1, bytes),
        SegmentEvent::Map { bytes, .. } => (2, bytes),
        SegmentEvent::Unmap { bytes, .. } => (3, bytes),
    };
    let mut counts: HashMap<_, usize> = HashMap::new();
    for event in recorded {
        *counts.entry(key(event)).or_default() += 1;
    }
    replayed
        .iter()
        .filter(|event| {
            counts
                .get_mut(&key(event))
                .filter(|count| **count > 0)
                .map(|count| *count -= 1)
                .is_some()
        })
        .count()
}

/// Recorded minus replayed address of segments, learned from the first block in each.
#[derive(Default)]
struct Shifts {
    by_segment: HashMap<u64, i128>,
    exact: bool,
}

impl Shifts {
    fn agree(&mut self, segment: u64, recorded: u64, replayed: u64) -> bool {
        let shift = i128::from(recorded) - i128::from(replayed);
        if self.exact {
            return shift == 0;
        }
        *self.by_segment.entry(segment).or_insert(shift) == shift
    }
}

/// One line of [`what_if`].
#[derive(Clone, Debug, Serialize)]
pub struct WhatIf {
    /// The text of `PYTORCH_ALLOC_CONF`.
    pub settings: String,
    pub peak_reserved: u64,
    pub peak_allocated: u64,
    pub num_alloc_retries: u64,
    pub num_device_alloc: u64,
    /// Memory ran out at this request of the program.
    pub out_of_memory_at: Option<usize>,
}

/// What the same requests need under each of the settings.
pub fn what_if(
    program: &Program,
    settings: &[(String, AllocatorConfig)],
    device_total: Option<u64>,
) -> Vec<WhatIf> {
    settings
        .iter()
        .map(|(text, config)| {
            let outcome = replay(program, config, device_total);
            WhatIf {
                settings: text.clone(),
                peak_reserved: outcome.statistics.reserved.peak,
                peak_allocated: outcome.statistics.allocated.peak,
                num_alloc_retries: outcome.statistics.num_alloc_retries,
                num_device_alloc: outcome.statistics.num_device_alloc,
                out_of_memory_at: outcome.out_of_memory.map(|(place, _)| place),
            }
        })
        .collect()
}
