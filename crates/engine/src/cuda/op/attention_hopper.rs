//! Attention on Hopper cards: kernels that stay on their multiprocessors, fed by the copy engine.
//! The backward is two launches: what it reads of each query, then all three gradients. How it is
//! laid out, `graph/src/op/attention/hopper.rs` says. Short sequences of narrow heads have kernels
//! of their own (`attention_hopper_short.rs`).

use cinch_graph::op::{self, HopperBackward};

use crate::cuda::command::{Argument, Kernel, LaunchShape, TensorMapAt};
use crate::cuda::lowering::Lowering;

/// Keys of a tile of the forward.
const KEYS: usize = 128;
/// Queries of a warpgroup, and its threads.
const GROUP_ROWS: usize = 64;
const GROUP_THREADS: usize = 128;
/// A barrier in shared memory.
pub(super) const BARRIER_BYTES: usize = 8;
/// Elements are of 16 bits.
pub(super) const ELEMENT_BYTES: usize = 2;
/// Keys and values of the heads that run at the same time fit into the cache.
const CACHE_BYTES: usize = 24 << 20;

/// An instance of the forward.
struct Forward {
    function: &'static str,
    /// Warpgroups with queries.
    groups: usize,
    /// Tiles of keys, and of values, on their way.
    stages: usize,
}

impl Forward {
    fn of(op: &op::Attention) -> Self {
        let (function, groups, stages) = match (op.head_dim, op.dropout) {
            (32, None) => ("attention_forward_hopper_32", 3, 4),
            (32, Some(_)) => ("attention_forward_hopper_32_dropout", 3, 4),
            (64, None) => ("attention_forward_hopper_64", 3, 4),
            (64, Some(_)) => ("attention_forward_hopper_64_dropout", 2, 4),
            (_, None) => ("attention_forward_hopper_128", 2, 2),
            (_, Some(_)) => ("attention_forward_hopper_128_dropout", 2, 2),
        };
        Self {
            function,
            groups,
            stages,
        }
    }

    fn rows(&self) -> usize {
        self.groups * GROUP_ROWS
    }

    fn shape(&self, blocks: usize, head_dim: usize) -> LaunchShape {
        // Queries and output, keys and values; their barriers, those of the queries, one more.
        let rows = 2 * self.rows() + 2 * self.stages * KEYS;
        let barriers = 4 * self.stages + 3;
        launch_shape(
            blocks,
            self.groups + 1,
            rows * head_dim * ELEMENT_BYTES + barriers * BARRIER_BYTES,
        )
    }
}

pub(super) fn launch_shape(blocks: usize, groups: usize, shared_bytes: usize) -> LaunchShape {
    LaunchShape {
        grid: [blocks as u32, 1, 1],
        block: [(groups * GROUP_THREADS) as u32, 1, 1],
        shared_bytes: shared_bytes as u32,
    }
}

/// An op with the tensors of its node.
pub(super) struct Site<'a> {
    op: &'a op::Attention,
    pub batch: usize,
    pub seq: usize,
    /// Queries, keys and values.
    pub sources: [Argument; 3],
    /// Elements from one row of the queries, and of keys and values, to the next.
    pub strides: [usize; 2],
    pub random: [Argument; 3],
    pub lengths: Argument,
    starts: Argument,
}

impl<'a> Site<'a> {
    /// `first` is the input that holds the queries, `extras` the first of those that hold random
    /// state, lengths and starts.
    pub fn new(x: &Lowering<'_>, op: &'a op::Attention, first: usize, extras: usize) -> Self {
        let dims = x.input_type(first).shape;
        let (batch, seq) = (dims.dims()[0], dims.dims()[1]);
        let places = op.places();
        let stride = |place: usize| x.input_type(first + places[place].0).width();
        let map = |place: usize, heads: usize| {
            let (input, column) = places[place];
            Argument::TensorMap(TensorMapAt {
                address: x.input(first + input) + (column * ELEMENT_BYTES) as u64,
                columns: op.head_dim,
                heads,
                rows: seq,
                batch,
                row_stride: stride(place),
            })
        };
        Self {
            op,
            batch,
            seq,
            sources: [map(0, op.heads), map(1, op.kv_heads), map(2, op.kv_heads)],
            strides: [stride(0), stride(1)],
            random: x.dropout_arguments(op.dropout, Some(extras)),
            lengths: x.optional_input(op.lengths().map(|lengths| extras + lengths)),
            starts: x.optional_input(op.starts().map(|starts| extras + starts)),
        }
    }

    fn window(&self) -> usize {
        self.op.window.unwrap_or(self.seq).min(self.seq)
    }

    /// Of the backward: the gradient of the output.
    pub fn output_gradient(&self, x: &Lowering<'_>) -> Argument {
        Argument::TensorMap(TensorMapAt {
            address: x.input(0),
            columns: self.op.head_dim,
            heads: self.op.heads,
            rows: self.seq,
            batch: self.batch,
            row_stride: self.op.heads * self.op.head_dim,
        })
    }

