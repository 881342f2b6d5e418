//! The gradient norm over all gradients, and AdamW for many parameters at once.

#[cfg(test)]
mod tests;

use cinch_graph::op::{AdamW, GradientNorm, GradientSquares, MomentFormat, Op};
use cinch_graph::{ALIGNMENT, DType, Graph, Node, TensorId};

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "optimizer",
        function,
    }
}

/// Numbers of one type that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Range {
    address: u64,
    elements: usize,
    dtype: DType,
}

/// Ranges that hold all gradients. Gradients of one type that follow each other are one range.
/// The few bytes between them, up to the next multiple of the alignment,
/// belong to no tensor: nothing writes them after the arena was cleared, so their squares are
/// zero.
fn ranges(x: &Lowering<'_>) -> Vec<Range> {
    let mut gradients: Vec<Range> = (0..x.node.inputs.len())
        .map(|input| gradient(x, input))
        .collect();
    gradients.sort_unstable();
    let mut ranges: Vec<Range> = Vec::new();
    for next in gradients {
        let size = next.dtype.size();
        match ranges.last_mut() {
            Some(range)
                if range.dtype == next.dtype
                    && (range.address + size * range.elements as u64)
                        .next_multiple_of(ALIGNMENT)
                        == next.address =>
            {
                let before = (next.address - range.address) / size;
                range.elements = before as usize + next.elements;
            }
            _ => ranges.push(next),
        }
    }
    ranges
}

fn gradient(x: &Lowering<'_>, input: usize) -> Range {
    let ty = x.input_type(input);
    Range {
        address: x.input(input),
        elements: ty.shape.elements(),
        dtype: ty.dtype,
    }
}

/// Threads of a block of numbers: few, so that the blocks of 40 million numbers, 615 of them, are on a
/// card at once, and none comes when the others are gone.
const SQUARE_THREADS: u32 = 256;

/// The sums of squares of the blocks of some numbers, to `sums`; how many they are.
fn squares(x: &mut Lowering<'_>, range: Range, sums: u64) -> usize {
    let Range {
        address, elements, ..
    } = range;
    let blocks = elements.div_ceil(GradientNorm::BLOCK);
    let arguments = vec![
        Argument::Address(address),
        Argument::Address(sums),
        Argument::U64(elements as u64),
        Argument::U32(GradientNorm::BLOCK as u32),
    ];
    let function = match range.dtype {
        DType::F32 => "gradient_squares",
        _ => "gradient_squares_real",
    };
    x.launch(
        kernel(function),
        LaunchShape::linear(blocks, SQUARE_THREADS),
        arguments,
    );
    blocks
}

/// Bytes of one sum.
const SUM: u64 = size_of::<f64>() as u64;

pub fn gradient_squares(x: &mut Lowering<'_>, op: &GradientSquares) {
    let sums = x.output(0) + SUM * op.first as u64;
    squares(x, gradient(x, 0), sums);
}

pub fn gradient_norm(x: &mut Lowering<'_>, op: &GradientNorm) {
    let (sums, count) = if op.from_squares {
        (x.input(0), x.input_type(0).shape.elements())
    } else {
        let (workspace, _) = x.workspace();
        let mut count = 0;
        for range in ranges(x) {
            count += squares(x, range, workspace + SUM * count as u64);
        }
        (workspace, count)
    };
    let max_norm = op.max_norm.map_or(f32::INFINITY, |max| max as f32);
    let arguments = vec![
        Argument::Address(sums),
        x.output_argument(0),
        x.optional_output(op.scaled.then_some(1)),
        Argument::U32(count as u32),
        Argument::F32(max_norm),
    ];
    x.launch(
        kernel("gradient_norm"),
        LaunchShape::linear(1, 1024),
        arguments,
    );
}

/// Parameters in one launch: as many as fit into the 4 KiB that arguments may take. The number
/// and the layout of an entry are the kernel's.
const TABLE_ENTRIES: usize = 96;
const ENTRY_WORDS: usize = 10;
/// Elements of a block, and its threads.
const SHARE: usize = 8192;
const UPDATE_THREADS: u32 = 256;
const NO_COPY: u32 = u32::MAX;
/// Entries count elements in 32 bits; a larger tensor is several entries.
const PIECE: usize = 1 << 30;

/// How many of the nodes, from the first on, are one update: AdamW with the same settings and
/// scalars, decay and scale of the learning rate aside. Those inside a backward are few at a time.
pub fn num_together(nodes: &[Node]) -> usize {
    let Some((first, op)) = nodes.first().and_then(as_adamw) else {
        return 0;
    };
    let joins = |node: &Node| {
        as_adamw(node).is_some_and(|(node, other)| {
            node.inputs[1..] == first.inputs[1..]
                && (other.beta1, other.beta2, other.epsilon) == (op.beta1, op.beta2, op.epsilon)
        })
    };
    nodes.iter().take_while(|node| joins(node)).count()
}

/// An update that a table has entries for: one whose moments are numbers.
fn as_adamw(node: &Node) -> Option<(&Node, &AdamW)> {
    match &node.op {
        Op::AdamW(op) if op.moments != MomentFormat::EightBit => Some((node, op)),
        _ => None,
    }
}

