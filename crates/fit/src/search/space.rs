//! The space of one search: the axes of a configuration on a machine, and the points in it that
//! can be run.

use std::ops::Range;

use cinch_config::remedy::{ACCUMULATION, BATCH_SIZE, CHECKPOINTING, RANKS};
use cinch_config::{Checkpointing, Config};

use cinch_step::needs_whole_batch;

use super::axis::{Axis, axes, micro_batch};
use super::request::Request;
use crate::FitError;

/// A choice for each axis, by its index.
pub(crate) type Point = Vec<usize>;

/// The choices of each axis that a search may take.
pub(crate) type Tier = Vec<Range<usize>>;

/// The micro batch is the first axis.
const MICRO: usize = 0;

#[derive(Clone, Debug)]
pub(crate) struct Space {
    pub axes: Vec<Axis>,
    /// Whether the number of recomputed blocks is the user's.
    settled: bool,
}

impl Space {
    pub fn new(request: &Request<'_>) -> Result<Self, FitError> {
        let whole = needs_whole_batch(request.config, request.machine.target);
        let mut all = vec![micro_batch(request.config, splits(request, whole)?)];
        all.extend(axes(request));
        let asked = crate::asked_blocks(request.config).is_some();
        Ok(Self {
            axes: all,
            settled: asked && request.fixed.contains(&CHECKPOINTING),
        })
    }

    /// How many of the first blocks of a configuration may be recomputed. Where blocks are chunks
    /// of a sample, how much each of them is recomputed matters little beside how large they are:
    /// so there it is all or none.
    pub fn recomputed(&self, config: &Config) -> Vec<usize> {
        let blocks = config.model.num_blocks();
        match crate::asked_blocks(config).filter(|_| self.settled) {
            Some(count) => vec![count.min(blocks)],
            None if config.model.repeats() > 1 => vec![0, blocks],
            None => (0..=blocks).collect(),
        }
    }

    /// The configuration at a point; recomputation is not part of it.
    pub fn config(&self, base: &Config, point: &[usize]) -> Config {
        let mut config = base.clone();
        for (axis, &choice) in self.axes.iter().zip(point) {
            axis.choices[choice].write(&mut config);
        }
        config
    }

    /// The tiers of the search, those that give up least first; the first takes no last resort.
    /// The axis that weighs most comes first, so every length of sequence is tried with all else
    /// before a shorter one.
    pub fn tiers(&self) -> Vec<Tier> {
        self.axes.iter().fold(vec![Tier::new()], |tiers, axis| {
            let resorts = axis.num_free..axis.choices.len();
            let ranges = std::iter::once(0..axis.num_free);
            let ranges = ranges.chain(resorts.map(|choice| choice..choice + 1));
            let ranges: Vec<Range<usize>> = ranges.collect();
            let more = |tier: &Tier| {
                let extend = |range: &Range<usize>| {
                    let mut tier = tier.clone();
                    tier.push(range.clone());
                    tier
                };
                ranges.iter().map(extend).collect::<Vec<_>>()
            };
            tiers.iter().flat_map(more).collect()
        })
    }

    /// The points of a tier, in columns that differ only in the micro batch, the smallest first.
    pub fn columns(&self, tier: &Tier) -> Vec<Vec<Point>> {
        let others = (MICRO + 1..self.axes.len()).fold(vec![Vec::new()], |points, axis| {
            let more = |point: &Point| {
                let extend = |choice| [point.as_slice(), &[choice]].concat();
                tier[axis].clone().map(extend).collect::<Vec<_>>()
            };
            points.iter().flat_map(more).collect()
        });
        let column = |rest: Point| {
            let micro = tier[MICRO].clone();
            micro
                .map(|choice| [&[choice], rest.as_slice()].concat())
                .collect()
        };
        others.into_iter().map(column).collect()
    }

    /// How many axes differ from what the user wrote.
    pub fn num_changes(&self, written: &Config, point: &[usize]) -> usize {
        let axes = self.axes.iter().zip(point);
        axes.filter(|(axis, choice)| !axis.choices[**choice].is_in(written))
            .count()
    }
}

