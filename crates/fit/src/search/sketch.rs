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
    SamplePlan, StepTarget, VariantForm, beside_arena, differentiated, evaluation_graph, options,
    recomputed, recorded_bytes, sample_bytes, variant_forms,
};

use crate::FitError;
use profile::{BlockLaunches, BlockTimes, Profile, peak};

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
    /// What texts between steps take of the memory that the step is in.
    sample_bytes: u64,
}

struct VariantSteps {
    /// Numbers of recomputed blocks in the model as it is, and the step of each.
    recomputed: Vec<(usize, TrainingGraph)>,
    evaluation: Graph,
    shorter: Shorter,
}

/// What is built besides a model that is shorter than the one that is asked about.
enum Shorter {
    /// Nothing: the model is built as it is.
    Nothing,
    /// Of a chain that is shorter by one block, with none recomputed.
    Block(TrainingGraph),
    /// Of a model with one repeat less, the same steps and evaluation; and how many repeats are
    /// missing in those that are built.
    Repeat {
        recomputed: Vec<TrainingGraph>,
        evaluation: Graph,
        missing: u64,
    },
}

impl Steps {
    /// For these numbers of recomputed blocks; chains are built for all.
    pub fn new(
        config: &Config,
        target: Target,
        length: Length,
        counts: &[usize],
    ) -> Result<Self, FitError> {
        let variants = variant_forms(config).into_iter();
        let variants = variants.map(|form| VariantSteps::new(config, form, target, length, counts));
        let variants = variants.collect::<Result<_, _>>()?;
        Ok(Self {
            variants,
            sample_bytes: sample_bytes(SamplePlan::of(config)?, target),
        })
    }
}

impl VariantSteps {
    fn new(
        config: &Config,
        form: VariantForm,
        target: Target,
        length: Length,
        counts: &[usize],
    ) -> Result<Self, FitError> {
        let blocks = config.model.num_blocks();
        let all_or_none = counts.iter().all(|&count| count == 0 || count == blocks);
        let missing = config.model.repeats().saturating_sub(SHORT as u64);
        if length == Length::Short && missing > 0 && all_or_none {
            return Self::of_repeats(config, form, target, counts, missing);
        }
        let built = match length {
            Length::Short if config.model.is_chain() => blocks.min(SHORT),
            Length::Short | Length::Whole => blocks,
        };
        let short = with_blocks(config, built);
        let step = differentiated(&short, form, target)?;
        let shorter = if built < blocks {
            let step = differentiated(&with_blocks(config, built - 1), form, target)?;
            Shorter::Block(recomputed(&step, config, 0)?)
        } else {
            Shorter::Nothing
        };
        // Of a long chain every number is told from all numbers of a short one.
        let counts: Vec<usize> = match config.model.repeats() {
            1 => (0..=built).collect(),
            _ => counts.to_vec(),
        };
        // A phase with fewer blocks than the largest recomputes all that it has.
        let most = step.blocks.len();
        let recomputed = counts
            .into_iter()
            .map(|count| Ok((count, recomputed(&step, config, count.min(most))?)))
            .collect::<Result<_, FitError>>()?;
        Ok(Self {
            recomputed,
            evaluation: evaluation_graph(&short, form, target)?,
            shorter,
        })
    }

