//! The selective scan and its gradient.

#[cfg(test)]
pub(super) mod tests;

use cinch_graph::TensorType;
use cinch_graph::op;
use cinch_graph::op::ScanPartition;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// Threads of the launches that have one for each element.
const ELEMENT_THREADS: usize = 256;

/// Elements, and pairs of floats, from one step of a tile to the next in shared memory, as in the
/// kernels.
const PITCH: usize = 36;

/// The kernels for one number of states in a lane.
struct Family {
    forward_local: &'static str,
    forward: &'static str,
    backward_local: &'static str,
    backward: &'static str,
}

/// The family for up to `8 × states_per_lane` states.
fn family(states_per_lane: usize) -> Family {
    match states_per_lane {
        2 => Family {
            forward_local: "scan_forward_local_2",
            forward: "scan_forward_2",
            backward_local: "scan_backward_local_2",
            backward: "scan_backward_2",
        },
        4 => Family {
            forward_local: "scan_forward_local_4",
            forward: "scan_forward_4",
            backward_local: "scan_backward_local_4",
            backward: "scan_backward_4",
        },
        _ => Family {
            forward_local: "scan_forward_local_8",
            forward: "scan_forward_8",
            backward_local: "scan_backward_local_8",
            backward: "scan_backward_8",
        },
    }
}

fn forward_kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "scan",
        function,
    }
}

fn backward_kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "scan_backward",
        function,
    }
}

/// A scan with its operands as the kernels take them.
struct Operands {
    partition: ScanPartition,
    segments: usize,
    batch: usize,
    inputs: [Argument; 6],
    sizes: [Argument; 9],
}

impl Operands {
    fn forward(x: &Lowering<'_>, op: &op::Scan) -> Self {
        let partition = op.cuda_partition(&x.input_type(0));
        Self::new(x, op, 0, partition.segment, partition.segments)
    }

    fn backward(x: &Lowering<'_>, op: &op::Scan) -> Self {
        let partition = op.cuda_partition(&x.input_type(1));
        let (segment, segments) = (partition.backward_segment, partition.backward_segments);
        Self::new(x, op, 1, segment, segments)
    }

    /// x is input `first` of the node.
    fn new(x: &Lowering<'_>, op: &op::Scan, first: usize, segment: usize, segments: usize) -> Self {
        let rest = first + op.num_sources();
        let (source, gate) = (x.input_type(first), x.input_type(rest - 1));
        let partition = op.cuda_partition(&source);
        let columns = |input: usize, column: usize| {
            Argument::Address(x.input(input) + column_bytes(source, column))
        };
        let (x_stride, z_stride) = (source.width(), gate.width());
        let in_fours = |sizes: &[usize]| sizes.iter().all(|size| size.is_multiple_of(4));
        let fours = in_fours(&[op.inner, x_stride, z_stride, op.x_column, op.z_column])
            && in_fours(&[op.rank, op.state]);
        Self {
            partition,
            segments,
            batch: source.shape.dims()[0],
            inputs: [
                columns(first, op.x_column),
                columns(rest - 1, op.z_column),
                x.input_argument(rest),
                x.input_argument(rest + 1),
                x.input_argument(rest + 2),
                x.input_argument(rest + 3),
            ],
            sizes: [
                x_stride,
                z_stride,
                source.shape.dims()[1],
                op.inner,
                op.state,
                op.rank,
                partition.chunk,
                segment,
                usize::from(fours),
            ]
            .map(|size| Argument::U32(size as u32)),
        }
    }

    fn shape(&self, segments: usize, shared_bytes: u32) -> LaunchShape {
        LaunchShape {
            grid: [
                self.partition.blocks as u32,
                segments as u32,
                self.batch as u32,
            ],
            block: [ScanPartition::THREADS as u32, 1, 1],
            shared_bytes,
        }
    }
}

fn column_bytes(ty: TensorType, column: usize) -> u64 {
    column as u64 * ty.dtype.size()
}

/// The addresses of a workspace's parts, in order.
fn addresses<const N: usize>(mut address: u64, parts: [u64; N]) -> [Argument; N] {
    parts.map(|bytes| {
        let part = Argument::Address(address);
        address += bytes;
        part
    })
}

pub fn scan(x: &mut Lowering<'_>, op: &op::Scan) {
    let operands = Operands::forward(x, op);
    let segments = operands.segments;
    let family = family(operands.partition.states_per_lane);
    let carries = if segments > 1 {
        addresses(x.workspace().0, op.cuda_parts(&x.input_type(0)))
    } else {
        [Argument::Null; 2]
    };
    if segments > 1 {
        let arguments = [&operands.inputs[..], &carries, &operands.sizes].concat();
        let shape = operands.shape(segments - 1, 0);
        x.launch(forward_kernel(family.forward_local), shape, arguments);
    }
    let outputs = [
        x.output_argument(0),
        x.optional_output(op.keep_states.then_some(1)),
    ];
    let arguments = [&operands.inputs[..], &outputs, &carries, &operands.sizes].concat();
    x.launch(
        forward_kernel(family.forward),
        operands.shape(segments, 0),
        arguments,
    );
}

