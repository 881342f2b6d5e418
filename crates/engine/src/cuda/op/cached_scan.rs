//! The selective scan from a state on.

use cinch_graph::op::CachedScan;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

pub fn cached_scan(x: &mut Lowering<'_>, op: &CachedScan) {
    let scan = &op.0;
    let rest = scan.num_sources();
    let (source, gate) = (x.input_type(0), x.input_type(rest - 1));
    let (batch, length) = (source.shape.dims()[0], source.shape.dims()[1]);
    let columns = |input: usize, column: usize| {
        Argument::Address(x.input(input) + column as u64 * source.dtype.size())
    };
    let mut arguments = vec![columns(0, scan.x_column), columns(rest - 1, scan.z_column)];
    arguments.extend((rest..rest + 5).map(|input| x.input_argument(input)));
    arguments.extend([0, 1].map(|output| x.output_argument(output)));
    let sizes = [
        source.width(),
        gate.width(),
        length,
        scan.inner,
        scan.state,
        scan.rank,
    ];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    let kernel = Kernel {
        file: "cached_scan",
        function: "cached_scan",
    };
    let blocks = scan.inner.div_ceil(CachedScan::CUDA_CHANNELS).max(1);
    let shape = LaunchShape {
        grid: [blocks as u32, batch as u32, 1],
        block: [
            (CachedScan::CUDA_CHANNELS * CachedScan::CUDA_LANES) as u32,
            1,
            1,
        ],
        shared_bytes: 0,
    };
    x.launch(kernel, shape, arguments);
}
