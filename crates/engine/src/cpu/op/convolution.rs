//! Convolutions over positions.

use cinch_graph::op;

use super::{begins, columns};
use crate::arena::Element;
use crate::cpu::kernel::columns::ColumnsMut;
use crate::cpu::kernel::convolution;
use crate::cpu::operands::Operands;
use crate::cpu::real::Real;
use crate::error::EngineError;

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

pub fn convolve<F: Real + Element>(x: &Operands<'_>, op: &op::Convolution) {
    let shape = convolution_shape(x, 0, 1);
    let source = columns::<F>(x, 0, op.first_column, shape.channels);
    convolution::forward(shape, source, x.input(1), x.input(2), x.output(0));
}

pub fn convolve_cached<F: Real + Element>(
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

pub fn convolve_backward<F: Real + Element>(x: &Operands<'_>, op: &op::ConvolutionBackward) {
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
