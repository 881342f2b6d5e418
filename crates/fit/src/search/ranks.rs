//! How many ranks: the best settings for each number of them that divides the effective batch.
//!
//! Every number is a search of its own, over shard level, micro batch, recomputation and whatever
//! else a search may choose; what a step learns from is the same in all of them.

use cinch_config::Config;
use cinch_config::remedy::RANKS;
use serde::Serialize;

use super::answer::FitOutcome;
use super::request::Request;
use crate::FitError;
use crate::world::{ranks_of_a_node, with_ranks};

/// Numbers of ranks, with the best settings for each.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankChoices {
    /// Sequences in a step, the same in every row.
    pub effective_batch: usize,
    pub rows: Vec<RankChoice>,
    /// The least number on which something fits.
    pub fewest: Option<usize>,
    /// That with the most tokens a second, the fewest of those that are as fast.
    pub fastest: Option<usize>,
    /// Numbers of ranks that divide the effective batch and still cannot be had, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedRanks>,
}

/// One number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankChoice {
    pub ranks: usize,
    pub nodes: usize,
    /// The fastest settings within the budget; none where nothing fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<FitOutcome>,
    /// Where nothing fits: the least that is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needed_bytes: Option<u64>,
    /// The share of a step in which ranks do not wait for each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub efficiency: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RefusedRanks {
    pub ranks: usize,
    pub reason: String,
}

/// Numbers of ranks from one to `most` with which the effective batch can be had exactly, and of
/// which machines have as many each.
fn numbers(request: &Request<'_>, most: usize) -> impl Iterator<Item = usize> {
    let effective = request.effective_batch();
    let per_node = ranks_of_a_node(&request.config.batch.world);
    (1..=most.min(effective))
        .filter(move |&ranks| effective.is_multiple_of(ranks))
        .filter(move |&ranks| ranks <= per_node || ranks.is_multiple_of(per_node))
}

/// The best settings for each number of ranks up to `most`.
pub fn by_ranks(request: &Request<'_>, most: usize) -> Result<RankChoices, FitError> {
    let effective_batch = request.effective_batch();
    if effective_batch == 0 {
        return Err(FitError::EmptyBatch);
    }
    let mut rows = Vec::new();
    let mut refused = Vec::new();
    for ranks in numbers(request, most) {
        let config = on_ranks(request.config, ranks);
        let of_ranks = Request {
            config: &config,
            effective_batch: Some(effective_batch),
            fixed: with_fixed_ranks(request),
            ..request.clone()
        };
        let outcome = match super::best(&of_ranks) {
            Ok(step) => Ok(FitOutcome::new(&step, &of_ranks)),
            Err(FitError::DoesNotFit(answer)) => Err(answer.needed_bytes),
            // What was stated, or the model itself, leaves no such number.
            Err(
                error @ (FitError::EffectiveBatch { .. }
                | FitError::NothingToChoose { .. }
                | FitError::Step(_)),
            ) if ranks > 1 => {
                let reason = error.to_string();
                let reason = reason.lines().next().unwrap_or_default().to_owned();
                refused.push(RefusedRanks { ranks, reason });
                continue;
            }
            Err(error) => return Err(error),
        };
        let waits = |found: &FitOutcome| found.network_exposed_seconds / found.step_seconds;
        rows.push(RankChoice {
            ranks,
            nodes: config.batch.world.nodes,
            efficiency: outcome.as_ref().ok().map(|found| 1.0 - waits(found)),
            needed_bytes: outcome.as_ref().err().copied(),
            outcome: outcome.ok(),
        });
    }
    let speeds = rows.iter().filter_map(|row| {
        let outcome = row.outcome.as_ref()?;
        Some((row.ranks, outcome.tokens_per_second))
    });
    let most = speeds.clone().map(|(_, speed)| speed).fold(0.0, f64::max);
    let fewest = speeds.clone().next().map(|(ranks, _)| ranks);
    let mut fastest = speeds.filter(|&(_, speed)| speed >= most);
    let fastest = fastest.next().map(|(ranks, _)| ranks);
    Ok(RankChoices {
        effective_batch,
        rows,
        fewest,
        fastest,
        refused,
    })
}

