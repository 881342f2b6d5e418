//! What follows a sum of products and may be part of the kernel that computes it: a product that is
//! dropped in part before it adds, a function of each element or a gate, what their derivatives make
//! of a gradient, the narrow product of an adapter that reads a function's result, and the norm of a
//! residual stream to which C is added. It is found by what a node's op says of its one command.

#[cfg(test)]
mod tests;

use cinch_graph::op::{ActivationKind, Linear, LinearGradInput, Norm, NormKind, Op};
use cinch_graph::{DType, Dropout};

use super::{Bytes, Effect, Memory, overlap, reads, reads_matrices, result, scratch, short, sum};
use crate::cuda::command::{Argument, Command, DropoutAt, NormAt, Product, Tail, TailKind};
use crate::cuda::lowering::Lowering;
use crate::cuda::op::Lowered;
use crate::cuda::op::linear::{adapter, dropped_product};

/// The function whose gates kernels have: that of most decoders.
const GATE: ActivationKind = ActivationKind::Silu;

/// Functions that kernels have without a gate: both forms of GELU.
fn is_gelu(function: ActivationKind) -> bool {
    matches!(function, ActivationKind::Gelu | ActivationKind::GeluTanh)
}

/// What a node is to a product before it.
pub fn tail(x: &Lowering<'_>) -> Option<TailKind> {
    let is_half = matches!(x.compute(), DType::Bf16 | DType::F16);
    let elements = || x.output_type(0).shape.elements();
    // Nobody reads the gradient again where something is written in its place.
    let is_over_gradient = |outputs: usize| (0..outputs).any(|output| x.is_in_place(0, output));
    match &x.node.op {
        Op::Activation(op) if is_half && is_gelu(op.kind) && is_in_arena(x) => {
            Some(TailKind::Activation {
                function: op.kind,
                from: x.input(0),
                to: x.output(0),
                elements: elements(),
            })
        }
        Op::ActivationBackward(op) if is_half && is_gelu(op.kind) && is_in_arena(x) => {
            let outputs = 1 + usize::from(op.value);
            is_over_gradient(outputs).then(|| TailKind::Derivative {
                function: op.kind,
                gradient: x.input(0),
                x: x.input(1),
                to: x.output(0),
                value: op.value.then(|| x.output(1)),
                elements: elements(),
            })
        }
        Op::Gated(op) if is_half && op.kind == GATE && is_in_arena(x) => Some(TailKind::Gate {
            function: op.kind,
            gate: x.input(0),
            up: x.input(1),
            to: x.output(0),
            elements: elements(),
        }),
        Op::GatedBackward(op) if is_half && op.kind == GATE && is_in_arena(x) => {
            let outputs = 2 + usize::from(op.value);
            is_over_gradient(outputs).then(|| TailKind::GateGradients {
                function: op.kind,
                gradient: x.input(0),
                gate: x.input(1),
                up: x.input(2),
                to_gate: x.output(0),
                to_up: x.output(1),
                value: op.value.then(|| x.output(2)),
                elements: elements(),
            })
        }
        Op::LinearGradInput(op) => dropped(x, op),
        Op::LinearGradWeight(op) if is_in_arena(x) => {
            let is_inside = op.is_dropped_inside(&x.input_type(0), &x.input_type(1));
            let gradient = adapter::first_gradient(x, op).filter(|_| is_inside);
            gradient.map(TailKind::FirstGradient)
        }
        Op::Linear(op) if is_in_arena(x) => narrow(x, op),
        Op::Norm(op) if is_half && is_in_arena(x) => norm(x, op),
        _ => None,
    }
}

/// Whether all that it writes is in the card's own memory.
fn is_in_arena(x: &Lowering<'_>) -> bool {
    let mut outputs = 0..x.node.outputs.len();
    outputs.all(|output| matches!(x.output_argument(output), Argument::Address(_)))
}

fn dropped(x: &Lowering<'_>, op: &LinearGradInput) -> Option<TailKind> {
    let dropout = op.dropout?;
    let is_inside = op.is_dropped_inside(&x.input_type(0), &x.input_type(1));
    let random = x.node.inputs.len() - 1;
    (is_inside && op.accumulate && x.is_in_place(2, 0)).then(|| TailKind::Dropped {
        product: dropped_product(x, op),
        dropout: DropoutAt {
            random: x.input(random),
            stream: dropout.stream,
            threshold: Dropout::threshold(dropout.rate),
        },
    })
}

