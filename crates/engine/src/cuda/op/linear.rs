//! Linear layers: matrix products, and sums of columns for the gradient of a bias.

pub(super) mod adapter;
pub(super) mod parts;
#[cfg(test)]
mod tests;

use cinch_graph::op::{
    CUDA_GEMM_WORKSPACE, Linear, LinearAdd, LinearGradInput, LinearGradWeight, RowParts,
};
use cinch_graph::{Dropout, TensorType};

use crate::cuda::command::{Argument, BiasAt, Kernel, LaunchShape, MatrixAt, Product};
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
    if op.is_dropped_inside(&source, &weight) {
        return adapter::reads(x, op);
    }
    let (mut workspace, _) = x.workspace();
    let mut a = matrix(x.input(0), source, op.first_column);
    if let Some(dropout) = op.dropout {
        let random = x.node.inputs.len() - 1;
        let shape = source.shape.with_width(weight.width());
        let out = matrix(workspace, TensorType { shape, ..source }, 0);
        let size = (source.rows(), weight.width());
        drop_rows(x, (dropout, random), size, a, out, false);
        a = out;
        workspace += op.dropped_bytes(&source, &weight);
    }
    // The library adds a bias of the type of y only.
    let bias_bytes = op.cuda_bias_bytes(&y);
    let bias = op.bias.then(|| {
        let kept = x.input(2);
        if bias_bytes == 0 {
            return BiasAt { kept, copied: kept };
        }
        let arguments = vec![
            Argument::Address(kept),
            Argument::Address(workspace),
            Argument::U64(y.width() as u64),
        ];
        x.launch(COPY_TO_REAL, elementwise(y.width(), 4), arguments);
        BiasAt {
            kept,
            copied: workspace,
        }
    });
    let product = Product {
        m: source.rows(),
        n: y.width(),
        k: weight.width(),
        a,
        b: transposed(matrix(x.input(1), weight, 0)),
        c: matrix(x.output(0), y, 0),
        scale: 1.0,
        accumulate: false,
        bias,
        workspace: workspace + bias_bytes,
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    x.product(product);
}

