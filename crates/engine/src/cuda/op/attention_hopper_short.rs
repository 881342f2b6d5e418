//! Attention over short sequences of narrow heads on Hopper cards: a block has the keys of a whole
//! head at a time.

use cinch_graph::op::{self, HopperShort};

use super::attention_hopper::{BARRIER_BYTES, ELEMENT_BYTES, Site, int, launch_shape};
use crate::cuda::command::{Argument, Kernel};
use crate::cuda::lowering::Lowering;

/// Warpgroups with keys; beside them one sums dQ, brings what all read and computes what is the same
/// for all keys of a query.
const GROUPS: usize = 4;
/// Keys of a warpgroup, and queries of a tile.
const ROWS: usize = 64;
/// Tiles on their way, rounds of keys, tiles of dS, and heads with their numbers of each query.
const STAGES: usize = 4;
const KEY_ROUNDS: usize = 2;
const SCORE_STAGES: usize = 2;
const NUMBERED_HEADS: usize = 2;
const NUMBERS: usize = 3;
const BARRIERS: usize = 1 + KEY_ROUNDS + 2 * SCORE_STAGES + STAGES;

/// Warpgroups of the forward with queries, and heads whose keys are in shared memory.
const FORWARD_GROUPS: usize = 4;
const FORWARD_HEADS: usize = 2;

pub fn attention(x: &mut Lowering<'_>, op: &op::Attention) {
    let site = Site::new(x, op, 0, op.num_sources());
    let mut arguments = op
        .places()
        .map(|(input, column)| Argument::Address(x.input(input) + (column * ELEMENT_BYTES) as u64))
        .to_vec();
    arguments.extend([x.output_argument(0), x.output_argument(1)]);
    arguments.extend(site.strides.map(|stride| Argument::U32(stride as u32)));
    arguments.extend([site.batch, site.seq, op.heads, op.kv_heads].map(int));
    arguments.push(Argument::F32(op.scale as f32));
    arguments.extend(site.random);
    arguments.push(site.lengths);
    let function = match op.dropout {
        None => "attention_forward_hopper_short_32",
        Some(_) => "attention_forward_hopper_short_32_dropout",
    };
    let tiles = (site.batch * op.heads).saturating_mul(site.seq.div_ceil(ROWS));
    // One warpgroup more brings keys, values and queries.
    let shape = launch_shape(
        tiles.min(x.card.multiprocessors),
        FORWARD_GROUPS + 1,
        forward_bytes(),
    );
    let file = "attention_hopper_short_forward";
    x.launch(Kernel { file, function }, shape, arguments);
}

/// Keys, values and queries; two barriers for each head.
fn forward_bytes() -> usize {
    let rows = 3 * FORWARD_HEADS * HopperShort::MOST_POSITIONS;
    let elements = rows * HopperShort::HEAD_DIM;
    elements * ELEMENT_BYTES + 2 * FORWARD_HEADS * BARRIER_BYTES
}

pub fn attention_backward(x: &mut Lowering<'_>, op: &op::Attention, layout: &HopperShort) {
    let sources = op.num_sources();
    let site = Site::new(x, op, 1, sources + 3);
    let mut arguments = site.sources.to_vec();
    arguments.push(site.output_gradient(x));
    // The output, its gradient and lse.
    arguments.extend([sources + 1, 0, sources + 2].map(|input| x.input_argument(input)));
    arguments.extend(site.gradients(x));
    arguments.extend(site.strides.map(|stride| Argument::U32(stride as u32)));
    arguments.extend([site.batch, site.seq, op.heads].map(int));
    arguments.push(Argument::F32(op.scale as f32));
    arguments.extend(site.random);
    arguments.push(site.lengths);
    let function = match op.dropout {
        None => "attention_backward_hopper_32",
        Some(_) => "attention_backward_hopper_32_dropout",
    };
    let blocks = layout.heads.min(x.card.multiprocessors);
    x.launch(
        Kernel {
            file: "attention_hopper_short",
            function,
        },
        launch_shape(blocks, GROUPS + 1, shared_bytes()),
        arguments,
    );
}

/// Keys, and the values of one round; queries and dO; dS; numbers of each query; sums of dQ.
fn shared_bytes() -> usize {
    let columns = HopperShort::HEAD_DIM;
    let tiles = ((KEY_ROUNDS + 1) * GROUPS + 2 * STAGES) * ROWS * columns;
    let elements = tiles + SCORE_STAGES * GROUPS * ROWS * ROWS;
    let numbers = HopperShort::MOST_POSITIONS * (columns + NUMBERED_HEADS * NUMBERS);
    elements * ELEMENT_BYTES + numbers * size_of::<f32>() + BARRIERS * BARRIER_BYTES
}

#[cfg(test)]
mod tests {
    use cinch_graph::DType;
    use cinch_graph::op::AttentionInputs::Packed;

    use super::super::attention::tests::{launches, lower_for, plain};
    use super::*;
    use crate::cuda::lowering::Card;

    /// What a block of a Hopper card has.
    const SHARED_BYTES: u32 = 227 << 10;

    fn encoder(heads: usize) -> op::Attention {
        op::Attention {
            causal: false,
            padding: true,
            ..plain(Packed, heads, heads, 32)
        }
    }

    #[test]
    fn a_block_has_one_head_at_a_time() {
        for (batch, blocks) in [(2, 24), (45, 132)] {
            let (_, _, commands) = lower_for(&encoder(12), DType::F16, batch, 500, Card::HOPPER);
            let launches = launches(&commands);
            let files: Vec<_> = launches.iter().map(|launch| launch.0.file).collect();
            let forward = "attention_hopper_short_forward";
            assert_eq!(files, [forward, "attention_hopper_short"]);
            // Tiles of queries are dealt out one by one.
            let (_, shape, _) = launches[0];
            assert_eq!(shape.grid, [132.min(batch as u32 * 12 * 8), 1, 1]);
            assert_eq!(shape.block, [640, 1, 1]);
            assert!(shape.shared_bytes + 1024 <= SHARED_BYTES);
            let (_, shape, _) = launches[1];
            assert_eq!(shape.grid, [blocks, 1, 1]);
            assert_eq!(shape.block, [640, 1, 1]);
            assert!(shape.shared_bytes <= SHARED_BYTES);
        }
    }

    #[test]
    fn long_sequences_take_two_passes() {
        let (_, _, commands) = lower_for(&encoder(2), DType::F16, 1, 513, Card::HOPPER);
        let files: Vec<_> = launches(&commands).iter().map(|l| l.0.file).collect();
        let rest = "attention_backward";
        assert_eq!(files, ["attention_hopper", rest, rest, rest]);
    }
}
