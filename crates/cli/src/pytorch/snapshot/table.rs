//! What a recorded run used its memory for, as tables.

use cinch_config::Bytes;
use cinch_torch::snapshot::{
    BatchEffect, Explanation, Fragmentation, LiveLine, Origin, RanOut, RecordedCategory,
    RecordedPhase, Snapshot,
};
use cinch_torch::trace::WhatIf;
use comfy_table::Cell;

use crate::pytorch::show::signed;
use crate::table::{self, right, thousands};

/// Lines at the peak that the text shows, and the least share of it that they have; `--json` has
/// more.
const MOST_LINES: usize = 12;
const LEAST_SHARE: f64 = 0.001;
/// Shares of the whole from which on a way out is worth a sentence.
const WORTH_A_SENTENCE: f64 = 0.02;
const LARGE_SHARE: f64 = 0.25;

pub fn heading(snapshot: &Snapshot, explanation: &Explanation) -> String {
    format!(
        "{} events on device {}{}{}\n",
        thousands(explanation.num_events as u64),
        explanation.device,
        known(", ", snapshot.device_name.as_deref()),
        known(", PyTorch ", snapshot.torch_version.as_deref()),
    )
}

pub fn known(before: &str, value: Option<&str>) -> String {
    value.map_or_else(String::new, |value| format!("{before}{value}"))
}

pub fn ran_out(ran_out: &RanOut) -> String {
    let place = match described(&ran_out.origin) {
        Some(place) => format!("by {place}"),
        None => format!("in the {}", ran_out.phase.name()),
    };
    let (asked, free) = (Bytes::new(ran_out.bytes), Bytes::new(ran_out.device_free));
    let limit = if ran_out.device_free > ran_out.bytes {
        ": the process reached a limit of its own (set_per_process_memory_fraction)"
    } else {
        ""
    };
    format!(
        "memory ran out: {asked} were asked for {place}, and {free} of the card were free{limit}\n"
    )
}

/// Of the card, in use outside of PyTorch's allocator when the recording was saved.
pub fn outside(snapshot: &Snapshot, device: usize) -> Option<u64> {
    let total = snapshot.device_total?;
    Some(total.saturating_sub(snapshot.capacity(device)?))
}

/// From the tensors to the card.
pub fn memory(snapshot: &Snapshot, explanation: &Explanation) -> String {
    let mut table = table::new(&["memory", "size", "bytes"]);
    let mut row = |name: &str, bytes: u64| {
        table.add_row([
            Cell::new(name),
            right(Bytes::new(bytes)),
            right(thousands(bytes)),
        ]);
    };
    row("allocated at the peak", explanation.peak_allocated);
    row("reserved at the peak", explanation.peak_reserved);
    if let Some(outside) = outside(snapshot, explanation.device) {
        row("context, libraries, other programs", outside);
        row(
            "of the card at the peak",
            explanation.peak_reserved.saturating_add(outside),
        );
    } else if let Some(used) = snapshot.device_used {
        row("of the card at the end", used);
    }
    if let Some(total) = snapshot.device_total {
        row("the card", total);
    }
    format!("{table}\n")
}

/// When the peak is, and what is alive then.
pub fn peak(explanation: &Explanation) -> String {
    let step = explanation.peak_step.map_or_else(String::new, |step| {
        let batch = step
            .batch
            .map_or_else(String::new, |batch| format!(" (batch {batch})"));
        format!("in step {}{batch}, ", step.number)
    });
    let mut text = format!(
        "most is allocated {step}in the {}; alive then:\n",
        explanation.peak_phase.name()
    );
    let mut table = table::new(&["what for", "tensors", "size", "share"]);
    for one in explanation.categories.iter().filter(|one| one.bytes > 0) {
        table.add_row([
            Cell::new(one.category.name()),
            right(one.num_blocks),
            right(Bytes::new(one.bytes)),
            right(percent(one.bytes, explanation.peak_allocated)),
        ]);
    }
    text += &format!("{table}\n");
    let mut table = table::new(&["your line", "calls", "what for", "tensors", "size"]);
    let is_shown = |line: &&LiveLine| share(line.bytes, explanation.peak_allocated) >= LEAST_SHARE;
    let shown = explanation.lines.iter().take_while(is_shown);
    let shown = shown.take(MOST_LINES).count();
    for line in &explanation.lines[..shown] {
        let (own, op) = match (&line.origin.line, line.origin.library()) {
            (None, None) => (nobody(line).to_owned(), String::new()),
            (own, op) => (own.clone().unwrap_or_default(), op.unwrap_or_default()),
        };
        table.add_row([
            Cell::new(own),
            Cell::new(op),
            Cell::new(line.category.name()),
            right(line.num_blocks),
            right(Bytes::new(line.bytes)),
        ]);
    }
    table::settle(&mut table, &[3]);
    text += &format!("{table}\n");
    let listed: u64 = explanation.lines[..shown]
        .iter()
        .map(|line| line.bytes)
        .sum();
    let alive: u64 = explanation.categories.iter().map(|one| one.bytes).sum();
    if alive > listed {
        text += &format!("and smaller ones: {}\n", Bytes::new(alive - listed));
    }
    text
}

fn described(origin: &Origin) -> Option<String> {
    match (&origin.line, origin.library()) {
        (Some(line), Some(op)) => Some(format!("{line} ({op})")),
        (line, op) => line.clone().or(op),
    }
}

