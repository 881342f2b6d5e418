//! The gradient norm over all gradients, and AdamW for many parameters at once.

#[cfg(test)]
mod tests;

use cinch_graph::op::{AdamW, GradientNorm, GradientSquares, MomentFormat, Op};
use cinch_graph::{ALIGNMENT, Node, TensorId};

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "optimizer",
        function,
    }
}

/// Ranges of floats that hold all gradients: (address, elements). Gradients that follow each
/// other are one range. The few bytes between them, up to the next multiple of the alignment,
/// belong to no tensor: nothing writes them after the arena was cleared, so their squares are
/// zero.
fn ranges(x: &Lowering<'_>) -> Vec<(u64, usize)> {
    let mut gradients: Vec<(u64, usize)> = (0..x.node.inputs.len())
        .map(|input| (x.input(input), x.input_type(input).shape.elements()))
        .collect();
    gradients.sort_unstable();
    let mut ranges: Vec<(u64, usize)> = Vec::new();
    for (address, elements) in gradients {
        match ranges.last_mut() {
            Some((start, length))
                if (*start + 4 * *length as u64).next_multiple_of(ALIGNMENT) == address =>
            {
                *length = ((address - *start) / 4) as usize + elements;
            }
            _ => ranges.push((address, elements)),
        }
    }
    ranges
}

/// The sums of squares of the blocks of some floats, to `sums`; how many they are.
fn squares(x: &mut Lowering<'_>, (address, elements): (u64, usize), sums: u64) -> usize {
    let blocks = elements.div_ceil(GradientNorm::BLOCK);
    let arguments = vec![
        Argument::Address(address),
        Argument::Address(sums),
        Argument::U64(elements as u64),
        Argument::U32(GradientNorm::BLOCK as u32),
    ];
    x.launch(
        kernel("gradient_squares"),
        LaunchShape::linear(blocks, 512),
        arguments,
    );
    blocks
}

/// Bytes of one sum.
const SUM: u64 = size_of::<f64>() as u64;

pub fn gradient_squares(x: &mut Lowering<'_>, op: &GradientSquares) {
    let gradient = (x.input(0), x.input_type(0).shape.elements());
    let sums = x.output(0) + SUM * op.first as u64;
    squares(x, gradient, sums);
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
const TABLE_ENTRIES: usize = 120;
const ENTRY_WORDS: usize = 8;
/// Elements of a block, and its threads.
const SHARE: usize = 8192;
const UPDATE_THREADS: u32 = 256;
const NO_COPY: u32 = u32::MAX;
/// Entries count elements in 32 bits; a larger tensor is several entries.
const PIECE: usize = 1 << 30;

/// How many of the nodes, from the first on, are one update: AdamW with the same settings and
/// scalars, the decay aside. Those inside a backward are few at a time.
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

/// An update that a table has entries for: one with moments in full.
fn as_adamw(node: &Node) -> Option<(&Node, &AdamW)> {
    match &node.op {
        Op::AdamW(op) if op.moments == MomentFormat::Full => Some((node, op)),
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
        Argument::F32((1.0 - op.beta1) as f32),
        Argument::F32(op.beta2 as f32),
        Argument::F32((1.0 - op.beta2) as f32),
        Argument::F32(op.epsilon as f32),
    ];
    let blocks = elements.div_ceil(MomentFormat::BLOCK * CODE_BLOCKS);
    let shape = LaunchShape::linear(blocks, UPDATE_THREADS);
    x.launch(kernel("adamw_8bit"), shape, arguments);
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
            words.extend([entry.elements as u32, blocks as u32, entry.decay.to_bits()]);
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
    decay: f32,
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
                decay: op.weight_decay as f32,
            })
            .collect()
    }
}
