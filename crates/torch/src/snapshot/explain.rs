//! What a recorded run used its memory for, what the allocator added, and what other settings
//! would have done.

use serde::Serialize;

use super::category::{Category, Phase, Phases, categories};
use super::{Snapshot, restore};
use crate::TorchError;
use crate::allocator::{Allocator, AllocatorConfig, BlockId, SegmentView};
use crate::trace::{Operation, Program, StackId, WhatIf, compare, what_if};

/// Points of the timeline at most.
const NUM_MOMENTS: usize = 400;
/// Tensors listed at the peak.
const NUM_TENSORS: usize = 20;
/// Frames shown of each.
const NUM_FRAMES: usize = 6;

/// Settings that the guides recommend, to be tried on the recorded requests.
const SETTINGS: [&str; 6] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:8",
];

/// Bytes of a category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryBytes {
    pub category: Category,
    pub bytes: u64,
    pub num_blocks: usize,
}

/// A block that lived at the peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveBlock {
    pub bytes: u64,
    pub category: Category,
    /// Innermost first, as `file:line:function`.
    pub frames: Vec<String>,
}

/// The most that was reached between two points of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TimelinePoint {
    /// The operation at which it was reached.
    pub operation: usize,
    pub phase: Phase,
    pub allocated: u64,
    pub reserved: u64,
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

/// How well the allocator's copy repeats the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fidelity {
    pub exact: bool,
    pub num_segment_events: usize,
    pub num_matched_segment_events: usize,
    pub num_blocks: usize,
    pub num_matched_blocks: usize,
}

impl Fidelity {
    fn new(program: &Program, config: &AllocatorConfig) -> Self {
        let comparison = compare(program, config);
        Self {
            exact: comparison.is_exact(),
            num_segment_events: comparison.num_segment_events,
            num_matched_segment_events: comparison.num_matched_segment_events,
            num_blocks: comparison.num_places,
            num_matched_blocks: comparison.num_matched_places,
        }
    }
}

/// Everything there is to say about a recorded run.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    pub device: usize,
    pub num_events: usize,
    pub settings: String,
    pub peak_allocated: u64,
    pub peak_reserved: u64,
    /// At the peak of allocated bytes, the largest first.
    pub categories: Vec<CategoryBytes>,
    pub largest: Vec<LiveBlock>,
    pub timeline: Vec<TimelinePoint>,
    pub fragmentation: Fragmentation,
    /// `None` if the file has no segments: the start is not known then.
    pub fidelity: Option<Fidelity>,
    /// The first line is the recorded settings from an empty start, to compare the others with.
    pub what_if: Vec<WhatIf>,
    /// What limits the answer.
    pub notes: Vec<String>,
}

/// Explains the busiest device of a snapshot.
pub fn explain(snapshot: &Snapshot) -> Result<Explanation, TorchError> {
    let config = snapshot.config()?;
    let device = snapshot.busiest_device().unwrap_or(0);
    let Some(record) = snapshot.devices.get(device) else {
        return Ok(nothing(snapshot));
    };
    let program = snapshot.program(device)?;
    let phases = Phases::new(&snapshot.frames);
    let categories = categories(&program, &phases);
    let run = Run::new(&program, &config, &phases);
    let mut at_peak = living_at(&program, run.peak_allocated_at);
    at_peak.sort_by_key(|&(allocation, bytes)| (std::cmp::Reverse(bytes), allocation));

    let recorded = snapshot.settings.clone().unwrap_or_default();
    let mut settings = vec![(recorded.clone(), config.clone())];
    for text in SETTINGS {
        if text != recorded {
            settings.push((text.to_owned(), AllocatorConfig::parse(text)?));
        }
    }
    Ok(Explanation {
        device,
        num_events: record.trace.events.len(),
        settings: recorded,
        peak_allocated: run.peak_allocated,
        peak_reserved: run.peak_reserved,
        categories: sums(&at_peak, &categories),
        largest: at_peak
            .iter()
            .take(NUM_TENSORS)
            .map(|&(allocation, bytes)| LiveBlock {
                bytes,
                category: categories[allocation as usize],
                frames: places(snapshot, program.stack(allocation)),
            })
            .collect(),
        timeline: run.timeline,
        fragmentation: run.fragmentation,
        fidelity: program.initial().map(|_| Fidelity::new(&program, &config)),
        what_if: what_if(&program, &settings, snapshot.device_total),
        notes: notes(snapshot, device, &program),
    })
}

fn nothing(snapshot: &Snapshot) -> Explanation {
    Explanation {
        device: 0,
        num_events: 0,
        settings: snapshot.settings.clone().unwrap_or_default(),
        peak_allocated: 0,
        peak_reserved: 0,
        categories: Vec::new(),
        largest: Vec::new(),
        timeline: Vec::new(),
        fragmentation: Fragmentation::default(),
        fidelity: None,
        what_if: Vec::new(),
        notes: vec!["The file holds no events and no segments.".into()],
    }
}

