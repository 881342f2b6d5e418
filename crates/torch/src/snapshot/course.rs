//! The course of a recorded run: memory over its operations, its peaks, and where the bytes are
//! that were reserved but that no tensor asked for.

use std::collections::BTreeMap;

use serde::Serialize;

use super::category::{Phases, RecordedCategory, RecordedPhase};
use super::restore;
use crate::allocator::{Allocator, AllocatorConfig, BlockId, SegmentView};
use crate::trace::{Operation, Program};

/// Points of the timeline at most.
const NUM_MOMENTS: usize = 400;

/// The most that was reached between two points of the timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TimelinePoint {
    /// The operation at which it was reached.
    pub operation: usize,
    pub phase: RecordedPhase,
    pub allocated: u64,
    pub reserved: u64,
    /// What tensors asked for, by what for.
    pub categories: BTreeMap<RecordedCategory, u64>,
}

/// Where the bytes are that were reserved but that no tensor asked for, when the most was
/// reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fragmentation {
    pub reserved: u64,
    pub allocated: u64,
    pub requested: u64,
    /// Rounding to 512 bytes, and rests of blocks too small to be cut off.
    pub inside_blocks: u64,
    /// Free blocks in segments of the small pool.
    pub small_pool: u64,
    /// Segments of the large pool without any tensor: given back before memory runs out.
    pub free_segments: u64,
    /// Free blocks between tensors in the large pool: cannot be given back.
    pub holes: u64,
    pub largest_hole: u64,
}

/// The run as it was recorded: peaks, timeline, and the state when the most was reserved.
pub(super) struct Run {
    pub peak_allocated: u64,
    pub peak_allocated_at: usize,
    pub peak_phase: RecordedPhase,
    pub peak_reserved: u64,
    pub timeline: Vec<TimelinePoint>,
    pub fragmentation: Fragmentation,
}

impl Run {
    pub fn new(
        program: &Program,
        config: &AllocatorConfig,
        phases: &Phases,
        categories: &[RecordedCategory],
    ) -> Self {
        let mut points: Vec<Point> = Vec::new();
        let mut phase = RecordedPhase::Loop;
        let mut living = Living::new(program, categories);
        let num_operations = program.operations().len() - program.num_prelude();
        let width = num_operations.div_ceil(NUM_MOMENTS).max(1);
        let start = program.num_prelude().saturating_sub(1);
        let mut peak_allocated = (0, start, phase);
        let mut peak_reserved = (0, start);
        walk(program, config, |place, operation, allocator| {
            if let Some(operation) = operation {
                if let Operation::Allocate { .. } = operation {
                    phase = phases.get(program.stack(living.bytes.len() as u32));
                }
                living.take(operation);
            }
            let allocated = allocator.statistics().allocated.current;
            let reserved = allocator.statistics().reserved.current;
            if allocated > peak_allocated.0 {
                peak_allocated = (allocated, place, phase);
            }
            if reserved > peak_reserved.0 {
                peak_reserved = (reserved, place);
            }
            let point = Point {
                operation: place,
                phase,
                allocated,
                reserved,
                sums: living.sums,
            };
            let bucket = |place: usize| (place + 1).saturating_sub(program.num_prelude()) / width;
            match points.last_mut() {
                Some(last) if bucket(last.operation) == bucket(place) => {
                    let reserved = last.reserved.max(reserved);
                    if allocated > last.allocated {
                        *last = point;
                    }
                    last.reserved = reserved;
                }
                _ => points.push(point),
            }
            true
        });
        let mut fragmentation = Fragmentation::default();
        walk(program, config, |place, _, allocator| {
            if place < peak_reserved.1 {
                return true;
            }
            fragmentation = Fragmentation::of(allocator);
            false
        });
        Self {
            peak_allocated: peak_allocated.0,
            peak_allocated_at: peak_allocated.1,
            peak_phase: peak_allocated.2,
            peak_reserved: peak_reserved.0,
            timeline: points.iter().map(Point::named).collect(),
            fragmentation,
        }
    }
}

