//! The best settings for a card: a search over everything that may be chosen, at a fixed
//! effective batch.
//!
//! [`fit`] goes through the stages in order: `request` says what is asked, `axis` and `space`
//! what may be chosen, `sketch` what each choice takes, `explore` which one is best; `front` and
//! `technique` put the recommendation beside its neighbours, `guide` beside the guide's tables,
//! `ranks` beside other numbers of ranks, and `answer` is the report.
//!
//! A choice that changes the result (eight-bit states, shorter sequences) is a last resort unless
//! the request frees it: it is taken only where nothing else fits, the one that changes least
//! first, and the report says so.

mod answer;
mod axis;
mod calibration;
mod explore;
mod front;
mod guide;
mod ranks;
mod request;
mod sketch;
mod space;
mod technique;
#[cfg(test)]
mod tests;

pub use answer::{
    FitOutcome, FitReport, FitSettings, Rung, SettingChange, SettingValue, Technique,
    recomputation_text,
};
pub use axis::{Axis, Choice, best_precision};
pub use calibration::{Calibration, CalibrationFactor};
pub use guide::{GuideClaim, GuideRow, guide_rows};
pub use ranks::{RankChoice, RankChoices, RefusedRanks, by_ranks, on_ranks};
pub use request::{Permission, Permissions, Request, budget_with_margin, stated_keys};

use std::ops::Range;
use std::sync::Arc;

use cinch_config::Config;
use cinch_config::remedy::Effect;
use cinch_step::StepPlan;

use crate::{DoesNotFit, FitError};
use explore::{Candidate, Explored, Halt};
use sketch::Length;
use space::{Space, Tier};
use technique::{checkpointing_value, setting_values};

/// What a search found.
#[derive(Clone, Debug)]
pub struct Fit {
    pub report: FitReport,
    /// The recommended settings, planned.
    pub plan: Arc<StepPlan>,
}

impl Fit {
    /// The recommended settings.
    pub fn config(&self) -> &Config {
        &self.plan.config
    }
}

/// The fastest settings within the budget, and what there is to say about them.
pub fn fit(request: &Request<'_>) -> Result<Fit, FitError> {
    let space = Space::new(request)?;
    with_any_length(request, |length| answer(request, &space, length))
}

/// The fastest settings within the budget, without the rest of the report.
pub fn best(request: &Request<'_>) -> Result<Arc<StepPlan>, FitError> {
    let space = Space::new(request)?;
    with_any_length(request, |length| Ok(search(request, &space, length)?.plan))
}

/// Looks at short chains of blocks; where the model's blocks turn out not to be alike, or some of
/// them have activations in host memory, at whole ones.
fn with_any_length<T>(
    request: &Request<'_>,
    mut attempt: impl FnMut(Length) -> Result<T, Halt>,
) -> Result<T, FitError> {
    let mut length = match request.config.batch.offload_activations {
        0 => Length::Short,
        _ => Length::Whole,
    };
    loop {
        match attempt(length) {
            Ok(found) => return Ok(found),
            Err(Halt::Failed(error)) => return Err(error),
            Err(Halt::Unlike) => length = Length::Whole,
        }
    }
}

/// The best of the first tier that has anything within the budget.
struct Found<'a> {
    explored: Explored<'a>,
    best: Candidate,
    plan: Arc<StepPlan>,
    tier: Tier,
}

fn search<'a>(
    request: &'a Request<'a>,
    space: &'a Space,
    length: Length,
) -> Result<Found<'a>, Halt> {
    let limit = request.memory_bytes.max(request.budget_bytes);
    let mut smallest: Option<(u64, Config, usize)> = None;
    for tier in space.tiers() {
        let mut explored = Explored::new(request, space, &tier, length, limit)?;
        if let Some((best, plan)) = explored.best_within(request.budget_bytes)? {
            return Ok(Found {
                explored,
                best,
                plan,
                tier,
            });
        }
        if let Some(least) = explored.smallest()
            && smallest.is_none()
        {
            smallest = Some((least.bytes, explored.config(least), least.recomputed));
        }
    }
    let Some((_, config, recomputed)) = smallest else {
        let stated = request.fixed.join(", ");
        return Err(FitError::NothingToChoose { stated }.into());
    };
    let step = StepPlan::new(&config, request.machine, recomputed)?;
    let answer = DoesNotFit::new(&config, &step, request.machine, request.budget_bytes)?;
    Err(FitError::DoesNotFit(Box::new(answer)).into())
}

fn answer<'a>(request: &'a Request<'a>, space: &'a Space, length: Length) -> Result<Fit, Halt> {
    let Found {
        mut explored,
        best,
        plan,
        tier,
    } = search(request, space, length)?;
    let recommended = FitOutcome::new(&plan, request);
    let ladder = front::ladder(&mut explored)?;
    let front = front::front(&mut explored, &recommended)?;
    let stored = technique::stored_activations(&mut explored, best)?;
    let techniques = stored.into_iter();
    let techniques = techniques.chain(technique::techniques(&explored, best)?);
    let changes = technique::changes(&explored, best)?;
    let config = &plan.config;
    let site = &explored.sites[best.site];
    let chosen = space.axes.iter().zip(&site.point);
    let mut values: Vec<SettingValue> = chosen
        .flat_map(|(axis, &choice)| setting_values(&axis.choices[choice]))
        .collect();
    values.extend(checkpointing_value(
        best.recomputed,
        config.model.num_blocks(),
    ));
    let (card, kind) = (&request.card.name, config.model.name());
    let precision = config.batch.precision;
    let report = FitReport {
        model: config.model.name().to_owned(),
        size: config.model.size_name().map(str::to_owned),
        parameters: plan.config.model.parameters(),
        card: card.clone(),
        memory_bytes: request.memory_bytes,
        budget_bytes: request.budget_bytes,
        is_calibrated: request.calibration.is_measured(card, kind, precision),
        recommended,
        values,
        changes,
        ladder,
        front,
        techniques: techniques.collect(),
        notes: notes(space, &tier),
        looked_at: explored.candidates.len(),
        planned: explored.num_planned(),
    };
    Ok(Fit { report, plan })
}

/// What last resorts were taken.
fn notes(space: &Space, tier: &Tier) -> Vec<String> {
    let axes = space.axes.iter().zip(tier);
    let taken = axes.filter(|(axis, choices)| choices.start >= axis.num_free);
    let note = |(axis, choices): (&Axis, &Range<usize>)| {
        let choice = &axis.choices[choices.start];
        let price = match axis.effect {
            Effect::KeepsResult => "which is slower",
            Effect::ChangesResult => "which changes the result",
            Effect::ChangesModel => "which changes the model",
        };
        format!(
            "nothing with {} fits the budget: {}, {price}",
            axis.written.description, choice.description
        )
    };
    taken.map(note).collect()
}
