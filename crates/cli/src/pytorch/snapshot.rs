//! Recorded runs: `cinch plan --snapshot` explains one, `cinch trace` replays it.

use std::path::Path;

use cinch_config::Bytes;
use cinch_report::sparkline;
use cinch_torch::TorchError;
use cinch_torch::allocator::AllocatorConfig;
use cinch_torch::snapshot::{
    BatchEffect, CannotTell, Explanation, Fragmentation, Snapshot, batch_effect, explain,
};
use cinch_torch::trace::{WhatIf, compare, what_if};
use comfy_table::Cell;
use serde_json::json;

use crate::command::{print, print_json};
use crate::failure::usage;
use crate::table::{self, right, thousands};

/// Tensors at the peak that the text shows; `--json` has more.
const MOST_TENSORS: usize = 8;
/// Columns of the timeline.
const WIDTH: usize = 96;

/// What a recorded run used its memory for.
pub fn explain_file(
    path: &Path,
    batch: Option<&str>,
    timeline: bool,
    as_json: bool,
) -> anyhow::Result<()> {
    let batch = batch.map(batch_size).transpose()?;
    let snapshot = Snapshot::read(path)?;
    let explanation = explain(&snapshot)?;
    let effect = batch
        .map(|batch| other_batch(&snapshot, explanation.device, batch))
        .transpose()?;
    if as_json {
        let effect = effect.map(|effect| match effect {
            Ok(effect) => json!(effect),
            Err(reason) => json!({ "cannot_tell": reason.to_string() }),
        });
        return print_json(&json!({
            "snapshot": path,
            "device_name": snapshot.device_name,
            "torch_version": snapshot.torch_version,
            "device_used_bytes": snapshot.device_used,
            "explanation": explanation,
            "batch": effect,
        }));
    }
    print(&text(&snapshot, &explanation, timeline))?;
    match effect {
        None => Ok(()),
        Some(Ok(effect)) => print(&batch_text(&effect)),
        Some(Err(reason)) => print(&format!("another batch cannot be told: {reason}")),
    }
}

fn batch_size(text: &str) -> anyhow::Result<u64> {
    let size = text.parse().ok();
    let size = size.filter(|size| (1..=MOST_BATCH).contains(size));
    size.ok_or_else(|| {
        usage(format!(
            "--batch-size {text} is no number of samples\nhint: a whole number from 1 to {MOST_BATCH}"
        ))
    })
}

/// As the setting's limit.
const MOST_BATCH: u64 = 1 << 20;

fn other_batch(
    snapshot: &Snapshot,
    device: usize,
    batch: u64,
) -> Result<Result<BatchEffect, CannotTell>, TorchError> {
    if snapshot.devices.is_empty() {
        return Ok(Err(CannotTell::NoSteps));
    }
    batch_effect(snapshot, device, &snapshot.config()?, batch)
}

fn text(snapshot: &Snapshot, explanation: &Explanation, timeline: bool) -> String {
    let mut text = format!(
        "{} events on device {}{}{}\n",
        thousands(explanation.num_events as u64),
        explanation.device,
        known(", ", snapshot.device_name.as_deref()),
        known(", PyTorch ", snapshot.torch_version.as_deref()),
    );
    text += &format!(
        "allocated at the peak {}, reserved {}\n",
        Bytes::new(explanation.peak_allocated),
        Bytes::new(explanation.peak_reserved)
    );
    if let Some(used) = snapshot.device_used {
        text += &format!("of the card, at the end: {}\n", Bytes::new(used));
    }
    text += &categories(explanation);
    text += &largest(explanation);
    text += &fragmentation(&explanation.fragmentation);
    if timeline {
        text += &course(explanation);
    }
    if let Some(fidelity) = &explanation.fidelity {
        text += &match fidelity.exact {
            true => "the allocator's copy repeats the recording event for event\n".to_owned(),
            false => format!(
                "the allocator's copy repeats {} of {} segment events and {} of {} blocks\n",
                fidelity.num_matched_segment_events,
                fidelity.num_segment_events,
                fidelity.num_matched_blocks,
                fidelity.num_blocks
            ),
        };
    }
    text += &settings(&explanation.what_if);
    for note in &explanation.notes {
        text += &format!("note: {note}\n");
    }
    text
}

fn known(before: &str, value: Option<&str>) -> String {
    value.map_or_else(String::new, |value| format!("{before}{value}"))
}

fn categories(explanation: &Explanation) -> String {
    let mut table = table::new(&["at the peak", "blocks", "size", "share"]);
    for one in explanation.categories.iter().filter(|one| one.bytes > 0) {
        table.add_row([
            Cell::new(one.category.name()),
            right(one.num_blocks),
            right(Bytes::new(one.bytes)),
            right(percent(one.bytes, explanation.peak_allocated)),
        ]);
    }
    format!("{table}\n")
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}

