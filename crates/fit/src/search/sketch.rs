//! The memory and the time of one way to cut up a step, for every number of recomputed blocks at
//! once, without building the whole step.
//!
//! A model is a chain of like blocks. What a block keeps from its forward to its backward, the
//! most that is alive while it runs, and the time it takes do not depend on where it stands, so a
//! chain of four says all about a chain of forty: it has a first block, two between and a last
//! one. The short step is built for each number of its blocks that may be recomputed. A run is
//! what one block does without another in between; with `kept(j, r)` the bytes that block `j`
//! holds over the whole of run `r`, and `local(r)` the most that is alive in `r` besides,
//!
//! ```text
//! peak = persistent + max over runs r of [ local(r) + Σ over blocks j of kept(j, r) ]
//! ```
//!
//! Each block of the long chain takes its terms from the short step in which a block like it has
//! the same neighbours: recomputed among recomputed, the last recomputed one, the first one that
//! is kept, kept among kept. The peak is a lower bound of the arena, and nearly always the arena
//! itself. Times add up block by block.
//!
//! Tests hold this against plans of every model size, and the search plans in full what it
//! recommends: a model whose blocks are not alike is found out and looked at in its whole length.

mod profile;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;

use cinch_config::Config;
use cinch_device::Card;
use cinch_graph::{Graph, Target, TrainingGraph, aligned};
use cinch_plan::Demand;
use cinch_step::{
    StepTarget, VariantForm, beside_arena, differentiated, evaluation_graph, options, recomputed,
    variant_forms,
};

use crate::FitError;
use profile::{BlockTimes, Profile, peak};

/// A first block, one between, its neighbour, and a last one.
const SHORT: usize = 4;
const FIRST: usize = 0;
const BETWEEN: usize = 1;
const NEIGHBOUR: usize = 2;
const LAST: usize = 3;

/// What a step takes, by the number of its first blocks that are recomputed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sketch {
    /// Arena and overhead cannot be less.
    pub bytes: Vec<u64>,
    /// As predicted for a step.
    pub seconds: Vec<f64>,
    pub host_bytes: u64,
}

/// How much of the model a sketch looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Short,
    Whole,
}

/// What a step is predicted for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processor<'a> {
    pub machine: StepTarget,
    pub card: &'a Card,
    pub tf32: bool,
}

/// The steps that a sketch is taken from. They are the same whatever is done with the optimizer's
/// states on the machine (`same_graph`).
pub(crate) struct Steps {
    /// For each graph that the model is trained by.
    variants: Vec<VariantSteps>,
}

struct VariantSteps {
    /// By the number of recomputed blocks.
    recomputed: Vec<TrainingGraph>,
    evaluation: Graph,
    /// Of a chain that is shorter by one block, with none recomputed.
    one_less: Option<TrainingGraph>,
}

impl Steps {
    pub fn new(config: &Config, target: Target, length: Length) -> Result<Self, FitError> {
        let variants = variant_forms(config).into_iter();
        let variants = variants.map(|form| VariantSteps::new(config, form, target, length));
        let variants = variants.collect::<Result<_, _>>()?;
        Ok(Self { variants })
    }
}

impl VariantSteps {
    fn new(
        config: &Config,
        form: VariantForm,
        target: Target,
        length: Length,
    ) -> Result<Self, FitError> {
        let blocks = config.model.num_blocks();
        let built = match length {
            Length::Short => blocks.min(SHORT),
            Length::Whole => blocks,
        };
        let short = with_blocks(config, built);
        let step = differentiated(&short, form, target)?;
        let counts = 0..=built;
        let one_less = if built < blocks {
            let step = differentiated(&with_blocks(config, built - 1), form, target)?;
            Some(recomputed(&step, config, 0)?)
        } else {
            None
        };
        Ok(Self {
            recomputed: counts
                .map(|count| recomputed(&step, config, count))
                .collect::<Result<_, _>>()?,
            evaluation: evaluation_graph(&short, form, target)?,
            one_less,
        })
    }
}

