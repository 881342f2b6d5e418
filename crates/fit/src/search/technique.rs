//! What each technique does alone, from the recommended settings; and why the recommendation
//! differs from what the user wrote.

use cinch_config::remedy::{BATCH_SIZE, CHECKPOINTING, Effect, RemedyKind};
use cinch_config::{Bytes, Config};
use cinch_graph::Target;
use cinch_step::StepPlan;
use rayon::prelude::*;

use super::answer::{SettingChange, SettingValue, Technique, recomputation_text};
use super::axis::{Choice, split};
use super::explore::{Candidate, Explored, Glance, Halt, SAME_SPEED};
use super::request::Request;
use super::space::{is_sensible, with_recomputed};
use crate::FitError;

/// A change that is to be looked at: the settings with it, and how to tell of it.
struct Trial {
    config: Config,
    recomputed: usize,
    change: String,
    values: Vec<SettingValue>,
    effect: Effect,
}

/// Each technique switched on alone, or off where it is on.
pub(crate) fn techniques(
    explored: &Explored<'_>,
    best: Candidate,
) -> Result<Vec<Technique>, FitError> {
    let here = explored.glance(best);
    let budget = explored.request.budget_bytes;
    let technique = |trial: Trial| {
        let there = explored.look_at(&trial.config, trial.recomputed)?;
        Ok(Technique {
            change: trial.change,
            values: trial.values,
            effect: trial.effect,
            bytes: difference(there.bytes, here.bytes),
            host_bytes: difference(there.host_bytes, here.host_bytes),
            speed: here.pace / there.pace - 1.0,
            fits: there.bytes <= budget,
        })
    };
    let trials = trials(explored, best);
    trials.into_par_iter().map(technique).collect()
}

fn difference(with: u64, without: u64) -> i64 {
    let difference = i128::from(with) - i128::from(without);
    difference.clamp(i64::MIN.into(), i64::MAX.into()) as i64
}

/// Activations of recomputed blocks in host memory, of as many as are fastest; none where that is no
/// faster, where nothing is recomputed, or where the user has said how many.
///
/// Blocks that keep some there are not like the others, so that a short chain does not tell: numbers of
/// them are planned in full, an eighth of the recomputed blocks apart.
pub(crate) fn stored_activations(
    explored: &mut Explored<'_>,
    best: Candidate,
) -> Result<Option<Technique>, Halt> {
    const KIND: RemedyKind = RemedyKind::OffloadActivations;
    const PARTS: usize = 8;
    let request = explored.request;
    let config = explored.config(best);
    let keys = KIND.declaration().keys;
    let is_open = config.batch.offload_activations == 0
        && !keys.iter().any(|key| request.fixed.contains(key));
    let is_alone = config.batch.world.is_alone();
    if request.machine.target != Target::Cuda || !is_open || !is_alone {
        return Ok(None);
    }
    let here = explored.plan(best)?;
    let seconds = |step: &StepPlan| step.predict(request.card, request.tf32).seconds;
    let mut counts: Vec<usize> = (1..=PARTS)
        .map(|part| (best.recomputed * part).div_ceil(PARTS))
        .filter(|&count| count > 0)
        .collect();
    counts.dedup();
    let planned = counts.into_par_iter().map(|count| {
        let mut config = config.clone();
        config.batch.offload_activations = count;
        let step = StepPlan::new(&config, request.machine, best.recomputed)?;
        let fits = step.total_bytes() <= request.budget_bytes;
        Ok((fits, seconds(&step), count, step))
    });
    let planned = planned.collect::<Result<Vec<_>, FitError>>()?;
    // What fits goes before what is faster.
    let fastest = planned
        .into_iter()
        .min_by(|a, b| b.0.cmp(&a.0).then(a.1.total_cmp(&b.1)));
    let technique = |(fits, there, count, step): (bool, f64, usize, StepPlan)| {
        let count = count.to_string();
        let value = |&key| SettingValue {
            key,
            value: Some(count.clone()),
        };
        Technique {
            change: KIND.said(&[&count]),
            values: keys.iter().map(value).collect(),
            effect: KIND.effect(),
            bytes: difference(step.total_bytes(), here.total_bytes()),
            host_bytes: difference(step.plan.host_bytes, here.plan.host_bytes),
            speed: seconds(&here) / there - 1.0,
            fits,
        }
    };
    let technique = fastest.map(technique);
    Ok(technique.filter(|technique| technique.speed > SAME_SPEED))
}

