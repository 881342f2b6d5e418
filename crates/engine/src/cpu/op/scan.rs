//! Selective scans.

use cinch_graph::op;

use super::{begins, columns};
use crate::arena::Element;
use crate::cpu::kernel::columns::ColumnsMut;
use crate::cpu::kernel::scan;
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;
use crate::error::EngineError;

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

pub fn scan_forward<F: Real + Element>(x: &Operands<'_>, op: &op::Scan) {
    let (shape, inputs) = scan_inputs::<F>(x, op, 0);
    let states = op.keep_states.then(|| x.output(1));
    scan::forward(shape, &inputs, x.output(0), states);
}

pub fn scan_cached<F: Real + Element>(x: &Operands<'_>, op: &op::Scan) -> Result<(), EngineError> {
    let (shape, inputs) = scan_inputs::<F>(x, op, 0);
    let begins = begins(x, op.num_sources() + 4)?;
    scan::forward_from(shape, &inputs, &begins, x.output(1), x.output(0));
    Ok(())
}

pub fn scan_backward<F: Real + Element>(x: &Operands<'_>, op: &op::Scan) {
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
