//! Embedding, and the sums of its gradient in an order that does not depend on the run.

use cinch_graph::TensorType;
use cinch_graph::op::{Embedding, EmbeddingBackward};

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "embedding",
        function,
    }
}

/// Threads of launches that have a thread for each row or token.
const THREADS: usize = 256;

/// How a row is dealt out: elements that a thread takes at once, and threads.
fn row_threads(ty: TensorType) -> (usize, usize) {
    let vector = 16 / ty.dtype.size() as usize;
    let vector = if ty.width().is_multiple_of(vector) {
        vector
    } else {
        1
    };
    let threads = (ty.width() / vector).next_multiple_of(32).clamp(32, 256);
    (vector, threads)
}

/// One of two kernels: for rows of 16-byte vectors, or for any.
fn choose(vector: usize, vectors: &'static str, any: &'static str) -> Kernel {
    kernel(if vector > 1 { vectors } else { any })
}

pub fn embedding(x: &mut Lowering<'_>, op: &Embedding) {
    let (tokens, table, y) = (x.input_type(0), x.input_type(1), x.output_type(0));
    let random = op.dropout.map(|_| 2 + usize::from(op.positions));
    let mut arguments = vec![
        x.input_argument(0),
        x.input_argument(1),
        x.optional_input(op.positions.then_some(2)),
        x.output_argument(0),
    ];
    arguments.extend(x.dropout_arguments(op.dropout, random));
    arguments.extend([
        Argument::U32(y.rows() as u32),
        Argument::U32(tokens.width() as u32),
        Argument::U32(table.rows() as u32),
        Argument::U32(y.width() as u32),
    ]);
    let (vector, threads) = row_threads(y);
    let kernel = choose(vector, "embedding", "embedding_any");
    let shape = by_rows(y.rows(), threads, THREADS / threads);
    x.launch(kernel, shape, arguments);
}

/// A row to each group of threads.
fn by_rows(rows: usize, threads: usize, groups: usize) -> LaunchShape {
    LaunchShape {
        grid: [rows.div_ceil(groups).max(1) as u32, 1, 1],
        block: [threads as u32, groups as u32, 1],
        shared_bytes: 0,
    }
}

pub fn embedding_backward(x: &mut Lowering<'_>, op: &EmbeddingBackward) {
    if let Some(vocabulary) = op.table {
        table(x, op, vocabulary);
    }
    if let Some(rows) = op.positions {
        positions(x, op, usize::from(op.table.is_some()), rows);
    }
}

fn dropout_arguments(x: &Lowering<'_>, op: &EmbeddingBackward) -> [Argument; 3] {
    x.dropout_arguments(op.dropout, op.dropout.map(|_| 2))
}

/// Groups of threads of a block, which share the rows of a token that has many.
fn groups(threads: usize) -> usize {
    const MOST: usize = 8;
    (THREADS / threads).clamp(4, MOST)
}

fn table(x: &mut Lowering<'_>, op: &EmbeddingBackward, vocabulary: usize) {
    let dy = x.input_type(0);
    let rows = dy.rows();
    if !x.adds(0) {
        x.clear(x.output(0), x.output_type(0).bytes());
    }
    let parts = EmbeddingBackward::cuda_parts(rows, vocabulary);
    let mut address = x.workspace().0;
    let [counts, next, order, sorted] = parts.map(|bytes| {
        let part = address;
        address += bytes;
        part
    });
    // The running total follows the counts, and starts at zero like them.
    let total = counts + 4 * vocabulary as u64;
    x.clear(counts, 4 * (vocabulary as u64 + 1));
    let [counts, next, order, sorted, total] =
        [counts, next, order, sorted, total].map(Argument::Address);
    let tokens = x.input_argument(1);
    let num_rows = Argument::U32(rows as u32);
    let num_tokens = Argument::U32(vocabulary as u32);
    let by_row = LaunchShape::linear(rows.div_ceil(THREADS), THREADS as u32);
    let by_token = LaunchShape::linear(vocabulary.div_ceil(THREADS), THREADS as u32);
    x.launch(
        kernel("embedding_count"),
        by_row,
        vec![tokens, counts, num_rows, num_tokens],
    );
    x.launch(
        kernel("embedding_starts"),
        by_token,
        vec![counts, next, total, num_tokens],
    );
    x.launch(
        kernel("embedding_scatter"),
        by_row,
        vec![tokens, next, order, num_rows, num_tokens],
    );
    x.launch(
        kernel("embedding_rank"),
        by_row,
        vec![tokens, counts, next, order, sorted, num_rows, num_tokens],
    );

    let (vector, threads) = row_threads(dy);
    let groups = groups(threads);
    let shape = LaunchShape {
        shared_bytes: (groups * threads * vector * size_of::<f32>()) as u32,
        ..by_rows(rows, threads, groups)
    };
    let mut arguments = vec![
        x.input_argument(0),
        tokens,
        counts,
        next,
        sorted,
        x.output_argument(0),
    ];
    arguments.extend(dropout_arguments(x, op));
    arguments.extend([num_rows, num_tokens, Argument::U32(dy.width() as u32)]);
    let kernel = choose(vector, "embedding_table", "embedding_table_any");
    x.launch(kernel, shape, arguments);
}

fn positions(x: &mut Lowering<'_>, op: &EmbeddingBackward, output: usize, rows: usize) {
    let dy = x.input_type(0);
    let (batch, length) = (dy.shape.dims()[0], dy.shape.dims()[1]);
    let adds = x.adds(output);
    if !adds && rows > length {
        // Positions that no sequence reaches.
        let row = x.output_type(output).bytes() / rows as u64;
        let reached = row * length as u64;
        x.clear(x.output(output) + reached, row * rows as u64 - reached);
    }
    let mut arguments = vec![x.input_argument(0), x.output_argument(output)];
    arguments.extend(dropout_arguments(x, op));
    arguments.extend([
        Argument::U32(batch as u32),
        Argument::U32(dy.width() as u32),
        Argument::U32(u32::from(adds)),
    ]);
    let (vector, threads) = row_threads(dy);
    let kernel = choose(vector, "embedding_positions", "embedding_positions_any");
    x.launch(
        kernel,
        LaunchShape::linear(length, threads as u32),
        arguments,
    );
}