    /// Of two models with few repeats, from which the one with `missing` more is told.
    fn of_repeats(
        config: &Config,
        form: VariantForm,
        target: Target,
        counts: &[usize],
        missing: u64,
    ) -> Result<Self, FitError> {
        let blocks = config.model.num_blocks();
        let build = |repeats: usize| -> Result<(Vec<TrainingGraph>, Graph), FitError> {
            let mut short = config.clone();
            short.model = config.model.with_repeats(repeats as u64);
            let step = differentiated(&short, form, target)?;
            let count = |&count: &usize| match count == blocks {
                true => short.model.num_blocks(),
                false => 0,
            };
            let steps = counts.iter().map(count);
            let steps = steps.map(|count| Ok(recomputed(&step, &short, count)?));
            let steps = steps.collect::<Result<_, FitError>>()?;
            Ok((steps, evaluation_graph(&short, form, target)?))
        };
        let (steps, evaluation) = build(SHORT)?;
        let (fewer, fewer_evaluation) = build(SHORT - 1)?;
        Ok(Self {
            recomputed: counts.iter().copied().zip(steps).collect(),
            evaluation,
            shorter: Shorter::Repeat {
                recomputed: fewer,
                evaluation: fewer_evaluation,
                missing,
            },
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
        let base = base.saturating_add(steps.sample_bytes);
        let counts = 0..=config.model.num_blocks();
        let bytes = counts.clone().map(|count| {
            let peaks = variants.iter().map(|variant| variant.transient[count]);
            let launches = variants.iter().map(|variant| variant.launches[count]);
            let launches = launches.fold(0, u64::saturating_add);
            let recorded = recorded_bytes(options.target, launches);
            let base = base.saturating_add(recorded);
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
    /// That are recorded, of the evaluation too.
    launches: Vec<u64>,
}

impl VariantSketch {
    fn new(config: &Config, steps: &VariantSteps, processor: Processor<'_>) -> Self {
        let blocks = config.model.num_blocks();
        let options = options(config, processor.machine);
        let peak_of = |graph: &Graph| peak(&Demand::new(graph, options), graph.nodes.len());
        let mut evaluation = peak_of(&steps.evaluation);
        let times = |step| BlockTimes::new(config, step, processor);
        let launches_of = |step| BlockLaunches::of_training(config, step);
        let evaluated = BlockLaunches::of_evaluation(&steps.evaluation);
        let (_, first) = &steps.recomputed[0];
        let built = Demand::new(first, options);
        let (persistent, host_bytes, transient, seconds, launches) = match &steps.shorter {
            Shorter::Block(one_less) => {
                let profile = |(_, step): &(usize, TrainingGraph)| Profile::new(step, options);
                let profiles: Vec<Profile> = steps.recomputed.iter().map(profile).collect();
                let more = (blocks - SHORT) as u64;
                let less = Demand::new(one_less, options);
                let persistent = persistent_bytes((first, &built), (one_less, &less), more);
                let host_bytes = extend(built.host_bytes, less.host_bytes, more);
                let by_count: Vec<BlockTimes> = steps
                    .recomputed
                    .iter()
                    .map(|(_, step)| times(step))
                    .collect();
                let chain = Chain {
                    blocks,
                    profiles: &profiles,
                };
                let seconds = chain.seconds(&by_count, &times(one_less));
                let recorded = steps.recomputed.iter().map(|(_, step)| launches_of(step));
                let recorded: Vec<BlockLaunches> = recorded.collect();
                let launches = chain.launches(&recorded, &launches_of(one_less), &evaluated);
                (persistent, host_bytes, chain.peaks(), seconds, launches)
            }
            Shorter::Repeat {
                recomputed,
                evaluation: fewer_evaluation,
                missing,
            } => {
                evaluation = extend(evaluation, peak_of(fewer_evaluation), *missing);
                let less = Demand::new(&recomputed[0], options);
                let pairs = || steps.recomputed.iter().zip(recomputed);
                let peaks = pairs().map(|((count, step), fewer)| {
                    (*count, extend(peak_of(step), peak_of(fewer), *missing))
                });
                let seconds = pairs().map(|((count, step), fewer)| {
                    let [more, less] = [step, fewer].map(|step| times(step).seconds);
                    (*count, more + *missing as f64 * (more - less))
                });
                let fewer = BlockLaunches::of_evaluation(fewer_evaluation).total();
                let evaluated = extend(evaluated.total(), fewer, *missing);
                let launches = pairs().map(|((count, step), fewer)| {
                    let [more, less] = [step, fewer].map(|step| launches_of(step).total());
                    (
                        *count,
                        extend(more, less, *missing).saturating_add(evaluated),
                    )
                });
                (
                    extend(built.persistent_bytes(), less.persistent_bytes(), *missing),
                    extend(built.host_bytes, less.host_bytes, *missing),
                    by_count(blocks, peaks),
                    by_count(blocks, seconds),
                    by_count(blocks, launches),
                )
            }
            Shorter::Nothing => {
                // The more blocks are recomputed, the more of them may have activations there.
                let last = steps.recomputed.last();
                let most = last.map(|(_, step)| Demand::new(step, options).host_bytes);
                let host_bytes = built.host_bytes.max(most.unwrap_or(0));
                let peaks = steps.recomputed.iter();
                let peaks = peaks.map(|(count, step)| (*count, peak_of(step)));
                let seconds = steps.recomputed.iter();
                let seconds = seconds.map(|(count, step)| (*count, times(step).seconds));
                let launches = steps.recomputed.iter().map(|(count, step)| {
                    let trained = launches_of(step).total();
                    (*count, trained.saturating_add(evaluated.total()))
                });
                (
                    built.persistent_bytes(),
                    host_bytes,
                    by_count(blocks, peaks),
                    by_count(blocks, seconds),
                    by_count(blocks, launches),
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
            launches,
        }
    }
}

/// By the number of recomputed blocks; numbers that were not looked at have what the next smaller
/// one has, which takes no less.
fn by_count<T: Copy>(blocks: usize, known: impl Iterator<Item = (usize, T)>) -> Vec<T> {
    let mut known: Vec<(usize, T)> = known.collect();
    known.sort_by_key(|&(count, _)| count);
    let of = |count: usize| {
        let below = known.iter().rev().find(|&&(known, _)| known <= count);
        below.or(known.first()).map(|&(_, value)| value)
    };
    (0..=blocks).filter_map(of).collect()
}

fn with_blocks(config: &Config, blocks: usize) -> Config {
    let mut config = config.clone();
    if blocks != config.model.num_blocks() {
        config.model = config.model.with_layers(blocks as u64);
    }
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
    /// How many blocks of the short one are recomputed.
    recomputed: usize,
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
                    recomputed,
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

    /// The step's seconds, by the number of recomputed blocks: those of its blocks, and of what
    /// stands outside them, of which some comes once more with each block.
    fn seconds(&self, by_count: &[BlockTimes], one_less: &BlockTimes) -> Vec<f64> {
        let more = (self.blocks - SHORT) as f64;
        let seconds = |count: usize| {
            let ends = &by_count[self.ends_like(count)];
            let outside = ends.outside(&by_count[0], one_less, more);
            let blocks = self.groups(count).into_iter().map(|group| {
                let each = by_count[group.recomputed].by_block[group.stand_in];
                each * group.blocks.len() as f64
            });
            outside + blocks.sum::<f64>()
        };
        (0..=self.blocks).map(seconds).collect()
    }

    /// Recorded launches of the step and of its evaluation, likewise.
    fn launches(
        &self,
        by_count: &[BlockLaunches],
        one_less: &BlockLaunches,
        evaluated: &BlockLaunches,
    ) -> Vec<u64> {
        let more = (self.blocks - SHORT) as u64;
        let once_more = by_count[0].outside().saturating_sub(one_less.outside());
        let evaluation = evaluated.of_block(BETWEEN).saturating_mul(more);
        let evaluation = evaluation.saturating_add(evaluated.total());
        let launches = |count: usize| {
            let outside = by_count[self.ends_like(count)].outside();
            let outside = outside.saturating_add(once_more.saturating_mul(more));
            let blocks = self.groups(count).into_iter().map(|group| {
                let each = by_count[group.recomputed].of_block(group.stand_in);
                each.saturating_mul(group.blocks.len() as u64)
            });
            let training = blocks.fold(outside, u64::saturating_add);
            training.saturating_add(evaluation)
        };
        (0..=self.blocks).map(launches).collect()
    }

    /// How many blocks of the short chain are recomputed where its ends have the neighbours that
    /// those of the long one have.
    fn ends_like(&self, count: usize) -> usize {
        match self.blocks - count {
            kept @ 0..=1 => SHORT - kept,
            _ => count.min(SHORT - 2),
        }
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
