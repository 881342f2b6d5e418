//! What was alive when the most was allocated: by category, block for block, and by the line
//! that asked for it.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde::Serialize;

use super::Snapshot;
use super::category::{Phases, RecordedCategory, RecordedPhase};
use super::origin::Origin;
use crate::trace::{Operation, Program, StackId};

/// Tensors listed at the peak.
const NUM_TENSORS: usize = 20;
/// Lines listed at the peak.
const NUM_LINES: usize = 40;
/// Frames given of each tensor.
const NUM_FRAMES: usize = 6;

/// Bytes of a category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryBytes {
    pub category: RecordedCategory,
    pub bytes: u64,
    pub num_blocks: usize,
}

/// A block that lived at the peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveBlock {
    pub bytes: u64,
    pub category: RecordedCategory,
    /// Innermost first, as `file:line:function`.
    pub frames: Vec<String>,
}

/// All blocks of one line and op that lived at the peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveLine {
    #[serde(flatten)]
    pub origin: Origin,
    pub category: RecordedCategory,
    /// What the step was doing when it asked for them.
    pub phase: RecordedPhase,
    pub bytes: u64,
    pub num_blocks: usize,
}

/// What was alive after one operation.
pub(super) struct Peak {
    pub categories: Vec<CategoryBytes>,
    pub largest: Vec<LiveBlock>,
    pub lines: Vec<LiveLine>,
}

impl Peak {
    pub fn new(
        snapshot: &Snapshot,
        program: &Program,
        phases: &Phases,
        categories: &[RecordedCategory],
        operation: usize,
    ) -> Self {
        let mut alive = living_at(program, operation);
        alive.sort_by_key(|&(allocation, bytes)| (Reverse(bytes), allocation));
        let largest = alive.iter().take(NUM_TENSORS);
        let largest = largest.map(|&(allocation, bytes)| LiveBlock {
            bytes,
            category: categories[allocation as usize],
            frames: frames_of(snapshot, program.stack(allocation)),
        });
        Self {
            categories: sums(&alive, categories),
            largest: largest.collect(),
            lines: lines(snapshot, program, phases, categories, &alive),
        }
    }
}

fn frames_of(snapshot: &Snapshot, stack: StackId) -> Vec<String> {
    let frames = snapshot.frames.get(stack).take(NUM_FRAMES);
    frames
        .map(|frame| format!("{}:{}:{}", frame.file, frame.line, frame.function))
        .collect()
}

/// The largest sums first.
fn lines(
    snapshot: &Snapshot,
    program: &Program,
    phases: &Phases,
    categories: &[RecordedCategory],
    alive: &[(u32, u64)],
) -> Vec<LiveLine> {
    // First by stack, of which there are few, then by what is shown of them.
    let mut by_stack: HashMap<(StackId, RecordedCategory), (u64, usize)> = HashMap::new();
    for &(allocation, bytes) in alive {
        let key = (program.stack(allocation), categories[allocation as usize]);
        let (sum, count) = by_stack.entry(key).or_default();
        *sum += bytes;
        *count += 1;
    }
    let mut by_line: HashMap<(Origin, RecordedCategory, RecordedPhase), (u64, usize)> =
        HashMap::new();
    for ((stack, category), (bytes, count)) in by_stack {
        let origin = Origin::new(&snapshot.frames, stack);
        let (sum, counted) = by_line
            .entry((origin, category, phases.get(stack)))
            .or_default();
        *sum += bytes;
        *counted += count;
    }
    let mut lines: Vec<LiveLine> = by_line
        .into_iter()
        .map(
            |((origin, category, phase), (bytes, num_blocks))| LiveLine {
                origin,
                category,
                phase,
                bytes,
                num_blocks,
            },
        )
        .collect();
    lines.sort_by(|one, two| {
        let texts = |line: &LiveLine| (line.origin.line.clone(), line.origin.library());
        (Reverse(one.bytes), one.category)
            .cmp(&(Reverse(two.bytes), two.category))
            .then_with(|| texts(one).cmp(&texts(two)))
    });
    lines.truncate(NUM_LINES);
    lines
}

fn sums(alive: &[(u32, u64)], categories: &[RecordedCategory]) -> Vec<CategoryBytes> {
    let mut sums: Vec<CategoryBytes> = RecordedCategory::ALL
        .iter()
        .map(|&category| {
            let of_category = alive
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
    sums.sort_by_key(|sum| Reverse(sum.bytes));
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
