//! Plans and lists as tables.

use std::ops::RangeInclusive;

use cinch_config::{Bytes, Explained, Source};
use cinch_step::{HostMemory, PlanReport};
use comfy_table::{
    Cell, CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets,
};

use crate::voice;

/// Where no terminal says how wide it is.
const PLAIN_WIDTH: u16 = 80;

/// Columns of the terminal that standard output is, if it is one.
pub fn terminal_width() -> Option<usize> {
    usable(Table::new().width())
}

/// Columns of the terminal that standard error is, if it is one.
pub fn error_width() -> Option<usize> {
    usable(Table::new().use_stderr().width())
}

/// What mpirun gives its processes for a terminal has a column or none.
fn usable(width: Option<u16>) -> Option<usize> {
    const LEAST: u16 = 20;
    width.filter(|width| *width >= LEAST).map(usize::from)
}

/// Columns that a table may take: the terminal's, else those that `COLUMNS` says.
pub fn line_width() -> u16 {
    const USABLE: RangeInclusive<u16> = 40..=1000;
    let stated = || {
        let columns = std::env::var("COLUMNS").ok()?;
        columns.parse().ok().filter(|width| USABLE.contains(width))
    };
    let width = Table::new().width().or_else(stated);
    width.unwrap_or(PLAIN_WIDTH)
}

/// A note, in one line: `print` breaks it where it has to be.
pub fn note(text: &str) -> String {
    format!("note: {text}")
}

/// Lines of at most `width` columns, those that are too long broken between words. What follows is
/// set in under the line's own indent, or under what comes after its mark (`note: `). Tables are
/// as wide as they are.
pub fn broken(text: &str, width: usize) -> String {
    const MARKS: [&str; 6] = [
        "note: ",
        "assumed: ",
        "what helps: ",
        "error: ",
        "hint: ",
        "skipped: ",
    ];
    let line = |line: &str| {
        let starts_table = line.starts_with(['│', '┌', '╞', '└']);
        if starts_table || visible_width(line) <= width {
            return line.to_owned();
        }
        let mark = MARKS.iter().find(|mark| line.starts_with(**mark));
        let own = line.len() - line.trim_start_matches(' ').len();
        let indent = mark.map_or(own, |mark| mark.len());
        let (first, rest) = line.split_at(indent);
        first.to_owned() + &wrapped(rest, indent, width)
    };
    let mut lines: Vec<String> = text.lines().map(line).collect();
    if text.ends_with('\n') {
        lines.push(String::new());
    }
    lines.join("\n")
}

/// Columns of a line, without those of colour codes.
fn visible_width(line: &str) -> usize {
    let mut parts = line.split('\u{1b}');
    let first = parts.next().map_or(0, |part| part.chars().count());
    let others = parts.map(|part| {
        let text = part.split_once('m').map_or("", |(_, text)| text);
        text.chars().count()
    });
    first + others.sum::<usize>()
}

/// Text broken between words into lines of at most `width` columns, of which `indent` are left
/// empty from the second line on. Lines that begin with a blank have a layout of their own and
/// stay as they are.
pub fn wrapped(text: &str, indent: usize, width: usize) -> String {
    let room = width.saturating_sub(indent);
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let mut current = match line.starts_with(' ') {
            true => words.by_ref().collect::<Vec<_>>().join(" "),
            false => words.next().unwrap_or_default().to_owned(),
        };
        for word in words {
            if visible_width(&current) + 1 + visible_width(word) > room {
                lines.push(std::mem::take(&mut current));
            } else {
                current.push(' ');
            }
            current.push_str(word);
        }
        lines.push(current);
    }
    lines.join(&format!("\n{}", " ".repeat(indent)))
}

pub fn new(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(line_width());
    table.set_header(header.iter().map(Cell::new));
    table
}