fn largest(explanation: &Explanation) -> String {
    let mut table = table::new(&["largest at the peak", "for", "allocated by"]);
    for block in explanation.largest.iter().take(MOST_TENSORS) {
        let frame = block.frames.first().map_or("", String::as_str);
        table.add_row([
            right(Bytes::new(block.bytes)),
            Cell::new(block.category.name()),
            Cell::new(frame),
        ]);
    }
    format!("{table}\n")
}

fn fragmentation(parts: &Fragmentation) -> String {
    let mut table = table::new(&["when most is reserved", "size"]);
    for (name, bytes) in [
        ("asked for by tensors", parts.requested),
        ("rounding inside blocks", parts.inside_blocks),
        ("free in the pool of small blocks", parts.small_pool),
        (
            "free whole segments, can be given back",
            parts.free_segments,
        ),
        ("holes between tensors, cannot", parts.holes),
        ("largest hole", parts.largest_hole),
        ("reserved", parts.reserved),
    ] {
        table.add_row([Cell::new(name), right(Bytes::new(bytes))]);
    }
    format!("{table}\n")
}

fn course(explanation: &Explanation) -> String {
    let values = |of: fn(&cinch_torch::snapshot::TimelinePoint) -> u64| -> Vec<u64> {
        explanation.timeline.iter().map(of).collect()
    };
    format!(
        "allocated {}\nreserved  {}\n",
        sparkline(&values(|point| point.allocated), WIDTH),
        sparkline(&values(|point| point.reserved), WIDTH)
    )
}

fn settings(lines: &[WhatIf]) -> String {
    let mut table = table::new(&[
        "allocator settings",
        "reserved",
        "against the first",
        "calls of the driver",
        "retries",
    ]);
    let first = lines.first().map_or(0, |line| line.peak_reserved);
    for (index, line) in lines.iter().enumerate() {
        let name = match line.settings.as_str() {
            "" => "PyTorch's defaults",
            text => text,
        };
        let mark = if index == 0 { " (recorded)" } else { "" };
        let change = match line.out_of_memory_at {
            Some(place) => format!("out of memory at request {}", thousands(place as u64)),
            None => super::show::signed(line.peak_reserved as i64 - first as i64),
        };
        table.add_row([
            Cell::new(format!("{name}{mark}")),
            right(Bytes::new(line.peak_reserved)),
            right(change),
            right(thousands(line.num_device_alloc)),
            right(line.num_alloc_retries),
        ]);
    }
    format!("{table}\n")
}

fn batch_text(effect: &BatchEffect) -> String {
    format!(
        "with a batch of {}: allocated {}, reserved {}; {} requests of a step grow with the batch",
        effect.batch,
        Bytes::new(effect.peak_allocated),
        Bytes::new(effect.peak_reserved),
        effect.num_scaling
    )
}

/// The requests of a recorded run under other settings of the allocator.
pub fn replay_file(path: &Path, alloc_confs: &[String], as_json: bool) -> anyhow::Result<()> {
    let mut configs = Vec::new();
    for text in alloc_confs {
        configs.push((text.clone(), AllocatorConfig::parse(text)?));
    }
    let snapshot = Snapshot::read(path)?;
    let Some(device) = snapshot.busiest_device() else {
        return Err(usage(format!(
            "{} holds no events and no segments\n\
             hint: record some steps with the script of `cinch trace --script`",
            path.display()
        )));
    };
    let config = snapshot.config()?;
    let recorded = snapshot.settings.clone().unwrap_or_default();
    configs.insert(0, (recorded, config.clone()));
    let program = snapshot.program(device)?;
    let lines = what_if(&program, &configs, snapshot.device_total);
    let comparison = program.initial().map(|_| compare(&program, &config));
    if as_json {
        return print_json(&json!({
            "trace": path,
            "device": device,
            "operations": program.operations().len(),
            "exact": comparison.as_ref().map(|comparison| comparison.is_exact()),
            "peak_reserved_recorded":
                comparison.as_ref().map(|comparison| comparison.peak_reserved_recorded),
            "peak_reserved_replayed":
                comparison.as_ref().map(|comparison| comparison.peak_reserved_replayed),
            "settings": lines,
        }));
    }
    let mut text = format!(
        "{} requests of device {device}\n",
        thousands(program.operations().len() as u64)
    );
    if let Some(comparison) = comparison {
        text += &format!(
            "reserved at the peak: recorded {}, replayed {}\n",
            thousands(comparison.peak_reserved_recorded),
            thousands(comparison.peak_reserved_replayed)
        );
    }
    print(&(text + &settings(&lines)))
}
