//! What the network adds to a step: the time of its collectives, less what computing hides of it.
//!
//! On the CPU a collective runs in the order of the nodes, and a step is longer by all of it.
//!
//! On a GPU collectives have a stream of their own, and a node waits for what it needs. Nodes that
//! follow each other in one block, on one way, are a run. What a run sends goes out while its like
//! computes: the weights that a block gathers are the next one's, and its gradients leave while the
//! one before it is differentiated. Blocks are alike, so a run takes as long as its own computing
//! or its own messages, whichever is longer. That holds from the first block on; what stands at an
//! end (the first gather, the last gradients) is a run of its own with little to compute, and
//! nothing hides it.

use cinch_config::{Config, WorldConfig};
use cinch_device::Card;
use cinch_graph::{BlockId, Graph, Node, Phase, Target};

/// The network's part of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkTimes {
    /// Of all collectives, as if nothing else ran.
    pub seconds: f64,
    /// Those of them that do not shrink with bandwidth.
    pub latency_seconds: f64,
    /// Bytes that each rank sends.
    pub bytes: u64,
    /// The seconds that nodes wait, by block.
    pub waits_by_block: Vec<f64>,
    /// And outside the blocks.
    pub waits_outside: f64,
}

/// What starting a collective costs on each rank, besides its messages.
const START: f64 = 10e-6;

/// Which nodes compute together while messages are under way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Forward,
    Backward,
    Update,
}

/// Nodes of one block that follow each other on one way.
struct Run {
    block: Option<BlockId>,
    way: Way,
    /// Over all micro batches.
    computing: f64,
    /// Of each micro batch.
    sending: f64,
    /// Once a step, in the last micro batch.
    exchanging: f64,
}

impl NetworkTimes {
    /// Of a graph whose nodes take so long, over all micro batches of a step.
    pub(crate) fn new(graph: &Graph, by_node: &[f64], config: &Config, card: &Card) -> Self {
        let mut network = Self {
            waits_by_block: vec![0.0; graph.blocks.len()],
            ..Self::default()
        };
        let world = &config.batch.world;
        if world.is_alone() {
            return network;
        }
        let accumulation = config.batch.accumulation;
        let mut runs: Vec<Run> = Vec::new();
        for (node, &seconds) in graph.nodes.iter().zip(by_node) {
            let (block, way) = (node.block, way(node));
            if !runs
                .last()
                .is_some_and(|run| (run.block, run.way) == (block, way))
            {
                runs.push(Run {
                    block,
                    way,
                    computing: 0.0,
                    sending: 0.0,
                    exchanging: 0.0,
                });
            }
            let Some(run) = runs.last_mut() else { continue };
            run.computing += seconds;
            let Some(wire) = graph.wire(node) else {
                continue;
            };
            let sending = transfer(wire.bytes, wire.rounds, world, card);
            let times = match node.phase {
                Phase::Exchange | Phase::Update => {
                    run.exchanging += sending;
                    1
                }
                _ => {
                    run.sending += sending;
                    accumulation
                }
            };
            network.seconds += times as f64 * sending;
            network.latency_seconds += times as f64 * latency(wire.rounds, world, card);
            let bytes = wire.bytes.saturating_mul(times as u64);
            network.bytes = network.bytes.saturating_add(bytes);
        }
        for run in runs {
            let waits = match card.target {
                Target::Cpu => run.messages(accumulation),
                Target::Cuda => run.longer_than_computing(accumulation),
            };
            match run.block {
                Some(block) => network.waits_by_block[block.index()] += waits,
                None => network.waits_outside += waits,
            }
        }
        network
    }

    /// Those of the seconds that a step is longer by.
    pub fn exposed(&self) -> f64 {
        self.waits_outside + self.waits_by_block.iter().sum::<f64>()
    }
}

impl Run {
    /// How often it runs in a step.
    fn times(&self, accumulation: usize) -> f64 {
        match self.way {
            Way::Update => 1.0,
            Way::Forward | Way::Backward => accumulation as f64,
        }
    }

    /// All that it sends.
    fn messages(&self, accumulation: usize) -> f64 {
        self.times(accumulation) * self.sending + self.exchanging
    }

    /// What is left of that where its computing hides as much as it is long.
    fn longer_than_computing(&self, accumulation: usize) -> f64 {
        let times = self.times(accumulation);
        let hidden = self.computing / times;
        let earlier = (self.sending - hidden).max(0.0);
        let last = (self.sending + self.exchanging - hidden).max(0.0);
        (times - 1.0) * earlier + last
    }
}

fn way(node: &Node) -> Way {
    match node.phase {
        Phase::Forward => Way::Forward,
        Phase::Recompute | Phase::Backward | Phase::Exchange => Way::Backward,
        Phase::Update => Way::Update,
    }
}

/// Seconds of a ring in which each rank sends so many bytes in so many rounds.
fn transfer(bytes: u64, rounds: u64, world: &WorldConfig, card: &Card) -> f64 {
    let per_node = world.ranks_per_node();
    let ring = card
        .fabric
        .ring_seconds(bytes as f64, rounds, per_node, world.nodes);
    START + ring
}

/// Those of them that the messages take besides their bytes.
fn latency(rounds: u64, world: &WorldConfig, card: &Card) -> f64 {
    transfer(0, rounds, world, card)
}
