//! Products of adapters of low rank whose input is dropped: each is one pass over what is wide, and
//! nothing dropped is written.

use cinch_graph::Dropout;
use cinch_graph::op::{Linear, LinearGradInput, LinearGradWeight};

use super::matrix;
use super::parts::Parts;
use crate::cuda::command::{
    Argument, Command, DropoutAt, FirstGradient, Kernel, LaunchShape, MatrixAt,
};
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
    if let Some(gradient) = first_gradient(x, op) {
        let launches = gradient_launches(&gradient, x.workspace().0);
        launches.into_iter().for_each(|launch| x.command(launch));
    }
}

/// What it is; `None` where nothing is dropped.
pub(in crate::cuda::op) fn first_gradient(
    x: &Lowering<'_>,
    op: &LinearGradWeight,
) -> Option<FirstGradient> {
    let dropout = op.dropout?;
    let (dy, source) = (x.input_type(0), x.input_type(1));
    Some(FirstGradient {
        narrow: matrix(x.input(0), dy, op.dy_column),
        wide: matrix(x.input(1), source, op.first_column),
        rows: dy.rows(),
        outputs: op.outputs,
        inputs: op.inputs,
        scale: op.scale as f32,
        dropout: DropoutAt {
            random: x.input(2),
            stream: dropout.stream,
            threshold: Dropout::threshold(dropout.rate),
        },
        to: x.output_argument(0),
        adds: x.adds(0),
        rows_of_part: op.cuda_rows_of_part(dy.rows()),
    })
}

/// The launches that compute it, with parts of the sum in scratch memory.
pub(in crate::cuda::op) fn gradient_launches(
    gradient: &FirstGradient,
    workspace: u64,
) -> [Command; 2] {
    const KERNELS: [&str; 4] = [
        "adapter_gradient_1",
        "adapter_gradient_2",
        "adapter_gradient_3",
        "adapter_gradient_4",
    ];
    let &FirstGradient {
        narrow,
        wide,
        outputs,
        inputs,
        ..
    } = gradient;
    let parts = gradient_parts(gradient);
    let at = |matrix: MatrixAt| Argument::Address(matrix.address);
    let mut arguments = vec![
        at(narrow),
        at(wide),
        Argument::Address(workspace),
        size(gradient.rows),
        size(inputs),
        size(narrow.row_stride),
        size(wide.row_stride),
        size(gradient.rows_of_part),
        Argument::F32(gradient.scale),
    ];
    arguments.extend(dropout_arguments(gradient.dropout));
    let all = Command::Launch {
        kernel: kernel(KERNELS, outputs),
        shape: LaunchShape {
            grid: [inputs.div_ceil(GRADIENT_COLUMNS) as u32, parts as u32, 1],
            block: [(WARPS * WARP) as u32, 1, 1],
            shared_bytes: 0,
        },
        arguments,
    };
    let sums = Parts {
        address: workspace,
        parts,
        width: outputs * inputs,
        adds: gradient.adds,
    };
    let (kernel, shape, arguments) = sums.sum([gradient.to, Argument::Null, Argument::Null]);
    let sum = Command::Launch {
        kernel,
        shape,
        arguments,
    };
    [all, sum]
}

/// Into how many parts the rows are cut.
fn gradient_parts(gradient: &FirstGradient) -> usize {
    gradient.rows.div_ceil(gradient.rows_of_part).max(1)
}

/// Bytes of the parts.
pub(in crate::cuda::op) fn gradient_bytes(gradient: &FirstGradient) -> u64 {
    let width = gradient.outputs * gradient.inputs;
    (gradient_parts(gradient) * width * size_of::<f32>()) as u64
}

/// The last arguments of a kernel that drops.
pub(in crate::cuda::op) fn dropout_arguments(dropout: DropoutAt) -> [Argument; 3] {
    [
        Argument::Address(dropout.random),
        Argument::Stream(dropout.stream),
        Argument::U32(dropout.threshold),
    ]
}