/// Whether a configuration of the space says something that can be run, and that no other point
/// says as well.
pub(crate) fn is_sensible(config: &Config, written: &Config) -> bool {
    let batch = &config.batch;
    let rows = batch.batch_size.saturating_mul(batch.seq_len);
    let chunk = batch.loss_chunk;
    let same_as_whole = chunk != written.batch.loss_chunk && chunk.is_some_and(|c| c >= rows);
    // With more than one micro batch a gradient is complete only after the last of them.
    let too_early = batch.update_in_backward && batch.accumulation > 1;
    !same_as_whole && !too_early
}

/// The configuration with its first `count` blocks recomputed, in the user's words.
pub(crate) fn with_recomputed(config: &Config, count: usize) -> Config {
    let mut config = config.clone();
    config.batch.checkpointing = match count {
        0 => Checkpointing::None,
        _ if count == config.model.num_blocks() => Checkpointing::Full,
        _ => Checkpointing::Blocks(count),
    };
    config
}

/// The ways to cut the effective batch exactly, the smallest micro batch first; the `whole` alone
/// where a step needs that.
fn splits(request: &Request<'_>, whole: bool) -> Result<Vec<(usize, usize)>, FitError> {
    let effective = request.effective_batch();
    let batch = &request.config.batch;
    if effective == 0 || batch.effective_batch() == 0 {
        return Err(FitError::EmptyBatch);
    }
    let stated: Vec<(&'static str, usize)> = [
        (BATCH_SIZE, batch.batch_size),
        (ACCUMULATION, batch.accumulation),
    ]
    .into_iter()
    .filter(|(key, _)| request.fixed.contains(key))
    .collect();
    let ranks = batch.world.ranks.max(1);
    let of_ranks = (ranks > 1).then_some((RANKS, ranks));
    let refuse = |nearest: Vec<usize>| {
        Err(FitError::EffectiveBatch {
            target: effective,
            stated: stated.iter().copied().chain(of_ranks).collect(),
            nearest: nearest.into_iter().map(|each| each * ranks).collect(),
        })
    };
    if !effective.is_multiple_of(ranks) {
        let around = [effective / ranks, effective.div_ceil(ranks)];
        return refuse(around.into_iter().filter(|&each| each > 0).collect());
    }
    // Of each rank.
    let effective = effective / ranks;
    match *stated {
        [] if whole => Ok(vec![(effective, 1)]),
        // Another micro batch would be another run.
        [] if request.config.model.depends_on_micro_batch().is_some() => {
            let unit = batch.batch_size.min(effective);
            let micro = (1..=unit)
                .rev()
                .find(|micro| effective.is_multiple_of(*micro));
            let micro = micro.unwrap_or(1);
            Ok(vec![(micro, effective / micro)])
        }
        [] => {
            let divisors = divisors(effective).into_iter();
            Ok(divisors.map(|micro| (micro, effective / micro)).collect())
        }
        [(_, unit)] if !effective.is_multiple_of(unit) => {
            let around = [effective / unit * unit, effective.div_ceil(unit) * unit];
            refuse(around.into_iter().filter(|&exact| exact > 0).collect())
        }
        [(BATCH_SIZE, micro)] => Ok(vec![(micro, effective / micro)]),
        [(_, accumulation)] => Ok(vec![(effective / accumulation, accumulation)]),
        _ if batch.rank_batch() == effective => Ok(vec![(batch.batch_size, batch.accumulation)]),
        _ => refuse(vec![batch.rank_batch()]),
    }
}

/// In rising order.
fn divisors(number: usize) -> Vec<usize> {
    let small = (1..).take_while(|d| d * d <= number);
    let small: Vec<usize> = small.filter(|d| number.is_multiple_of(*d)).collect();
    let large = small.iter().rev().map(|d| number / d);
    let mut all: Vec<usize> = small.iter().copied().chain(large).collect();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_all_of_them_in_order() {
        for number in 1..200 {
            let naive: Vec<usize> = (1..=number).filter(|d| number % d == 0).collect();
            assert_eq!(divisors(number), naive);
        }
    }
}
