//! The state before a recording: from the segments at its end, back over its events.
//!
//! PyTorch's snapshot has the segments as they are when it is taken, and a trace that often
//! begins long after the model was built. Undone one by one, the events lead to the segments
//! and living blocks at the start. What the trace does not say is how large a block was that is
//! freed in it: a request of the large pool keeps a rest of up to 1 MiB that is not worth
//! cutting off. As no free block there is that small, a gap of that size after a block is part
//! of it.

use std::collections::BTreeMap;

use super::{Segment, SegmentBlock};
use crate::allocator::{
    Allocator, AllocatorConfig, BlockId, RestoredBlock, RestoredState, SMALL_REQUEST,
    SMALL_SEGMENT, block_bytes,
};
use crate::trace::{Action, StackId, Trace};

/// Memory of the driver: from its key to `end`.
#[derive(Clone)]
struct Range {
    end: u64,
    stream: u64,
    private: u64,
    small: bool,
    expandable: bool,
}

/// The segments at the start of a trace, by address; each covered by its blocks.
pub fn rewind(trace: &Trace, segments: &[Segment], config: &AllocatorConfig) -> Vec<Segment> {
    let mut ranges: BTreeMap<u64, Range> = BTreeMap::new();
    let mut living: BTreeMap<u64, SegmentBlock> = BTreeMap::new();
    for segment in segments {
        let range = Range {
            end: segment.address + segment.size,
            stream: segment.stream,
            private: segment.private,
            small: segment.small,
            expandable: segment.expandable,
        };
        ranges.insert(segment.address, range);
        for block in segment.blocks.iter().filter(|block| block.is_live()) {
            living.insert(block.address, *block);
        }
    }
    for event in trace.events.iter().rev() {
        let (address, size) = (event.address, event.size);
        match event.action {
            Action::Alloc => {
                living.remove(&address);
            }
            Action::FreeCompleted | Action::FreeRequested => {
                let block = living.entry(address).or_insert(SegmentBlock {
                    address,
                    size: block_bytes(config, size),
                    requested: size,
                    state: RestoredState::Pending,
                    stack: StackId::EMPTY,
                });
                if event.action == Action::FreeRequested {
                    block.state = RestoredState::Allocated;
                }
            }
            Action::SegmentAlloc => {
                ranges.remove(&address);
            }
            Action::SegmentMap => cut_range(&mut ranges, address, size),
            Action::SegmentFree | Action::SegmentUnmap => {
                let range = Range {
                    end: address.saturating_add(size),
                    stream: trace.streams[usize::from(event.stream)],
                    private: 0,
                    small: size <= SMALL_SEGMENT,
                    expandable: event.action == Action::SegmentUnmap,
                };
                add_range(&mut ranges, address, range);
            }
            Action::OutOfMemory | Action::Other => {}
        }
    }
    let mut segments = cover(ranges, &living, config);
    add_open_starts(&mut segments, trace, config);
    segments
}

/// Pages may have been unmapped at the front of an expandable segment before the recording. If
/// the trace maps them again, the segment begins there: an empty part of it marks the place.
/// Only the time until pages are unmapped counts, because then addresses may change hands.
fn add_open_starts(segments: &mut Vec<Segment>, trace: &Trace, config: &AllocatorConfig) {
    let mut lowest: BTreeMap<(u64, bool), u64> = BTreeMap::new();
    for event in &trace.events {
        if event.action == Action::SegmentUnmap {
            break;
        }
        if event.action == Action::SegmentMap {
            let stream = trace.streams[usize::from(event.stream)];
            // A request of the small pool maps one page, which no part of a large one is.
            let key = (stream, event.size == SMALL_SEGMENT);
            let address = lowest.entry(key).or_insert(event.address);
            *address = event.address.min(*address);
        }
    }
    for ((stream, small), address) in lowest {
        let first = segments.iter().find(|segment| {
            segment.expandable && (segment.stream, segment.small) == (stream, small)
        });
        let page = if small {
            SMALL_SEGMENT
        } else {
            config.large_segment
        };
        if let Some(first) = first.filter(|first| {
            first.address > address && (first.address - address).is_multiple_of(page)
        }) {
            segments.push(Segment {
                address,
                size: 0,
                blocks: Vec::new(),
                ..first.clone()
            });
        }
    }
    segments.sort_by_key(|segment| segment.address);
}

/// Pages that were mapped later were not there: they may lie inside a longer range.
fn cut_range(ranges: &mut BTreeMap<u64, Range>, address: u64, size: u64) {
    let end = address.saturating_add(size);
    let Some((&start, range)) = ranges.range(..=address).next_back() else {
        return;
    };
    if range.end <= address {
        return;
    }
    let range = range.clone();
    ranges.remove(&start);
    if start < address {
        let before = Range {
            end: address,
            ..range.clone()
        };
        ranges.insert(start, before);
    }
    if end < range.end {
        ranges.insert(end, range);
    }
}

