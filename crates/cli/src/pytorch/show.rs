//! A PyTorch run as tables.

use cinch_config::Bytes;
use cinch_torch::eager::{AllocationCategory, Line};
use cinch_torch::model::{Alive, LINES_OF, Origin, Profile};
use comfy_table::Cell;
use serde_json::{Value, json};

use super::estimate::{Estimate, phase_text, settings_text};
use super::workload::Run;
use crate::table::{self, right, thousands};
use crate::voice;

/// Kinds of tensors that the table shows; `--json` has all.
const MOST_KINDS: usize = 12;

pub fn heading(run: &Run, trainable: u64) -> String {
    format!(
        "{} in eager PyTorch: {}\n{}\n",
        run.name,
        table::parameters(run.workload.architecture.parameters(), trainable),
        settings_text(&run.workload, &run.alloc_conf)
    )
}

/// The figures, from the tensors to what the card loses.
pub fn memory(estimate: &Estimate) -> String {
    let mut table = table::new(&["memory", "size", "bytes"]);
    let outside = match estimate.overhead.measured {
        true => "+ context, kernels, libraries (measured)",
        false => "+ context, kernels, libraries (assumed)",
    };
    let prediction = &estimate.prediction;
    for (name, bytes) in [
        ("allocated at the peak", prediction.peak_allocated),
        ("+ fragmentation and cache", estimate.fragmentation_bytes()),
        ("reserved at the peak", prediction.peak_reserved),
        (outside, estimate.outside_bytes()),
        ("device use", estimate.device_bytes),
        ("safe figure", estimate.safe_bytes),
    ] {
        table.add_row([
            Cell::new(name),
            right(Bytes::new(bytes)),
            right(thousands(bytes)),
        ]);
    }
    format!("{table}\n")
}

/// When the peak is, and what is alive then.
pub fn peak(run: &Run, estimate: &Estimate, profile: &Profile) -> String {
    let scope = profile.peak.scope;
    let layer = scope
        .layer
        .map_or_else(String::new, |layer| format!(", layer {layer}"));
    let line = match profile.peak.origin.to_string() {
        none if none.is_empty() => none,
        line => format!(", {line}"),
    };
    let mut text = format!(
        "the peak is {} ({}{layer}{line}); alive then:\n",
        phase_text(estimate.peak_phase(), run.workload.recipe.accumulation),
        scope.name,
    );
    let mut table = table::new(&["for", "made in", "by", "line", "tensors", "size"]);
    for one in profile.alive.iter().take(MOST_KINDS) {
        table.add_row([
            Cell::new(category_name(one.category)),
            Cell::new(place(one)),
            Cell::new(one.op),
            Cell::new(one.origin),
            right(one.count),
            right(Bytes::new(one.bytes)),
        ]);
    }
    table::settle(&mut table, &[4, 1]);
    text += &format!("{table}\n");
    if let Some(rest) = profile
        .alive
        .get(MOST_KINDS..)
        .filter(|rest| !rest.is_empty())
    {
        let bytes = rest.iter().map(|one| one.bytes).sum();
        text += &format!("and {} kinds more: {}\n", rest.len(), Bytes::new(bytes));
    }
    if names_files(profile) {
        text += &format!("lines of {LINES_OF}\n");
    }
    text
}

/// Whether a line is one that can be opened.
pub fn names_files(profile: &Profile) -> bool {
    let lines = profile.alive.iter().filter_map(|one| one.origin.line());
    lines
        .into_iter()
        .any(|line| matches!(line, Line::Source { .. }))
}

pub fn alive_json(alive: &[Alive]) -> Value {
    let one = |one: &Alive| {
        json!({
            "category": category_name(one.category),
            "module": place(one),
            "op": one.op,
            "line": line_json(one.origin),
            "tensors": one.count,
            "bytes": one.bytes,
        })
    };
    alive.iter().map(one).collect()
}

/// The text of the table; null where there is no line.
pub fn line_json(origin: Origin) -> Value {
    origin.line().map(|_| origin.to_string()).into()
}

pub fn assumed(sentences: &[String]) -> String {
    if voice::is_quiet() {
        return String::new();
    }
    sentences
        .iter()
        .map(|one| format!("assumed: {one}\n"))
        .collect()
}

/// The part of the model; the optimizer runs outside of it.
fn place(one: &Alive) -> &'static str {
    match one.category {
        AllocationCategory::Optimizer => "optimizer.step",
        _ => one.scope,
    }
}

fn category_name(category: AllocationCategory) -> &'static str {
    match category {
        AllocationCategory::Parameter => "weights",
        AllocationCategory::Batch => "batch",
        AllocationCategory::Activation => "activations",
        AllocationCategory::Backward => "backward",
        AllocationCategory::Gradient => "gradients",
        AllocationCategory::Optimizer => "optimizer",
        AllocationCategory::Workspace => "workspace",
    }
}

/// A difference with its sign.
pub fn signed(bytes: i64) -> String {
    let size = Bytes::new(bytes.unsigned_abs());
    match bytes {
        0 => "0".to_owned(),
        bytes if bytes < 0 => format!("−{size}"),
        _ => format!("+{size}"),
    }
}
