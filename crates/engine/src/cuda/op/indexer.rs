//! The indexer: scores of tiles, then rows of them. Scores, and the gradients of their products,
//! exist for as many rows as the op's declaration has room for.

#[cfg(test)]
mod tests;

use cinch_graph::op::{
    CUDA_GEMM_WORKSPACE, Indexer, IndexerLoss, IndexerLossBackward, IndexerSelection, KeyCount,
};
use cinch_graph::{DType, TensorType};

use super::COPY_TO_REAL;
use super::activation::elementwise;
use super::linear::sum_partials;
use crate::cuda::command::{Argument, Kernel, LaunchShape, MatrixAt, Product};
use crate::cuda::lowering::Lowering;

/// The sum of all rows by the term's inverse count: (losses, inverse count, loss, rows,
/// adds).
const SUM: Kernel = Kernel {
    file: "cross_entropy",
    function: "cross_entropy_loss",
};

/// Threads of a tile's block, and of a row's.
const THREADS: u32 = 128;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "indexer",
        function,
    }
}

/// Batch and length.
fn size(queries: &TensorType) -> (usize, usize) {
    (queries.shape.dims()[0], queries.shape.dims()[1])
}

fn tiles(length: usize) -> usize {
    length.div_ceil(Indexer::CUDA_TILE)
}

/// A launch of tiles.
fn grid(rows: usize, keys: usize) -> LaunchShape {
    LaunchShape {
        grid: [rows.max(1) as u32, keys.max(1) as u32, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
    }
}

/// The indexer's tensors, the first inputs of every node here.
fn sources(x: &Lowering<'_>) -> Vec<Argument> {
    let inputs = 0..Indexer::NUM_INPUTS;
    inputs.map(|input| x.input_argument(input)).collect()
}

pub fn indexer_selection(x: &mut Lowering<'_>, op: &IndexerSelection) {
    let queries = x.input_type(0);
    let (batch, length) = size(&queries);
    let parts = op.cuda_parts(&queries);
    let (scores, _) = x.workspace();
    let variances = Argument::Address(scores + parts.scores);
    let all = batch * tiles(length);
    let starts: Vec<usize> = (0..all).step_by(parts.tiles).collect();
    let score = |x: &mut Lowering<'_>, first: usize| {
        let mut arguments = sources(x);
        arguments.extend([
            Argument::Address(scores),
            Argument::I32(length as i32),
            Argument::I32(op.indexer.heads as i32),
            Argument::I32(op.indexer.width as i32),
            Argument::I32(first as i32),
        ]);
        let shape = grid(parts.tiles.min(all - first), tiles(length));
        x.launch(kernel("indexer_scores"), shape, arguments);
    };
    let rows = |first: usize| parts.tiles.min(all - first) * Indexer::CUDA_TILE;
    if op.is_adaptive() {
        for &first in &starts {
            score(x, first);
            let arguments = vec![
                Argument::Address(scores),
                variances,
                Argument::I32(length as i32),
                Argument::I32(first as i32),
            ];
            let shape = LaunchShape::linear(rows(first), THREADS);
            x.launch(kernel("indexer_variances"), shape, arguments);
        }
        let arguments = vec![variances, Argument::U64(queries.rows() as u64)];
        let shape = LaunchShape::linear(1, 1024);
        x.launch(kernel("indexer_mean"), shape, arguments);
    }
    let (mode, counts, temperature) = match op.count {
        None => (0, [0; 3], 0.0),
        Some(KeyCount::Fixed(count)) => (1, [count; 3], 0.0),
        Some(KeyCount::Adaptive {
            base,
            least,
            most,
            temperature,
        }) => (2, [base, least, most], temperature),
    };
    for &first in &starts {
        // Where all scores have room, they are still there.
        if !op.is_adaptive() || starts.len() > 1 {
            score(x, first);
        }
        let mut arguments = vec![
            Argument::Address(scores),
            variances,
            x.output_argument(0),
            x.optional_output(op.count.map(|_| 1)),
            Argument::U64(queries.rows() as u64),
            Argument::I32(length as i32),
            Argument::I32(first as i32),
            Argument::I32(mode),
        ];
        // No row has more keys than the largest of these.
        let number = |count: usize| Argument::I32(i32::try_from(count).unwrap_or(i32::MAX));
        arguments.extend(counts.map(number));
        arguments.push(Argument::F32(temperature as f32));
        let shape = LaunchShape::linear(rows(first), THREADS);
        x.launch(kernel("indexer_select"), shape, arguments);
    }
}