fn trials(explored: &Explored<'_>, best: Candidate) -> Vec<Trial> {
    let (space, request) = (explored.space, explored.request);
    let site = &explored.sites[best.site];
    let blocks = site.config.model.num_blocks();
    let mut trials = Vec::new();
    let counts = space.recomputed(&site.config);
    for recomputed in [0, blocks / 2, blocks] {
        let is_other = recomputed != best.recomputed
            && counts.contains(&recomputed)
            && !trials.iter().any(|t: &Trial| t.recomputed == recomputed);
        if is_other {
            trials.push(Trial {
                config: with_recomputed(&site.config, recomputed),
                recomputed,
                change: recomputation_text(recomputed, blocks),
                values: checkpointing_value(recomputed, blocks),
                effect: RemedyKind::Recomputation.effect(),
            });
        }
    }
    for (index, axis) in space.axes.iter().enumerate() {
        let chosen = site.point[index];
        for (other, choice) in axis.choices.iter().enumerate() {
            // Of the many ways to cut a batch or a sequence, the neighbours.
            let is_count = axis.choices.len() > 4 || axis.keys.contains(&BATCH_SIZE);
            if other == chosen || (is_count && chosen.abs_diff(other) > 1) {
                continue;
            }
            let mut point = site.point.clone();
            point[index] = other;
            let config = space.config(request.config, &point);
            if is_sensible(&config, request.config) {
                let recomputed = as_many(best.recomputed, blocks, &config);
                trials.push(Trial {
                    config: with_recomputed(&config, recomputed),
                    recomputed,
                    change: choice.description.clone(),
                    values: setting_values(choice),
                    effect: axis.effect,
                });
            }
        }
    }
    trials
}

/// A number of recomputed blocks in a configuration that may have another number of blocks: all
/// stay all.
fn as_many(recomputed: usize, blocks: usize, config: &Config) -> usize {
    let most = config.model.num_blocks();
    match recomputed == blocks {
        true => most,
        false => recomputed.min(most),
    }
}

/// What the recommendation has otherwise than the user wrote.
pub(crate) fn changes(
    explored: &Explored<'_>,
    best: Candidate,
) -> Result<Vec<SettingChange>, FitError> {
    let (space, request) = (explored.space, explored.request);
    let site = &explored.sites[best.site];
    let mut changes = Vec::new();
    for (index, axis) in space.axes.iter().enumerate() {
        let choice = &axis.choices[site.point[index]];
        if choice.is_in(request.config) {
            continue;
        }
        let kept = match axis.keys.contains(&BATCH_SIZE) {
            true => kept_micro_batch(request),
            false => Some(axis.written.clone()),
        };
        let reason = match kept {
            Some(kept) if kept.description != choice.description => {
                let mut config = site.config.clone();
                kept.write(&mut config);
                if is_sensible(&config, request.config) {
                    let blocks = site.config.model.num_blocks();
                    let recomputed = as_many(best.recomputed, blocks, &config);
                    let look = explored.look_at(&config, recomputed)?;
                    reason(&kept.description, look, best, request.budget_bytes)
                } else {
                    "the other settings leave no other choice".to_owned()
                }
            }
            _ => format!("the effective batch is {}", request.effective_batch()),
        };
        changes.push(SettingChange {
            from: axis.written.description.clone(),
            to: choice.description.clone(),
            values: setting_values(choice),
            effect: axis.effect,
            reason,
        });
    }
    let blocks = site.config.model.num_blocks();
    if let Some(asked) = crate::asked_blocks(request.config)
        && as_many(asked, request.config.model.num_blocks(), &site.config) != best.recomputed
    {
        let asked = as_many(asked, request.config.model.num_blocks(), &site.config);
        let kept = explored.look_at(&site.config, asked)?;
        let from = recomputation_text(asked, blocks);
        changes.push(SettingChange {
            reason: reason(&from, kept, best, request.budget_bytes),
            from,
            to: recomputation_text(best.recomputed, blocks),
            values: checkpointing_value(best.recomputed, blocks),
            effect: RemedyKind::Recomputation.effect(),
        });
    }
    Ok(changes)
}

/// The user's micro batch at the effective batch that is asked for, so that what is compared
/// trains on as many sequences a step; none where it does not divide it.
fn kept_micro_batch(request: &Request<'_>) -> Option<Choice> {
    let batch = &request.config.batch;
    let each = request.effective_batch() / batch.world.ranks.max(1);
    let micro = batch.batch_size;
    let divides = each.is_multiple_of(micro);
    divides.then(|| split(micro, each / micro))
}

/// Why not what the user wrote, from a look at the recommendation with only that put back.
fn reason(kept: &str, look: Glance, best: Candidate, budget: u64) -> String {
    if look.bytes > budget {
        let (needed, budget) = (Bytes::new(look.bytes), Bytes::new(budget));
        return format!("with {kept} it needs {needed}, and the budget is {budget}");
    }
    let slower = look.pace / best.pace - 1.0;
    if slower > SAME_SPEED {
        return format!("{:.0} % faster than with {kept}", 100.0 * slower);
    }
    match look.bytes.saturating_sub(best.bytes) {
        0 => format!("with {kept} other settings would have to give way"),
        more => format!("as fast as with {kept}, in {} less", Bytes::new(more)),
    }
}

pub(crate) fn setting_values(choice: &Choice) -> Vec<SettingValue> {
    let values = choice.values.iter().cloned();
    values
        .map(|(key, value)| SettingValue { key, value })
        .collect()
}

pub(crate) fn checkpointing_value(recomputed: usize, blocks: usize) -> Vec<SettingValue> {
    let value = match recomputed {
        0 => "none".to_owned(),
        _ if recomputed == blocks => "full".to_owned(),
        _ => recomputed.to_string(),
    };
    vec![SettingValue {
        key: CHECKPOINTING,
        value: Some(value),
    }]
}