/// Rows of a matrix after dropout, written to another one or added to it.
fn drop_rows(
    x: &mut Lowering<'_>,
    (dropout, random): (Dropout, usize),
    (rows, width): (usize, usize),
    from: MatrixAt,
    to: MatrixAt,
    adds: bool,
) {
    const THREADS: usize = 256;
    let size = to.dtype.size();
    let each = 16 / size as usize;
    let whole = |matrix: &MatrixAt| {
        matrix.address.is_multiple_of(16) && matrix.row_stride.is_multiple_of(each)
    };
    let vector = whole(&from) && whole(&to) && width.is_multiple_of(each);
    let pieces = width.div_ceil(if vector { each } else { 1 });
    let shape = LaunchShape {
        grid: [rows.max(1) as u32, pieces.div_ceil(4 * THREADS) as u32, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
    };
    let mut arguments = vec![
        Argument::Address(from.address),
        Argument::Address(to.address),
        Argument::U32(width as u32),
        Argument::U32(from.row_stride as u32),
        Argument::U32(to.row_stride as u32),
        Argument::U32(u32::from(adds)),
        Argument::U32(u32::from(vector)),
    ];
    arguments.extend(x.dropout_arguments(Some(dropout), Some(random)));
    let kernel = Kernel {
        file: "dropout",
        function: "drop_rows",
    };
    x.launch(kernel, shape, arguments);
}

/// `y[:, columns] += scale·x·Wᵀ`
pub fn linear_add(x: &mut Lowering<'_>, op: &LinearAdd) {
    let (y, source, weight) = (x.input_type(0), x.input_type(1), x.input_type(2));
    x.copy(x.input(0), x.output(0), y.bytes());
    let product = Product {
        m: source.rows(),
        n: weight.rows(),
        k: weight.width(),
        a: matrix(x.input(1), source, op.first_column),
        b: transposed(matrix(x.input(2), weight, 0)),
        c: matrix(x.output(0), y, op.y_column),
        scale: op.scale as f32,
        accumulate: true,
        bias: None,
        workspace: x.workspace().0,
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    x.product(product);
}

/// `dx (+)= scale·dy·W` in some columns of dx.
pub fn linear_grad_input(x: &mut Lowering<'_>, op: &LinearGradInput) {
    let (dy, weight, dx) = (x.input_type(0), x.input_type(1), x.output_type(0));
    let to = x.output(0);
    if op.accumulate {
        x.copy(x.input(2), to, dx.bytes());
    } else if weight.width() < op.width {
        x.clear(to, dx.bytes());
    }
    if op.is_dropped_inside(&dy, &weight) {
        return adapter::adds(x, op);
    }
    let place = matrix(to, dx, op.first_column);
    let (workspace, _) = x.workspace();
    let apart_bytes = op.dropped_bytes(&dy, &weight);
    let c = if apart_bytes > 0 {
        let shape = dx.shape.with_width(weight.width());
        matrix(workspace, TensorType { shape, ..dx }, 0)
    } else {
        place
    };
    let product = Product {
        m: dy.rows(),
        n: weight.width(),
        k: weight.rows(),
        a: matrix(x.input(0), dy, op.dy_column),
        b: matrix(x.input(1), weight, 0),
        c,
        scale: op.scale as f32,
        accumulate: op.accumulate && apart_bytes == 0,
        bias: None,
        workspace: workspace + apart_bytes,
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    x.product(product);
    if let Some(dropout) = op.dropout {
        let random = x.node.inputs.len() - 1;
        let size = (dy.rows(), weight.width());
        drop_rows(x, (dropout, random), size, c, place, apart_bytes > 0);
    }
}

/// `scale·dy·W`, of which some is dropped before it is added to dx.
pub(super) fn dropped_product(x: &Lowering<'_>, op: &LinearGradInput) -> Product {
    let (dy, weight, dx) = (x.input_type(0), x.input_type(1), x.output_type(0));
    Product {
        m: dy.rows(),
        n: weight.width(),
        k: weight.rows(),
        a: matrix(x.input(0), dy, op.dy_column),
        b: matrix(x.input(1), weight, 0),
        c: matrix(x.output(0), dx, op.first_column),
        scale: op.scale as f32,
        accumulate: true,
        bias: None,
        workspace: 0,
        workspace_bytes: 0,
    }
}

/// `dW (+)= scale·dyᵀ·x`, `db (+)= Σ_rows dy`
pub fn linear_grad_weight(x: &mut Lowering<'_>, op: &LinearGradWeight) {
    let (dy, source, dw) = (x.input_type(0), x.input_type(1), x.output_type(0));
    if op.is_dropped_inside(&dy, &source) {
        return adapter::gradient(x, op);
    }
    if let Some(parts) = op.cuda_row_parts(&dy, &source) {
        return sum_row_parts(x, op, parts);
    }
    let (mut workspace, _) = x.workspace();
    let mut b = matrix(x.input(1), source, op.first_column);
    if let Some(dropout) = op.dropout {
        let shape = source.shape.with_width(op.inputs);
        let out = matrix(workspace, TensorType { shape, ..source }, 0);
        drop_rows(x, (dropout, 2), (source.rows(), op.inputs), b, out, false);
        b = out;
        workspace += op.dropped_bytes(&dy, &source);
    }
    let product = Product {
        m: op.outputs,
        n: op.inputs,
        k: dy.rows(),
        a: transposed(matrix(x.input(0), dy, op.dy_column)),
        b,
        c: matrix(x.output(0), dw, 0),
        scale: op.scale as f32,
        accumulate: x.adds(0),
        bias: None,
        workspace,
        workspace_bytes: CUDA_GEMM_WORKSPACE,
    };
    x.product(product);
    if op.bias {
        column_sums(x, dy);
    }
}

/// The same for a small matrix and many rows: parts of them in the workspace, then their sums.
fn sum_row_parts(x: &mut Lowering<'_>, op: &LinearGradWeight, parts: RowParts) {
    const THREADS: u32 = 128;
    /// Outputs of a block that adds up parts, and threads for the parts of each.
    const SUM_BLOCK: [usize; 2] = [32, 32];
    let (dy, source) = (x.input_type(0), x.input_type(1));
    let workspace = Argument::Address(x.workspace().0);
    let at = |input: usize, ty: TensorType, column: usize| {
        Argument::Address(matrix(x.input(input), ty, column).address)
    };
    let kernel = |function| Kernel {
        file: "gradient_narrow_tensor",
        function,
    };
    let numbers = [
        dy.width(),
        source.width(),
        dy.rows(),
        parts.rows,
        op.outputs,
        op.inputs,
    ];
    let mut arguments = vec![
        at(0, dy, op.dy_column),
        at(1, source, op.first_column),
        workspace,
    ];
    arguments.extend(numbers.map(|number| Argument::U32(number as u32)));
    let [down, across] = parts.tiles;
    let shape = LaunchShape {
        grid: [across as u32, down as u32, parts.parts as u32],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
    };
    x.launch(kernel("gradient_parts"), shape, arguments);
    let arguments = vec![
        workspace,
        x.output_argument(0),
        x.optional_output(op.bias.then_some(1)),
        Argument::U32(parts.parts as u32),
        Argument::U32((op.outputs * op.inputs) as u32),
        Argument::U32(parts.sums as u32),
        Argument::F32(op.scale as f32),
        Argument::U32(u32::from(x.adds(0))),
        Argument::U32(u32::from(op.bias && x.adds(1))),
    ];
    let shape = LaunchShape {
        grid: [parts.sums.div_ceil(SUM_BLOCK[0]) as u32, 1, 1],
        block: [SUM_BLOCK[0] as u32, SUM_BLOCK[1] as u32, 1],
        shared_bytes: 0,
    };
    x.launch(kernel("gradient_sum"), shape, arguments);
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