/// Makes a finished table fit its width: columns that can be spared are left out, the first named
/// first, until figures and words stay whole and sentences keep some room. `--json` has what is
/// left out.
pub fn settle(table: &mut Table, spare: &[usize]) {
    /// Figures and names: a column of at most this width is never broken.
    const SHORT: u16 = 17;
    /// What a column of phrases needs, and one of sentences, which are wider than `LONGEST`.
    const PHRASE: u16 = 14;
    const SENTENCE: u16 = 22;
    /// Longer words may be broken.
    const LONGEST: u16 = 36;
    /// Beside its content, a column has blanks and a border.
    const AROUND: u16 = 3;
    let room = table.width().unwrap_or(PLAIN_WIDTH).saturating_sub(1);
    let widths = table.column_max_content_widths();
    let words: Vec<u16> = longest_words(table, widths.len());
    let least = |column: usize| match widths[column] {
        short if short <= SHORT => short,
        long if long <= LONGEST => words[column].clamp(PHRASE, LONGEST),
        _ => words[column].clamp(SENTENCE, LONGEST),
    };
    let needed = |shown: &[usize]| -> u16 {
        let columns = shown.iter().map(|&column| least(column));
        columns.map(|width| width.saturating_add(AROUND)).sum()
    };
    let mut shown: Vec<usize> = (0..widths.len()).collect();
    for &column in spare {
        if needed(&shown) > room {
            shown.retain(|&one| one != column);
        }
    }
    let has_room = needed(&shown) <= room;
    for (place, &width) in widths.iter().enumerate() {
        let constraint = match shown.contains(&place) {
            false => ColumnConstraint::Hidden,
            true if width <= SHORT => ColumnConstraint::ContentWidth,
            true if has_room => ColumnConstraint::LowerBoundary(Width::Fixed(least(place) + 2)),
            true => continue,
        };
        if let Some(column) = table.column_mut(place) {
            column.set_constraint(constraint);
        }
    }
}

/// Of each column, the width of its longest word, the header's included.
fn longest_words(table: &Table, columns: usize) -> Vec<u16> {
    let mut longest = vec![0; columns];
    for row in table.header().into_iter().chain(table.row_iter()) {
        for (cell, longest) in row.cell_iter().zip(&mut longest) {
            let words = cell.content();
            let words = words.split_whitespace().map(|word| word.chars().count());
            *longest = words.max().map_or(0, |width| width as u16).max(*longest);
        }
    }
    longest
}

pub fn right(text: impl ToString) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// `1234567` as `1,234,567`.
pub fn thousands(number: u64) -> String {
    Bytes::new(number).exact()
}

/// `1 sequence`, `1,024 sequences`.
pub fn counted(number: u64, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {what}{plural}", thousands(number))
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
    let settings: Vec<&Explained> = settings.into_iter().collect();
    // That a default gave way is no news, nor that a weaker place says the same.
    let others = |one: &Explained| {
        let others = one.overridden.iter();
        let others =
            others.filter(|other| other.value != one.value && other.source != Source::Default);
        let texts: Vec<String> = others
            .map(|other| format!("{} ({})", other.value, other.source))
            .collect();
        texts.join(", ")
    };
    let overrides = settings.iter().any(|one| !others(one).is_empty());
    let mut header = vec!["setting", "value", "from"];
    header.extend(overrides.then_some("instead of"));
    let mut table = new(&header);
    for one in settings {
        let mut row = vec![
            one.key.to_owned(),
            one.value.to_string(),
            one.source.to_string(),
        ];
        row.extend(overrides.then(|| others(one)));
        table.add_row(row);
    }
    // A key that is broken in two cannot be looked for.
    if let Some(keys) = table.column_mut(0) {
        keys.set_constraint(ColumnConstraint::ContentWidth);
    }
    table
}

/// What the host's memory holds besides the arena and the program, part by part.
pub fn host_parts(host: &HostMemory) -> String {
    let parts = host.besides_arena().into_iter();
    let parts = parts.filter(|(_, bytes)| *bytes > 0);
    let parts = parts.map(|(name, bytes)| format!("{name} {}", Bytes::new(bytes)));
    parts.collect::<Vec<_>>().join(", ")
}

/// The host's side of a plan, where it is more than the tokens of a step.
fn host(memory: &cinch_step::MemoryReport) -> String {
    let host = &memory.host;
    let besides: u64 = host.besides_arena().iter().map(|(_, bytes)| bytes).sum();
    if besides == host.batch {
        return String::new();
    }
    format!("in host memory: {}\n", host_parts(host))
}

