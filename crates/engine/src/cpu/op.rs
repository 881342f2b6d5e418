//! From an op to its kernel: which tensor is which argument.

use cinch_graph::DType;
use cinch_graph::op::{self, NormKind, Op};

use super::dropout::Dropout;
use super::kernel::columns::{self, Columns, ColumnsMut};
use super::kernel::{
    activation, attention, convolution, cross_entropy, dequantise, eight_bit, embedding,
    expression, gated, indexer, linear, norm, optimizer, rotary, scan,
};
use super::operands::Operands;
use super::parallel::Accumulate;
use super::real::Real;
use crate::arena::Element;
use crate::error::EngineError;

/// Executes one node in the element type of its graph.
pub(crate) fn execute<F: Real + Element>(x: &Operands<'_>) -> Result<(), EngineError> {
    match &x.node.op {
        Op::Embedding(op) => return embed::<F>(x, op),
        Op::EmbeddingBackward(op) => return embed_backward::<F>(x, op),
        Op::Norm(op) => normalize::<F>(x, op),
        Op::NormApply(op) => normalize_again::<F>(x, op),
        Op::NormBackward(op) => normalize_backward::<F>(x, op),
        Op::Linear(op) => multiply::<F>(x, op),
        Op::LinearAdd(op) => multiply_add::<F>(x, op),
        Op::LinearGradInput(op) => multiply_grad_input::<F>(x, op),
        Op::LinearGradWeight(op) => multiply_grad_weight::<F>(x, op),
        Op::Activation(op) => {
            let input = x.input_unless_in_place::<F>(0, 0);
            activation::forward(op.kind, input, x.output(0));
        }
        Op::ActivationBackward(op) => activate_backward::<F>(x, op),
        Op::Gated(op) => gate::<F>(x, op),
        Op::GatedBackward(op) => gate_backward::<F>(x, op),
        Op::Add(op::Add) => add::<F>(x),
        Op::Rotary(op) => rotate::<F>(x, op),
        Op::View(_) => view::<F>(x),
        Op::Map(op) => map::<F>(x, op),
        Op::Reduce(op) => reduce::<F>(x, op),
        Op::Concat(op) => concat::<F>(x, op),
        Op::Split(op) => split::<F>(x, op),
        Op::Dequantise(op) => dequantise::<F>(x, op),
        Op::Fetch(op::Fetch) => fetch(x),
        Op::Attention(op) => attend::<F>(x, op),
        Op::AttentionBackward(op) => attend_backward::<F>(x, &op.0),
        Op::CachedAttention(op) => return attend_cached::<F>(x, op),
        Op::AttentionEntropy(op) => entropy::<F>(x, op),
        Op::AttentionEntropyBackward(op) => entropy_backward::<F>(x, &op.0),
        Op::CachedAttentionEntropy(op) => return entropy_cached::<F>(x, &op.0),
        Op::IndexerSelection(op) => select_keys::<F>(x, op),
        Op::CachedSelection(op) => return select_cached::<F>(x, op),
        Op::IndexerLoss(op) => indexer_loss::<F>(x, op),
        Op::IndexerLossBackward(op) => indexer_loss_backward::<F>(x, &op.forward),
        Op::Convolution(op) => convolve::<F>(x, op),
        Op::ConvolutionBackward(op) => convolve_backward::<F>(x, op),
        Op::CachedConvolution(op) => return convolve_cached::<F>(x, op),
        Op::Scan(op) => scan_forward::<F>(x, op),
        Op::ScanBackward(op) => scan_backward::<F>(x, &op.0),
        Op::CachedScan(op) => return scan_cached::<F>(x, &op.0),
        Op::CrossEntropy(op) => return loss::<F>(x, op),
        Op::Logits(op) => return logits::<F>(x, op),
        Op::GradientSquares(op) => gradient_squares::<F>(x, op),
        Op::GradientNorm(op) => gradient_norm::<F>(x, op),
        Op::AdamW(op) => update::<F>(x, op),
        // The executor runs these with the other ranks, and looks for them before it begins.
        Op::AllReduce(_) | Op::ReduceScatter(_) | Op::AllGather(_) | Op::GatherRows(_) => {
            return Err(failed(x, "no other ranks are connected"));
        }
        // Nodes run one by one: what came before is done.
        Op::Await(_) => {}
    }
    Ok(())
}

fn failed(x: &Operands<'_>, problem: impl ToString) -> EngineError {
    EngineError::Op {
        op: x.node.op.name(),
        node: x.node.name.clone(),
        problem: problem.to_string(),
    }
}

fn embed<F: Real + Element>(x: &Operands<'_>, op: &op::Embedding) -> Result<(), EngineError> {
    let seq = x.input_type(0).width();
    let positions = op.positions.then(|| x.input(2));
    let dropout = x.dropout(op.dropout, Some(x.node.inputs.len() - 1));
    embedding::forward::<F>(x.input(0), seq, x.input(1), positions, dropout, x.output(0))
        .map_err(|error| failed(x, error))
}

