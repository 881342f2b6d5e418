//! What to do, in order, and what not to bother with.

mod moment;
mod useless;
mod usual;

pub use useless::will_not_help;

use cinch_config::Bytes;
use cinch_config::remedy::{Effect, RemedyKind};

use crate::failure::{Cause, Fix, Priced, Run};
use crate::frame::Phase;
use crate::log::{Incident, Told};
use crate::message::{Event, Numbers};

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
    if !takes_less || is_aside || case.incident.message.event == Event::CacheBlocks {
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
        .filter(|priced| !is_of_allocator(priced.kind))
        .collect();
    let order = |effect: Effect| match effect {
        Effect::KeepsResult => 0,
        Effect::ChangesResult => 1,
        Effect::ChangesModel => 2,
    };
    useful.sort_by_key(|priced| (order(priced.kind.effect()), priced.kind.rank()));
    let together = run.together.iter().map(|together| Fix {
        what: format!(
            "settings that fit: {}, which leaves {} (enough)",
            together.changes.join("; "),
            shown(together.leaves)
        ),
        saves_bytes: Some(run.predicted.saturating_sub(together.leaves)),
        command: together.command.clone(),
    });
    let alone = useful.iter().map(|priced| {
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
    });
    together.chain(alone).collect()
}

fn is_worthwhile(priced: &Priced, run: &Run) -> bool {
    priced.saves as f64 > WORTHWHILE * run.predicted as f64
}
