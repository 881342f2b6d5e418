//! The selection of keys from a cache: the new keys go in, are scored with those before, and rows of
//! scores are summed and selected from.

use cinch_graph::op::{CachedSelection, Indexer, KeyCount};

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// Threads of the launch that has one for each element.
const ELEMENT_THREADS: usize = 256;
/// Threads of a row's block; of a block of scores, one for each key.
const THREADS: usize = 128;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "cached_selection",
        function,
    }
}

pub fn cached_selection(x: &mut Lowering<'_>, op: &CachedSelection) {
    let queries = x.input_type(0);
    let (batch, rows) = (queries.shape.dims()[0], queries.rows());
    let Indexer { heads, width } = op.indexer;
    let size = |size: usize| Argument::U32(size as u32);
    let (seq, slots) = (size(queries.shape.dims()[1]), size(op.slots));
    let positions = x.input_argument(Indexer::NUM_INPUTS);
    let keys = x.output_argument(1);
    let parts = op.cuda_parts(&queries);
    let (workspace, _) = x.workspace();
    let scores = Argument::Address(workspace);

    let arguments = vec![
        x.input_argument(1),
        positions,
        keys,
        size(rows),
        seq,
        size(width),
        slots,
    ];
    let blocks = (rows * width).div_ceil(ELEMENT_THREADS);
    let shape = LaunchShape::linear(blocks, ELEMENT_THREADS as u32);
    x.launch(kernel("cached_selection_append"), shape, arguments);

    let arguments = vec![
        x.input_argument(0),
        keys,
        x.input_argument(2),
        x.input_argument(3),
        x.input_argument(4),
        positions,
        scores,
        seq,
        size(heads),
        size(width),
        slots,
    ];
    let shape = LaunchShape {
        grid: [
            rows.max(1) as u32,
            op.slots.div_ceil(THREADS).max(1) as u32,
            1,
        ],
        block: [THREADS as u32, 1, 1],
        shared_bytes: (heads * (width + 1) * size_of::<f32>()) as u32,
    };
    x.launch(kernel("cached_selection_scores"), shape, arguments);

    let of_rows = LaunchShape::linear(rows, THREADS as u32);
    // No row has more keys than the largest of these.
    let number = |count: usize| Argument::I32(i32::try_from(count).unwrap_or(i32::MAX));
    let (counts, base) = match op.count {
        KeyCount::Fixed(count) => (Argument::Null, count),
        KeyCount::Adaptive {
            base,
            least,
            most,
            temperature,
        } => {
            let numbers = Argument::Address(workspace + parts.scores);
            let counts = Argument::Address(workspace + parts.scores + parts.rows);
            let arguments = vec![scores, positions, numbers, seq, slots];
            x.launch(kernel("cached_selection_rows"), of_rows, arguments);
            let arguments = vec![
                numbers,
                positions,
                x.output_argument(2),
                counts,
                seq,
                slots,
                number(base),
                number(least),
                number(most),
                Argument::F32(temperature as f32),
            ];
            let shape = LaunchShape::linear(batch, 32);
            x.launch(kernel("cached_selection_counts"), shape, arguments);
            (counts, base)
        }
    };
    let bits = x.output_argument(0);
    let arguments = vec![scores, positions, counts, bits, seq, slots, number(base)];
    x.launch(kernel("cached_selection_select"), of_rows, arguments);
}