/// A point of the timeline while it may still be replaced by a higher one.
struct Point {
    operation: usize,
    phase: RecordedPhase,
    allocated: u64,
    reserved: u64,
    sums: [u64; RecordedCategory::ALL.len()],
}

impl Point {
    fn named(&self) -> TimelinePoint {
        let named = RecordedCategory::ALL.into_iter().zip(self.sums);
        TimelinePoint {
            operation: self.operation,
            phase: self.phase,
            allocated: self.allocated,
            reserved: self.reserved,
            categories: named.filter(|&(_, bytes)| bytes > 0).collect(),
        }
    }
}

/// The bytes that living tensors asked for, by category.
struct Living<'program> {
    categories: &'program [RecordedCategory],
    /// By allocation; zero once it is free.
    bytes: Vec<u64>,
    sums: [u64; RecordedCategory::ALL.len()],
}

impl<'program> Living<'program> {
    /// What is alive when the recording begins.
    fn new(program: &Program, categories: &'program [RecordedCategory]) -> Self {
        let mut living = Self {
            categories,
            bytes: Vec::with_capacity(program.num_allocations()),
            sums: [0; RecordedCategory::ALL.len()],
        };
        for operation in &program.operations()[..program.num_prelude()] {
            living.take(operation);
        }
        living
    }

    fn take(&mut self, operation: &Operation) {
        match *operation {
            Operation::Allocate { bytes, .. } => {
                self.sums[self.categories[self.bytes.len()] as usize] += bytes;
                self.bytes.push(bytes);
            }
            Operation::RequestFree { allocation } => {
                let bytes = std::mem::take(&mut self.bytes[allocation as usize]);
                self.sums[self.categories[allocation as usize] as usize] -= bytes;
            }
            Operation::CompleteFree { .. } | Operation::ReleaseCached => {}
        }
    }
}

/// Runs a program from its recorded start. `visit` sees the start, with the place before the
/// first operation, and then the state after each; it returns whether to go on.
fn walk(
    program: &Program,
    config: &AllocatorConfig,
    mut visit: impl FnMut(usize, Option<&Operation>, &Allocator) -> bool,
) {
    let mut allocator = Allocator::new(config.clone(), None);
    let mut blocks: Vec<Option<BlockId>> = Vec::with_capacity(program.num_allocations());
    let mut first = 0;
    if let Some(initial) = program.initial() {
        blocks.extend(restore(&mut allocator, initial));
        first = program.num_prelude();
    }
    if first > 0 && !visit(first - 1, None, &allocator) {
        return;
    }
    for (place, operation) in program.operations().iter().enumerate().skip(first) {
        // Without a device only a damaged file runs out of memory; its request is left out.
        let _ = operation.run(&mut allocator, &mut blocks);
        allocator.take_segment_events();
        if place >= program.num_prelude() && !visit(place, Some(operation), &allocator) {
            return;
        }
    }
}

impl Fragmentation {
    fn of(allocator: &Allocator) -> Self {
        let statistics = allocator.statistics();
        let mut fragmentation = Self {
            reserved: statistics.reserved.current,
            allocated: statistics.active.current,
            requested: statistics.requested.current,
            inside_blocks: statistics.active.current - statistics.requested.current,
            ..Self::default()
        };
        for segment in allocator.segments() {
            fragmentation.add(&segment);
        }
        fragmentation
    }

    fn add(&mut self, segment: &SegmentView) {
        let is_used = segment
            .blocks
            .iter()
            .any(|block| block.allocated || block.pending);
        for block in &segment.blocks {
            if block.allocated || block.pending {
                continue;
            }
            if segment.small {
                self.small_pool += block.size;
            } else if is_used {
                self.holes += block.size;
                self.largest_hole = self.largest_hole.max(block.size);
            } else {
                self.free_segments += block.size;
            }
        }
    }
}
