//! How long a step will take: each node's operations and bytes against the rates of a card.
//!
//! A node takes the longer of its arithmetic and its traffic, and each of its commands costs the
//! time between two kernels. Matrix products run at the card's matrix rate where their tiles fill
//! the multiprocessors; attention and the scan, which no library runs, at shares of the card's
//! rates that were measured and are constants here. Pure, like the plan it reads.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use cinch_config::Config;
use cinch_graph::op::{AdamW, Attention, AttentionBackward, CrossEntropy, Declare, Op, Scan};
use cinch_graph::{DType, Graph, Node, Target, TensorType, TrainingGraph};
use cinch_plan::num_micro_nodes;

use crate::{Card, StepPlan};

/// The predicted time of one optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    pub seconds: f64,
    /// By the name of the op; what the host adds is not among them.
    pub by_op: BTreeMap<&'static str, f64>,
}

impl StepPlan {
    /// Predicts a step on a card. `tf32` as in training.
    pub fn predict(&self, card: &Card, tf32: bool) -> Prediction {
        let times = StepTimes::new(&self.training, &self.config, card, tf32);
        let mut by_op = BTreeMap::new();
        for (node, seconds) in self.training.nodes.iter().zip(&times.by_node) {
            *by_op.entry(node.op.name()).or_insert(0.0) += seconds;
        }
        Prediction {
            seconds: times.host + by_op.values().sum::<f64>(),
            by_op,
        }
    }
}

/// What each node adds to a step, over all micro batches.
pub(crate) struct StepTimes {
    pub by_node: Vec<f64>,
    /// Besides the nodes.
    pub host: f64,
}

impl StepTimes {
    pub fn new(graph: &TrainingGraph, config: &Config, card: &Card, tf32: bool) -> Self {
        let micro = num_micro_nodes(graph);
        let accumulation = config.batch.accumulation as f64;
        let rates = Rates {
            card,
            matrix: card.matrix_flops(graph.compute, tf32),
            offloaded: config.batch.offload,
            update_launches: graph.backward_passes.is_some(),
        };
        let by_node = graph.nodes.iter().enumerate().map(|(index, node)| {
            let times = if index < micro { accumulation } else { 1.0 };
            times
                * match card.target {
                    Target::Cpu => rates.cpu_node(graph, node),
                    Target::Cuda => rates.gpu_node(graph, node),
                }
        });
        let host = match card.target {
            Target::Cpu => 0.0,
            Target::Cuda => HOST_STEP + accumulation * HOST_MICRO,
        };
        Self {
            by_node: by_node.collect(),
            host,
        }
    }
}

/// What the host does between two steps of a GPU while the GPU waits: a replay is started, the
/// loss and the norm are read back.
const HOST_STEP: f64 = 60e-6;
/// And per micro batch: tokens and targets are copied in.
const HOST_MICRO: f64 = 25e-6;

/// From the end of one kernel of a recorded step to the time at which the next one runs at full
/// speed.
const LAUNCH: f64 = 2.0e-6;

/// The share of the copy bandwidth that kernels reach which read and write every element once
/// and wait for nothing.
const STREAM_SHARE: f64 = 0.93;
/// Norms read a row, wait for its statistics and draw random numbers before they write it.
const NORM_FORWARD: f64 = 0.55;
/// Their backward, and the norm from known statistics.
const NORM_SHARE: f64 = 0.72;

/// Tiles of an output that a multiprocessor computes at once: rows, columns, and the share of the
/// matrix rate with such a tile. Smaller tiles read each operand more often from shared memory.
const TILES: [(usize, usize, f64); 4] = [
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 128, 0.85),
    (64, 128, 0.60),
];
/// Into how many parts the inner dimension may be cut where the tiles are too few.
const SPLITS: [usize; 7] = [1, 2, 3, 4, 6, 8, 16];
/// A part of the inner dimension is not shorter.
const SHORTEST_PART: usize = 256;
/// Filling the pipeline of a tile and storing it, which only partly overlaps the next tile.
const TILE_EDGE: f64 = 1.0e-6;

/// The share of the matrix rate that attention reaches on its products: these are as small as a
/// head is wide, and exponentials stand between them.
const ATTENTION_FORWARD: f64 = 0.25;
/// Its backward, of the five products that are counted (it computes seven).
const ATTENTION_BACKWARD: f64 = 0.228;
/// The same with dropout: every probability needs a random number, made again in the backward.
const ATTENTION_FORWARD_DROPOUT: f64 = 0.158;
const ATTENTION_BACKWARD_DROPOUT: f64 = 0.168;
/// Single-precision attention, of the single-precision rate.
const ATTENTION_SINGLE: f64 = 0.15;
/// Rows that a block of attention has, and blocks that a multiprocessor holds.
const ATTENTION_ROWS: usize = 64;
const ATTENTION_RESIDENT: usize = 2;

