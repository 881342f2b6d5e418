//! The answer of a search as text.

use cinch_config::{Bytes, SETTINGS, Settings, Source};
use cinch_fit::search::{Fit, FitOutcome, FitReport, FitSettings, GuideRow, Rung};
use cinch_graph::Target;
use comfy_table::Cell;

use super::Hardware;
use super::apply::Written;
use crate::args::FitArguments;
use crate::memory::Budget;
use crate::settings::FIRST_ARGUMENT;
use crate::table::{self, right, scaled, thousands};
use crate::voice;

/// Techniques that are shown; `--json` has all.
const MOST_TECHNIQUES: usize = 12;

/// The answer in three lines; the rest with `--details`.
pub fn report(fit: &Fit, hardware: &Hardware, details: bool) -> String {
    let report = &fit.report;
    let recommended = &report.recommended;
    let model = &report.model;
    let title = match report.size.as_deref() {
        Some(size) if size == model => model.clone(),
        Some(size) => format!("{model} {size}"),
        None => format!("{model} (custom)"),
    };
    let mut text = format!("{title}: {}\n", recommended.settings.text());
    text += &memory(recommended, &hardware.budget);
    text += &speed(report, hardware);
    text += &voice::notes(&report.notes);
    if !details {
        text += "more: --details shows the parts, the changes, the ladder and what each technique \
                 does\n";
        return text;
    }
    text += &format!(
        "\n{} parameters; {:.0} % of the memory of {}, {:.0} % of its matrix rate\n",
        thousands(report.parameters),
        100.0 * recommended.share_of_card,
        hardware.budget.whose,
        100.0 * recommended.matrix_share,
    );
    text += &breakdown(recommended);
    text += &changes(report);
    text += &ladder(report);
    text += &techniques(report);
    text += &front(report);
    text
}

/// What it takes, of which budget, with which margin.
fn memory(outcome: &FitOutcome, budget: &Budget) -> String {
    format!(
        "needs {}, {:.0} % of the budget of {} ({})\n",
        Bytes::new(outcome.total_bytes),
        100.0 * outcome.share_of_budget,
        Bytes::new(budget.bytes),
        budget.explained(),
    )
}

fn speed(report: &FitReport, hardware: &Hardware) -> String {
    let outcome = &report.recommended;
    let calibrated = match report.is_calibrated {
        true => ", calibrated by measured steps",
        false => "",
    };
    let card = match hardware.is_known {
        true => format!(" on {}", report.card),
        false => format!(
            " on {}, of about this size (name yours: --gpu)",
            report.card
        ),
    };
    format!(
        "predicted{calibrated}: {}tokens/s, {} a step{card}\n",
        scaled(outcome.tokens_per_second),
        seconds(outcome.step_seconds),
    )
}

pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.1} ms", 1e3 * s),
        s => format!("{s:.2} s"),
    }
}

fn breakdown(outcome: &FitOutcome) -> String {
    let mut table = table::new(&["memory", "size", "bytes"]);
    let total = ("total", outcome.breakdown.total());
    for (name, bytes) in outcome.breakdown.parts().into_iter().chain([total]) {
        table.add_row([
            Cell::new(name),
            right(Bytes::new(bytes)),
            right(thousands(bytes)),
        ]);
    }
    let host = match outcome.host_bytes {
        0 => String::new(),
        bytes => format!("in host memory: {}\n", Bytes::new(bytes)),
    };
    format!("{table}\n{host}")
}

fn changes(report: &FitReport) -> String {
    if report.changes.is_empty() {
        return "nothing changes: these are the settings already\n".to_owned();
    }
    let mut table = table::new(&["instead of", "now", "why"]);
    for change in &report.changes {
        table.add_row([&change.from, &change.to, &change.reason]);
    }
    format!("\n{table}\n")
}

/// The rungs of the ladder, those that end at the same settings in one row.
fn ladder(report: &FitReport) -> String {
    let mut table = table::new(&["ladder", "up to", "takes", "tokens/s", "settings"]);
    let settings = |rung: &Rung| {
        rung.outcome
            .as_ref()
            .map(|outcome| outcome.settings.clone())
    };
    let alike = |a: &Rung, b: &Rung| settings(a) == settings(b);
    for rungs in report.ladder.chunk_by(alike) {
        let (Some(first), Some(last)) = (rungs.first(), rungs.last()) else {
            continue;
        };
        let name = match rungs.len() {
            1 => last.name.to_owned(),
            _ => format!("{} to {}", first.name, last.name),
        };
        table.add_row(rung(name, last));
    }
    table::settle(&mut table, &[3, 1]);
    format!("\n{table}\n")
}

fn rung(name: String, rung: &Rung) -> Vec<Cell> {
    let up_to = format!(
        "{:.0} %, {}",
        100.0 * rung.share,
        Bytes::new(rung.budget_bytes)
    );
    let mut row = vec![Cell::new(name), right(up_to)];
    row.extend(match &rung.outcome {
        Some(outcome) => [
            right(Bytes::new(outcome.total_bytes)),
            right(scaled(outcome.tokens_per_second).trim_end()),
            Cell::new(outcome.settings.text()),
        ],
        None => ["", "", "nothing fits"].map(Cell::new),
    });
    row
}