fn embed_backward<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::EmbeddingBackward,
) -> Result<(), EngineError> {
    let seq = x.input_type(1).width();
    let dropout = x.dropout(op.dropout, Some(2));
    let table = op.table.map(|_| x.accumulator(0));
    let positions = op
        .positions
        .map(|_| x.accumulator(usize::from(op.table.is_some())));
    embedding::backward::<F>(x.input(1), seq, x.input(0), dropout, table, positions)
        .map_err(|error| failed(x, error))
}

fn norm_shape(x: &Operands<'_>, kind: NormKind) -> norm::NormShape {
    let ty = x.input_type(0);
    norm::NormShape {
        kind,
        rows: ty.rows(),
        width: ty.width(),
    }
}

fn normalize<F: Real + Element>(x: &Operands<'_>, op: &op::Norm) {
    let layout = op.layout();
    let dropout = x.dropout(op.dropout, layout.random);
    // The sum can take over the stream or, without dropout, the branch: addition commutes.
    let over_branch = op.residual && x.is_in_place(1, 0);
    let (stream, branch) = match (op.residual, over_branch) {
        (false, _) => (Some(x.input::<F>(0)), None),
        (true, false) => (x.input_unless_in_place(0, 0), Some((x.input(1), dropout))),
        (true, true) => (None, Some((x.input(0), None))),
    };
    let args = norm::Forward {
        x: stream,
        branch,
        gamma: x.input(layout.gamma),
        beta: layout.beta.map(|i| x.input(i)),
        x_new: op.residual.then(|| x.output(0)),
        y: x.output(layout.y),
        mean: layout.mean.map(|i| x.output(i)),
        rstd: x.output(layout.rstd),
    };
    norm::forward(norm_shape(x, op.kind), op.epsilon, args);
}

fn normalize_again<F: Real + Element>(x: &Operands<'_>, op: &op::NormApply) {
    let shape = norm_shape(x, op.kind);
    match op.kind {
        NormKind::Layer => norm::apply::<F>(
            shape,
            x.input(0),
            Some(x.input(1)),
            x.input(2),
            x.input(3),
            Some(x.input(4)),
            x.output(0),
        ),
        NormKind::Rms => {
            norm::apply::<F>(
                shape,
                x.input(0),
                None,
                x.input(1),
                x.input(2),
                None,
                x.output(0),
            );
        }
    }
}

fn normalize_backward<F: Real + Element>(x: &Operands<'_>, op: &op::NormBackward) {
    let layout = op.layout();
    let residual = match layout.residual_gradient {
        None => norm::Residual::Absent,
        Some(i) if x.is_in_place(i, 0) => norm::Residual::InPlace,
        Some(i) => norm::Residual::At(x.input::<F>(i)),
    };
    let dropout = x.dropout(op.dropout, layout.random);
    // y over dy, once that has been read.
    let value = layout
        .value
        .map(|i| (x.output::<F>(i), x.is_in_place(0, i)));
    let shape = norm_shape(x, op.kind);
    let (stream, rstd) = (x.input(layout.stream), x.input(layout.rstd));
    let mean = layout.mean.map(|i| x.input(i));
    let gamma = x.input(layout.gamma);
    let args = norm::Backward {
        dy: match &value {
            Some((y, true)) => Some(&**y),
            _ => x.input_unless_in_place(0, 0),
        },
        residual,
        x_new: stream,
        mean,
        rstd,
        gamma,
        dx: x.output(0),
        dbranch: layout.dbranch.map(|i| (x.output(i), dropout)),
        dgamma: layout.dgamma.map(|i| x.accumulator(i)),
        dbeta: layout.dbeta.map(|i| x.accumulator(i)),
    };
    norm::backward(shape, args);
    if let Some((y, _)) = value {
        let beta = layout.beta.map(|i| x.input(i));
        norm::apply(shape, stream, mean, rstd, gamma, beta, y);
    }
}

/// A column block of an input.
fn columns<'a, F: Element>(
    x: &Operands<'a>,
    input: usize,
    offset: usize,
    width: usize,
) -> Columns<'a, F> {
    Columns {
        data: x.input(input),
        row_stride: x.input_type(input).width(),
        offset,
        width,
    }
}

fn multiply<F: Real + Element>(x: &Operands<'_>, op: &op::Linear) {
    let (rows, width) = (x.input_type(0).rows(), x.input_type(1).width());
    let mut source = columns::<F>(x, 0, op.first_column, width);
    let bias = op.bias.then(|| x.input(2));
    if let Some(dropout) = x.dropout(op.dropout, Some(x.node.inputs.len() - 1)) {
        source = dropped(x, rows, source, dropout);
    }
    linear::forward(rows, source, x.input(1), bias, x.output(0));
}

/// The columns after dropout, in the workspace.
fn dropped<'a, F: Real + Element>(
    x: &Operands<'a>,
    rows: usize,
    source: Columns<'a, F>,
    dropout: Dropout,
) -> Columns<'a, F> {
    let out = x.workspace::<F>();
    linear::drop_columns(rows, source, dropout, out);
    Columns::whole(out, source.width)
}

