//! The two products that lead to a selective scan, x → p → dt, and their four gradients. Where p is
//! narrow, each way is one pass over what is wide. Whether that or one by one is faster is measured
//! before the first step.

#[cfg(test)]
mod tests;

use cinch_graph::op::{Linear, LinearGradInput, LinearGradWeight, Op};
use cinch_graph::{DType, Graph, Node, TensorId, TensorType};
use cinch_plan::{Placement, Residence};

use super::linear::matrix;
use super::lower;
use crate::cuda::command::{Argument, Command, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// Columns of p, and those that dt is made of.
const WIDTH: usize = 96;
const RANK: usize = 64;
const THREADS: u32 = 256;

/// Columns of x and dt.
const INNER: usize = 1024;

/// Rows of a block forwards, and of a cluster of blocks backwards, which has all columns.
const ROWS: usize = 64;
const PART: usize = 256;
const CLUSTER: usize = 4;

/// With fewer rows most of a card waits.
const LEAST_ROWS: usize = 256;

/// Shared memory forwards: four stages of 128 columns of x and of W, rows 8 elements apart; what dt is
/// made of.
const FORWARD_BYTES: usize = 2 * (4 * (ROWS + WIDTH) * (128 + 8) + ROWS * (RANK + 32));
/// Backwards, for what is narrow: three stages of 64 rows of ddt and of p, T, twice the sums of 64
/// rows of dp in floats; for what is wide: three stages of x, dp, W.
const LOW_BYTES: usize =
    2 * (3 * ROWS * (256 + 8 + RANK + 8) + 256 * (RANK + 8)) + 4 * 2 * ROWS * (RANK + 8);
const WIDE_BYTES: usize = 2 * ((3 * ROWS + WIDTH) * (256 + 8) + PART * (WIDTH + 8));

/// Elements that four neighbours of a thread add up, in a block.
const SUM_BLOCK: [u32; 2] = [32, 8];

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "projection_hopper",
        function,
    }
}

fn size(size: usize) -> Argument {
    Argument::U32(size as u32)
}

/// Nodes that are one pass, from that of the lowering on, and their commands.
pub(super) fn together(x: &Lowering<'_>, end: usize) -> Option<(usize, Command)> {
    if !x.card.is_hopper {
        return None;
    }
    let nodes = &x.graph.nodes[x.index..end];
    let forward = forward(x, nodes).map(|commands| (2, commands));
    let (count, together) = forward.or_else(|| Some((4, backward(x, nodes)?)))?;
    let apart = (x.index..x.index + count)
        .flat_map(|index| lower(at(x, index)))
        .collect();
    Some((count, Command::Ways(vec![apart, together])))
}

fn at<'a>(x: &Lowering<'a>, index: usize) -> Lowering<'a> {
    Lowering::new(x.graph, x.plan, index, x.first_micro, x.card)
}

/// What the kernels know of x → p → dt.
struct Shape {
    rows: usize,
    x_stride: usize,
    x_column: usize,
}

impl Shape {
    /// Where the kernels take it: of x these columns from one on, by W and T.
    fn new(graph: &Graph, [x, w, p, t, dt]: [TensorId; 5], x_column: usize) -> Option<Self> {
        let types = [x, w, p, t, dt].map(|id| graph.ty(id));
        let [x, w, p, t, dt] = types;
        let is =
            |ty: TensorType, [rows, width]: [usize; 2]| ty.rows() == rows && ty.width() == width;
        let rows = x.rows();
        let fits = types
            .iter()
            .all(|ty| matches!(ty.dtype, DType::Bf16 | DType::F16))
            && is(w, [WIDTH, INNER])
            && is(p, [rows, WIDTH])
            && is(t, [INNER, RANK])
            && is(dt, [rows, INNER])
            && x.width().is_multiple_of(8)
            && x_column.is_multiple_of(8)
            && (LEAST_ROWS..1 << 24).contains(&rows);
        fits.then_some(Self {
            rows,
            x_stride: x.width(),
            x_column,
        })
    }
}

fn overlap(a: Placement, b: Placement) -> bool {
    a.offset < b.end() && b.offset < a.end()
}

/// Whether all that is written at once, to these places, leaves alone what is read meanwhile, and
/// all of it lies in the arena.
fn are_apart(reads: &[Placement], writes: &[Placement]) -> bool {
    let in_arena = |place: &Placement| place.residence == Residence::Arena;
    let alone = |(index, &written): (usize, &Placement)| {
        let others = reads.iter().chain(&writes[..index]);
        !others.copied().any(|other| overlap(written, other))
    };
    reads.iter().chain(writes).all(in_arena) && writes.iter().enumerate().all(alone)
}

fn places(x: &Lowering<'_>, ids: &[TensorId]) -> Option<Vec<Placement>> {
    let place = |&id: &TensorId| {
        // What is read beyond an end is cleared by its own node.
        let whole = x.plan.beyond(id).is_none();
        x.plan.placement(id).filter(|_| whole)
    };
    ids.iter().map(place).collect()
}

