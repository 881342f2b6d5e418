//! The backward of few heads on Hopper cards, evenly dealt out to all multiprocessors: what it reads
//! of each query, the steps, and gradients from what they leave.

use cinch_graph::op::{self, HopperBackward, HopperDealt};

use super::attention_hopper::{BARRIER_BYTES, ELEMENT_BYTES, Site, Statistics, int, launch_shape};
use crate::cuda::command::{Argument, Kernel, LaunchShape};
use crate::cuda::lowering::Lowering;

/// Warpgroups with keys; one more brings what they read and takes what they add.
const GROUPS: usize = 2;
const BARRIERS: usize = 14;
/// Threads for a piece of the gradients.
const PANEL_THREADS: u32 = 128;

pub fn attention_backward(x: &mut Lowering<'_>, op: &op::Attention, layout: &HopperDealt) {
    let site = Site::new(x, op, 1, op.num_sources() + 3);
    let workspace = x.workspace().0;
    let [lse, delta, sums, parts, turns] = layout
        .parts()
        .offsets()
        .map(|offset| Argument::Address(workspace + offset));
    let statistics = Statistics {
        lse,
        delta,
        turns,
        num_turns: layout.turns(),
        lows: Argument::Null,
        tile_rows: HopperDealt::TILE_ROWS,
        padded: layout.padded(),
    };
    statistics.launch(x, &site);

    let [steps, finish] = match op.head_dim {
        64 => ["attention_backward_dealt_64", "attention_finish_dealt_64"],
        _ => ["attention_backward_dealt_128", "attention_finish_dealt_128"],
    };
    let [q_stride, kv_stride] = site.strides.map(|stride| Argument::U32(stride as u32));
    let [dq, dk, dv] = site.gradients(x);
    let mut scalars = [site.batch, site.seq, op.heads, op.kv_heads]
        .map(int)
        .to_vec();
    scalars.push(Argument::F32(op.scale as f32));

    let mut arguments = site.sources.to_vec();
    arguments.extend([site.output_gradient(x), lse, delta, sums, parts, turns]);
    arguments.extend([dk, dv, kv_stride]);
    arguments.extend(&scalars);
    let shape = launch_shape(layout.stretches, GROUPS + 1, shared_bytes(op.head_dim));
    x.launch(kernel(steps), shape, arguments);

    let mut arguments = vec![sums, parts, dq, dk, dv, q_stride, kv_stride];
    arguments.extend(&scalars);
    arguments.push(Argument::U32(layout.stretches as u32));
    let shape = LaunchShape::linear(layout.panels(), PANEL_THREADS);
    x.launch(kernel(finish), shape, arguments);
}

/// Keys and values, two stages of queries and do with their numbers, of dS and of sums.
fn shared_bytes(head_dim: usize) -> usize {
    let (keys, rows) = (HopperBackward::KEYS, HopperDealt::TILE_ROWS);
    let elements = (2 * keys + 4 * rows) * head_dim + 2 * keys * rows;
    let numbers = 2 * rows * head_dim + 4 * rows;
    elements * ELEMENT_BYTES + numbers * size_of::<f32>() + BARRIERS * BARRIER_BYTES
}

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "attention_hopper_dealt",
        function,
    }
}

#[cfg(test)]
mod tests {
    use cinch_graph::DType;
    use cinch_graph::op::AttentionInputs::{Packed, Separate};

    use super::super::attention::tests::{launches, lower_for, plain};
    use super::*;
    use crate::cuda::lowering::Card;

    fn few(heads: usize, kv_heads: usize, head_dim: usize) -> op::Attention {
        op::Attention {
            dropout: None,
            ..plain(Separate, heads, kv_heads, head_dim)
        }
    }

    fn files(op: &op::Attention, batch: usize, seq: usize) -> Vec<&'static str> {
        let (_, _, commands) = lower_for(op, DType::Bf16, batch, seq, Card::HOPPER);
        launches(&commands).iter().map(|l| l.0.file).collect()
    }

    #[test]
    fn few_plain_heads_are_dealt_out() {
        let (teams, dealt) = ("attention_hopper_backward", "attention_hopper_dealt");
        let by_dealing = ["attention_hopper", teams, dealt, dealt];
        let by_teams = ["attention_hopper", teams, teams];
        assert_eq!(files(&few(28, 4, 128), 1, 1536), by_dealing);
        assert_eq!(files(&few(12, 12, 64), 1, 1000), by_dealing);
        assert_eq!(files(&few(12, 12, 64), 32, 1024), by_teams);
        let of = few(28, 4, 128);
        for other in [
            op::Attention {
                causal: false,
                ..of.clone()
            },
            op::Attention {
                padding: true,
                ..of.clone()
            },
            op::Attention {
                window: Some(100),
                ..of.clone()
            },
            op::Attention {
                documents: true,
                ..of.clone()
            },
            plain(Separate, 28, 4, 128),
        ] {
            assert_eq!(files(&other, 1, 1536), by_teams);
        }
    }

    #[test]
    fn every_stretch_runs_at_once() {
        for multiprocessors in [132, 114] {
            let card = Card {
                multiprocessors,
                ..Card::HOPPER
            };
            for (op, seq) in [(few(28, 4, 128), 1536), (few(1, 1, 64), 1500)] {
                let (_, plan, commands) = lower_for(&op, DType::Bf16, 1, seq, card);
                let launches = launches(&commands);
                assert!(launches[2].1.grid[0] as usize <= multiprocessors);
                assert!(launches[2].1.shared_bytes <= 227 << 10);
                let source = [1, seq, op.heads * op.head_dim];
                let source = cinch_graph::TensorType::new(source, DType::Bf16);
                let layout = op.hopper_dealt(&source, multiprocessors).unwrap();
                assert!(plan.workspace(1).unwrap().bytes >= layout.parts().bytes());
            }
        }
    }

    #[test]
    fn packed_gradients_are_columns_of_one_tensor() {
        let op = op::Attention {
            inputs: Packed,
            ..few(4, 2, 64)
        };
        let (graph, plan, commands) = lower_for(&op, DType::Bf16, 2, 1000, Card::HOPPER);
        let launches = launches(&commands);
        let gradient = plan.placement(graph.nodes[1].outputs[0]).unwrap().offset;
        let gradients =
            [0, 4 * 64 * 2, 6 * 64 * 2].map(|bytes| Argument::Address(gradient + bytes));
        assert_eq!(launches[2].2[9..11], gradients[1..]);
        assert_eq!(launches[3].2[2..5], gradients);
        // 16 pieces of 64 positions: of keys and values of each key head, and of each head's queries.
        assert_eq!(launches[3].1.grid[0], 2 * 16 * (2 + 2 + 4));
    }
}