/// The scan's time is that of instructions: exponentials and what stands around them.
const SCAN_FORWARD: ScanRate = ScanRate {
    step: 39e-9,
    latency: 92e-9,
    local: 0.9,
};
/// Backward: each tile forward again, then the adjoint.
const SCAN_BACKWARD: ScanRate = ScanRate {
    step: 143e-9,
    latency: 300e-9,
    local: 0.15,
};

struct ScanRate {
    /// Of one block of 32 channels with up to 16 states on a multiprocessor that it shares with
    /// others.
    step: f64,
    /// A step cannot be shorter, because it waits for the one before it.
    latency: f64,
    /// The share of a pass that finding the ends of segments adds, where time is cut.
    local: f64,
}

struct Rates<'a> {
    card: &'a Card,
    matrix: f64,
    /// Optimizer states are in host memory.
    offloaded: bool,
    /// Weights are updated one by one, not all in a few launches.
    update_launches: bool,
}

impl Rates<'_> {
    fn gpu_node(&self, graph: &Graph, node: &Node) -> f64 {
        let (inputs, outputs) = (graph.types(&node.inputs), graph.types(&node.outputs));
        let flops = graph.flops(node) as f64;
        let stream = self.stream(graph.bytes(node));
        let single = !matches!(graph.compute, DType::Bf16 | DType::F16);
        match &node.op {
            Op::Linear(op) => {
                let (x, w) = (&inputs[0], &inputs[1]);
                let cast = if op.bias && !single { LAUNCH } else { 0.0 };
                cast + self.product([x.rows(), w.rows(), w.width()], &outputs[0], stream)
            }
            Op::LinearGradInput(op) => {
                let (dy, w) = (&inputs[0], &inputs[1]);
                // Columns that get no gradient are zeroed first.
                let cleared = if !op.accumulate && w.width() < op.width {
                    LAUNCH + self.stream(outputs[0].bytes())
                } else {
                    0.0
                };
                cleared + self.product([dy.rows(), w.width(), dy.width()], &outputs[0], stream)
            }
            Op::LinearGradWeight(op) => {
                let dy = &inputs[0];
                let shape = [dy.width(), op.inputs, dy.rows()];
                let bias = if op.bias {
                    2.0 * LAUNCH + self.stream(dy.bytes())
                } else {
                    0.0
                };
                bias + self.product(shape, &outputs[0], stream)
            }
            Op::CrossEntropy(op) => self.cross_entropy(op, &inputs),
            Op::Attention(op) => {
                let share = match op.dropout {
                    _ if single => ATTENTION_SINGLE,
                    None => ATTENTION_FORWARD,
                    Some(_) => ATTENTION_FORWARD_DROPOUT,
                };
                let tail = self.attention_tail(op, &inputs[0]);
                LAUNCH + stream.max(tail * flops / (self.matrix * share))
            }
            Op::AttentionBackward(AttentionBackward(op)) => {
                let share = match op.dropout {
                    _ if single => ATTENTION_SINGLE,
                    None => ATTENTION_BACKWARD,
                    Some(_) => ATTENTION_BACKWARD_DROPOUT,
                };
                let tail = self.attention_tail(op, &inputs[1]);
                3.0 * LAUNCH + stream.max(tail * flops / (self.matrix * share))
            }
            Op::Scan(op) => {
                let partition = op.cuda_partition(&inputs[0]);
                let cut = [partition.blocks, partition.segment, partition.segments];
                LAUNCH + stream.max(self.scan(op, cut, &inputs[0], &SCAN_FORWARD))
            }
            Op::ScanBackward(op) => {
                let p = op.0.cuda_partition(&inputs[1]);
                let cut = [p.blocks, p.backward_segment, p.backward_segments];
                3.0 * LAUNCH + stream.max(self.scan(&op.0, cut, &inputs[1], &SCAN_BACKWARD))
            }
            Op::Norm(_) => LAUNCH + stream * STREAM_SHARE / NORM_FORWARD,
            Op::NormApply(_) => LAUNCH + stream * STREAM_SHARE / NORM_SHARE,
            Op::NormBackward(_) => 2.0 * LAUNCH + stream * STREAM_SHARE / NORM_SHARE,
            Op::AdamW(op) => self.update(op, &inputs, &outputs, stream),
            Op::EmbeddingBackward(_) => 6.0 * LAUNCH + stream,
            Op::GradientNorm(_) | Op::ConvolutionBackward(_) => 2.0 * LAUNCH + stream,
            _ => LAUNCH + stream,
        }
    }

    /// An update: its traffic on the card, or that of the states over the bus, which runs in both
    /// directions at once.
    fn update(
        &self,
        op: &AdamW,
        inputs: &[TensorType],
        outputs: &[TensorType],
        stream: f64,
    ) -> f64 {
        let launch = if self.update_launches { LAUNCH } else { 0.0 };
        if !self.offloaded {
            return launch + stream;
        }
        let layout = op.layout();
        let states = [layout.m, layout.v].into_iter();
        let states = states.chain(layout.scales.into_iter().flatten());
        let states: u64 = states.map(|output| outputs[output].bytes()).sum();
        let all = op.bytes(inputs, outputs);
        let here = self.stream(all.saturating_sub(2 * states));
        launch + here.max(states as f64 / self.card.host_bandwidth)
    }

    /// Bytes that are read or written once.
    fn stream(&self, bytes: u64) -> f64 {
        bytes as f64 / (self.card.bandwidth * STREAM_SHARE)
    }

    /// A product of `[m, n, k]`, or its traffic where that takes longer.
    fn product(&self, shape: [usize; 3], c: &TensorType, stream: f64) -> f64 {
        LAUNCH + stream.max(self.tiles(shape, c.dtype))
    }

    /// The best of the ways to cut a product into tiles: as many waves as it takes to give every
    /// tile to a multiprocessor, each as long as one tile.
    fn tiles(&self, [m, n, k]: [usize; 3], c: DType) -> f64 {
        let processors = self.card.multiprocessors;
        let rate = self.matrix / processors as f64;
        let mut best = f64::INFINITY;
        for (rows, columns, share) in TILES {
            let tiles = m.div_ceil(rows) * n.div_ceil(columns);
            for split in SPLITS {
                if split > 1 && k / split < SHORTEST_PART {
                    break;
                }
                let waves = (tiles * split).div_ceil(processors) as f64;
                let operations = (2 * rows * columns) as f64 * k.div_ceil(split) as f64;
                // The parts' sums are written and read again, in single precision.
                let sums = if split > 1 {
                    LAUNCH + self.stream((split * m * n) as u64 * 2 * 4 + (m * n) as u64 * c.size())
                } else {
                    0.0
                };
                best = best.min(waves * (operations / (rate * share) + TILE_EDGE) + sums);
            }
        }
        best
    }

    /// Chunk by chunk: logits, their gradient in place, and the products of that gradient.
    fn cross_entropy(&self, op: &CrossEntropy, inputs: &[TensorType]) -> f64 {
        let (h, w) = (&inputs[0], &inputs[1]);
        let (rows, width, vocabulary) = (h.rows(), h.width(), w.rows());
        let chunk = op.chunk_rows.clamp(1, rows.max(1));
        let logits = (chunk * vocabulary) as u64 * h.dtype.size();
        let (hidden, weight) = ((chunk * width) as u64 * h.dtype.size(), w.bytes());
        let both = self.stream(hidden + weight + logits);
        let mut seconds = self.product([chunk, vocabulary, width], h, both);
        // Read twice (the largest and the sum, then the gradient), written once.
        seconds += LAUNCH + self.stream(3 * logits);
        if op.gradient {
            seconds += self.product([chunk, width, vocabulary], h, both);
        }
        if op.weight {
            let sums = 2 * (vocabulary * width) as u64 * h.dtype.accumulator().size();
            let traffic = self.stream(hidden + logits + sums);
            seconds += LAUNCH + traffic.max(self.tiles([vocabulary, width, chunk], DType::F32));
        }
        LAUNCH + seconds * rows as f64 / chunk as f64
    }

    /// How much longer attention takes than its arithmetic: blocks of later rows have more keys
    /// to read, so that about one wave of blocks runs on a card that is no longer full.
    fn attention_tail(&self, op: &Attention, source: &TensorType) -> f64 {
        let rows = source.shape.dims()[1].div_ceil(ATTENTION_ROWS);
        let blocks = source.shape.dims()[0] * op.heads * rows;
        let resident = ATTENTION_RESIDENT * self.card.multiprocessors;
        1.0 + resident as f64 / blocks.max(resident) as f64
    }

    /// `[blocks, segment, segments]`: each multiprocessor runs its share of the blocks of channels
    /// times segments of time, step by step.
    fn scan(&self, op: &Scan, cut: [usize; 3], x: &TensorType, rate: &ScanRate) -> f64 {
        let [blocks, segment, segments] = cut;
        let all = blocks * segments * x.shape.dims()[0];
        let share = all.div_ceil(self.card.multiprocessors) as f64;
        let work = op.cuda_partition(x).states_per_thread as f64 / 4.0;
        let step = (share * work * rate.step).max(rate.latency);
        let local = if segments > 1 { rate.local } else { 0.0 };
        (1.0 + local) * segment as f64 * step
    }

    /// On the CPU the products run at the measured rate whatever their shape. The shares of the
    /// others are those of vector code with exponentials against fused multiply-adds.
    fn cpu_node(&self, graph: &Graph, node: &Node) -> f64 {
        let share = match &node.op {
            Op::Linear(_) | Op::LinearGradInput(_) | Op::LinearGradWeight(_) | Op::Logits(_) => 0.9,
            Op::CrossEntropy(_) => 0.85,
            Op::Attention(_) | Op::AttentionBackward(_) => 0.5,
            Op::Scan(_) | Op::ScanBackward(_) => 0.25,
            _ => 0.4,
        };
        let arithmetic = graph.flops(node) as f64 / (self.matrix * share);
        arithmetic.max(graph.bytes(node) as f64 / self.card.bandwidth)
    }
}
