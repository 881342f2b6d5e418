//! Memory over the steps of a PyTorch run, by what it is for.

use std::collections::{BTreeMap, HashMap};

use cinch_config::Bytes;
use cinch_graph::Phase;
use cinch_plan::{BytesByCategory, Category};
use cinch_report::{Held, Moment, StepPicture, Words, text_chart};
use cinch_torch::TorchError;
use cinch_torch::eager::{self, AllocationCategory};
use cinch_torch::model::{Alive, Origin, Workload};
use serde_json::{Value, json};

use super::estimate::{Estimate, settings_text};
use super::workload::Run;
use crate::picture;

/// Moments that the steps are thinned to.
const MOMENTS: usize = 512;
/// What the chart shows.
const STEPS: &str =
    "two steps, of at most two micro batches; the first makes the optimizer's states";

/// The steps as a picture: what tensors asked for, below what is reserved.
pub fn picture(run: &Run, estimate: &Estimate, alive: &[Alive]) -> Result<StepPicture, TorchError> {
    let weights = estimate.prediction.readings.first();
    let held = alive.iter().filter(|one| {
        use AllocationCategory::{Gradient, Optimizer, Parameter};
        !matches!(one.category, Parameter | Gradient | Optimizer)
    });
    Ok(StepPicture {
        title: format!(
            "{} in PyTorch: {} of the card",
            run.name,
            Bytes::new(estimate.device_bytes)
        ),
        subtitle: settings_text(&run.workload, &run.alloc_conf),
        overhead_bytes: estimate.outside_bytes(),
        arena_bytes: estimate.prediction.peak_reserved,
        micro_batches: 1,
        moments: moments(
            &run.outline(),
            weights.map_or(0, |reading| reading.requested),
        )?,
        largest: largest(held),
        safe_bytes: Some(estimate.safe_bytes),
        words: Words {
            outside: "context, kernels, libraries",
            unused: "rounding, holes, cache",
            total: "device use",
            meaning: "of the card",
            axis: Some(STEPS.to_owned()),
        },
        ..StepPicture::default()
    })
}

pub fn chart(course: &StepPicture) -> String {
    format!(
        "\n{STEPS}:\n{}\n",
        text_chart(course, picture::terminal_chart())
    )
}

pub fn as_json(picture: &StepPicture) -> Value {
    let moment = |moment: &Moment| {
        json!({
            "phase": phase_name(moment.phase),
            "at": moment.name,
            "bytes": moment.total(),
        })
    };
    picture.moments.iter().map(moment).collect()
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Recompute => "recompute",
        Phase::Backward => "backward",
        Phase::Exchange => "exchange",
        Phase::Update => "optimizer",
    }
}

/// The highest moment of each stretch of requests.
fn moments(workload: &Workload, weight_bytes: u64) -> Result<Vec<Moment>, TorchError> {
    let events = workload.trace()?;
    let categories = categories(&events);
    let mut bytes = BytesByCategory::default();
    bytes[Category::Weights.index()] = weight_bytes;
    let mut phase = Phase::Forward;
    let mut moments: Vec<Moment> = Vec::with_capacity(MOMENTS);
    for stretch in events.chunks(events.len().div_ceil(MOMENTS).max(1)) {
        let mut highest: Option<(u64, &eager::Event, Phase, BytesByCategory)> = None;
        for event in stretch {
            let place = &mut bytes[categories[&event.id].index()];
            if event.is_free {
                *place = place.saturating_sub(event.bytes);
                continue;
            }
            *place += event.bytes;
            phase = phase_of(event.category, phase);
            let total = bytes.iter().sum();
            if highest.is_none_or(|(most, ..)| total > most) {
                highest = Some((total, event, phase, bytes));
            }
        }
        moments.extend(highest.map(|(_, event, phase, bytes)| Moment {
            name: moment_name(event),
            phase,
            block: event.scope.layer.map(|layer| layer as usize),
            seconds: None,
            bytes,
        }));
    }
    Ok(moments)
}

/// What runs, with its line where it has one.
fn moment_name(event: &eager::Event) -> String {
    match Origin::of(event) {
        Origin::Nowhere => format!("{} {}", event.scope.name, event.op),
        origin => format!("{} {}, {origin}", event.scope.name, event.op),
    }
}

/// Tensors that are alive at the peak, those of one op in one part of the model together, largest
/// first.
fn largest<'a>(alive: impl Iterator<Item = &'a Alive>) -> Vec<Held> {
    let mut kinds: BTreeMap<(&str, &str), (u64, u64)> = BTreeMap::new();
    for one in alive {
        let (count, bytes) = kinds.entry((one.op, one.scope)).or_default();
        *count += one.count;
        *bytes += one.bytes;
    }
    let mut kinds: Vec<Held> = kinds
        .into_iter()
        .map(|((op, scope), (count, bytes))| Held {
            name: match count {
                1 => format!("{op} of {scope}"),
                count => format!("{count} × {op} of {scope}"),
            },
            bytes,
        })
        .collect();
    kinds.sort_by_key(|held| std::cmp::Reverse(held.bytes));
    kinds
}

/// What each allocation was for. Who frees it may know better than who asked: a gradient is one
/// once a leaf takes it, and what the optimizer gives back was no state.
fn categories(events: &[eager::Event]) -> HashMap<u32, Category> {
    let mut categories = HashMap::new();
    for event in events {
        let category = match (event.category, event.is_free) {
            (AllocationCategory::Parameter, _) => Category::Weights,
            (AllocationCategory::Batch, _) => Category::Batch,
            (AllocationCategory::Activation | AllocationCategory::Backward, _) => {
                Category::Activations
            }
            (AllocationCategory::Gradient, _) => Category::Gradients,
            (AllocationCategory::Optimizer, false) => Category::Optimizer,
            (AllocationCategory::Optimizer, true) | (AllocationCategory::Workspace, _) => {
                Category::Workspace
            }
        };
        categories.insert(event.id, category);
    }
    categories
}

/// What runs when such memory is asked for. Activations that are asked for after the backward
/// began are made a second time, until a new batch comes.
fn phase_of(category: AllocationCategory, before: Phase) -> Phase {
    match (category, before) {
        (AllocationCategory::Batch, _) => Phase::Forward,
        (AllocationCategory::Activation, Phase::Backward | Phase::Recompute) => Phase::Recompute,
        (AllocationCategory::Activation, _) => Phase::Forward,
        (AllocationCategory::Backward | AllocationCategory::Gradient, _) => Phase::Backward,
        (AllocationCategory::Optimizer, _) => Phase::Update,
        (AllocationCategory::Parameter | AllocationCategory::Workspace, before) => before,
    }
}