fn notes(snapshot: &Snapshot, device: usize, program: &Program) -> Vec<String> {
    let record = &snapshot.devices[device];
    let mut notes = Vec::new();
    if record.trace.events.is_empty() {
        notes.push(
            "No events were recorded: only the state at the end is known. Start the recording before the steps."
                .into(),
        );
    }
    match &record.segments {
        None => notes.push(
            "The file has events but no segments: what was allocated before the recording and not freed in it is missing from every figure."
                .into(),
        ),
        Some(_) if program.num_survivors() > 0 => notes.push(format!(
            "{} blocks were alive when the recording began. Under other settings they are placed in the order of their addresses, which may differ from the order in which they were allocated.",
            program.num_survivors()
        )),
        Some(_) => {}
    }
    if snapshot.complete == Some(false) {
        notes.push(
            "The recorder dropped its oldest events. Record fewer steps, or with more entries."
                .into(),
        );
    }
    if program.num_unknown_frees() > 0 {
        notes.push(format!(
            "{} frees are of blocks that nothing is known of; they are left out.",
            program.num_unknown_frees()
        ));
    }
    if snapshot.frames.num_stacks() <= 1 && !record.trace.events.is_empty() {
        notes.push(
            "No Python frames were recorded, so nothing can be said about categories.".into(),
        );
    }
    notes
}

fn places(snapshot: &Snapshot, stack: StackId) -> Vec<String> {
    snapshot
        .frames
        .get(stack)
        .take(NUM_FRAMES)
        .map(|frame| format!("{}:{}:{}", frame.file, frame.line, frame.function))
        .collect()
}

fn sums(at_peak: &[(u32, u64)], categories: &[Category]) -> Vec<CategoryBytes> {
    let mut sums: Vec<CategoryBytes> = Category::ALL
        .iter()
        .map(|&category| {
            let of_category = at_peak
                .iter()
                .filter(|&&(allocation, _)| categories[allocation as usize] == category);
            CategoryBytes {
                category,
                bytes: of_category.clone().map(|&(_, bytes)| bytes).sum(),
                num_blocks: of_category.count(),
            }
        })
        .filter(|sum| sum.num_blocks > 0)
        .collect();
    sums.sort_by_key(|sum| std::cmp::Reverse(sum.bytes));
    sums
}

/// Allocations alive after an operation, with the bytes they asked for.
fn living_at(program: &Program, operation: usize) -> Vec<(u32, u64)> {
    let mut bytes: Vec<Option<u64>> = Vec::new();
    for operation in program.operations().iter().take(operation + 1) {
        match *operation {
            Operation::Allocate { bytes: size, .. } => bytes.push(Some(size)),
            Operation::RequestFree { allocation } => bytes[allocation as usize] = None,
            Operation::CompleteFree { .. } | Operation::ReleaseCached => {}
        }
    }
    bytes
        .iter()
        .enumerate()
        .filter_map(|(allocation, bytes)| Some((allocation as u32, (*bytes)?)))
        .collect()
}

/// The run as it was recorded: peaks, timeline, and the state when the most was reserved.
struct Run {
    peak_allocated: u64,
    peak_allocated_at: usize,
    peak_reserved: u64,
    timeline: Vec<TimelinePoint>,
    fragmentation: Fragmentation,
}

impl Run {
    fn new(program: &Program, config: &AllocatorConfig, phases: &Phases) -> Self {
        let mut points: Vec<TimelinePoint> = Vec::new();
        let mut phase = Phase::Loop;
        let mut next_allocation = program.num_survivors() as u32;
        let num_steps = program.operations().len() - program.num_prelude();
        let width = num_steps.div_ceil(NUM_MOMENTS).max(1);
        let mut peak_allocated = (0, program.num_prelude().saturating_sub(1));
        let mut peak_reserved = (0, program.num_prelude().saturating_sub(1));
        walk(program, config, |place, operation, allocator| {
            if let Some(&Operation::Allocate { .. }) = operation {
                phase = phases.get(program.stack(next_allocation));
                next_allocation += 1;
            }
            let allocated = allocator.statistics().allocated.current;
            let reserved = allocator.statistics().reserved.current;
            if allocated > peak_allocated.0 {
                peak_allocated = (allocated, place);
            }
            if reserved > peak_reserved.0 {
                peak_reserved = (reserved, place);
            }
            let point = TimelinePoint {
                operation: place,
                phase,
                allocated,
                reserved,
            };
            let bucket = |place: usize| (place + 1).saturating_sub(program.num_prelude()) / width;
            match points.last_mut() {
                Some(last) if bucket(last.operation) == bucket(place) => {
                    if allocated > last.allocated {
                        *last = point;
                    }
                    last.reserved = last.reserved.max(reserved);
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
            peak_reserved: peak_reserved.0,
            timeline: points,
            fragmentation,
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