/// Blocks of codes that a block of threads updates, a warp each.
const CODE_BLOCKS: usize = 8;

/// The update of one parameter with moments in eight bits.
pub fn adamw_8bit(x: &mut Lowering<'_>, op: &AdamW) {
    let layout = op.layout();
    let elements = x.output_type(0).shape.elements();
    let scales = layout.scales.unwrap_or_default();
    let arguments = vec![
        x.output_argument(0),
        x.input_argument(0),
        x.output_argument(layout.m),
        x.output_argument(layout.v),
        x.output_argument(scales[0]),
        x.output_argument(scales[1]),
        x.optional_output(layout.copy),
        x.optional_input(op.factor.then_some(2)),
        x.input_argument(1),
        Argument::U64(elements as u64),
        Argument::F32(op.weight_decay as f32),
        Argument::F32(op.learning_rate_scale as f32),
        Argument::F32((1.0 - op.beta1) as f32),
        Argument::F32(op.beta2 as f32),
        Argument::F32((1.0 - op.beta2) as f32),
        Argument::F32(op.epsilon as f32),
    ];
    let blocks = elements.div_ceil(MomentFormat::BLOCK * CODE_BLOCKS);
    let shape = LaunchShape::linear(blocks, UPDATE_THREADS);
    let function = match kept_as_read(x.graph, x.node, op) {
        0 => "adamw_8bit",
        PARAMETER_AS_READ => "adamw_8bit_as_read",
        _ => "adamw_8bit_all_as_read",
    };
    x.launch(kernel(function), shape, arguments);
}

/// The update of `count` parameters, this node's and those of the nodes that follow.
pub fn adamw(x: &mut Lowering<'_>, op: &AdamW, count: usize) {
    let nodes = &x.graph.nodes[x.index..x.index + count];
    let updates = nodes.iter().filter_map(as_adamw);
    let entries: Vec<Entry> = updates
        .flat_map(|(node, op)| Entry::all(x, node, op))
        .collect();
    let states = match x.plan.options.offload_states {
        false => Argument::Address(0),
        true => Argument::Host(0),
    };
    for entries in entries.chunks(TABLE_ENTRIES) {
        let mut words = Vec::with_capacity(TABLE_ENTRIES * ENTRY_WORDS);
        let mut blocks = 0;
        for entry in entries {
            words.extend(entry.places);
            words.extend([entry.elements as u32, blocks as u32, entry.kept]);
            words.extend([entry.decay, entry.rate].map(f32::to_bits));
            blocks += entry.elements.div_ceil(SHARE);
        }
        words.resize(TABLE_ENTRIES * ENTRY_WORDS, 0);
        let arguments = vec![
            Argument::U32(entries.len() as u32),
            Argument::Address(0),
            states,
            x.optional_input(op.factor.then_some(2)),
            x.input_argument(1),
            Argument::F32((1.0 - op.beta1) as f32),
            Argument::F32(op.beta2 as f32),
            Argument::F32((1.0 - op.beta2) as f32),
            Argument::F32(op.epsilon as f32),
        ];
        let shape = LaunchShape::linear(blocks, UPDATE_THREADS);
        x.launch_table(kernel("adamw"), shape, words.into(), arguments);
    }
}

/// A parameter, or a piece of a large one.
struct Entry {
    /// Parameter, gradient, moments and compute copy, in units of the plan's alignment from the
    /// start of the arena or, for the moments, of where they are kept.
    places: [u32; 5],
    elements: usize,
    /// Which of them are in the compute type.
    kept: u32,
    decay: f32,
    /// Of the learning rate.
    rate: f32,
}

/// What of an update is kept in the compute type, and not in floats.
const PARAMETER_AS_READ: u32 = 1;
const GRADIENT_AS_READ: u32 = 2;
const MOMENTS_AS_READ: u32 = 4;

fn kept_as_read(graph: &Graph, node: &Node, op: &AdamW) -> u32 {
    let coarse = |id: TensorId, bit: u32| match graph.ty(id).dtype {
        DType::Bf16 | DType::F16 => bit,
        _ => 0,
    };
    coarse(node.outputs[0], PARAMETER_AS_READ)
        | coarse(node.inputs[0], GRADIENT_AS_READ)
        | coarse(node.outputs[op.layout().m], MOMENTS_AS_READ)
}

impl Entry {
    fn all(x: &Lowering<'_>, node: &Node, op: &AdamW) -> Vec<Self> {
        let gradient = node.inputs[0];
        let elements = x.graph.ty(gradient).shape.elements();
        let place = |id: TensorId, first: usize| {
            let size = x.graph.ty(id).dtype.size();
            ((x.place(id).offset + first as u64 * size) / ALIGNMENT) as u32
        };
        let pieces = (0..elements).step_by(PIECE);
        pieces
            .map(|first| Self {
                places: [
                    place(node.outputs[0], first),
                    place(gradient, first),
                    place(node.outputs[1], first),
                    place(node.outputs[2], first),
                    op.copy.map_or(NO_COPY, |_| place(node.outputs[3], first)),
                ],
                elements: PIECE.min(elements - first),
                kept: kept_as_read(x.graph, node, op),
                decay: op.weight_decay as f32,
                rate: op.learning_rate_scale as f32,
            })
            .collect()
    }
}