    /// Of the backward: where the gradients of queries, keys and values go.
    pub fn gradients(&self, x: &Lowering<'_>) -> [Argument; 3] {
        self.op.places().map(|(output, column)| {
            Argument::Address(x.output(output) + (column * ELEMENT_BYTES) as u64)
        })
    }

    /// What forward and backward take alike: sizes, scale, order and what is hidden.
    fn scalars(&self) -> Vec<Argument> {
        let sizes = [self.batch, self.seq, self.op.heads, self.op.kv_heads];
        let mut scalars: Vec<Argument> = sizes.map(int).to_vec();
        scalars.push(Argument::F32(self.op.scale as f32));
        scalars.push(Argument::I32(i32::from(self.op.causal)));
        scalars.extend(self.random);
        scalars.extend([self.lengths, int(self.window()), self.starts]);
        scalars
    }
}

pub(super) fn int(value: usize) -> Argument {
    Argument::I32(value as i32)
}

/// What the backward reads of each query, and where its counters start.
pub(super) struct Statistics {
    pub lse: Argument,
    pub delta: Argument,
    pub turns: Argument,
    pub num_turns: usize,
    pub lows: Argument,
    pub tile_rows: usize,
    /// Positions of a sequence in whole blocks.
    pub padded: usize,
}

impl Statistics {
    pub fn launch(&self, x: &mut Lowering<'_>, site: &Site<'_>) {
        let (op, sources) = (site.op, site.op.num_sources());
        let given = [0, sources + 1, sources + 2].map(|input| x.input_argument(input));
        let lanes = site.batch * self.padded * op.heads * STATISTICS_LANES;
        let mut arguments = given.to_vec();
        arguments.extend([self.lse, self.delta, self.turns, self.lows]);
        arguments.extend([self.num_turns, site.batch, site.seq, op.heads].map(int));
        arguments.extend([int(op.head_dim), site.lengths, int(site.window())]);
        arguments.extend([site.starts, int(self.tile_rows)]);
        x.launch(
            kernel("attention_statistics_hopper"),
            LaunchShape::linear(lanes.div_ceil(256), 256),
            arguments,
        );
    }
}

/// Lanes for a position of a head, each with eight columns at a time.
const STATISTICS_LANES: usize = 8;

pub fn attention(x: &mut Lowering<'_>, op: &op::Attention) {
    let site = Site::new(x, op, 0, op.num_sources());
    let instance = Forward::of(op);
    let pieces = (site.batch * op.heads).saturating_mul(site.seq.div_ceil(instance.rows()));
    let key_bytes = site.seq * op.head_dim * 2 * ELEMENT_BYTES * op.kv_heads / op.heads;
    let together = (CACHE_BYTES / key_bytes.max(1)).clamp(1, site.batch * op.heads);
    let mut arguments = site.sources.to_vec();
    arguments.extend([x.output_argument(0), x.output_argument(1)]);
    arguments.extend(site.scalars());
    arguments.push(int(together));
    x.launch(
        Kernel {
            file: "attention_hopper",
            function: instance.function,
        },
        instance.shape(pieces.min(x.card.multiprocessors), op.head_dim),
        arguments,
    );
}

pub fn attention_backward(x: &mut Lowering<'_>, op: &op::Attention, layout: &HopperBackward) {
    let site = Site::new(x, op, 1, op.num_sources() + 3);
    let workspace = x.workspace().0;
    let [lse, delta, sums, key_sums, turns, lows] = layout
        .parts()
        .offsets()
        .map(|offset| Argument::Address(workspace + offset));
    let [query_turns, key_turns] = layout.turns();
    let bounded = op.window.is_some() || op.documents;
    let lows = if bounded { lows } else { Argument::Null };
    let statistics = Statistics {
        lse,
        delta,
        turns,
        num_turns: query_turns + key_turns,
        lows,
        tile_rows: layout.tile_rows,
        padded: layout.padded(),
    };
    statistics.launch(x, &site);

    let mut arguments = site.sources.to_vec();
    arguments.extend([site.output_gradient(x), lse, delta, sums, key_sums, turns]);
    arguments.extend([behind(turns, query_turns), lows]);
    arguments.extend(site.gradients(x));
    arguments.extend(site.strides.map(|stride| Argument::U32(stride as u32)));
    arguments.extend(site.scalars());
    arguments.extend([layout.rounds, layout.apart, layout.key_places].map(int));
    let function = match (op.head_dim, op.dropout) {
        (64, None) => "attention_backward_hopper_64",
        (64, Some(_)) => "attention_backward_hopper_64_dropout",
        (_, None) => "attention_backward_hopper_128",
        (_, Some(_)) => "attention_backward_hopper_128_dropout",
    };
    // Keys and values, two stages of queries and do with their numbers, of dS and of sums.
    let (head_dim, rows) = (op.head_dim, layout.tile_rows);
    let elements = (2 * KEYS + 4 * rows) * head_dim + 2 * KEYS * rows;
    let numbers = 2 * rows * head_dim + 4 * rows;
    let barriers = 15;
    let bytes = elements * ELEMENT_BYTES + numbers * size_of::<f32>() + barriers * BARRIER_BYTES;
    let blocks = layout.teams * layout.blocks;
    x.launch(kernel(function), launch_shape(blocks, 3, bytes), arguments);
}