/// The tensors of a loss: the indexer with its log-sum-exp, then the attention.
fn loss_sources(x: &Lowering<'_>, op: &IndexerLoss) -> Vec<Argument> {
    let attention = &op.attention;
    let source = IndexerLoss::FIRST_SOURCE;
    let [q, k, _] = attention.places();
    let at = |(input, column): (usize, usize)| {
        let size = x.input_type(source + input).dtype.size();
        Argument::Address(x.input(source + input) + column as u64 * size)
    };
    let stride = |(input, _): (usize, usize)| x.input_type(source + input).width() as u32;
    let mut arguments = sources(x);
    arguments.extend([
        x.input_argument(Indexer::NUM_INPUTS),
        at(q),
        at(k),
        x.input_argument(source + op.num_sources()),
        x.optional_input(op.selection()),
        Argument::U32(stride(q)),
        Argument::U32(stride(k)),
        Argument::I32(attention.heads as i32),
        Argument::I32(attention.kv_heads as i32),
        Argument::I32(attention.head_dim as i32),
        Argument::F32(attention.scale as f32),
    ]);
    arguments
}

pub fn indexer_loss(x: &mut Lowering<'_>, op: &IndexerLoss) {
    let queries = x.input_type(0);
    let (batch, length) = size(&queries);
    let rows = Argument::U64(queries.rows() as u64);
    let [kl_bytes, _] = op.cuda_row_parts(&queries);
    let kl = Argument::Address(x.workspace().0);
    let partials = Argument::Address(x.workspace().0 + kl_bytes);
    let mut arguments = loss_sources(x, op);
    arguments.extend([
        partials,
        rows,
        Argument::I32(length as i32),
        Argument::I32(op.indexer.heads as i32),
        Argument::I32(op.indexer.width as i32),
    ]);
    let shape = grid(batch * tiles(length), tiles(length));
    x.launch(kernel("indexer_loss"), shape, arguments);
    let arguments = vec![partials, kl, rows, Argument::I32(length as i32)];
    let shape = LaunchShape::linear(queries.rows().div_ceil(256), 256);
    x.launch(kernel("indexer_loss_rows"), shape, arguments);
    let arguments = vec![
        kl,
        x.input_argument(op.term_inputs()[0]),
        x.output_argument(0),
        Argument::U32(queries.rows() as u32),
        Argument::U32(u32::from(x.adds(0))),
    ];
    x.launch(SUM, LaunchShape::linear(1, 1024), arguments);
}

/// Some rows of some sequences, whose gradients of scores exist at once.
#[derive(Clone, Copy)]
struct Span {
    sequence: usize,
    sequences: usize,
    row: usize,
    rows: usize,
}

/// Where the backward has what.
struct Places {
    queries: TensorType,
    indexer: Indexer,
    /// Of the loss, or null.
    scale: Argument,
    partials: u64,
    scores: u64,
    keys: u64,
    gemm: u64,
}

pub fn indexer_loss_backward(x: &mut Lowering<'_>, op: &IndexerLossBackward) {
    let scale = op.scaled.then(|| x.node.inputs.len() - 1);
    let op = &op.forward;
    let queries = x.input_type(0);
    let (batch, length) = size(&queries);
    let parts = op.cuda_parts(&queries);
    let (biases, _) = x.workspace();
    let partials = biases + parts.biases;
    let scores = partials + parts.partials;
    let keys = scores + parts.scores;
    let places = Places {
        queries,
        indexer: op.indexer,
        scale: x.optional_input(scale),
        partials,
        scores,
        keys,
        gemm: keys + parts.keys,
    };
    for sequence in (0..batch).step_by(parts.sequences.max(1)) {
        let sequences = parts.sequences.min(batch - sequence);
        // From the end: the last rows see all keys, so that their product is the first to be
        // written.
        let starts: Vec<usize> = (0..length).step_by(parts.rows.max(1)).collect();
        for &row in starts.iter().rev() {
            let span = Span {
                sequence,
                sequences,
                row,
                rows: parts.rows.min(length - row),
            };
            tile_gradients(x, op, &places, span);
            for member in 0..sequences {
                products(x, &places, span, member, parts.keys > 0);
            }
        }
        if parts.keys > 0 {
            let count = length * op.indexer.width;
            let to = x.output(1) + (sequence * count) as u64 * queries.dtype.size();
            let arguments = vec![
                Argument::Address(places.keys),
                Argument::Address(to),
                Argument::U64(count as u64),
            ];
            x.launch(COPY_TO_REAL, elementwise(count, 4), arguments);
        }
    }
    row_gradients(x, op, &places);
}

