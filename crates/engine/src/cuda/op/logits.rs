//! The logits of one position of each sequence.

use cinch_graph::TensorType;
use cinch_graph::op::{CUDA_GEMM_WORKSPACE, Logits};

use crate::cuda::command::{Argument, Kernel, LaunchShape, Product};
use crate::cuda::lowering::Lowering;

use super::linear::{matrix, transposed};

pub fn logits(x: &mut Lowering<'_>, op: &Logits) {
    let (h, w, out) = (x.input_type(0), x.input_type(1), x.output_type(0));
    let (batch, length, width) = (h.shape.dims()[0], h.shape.dims()[1], h.width());
    let gathered = x.workspace().0;
    let kernel = Kernel {
        file: "embedding",
        function: "gather_rows",
    };
    let arguments = vec![
        x.input_argument(0),
        x.input_argument(2),
        Argument::Address(gathered),
        Argument::U32(length as u32),
        Argument::U32(width as u32),
    ];
    x.launch(kernel, LaunchShape::linear(batch, 256), arguments);
    let product = Product {
        m: batch,
        n: out.width(),
        k: width,
        a: matrix(gathered, TensorType::new([batch, width], h.dtype), 0),
        b: transposed(matrix(x.input(1), w, 0)),
        c: matrix(x.output(0), out, 0),
        scale: 1.0,
        accumulate: false,
        bias: None,
        workspace: gathered + Logits::cuda_gathered_bytes(&h),
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    x.product(product);
    if op.bias {
        let kernel = Kernel {
            file: "cross_entropy",
            function: "logits_bias",
        };
        let arguments = vec![
            x.output_argument(0),
            x.input_argument(3),
            Argument::U32(out.width() as u32),
        ];
        let shape = LaunchShape {
            grid: [out.width().div_ceil(256) as u32, batch as u32, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
        };
        x.launch(kernel, shape, arguments);
    }
}