/// The counter behind so many others.
fn behind(counters: Argument, count: usize) -> Argument {
    match counters {
        Argument::Address(address) => {
            Argument::Address(address + (count * size_of::<u32>()) as u64)
        }
        other => other,
    }
}

fn kernel(function: &'static str) -> Kernel {
    Kernel {
        file: "attention_hopper_backward",
        function,
    }
}

#[cfg(test)]
mod tests {
    use cinch_graph::DType;
    use cinch_graph::op::AttentionInputs::{Packed, Separate};

    use super::super::attention::tests::{launches, lower_for, op};
    use super::*;
    use crate::cuda::lowering::Card;

    /// What a block of a Hopper card has.
    const SHARED_BYTES: u32 = 227 << 10;

    #[test]
    fn hopper_takes_its_widths_in_16_bits() {
        let files = |head_dim, dtype, card| {
            let (_, _, commands) = lower_for(&op(Packed, 2, 2, head_dim), dtype, 1, 7, card);
            let launches = launches(&commands);
            let files: Vec<_> = launches.iter().map(|launch| launch.0.file).collect();
            files
        };
        for head_dim in [64, 128] {
            for dtype in [DType::Bf16, DType::F16] {
                let backward = "attention_hopper_backward";
                assert_eq!(
                    files(head_dim, dtype, Card::HOPPER),
                    ["attention_hopper", backward, backward]
                );
                assert_eq!(files(head_dim, dtype, Card::ANY)[0], "attention_tensor");
            }
            assert_eq!(
                files(head_dim, DType::F32, Card::HOPPER)[0],
                "attention_any"
            );
        }
        // The backward of heads of 32 in causal order takes two passes.
        let rest = "attention_backward";
        assert_eq!(
            files(32, DType::Bf16, Card::HOPPER),
            ["attention_hopper", rest, rest, rest]
        );
        assert_eq!(files(80, DType::Bf16, Card::HOPPER)[0], "attention_any");
    }

    #[test]
    fn every_block_of_the_backward_runs_at_once() {
        for (heads, kv_heads, batch, seq) in [(12, 12, 32, 1024), (28, 4, 1, 1536), (7, 1, 1, 9000)]
        {
            for multiprocessors in [132, 114] {
                let card = Card {
                    multiprocessors,
                    ..Card::HOPPER
                };
                let op = op(Separate, heads, kv_heads, 128);
                let (_, plan, commands) = lower_for(&op, DType::Bf16, batch, seq, card);
                let launches = launches(&commands);
                for (_, shape, _) in &launches {
                    assert!(shape.shared_bytes <= SHARED_BYTES);
                }
                assert!(launches[0].1.grid[0] as usize <= multiprocessors);
                assert!(launches[2].1.grid[0] as usize <= multiprocessors);
                let source = cinch_graph::TensorType::new([batch, seq, heads * 128], DType::Bf16);
                let layout = op.hopper_backward(&source, multiprocessors).unwrap();
                assert!(plan.workspace(1).unwrap().bytes >= layout.parts().bytes());
            }
        }
    }

    #[test]
    fn sequences_of_more_blocks_than_run_at_once_take_two_passes() {
        let op = op(Separate, 1, 1, 64);
        let (_, _, commands) = lower_for(&op, DType::Bf16, 1, 132 * KEYS + 1, Card::HOPPER);
        let files: Vec<_> = launches(&commands).iter().map(|l| l.0.file).collect();
        let rest = "attention_backward";
        assert_eq!(files, ["attention_hopper", rest, rest, rest]);
    }

    #[test]
    fn packed_heads_are_columns_of_one_tensor() {
        let (graph, plan, commands) =
            lower_for(&op(Packed, 4, 2, 64), DType::Bf16, 2, 50, Card::HOPPER);
        let launches = launches(&commands);
        let qkv = plan.placement(graph.nodes[0].inputs[0]).unwrap().offset;
        let columns = [(0, 4), (4 * 64 * 2, 2), (6 * 64 * 2, 2)].map(|(bytes, heads)| {
            Argument::TensorMap(TensorMapAt {
                address: qkv + bytes,
                columns: 64,
                heads,
                rows: 50,
                batch: 2,
                row_stride: 8 * 64,
            })
        });
        assert_eq!(launches[0].2[..3], columns);
        assert_eq!(launches[2].2[..3], columns);
        let gradient = plan.placement(graph.nodes[1].outputs[0]).unwrap().offset;
        let gradients =
            [0, 4 * 64 * 2, 6 * 64 * 2].map(|bytes| Argument::Address(gradient + bytes));
        assert_eq!(launches[2].2[11..14], gradients);
    }
}
