//! A step on several ranks, as an answer: what each keeps, what the network costs and what of that
//! is hidden, how few cards would do, and how speed holds as ranks are added.

use cinch_config::{Config, ShardedPart, WorldConfig};
use cinch_device::Card;
use cinch_step::{StepPlan, StepTarget};
use serde::Serialize;

use crate::{FitError, plan};

/// Cards that one machine has, where nobody says it: boards join eight.
pub const USUAL_RANKS_PER_NODE: usize = 8;

/// What several ranks are to each other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorldReport {
    pub ranks: usize,
    pub nodes: usize,
    /// What each keeps only a part of.
    pub shard: &'static str,
    /// Of every rank: they have the same plan.
    pub bytes_per_rank: u64,
    /// As predicted; none where no card was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed: Option<WorldSpeed>,
    /// How few cards of the same memory would do, with one sequence at a time and as many blocks
    /// recomputed as that takes; none where no number does, or no memory was stated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fewest_ranks: Option<FewestRanks>,
}

/// The fewest cards that hold a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FewestRanks {
    pub ranks: usize,
    pub shard: &'static str,
    pub bytes_per_rank: u64,
}

/// A predicted step of several ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorldSpeed {
    pub card: String,
    pub link: &'static str,
    pub network: &'static str,
    pub step_seconds: f64,
    pub tokens_per_second: f64,
    pub tokens_per_second_per_rank: f64,
    /// Of all collectives of a step, as if nothing else ran.
    pub network_seconds: f64,
    /// Those that a step is longer by.
    pub exposed_seconds: f64,
    /// The others, which run beside computing that is as long.
    pub hidden_seconds: f64,
    /// Of all: what would remain if links had no end of bandwidth.
    pub latency_seconds: f64,
    /// That each rank sends in a step.
    pub sent_bytes: u64,
    /// The share of a step in which ranks do not wait for each other.
    pub efficiency: f64,
}

impl WorldSpeed {
    pub fn new(step: &StepPlan, card: &Card, tf32: bool) -> Self {
        let predicted = step.predict(card, tf32);
        let batch = &step.config.batch;
        let tokens = batch.effective_batch() as f64 * batch.seq_len as f64;
        let (seconds, network) = (predicted.seconds, &predicted.network);
        let exposed = network.exposed();
        Self {
            card: card.name.clone(),
            link: card.fabric.link.name,
            network: card.fabric.network.name,
            step_seconds: seconds,
            tokens_per_second: tokens / seconds,
            tokens_per_second_per_rank: tokens / seconds / batch.world.ranks as f64,
            network_seconds: network.seconds,
            exposed_seconds: exposed,
            hidden_seconds: (network.seconds - exposed).max(0.0),
            latency_seconds: network.latency_seconds,
            sent_bytes: network.bytes,
            efficiency: 1.0 - exposed / seconds,
        }
    }
}

impl WorldReport {
    /// Of a plan, with its speed on a card.
    pub fn new(step: &StepPlan, card: Option<(&Card, bool)>) -> Self {
        let world = &step.config.batch.world;
        Self {
            ranks: world.ranks,
            nodes: world.nodes,
            shard: world.shard.name(),
            bytes_per_rank: step.total_bytes(),
            speed: card.map(|(card, tf32)| WorldSpeed::new(step, card, tf32)),
            fewest_ranks: None,
        }
    }
}

/// The most ranks that are tried.
const MOST_RANKS: usize = 1 << 12;

/// The fewest ranks on which a step fits a budget, each with one sequence at a time. Parts shrink
/// with the number of ranks, so the first that fits is found by halving.
pub fn fewest_ranks(
    config: &Config,
    machine: StepTarget,
    budget: u64,
    keeps_shard: bool,
) -> Result<Option<FewestRanks>, FitError> {
    let attempt = |ranks: usize| -> Result<Option<FewestRanks>, FitError> {
        let mut config = with_ranks(config, ranks);
        config.batch.batch_size = 1;
        config.batch.accumulation = 1;
        config.batch.budget = Some(cinch_config::Bytes::new(budget));
        if !keeps_shard {
            config.batch.world.shard = ShardedPart::Weights;
        }
        match plan(&config, machine) {
            Ok(step) => Ok(Some(FewestRanks {
                ranks,
                shard: match ranks {
                    1 => ShardedPart::None.name(),
                    _ => config.batch.world.shard.name(),
                },
                bytes_per_rank: step.total_bytes(),
            })),
            Err(FitError::DoesNotFit(_)) => Ok(None),
            Err(error) => Err(error),
        }
    };
    let (mut low, mut high) = (0, 1);
    let mut found = attempt(high)?;
    while found.is_none() {
        if high >= MOST_RANKS {
            return Ok(None);
        }
        (low, high) = (high, high * 2);
        found = attempt(high)?;
    }
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        match attempt(middle)? {
            Some(fits) => (found, high) = (Some(fits), middle),
            None => low = middle,
        }
    }
    Ok(found)
}

/// Ranks of each machine: as stated, or the usual number.
pub(crate) fn ranks_of_a_node(world: &WorldConfig) -> usize {
    match world.is_alone() {
        true => USUAL_RANKS_PER_NODE,
        false => world.ranks_per_node().max(1),
    }
}

/// A configuration on another number of ranks, as many on each machine as before.
pub(crate) fn with_ranks(config: &Config, ranks: usize) -> Config {
    let mut config = config.clone();
    let world = &mut config.batch.world;
    world.nodes = ranks.div_ceil(ranks_of_a_node(world));
    world.ranks = ranks;
    config
}

/// One number of ranks in a table of many.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScalingRow {
    pub ranks: usize,
    pub nodes: usize,
    pub bytes_per_rank: u64,
    /// None where no budget was stated.
    pub fits: Option<bool>,
    pub speed: WorldSpeed,
    /// What a step waits for most besides its computing.
    pub waits_for: &'static str,
}

/// How speed and memory change from one rank to `most`, by doubling, each rank with the batch that
/// the configuration has for it.
pub fn scaling(
    config: &Config,
    machine: StepTarget,
    card: &Card,
    tf32: bool,
    most: usize,
) -> Result<Vec<ScalingRow>, FitError> {
    let numbers = std::iter::successors(Some(1_usize), |ranks| ranks.checked_mul(2));
    let mut rows = Vec::new();
    for ranks in numbers.take_while(|&ranks| ranks <= most.min(MOST_RANKS)) {
        let config = with_ranks(config, ranks);
        let (step, fits) = match plan(&config, machine) {
            Ok(step) => (step, config.batch.budget.map(|_| true)),
            Err(FitError::DoesNotFit(_)) => {
                let mut unlimited = config.clone();
                unlimited.batch.budget = None;
                (plan(&unlimited, machine)?, Some(false))
            }
            Err(error) => return Err(error),
        };
        let speed = WorldSpeed::new(&step, card, tf32);
        rows.push(ScalingRow {
            ranks,
            nodes: config.batch.world.nodes,
            bytes_per_rank: step.total_bytes(),
            fits,
            waits_for: waits_for(&speed),
            speed,
        });
    }
    Ok(rows)
}

/// Below this share of a step nobody waits.
const NOTICED: f64 = 0.02;

fn waits_for(speed: &WorldSpeed) -> &'static str {
    if speed.exposed_seconds < NOTICED * speed.step_seconds {
        return "nothing";
    }
    match speed.latency_seconds * 2.0 > speed.network_seconds {
        true => "latency",
        false => "bandwidth",
    }
}