/// The product of an adapter that reads all columns of something, some of it dropped.
fn narrow(x: &Lowering<'_>, op: &Linear) -> Option<TailKind> {
    let dropout = op.dropout?;
    let (source, weight) = (x.input_type(0), x.input_type(1));
    let is_all = op.first_column == 0 && source.width() == weight.width();
    let is_inside = op.is_dropped_inside(&source, &weight);
    let is_here = matches!(x.input_argument(1), Argument::Address(_));
    (is_all && is_inside && is_here).then(|| TailKind::Narrow {
        from: x.input(0),
        rows: source.rows(),
        inner: source.width(),
        weight: x.input(1),
        columns: weight.rows(),
        to: x.output(0),
        dropout: DropoutAt {
            random: x.input(x.node.inputs.len() - 1),
            stream: dropout.stream,
            threshold: Dropout::threshold(dropout.rate),
        },
        parts: {
            let (workspace, bytes) = x.workspace();
            (workspace, workspace + bytes)
        },
    })
}

/// A layer norm with an addition before it, of which nobody else reads what is added.
fn norm(x: &Lowering<'_>, op: &Norm) -> Option<TailKind> {
    const BRANCH: usize = 1;
    let layout = op.layout();
    let is_norm = op.residual && op.kind == NormKind::Layer && x.is_last_use(BRANCH);
    let (beta, mean) = layout.beta.zip(layout.mean).filter(|_| is_norm)?;
    let dropout = op.dropout.zip(layout.random);
    let ty = x.input_type(0);
    // A block that is computed again has its statistics from there.
    let where_read = |output: usize| x.is_read(output).then(|| x.output(output));
    Some(TailKind::Norm(NormAt {
        branch: x.input(BRANCH),
        x: x.input(0),
        gamma: x.input(layout.gamma),
        beta: x.input(beta),
        dropout: dropout.map(|(dropout, random)| DropoutAt {
            random: x.input(random),
            stream: dropout.stream,
            threshold: Dropout::threshold(dropout.rate),
        }),
        epsilon: op.epsilon as f32,
        sum: where_read(0),
        to: x.output(layout.y),
        mean: where_read(mean),
        rstd: where_read(layout.rstd),
        rows: ty.rows(),
        width: ty.width(),
    }))
}

/// Whether nothing more can be added to C after it.
pub(super) fn is_last(kind: &TailKind) -> bool {
    !matches!(kind, TailKind::Dropped { .. })
}

/// Whether nothing follows it: of what functions make of C, something narrow may be a product.
pub(super) fn is_end(kind: &TailKind) -> bool {
    is_last(kind) && !matches!(kind, TailKind::Activation { .. })
}

/// A node as the tail of a sum that has others already.
pub(super) fn follows(products: &[Product], tails: &[Tail], node: &Lowered) -> Option<Tail> {
    let first = products.first()?;
    let kind = node.tail?;
    let [command @ Command::Launch { .. }] = &node.commands[..] else {
        return None;
    };
    // Pointwise functions go over all of C, which lies in one piece.
    let is_all = |from: u64, elements: usize| {
        from == first.c.address && first.c.row_stride == first.n && elements == first.m * first.n
    };
    // While some of it is written, operands are still read; a bias is where it is kept.
    let spares_ranges = |written: &[Bytes]| {
        let dropped = tails.iter().filter_map(|tail| match &tail.kind {
            TailKind::Dropped { product, .. } => Some(product),
            _ => None,
        });
        let mut operands = products.iter().chain(dropped);
        operands.all(|product| written.iter().all(|&range| !reads_matrices(product, range)))
    };
    let spares = |written: &[Option<u64>]| {
        let bytes = (first.m * first.n) as u64 * first.c.dtype.size();
        let written = written.iter().flatten().map(|&to| (to, to + bytes));
        spares_ranges(&written.collect::<Vec<Bytes>>())
    };
    if let TailKind::Narrow { .. } = kind {
        let kind = after_function(products, tails, kind)?;
        let command = command.clone();
        return Some(Tail { kind, command });
    }
    let is_over = tails.iter().any(|tail| is_last(&tail.kind));
    let follows = match kind {
        TailKind::Narrow { .. } | TailKind::FirstGradient(_) => false,
        _ if is_over => false,
        TailKind::Dropped { product, .. } => {
            sum::column_in(first, &product).is_some()
                && !tails
                    .iter()
                    .any(|tail| matches!(tail.kind, TailKind::Dropped { .. }))
        }
        TailKind::Activation {
            from, to, elements, ..
        } => is_all(from, elements) && spares(&[Some(to)]),
        TailKind::Derivative {
            gradient,
            to,
            value,
            elements,
            ..
        } => is_all(gradient, elements) && spares(&[Some(to), value]),
        TailKind::Gate {
            up, to, elements, ..
        } => is_all(up, elements) && spares(&[Some(to)]),
        TailKind::GateGradients {
            gradient,
            to_gate,
            to_up,
            value,
            elements,
            ..
        } => is_all(gradient, elements) && spares(&[Some(to_gate), Some(to_up), value]),
        TailKind::Norm(norm) => {
            let statistics = [norm.mean, norm.rstd].into_iter().flatten();
            let statistics = statistics.map(|to| (to, to + (norm.rows * size_of::<f32>()) as u64));
            is_all(norm.branch, norm.rows * norm.width)
                && norm.width == first.n
                && spares(&[norm.sum, Some(norm.to)])
                && spares_ranges(&statistics.collect::<Vec<Bytes>>())
        }
    };
    follows.then(|| Tail {
        kind,
        command: command.clone(),
    })
}