/// `p = x·Wᵀ`, `dt = p[:, :rank]·Tᵀ + bias`
fn forward(x: &Lowering<'_>, nodes: &[Node]) -> Option<Vec<Command>> {
    let [first, second, ..] = nodes else {
        return None;
    };
    let (Op::Linear(to_p), Op::Linear(to_dt)) = (&first.op, &second.op) else {
        return None;
    };
    let plain = |op: &Linear, bias: bool| op.dropout.is_none() && op.bias == bias;
    let chained = second.inputs[0] == first.outputs[0] && to_dt.first_column == 0;
    if !plain(to_p, false) || !plain(to_dt, true) || !chained {
        return None;
    }
    let (source, w, p) = (first.inputs[0], first.inputs[1], first.outputs[0]);
    let (t, bias, dt) = (second.inputs[1], second.inputs[2], second.outputs[0]);
    let shape = Shape::new(x.graph, [source, w, p, t, dt], to_p.first_column)?;
    let reads = places(x, &[source, w, t, bias])?;
    let writes = places(x, &[p, dt])?;
    if !are_apart(&reads, &writes) || x.graph.ty(bias).dtype != DType::F32 {
        return None;
    }
    let address = |id: TensorId| Argument::Address(x.place(id).offset);
    let from = matrix(x.place(source).offset, x.graph.ty(source), shape.x_column);
    Some(vec![Command::Launch {
        kernel: kernel("projections"),
        shape: LaunchShape {
            shared_bytes: FORWARD_BYTES as u32,
            ..LaunchShape::linear(shape.rows.div_ceil(ROWS), THREADS)
        },
        arguments: vec![
            Argument::Address(from.address),
            address(w),
            address(t),
            address(bias),
            address(p),
            address(dt),
            size(shape.rows),
            size(INNER),
            size(shape.x_stride),
        ],
    }])
}

/// `dT (+)= ddtᵀ·p[:, :rank]`, `dbias (+)= Σ ddt`, `dp[:, :rank] += ddt·T`, `dW (+)= dpᵀ·x`,
/// `dx += dp·W`
fn backward(x: &Lowering<'_>, nodes: &[Node]) -> Option<Vec<Command>> {
    let [to_t, to_p, to_w, to_x, ..] = nodes else {
        return None;
    };
    let (Op::LinearGradWeight(of_t), Op::LinearGradInput(of_p)) = (&to_t.op, &to_p.op) else {
        return None;
    };
    let (Op::LinearGradWeight(of_w), Op::LinearGradInput(of_x)) = (&to_w.op, &to_x.op) else {
        return None;
    };
    let weight = |op: &LinearGradWeight, bias: bool| {
        (op.dropout.is_none(), op.scale, op.dy_column, op.bias) == (true, 1.0, 0, bias)
    };
    let adds = |op: &LinearGradInput| {
        (op.dropout.is_none(), op.scale, op.dy_column, op.accumulate) == (true, 1.0, 0, true)
    };
    let plain = weight(of_t, true) && adds(of_p) && weight(of_w, false) && adds(of_x);
    if !plain || (of_t.first_column, of_p.first_column) != (0, 0) {
        return None;
    }
    let (&[ddt, p], &[dt, dbias]) = (&to_t.inputs[..], &to_t.outputs[..]) else {
        return None;
    };
    let (t, dp_before, dp) = (to_p.inputs[1], to_p.inputs[2], to_p.outputs[0]);
    let (source, dw) = (to_w.inputs[1], to_w.outputs[0]);
    let (w, dx_before, dx) = (to_x.inputs[1], to_x.inputs[2], to_x.outputs[0]);
    let chained = to_p.inputs[0] == ddt && to_w.inputs[0] == dp && to_x.inputs[0] == dp;
    if !chained || of_w.first_column != of_x.first_column {
        return None;
    }
    let shape = Shape::new(x.graph, [source, w, p, t, ddt], of_x.first_column)?;
    let in_place = x.place(dp_before) == x.place(dp) && x.place(dx_before) == x.place(dx);
    let floats = [dt, dbias, dw]
        .iter()
        .all(|&id| x.graph.ty(id).dtype == DType::F32);
    let parts = shape.rows.div_ceil(PART);
    let workspace = x.plan.workspace(x.index)?;
    let part_bytes = (4 * INNER * (RANK + 1 + WIDTH)) as u64;
    let reads = places(x, &[ddt, p, source, t, w])?;
    let mut writes = places(x, &[dp, dx, dt, dbias, dw])?;
    writes.push(workspace);
    let fits =
        x.graph.ty(dx).width() == shape.x_stride && workspace.bytes >= part_bytes * parts as u64;
    if !in_place || !floats || !fits || !are_apart(&reads, &writes) {
        return None;
    }
    let address = |id: TensorId| Argument::Address(x.place(id).offset);
    let column = |id: TensorId| {
        let at = matrix(x.place(id).offset, x.graph.ty(id), shape.x_column);
        Argument::Address(at.address)
    };
    let workspace = Argument::Address(workspace.offset);
    let adds =
        |node: usize, output: usize| Argument::U32(u32::from(at(x, x.index + node).adds(output)));
    let launch = |function, bytes: usize, arguments| Command::Launch {
        kernel: kernel(function),
        shape: LaunchShape {
            shared_bytes: bytes as u32,
            ..LaunchShape::linear(CLUSTER * parts, THREADS)
        },
        arguments,
    };
    let low = vec![
        address(ddt),
        address(p),
        address(t),
        address(dp),
        workspace,
        size(shape.rows),
    ];
    let wide = vec![
        column(source),
        address(w),
        address(dp),
        column(dx),
        workspace,
        size(shape.rows),
        size(shape.x_stride),
    ];
    let elements = INNER * (RANK + 1 + WIDTH);
    let sums = Command::Launch {
        kernel: kernel("projections_sum"),
        shape: LaunchShape {
            grid: [elements.div_ceil(4 * SUM_BLOCK[0] as usize) as u32, 1, 1],
            block: [SUM_BLOCK[0], SUM_BLOCK[1], 1],
            shared_bytes: 0,
        },
        arguments: vec![
            workspace,
            address(dt),
            address(dbias),
            address(dw),
            size(parts),
            size(INNER),
            adds(0, 0),
            adds(0, 1),
            adds(2, 0),
        ],
    };
    Some(vec![
        launch("projections_low_gradients", LOW_BYTES, low),
        launch("projections_wide_gradients", WIDE_BYTES, wide),
        sums,
    ])
}
