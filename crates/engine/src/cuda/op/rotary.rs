//! Rotary position embedding: one launch, a block for each position.

use cinch_graph::op;

use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::{Lowering, MULTIPROCESSORS};

const THREADS: usize = 256;

/// Blocks to aim for: a few for each multiprocessor, so that the sines of one block are computed
/// while others wait for memory.
const BLOCKS: usize = 8 * MULTIPROCESSORS;

pub fn rotary(x: &mut Lowering<'_>, op: &op::Rotary) {
    let ty = x.input_type(0);
    let (batch, seq) = (ty.shape.dims()[0], ty.shape.dims()[1]);
    let (heads, half) = (ty.width() / op.head_dim, op.head_dim / 2);
    let per_vector = 16 / ty.dtype.size() as usize;
    let vector = half.is_multiple_of(per_vector);
    // Short sequences leave room for several blocks to a position, each with part of the batch.
    let pieces = batch * heads * half / if vector { per_vector } else { 1 };
    let parts = BLOCKS
        .div_ceil(seq.max(1))
        .min(pieces.div_ceil(THREADS))
        .max(1);
    let rate = op.base.log2() / half as f64;
    let kernel = Kernel {
        file: "rotary",
        function: "rotary",
    };
    let shape = LaunchShape {
        grid: [seq.max(1) as u32, parts as u32, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: (op.head_dim * size_of::<f32>()) as u32,
    };
    let arguments = vec![
        x.input_argument(0),
        x.output_argument(0),
        Argument::U64(rate.to_bits()),
        Argument::I32(batch as i32),
        Argument::I32(seq as i32),
        Argument::I32(heads as i32),
        Argument::I32(op.head_dim as i32),
        Argument::F32(if op.inverse { -1.0 } else { 1.0 }),
        Argument::I32(i32::from(vector)),
    ];
    x.launch(kernel, shape, arguments);
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
    ) -> (LaunchShape, Vec<Argument>) {
        let mut graph = Graph::new(DType::Bf16);
        let x = graph.batch("x", [batch, seq, heads * head_dim], DType::Bf16);
        graph.rotary("rotary", x, head_dim, 10_000.0).unwrap();
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let mut x = Lowering::new(&graph, &plan, 0, true, Card::ANY);
        let op = op::Rotary {
            base: 10_000.0,
            head_dim,
            inverse: true,
        };
        rotary(&mut x, &op);
        match x.finish().pop().unwrap() {
            Command::Launch {
                shape, arguments, ..
            } => (shape, arguments),
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
            let (shape, arguments) = lower(1, 3, 2, head_dim);
            assert_eq!(arguments[8], Argument::I32(vector), "{head_dim}");
            assert_eq!(shape.shared_bytes as usize, head_dim * 4);
            assert_eq!(arguments[7], Argument::F32(-1.0));
        }
    }

    #[test]
    fn the_last_frequency_is_one_step_above_the_inverse_base() {
        let (_, arguments) = lower(1, 3, 2, 64);
        let Argument::U64(bits) = arguments[2] else {
            panic!("{:?}", arguments[2]);
        };
        let frequency = (-31.0 * f64::from_bits(bits)).exp2();
        assert!((frequency - 10_000_f64.powf(-62.0 / 64.0)).abs() < 1e-18);
    }
}
