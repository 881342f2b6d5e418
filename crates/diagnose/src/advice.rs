//! What to do, in order, and what not to bother with.

mod loading;
mod moment;
mod serving;
mod useless;
mod usual;

pub use useless::will_not_help;

use cinch_config::Bytes;
use cinch_config::remedy::{Effect, RemedyKind};

use crate::failure::{Cause, Fix, Priced, Run};
use crate::frame::{Phase, Server};
use crate::log::{Incident, Told};
use crate::message::{Event, Framework, Numbers};

/// Below this share of what a run takes, a saving is none.
const WORTHWHILE: f64 = 0.01;

/// All that advice follows from.
pub struct Case<'a> {
    pub incident: &'a Incident,
    pub cause: Cause,
    pub numbers: &'a Numbers,
    pub told: &'a Told,
    pub run: Option<&'a Run>,
}

impl Case<'_> {
    /// The program, where it is one that trains nothing.
    fn server(&self) -> Option<Server> {
        // A page that a program wrote of its failure has its name and no frames.
        let is_comfy = self.told.programs.contains(&"ComfyUI") && self.incident.steps == 0;
        self.incident.server.or(is_comfy.then_some(Server::Comfy))
    }

    /// Whether weights were on their way to the card, before any batch.
    fn is_loading(&self) -> bool {
        self.incident.phase == Some(Phase::Loading) && self.is_torch()
    }

    fn is_torch(&self) -> bool {
        matches!(
            self.incident.message.framework,
            Framework::PyTorch | Framework::BitsAndBytes | Framework::Nccl | Framework::Triton
        )
    }
}

fn shown(bytes: u64) -> String {
    Bytes::new(bytes).to_string()
}

pub fn fixes(case: &Case<'_>) -> Vec<Fix> {
    let mut fixes = moment::fixes(case);
    let takes_less = match case.cause {
        Cause::Capacity | Cause::Unclear | Cause::Cap | Cause::Spike | Cause::Fragmentation => true,
        // Room beside the others, where they stay.
        Cause::OtherProcess | Cause::NonPytorch => true,
        Cause::Leak | Cause::Host | Cause::NotOom => false,
    };
    // Settings of a step do not change what is beside it.
    let is_aside = matches!(
        case.incident.phase,
        Some(Phase::EvaluationOutputs | Phase::Saving | Phase::Resuming | Phase::Merging)
    );
    let is_of_server = matches!(
        case.incident.message.event,
        Event::CacheBlocks | Event::Pool
    );
    if !takes_less || is_aside || is_of_server {
        return fixes;
    }
    if let Some(server) = case.server() {
        fixes.extend(serving::fixes(server, case.incident.phase));
        return fixes;
    }
    if case.is_loading() {
        fixes.extend(loading::fixes(case));
        return fixes;
    }
    match case.run {
        Some(run) => fixes.extend(priced(case, run)),
        None => fixes.extend(usual::fixes(case)),
    }
    fixes
}

/// Changes whose saving was computed for this run: what costs least first.
fn priced(case: &Case<'_>, run: &Run) -> Vec<Fix> {
    let together = run.together.iter().map(|together| Fix {
        what: format!(
            "settings that fit: {}, which leaves {} (enough)",
            together.changes.join("; "),
            shown(together.leaves)
        ),
        saves_bytes: Some(run.predicted.saturating_sub(together.leaves)),
        command: together.command.clone(),
    });
    together.chain(alone(case, run, |_| true)).collect()
}

/// Each change by itself, of those that are asked for.
fn alone(case: &Case<'_>, run: &Run, is_asked: fn(RemedyKind) -> bool) -> Vec<Fix> {
    let total = case.numbers.limit.or(case.numbers.total).or(run.card);
    // Only where enough is idle, and then they are told already.
    let is_of_allocator = |kind| {
        matches!(
            kind,
            RemedyKind::ExpandableSegments | RemedyKind::SplitLimit
        )
    };
    let mut useful: Vec<&Priced> = run
        .priced
        .iter()
        .filter(|priced| is_worthwhile(priced, run) && priced.kind.effect() != Effect::ChangesModel)
        .filter(|priced| !is_of_allocator(priced.kind) && is_asked(priced.kind))
        .collect();
    let order = |effect: Effect| match effect {
        Effect::KeepsResult => 0,
        Effect::ChangesResult => 1,
        Effect::ChangesModel => 2,
    };
    useful.sort_by_key(|priced| (order(priced.kind.effect()), priced.kind.rank()));
    let fix = |priced: &&Priced| {
        let name = priced.kind.declaration().name;
        let enough = match total {
            Some(total) if priced.safe <= total => " (enough by itself)",
            _ => "",
        };
        let change = match priced.change.strip_prefix(name) {
            Some(more) => more.to_owned(),
            None => format!(": {}", priced.change),
        };
        Fix {
            what: format!(
                "{name}{change}, which leaves {}{enough}",
                shown(priced.leaves)
            ),
            saves_bytes: u64::try_from(priced.saves).ok(),
            command: priced.command.clone(),
        }
    };
    useful.iter().map(fix).collect()
}

fn is_worthwhile(priced: &Priced, run: &Run) -> bool {
    priced.saves as f64 > WORTHWHILE * run.predicted as f64
}
