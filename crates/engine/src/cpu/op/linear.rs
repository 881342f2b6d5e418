//! Products with weights.

use cinch_graph::op;

use super::columns;
use crate::arena::Element;
use crate::cpu::kernel::linear;
use crate::cpu::operands::Operands;
use crate::cpu::parallel::Accumulate;
use crate::cpu::real::Real;

pub fn multiply<F: Real + Element>(x: &Operands<'_>, op: &op::Linear) {
    let (rows, width) = (x.input_type(0).rows(), x.input_type(1).width());
    let source = columns::<F>(x, 0, op.first_column, width);
    let dropout = x.dropout(op.dropout, Some(x.node.inputs.len() - 1));
    let bias = op.bias.then(|| x.input(2));
    linear::forward(rows, source, x.input(1), bias, dropout, x.output(0));
}

pub fn multiply_add<F: Real + Element>(x: &Operands<'_>, op: &op::LinearAdd) {
    let (rows, width) = (x.input_type(1).rows(), x.input_type(2).width());
    let y = x.output::<F>(0);
    if let Some(before) = x.input_unless_in_place(0, 0) {
        y.copy_from_slice(before);
    }
    let source = columns::<F>(x, 1, op.first_column, width);
    let place = (x.output_type(0).width(), op.y_column);
    linear::forward_add(rows, source, x.input(2), F::from_f64(op.scale), y, place);
}

pub fn multiply_grad_input<F: Real + Element>(x: &Operands<'_>, op: &op::LinearGradInput) {
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
    linear::grad_input(rows, width, dy, weight, scale, dx, place, mode, dropout);
}

pub fn multiply_grad_weight<F: Real + Element>(x: &Operands<'_>, op: &op::LinearGradWeight) {
    let rows = x.input_type(0).rows();
    let dy = columns::<F>(x, 0, op.dy_column, op.outputs);
    let source = columns(x, 1, op.first_column, op.inputs);
    let dropout = x.dropout(op.dropout, Some(2));
    let (dw, mode) = x.accumulator(0);
    linear::grad_weight(rows, dy, source, F::from_f64(op.scale), dw, mode, dropout);
    if op.bias {
        let (db, mode) = x.accumulator(1);
        linear::grad_bias(rows, dy, db, mode);
    }
}
