//! What follows a sum of products and may be part of the kernel that computes it: a product that is
//! dropped in part before it adds, GELU, and the multiplication by GELU's derivative. It is found
//! by what a node's op says of its one command.

use cinch_graph::op::{ActivationKind, LinearGradInput, Op};
use cinch_graph::{DType, Dropout};

use super::{Bytes, Effect, Memory, overlap, reads, reads_matrices, result, scratch, sum};
use crate::cuda::command::{Command, DropoutAt, Product, Tail, TailKind};
use crate::cuda::lowering::Lowering;
use crate::cuda::op::Lowered;
use crate::cuda::op::linear::dropped_product;

/// What a node is to a product before it.
pub fn tail(x: &Lowering<'_>) -> Option<TailKind> {
    let is_half = matches!(x.compute(), DType::Bf16 | DType::F16);
    let elements = || x.output_type(0).shape.elements();
    match &x.node.op {
        Op::Activation(op) if is_half && op.kind == ActivationKind::Gelu => Some(TailKind::Gelu {
            from: x.input(0),
            to: x.output(0),
            elements: elements(),
        }),
        Op::ActivationBackward(op)
            if is_half && op.kind == ActivationKind::Gelu && !op.value && x.is_in_place(0, 0) =>
        {
            Some(TailKind::GeluBackward {
                gradient: x.output(0),
                x: x.input(1),
                elements: elements(),
            })
        }
        Op::LinearGradInput(op) => dropped(x, op),
        _ => None,
    }
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
    let follows = match kind {
        TailKind::Dropped { product, .. } => {
            sum::column_in(first, &product).is_some()
                && !tails
                    .iter()
                    .any(|tail| matches!(tail.kind, TailKind::Dropped { .. }))
        }
        TailKind::Gelu { from, to, elements } => {
            // While some of it is written, operands are still read; a bias is where it is kept.
            let written = (to, to + (elements as u64) * first.c.dtype.size());
            let dropped = tails.iter().filter_map(|tail| match &tail.kind {
                TailKind::Dropped { product, .. } => Some(product),
                _ => None,
            });
            let mut operands = products.iter().chain(dropped);
            is_all(from, elements) && !operands.any(|product| reads_matrices(product, written))
        }
        TailKind::GeluBackward {
            gradient, elements, ..
        } => is_all(gradient, elements),
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
