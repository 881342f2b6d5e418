//! How long a step will take: what each node declares to cost against the rates of a card.
//!
//! A kernel takes the longer of its arithmetic and its traffic, and each launch costs the time
//! between two kernels. Matrix products run at the card's matrix rate where their tiles fill the
//! multiprocessors; what no library runs, at the share of the card's rates that its op declares.
//! What joins a product is part of its kernel ([`joined`]). A CPU has rates of its own ([`cpu`]).
//! Pure, like the plan it reads.

mod bus;
mod cpu;
mod joined;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use cinch_config::Config;
use cinch_device::{Card, Generation};
use cinch_graph::op::{Fetch, Op};
use cinch_graph::{Arithmetic, BlockWork, Cost, DType, KernelCost, Phase, Target, TrainingGraph};
use cinch_plan::num_micro_nodes;

use crate::StepPlan;
use crate::network::NetworkTimes;

/// The predicted time of one optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prediction {
    pub seconds: f64,
    /// By the name of the op; what the host adds is not among them. What nodes wait for the
    /// network is under `network`.
    pub by_op: BTreeMap<&'static str, f64>,
    /// All that the network does, hidden or not.
    pub network: NetworkTimes,
}

impl StepPlan {
    /// Predicts a step on a card, of the variant that takes longest. `tf32` as in training.
    pub fn predict(&self, card: &Card, tf32: bool) -> Prediction {
        let predicted = self.variants().iter().map(|variant| {
            let times = StepTimes::new(&variant.training, &self.config, card, tf32);
            let mut by_op = BTreeMap::new();
            for (node, seconds) in variant.training.nodes.iter().zip(&times.by_node) {
                *by_op.entry(node.op.name()).or_insert(0.0) += seconds;
            }
            let bus = times.bus_by_block.iter().sum::<f64>();
            if bus > 0.0 {
                *by_op.entry(Op::from(Fetch).name()).or_insert(0.0) += bus;
            }
            let exposed = times.network.exposed();
            if exposed > 0.0 {
                by_op.insert("network", exposed);
            }
            Prediction {
                seconds: times.total(),
                by_op,
                network: times.network,
            }
        });
        let longest = predicted.max_by(|a, b| a.seconds.total_cmp(&b.seconds));
        longest.unwrap_or_default()
    }
}

/// What each node adds to a step, over all micro batches.
pub struct StepTimes {
    pub by_node: Vec<f64>,
    /// What the nodes of each block wait for what crosses the bus.
    pub bus_by_block: Vec<f64>,
    /// What the ranks exchange.
    pub network: NetworkTimes,
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
        let nodes = graph.nodes.iter();
        let once: Vec<f64> = match (card.target, card.generation) {
            (Target::Cpu, _) => {
                let cpu = cpu::Rates::new(card, rates.matrix);
                nodes.map(|node| cpu.node(&graph.cpu_cost(node))).collect()
            }
            (Target::Cuda, Some(Generation::Hopper)) => {
                let costs = joined::costs(graph);
                costs.iter().map(|cost| rates.gpu_node(cost)).collect()
            }
            (Target::Cuda, _) => nodes
                .map(|node| rates.gpu_node(&graph.cuda_cost(node)))
                .collect(),
        };
        let nodes = graph.nodes.iter().zip(once).enumerate();
        let by_node: Vec<f64> = nodes
            .map(|(index, (node, seconds))| {
                let is_micro = index < micro && node.phase != Phase::Exchange;
                if is_micro {
                    accumulation * seconds
                } else {
                    seconds
                }
            })
            .collect();
        let host = match card.target {
            Target::Cpu => 0.0,
            Target::Cuda => HOST_STEP + accumulation * HOST_MICRO,
        };
        let bus_by_block = match card.target {
            Target::Cpu => vec![0.0; graph.blocks.len()],
            Target::Cuda => bus::waits(graph, &by_node, accumulation, card.host_bandwidth),
        };
        Self {
            network: NetworkTimes::new(graph, &by_node, config, card),
            by_node,
            bus_by_block,
            host,
        }
    }

    /// Of the whole step.
    pub fn total(&self) -> f64 {
        let of_blocks = self.bus_by_block.iter();
        self.host + self.network.exposed() + self.by_node.iter().chain(of_blocks).sum::<f64>()
    }
}

/// What the host does between two steps of a GPU while the GPU waits: a replay is started, the
/// loss and the norm are read back.
const HOST_STEP: f64 = 60e-6;
/// And per micro batch: tokens and targets are copied in.
const HOST_MICRO: f64 = 25e-6;