impl Sketch {
    /// From steps that were built for a configuration with the same graph.
    pub fn new(config: &Config, steps: &Steps, processor: Processor<'_>) -> Self {
        let options = options(config, processor.machine);
        let variants = steps.variants.iter();
        let variants: Vec<VariantSketch> = variants
            .map(|steps| VariantSketch::new(config, steps, processor))
            .collect();
        // The variants have the same tensors in the same places, those of a batch as large as the
        // longest rows need them.
        let most = |of: fn(&VariantSketch) -> u64| variants.iter().map(of).max().unwrap_or(0);
        let (persistent, host_bytes) = (most(|v| v.persistent), most(|v| v.host_bytes));
        let base = persistent.saturating_add(beside_arena(options, host_bytes));
        let counts = 0..=config.model.num_blocks();
        let bytes = counts.clone().map(|count| {
            let peaks = variants.iter().map(|variant| variant.transient[count]);
            base.saturating_add(peaks.max().unwrap_or(0))
        });
        let seconds = counts.map(|count| {
            let seconds = variants.iter().map(|variant| variant.seconds[count]);
            seconds.fold(0.0, f64::max)
        });
        Self {
            bytes: bytes.collect(),
            seconds: seconds.collect(),
            host_bytes,
        }
    }
}

/// What one graph takes, by the number of recomputed blocks.
struct VariantSketch {
    persistent: u64,
    host_bytes: u64,
    /// The most that is alive besides.
    transient: Vec<u64>,
    seconds: Vec<f64>,
}

impl VariantSketch {
    fn new(config: &Config, steps: &VariantSteps, processor: Processor<'_>) -> Self {
        let blocks = config.model.num_blocks();
        let options = options(config, processor.machine);
        let demand = Demand::new(&steps.evaluation, options);
        let evaluation = peak(&demand, steps.evaluation.nodes.len());
        let profile = |step| Profile::new(step, options);
        let profiles: Vec<Profile> = steps.recomputed.iter().map(profile).collect();
        let times = |step| BlockTimes::new(config, step, processor);
        let built = Demand::new(&steps.recomputed[0], options);
        let (persistent, host_bytes, transient, seconds) = match &steps.one_less {
            Some(one_less) => {
                let more = (blocks - SHORT) as u64;
                let less = Demand::new(one_less, options);
                let persistent =
                    persistent_bytes((&steps.recomputed[0], &built), (one_less, &less), more);
                let host_bytes = extend(built.host_bytes, less.host_bytes, more);
                let [kept, again] = [0, SHORT].map(|count| times(&steps.recomputed[count]));
                let growth = more as f64 * (kept.seconds - times(one_less).seconds);
                let chain = Chain {
                    blocks,
                    profiles: &profiles,
                };
                let seconds = chain.seconds(&kept, &again, growth);
                (persistent, host_bytes, chain.peaks(), seconds)
            }
            None => {
                let peaks = profiles.iter().map(|profile| profile.peak);
                let seconds = steps.recomputed.iter().map(|step| times(step).seconds);
                let persistent = built.persistent_bytes();
                (
                    persistent,
                    built.host_bytes,
                    peaks.collect::<Vec<u64>>(),
                    seconds.collect(),
                )
            }
        };
        Self {
            persistent,
            host_bytes,
            transient: transient
                .into_iter()
                .map(|peak| peak.max(evaluation))
                .collect(),
            seconds,
        }
    }
}

fn with_blocks(config: &Config, blocks: usize) -> Config {
    let mut config = config.clone();
    config.model = config.model.with_layers(blocks as u64);
    config
}

/// Bytes of a chain with so many more blocks, from those of the built one and of one block less.
fn extend(built: u64, less: u64, more: u64) -> u64 {
    let block = built.saturating_sub(less);
    built.saturating_add(block.saturating_mul(more))
}

/// What keeps its place in a chain with so many more blocks: what only the longer of two chains
/// has comes once more with each block; what both have may grow with their number.
fn persistent_bytes(
    (built, demand): (&Graph, &Demand),
    (one_less, less): (&Graph, &Demand),
    more: u64,
) -> u64 {
    let name = |graph, id| -> &str { &Graph::tensor(graph, id).name };
    let known: HashMap<&str, u64> = less
        .persistent
        .iter()
        .map(|&(id, bytes)| (name(one_less, id), bytes))
        .collect();
    let each = demand
        .persistent
        .iter()
        .map(|&(id, bytes)| match known.get(name(built, id)) {
            Some(&shorter) => aligned(extend(bytes, shorter, more)),
            None => aligned(bytes).saturating_mul(more.saturating_add(1)),
        });
    each.fold(0, u64::saturating_add)
}