fn multiply_add<F: Real + Element>(x: &Operands<'_>, op: &op::LinearAdd) {
    let (rows, width) = (x.input_type(1).rows(), x.input_type(2).width());
    let y = x.output::<F>(0);
    if let Some(before) = x.input_unless_in_place(0, 0) {
        y.copy_from_slice(before);
    }
    let source = columns::<F>(x, 1, op.first_column, width);
    let place = (x.output_type(0).width(), op.y_column);
    linear::forward_add(rows, source, x.input(2), F::from_f64(op.scale), y, place);
}

fn multiply_grad_input<F: Real + Element>(x: &Operands<'_>, op: &op::LinearGradInput) {
    let (outputs, width) = (x.input_type(1).rows(), x.input_type(1).width());
    let rows = x.input_type(0).rows();
    let dx = x.output::<F>(0);
    let mode = if op.accumulate {
        if let Some(partial) = x.input_unless_in_place(2, 0) {
            dx.copy_from_slice(partial);
        }
        Accumulate::Add
    } else {
        if width < op.width {
            dx.fill(F::ZERO);
        }
        Accumulate::Overwrite
    };
    let dy = columns::<F>(x, 0, op.dy_column, outputs);
    let (weight, scale) = (x.input(1), F::from_f64(op.scale));
    let place = (op.width, op.first_column);
    let dropout = x.dropout(op.dropout, Some(x.node.inputs.len() - 1));
    match dropout {
        None => linear::grad_input(rows, width, dy, weight, scale, dx, place, mode),
        // All of dx is this product: it is dropped where it lies.
        Some(dropout) if !op.accumulate && width == op.width => {
            linear::grad_input(rows, width, dy, weight, scale, dx, place, mode);
            linear::drop_in_place(rows, width, dropout, dx);
        }
        Some(dropout) => {
            let apart = x.workspace::<F>();
            let overwrite = Accumulate::Overwrite;
            linear::grad_input(rows, width, dy, weight, scale, apart, (width, 0), overwrite);
            linear::add_dropped(rows, width, dropout, apart, dx, place);
        }
    }
}

fn multiply_grad_weight<F: Real + Element>(x: &Operands<'_>, op: &op::LinearGradWeight) {
    let rows = x.input_type(0).rows();
    let dy = columns::<F>(x, 0, op.dy_column, op.outputs);
    let mut source = columns(x, 1, op.first_column, op.inputs);
    if let Some(dropout) = x.dropout(op.dropout, Some(2)) {
        source = dropped(x, rows, source, dropout);
    }
    let (dw, mode) = x.accumulator(0);
    linear::grad_weight(rows, dy, source, F::from_f64(op.scale), dw, mode);
    if op.bias {
        let (db, mode) = x.accumulator(1);
        linear::grad_bias(rows, dy, db, mode);
    }
}

fn gate<F: Real + Element>(x: &Operands<'_>, op: &op::Gated) {
    gated::forward(
        op.kind,
        x.input_unless_in_place::<F>(0, 0),
        x.input_unless_in_place(1, 0),
        x.output(0),
    );
}

fn activate_backward<F: Real + Element>(x: &Operands<'_>, op: &op::ActivationBackward) {
    if op.value {
        activation::backward_with_value(
            op.kind,
            x.input_unless_in_place::<F>(0, 1),
            x.input_unless_in_place(1, 0),
            x.output(0),
            x.output(1),
        );
    } else {
        let dy = x.input_unless_in_place::<F>(0, 0);
        activation::backward(op.kind, dy, x.input(1), x.output(0));
    }
}

fn gate_backward<F: Real + Element>(x: &Operands<'_>, op: &op::GatedBackward) {
    let dy_taken = (0..x.node.outputs.len()).any(|output| x.is_in_place(0, output));
    gated::backward(
        op.kind,
        (!dy_taken).then(|| x.input::<F>(0)),
        x.input_unless_in_place(1, 0),
        x.input_unless_in_place(2, 1),
        x.output(0),
        x.output(1),
        op.value.then(|| x.output(2)),
    );
}

fn rotate<F: Real + Element>(x: &Operands<'_>, op: &op::Rotary) {
    let ty = x.input_type(0);
    let shape = rotary::RotaryShape {
        batch: ty.shape.dims()[0],
        seq: ty.shape.dims()[1],
        width: ty.width(),
        columns: op.columns,
        frequencies: &op.frequencies,
        scale: op.scale,
        inverse: op.inverse,
    };
    let positions = op.positions.then(|| x.input(1));
    let source = x.input_unless_in_place::<F>(0, 0);
    rotary::rotate(&shape, positions, source, x.output(0));
}

fn view<F: Real + Element>(x: &Operands<'_>) {
    if let Some(input) = x.input_unless_in_place::<F>(0, 0) {
        x.output(0).copy_from_slice(input);
    }
}

