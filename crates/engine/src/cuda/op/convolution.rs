//! The short convolution over time and its gradient.

#[cfg(test)]
mod tests;

use cinch_graph::TensorType;
use cinch_graph::op;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

const THREADS: usize = 128;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "convolution",
        function,
    }
}

/// A convolution's sizes as its kernels take them.
struct Sizes {
    channels: usize,
    width: usize,
    /// Whether the window fits the kernels for four steps, whose threads take four channels.
    narrow: bool,
    arguments: [Argument; 6],
    shape: LaunchShape,
}

impl Sizes {
    fn new(x: TensorType, weight: TensorType, first_column: usize) -> Self {
        let (channels, width, stride) = (weight.rows(), weight.width(), x.width());
        let narrow = width <= 4;
        let pieces = channels.div_ceil(if narrow { 4 } else { 1 });
        let threads = pieces * op::ConvolutionBackward::cuda_runs(&x);
        let vector = [channels, stride, first_column]
            .iter()
            .all(|elements| elements.is_multiple_of(4));
        Self {
            channels,
            width,
            narrow,
            arguments: [
                stride,
                x.shape.dims()[0],
                x.shape.dims()[1],
                channels,
                width,
                usize::from(vector || !narrow),
            ]
            .map(|size| Argument::U32(size as u32)),
            shape: LaunchShape::linear(threads.div_ceil(THREADS), THREADS as u32),
        }
    }
}

/// Columns of a tensor at `address`, from the convolution's first one on.
fn columns(address: u64, ty: TensorType, first_column: usize) -> Argument {
    Argument::Address(address + first_column as u64 * ty.dtype.size())
}

pub fn convolution(x: &mut Lowering<'_>, op: &op::Convolution) {
    let source = x.input_type(0);
    let sizes = Sizes::new(source, x.input_type(1), op.first_column);
    let mut arguments = vec![
        columns(x.input(0), source, op.first_column),
        x.input_argument(1),
        x.input_argument(2),
        x.output_argument(0),
    ];
    arguments.extend(sizes.arguments);
    let function = if sizes.narrow {
        "convolution_forward_4"
    } else {
        "convolution_forward_16"
    };
    x.launch(kernel(function), sizes.shape, arguments);
}

pub fn convolution_backward(x: &mut Lowering<'_>, op: &op::ConvolutionBackward) {
    let source = x.input_type(1);
    let sizes = Sizes::new(source, x.input_type(2), op.first_column);
    let dx = x.output(0);
    if op.accumulate {
        x.copy(x.input(4), dx, source.bytes());
    } else if source.width() > sizes.channels {
        x.clear(dx, source.bytes());
    }
    let sums = Argument::Address(x.workspace().0);
    let mut arguments = vec![
        x.input_argument(0),
        columns(x.input(1), source, op.first_column),
        x.input_argument(2),
        x.input_argument(3),
        columns(dx, source, op.first_column),
        if op.parameters { sums } else { Argument::Null },
        Argument::U32(u32::from(op.accumulate)),
    ];
    arguments.extend(sizes.arguments);
    let function = if sizes.narrow {
        "convolution_backward_4"
    } else {
        "convolution_backward_16"
    };
    x.launch(kernel(function), sizes.shape, arguments);
    if !op.parameters {
        return;
    }
    let arguments = vec![
        sums,
        x.output_argument(1),
        x.output_argument(2),
        Argument::U32(op::ConvolutionBackward::cuda_runs(&source) as u32),
        Argument::U32(sizes.channels as u32),
        Argument::U32(sizes.width as u32),
        Argument::U32(u32::from(x.adds(1))),
        Argument::U32(u32::from(x.adds(2))),
    ];
    let elements = sizes.channels * (sizes.width + 1);
    let shape = LaunchShape::linear(elements.div_ceil(32), 256);
    x.launch(kernel("convolution_parameters"), shape, arguments);
}