/// A narrow product of what a function made of C, with scratch memory for its parts: that of the
/// products, or its node's own, which is free where it goes if nobody on the way reads what is there.
fn after_function(products: &[Product], tails: &[Tail], kind: TailKind) -> Option<TailKind> {
    let TailKind::Narrow {
        from,
        rows,
        inner,
        weight,
        columns,
        to,
        dropout,
        parts,
    } = kind
    else {
        return None;
    };
    let first = products.first()?;
    let is_made = tails.iter().any(|tail| match tail.kind {
        TailKind::Activation { to, .. } => to == from,
        _ => false,
    });
    if !is_made || (rows, inner) != (first.m, first.n) {
        return None;
    }
    let bytes = short::parts_bytes(first, columns);
    let place = |to: u64, columns: usize| {
        let bytes = (rows * columns) as u64 * first.c.dtype.size();
        (to, to + bytes)
    };
    let written = [result(first), place(from, inner), place(to, columns)];
    let is_free = |&(start, end): &Bytes| {
        let used = (start, start + bytes);
        used.1 <= end
            && written.iter().all(|&range| !overlap(range, used))
            && products.iter().all(|product| !reads(product, used))
    };
    let parts = [scratch(first), parts].into_iter().find(is_free)?;
    Some(TailKind::Narrow {
        from,
        rows,
        inner,
        weight,
        columns,
        to,
        dropout,
        parts: (parts.0, parts.0 + bytes),
    })
}

/// What the node of a tail reads and writes with the products before it, in whose scratch memory it is.
pub(super) fn memory(node: &Lowered) -> Memory {
    let written = match &node.tail {
        Some(TailKind::Dropped { product, .. }) => Some(result(product)),
        Some(TailKind::FirstGradient(first)) => match first.to {
            Argument::Address(to) => {
                let elements = (first.outputs * first.inputs) as u64;
                Some((to, to + elements * DType::F32.size()))
            }
            _ => None,
        },
        _ => None,
    };
    let reads = node.memory.reads.clone();
    let writes = written.map_or_else(|| node.memory.writes.clone(), |range| vec![range]);
    Memory { reads, writes }
}

/// Whether a tail may move past something, to the products before it. `memory` is its node's.
pub(super) fn may_pass(kind: &TailKind, memory: &Memory, other: Effect<'_>) -> bool {
    // The workspace that its node has is not used.
    if let TailKind::Dropped { product, .. } = kind {
        return super::may_pass(product, other);
    }
    if let TailKind::Narrow { parts, .. } = kind
        && is_read(other, *parts)
    {
        return false;
    }
    // C is not there for others.
    if let TailKind::Norm(norm) = kind {
        let bytes = (norm.rows * norm.width) as u64 * 2;
        if is_read(other, (norm.branch, norm.branch + bytes)) {
            return false;
        }
    }
    let meets = |ranges: &[Bytes], range: Bytes| ranges.iter().any(|&own| overlap(own, range));
    let untouched = |range| !meets(&memory.reads, range) && !meets(&memory.writes, range);
    match other {
        Effect::Clear(range) => untouched(range),
        Effect::Node(other) => {
            other.writes.iter().all(|&range| untouched(range))
                && !other
                    .reads
                    .iter()
                    .any(|&range| meets(&memory.writes, range))
        }
        Effect::Product(other) => {
            untouched(result(other))
                && untouched(scratch(other))
                && !memory.writes.iter().any(|&range| reads(other, range))
        }
    }
}

/// Whether something of a range is read.
fn is_read(by: Effect<'_>, range: Bytes) -> bool {
    match by {
        Effect::Clear(_) => false,
        Effect::Node(memory) => memory.reads.iter().any(|&read| overlap(read, range)),
        Effect::Product(product) => {
            let adds = product.accumulate && overlap(result(product), range);
            adds || reads(product, range)
        }
    }
}