/// The inputs of an expression; what the first `outputs` outputs have taken over is in them.
fn sources<'a, F: Real + Element>(
    x: &Operands<'a>,
    pointwise: &op::Pointwise,
    outputs: usize,
) -> Vec<expression::Source<'a, F>> {
    let source = |(input, read): (usize, &op::Read)| {
        let taken = (0..outputs).find(|&output| x.is_in_place(input, output));
        let numbers = match (taken, read.dtype) {
            (Some(output), _) => expression::Numbers::InPlace(output),
            (None, DType::I32) => expression::Numbers::Integer(x.input(input)),
            (None, DType::F32) if x.graph.compute == DType::F64 => {
                expression::Numbers::Single(x.input(input))
            }
            (None, _) => expression::Numbers::Real(x.input(input)),
        };
        expression::Source {
            numbers,
            broadcast: read.broadcast,
        }
    };
    pointwise.reads.iter().enumerate().map(source).collect()
}

fn places<'a, F>(
    x: &Operands<'_>,
    pointwise: &'a op::Pointwise,
    sources: &'a [expression::Source<'a, F>],
) -> expression::Places<'a, F> {
    let random = pointwise.expression.drops();
    expression::Places {
        expression: &pointwise.expression,
        sources,
        random: random.then(|| x.random_state(pointwise.reads.len())),
        rows: pointwise.shape.rows(),
        width: pointwise.shape.width(),
    }
}

fn map<F: Real + Element>(x: &Operands<'_>, op: &op::Map) {
    let sources = sources::<F>(x, &op.pointwise, op.outputs.len());
    let outputs = 0..op.outputs.len();
    let mut outputs: Vec<_> = outputs.map(|output| x.accumulator::<F>(output)).collect();
    expression::map(&places(x, &op.pointwise, &sources), &mut outputs);
}

fn reduce<F: Real + Element>(x: &Operands<'_>, op: &op::Reduce) {
    let sources = sources::<F>(x, &op.pointwise, 0);
    let reduction = expression::Reduction {
        kind: op.kind,
        broadcast: op.broadcast,
        parts: op.cpu_parts(),
    };
    let (output, mode) = x.accumulator(0);
    let places = places(x, &op.pointwise, &sources);
    expression::reduce(&places, &reduction, x.workspace(), output, mode);
}

fn concat<F: Real + Element>(x: &Operands<'_>, op: &op::Concat) {
    let (rows, width) = op.joined.pieces(&x.output_type(0).shape);
    let whole = x.output::<F>(0);
    let (mut offset, mut input) = (0, 0);
    for &(size, is_there) in &op.parts {
        let count = size * width / op.parts.iter().map(|(size, _)| size).sum::<usize>().max(1);
        if is_there {
            columns::put_columns(rows, x.input(input), whole, (width, offset, count));
            input += 1;
        } else {
            columns::clear_columns(rows, whole, (width, offset, count));
        }
        offset += count;
    }
}

fn split<F: Real + Element>(x: &Operands<'_>, op: &op::Split) {
    let (rows, width) = op.joined.pieces(&x.input_type(0).shape);
    let mut offset = 0;
    for output in 0..op.parts.len() {
        let (_, count) = op.joined.pieces(&x.output_type(output).shape);
        let place = (width, offset, count);
        columns::take_columns(rows, x.input::<F>(0), x.output(output), place);
        offset += count;
    }
}

fn dequantise<F: Real + Element>(x: &Operands<'_>, op: &op::Dequantise) {
    let (codes, out) = (x.input::<u8>(0), x.output::<F>(0));
    match op.quantisation {
        op::Quantisation::Nf4 { double: false } => {
            dequantise::nf4(codes, dequantise::Scales::Numbers(x.input(1)), out);
        }
        op::Quantisation::Nf4 { double: true } => {
            let scales = dequantise::Scales::Codes {
                codes: x.input(1),
                units: x.input(2),
                mean: x.input::<f32>(3)[0],
            };
            dequantise::nf4(codes, scales, out);
        }
        op::Quantisation::Int8 => dequantise::int8(codes, x.input(1), out),
    }
}

fn add<F: Real + Element>(x: &Operands<'_>) {
    if x.is_in_place(1, 0) {
        activation::add(None, x.input::<F>(0), x.output(0));
    } else {
        activation::add(x.input_unless_in_place::<F>(0, 0), x.input(1), x.output(0));
    }
}

/// The shape, and queries, keys and values, whose first source is input `first`; lengths and starts
/// are counted from input `extras` on.
fn attention_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: &op::Attention,
    first: usize,
    extras: usize,
) -> (attention::AttentionShape, attention::Inputs<'a, F>) {
    let dims = x.input_type(first).shape;
    let shape = attention::AttentionShape {
        batch: dims.dims()[0],
        seq: dims.dims()[1],
        heads: op.heads,
        kv_heads: op.kv_heads,
        head_dim: op.head_dim,
        causal: op.causal,
        scale: op.scale,
        window: op.window,
    };
    let [q, k, v] = op.places();
    let (query_width, key_width) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
    let inputs = attention::Inputs {
        q: columns(x, first + q.0, q.1, query_width),
        k: columns(x, first + k.0, k.1, key_width),
        v: columns(x, first + v.0, v.1, key_width),
        lengths: op.lengths().map(|lengths| x.input(extras + lengths)),
        starts: op.starts().map(|starts| x.input(extras + starts)),
        selection: op.selected().map(|selected| x.input(extras + selected)),
    };
    (shape, inputs)
}

