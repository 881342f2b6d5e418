//! Plans and lists as tables.

use cinch_config::{Bytes, Explained};
use cinch_step::PlanReport;
use comfy_table::{Cell, CellAlignment, Table, presets};

pub fn new(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(header.iter().map(Cell::new));
    table
}

pub fn right(text: impl ToString) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// `1234567` as `1,234,567`.
pub fn thousands(number: u64) -> String {
    Bytes::new(number).exact()
}

/// A rate or count with a unit prefix: 1.23 T.
pub fn scaled(number: f64) -> String {
    for (unit, prefix) in [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if number >= unit {
            return format!("{:.2} {prefix}", number / unit);
        }
    }
    format!("{number:.0} ")
}

/// Settings, where each came from, and what it overrode.
pub fn explain<'a>(settings: impl IntoIterator<Item = &'a Explained>) -> Table {
    let mut table = new(&["setting", "value", "from", "instead of"]);
    for one in settings {
        let overridden: Vec<String> = one
            .overridden
            .iter()
            .map(|other| format!("{} ({})", other.value, other.source))
            .collect();
        table.add_row([
            one.key.to_owned(),
            one.value.to_string(),
            one.source.to_string(),
            overridden.join(", "),
        ]);
    }
    table
}

/// The host's side of a plan for a GPU, or of one that keeps states beside the arena.
fn host(memory: &cinch_step::MemoryReport) -> String {
    let host = &memory.host;
    let parts = [
        ("optimizer states", host.offloaded_states),
        ("pinned buffers", host.staging),
    ];
    let parts: Vec<String> = parts
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(name, bytes)| format!("{name} {}", Bytes::new(bytes)))
        .collect();
    if parts.is_empty() {
        return String::new();
    }
    format!("in host memory: {}\n", parts.join(", "))
}

/// What is not the default about the optimizer.
fn optimizer(settings: &cinch_step::SettingsReport) -> String {
    let mut text = String::new();
    if settings.optimizer_states != "fp32" || settings.offload {
        text += &format!(", {} optimizer states", settings.optimizer_states);
    }
    if settings.offload {
        text += " in host memory";
    }
    if settings.update_in_backward {
        text += ", updates inside the backward";
    }
    text
}

/// The settings, the breakdown and whether it fits.
pub fn plan(report: &PlanReport) -> String {
    let settings = &report.settings;
    let mut text = format!(
        "{}{}: {} parameters{}\n",
        report.model,
        report
            .size
            .as_ref()
            .map_or_else(String::new, |size| format!(" {size}")),
        thousands(report.parameters),
        if report.trainable == report.parameters {
            String::new()
        } else {
            format!(", {} trainable", thousands(report.trainable))
        }
    );
    text += &format!(
        "batch {} × {} = {} sequences of {} tokens, {}, {} of {} blocks recomputed{}, on {}\n",
        settings.batch_size,
        settings.accumulation,
        settings.effective_batch,
        settings.seq_len,
        settings.precision,
        settings.checkpointing.blocks,
        settings.checkpointing.of,
        optimizer(settings),
        report.device
    );
    let memory = &report.memory;
    let b = &memory.breakdown;
    let mut table = new(&["memory", "size", "bytes"]);
    let total = ("total", b.total());
    for (name, bytes) in b.parts().into_iter().chain([total]) {
        let name = match name {
            "overhead" => "overhead (outside the arena)",
            other => other,
        };
        table.add_row([
            Cell::new(name),
            right(Bytes::new(bytes)),
            right(thousands(bytes)),
        ]);
    }
    text += &table.to_string();
    text += &format!(
        "\npeak at {}; arena {}, lower bound {}\n",
        memory.peak_at,
        Bytes::new(memory.arena_bytes),
        Bytes::new(memory.lower_bound_bytes)
    );
    text += &host(memory);
    text += &format!("one step: {}FLOP", scaled(report.step_flops as f64));
    if report.useful_flops < report.step_flops {
        let again = report.step_flops - report.useful_flops;
        let share = 100.0 * again as f64 / report.step_flops as f64;
        text += &format!(" ({share:.1} % of it recomputation)");
    }
    text.push('\n');
    if let Some(budget) = report.budget_bytes {
        let share = 100.0 * b.total() as f64 / budget as f64;
        text += &format!(
            "{} the budget of {}: {share:.1} %\n",
            if report.fits { "fits" } else { "does not fit" },
            Bytes::new(budget)
        );
    }
    text
}
