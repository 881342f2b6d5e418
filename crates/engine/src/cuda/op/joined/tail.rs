//! What follows a sum of products and may be part of the kernel that computes it: a product that is
//! dropped in part before it adds, a function of each element or a gate, and what their derivatives
//! make of a gradient. It is found by what a node's op says of its one command.

use cinch_graph::op::{ActivationKind, LinearGradInput, Op};
use cinch_graph::{DType, Dropout};

use super::{Bytes, Effect, Memory, overlap, reads, reads_matrices, result, scratch, sum};
use crate::cuda::command::{Argument, Command, DropoutAt, Product, Tail, TailKind};
use crate::cuda::lowering::Lowering;
use crate::cuda::op::Lowered;
use crate::cuda::op::linear::dropped_product;

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

/// Whether nothing more can be added to C after it.
pub(super) fn is_last(kind: &TailKind) -> bool {
    !matches!(kind, TailKind::Dropped { .. })
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
    let spares = |written: &[Option<u64>]| {
        let dropped = tails.iter().filter_map(|tail| match &tail.kind {
            TailKind::Dropped { product, .. } => Some(product),
            _ => None,
        });
        let mut operands = products.iter().chain(dropped);
        let bytes = (first.m * first.n) as u64 * first.c.dtype.size();
        operands.all(|product| {
            let mut written = written.iter().flatten();
            written.all(|&to| !reads_matrices(product, (to, to + bytes)))
        })
    };
    let follows = match kind {
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
    };
    follows.then(|| Tail {
        kind,
        command: command.clone(),
    })
}

/// Whether a tail may move past something, to the products before it. `memory` is its node's.
pub(super) fn may_pass(kind: &TailKind, memory: &Memory, other: Effect<'_>) -> bool {
    // The workspace that its node has is not used.
    if let TailKind::Dropped { product, .. } = kind {
        return super::may_pass(product, other);
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