fn attend<F: Real + Element>(x: &Operands<'_>, op: &op::Attention) {
    let (shape, inputs) = attention_inputs::<F>(x, op, 0, op.num_sources());
    let dropout = x.dropout(op.dropout, Some(op.num_sources()));
    attention::forward(&shape, &inputs, dropout, x.output(0), x.output(1));
}

fn attend_backward<F: Real + Element>(x: &Operands<'_>, op: &op::Attention) {
    let sources = op.num_sources();
    let (shape, inputs) = attention_inputs::<F>(x, op, 1, sources + 3);
    let dropout = x.dropout(op.dropout, Some(sources + 3));
    let (query_width, key_width) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
    let [dq, dk, dv] = match op.inputs {
        op::AttentionInputs::Packed => {
            let [q, k, v] = op.places();
            let blocks = [(q.1, query_width), (k.1, key_width), (v.1, key_width)];
            ColumnsMut::split(x.output(0), x.output_type(0).width(), blocks)
        }
        op::AttentionInputs::Separate => [
            ColumnsMut::whole(x.output(0), query_width),
            ColumnsMut::whole(x.output(1), key_width),
            ColumnsMut::whole(x.output(2), key_width),
        ],
    };
    let (o, lse) = (x.input(sources + 1), x.input(sources + 2));
    attention::backward(
        &shape,
        x.input(0),
        &inputs,
        o,
        lse,
        dropout,
        x.workspace(),
        &dq,
        &dk,
        &dv,
    );
}

/// The shape, and queries and keys, which are in the packed input `qkv`.
fn entropy_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: &op::AttentionEntropy,
    qkv: usize,
) -> (attention::EntropyShape, [Columns<'a, F>; 2]) {
    let dims = x.input_type(qkv).shape;
    let shape = attention::EntropyShape {
        batch: dims.dims()[0],
        seq: dims.dims()[1],
        heads: op.heads,
        head_dim: op.head_dim,
        causal: op.causal,
        scale: op.scale,
        epsilon: op::AttentionEntropy::EPSILON,
    };
    let width = op.heads * op.head_dim;
    let parts = [0, width].map(|offset| columns(x, qkv, offset, width));
    (shape, parts)
}

fn entropy<F: Real + Element>(x: &Operands<'_>, op: &op::AttentionEntropy) {
    let (shape, [q, k]) = entropy_inputs::<F>(x, op, 0);
    let means = op.keep_means.then(|| x.output(1));
    attention::entropy(&shape, q, k, x.input(1), x.output(0), means);
}

fn entropy_backward<F: Real + Element>(x: &Operands<'_>, op: &op::AttentionEntropy) {
    let (shape, [q, k]) = entropy_inputs::<F>(x, op, 1);
    let width = op.heads * op.head_dim;
    let blocks = [(0, width), (width, width), (2 * width, width)];
    let gradients = ColumnsMut::split(x.output(0), x.output_type(0).width(), blocks);
    let kept = attention::EntropyRows {
        lse: x.input(2),
        means: x.input(3),
        gradient: x.input(0),
    };
    attention::entropy_backward(&shape, q, k, &kept, &gradients);
}

fn entropy_cached<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::AttentionEntropy,
) -> Result<(), EngineError> {
    let (shape, [q, _]) = entropy_inputs::<F>(x, op, 0);
    let first = first_positions(x, 2)?;
    let slots = x.input_type(1).shape.dims()[2];
    let last = first.iter().copied().max().unwrap_or(0);
    if last.saturating_add(shape.seq) > slots {
        return Err(failed(x, format!("position {last} of {slots} slots")));
    }
    attention::entropy_cached(&shape, q, (x.input(1), slots), &first, x.output(0));
    Ok(())
}

/// The shape and inputs of an indexer, the first of the node.
fn indexer_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: op::Indexer,
) -> (indexer::IndexerShape, indexer::Inputs<'a, F>) {
    let dims = x.input_type(0).shape;
    let seq = dims.dims()[1];
    let shape = indexer::IndexerShape {
        batch: dims.dims()[0],
        seq,
        heads: op.heads,
        width: op.width,
        keys: seq,
        rows: op::Indexer::cpu_rows(seq),
    };
    let inputs = indexer::Inputs {
        queries: x.input(0),
        keys: x.input(1),
        weights: x.input(2),
        weight_bias: x.input(3),
        score_bias: x.input(4),
    };
    (shape, inputs)
}

fn key_count(count: op::KeyCount) -> indexer::Count {
    match count {
        op::KeyCount::Fixed(count) => indexer::Count::Fixed(count),
        op::KeyCount::Adaptive {
            base,
            least,
            most,
            temperature,
        } => indexer::Count::Adaptive {
            base,
            least,
            most,
            temperature,
        },
    }
}

