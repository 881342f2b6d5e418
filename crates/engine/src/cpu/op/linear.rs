//! Products with weights.

use cinch_graph::op;

use super::columns;
use crate::arena::Element;
use crate::cpu::dropout::Dropout;
use crate::cpu::kernel::columns::Columns;
use crate::cpu::kernel::linear;
use crate::cpu::operands::Operands;
use crate::cpu::parallel::Accumulate;
use crate::cpu::real::Real;

pub fn multiply<F: Real + Element>(x: &Operands<'_>, op: &op::Linear) {
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

pub fn multiply_grad_weight<F: Real + Element>(x: &Operands<'_>, op: &op::LinearGradWeight) {
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
