//! Offsets for buffers with lifetimes, so that no two live ones overlap and the extent is
//! small.
//!
//! The problem is NP-hard in general, but a training step is close to a stack: what the
//! forward makes first, the backward frees last. A few orders of a greedy placement reach the
//! lower bound on nearly all graphs; where none does, buffers that stick out are moved to the
//! front and the greedy runs again.

use std::collections::HashSet;

use cinch_graph::aligned;

use crate::buffer::Buffer;

/// How often the greedy is tried again with another order.
const REPAIRS: usize = 24;

/// The offset of each buffer.
pub fn place(buffers: &[Buffer]) -> Vec<u64> {
    let bound = largest_live_sum(buffers);
    let length = |i: usize| buffers[i].end - buffers[i].start;
    let mut by_size: Vec<usize> = (0..buffers.len()).collect();
    by_size.sort_by_key(|&i| (std::cmp::Reverse(buffers[i].bytes), buffers[i].start, i));
    let mut by_length = by_size.clone();
    by_length.sort_by_key(|&i| (std::cmp::Reverse(length(i)), buffers[i].start, i));

    let mut best: Option<(u64, Vec<u64>)> = None;
    for order in [by_length, by_size] {
        let mut order = order;
        for _ in 0..REPAIRS {
            let offsets = greedy(buffers, &order);
            let extent = extent(buffers, &offsets);
            let highest = order
                .iter()
                .copied()
                .filter(|&i| end(offsets[i], &buffers[i]) > bound)
                .collect::<Vec<_>>();
            if best.as_ref().is_none_or(|(least, _)| extent < *least) {
                best = Some((extent, offsets));
            }
            if extent <= bound || highest.is_empty() {
                break;
            }
            // What sticks out chooses first next time.
            let sticks_out: HashSet<usize> = highest.iter().copied().collect();
            let rest = order.iter().copied().filter(|i| !sticks_out.contains(i));
            let rest: Vec<usize> = rest.collect();
            order = highest.into_iter().chain(rest).collect();
        }
        if best.as_ref().is_some_and(|(extent, _)| *extent <= bound) {
            break;
        }
    }
    best.map(|(_, offsets)| offsets).unwrap_or_default()
}

fn end(offset: u64, buffer: &Buffer) -> u64 {
    offset.saturating_add(aligned(buffer.bytes))
}

fn extent(buffers: &[Buffer], offsets: &[u64]) -> u64 {
    let ends = buffers.iter().zip(offsets);
    ends.map(|(b, &o)| end(o, b)).max().unwrap_or(0)
}

/// Each buffer in turn at the lowest offset where it meets nothing that lives with it.
fn greedy(buffers: &[Buffer], order: &[usize]) -> Vec<u64> {
    let mut offsets = vec![0; buffers.len()];
    let mut placed = Placed::new(buffers);
    for &index in order {
        let buffer = &buffers[index];
        let offset = placed.lowest(buffer);
        offsets[index] = offset;
        placed.insert(buffer, offset);
    }
    offsets
}

/// A buffer in its place. They are gone through for every buffer, so they are small.
#[derive(Clone, Copy)]
struct Block {
    start: u64,
    end: u64,
    first_node: u32,
    last_node: u32,
}

/// Buffers in their places. Most live for a few nodes only, and meet none of those that live
/// elsewhere in the step: so the step is cut into stretches of nodes, and what lives in one
/// stretch alone is kept by it.
struct Placed {
    /// Nodes of a stretch.
    stretch: usize,
    /// By stretch, each by offset.
    short: Vec<Vec<Block>>,
    /// What lives in several stretches, by offset.
    long: Vec<Block>,
    /// The short ones of several stretches, while they are looked at.
    gathered: Vec<Block>,
}

impl Placed {
    fn new(buffers: &[Buffer]) -> Self {
        let nodes = buffers.iter().map(|b| b.end + 1).max().unwrap_or(0);
        // The work for a buffer grows with the stretch and with the number of its borders.
        let stretch = 4 * nodes.isqrt().max(1);
        Self {
            stretch,
            short: vec![Vec::new(); nodes.div_ceil(stretch)],
            long: Vec::new(),
            gathered: Vec::new(),
        }
    }