/// A configuration on so many ranks; on several, updates are at the end of the step.
pub fn on_ranks(config: &Config, ranks: usize) -> Config {
    let mut config = with_ranks(config, ranks);
    config.batch.update_in_backward &= config.batch.world.is_alone();
    config
}

fn with_fixed_ranks(request: &Request<'_>) -> Vec<&'static str> {
    let mut fixed = request.fixed.clone();
    fixed.push(RANKS);
    fixed
}

#[cfg(test)]
mod tests {
    use cinch_device::Card;

    use super::super::tests::config;
    use super::*;

    /// A card that holds a part of the model's states, and not all of them.
    fn small_card() -> (Card, u64) {
        (Card::known("A100 SXM4 80GB").unwrap(), 3 << 30)
    }

    fn choices(own: &[(&str, &str)], fixed: Vec<&'static str>, most: usize) -> RankChoices {
        let model = [
            ("model.type", "gpt2"),
            ("vram.max_seq_len", "256"),
            ("vram.batch_size", "1"),
            ("vram.gradient_accumulation_steps", "24"),
        ];
        let own: Vec<(&str, &str)> = model.into_iter().chain(own.iter().copied()).collect();
        let config = config(&own);
        let (card, bytes) = small_card();
        let request = Request {
            fixed,
            ..Request::new(&config, &card, bytes)
        };
        by_ranks(&request, most).unwrap()
    }

    #[test]
    fn every_number_keeps_the_effective_batch_and_none_is_offered_that_does_not() {
        let choices = choices(&[], Vec::new(), 24);
        let numbers: Vec<usize> = choices.rows.iter().map(|row| row.ranks).collect();
        // Above eight, machines of eight.
        assert_eq!(numbers, [1, 2, 3, 4, 6, 8, 24]);
        assert_eq!(choices.rows[6].nodes, 3);
        for row in &choices.rows {
            let Some(outcome) = &row.outcome else {
                assert!(row.needed_bytes.unwrap() > 3 << 30, "{row:?}");
                continue;
            };
            assert_eq!(outcome.settings.effective_batch, 24);
            assert_eq!(outcome.settings.ranks, row.ranks);
            assert!(outcome.total_bytes <= 3 << 30);
        }
        let fewest = choices.fewest.unwrap();
        let fits = |row: &RankChoice| row.outcome.is_some();
        let first = choices.rows.iter().find(|row| fits(row)).unwrap();
        assert_eq!(first.ranks, fewest);
        let fastest = choices.fastest.unwrap();
        let speed = |row: &RankChoice| {
            let outcome = row.outcome.as_ref();
            outcome.map_or(0.0, |outcome| outcome.tokens_per_second)
        };
        let most = choices.rows.iter().map(speed).fold(0.0, f64::max);
        let of_fastest = choices.rows.iter().find(|row| row.ranks == fastest);
        assert_eq!(of_fastest.map(speed), Some(most));
    }

    #[test]
    fn a_stated_micro_batch_leaves_fewer_numbers() {
        let choices = choices(
            &[
                ("vram.batch_size", "6"),
                ("vram.gradient_accumulation_steps", "4"),
            ],
            vec!["vram.batch_size"],
            8,
        );
        let numbers: Vec<usize> = choices.rows.iter().map(|row| row.ranks).collect();
        assert_eq!(numbers, [1, 2, 4]);
        let refused: Vec<usize> = choices.refused.iter().map(|one| one.ranks).collect();
        assert_eq!(refused, [3, 6, 8]);
        assert!(choices.refused[0].reason.contains("vram.batch_size = 6"));
    }
}