fn select_cached<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::CachedSelection,
) -> Result<(), EngineError> {
    let (shape, inputs) = indexer_inputs::<F>(x, op.indexer);
    let first = first_positions(x, op::Indexer::NUM_INPUTS)?;
    let last = first.iter().copied().max().unwrap_or(0);
    if last.saturating_add(shape.seq) > op.slots {
        return Err(failed(x, format!("position {last} of {} slots", op.slots)));
    }
    let cache = indexer::Cache {
        keys: x.output(1),
        sums: op.is_adaptive().then(|| x.output(2)),
        slots: op.slots,
    };
    let count = key_count(op.count);
    indexer::select_cached(
        &shape,
        &inputs,
        (&first, count),
        cache,
        x.workspace(),
        x.output(0),
    );
    Ok(())
}

fn select_keys<F: Real + Element>(x: &Operands<'_>, op: &op::IndexerSelection) {
    let (shape, inputs) = indexer_inputs::<F>(x, op.indexer);
    let count = op.count.map_or(indexer::Count::All, key_count);
    let bits = op.count.map(|_| x.output(1));
    indexer::select(&shape, &inputs, count, x.workspace(), x.output(0), bits);
}

/// What the loss of an indexer reads.
fn indexer_loss_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: &op::IndexerLoss,
) -> (indexer::IndexerShape, indexer::LossInputs<'a, F>) {
    let (shape, inputs) = indexer_inputs::<F>(x, op.indexer);
    let of = &op.attention;
    let source = op::IndexerLoss::FIRST_SOURCE;
    let (query_width, key_width) = (of.heads * of.head_dim, of.kv_heads * of.head_dim);
    let [q, k, _] = of.places();
    let keys = columns(x, source + k.0, k.1, key_width);
    let sources = attention::Inputs {
        q: columns(x, source + q.0, q.1, query_width),
        k: keys,
        // They are not read.
        v: keys,
        lengths: None,
        starts: None,
        selection: op.selection().map(|selection| x.input(selection)),
    };
    let attention = attention::AttentionShape {
        batch: shape.batch,
        seq: shape.seq,
        heads: of.heads,
        kv_heads: of.kv_heads,
        head_dim: of.head_dim,
        causal: of.causal,
        scale: of.scale,
        window: None,
    };
    let inputs = indexer::LossInputs {
        indexer: inputs,
        indexer_lse: x.input(op::Indexer::NUM_INPUTS),
        attention,
        sources,
        lse: x.input(source + op.num_sources()),
    };
    (shape, inputs)
}

fn indexer_loss<F: Real + Element>(x: &Operands<'_>, op: &op::IndexerLoss) {
    let (shape, inputs) = indexer_loss_inputs::<F>(x, op);
    let kl = indexer::loss(&shape, &inputs, x.workspace());
    let total: f64 = kl.iter().map(|kl| kl.to_f64()).sum();
    let [inverse_count, _] = op.term_inputs();
    let inverse_count = f64::from(x.input::<f32>(inverse_count)[0]);
    let (value, mode) = x.accumulator::<F>(0);
    mode.put(&mut value[0], F::from_f64(total * inverse_count));
}

fn indexer_loss_backward<F: Real + Element>(x: &Operands<'_>, op: &op::IndexerLoss) {
    let (shape, inputs) = indexer_loss_inputs::<F>(x, op);
    let [inverse_count, weight] = op
        .term_inputs()
        .map(|input| f64::from(x.input::<f32>(input)[0]));
    let gradient = F::from_f64(inverse_count * weight);
    let gradients = indexer::Gradients {
        queries: x.output(0),
        keys: x.output(1),
        weights: x.output(2),
        weight_bias: x.accumulator(3),
        score_bias: x.accumulator(4),
    };
    indexer::loss_backward(&shape, gradient, &inputs, x.workspace(), gradients);
}

/// The positions that rows of input `input` begin at.
fn first_positions(x: &Operands<'_>, input: usize) -> Result<Vec<usize>, EngineError> {
    let length = x.input_type(input).width().max(1);
    let firsts = x.input::<i32>(input).chunks_exact(length);
    firsts
        .map(|row| usize::try_from(row[0]).map_err(|_| failed(x, format!("position {}", row[0]))))
        .collect()
}

/// For each sequence, whether nothing came before its tokens.
fn begins(x: &Operands<'_>, input: usize) -> Result<Vec<bool>, EngineError> {
    let first = first_positions(x, input)?;
    Ok(first.into_iter().map(|first| first == 0).collect())
}

fn attend_cached<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::CachedAttention,
) -> Result<(), EngineError> {
    let sources = op.attention.num_sources();
    let (shape, inputs) = attention_inputs::<F>(x, &op.attention, 0, sources);
    let first = first_positions(x, op.positions())?;
    let overwritten = |&first: &usize| {
        let most = op.slots.saturating_sub(shape.seq);
        let window = op
            .attention
            .window
            .is_some_and(|window| window.saturating_add(shape.seq) <= op.slots.saturating_add(1));
        first > most && !window
    };
    if let Some(first) = first.iter().find(|first| overwritten(first)) {
        let problem = format!("position {first} and {} slots for keys", op.slots);
        return Err(failed(x, problem));
    }
    let cache = attention::Cache {
        keys: x.output(1),
        values: x.output(2),
        slots: op.slots,
    };
    attention::forward_cached(&shape, &inputs, &first, cache, x.output(0));
    Ok(())
}