/// The gradients of the scores' products, and partial sums of rows.
fn tile_gradients(x: &mut Lowering<'_>, op: &IndexerLoss, places: &Places, span: Span) {
    let (_, length) = size(&places.queries);
    let [inverse_count, weight] = op.term_inputs().map(|input| x.input_argument(input));
    let mut arguments = vec![inverse_count, weight, places.scale];
    arguments.extend(loss_sources(x, op));
    arguments.extend([
        Argument::Address(places.scores),
        Argument::Address(places.partials),
        Argument::U64(places.queries.rows() as u64),
        Argument::I32(length as i32),
        Argument::I32(op.indexer.heads as i32),
        Argument::I32(op.indexer.width as i32),
        Argument::I32(span.sequence as i32),
        Argument::I32(span.row as i32),
        Argument::I32(span.rows as i32),
    ]);
    let shape = grid(
        span.sequences * tiles(span.rows),
        tiles(span.row + span.rows),
    );
    x.launch(kernel("indexer_loss_backward"), shape, arguments);
}

/// `dq = dz·K` of the span's rows of one sequence, and `dK (+)= dzᵀ·q`.
fn products(x: &mut Lowering<'_>, places: &Places, span: Span, member: usize, apart: bool) {
    let (_, length) = size(&places.queries);
    let Indexer { heads, width } = places.indexer;
    let dtype = places.queries.dtype;
    let row_length = tiles(length) * Indexer::CUDA_TILE;
    let matrix = |address: u64, elements: usize, row_stride: usize| MatrixAt {
        address: address + elements as u64 * dtype.size(),
        row_stride,
        dtype,
        transposed: false,
    };
    let sequence = span.sequence + member;
    let first = sequence * length + span.row;
    let rows = span.rows * heads;
    let seen = span.row + span.rows;
    let dz = matrix(places.scores, member * rows * row_length, row_length);
    let product = |m, k, a, b, c, accumulate| Product {
        m,
        n: width,
        k,
        a,
        b,
        c,
        scale: 1.0,
        accumulate,
        bias: None,
        workspace: places.gemm,
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    let keys = matrix(x.input(1), sequence * length * width, width);
    let dq = matrix(x.output(0), first * heads * width, width);
    x.product(product(rows, seen, dz, keys, dq, false));
    let queries = matrix(x.input(0), first * heads * width, width);
    let down = MatrixAt {
        transposed: true,
        ..dz
    };
    let dk = match apart {
        true => MatrixAt {
            address: places.keys,
            row_stride: width,
            dtype: DType::F32,
            transposed: false,
        },
        false => matrix(x.output(1), sequence * length * width, width),
    };
    x.product(product(seen, rows, down, queries, dk, seen < length));
}

/// The gradients of the weights, and of the biases.
fn row_gradients(x: &mut Lowering<'_>, op: &IndexerLoss, places: &Places) {
    let blocks = IndexerLoss::cuda_row_blocks(&places.queries);
    let heads = op.indexer.heads;
    let shape = LaunchShape {
        grid: [blocks.max(1) as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: (2 * IndexerLoss::CUDA_ROWS * heads * size_of::<f32>()) as u32,
    };
    let arguments = vec![
        Argument::Address(places.partials),
        x.input_argument(2),
        x.input_argument(3),
        x.output_argument(2),
        Argument::Address(x.workspace().0),
        Argument::U64(places.queries.rows() as u64),
        Argument::I32(size(&places.queries).1 as i32),
        Argument::I32(heads as i32),
    ];
    x.launch(kernel("indexer_gradient_rows"), shape, arguments);
    sum_partials(x, blocks as u32, heads, 3, Some(4));
}
