//! Offsets for buffers with lifetimes, so that no two live ones overlap and the extent is
//! small.
//!
//! The problem is NP-hard in general, but a training step is close to a stack: what the
//! forward makes first, the backward frees last. A few orders of a greedy placement reach the
//! lower bound on nearly all graphs; where none does, buffers that stick out are moved to the
//! front and the greedy runs again.

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
            let sticks_out = |i: &usize| highest.contains(i);
            let rest: Vec<usize> = order.iter().copied().filter(|i| !sticks_out(i)).collect();
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
    // Placed buffers as (offset, end, first node, last node), by offset. They are gone through
    // for every buffer, so they are kept small.
    let mut placed: Vec<(u64, u64, u32, u32)> = Vec::with_capacity(buffers.len());
    for &index in order {
        let buffer = &buffers[index];
        let size = aligned(buffer.bytes);
        let (start_node, end_node) = (buffer.start as u32, buffer.end as u32);
        let mut offset = 0_u64;
        for &(start, end, first, last) in &placed {
            if first > end_node || last < start_node {
                continue;
            }
            if start >= offset.saturating_add(size) {
                break;
            }
            offset = offset.max(end);
        }
        offsets[index] = offset;
        let at = placed.partition_point(|&(start, ..)| start < offset);
        placed.insert(
            at,
            (offset, offset.saturating_add(size), start_node, end_node),
        );
    }
    offsets
}

fn largest_live_sum(buffers: &[Buffer]) -> u64 {
    let nodes = buffers.iter().map(|b| b.end + 1).max().unwrap_or(0);
    let timeline = crate::summary::timeline(buffers, nodes, 0, aligned);
    timeline.into_iter().max().unwrap_or(0)
}