/// The graphs that share the arena.
fn variants(report: &PlanReport) -> String {
    let mut text = String::new();
    for variant in &report.variants {
        let peak = if variant.is_peak { ", the peak" } else { "" };
        let from = match variant.first_step {
            Some(0) => String::new(),
            Some(step) => format!(" from step {step} on"),
            None => " later on".to_owned(),
        };
        text += &format!(
            "graph for {}{from}: {} in use{peak}\n",
            variant.name,
            Bytes::new(variant.peak_bytes)
        );
    }
    text
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
    if settings.offload_frozen {
        text += ", frozen weights in host memory";
    }
    if settings.offload_activations > 0 {
        let blocks = counted(settings.offload_activations as u64, "block");
        text += &format!(", activations of {blocks} in host memory");
    }
    if settings.update_in_backward {
        text += ", updates inside the backward";
    }
    if settings.ranks > 1 {
        text += match settings.shard {
            "optimizer" => ", a part of the optimizer on each rank",
            "gradients" => ", a part of optimizer and gradients on each rank",
            "weights" => ", a part of all weights on each rank",
            _ => ", everything on each rank",
        };
    }
    text
}

/// `mamba small`, `gpt2`: a size that says nothing more is left out.
pub fn model_name(model: &str, size: Option<&str>) -> String {
    match size {
        Some(size) if size != model => format!("{model} {size}"),
        Some(_) | None => model.to_owned(),
    }
}

/// What a step is made of, in a line.
pub fn settings_line(report: &PlanReport) -> String {
    let settings = &report.settings;
    let ranks = match settings.ranks {
        1 => String::new(),
        ranks => format!(" × {ranks} ranks"),
    };
    format!(
        "batch {} × {}{ranks} = {} of {} tokens, {}, {} of {} blocks recomputed{}, on {}",
        settings.batch_size,
        settings.accumulation,
        counted(settings.effective_batch as u64, "sequence"),
        settings.seq_len,
        settings.precision,
        settings.checkpointing.blocks,
        settings.checkpointing.of,
        optimizer(settings),
        report.device
    )
}

/// "7,615,616,512 parameters, 322,961,408 trainable"; the second where not all are.
pub fn parameters(all: u64, trainable: u64) -> String {
    let all_of_them = format!("{} parameters", thousands(all));
    if trainable == all {
        return all_of_them;
    }
    format!("{all_of_them}, {} trainable", thousands(trainable))
}

/// The settings, the breakdown and whether it fits the budget, by the name that it has.
pub fn plan(report: &PlanReport, budget_name: &str) -> String {
    let mut text = format!(
        "{}: {}\n",
        model_name(&report.model, report.size.as_deref()),
        parameters(report.parameters, report.trainable)
    );
    text += &format!("{}\n", settings_line(report));
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
    text += &variants(report);
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
            "{} the {budget_name} of {}: {share:.1} %\n",
            voice::verdict(report.fits),
            Bytes::new(budget)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_broken_between_words() {
        let text = "one two three four\nfive";
        assert_eq!(wrapped(text, 2, 12), "one two\n  three four\n  five");
        // A word that fits nowhere stays whole.
        assert_eq!(wrapped("a/long/path b", 0, 4), "a/long/path\nb");
        assert_eq!(wrapped("", 4, 80), "");
        // A layout of its own stays.
        assert_eq!(wrapped("a b\n    c   d", 2, 5), "a b\n      c   d");
    }

    #[test]
    fn lines_are_broken_under_their_marks_and_tables_are_left() {
        let text = "note: one two three\n  four five six\n│ a table of its own │\n";
        let expected = "note: one two\n      three\n  four five\n  six\n│ a table of its own │\n";
        assert_eq!(broken(text, 14), expected);
        let colored = "\u{1b}[1;32mfits\u{1b}[0m the budget";
        assert_eq!(broken(colored, 15), colored);
    }

    #[test]
    fn a_table_without_room_leaves_out_what_can_be_spared() {
        let table = |width: u16| {
            let mut table = new(&["name", "size", "why"]);
            table.set_width(width);
            let why = "a sentence that has to be broken somewhere";
            table.add_row(["a name", "1.00 GiB", why]);
            settle(&mut table, &[1]);
            table.to_string()
        };
        let (wide, narrow) = (table(80), table(42));
        assert!(wide.contains("size") && wide.contains(" a sentence that has to be broken some"));
        assert!(
            !narrow.contains("size") && narrow.contains("a name"),
            "{narrow}"
        );
        assert!(
            narrow.lines().all(|line| line.chars().count() <= 42),
            "{narrow}"
        );
    }

    #[test]
    fn one_has_no_plural() {
        assert_eq!(counted(1, "sequence"), "1 sequence");
        assert_eq!(counted(1024, "sequence"), "1,024 sequences");
    }
}
