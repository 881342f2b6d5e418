//! Rotary position embedding: one launch, a block for each position.

use std::f64::consts::TAU;

use cinch_graph::op;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::{Lowering, MULTIPROCESSORS};

const THREADS: usize = 256;

/// Blocks to aim for: a few for each multiprocessor, so that the sines of one block are computed
/// while others wait for memory.
const BLOCKS: usize = 8 * MULTIPROCESSORS;

pub fn rotary(x: &mut Lowering<'_>, op: &op::Rotary) {
    let ty = x.input_type(0);
    let dims = ty.shape.dims();
    // Where every row has a position of its own, all rows are one sequence.
    let (batch, seq) = if op.positions {
        (1, dims[0] * dims[1])
    } else {
        (dims[0], dims[1])
    };
    let (heads, half) = (op.columns / op.head_dim(), op.frequencies.len());
    let per_vector = 16 / ty.dtype.size() as usize;
    let vector = half.is_multiple_of(per_vector) && ty.width().is_multiple_of(per_vector);
    // Short sequences leave room for several blocks to a position, each with part of the batch.
    let pieces = batch * heads * half / if vector { per_vector } else { 1 };
    let parts = BLOCKS
        .div_ceil(seq.max(1))
        .min(pieces.div_ceil(THREADS))
        .max(1);
    let kernel = Kernel {
        file: "rotary",
        function: "rotary",
    };
    let shape = LaunchShape {
        grid: [seq.max(1) as u32, parts as u32, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: (op.head_dim() * size_of::<f32>()) as u32,
    };
    // Columns that do not turn are copied with the rest, which then turns where it lies.
    let source = if op.columns < ty.width() {
        x.copy(x.input(0), x.output(0), ty.bytes());
        x.output_argument(0)
    } else {
        x.input_argument(0)
    };
    let arguments = vec![
        source,
        x.output_argument(0),
        x.optional_input(op.positions.then_some(1)),
        Argument::I32(batch as i32),
        Argument::I32(seq as i32),
        Argument::I32(heads as i32),
        Argument::I32(op.head_dim() as i32),
        Argument::U32(ty.width() as u32),
        Argument::F32(op.scale as f32),
        Argument::F32(if op.inverse { -1.0 } else { 1.0 }),
        Argument::I32(i32::from(vector)),
    ];
    x.launch_table(kernel, shape, table(&op.frequencies), arguments);
}

/// The kernel's table: frequencies in turns, as the sum of two floats each.
fn table(frequencies: &[f64]) -> Box<[u32]> {
    let most = op::Rotary::MOST_PAIRS;
    let mut table = vec![0; 2 * most].into_boxed_slice();
    for (i, frequency) in frequencies.iter().enumerate() {
        let turns = frequency / TAU;
        let high = turns as f32;
        table[i] = high.to_bits();
        table[most + i] = ((turns - f64::from(high)) as f32).to_bits();
    }
    table
}

#[cfg(test)]
mod tests {
    use cinch_graph::{DType, Graph, Target};
    use cinch_plan::{Options, Plan};

    use super::*;
    use crate::cuda::command::Command;
    use crate::cuda::lowering::Card;

    fn lower(
        batch: usize,
        seq: usize,
        heads: usize,
        head_dim: usize,
    ) -> (LaunchShape, Box<[u32]>, Vec<Argument>) {
        let mut graph = Graph::new(DType::Bf16);
        let x = graph.batch("x", [batch, seq, heads * head_dim], DType::Bf16);
        let frequencies = op::Rotary::frequencies(10_000.0, head_dim);
        graph.rotary("rotary", x, &frequencies, None).unwrap();
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let mut x = Lowering::new(&graph, &plan, 0, true, Card::ANY);
        let op = op::Rotary {
            frequencies,
            columns: heads * head_dim,
            scale: 1.0,
            positions: false,
            inverse: true,
        };
        rotary(&mut x, &op);
        match x.finish().pop().unwrap() {
            Command::LaunchTable {
                shape,
                table,
                arguments,
                ..
            } => (shape, table, arguments),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_position_has_a_block_and_short_sequences_several() {
        // 4 sequences of 32 heads of 4 vectors are two blocks' work.
        assert_eq!(lower(4, 2000, 32, 64).0.grid, [2000, 1, 1]);
        assert_eq!(lower(4, 100, 32, 64).0.grid, [100, 2, 1]);
        assert_eq!(lower(1, 1, 1, 2).0.grid, [1, 1, 1]);
        // 64·32·4 vectors are 32 blocks' work, but 1056 blocks over 100 positions are 11 each.
        assert_eq!(lower(64, 100, 32, 64).0.grid, [100, 11, 1]);
    }

    #[test]
    fn vectors_need_halves_that_they_divide() {
        for (head_dim, vector) in [(64, 1), (16, 1), (24, 0), (6, 0)] {
            let (shape, _, arguments) = lower(1, 3, 2, head_dim);
            assert_eq!(arguments[10], Argument::I32(vector), "{head_dim}");
            assert_eq!(shape.shared_bytes as usize, head_dim * 4);
            assert_eq!(arguments[9], Argument::F32(-1.0));
        }
    }

    #[test]
    fn the_table_has_the_turns_to_the_last_bit_of_two_floats() {
        let (_, table, _) = lower(1, 3, 2, 64);
        let turns = 10_000_f64.powf(-62.0 / 64.0) / TAU;
        let part = |at: usize| f64::from(f32::from_bits(table[at]));
        let stored = part(31) + part(op::Rotary::MOST_PAIRS + 31);
        assert!((stored - turns).abs() < 1e-14 * turns);
    }
}
