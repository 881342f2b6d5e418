//! The short convolution from its last inputs on.

use cinch_graph::op;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

const THREADS: usize = 128;

pub fn cached_convolution(x: &mut Lowering<'_>, op: &op::CachedConvolution) {
    let (source, weight) = (x.input_type(0), x.input_type(1));
    let (batch, length) = (source.shape.dims()[0], source.shape.dims()[1]);
    let (channels, width) = (weight.rows(), weight.width());
    let first = x.input(0) + op.first_column as u64 * source.dtype.size();
    let mut arguments = vec![Argument::Address(first)];
    arguments.extend([1, 2, 3].map(|input| x.input_argument(input)));
    arguments.extend([0, 1].map(|output| x.output_argument(output)));
    let sizes = [source.width(), batch, length, channels, width];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    let kernel = Kernel {
        file: "cached_convolution",
        function: "cached_convolution",
    };
    let blocks = (batch * channels).div_ceil(THREADS);
    x.launch(
        kernel,
        LaunchShape::linear(blocks, THREADS as u32),
        arguments,
    );
}
