//! Meeting a budget that is given: the search of `cinch fit`, for `cinch plan`, `cinch train` and
//! `cinch check` alike, so that one budget has one answer.
//!
//! It is asked where a budget was typed and the user left the cut of the effective batch open.
//! What was stated is kept, and nothing is taken that changes what is learned, but for a precision
//! that nobody stated. A micro batch that was stated is the user's own; it is cut only where it
//! does not fit, by the planner.

use cinch_config::{Config, Explained, Settings, Source};
use cinch_device::Card;
use cinch_fit::FitError;
use cinch_fit::search::{self, Permission, Permissions, Request};
use cinch_graph::Target;
use cinch_step::StepPlan;

use crate::args::MemoryArguments;
use crate::memory::Budget;
use crate::{calibration, overhead, world};

/// Rates of a desktop processor: a plan measures nothing, and between settings of one processor
/// only their ratio counts.
const CORES: usize = 8;
const FLOPS: f64 = 4e11;
const SIGMOIDS: f64 = 1e10;
const BANDWIDTH: f64 = 4e10;

/// The plan of a configuration: within the budget that was typed, else as `cinch_fit::plan` has it.
pub fn plan(
    settings: &Settings,
    config: &Config,
    memory: &MemoryArguments,
    target: Target,
) -> anyhow::Result<Result<StepPlan, FitError>> {
    let machine = overhead::machine(target);
    let typed = memory.budget()?.filter(|_| config.batch.micro_is_free);
    let Some(budget) = typed else {
        return Ok(cinch_fit::plan(config, machine));
    };
    let card = world::joined(card(&budget, target), config)?;
    let request = Request {
        machine,
        budget_bytes: budget.bytes,
        fixed: fixed(settings, false),
        permissions: Permissions {
            states: Permission::Never,
            sequence_length: Permission::Never,
            precisions: None,
        },
        calibration: calibration::known(),
        ..Request::new(config, &card, budget.capacity)
    };
    let found = search::best(&request);
    Ok(found.map(|step| StepPlan::clone(&step)))
}

/// Whose rates a plan is compared by.
pub fn card(budget: &Budget, target: Target) -> Card {
    match (&budget.gpu, target) {
        (Some(rates), Target::Cuda) => rates.card.clone(),
        _ => Card::cpu(CORES, FLOPS, SIGMOIDS, BANDWIDTH),
    }
}

/// The keys that a search leaves alone: what was typed now, and the precision of a file, because
/// another one gives other results.
pub fn fixed(settings: &Settings, any_precision: bool) -> Vec<&'static str> {
    let stays = |one: &&Explained| match one.source {
        Source::Flag(_) | Source::Environment(_) => true,
        Source::File { .. } | Source::Preset(_) => one.key == "vram.precision" && !any_precision,
        _ => false,
    };
    let explained = settings.explain();
    explained.iter().filter(stays).map(|one| one.key).collect()
}