/// A range that was there; mapped pages join their neighbours, whose pool is known.
fn add_range(ranges: &mut BTreeMap<u64, Range>, address: u64, mut range: Range) {
    let mut start = address;
    if range.expandable {
        if let Some((&before, known)) = ranges.range(..address).next_back()
            && known.expandable
            && known.end == address
        {
            range = Range {
                end: range.end,
                ..known.clone()
            };
            start = before;
        }
        if let Some(known) = ranges.get(&range.end)
            && known.expandable
        {
            let after = range.end;
            range = known.clone();
            ranges.remove(&after);
        }
    }
    ranges.insert(start, range);
}

/// Segments with their blocks: the living ones, and free ones between. Living blocks that lie
/// in no segment or overlap, which only a damaged or cut recording has, are left out.
fn cover(
    ranges: BTreeMap<u64, Range>,
    living: &BTreeMap<u64, SegmentBlock>,
    config: &AllocatorConfig,
) -> Vec<Segment> {
    let mut segments = Vec::with_capacity(ranges.len());
    let mut covered = 0;
    for (address, range) in ranges {
        let address = address.max(covered);
        if range.end <= address {
            continue;
        }
        covered = range.end;
        let mut blocks: Vec<SegmentBlock> = Vec::new();
        let mut end = address;
        for (&start, block) in living.range(address..range.end) {
            if start < end || block.size > range.end - start || block.size == 0 {
                continue;
            }
            close_gap(&mut blocks, end, start, &range, config);
            blocks.push(*block);
            end = start + block.size;
        }
        close_gap(&mut blocks, end, range.end, &range, config);
        segments.push(Segment {
            address,
            size: range.end - address,
            stream: range.stream,
            private: range.private,
            small: range.small,
            expandable: range.expandable,
            blocks,
        });
    }
    segments
}

/// What lies between two living blocks is free, or the rest of the first.
fn close_gap(
    blocks: &mut Vec<SegmentBlock>,
    start: u64,
    end: u64,
    range: &Range,
    config: &AllocatorConfig,
) {
    let gap = end - start;
    if gap == 0 {
        return;
    }
    if let Some(last) = blocks.last_mut()
        && !range.small
        && !range.expandable
        && (gap <= SMALL_REQUEST || last.size >= config.max_split)
    {
        last.size += gap;
        return;
    }
    blocks.push(SegmentBlock {
        address: start,
        size: gap,
        requested: 0,
        state: RestoredState::Free,
        stack: StackId::EMPTY,
    });
}

/// Builds the state in an allocator. Returns the living blocks, segment by segment.
pub fn restore(allocator: &mut Allocator, segments: &[Segment]) -> Vec<Option<BlockId>> {
    let mut living = Vec::new();
    let mut segments = segments.iter().peekable();
    while let Some(segment) = segments.next() {
        let mut blocks: Vec<RestoredBlock> = segment.blocks.iter().map(restored).collect();
        if !segment.expandable {
            living.extend(allocator.restore_segment(
                segment.address,
                segment.stream,
                segment.private,
                segment.small,
                &blocks,
            ));
            continue;
        }
        // Mapped ranges of one stream and pool are parts of one expandable segment.
        let mut end = segment.address + segment.size;
        while let Some(next) = segments.next_if(|next| {
            next.expandable
                && (next.stream, next.private, next.small)
                    == (segment.stream, segment.private, segment.small)
        }) {
            if next.address > end {
                blocks.push(RestoredBlock {
                    size: next.address - end,
                    requested: 0,
                    state: RestoredState::Unmapped,
                });
            }
            blocks.extend(next.blocks.iter().map(restored));
            end = next.address + next.size;
        }
        living.extend(allocator.restore_expandable(
            segment.address,
            segment.stream,
            segment.private,
            segment.small,
            &merged(blocks),
        ));
    }
    living.into_iter().map(Some).collect()
}

fn restored(block: &SegmentBlock) -> RestoredBlock {
    RestoredBlock {
        size: block.size,
        requested: block.requested,
        state: block.state,
    }
}

/// Free blocks at the seam of two ranges are one.
fn merged(blocks: Vec<RestoredBlock>) -> Vec<RestoredBlock> {
    let mut merged: Vec<RestoredBlock> = Vec::with_capacity(blocks.len());
    for block in blocks {
        match merged.last_mut() {
            Some(last)
                if last.state == block.state
                    && matches!(block.state, RestoredState::Free | RestoredState::Unmapped) =>
            {
                last.size += block.size;
            }
            _ => merged.push(block),
        }
    }
    merged
}
