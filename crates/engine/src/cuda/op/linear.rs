//! Linear layers: matrix products, and sums of columns for the gradient of a bias.

#[cfg(test)]
mod tests;

use cinch_graph::TensorType;
use cinch_graph::op::{CUDA_GEMM_WORKSPACE, Linear, LinearGradInput, LinearGradWeight};

use crate::cuda::command::{Argument, Kernel, LaunchShape, MatrixAt, Product};
use crate::cuda::lowering::Lowering;

use super::COPY_TO_REAL;
use super::activation::elementwise;

/// The matrix of a tensor's rows, or of some of its columns, `first_column` on.
pub(super) fn matrix(address: u64, ty: TensorType, first_column: usize) -> MatrixAt {
    MatrixAt {
        address: address + first_column as u64 * ty.dtype.size(),
        row_stride: ty.width(),
        dtype: ty.dtype,
        transposed: false,
    }
}

pub(super) fn transposed(matrix: MatrixAt) -> MatrixAt {
    MatrixAt {
        transposed: true,
        ..matrix
    }
}

/// `y = x·Wᵀ + bias`
pub fn linear(x: &mut Lowering<'_>, op: &Linear) {
    let (source, weight, y) = (x.input_type(0), x.input_type(1), x.output_type(0));
    let (workspace, _) = x.workspace();
    // The library adds a bias of the type of y only.
    let bias_bytes = op.cuda_bias_bytes(&y);
    let bias = op.bias.then(|| {
        let bias = x.input(2);
        if bias_bytes == 0 {
            return bias;
        }
        let arguments = vec![
            Argument::Address(bias),
            Argument::Address(workspace),
            Argument::U64(y.width() as u64),
        ];
        x.launch(COPY_TO_REAL, elementwise(y.width(), 4), arguments);
        workspace
    });
    let product = Product {
        m: source.rows(),
        n: y.width(),
        k: weight.width(),
        a: matrix(x.input(0), source, op.first_column),
        b: transposed(matrix(x.input(1), weight, 0)),
        c: matrix(x.output(0), y, 0),
        accumulate: false,
        bias,
        workspace: workspace + bias_bytes,
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    x.product(product);
}

/// `dx (+)= dy·W` in some columns of dx.
pub fn linear_grad_input(x: &mut Lowering<'_>, op: &LinearGradInput) {
    let (dy, weight, dx) = (x.input_type(0), x.input_type(1), x.output_type(0));
    let to = x.output(0);
    if op.accumulate {
        x.copy(x.input(2), to, dx.bytes());
    } else if weight.width() < op.width {
        x.clear(to, dx.bytes());
    }
    let product = Product {
        m: dy.rows(),
        n: weight.width(),
        k: dy.width(),
        a: matrix(x.input(0), dy, 0),
        b: matrix(x.input(1), weight, 0),
        c: matrix(to, dx, op.first_column),
        accumulate: op.accumulate,
        bias: None,
        workspace: x.workspace().0,
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    x.product(product);
}

/// `dW (+)= dyᵀ·x`, `db (+)= Σ_rows dy`
pub fn linear_grad_weight(x: &mut Lowering<'_>, op: &LinearGradWeight) {
    let (dy, source, dw) = (x.input_type(0), x.input_type(1), x.output_type(0));
    let product = Product {
        m: dy.width(),
        n: op.inputs,
        k: dy.rows(),
        a: transposed(matrix(x.input(0), dy, 0)),
        b: matrix(x.input(1), source, op.first_column),
        c: matrix(x.output(0), dw, 0),
        accumulate: x.adds(0),
        bias: None,
        workspace: x.workspace().0,
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    x.product(product);
    if op.bias {
        column_sums(x, dy);
    }
}

/// Threads that have neighbouring columns, and rows read at once, in a block.
const COLUMN_THREADS: usize = 32;
const ROW_THREADS: usize = 8;

/// The sums of the columns of input 0 in output 1.
fn column_sums(x: &mut Lowering<'_>, dy: TensorType) {
    let vector = 16 / dy.dtype.size() as usize;
    let (function, columns) = if dy.width().is_multiple_of(vector) {
        ("column_partials", vector * COLUMN_THREADS)
    } else {
        ("column_partials_any", COLUMN_THREADS)
    };
    let column_blocks = dy.width().div_ceil(columns);
    let row_blocks = LinearGradWeight::cuda_row_blocks(&dy, column_blocks);
    let kernel = Kernel {
        file: "column_sum",
        function,
    };
    let shape = LaunchShape {
        grid: [column_blocks as u32, row_blocks as u32, 1],
        block: [COLUMN_THREADS as u32, ROW_THREADS as u32, 1],
        shared_bytes: 0,
    };
    let arguments = vec![
        x.input_argument(0),
        Argument::Address(x.workspace().0),
        Argument::U32(dy.rows() as u32),
        Argument::U32(dy.width() as u32),
    ];
    x.launch(kernel, shape, arguments);
    sum_partials(x, row_blocks as u32, dy.width(), 1, None);
}

/// Adds up `[rows, width]` partial sums at the front of the workspace in output `first`, and
/// those that follow in output `second`.
pub(super) fn sum_partials(
    x: &mut Lowering<'_>,
    rows: u32,
    width: usize,
    first: usize,
    second: Option<usize>,
) {
    let kernel = Kernel {
        file: "column_sum",
        function: "sum_partials",
    };
    let shape = LaunchShape {
        grid: [
            width.div_ceil(32) as u32,
            1 + u32::from(second.is_some()),
            1,
        ],
        block: [32, 32, 1],
        shared_bytes: 0,
    };
    let adds = |output: usize| Argument::U32(u32::from(x.adds(output)));
    let arguments = vec![
        Argument::Address(x.workspace().0),
        x.output_argument(first),
        x.optional_output(second),
        Argument::U32(rows),
        Argument::U32(width as u32),
        adds(first),
        second.map_or(Argument::U32(0), adds),
    ];
    x.launch(kernel, shape, arguments);
}