fn techniques(report: &FitReport) -> String {
    let mut text = String::from("\nfrom there, each alone:\n");
    for technique in report.techniques.iter().take(MOST_TECHNIQUES) {
        let fits = if technique.fits {
            ""
        } else {
            " (does not fit)"
        };
        text += &format!("  {}{fits}\n", technique.text());
    }
    text
}

/// Memory against speed, with a mark at what is recommended and at what only the card holds.
fn front(report: &FitReport) -> String {
    let mut table = table::new(&["memory", "tokens/s", "", "settings"]);
    for point in &report.front {
        let mark = match point.settings == report.recommended.settings {
            true => "recommended",
            false if point.total_bytes > report.budget_bytes => "over budget",
            false => "",
        };
        table.add_row([
            right(Bytes::new(point.total_bytes)),
            right(scaled(point.tokens_per_second).trim_end()),
            Cell::new(mark),
            Cell::new(point.settings.text()),
        ]);
    }
    format!("\nmemory against speed:\n{table}\n")
}

/// The guide's rows: its setting, the plan of it, what is recommended.
pub fn guide(rows: &[GuideRow]) -> String {
    let mut table = table::new(&["guide", "its setting, planned", "recommended"]);
    let takes = |outcome: &FitOutcome| {
        format!(
            "{}, {}tokens/s",
            Bytes::new(outcome.total_bytes),
            scaled(outcome.tokens_per_second)
        )
    };
    for row in rows {
        let fits = if row.fits { "" } else { " (does not fit)" };
        let mut planned = format!("{}\n{}{fits}", row.setting, takes(&row.plan));
        if let Some(claim) = &row.claim {
            planned += &format!(
                "\nsays {} {}, is {}",
                claim.what,
                Bytes::new(claim.claimed_bytes),
                Bytes::new(claim.planned_bytes)
            );
        }
        let recommended = row.recommendation.as_ref().map_or_else(
            || "nothing fits".to_owned(),
            |outcome| format!("{}\n{}", outcome.settings.text(), takes(outcome)),
        );
        table.add_row([
            format!("{}\n{} on {}", row.source, row.size, row.card),
            planned,
            recommended,
        ]);
    }
    // The guide's heading, its other claims, and the rates.
    table::settle(&mut table, &[0, 4, 6, 9]);
    table.to_string()
}

/// The command that trains with the recommended settings, which the file may hold by now.
pub fn train_command(
    arguments: &FitArguments,
    settings: &Settings,
    report: &FitReport,
    target: Target,
    applied: Option<&Written>,
) -> String {
    let mut words = vec![started(&report.recommended.settings, target)];
    let subject = arguments.subject.as_deref();
    let named = arguments.settings.about(subject).ok();
    let named = named.map(|named| named.plain);
    let [file, folder] = named.map_or([None, None], |named| [named.config, named.config_path]);
    for (flag, path) in [("--config", file), ("--config-path", folder)] {
        let Some(path) = path else { continue };
        // What is no plain text is written as bash does.
        let plain = path
            .to_str()
            .filter(|name| !name.chars().any(char::is_control));
        let name = plain.map_or_else(|| cinch_files::shown(&path).to_string(), quoted);
        words.push(format!("{flag} {name}"));
    }
    // Where there is a GPU, training takes that.
    if target == Target::Cpu {
        words.push("--device cpu".to_owned());
    }
    let decided = |key: &str| report.values.iter().any(|one| one.key == key);
    for one in settings.explain() {
        if let Source::Flag(flag) = &one.source
            && !decided(one.key)
            && one.key != "vram.budget"
        {
            words.push(match flag.as_str() {
                FIRST_ARGUMENT => quoted(&one.value.to_string()),
                "--set" => format!("--set {}={}", one.key, quoted(&one.value.to_string())),
                flag => format!("{flag} {}", quoted(&one.value.to_string())),
            });
        }
    }
    for one in &report.values {
        let Some(value) = &one.value else { continue };
        if applied.is_some_and(|applied| applied.holds(one.key)) {
            continue;
        }
        let setting = SETTINGS.iter().find(|setting| setting.key == one.key);
        let is_default = setting.is_some_and(|setting| setting.default == Some(value));
        if is_default && !settings.is_explicit(one.key) {
            continue;
        }
        words.push(match crate::settings::flag_of(one.key) {
            Some(flag) if value == "true" => flag,
            Some(_) if value == "false" => continue,
            Some(flag) => format!("{flag} {value}"),
            None if value == "false" => continue,
            None => format!("--set {}={value}", one.key),
        });
    }
    words.join(" ")
}

/// What starts as many processes as there are ranks, on one machine or on several.
fn started(settings: &FitSettings, target: Target) -> String {
    let processes = match target {
        Target::Cpu => "--ranks",
        Target::Cuda => "--gpus",
    };
    match (settings.ranks, settings.nodes) {
        (0 | 1, _) => "cinch train".to_owned(),
        (ranks, 0 | 1) => format!("cinch launch {processes} {ranks} -- train"),
        (ranks, nodes) => format!("srun --nodes {nodes} --ntasks {ranks} cinch train"),
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(quoted("runs/a-b.json"), "runs/a-b.json");
        assert_eq!(quoted("my code"), "'my code'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
    }
}
