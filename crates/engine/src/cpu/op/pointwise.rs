//! Activations, gates, sums and rotations: element by element.

use cinch_graph::op;

use crate::arena::Element;
use crate::cpu::kernel::{activation, gated, rotary};
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;

pub fn activate_backward<F: Real + Element>(x: &Operands<'_>, op: &op::ActivationBackward) {
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

pub fn gate<F: Real + Element>(x: &Operands<'_>, op: &op::Gated) {
    gated::forward(
        op.kind,
        x.input_unless_in_place::<F>(0, 0),
        x.input_unless_in_place(1, 0),
        x.output(0),
    );
}

pub fn gate_backward<F: Real + Element>(x: &Operands<'_>, op: &op::GatedBackward) {
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

pub fn rotate<F: Real + Element>(x: &Operands<'_>, op: &op::Rotary) {
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

pub fn add<F: Real + Element>(x: &Operands<'_>) {
    if x.is_in_place(1, 0) {
        activation::add(None, x.input::<F>(0), x.output(0));
    } else {
        activation::add(x.input_unless_in_place::<F>(0, 0), x.input(1), x.output(0));
    }
}
