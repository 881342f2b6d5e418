//! What only moves or spells out numbers: views, column blocks, what is fetched or stored, quantised weights.

use cinch_graph::op;

use crate::arena::Element;
use crate::cpu::kernel::columns;
use crate::cpu::kernel::dequantise;
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;

pub fn concat<F: Real + Element>(x: &Operands<'_>, op: &op::Concat) {
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

pub fn split<F: Real + Element>(x: &Operands<'_>, op: &op::Split) {
    let (rows, width) = op.joined.pieces(&x.input_type(0).shape);
    let mut offset = 0;
    for output in 0..op.parts.len() {
        let (_, count) = op.joined.pieces(&x.output_type(output).shape);
        let place = (width, offset, count);
        columns::take_columns(rows, x.input::<F>(0), x.output(output), place);
        offset += count;
    }
}

pub fn dequantise<F: Real + Element>(x: &Operands<'_>, op: &op::Dequantise) {
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

pub fn view<F: Real + Element>(x: &Operands<'_>) {
    if let Some(input) = x.input_unless_in_place::<F>(0, 0) {
        x.output(0).copy_from_slice(input);
    }
}

/// On the CPU both memories are the same: a plain copy.
pub fn across(x: &Operands<'_>) {
    for index in 0..x.node.outputs.len() {
        x.output::<u8>(index).copy_from_slice(x.input(index));
    }
}
