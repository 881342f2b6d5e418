//! Embedding tables.

use super::super::dtype::DType;
use super::super::node::grads;
use super::super::shape::Dims;
use super::super::tensor::Tensor;
use super::{scan, view};
use crate::chip::Chip;

/// Up to this many indices the gradient is scattered directly; above, indices are sorted first.
const DIRECT_INDICES: u64 = 3072;
/// Rows that one thread sums in the sorted way.
const ROWS_PER_THREAD: u64 = 10;

/// The other buffers of keys and values, the histogram of each of the eight passes of eight bits, a counter, and the state
/// of every tile; with room to align the whole.
fn radix_sort_workspace(chip: Chip, indices: u64) -> u64 {
    const ALIGNMENT: u64 = 256;
    const BINS: u64 = 256;
    const PASSES: u64 = 8;
    let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT);
    2 * aligned(8 * indices)
        + PASSES * BINS * 8
        + ALIGNMENT
        + indices.div_ceil(chip.sorted_by_a_block()) * BINS * 4
        + ALIGNMENT
        - 1
}

/// What CUB's selection of unique keys takes while it runs: the number of those, and what its blocks tell each other.
fn unique_workspace(chip: Chip, indices: u64) -> u64 {
    const ALIGNMENT: u64 = 256;
    scan::lookback(indices.div_ceil(chip.selected_by_a_block())) + ALIGNMENT
}

/// `F.embedding(ids, table)`: the rows; keeps the ids. The gradient is a dense tensor of the whole
/// table.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Tensor {
    let context = table.context();
    let mut recorder = context.record(&[table]);
    recorder.save(ids);
    let mut sizes = ids.sizes();
    sizes.push(table.size(1));
    // Rows are chosen by a flat list of ids: a copy where they are broadcast.
    let flat = view::contiguous(ids);
    let out = context.empty("embedding", sizes, table.dtype());
    drop(flat);
    let table = table.sizes();
    recorder.finish(&[&out], move |step| {
        grads![Some(dense_gradient(step.grad(), step.saved(0), table))]
    });
    out
}

/// Whether the parts of few, long segments are added into the table by atomics, because adding them segment by segment would
/// leave most of the card's multiprocessors without work.
fn adds_atomically(chip: Chip, segments: u64, parts: u64, width: u64) -> bool {
    const WARP: u64 = 32;
    const BLOCK: u64 = 1024;
    const BLOCKS_PER_MULTIPROCESSOR: u64 = 4;
    let threads = width.next_multiple_of(WARP);
    let blocks = (segments * threads).div_ceil(threads.min(BLOCK));
    blocks < chip.multiprocessors * BLOCKS_PER_MULTIPROCESSOR && parts > 4 * blocks
}

/// Many indices: they are sorted with their positions, equal ones become segments, long segments are
/// cut, each part is summed in fp32, and the parts are added into the table.
fn dense_gradient(grad: &Tensor, ids: &Tensor, table: Dims) -> Tensor {
    let context = grad.context();
    let (chip, indices) = (context.chip(), ids.numel());
    let ids = view::contiguous(ids);
    let contiguous = view::contiguous(grad);
    if indices <= DIRECT_INDICES {
        let table = context.empty("embedding_dense_backward", table, grad.dtype());
        drop(contiguous);
        drop(ids);
        return table;
    }
    let op = "embedding_dense_backward";
    let longs = |n: u64| context.empty(op, [n], DType::Int64);
    let sorted = longs(indices);
    let original = longs(indices);
    let range = longs(indices);
    drop(context.workspace("radix sort", radix_sort_workspace(chip, indices)));
    drop(range);
    let out = context.empty(op, table, grad.dtype());
    let segments = indices.min(table[0]);
    let parts = indices / ROWS_PER_THREAD + segments;
    let offsets = longs(indices);
    let num_segments = longs(1);
    {
        let unique = longs(indices);
        drop(context.workspace("unique", unique_workspace(chip, indices)));
        drop(unique);
    }
    let per_segment = longs(segments);
    let per_segment_offset = longs(segments);
    drop(context.workspace("scan", scan::workspace(segments)));
    let num_parts = longs(1);
    let part_offsets = longs(parts);
    if adds_atomically(chip, segments, parts, table[1]) {
        let segment_of_part = longs(parts);
        if grad.dtype() != DType::Float32 {
            drop(context.empty(op, table, DType::Float32));
        }
        drop(segment_of_part);
    } else {
        drop(context.empty(op, [parts, table[1]], DType::Float32));
    }
    drop(part_offsets);
    drop(num_parts);
    drop(per_segment_offset);
    drop(per_segment);
    drop(num_segments);
    drop(offsets);
    drop(original);
    drop(sorted);
    drop(contiguous);
    drop(ids);
    out
}