fn convolution_shape(
    x: &Operands<'_>,
    source: usize,
    weight: usize,
) -> convolution::ConvolutionShape {
    let (source, weight) = (x.input_type(source).shape, x.input_type(weight).shape);
    convolution::ConvolutionShape {
        batch: source.dims()[0],
        seq: source.dims()[1],
        channels: weight.rows(),
        width: weight.width(),
    }
}

fn convolve<F: Real + Element>(x: &Operands<'_>, op: &op::Convolution) {
    let shape = convolution_shape(x, 0, 1);
    let source = columns::<F>(x, 0, op.first_column, shape.channels);
    convolution::forward(shape, source, x.input(1), x.input(2), x.output(0));
}

fn convolve_cached<F: Real + Element>(
    x: &Operands<'_>,
    op: &op::CachedConvolution,
) -> Result<(), EngineError> {
    let shape = convolution_shape(x, 0, 1);
    let source = columns::<F>(x, 0, op.first_column, shape.channels);
    let begins = begins(x, 3)?;
    let parameters = (x.input(1), x.input(2));
    convolution::forward_from(shape, source, parameters, &begins, x.output(1), x.output(0));
    Ok(())
}

fn convolve_backward<F: Real + Element>(x: &Operands<'_>, op: &op::ConvolutionBackward) {
    let shape = convolution_shape(x, 1, 2);
    let dx = x.output::<F>(0);
    if !op.accumulate {
        dx.fill(F::ZERO);
    } else if let Some(partial) = x.input_unless_in_place(4, 0) {
        dx.copy_from_slice(partial);
    }
    let blocks = [(op.first_column, shape.channels)];
    let [dx] = ColumnsMut::split(dx, x.output_type(0).width(), blocks);
    let parameters = op.parameters.then(|| [x.accumulator(1), x.accumulator(2)]);
    convolution::backward(
        shape,
        x.input(0),
        columns(x, 1, op.first_column, shape.channels),
        x.input(2),
        x.input(3),
        &dx,
        parameters,
    );
}

/// The shape and inputs of a scan whose x is input `first`.
fn scan_inputs<'a, F: Element>(
    x: &Operands<'a>,
    op: &op::Scan,
    first: usize,
) -> (scan::ScanShape, scan::Inputs<'a, F>) {
    let dims = x.input_type(first).shape;
    let shape = scan::ScanShape {
        batch: dims.dims()[0],
        seq: dims.dims()[1],
        inner: op.inner,
        state: op.state,
        rank: op.rank,
        chunk: op.chunk,
    };
    let rest = first + op.num_sources();
    let inputs = scan::Inputs {
        x: columns(x, first, op.x_column, op.inner),
        gate: Some(columns(x, rest - 1, op.z_column, op.inner)),
        projection: x.input(rest),
        dt: x.input(rest + 1),
        a_log: x.input(rest + 2),
        skip: x.input(rest + 3),
    };
    (shape, inputs)
}

fn scan_forward<F: Real + Element>(x: &Operands<'_>, op: &op::Scan) {
    let (shape, inputs) = scan_inputs::<F>(x, op, 0);
    let states = op.keep_states.then(|| x.output(1));
    scan::forward(shape, &inputs, x.output(0), states);
}

fn scan_cached<F: Real + Element>(x: &Operands<'_>, op: &op::Scan) -> Result<(), EngineError> {
    let (shape, inputs) = scan_inputs::<F>(x, op, 0);
    let begins = begins(x, op.num_sources() + 4)?;
    scan::forward_from(shape, &inputs, &begins, x.output(1), x.output(0));
    Ok(())
}

fn scan_backward<F: Real + Element>(x: &Operands<'_>, op: &op::Scan) {
    let (shape, inputs) = scan_inputs::<F>(x, op, 1);
    let sources = op.num_sources();
    let states = x.input(1 + sources + 4);
    let (dx, dz) = if op.packed {
        let blocks = [(op.x_column, op.inner), (op.z_column, op.inner)];
        let dxz = x.output::<F>(0);
        let width = x.output_type(0).width();
        if width > 2 * op.inner {
            dxz.fill(F::ZERO);
        }
        let [dx, dz] = ColumnsMut::split(dxz, width, blocks);
        (dx, dz)
    } else {
        let whole = |output: usize, column: usize| {
            let buffer = x.output::<F>(output);
            let width = x.output_type(output).width();
            if width > op.inner {
                buffer.fill(F::ZERO);
            }
            let [block] = ColumnsMut::split(buffer, width, [(column, op.inner)]);
            block
        };
        (whole(0, op.x_column), whole(1, op.z_column))
    };
    let gradients = scan::Gradients {
        x: dx,
        gate: Some(dz),
        projection: x.output(sources),
        dt: x.output(sources + 1),
        a_log: x.accumulator(sources + 2),
        skip: x.accumulator(sources + 3),
    };
    scan::backward(shape, &inputs, states, x.input(0), x.workspace(), gradients);
}

/// On the CPU both memories are the same: a plain copy.
fn fetch(x: &Operands<'_>) {
    for index in 0..x.node.outputs.len() {
        x.output::<u8>(index).copy_from_slice(x.input(index));
    }
}

