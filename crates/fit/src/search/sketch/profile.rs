//! One built step, taken apart by block: what is alive in each run of a block, what the block
//! holds meanwhile for later, and how long it takes.

use cinch_config::Config;
use cinch_graph::{Graph, TrainingGraph};
use cinch_plan::{Demand, Options};
use cinch_step::{StepTimes, training_launches, whole_launches};

use super::Processor;

pub(super) struct Profile {
    /// The most that is alive before the first block, besides what is persistent.
    pub prelude: u64,
    runs: Runs,
    /// By run: the most that is alive, less what other blocks hold over the whole run.
    local: Vec<u64>,
    /// By block and run: what the block holds over the whole run of another.
    kept: Vec<Vec<u64>>,
}

impl Profile {
    pub fn new(step: &TrainingGraph, options: Options) -> Self {
        let demand = Demand::new(step, options);
        let runs = Runs::new(step);
        let mut kept = vec![vec![0_u64; runs.blocks.len()]; step.blocks.len()];
        for buffer in &demand.buffers {
            let (first, last) = (runs.of_node[buffer.start], runs.of_node[buffer.end]);
            let Some(block) = runs.blocks[first] else {
                continue;
            };
            let over = first + 1..last.max(first + 1);
            for (held, other) in kept[block][over.clone()].iter_mut().zip(&runs.blocks[over]) {
                if *other != Some(block) {
                    *held = held.saturating_add(buffer.aligned_bytes());
                }
            }
        }
        let alive = alive(&demand, step.nodes.len());
        let mut local = vec![0_u64; runs.blocks.len()];
        for (&bytes, &run) in alive.iter().zip(&runs.of_node) {
            let others = kept.iter().map(|block| block[run]);
            let others = others.fold(0, u64::saturating_add);
            local[run] = local[run].max(bytes.saturating_sub(others));
        }
        let prelude = runs.blocks.iter().position(Option::is_none);
        Self {
            prelude: prelude.map_or(0, |run| local[run]),
            runs,
            local,
            kept,
        }
    }

    /// How often the step comes to a block.
    pub fn num_visits(&self, block: usize) -> usize {
        self.runs.of_block[block].len()
    }

    /// The most that is alive in a run of a block, less what others hold over all of it.
    pub fn local(&self, block: usize, visit: usize) -> u64 {
        let run = self.runs.of_block[block].get(visit);
        run.map_or(0, |&run| self.local[run])
    }

    /// What a block holds over a whole run of another.
    pub fn kept(&self, block: usize, other: usize, visit: usize) -> u64 {
        let run = self.runs.of_block[other].get(visit);
        run.map_or(0, |&run| self.kept[block][run])
    }
}

/// Recorded launches of a step, by block.
pub(super) struct BlockLaunches {
    by_block: Vec<u64>,
    outside: u64,
}

impl BlockLaunches {
    pub fn of_training(config: &Config, step: &TrainingGraph) -> Self {
        Self::new(step, training_launches(step, config.batch.accumulation))
    }

    pub fn of_evaluation(graph: &Graph) -> Self {
        Self::new(graph, whole_launches(graph))
    }

    fn new(graph: &Graph, by_node: Vec<u64>) -> Self {
        let mut by_block = vec![0_u64; graph.blocks.len()];
        let mut outside = 0_u64;
        for (node, launches) in graph.nodes.iter().zip(by_node) {
            let place = match node.block {
                Some(block) => &mut by_block[block.index()],
                None => &mut outside,
            };
            *place = place.saturating_add(launches);
        }
        Self { by_block, outside }
    }

    pub fn total(&self) -> u64 {
        let blocks = self.by_block.iter().copied();
        blocks.fold(self.outside, u64::saturating_add)
    }

    pub fn of_block(&self, block: usize) -> u64 {
        self.by_block.get(block).copied().unwrap_or(0)
    }

    pub fn outside(&self) -> u64 {
        self.outside
    }
}

/// How long a step takes, and each of its blocks.
pub(super) struct BlockTimes {
    pub seconds: f64,
    pub by_block: Vec<f64>,
    /// What stands outside the blocks.
    outside: f64,
}

impl BlockTimes {
    pub fn new(config: &Config, step: &TrainingGraph, processor: Processor<'_>) -> Self {
        let times = StepTimes::new(step, config, processor.card, processor.tf32);
        let mut by_block = vec![0.0; step.blocks.len()];
        let mut outside = times.host + times.network.waits_outside;
        for (node, seconds) in step.nodes.iter().zip(&times.by_node) {
            match node.block {
                Some(block) => by_block[block.index()] += seconds,
                None => outside += seconds,
            }
        }
        let waits = times.bus_by_block.iter().zip(&times.network.waits_by_block);
        for (block, (bus, network)) in waits.enumerate() {
            by_block[block] += bus + network;
        }
        Self {
            seconds: times.total(),
            by_block,
            outside,
        }
    }

    /// What stands outside the blocks of a chain with as many more blocks, each of which adds to
    /// it what the last block of `built` adds to `less`.
    pub fn outside(&self, built: &Self, less: &Self, more: f64) -> f64 {
        self.outside + more * (built.outside - less.outside)
    }
}

/// Consecutive nodes of one block. What stands outside the blocks belongs to the run before it.
struct Runs {
    /// By run; `None` for what comes before the first block.
    blocks: Vec<Option<usize>>,
    of_node: Vec<usize>,
    of_block: Vec<Vec<usize>>,
}

impl Runs {
    fn new(graph: &Graph) -> Self {
        let mut runs = Self {
            blocks: Vec::new(),
            of_node: Vec::with_capacity(graph.nodes.len()),
            of_block: vec![Vec::new(); graph.blocks.len()],
        };
        for node in &graph.nodes {
            let block = node.block.map(|id| id.index());
            let goes_on = match (runs.blocks.last(), block) {
                (None, _) => false,
                (Some(_), None) => true,
                (Some(&current), Some(_)) => current == block,
            };
            if !goes_on {
                if let Some(block) = block {
                    runs.of_block[block].push(runs.blocks.len());
                }
                runs.blocks.push(block);
            }
            runs.of_node.push(runs.blocks.len() - 1);
        }
        runs
    }
}

/// Transient bytes that are alive while each node runs.
fn alive(demand: &Demand, nodes: usize) -> Vec<u64> {
    // Wider than the sizes, so that what ends takes away exactly what it added.
    let mut change = vec![0_i128; nodes + 1];
    for buffer in &demand.buffers {
        let bytes = i128::from(buffer.aligned_bytes());
        change[buffer.start] += bytes;
        change[buffer.end + 1] -= bytes;
    }
    let mut live = 0_i128;
    let running = change[..nodes].iter().map(|change| {
        live += change;
        u64::try_from(live).unwrap_or(u64::MAX)
    });
    running.collect()
}

/// The most transient bytes that are alive at once.
pub(super) fn peak(demand: &Demand, nodes: usize) -> u64 {
    alive(demand, nodes).into_iter().max().unwrap_or(0)
}
