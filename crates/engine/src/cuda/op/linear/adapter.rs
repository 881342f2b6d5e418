//! Products of adapters of low rank whose input is dropped: each is one pass over what is wide, and
//! nothing dropped is written.

use cinch_graph::op::{Linear, LinearGradInput, LinearGradWeight};

use super::matrix;
use super::parts::Parts;
use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// Threads of a warp, and warps of a block; of one that adds.
const WARP: usize = 32;
const WARPS: usize = 8;
const ADDING_WARPS: usize = 4;

/// Rows of a block that reads few, of one that reads many, and of a warp that adds.
const READ_ROWS: usize = 32;
const STREAM_ROWS: usize = 64;
const ADDED_ROWS: usize = 96;
/// Columns of a warp that adds, and of a block that sums a gradient.
const ADDED_COLUMNS: usize = 32;
const GRADIENT_COLUMNS: usize = 128;

/// Columns of a narrow side, in eights, choose the kernel.
fn kernel(functions: [&'static str; 4], narrow: usize) -> Kernel {
    Kernel {
        file: "adapter_tensor",
        function: functions[narrow.div_ceil(8).clamp(1, functions.len()) - 1],
    }
}

fn size(size: usize) -> Argument {
    Argument::U32(size as u32)
}

/// `y = drop(x)·Wᵀ`
pub(super) fn reads(x: &mut Lowering<'_>, op: &Linear) {
    const KERNELS: [&str; 4] = [
        "adapter_reads_1",
        "adapter_reads_2",
        "adapter_reads_3",
        "adapter_reads_4",
    ];
    const STREAM_KERNELS: [&str; 4] = [
        "adapter_streams_1",
        "adapter_streams_2",
        "adapter_streams_3",
        "adapter_streams_4",
    ];
    let (source, weight, y) = (x.input_type(0), x.input_type(1), x.output_type(0));
    // Few rows are cut among more warps, and each of them among all of a block.
    let streams = source.rows() / STREAM_ROWS;
    let blocks = source.rows().div_ceil(READ_ROWS);
    let (kernels, blocks, warps) = if streams >= x.card.multiprocessors {
        (
            STREAM_KERNELS,
            source.rows().div_ceil(STREAM_ROWS),
            WARPS / 2,
        )
    } else if blocks < x.card.multiprocessors {
        (KERNELS, blocks, WARPS)
    } else {
        (KERNELS, blocks, WARPS / 2)
    };
    let mut arguments = vec![
        Argument::Address(matrix(x.input(0), source, op.first_column).address),
        x.input_argument(1),
        x.output_argument(0),
        size(source.rows()),
        size(weight.width()),
        size(source.width()),
        size(y.width()),
    ];
    arguments.extend(x.dropout_arguments(op.dropout, Some(x.node.inputs.len() - 1)));
    let shape = LaunchShape::linear(blocks, (warps * WARP) as u32);
    x.launch(kernel(kernels, weight.rows()), shape, arguments);
}

/// `dx (+)= drop(scale·dy·W)` in some columns of dx, which has what is added to.
pub(super) fn adds(x: &mut Lowering<'_>, op: &LinearGradInput) {
    const KERNELS: [&str; 4] = [
        "adapter_adds_1",
        "adapter_adds_2",
        "adapter_adds_3",
        "adapter_adds_4",
    ];
    let (dy, weight, dx) = (x.input_type(0), x.input_type(1), x.output_type(0));
    let mut arguments = vec![
        Argument::Address(matrix(x.input(0), dy, op.dy_column).address),
        x.input_argument(1),
        Argument::Address(matrix(x.output(0), dx, op.first_column).address),
        size(dy.rows()),
        size(weight.width()),
        size(dy.width()),
        size(dx.width()),
        Argument::U32(u32::from(op.accumulate)),
        Argument::F32(op.scale as f32),
    ];
    arguments.extend(x.dropout_arguments(op.dropout, Some(x.node.inputs.len() - 1)));
    let units = dy.rows().div_ceil(ADDED_ROWS) * (weight.width() / ADDED_COLUMNS);
    let shape = LaunchShape::linear(units.div_ceil(ADDING_WARPS), (ADDING_WARPS * WARP) as u32);
    x.launch(kernel(KERNELS, weight.rows()), shape, arguments);
}

/// `dW (+)= scale·dyᵀ·drop(x)`
pub(super) fn gradient(x: &mut Lowering<'_>, op: &LinearGradWeight) {
    const KERNELS: [&str; 4] = [
        "adapter_gradient_1",
        "adapter_gradient_2",
        "adapter_gradient_3",
        "adapter_gradient_4",
    ];
    let (dy, source) = (x.input_type(0), x.input_type(1));
    let rows_of_part = op.cuda_rows_of_part(dy.rows());
    let parts = dy.rows().div_ceil(rows_of_part).max(1);
    let mut arguments = vec![
        Argument::Address(matrix(x.input(0), dy, op.dy_column).address),
        Argument::Address(matrix(x.input(1), source, op.first_column).address),
        Argument::Address(x.workspace().0),
        size(dy.rows()),
        size(op.inputs),
        size(dy.width()),
        size(source.width()),
        size(rows_of_part),
        Argument::F32(op.scale as f32),
    ];
    arguments.extend(x.dropout_arguments(op.dropout, Some(2)));
    let shape = LaunchShape {
        grid: [op.inputs.div_ceil(GRADIENT_COLUMNS) as u32, parts as u32, 1],
        block: [(WARPS * WARP) as u32, 1, 1],
        shared_bytes: 0,
    };
    x.launch(kernel(KERNELS, op.outputs), shape, arguments);
    let sums = Parts {
        address: x.workspace().0,
        parts,
        width: op.outputs * op.inputs,
        adds: x.adds(0),
    };
    let results = [x.output_argument(0), Argument::Null, Argument::Null];
    let (kernel, shape, arguments) = sums.sum(results);
    x.launch(kernel, shape, arguments);
}
