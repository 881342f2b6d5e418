//! What the network adds to a step: the time of its collectives, and how much of that nobody
//! notices because nodes compute meanwhile.
//!
//! Nodes that follow each other in one block, on one way, are a run. What a run sends goes out
//! while its like computes: the weights that a block gathers are the next one's, and its gradients
//! leave while the one before it is differentiated. Blocks are alike, so a run takes as long as its
//! own computing or its own messages, whichever is longer. That holds from the first block on;
//! what stands at an end (the first gather, the last gradients) is a run of its own with little to
//! compute, and so is waited for.

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
    /// Those of the seconds that nodes wait, by block.
    pub waits_by_block: Vec<f64>,
    /// And outside the blocks.
    pub waits_outside: f64,
    /// The runs outside the blocks, from which that follows.
    pub runs_outside: Vec<NetworkRun>,
}

/// What starting a collective costs on each rank, besides its messages.
const START: f64 = 10e-6;

/// Which nodes compute together while messages are under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Forward,
    Backward,
    Update,
}

/// Nodes of one block, or of none, that follow each other on one way.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkRun {
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
        let mut runs: Vec<NetworkRun> = Vec::new();
        for (node, &seconds) in graph.nodes.iter().zip(by_node) {
            let (block, way) = (node.block, way(node));
            if !runs
                .last()
                .is_some_and(|run| (run.block, run.way) == (block, way))
            {
                runs.push(NetworkRun {
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
            let waits = run.waits(accumulation, card.target);
            match run.block {
                Some(block) => network.waits_by_block[block.index()] += waits,
                None => {
                    network.waits_outside += waits;
                    network.runs_outside.push(run);
                }
            }
        }
        network
    }

    /// Those of the seconds that a step is longer by.
    pub fn exposed(&self) -> f64 {
        self.waits_outside + self.waits_by_block.iter().sum::<f64>()
    }
}

impl NetworkRun {
    /// The run of a longer chain: `more` times what the run has more in one chain than in another.
    #[must_use]
    pub fn extended_by(&self, built: &Self, less: &Self, more: f64) -> Self {
        let extend = |own: f64, built: f64, less: f64| own + more * (built - less);
        Self {
            computing: extend(self.computing, built.computing, less.computing),
            sending: extend(self.sending, built.sending, less.sending),
            exchanging: extend(self.exchanging, built.exchanging, less.exchanging),
            ..*self
        }
    }

    /// Seconds of a step for which its nodes wait.
    pub fn waits(&self, accumulation: usize, target: Target) -> f64 {
        let times = match self.way {
            Way::Update => 1.0,
            Way::Forward | Way::Backward => accumulation as f64,
        };
        // On the CPU nodes run one by one.
        let hidden = match target {
            Target::Cpu => 0.0,
            Target::Cuda => self.computing / times,
        };
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
    let rate = card.fabric.ring_rate(world.ranks_per_node(), world.nodes);
    bytes as f64 / rate + latency(rounds, world, card)
}

/// Those of them that the messages take besides their bytes.
fn latency(rounds: u64, world: &WorldConfig, card: &Card) -> f64 {
    let round = card
        .fabric
        .ring_latency(world.ranks_per_node(), world.nodes);
    START + rounds as f64 * round
}
