//! Expressions over tensors and their reductions.

use cinch_graph::DType;
use cinch_graph::op;

use crate::arena::Element;
use crate::cpu::kernel::expression;
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;

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

pub fn map<F: Real + Element>(x: &Operands<'_>, op: &op::Map) {
    let sources = sources::<F>(x, &op.pointwise, op.outputs.len());
    let outputs = 0..op.outputs.len();
    let mut outputs: Vec<_> = outputs.map(|output| x.accumulator::<F>(output)).collect();
    expression::map(&places(x, &op.pointwise, &sources), &mut outputs);
}

pub fn reduce<F: Real + Element>(x: &Operands<'_>, op: &op::Reduce) {
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