/// From the end of one kernel of a recorded step to the time at which the next one runs at full
/// speed.
const LAUNCH: f64 = 2.4e-6;

/// The share of the copy bandwidth that kernels reach which read and write every element once
/// and wait for nothing.
const STREAM_SHARE: f64 = 0.93;

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

struct Rates<'a> {
    card: &'a Card,
    matrix: f64,
    /// Optimizer states are in host memory.
    offloaded: bool,
    /// Updates stand apart, so that none shares its launch with others.
    update_launches: bool,
}

impl Rates<'_> {
    fn gpu_node(&self, cost: &Cost) -> f64 {
        let seconds = self.kernels(&cost.kernels);
        match &cost.chunks {
            None => seconds,
            Some(chunks) => {
                let chunk = self.kernels(&chunks.kernels);
                seconds + chunk * chunks.rows as f64 / chunks.chunk_rows as f64
            }
        }
    }

    fn kernels(&self, kernels: &[KernelCost]) -> f64 {
        kernels.iter().map(|kernel| self.kernel(kernel)).sum()
    }

    fn kernel(&self, kernel: &KernelCost) -> f64 {
        let launches = if kernel.merges && !self.update_launches {
            0.0
        } else {
            f64::from(kernel.launches) * LAUNCH
        };
        let arithmetic = self.arithmetic(&kernel.arithmetic);
        launches + self.traffic(kernel).max(arithmetic)
    }

    /// A kernel's bytes on the card, or those of the states over the bus, which runs in both
    /// directions at once.
    fn traffic(&self, kernel: &KernelCost) -> f64 {
        if self.offloaded && kernel.state_bytes > 0 {
            let moved = kernel.state_bytes.saturating_mul(2);
            let here = self.stream(kernel.bytes.saturating_sub(moved));
            return here.max(kernel.state_bytes as f64 / self.card.host_bandwidth);
        }
        let stream = self.stream(kernel.bytes);
        match kernel.bandwidth_share {
            None => stream,
            Some(share) => stream * STREAM_SHARE / share,
        }
    }

    fn arithmetic(&self, arithmetic: &Arithmetic) -> f64 {
        let processors = self.card.multiprocessors;
        match *arithmetic {
            Arithmetic::Hidden => 0.0,
            Arithmetic::Product { m, n, k, stored } => self.tiles([m, n, k], stored),
            Arithmetic::Blocks { flops, any, hopper } => {
                let is_hopper = self.card.generation == Some(Generation::Hopper);
                let BlockWork {
                    share,
                    blocks,
                    resident,
                } = hopper.filter(|_| is_hopper).unwrap_or(any);
                // Blocks end at different times, so that about one wave of them runs on a card
                // that is no longer full.
                let resident = resident.saturating_mul(processors);
                let tail = 1.0 + resident as f64 / blocks.max(resident) as f64;
                tail * flops as f64 / (self.matrix * share)
            }
            Arithmetic::Recurrence {
                blocks,
                steps,
                step,
                latency,
                passes,
            } => {
                let share = blocks.div_ceil(processors) as f64;
                passes * steps as f64 * (share * step).max(latency)
            }
        }
    }

    /// Bytes that are read or written once.
    fn stream(&self, bytes: u64) -> f64 {
        bytes as f64 / (self.card.bandwidth * STREAM_SHARE)
    }

    /// The best of the ways to cut a product into tiles: as many waves as it takes to give every
    /// tile to a multiprocessor, each as long as one tile.
    fn tiles(&self, [m, n, k]: [usize; 3], stored: DType) -> f64 {
        let processors = self.card.multiprocessors;
        let rate = self.matrix / processors as f64;
        let mut best = f64::INFINITY;
        for (rows, columns, share) in TILES {
            let tiles = m.div_ceil(rows).saturating_mul(n.div_ceil(columns));
            for split in SPLITS {
                if split > 1 && k / split < SHORTEST_PART {
                    break;
                }
                let waves = tiles.saturating_mul(split).div_ceil(processors) as f64;
                let operations = (2 * rows * columns) as f64 * k.div_ceil(split) as f64;
                // The parts' sums are written and read again, in single precision.
                let sums = if split > 1 {
                    let parts = (m as u64)
                        .saturating_mul(n as u64)
                        .saturating_mul(2 * split as u64 * DType::F32.size() + stored.size());
                    LAUNCH + self.stream(parts)
                } else {
                    0.0
                };
                best = best.min(waves * (operations / (rate * share) + TILE_EDGE) + sums);
            }
        }
        best
    }
}