/// What stands in the place of a line where no Python code was running.
pub fn nobody(line: &LiveLine) -> &'static str {
    match (line.category, line.phase) {
        (RecordedCategory::BeforeRecording, _) => "(before the recording)",
        (_, RecordedPhase::Backward) => "(backward)",
        _ => "(not recorded)",
    }
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", 100.0 * share(part, whole))
}

fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Where the reserved bytes are.
pub fn fragmentation(parts: &Fragmentation) -> String {
    let mut table = table::new(&["when most is reserved", "size", "share"]);
    for (name, bytes) in [
        ("in tensors", parts.requested),
        ("rounding of their sizes", parts.inside_blocks),
        ("free, kept for small tensors", parts.small_pool),
        (
            "free segments: given back before memory runs out",
            parts.free_segments,
        ),
        ("holes between tensors: cannot be given back", parts.holes),
        ("reserved", parts.reserved),
    ] {
        table.add_row([
            Cell::new(name),
            right(Bytes::new(bytes)),
            right(percent(bytes, parts.reserved)),
        ]);
    }
    let largest = match parts.largest_hole {
        0 => String::new(),
        bytes => format!(
            "the largest hole has {}: a larger tensor needs a new segment\n",
            Bytes::new(bytes)
        ),
    };
    format!("{table}\n{largest}")
}

pub fn settings(lines: &[WhatIf]) -> String {
    let mut table = table::new(&[
        "PYTORCH_ALLOC_CONF",
        "reserved",
        "change",
        "driver calls",
        "retries",
    ]);
    let first = lines.first().map_or(0, |line| line.peak_reserved);
    for (index, line) in lines.iter().enumerate() {
        let name = match line.settings.as_str() {
            "" => "(nothing set)",
            text => text,
        };
        let mark = if index == 0 { ", as recorded" } else { "" };
        let change = match line.out_of_memory_at {
            Some(place) => format!("out of memory at request {}", thousands(place as u64)),
            None => signed(line.peak_reserved as i64 - first as i64),
        };
        table.add_row([
            Cell::new(format!("{name}{mark}")),
            right(Bytes::new(line.peak_reserved)),
            right(change),
            right(thousands(line.num_device_alloc)),
            right(line.num_alloc_retries),
        ]);
    }
    table::settle(&mut table, &[4, 3]);
    format!("{table}\n")
}

/// The same run with other batches.
pub fn batches(recorded: &[u64], effects: &[BatchEffect], outside: Option<u64>) -> String {
    let mut header = vec!["batch", "", "allocated", "reserved"];
    if outside.is_some() {
        header.extend(["of the card", "fits"]);
    }
    let mut table = table::new(&header);
    for effect in effects {
        let mark = match recorded.contains(&effect.batch) {
            true => "recorded",
            false => "",
        };
        let mut row = vec![
            right(thousands(effect.batch)),
            Cell::new(mark),
            right(Bytes::new(effect.peak_allocated)),
            right(Bytes::new(effect.peak_reserved)),
        ];
        if let Some(outside) = outside {
            row.push(right(Bytes::new(
                effect.peak_reserved.saturating_add(outside),
            )));
            row.push(Cell::new(match (effect.fits, effect.num_alloc_retries) {
                (Some(true), 0) => "yes".to_owned(),
                (Some(true), 1) => "yes, with one retry".to_owned(),
                (Some(true), retries) => format!("yes, with {retries} retries"),
                (Some(false), _) => "no".to_owned(),
                (None, _) => String::new(),
            }));
        }
        table.add_row(row);
    }
    format!("the same run if every step had this batch:\n{table}\n")
}

/// What would lower the figures, from what is known of this run alone.
pub fn advice(explanation: &Explanation) -> Vec<String> {
    let mut advice = Vec::new();
    let recorded = explanation.what_if.first();
    let best = explanation
        .what_if
        .iter()
        .filter(|line| line.out_of_memory_at.is_none())
        .min_by_key(|line| line.peak_reserved);
    if let (Some(recorded), Some(best)) = (recorded, best) {
        let saved = recorded.peak_reserved.saturating_sub(best.peak_reserved);
        if share(saved, recorded.peak_reserved) >= WORTH_A_SENTENCE && !best.settings.is_empty() {
            advice.push(format!(
                "PYTORCH_ALLOC_CONF={} reserves {} less for the same tensors",
                best.settings,
                Bytes::new(saved)
            ));
        }
    }
    let share_of = |wanted: &[RecordedCategory]| -> f64 {
        let bytes = explanation
            .categories
            .iter()
            .filter(|one| wanted.contains(&one.category))
            .map(|one| one.bytes)
            .sum();
        share(bytes, explanation.peak_allocated)
    };
    let activations = share_of(&[RecordedCategory::Activations]);
    if activations >= LARGE_SHARE {
        advice.push(format!(
            "{:.0} % of the peak is kept for the backward: a smaller batch with more accumulation, or checkpointing, lowers it",
            100.0 * activations
        ));
    }
    let states = share_of(&[RecordedCategory::OptimizerStates]);
    if states >= LARGE_SHARE {
        advice.push(format!(
            "{:.0} % of the peak is the optimizer's: states of eight bits take a quarter of it",
            100.0 * states
        ));
    }
    let flowing = share_of(&[RecordedCategory::Temporaries]);
    if flowing >= LARGE_SHARE {
        advice.push(format!(
            "{:.0} % of the peak are temporaries of the {}: a smaller batch lowers them",
            100.0 * flowing,
            explanation.peak_phase.name()
        ));
    }
    advice
}