    fn stretches(&self, buffer: &Buffer) -> std::ops::RangeInclusive<usize> {
        buffer.start / self.stretch..=buffer.end / self.stretch
    }

    /// The lowest offset at which a buffer meets nothing.
    fn lowest(&mut self, buffer: &Buffer) -> u64 {
        let stretches = self.stretches(buffer);
        let short = if stretches.start() == stretches.end() {
            &self.short[*stretches.start()]
        } else {
            self.gathered.clear();
            for blocks in &self.short[stretches] {
                self.gathered.extend_from_slice(blocks);
            }
            self.gathered.sort_unstable_by_key(|block| block.start);
            &self.gathered
        };
        let size = aligned(buffer.bytes);
        let (first_node, last_node) = (buffer.start as u32, buffer.end as u32);
        let meets = |block: &Block| block.first_node <= last_node && block.last_node >= first_node;
        let (mut short, mut long) = (short.iter(), self.long.iter());
        let (mut next_short, mut next_long) = (short.find(|b| meets(b)), long.find(|b| meets(b)));
        let mut offset = 0_u64;
        loop {
            let is_short = match (next_short, next_long) {
                (None, None) => return offset,
                (Some(short), Some(long)) => short.start <= long.start,
                (short, _) => short.is_some(),
            };
            let next = if is_short {
                std::mem::replace(&mut next_short, short.find(|b| meets(b)))
            } else {
                std::mem::replace(&mut next_long, long.find(|b| meets(b)))
            };
            let Some(block) = next else { return offset };
            if block.start >= offset.saturating_add(size) {
                return offset;
            }
            offset = offset.max(block.end);
        }
    }

    fn insert(&mut self, buffer: &Buffer, offset: u64) {
        let stretches = self.stretches(buffer);
        let blocks = match stretches.start() == stretches.end() {
            true => &mut self.short[*stretches.start()],
            false => &mut self.long,
        };
        let at = blocks.partition_point(|block| block.start < offset);
        let block = Block {
            start: offset,
            end: end(offset, buffer),
            first_node: buffer.start as u32,
            last_node: buffer.end as u32,
        };
        blocks.insert(at, block);
    }
}

fn largest_live_sum(buffers: &[Buffer]) -> u64 {
    let nodes = buffers.iter().map(|b| b.end + 1).max().unwrap_or(0);
    let timeline = crate::summary::timeline(buffers, nodes, 0, aligned);
    timeline.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same, going through all placed buffers for every one.
    fn naive(buffers: &[Buffer], order: &[usize]) -> Vec<u64> {
        let mut offsets = vec![0; buffers.len()];
        let mut placed: Vec<usize> = Vec::new();
        for &index in order {
            let buffer = &buffers[index];
            placed.sort_by_key(|&other| offsets[other]);
            let mut offset = 0;
            for &other in &placed {
                let lives = &buffers[other];
                if lives.start > buffer.end || lives.end < buffer.start {
                    continue;
                }
                if offsets[other] >= offset + aligned(buffer.bytes) {
                    break;
                }
                offset = offset.max(end(offsets[other], lives));
            }
            offsets[index] = offset;
            placed.push(index);
        }
        offsets
    }

    #[test]
    fn stretches_change_no_offset() {
        let mut state = 7_u64;
        let mut random = |bound: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize % bound
        };
        for nodes in [1, 3, 90, 1000] {
            let mut buffers = Vec::new();
            for _ in 0..2 * nodes {
                let start = random(nodes);
                // Most live for a few nodes, some for most of the step.
                let life = match random(4) {
                    0 => random(nodes),
                    _ => random(9),
                };
                buffers.push(Buffer {
                    start,
                    end: (start + life).min(nodes - 1),
                    bytes: 1 + random(9000) as u64,
                    owners: Vec::new(),
                });
            }
            let mut order: Vec<usize> = (0..buffers.len()).collect();
            for place in (1..order.len()).rev() {
                order.swap(place, random(place + 1));
            }
            assert_eq!(greedy(&buffers, &order), naive(&buffers, &order));
        }
    }
}