/// The long chain, in the terms of short ones.
struct Chain<'a> {
    blocks: usize,
    /// By the number of recomputed blocks.
    profiles: &'a [Profile],
}

/// Neighbouring blocks of the long chain that one block of a short one stands for.
struct Group<'a> {
    blocks: Range<usize>,
    stand_in: usize,
    profile: &'a Profile,
}

impl<'a> Chain<'a> {
    /// The chain with its first `count` blocks recomputed.
    fn groups(&self, count: usize) -> Vec<Group<'a>> {
        let end = self.blocks;
        let edges = (1..end).contains(&count);
        // How many of the blocks have no neighbour of the other kind.
        let (again, kept) = if edges {
            (0..count - 1, count + 1..end)
        } else {
            (0..count, count..end)
        };
        let mut groups = Vec::with_capacity(6);
        let mut push = |blocks: Range<usize>, recomputed: usize, stand_in: usize| {
            if !blocks.is_empty() {
                let profile = &self.profiles[recomputed];
                groups.push(Group {
                    blocks,
                    stand_in,
                    profile,
                });
            }
        };
        let mut alike = |blocks: Range<usize>, recomputed: usize| {
            let between = blocks.start.max(1)..blocks.end.min(end - 1);
            push(blocks.start..blocks.end.min(1), recomputed, FIRST);
            push(between, recomputed, BETWEEN);
            push(blocks.start.max(end - 1)..blocks.end, recomputed, LAST);
        };
        alike(again, SHORT);
        alike(kept, 0);
        if edges {
            let (last_again, first_kept) = (count - 1..count, count..count + 1);
            if count == 1 {
                push(last_again, 1, FIRST);
            } else {
                push(last_again, 2, BETWEEN);
            }
            if count + 1 == end {
                push(first_kept, SHORT - 1, LAST);
            } else {
                push(first_kept, 1, BETWEEN);
            }
        }
        groups
    }

    /// The most that is alive besides what is persistent, by the number of recomputed blocks.
    fn peaks(&self) -> Vec<u64> {
        let before = self.profiles[0].prelude;
        let most = |count| {
            let groups = self.groups(count);
            let runs = groups.iter().flat_map(|group| {
                // What is alive changes by the same amount from one block of the group to the
                // next, so the most is at one of its ends.
                let ends = [group.blocks.start, group.blocks.end - 1];
                let visits = 0..group.profile.num_visits(group.stand_in);
                ends.into_iter()
                    .flat_map(move |block| visits.clone().map(move |visit| (group, block, visit)))
            });
            let alive = runs.map(|(group, block, visit)| alive(&groups, group, block, visit));
            alive.fold(before, u64::max)
        };
        (0..=self.blocks).map(most).collect()
    }

    /// The step's seconds, by the number of recomputed blocks.
    fn seconds(&self, kept: &BlockTimes, again: &BlockTimes, growth: f64) -> Vec<f64> {
        let mut seconds = vec![kept.seconds + growth];
        for block in 0..self.blocks {
            let stand_in = stand_in(block, self.blocks);
            seconds.push(seconds[block] + again.by_block[stand_in] - kept.by_block[stand_in]);
        }
        seconds
    }
}

/// The place of a block in a short chain.
fn stand_in(block: usize, blocks: usize) -> usize {
    match block {
        0 => FIRST,
        _ if block + 1 == blocks => LAST,
        _ => BETWEEN,
    }
}

/// The most that is alive in one run of a block.
fn alive(groups: &[Group<'_>], own: &Group<'_>, block: usize, visit: usize) -> u64 {
    let held = groups.iter().map(|other| {
        let earlier = other.blocks.start.min(block)..other.blocks.end.min(block);
        let later = other.blocks.start.max(block + 1)..other.blocks.end.max(block + 1);
        let (holder, runs_of) = (other.stand_in, own.stand_in);
        // Where one block stands for both, the runs of its neighbours are looked at.
        let [after, before] = if holder == runs_of {
            [NEIGHBOUR, FIRST]
        } else {
            [runs_of; 2]
        };
        let kept = |runs_of| other.profile.kept(holder, runs_of, visit);
        let held = |blocks: Range<usize>, kept: u64| kept.saturating_mul(blocks.len() as u64);
        held(earlier, kept(after)).saturating_add(held(later, kept(before)))
    });
    held.fold(own.profile.local(own.stand_in, visit), u64::saturating_add)
}