fn loss<F: Real + Element>(x: &Operands<'_>, op: &op::CrossEntropy) -> Result<(), EngineError> {
    let (h, w) = (x.input_type(0), x.input_type(1));
    let shape = cross_entropy::CrossEntropyShape {
        rows: h.rows(),
        width: h.width(),
        vocab: w.rows(),
        chunk_rows: op.chunk_rows,
    };
    let weighting = cross_entropy::Weighting {
        inverse_count: f64::from(x.input::<f32>(3)[0]),
        weight: f64::from(x.input::<f32>(4)[0]),
        label_smoothing: op.label_smoothing,
    };
    let (loss, mode) = x.accumulator::<F>(0);
    let head = cross_entropy::Head {
        weight: x.input(1),
        bias: op.bias_input().map(|bias| x.input(bias)),
    };
    let result = if op.gradient {
        let gradients = cross_entropy::HeadGradients {
            weight: op.weight.then(|| x.accumulator(2)),
            bias: op.bias_output().map(|bias| x.accumulator(bias)),
        };
        cross_entropy::forward_backward(
            shape,
            x.input_unless_in_place(0, 1),
            head,
            x.input(2),
            weighting,
            x.workspace(),
            (&mut loss[0], mode),
            x.output(1),
            gradients,
        )
    } else {
        cross_entropy::forward_only(
            shape,
            x.input(0),
            head,
            x.input(2),
            weighting,
            x.workspace(),
            (&mut loss[0], mode),
        )
    };
    result.map_err(|error| failed(x, error))
}

fn logits<F: Real + Element>(x: &Operands<'_>, op: &op::Logits) -> Result<(), EngineError> {
    let (h, vocabulary) = (x.input_type(0), x.output_type(0).width());
    let (seq, width) = (h.shape.dims()[1], h.width());
    let hidden = x.input::<F>(0);
    let head = cross_entropy::Head {
        weight: x.input(1),
        bias: op.bias.then(|| x.input(3)),
    };
    let rows = x.output(0).chunks_exact_mut(vocabulary);
    for (sequence, (row, &position)) in rows.zip(x.input::<i32>(2)).enumerate() {
        let position = usize::try_from(position)
            .ok()
            .filter(|&position| position < seq)
            .ok_or_else(|| failed(x, format!("position {position} of a sequence of {seq}")))?;
        let h = &hidden[(sequence * seq + position) * width..][..width];
        cross_entropy::logits(h, head, row);
    }
    Ok(())
}

fn gradient_squares<F: Real + Element>(x: &Operands<'_>, op: &op::GradientSquares) {
    let gradient = x.input::<F>(0);
    let count = optimizer::partials_len(gradient.len());
    let sums = &mut x.output::<f64>(0)[op.first..op.first + count];
    optimizer::squares(gradient, sums);
}

/// The sums of squares of all gradients' blocks, added up in the order of the parameters whether
/// they were made here or one gradient at a time.
fn gradient_norm<F: Real + Element>(x: &Operands<'_>, op: &op::GradientNorm) {
    let sum: f64 = if op.from_squares {
        x.input::<f64>(0).iter().sum()
    } else {
        let partials = x.workspace::<f64>();
        let mut first = 0;
        for input in 0..x.node.inputs.len() {
            let gradient = x.input::<F>(input);
            optimizer::squares(gradient, &mut partials[first..]);
            first += optimizer::partials_len(gradient.len());
        }
        partials[..first].iter().sum()
    };
    let norm = sum.sqrt();
    // The small constant is PyTorch's, and keeps a zero norm from dividing.
    let factor = op
        .max_norm
        .map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
    let out = x.output::<f32>(0);
    out[0] = norm as f32;
    out[1] = factor as f32;
}

fn update<F: Real + Element>(x: &Operands<'_>, op: &op::AdamW) {
    let scalars = x.input::<f32>(1);
    let factor = if op.factor { x.input::<f32>(2)[1] } else { 1.0 };
    if factor == 0.0 {
        return;
    }
    let settings = optimizer::AdamW {
        beta1: op.beta1,
        beta2: op.beta2,
        epsilon: op.epsilon,
        weight_decay: op.weight_decay,
        learning_rate: f64::from(scalars[0]) * op.learning_rate_scale,
        bias_correction1: f64::from(scalars[1]),
        bias_correction2: f64::from(scalars[2]),
        gradient_scale: f64::from(factor),
    };
    let layout = op.layout();
    let (parameter, gradient) = (x.output::<F>(0), x.input(0));
    match layout.scales {
        None => {
            let (m, v) = (x.output(layout.m), x.output(layout.v));
            optimizer::adamw(parameter, gradient, m, v, &settings);
        }
        Some(scales) => {
            let moment = |codes, scales| eight_bit::Moment {
                codes: x.output(codes),
                scales: x.output(scales),
            };
            let (m, v) = (moment(layout.m, scales[0]), moment(layout.v, scales[1]));
            eight_bit::adamw(parameter, gradient, m, v, &settings);
        }
    }
}