/// Shared memory of the backward: Δ and Δx, B and C, the warps' shares of their gradients, the states
/// before each part of a tile but the last; then, as they come, B and C, and two tiles each of x,
/// dt, z and dy.
fn backward_shared_bytes(states_per_lane: usize, element_bytes: u64) -> u32 {
    let steps = ScanPartition::tile(states_per_lane);
    let part = if states_per_lane == 2 { 8 } else { 4 };
    let states = ScanPartition::LANES * states_per_lane;
    let thread_states = ScanPartition::SLOTS * states_per_lane;
    let floats = 2 * steps * PITCH
        + steps * (2 * states + 4)
        + ScanPartition::THREADS / 32 * steps * 2 * states
        + (steps / part - 1) * ScanPartition::THREADS * thread_states;
    let elements = steps * 2 * states + 2 * 4 * steps * PITCH;
    4 * floats as u32 + elements as u32 * element_bytes as u32
}

pub fn scan_backward(x: &mut Lowering<'_>, op: &op::ScanBackward) {
    let scan = &op.0;
    let operands = Operands::backward(x, scan);
    let partition = operands.partition;
    let (sources, segments) = (scan.num_sources(), operands.segments);
    let family = family(partition.states_per_lane);
    let dy = x.input_argument(0);
    let [shares, da, dskip, boundaries, ends, totals] =
        addresses(x.workspace().0, op.cuda_parts(&x.input_type(1)));

    // Columns that are neither x nor z have no gradient.
    for output in 0..sources {
        let ty = x.output_type(output);
        if ty.width() > scan.inner * (3 - sources) {
            x.clear(x.output(output), ty.bytes());
        }
    }
    if segments > 1 {
        let inputs = [&[dy], &operands.inputs[..]].concat();
        let arguments = [&inputs[..], &[ends, totals], &operands.sizes].concat();
        let shape = operands.shape(segments - 1, 0);
        x.launch(backward_kernel(family.backward_local), shape, arguments);
    }
    let gradient = |output: usize, column: usize| {
        Argument::Address(x.output(output) + column_bytes(x.output_type(output), column))
    };
    let mut arguments = vec![dy];
    arguments.extend(operands.inputs);
    arguments.extend([
        x.input_argument(1 + sources + 4),
        gradient(0, scan.x_column),
        gradient(sources - 1, scan.z_column),
        x.output_argument(sources + 1),
        shares,
        da,
        dskip,
        boundaries,
        ends,
        totals,
        Argument::U32(partition.span as u32),
    ]);
    arguments.extend(operands.sizes);
    let element_bytes = x.input_type(1).dtype.size();
    let shared_bytes = backward_shared_bytes(partition.states_per_lane, element_bytes);
    let shape = operands.shape(segments, shared_bytes);
    x.launch(backward_kernel(family.backward), shape, arguments);

    let dp = x.output_type(sources);
    let in_fours = scan.rank.is_multiple_of(4) && scan.state.is_multiple_of(2);
    let each = if in_fours { 4 } else { 1 };
    let parameter_blocks = element_blocks(scan.inner * (scan.state + 1));
    let projection_blocks = element_blocks(dp.shape.elements().div_ceil(each));
    let arguments = vec![
        da,
        dskip,
        x.input_argument(1 + sources + 2),
        x.output_argument(sources + 2),
        x.output_argument(sources + 3),
        Argument::U32((operands.batch * segments) as u32),
        Argument::U32(scan.inner as u32),
        Argument::U32(u32::from(x.adds(sources + 2))),
        Argument::U32(u32::from(x.adds(sources + 3))),
        Argument::U32(parameter_blocks as u32),
        shares,
        x.output_argument(sources),
        Argument::U32(partition.blocks as u32),
        Argument::U32(dp.rows() as u32),
        Argument::U32(scan.state as u32),
        Argument::U32(scan.rank as u32),
        Argument::U32(each as u32),
    ];
    let shape = LaunchShape::linear(parameter_blocks + projection_blocks, ELEMENT_THREADS as u32);
    x.launch(backward_kernel("scan_backward_sums"), shape, arguments);
}

/// Blocks in which each element has a thread.
fn element_blocks(elements: usize) -> usize {
    elements.div_ceil(ELEMENT_THREADS)
}
