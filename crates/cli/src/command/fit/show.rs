//! The answer of a search as text.

use cinch_config::{Bytes, SETTINGS, Settings, Source};
use cinch_fit::search::{Fit, FitOutcome, FitReport, GuideRow};
use comfy_table::Cell;

use super::Hardware;
use crate::args::FitArguments;
use crate::table::{self, right, scaled, thousands};
use crate::voice;

/// Techniques and points of the front that a table shows; `--json` has all.
const MOST_ROWS: usize = 12;

pub fn report(fit: &Fit, hardware: &Hardware, settings: &Settings) -> String {
    let report = &fit.report;
    let budget = &hardware.budget;
    let mut text = format!(
        "{} {} on {}: {} parameters\n",
        report.model,
        report.size.as_deref().unwrap_or("(custom)"),
        budget.whose,
        thousands(report.parameters),
    );
    text += &format!(
        "budget {} of {} ({})\n",
        Bytes::new(budget.bytes),
        Bytes::new(budget.capacity),
        match settings.is_explicit("vram.budget") {
            true => budget.flag,
            false => "what is free, less the margin",
        }
    );
    if !hardware.is_known {
        text += &format!(
            "times are for {}, a card of about this size; name yours with --gpu\n",
            report.card
        );
    }
    text += &format!("\nrecommended: {}\n", report.recommended.settings.text());
    text += &sentence(&report.recommended, report.is_calibrated);
    text += &breakdown(&report.recommended);
    text += &changes(report);
    text += &voice::notes(&report.notes);
    text += &ladder(report);
    text += &techniques(report);
    text += &front(report);
    text
}

fn sentence(outcome: &FitOutcome, is_calibrated: bool) -> String {
    format!(
        "{}, {:.0} % of the memory, {:.0} % of the budget; {} a step, {}tokens/s, {:.0} % of the \
         matrix rate ({})\n",
        Bytes::new(outcome.total_bytes),
        100.0 * outcome.share_of_card,
        100.0 * outcome.share_of_budget,
        seconds(outcome.step_seconds),
        scaled(outcome.tokens_per_second),
        100.0 * outcome.matrix_share,
        if is_calibrated {
            "predicted, calibrated by measured steps"
        } else {
            "predicted"
        }
    )
}

fn seconds(seconds: f64) -> String {
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

fn ladder(report: &FitReport) -> String {
    let mut table = table::new(&["ladder", "up to", "takes", "step", "tokens/s", "settings"]);
    for rung in &report.ladder {
        let first = [
            Cell::new(rung.name),
            right(format!(
                "{:.0} %, {}",
                100.0 * rung.share,
                Bytes::new(rung.budget_bytes)
            )),
        ];
        let rest = match &rung.outcome {
            Some(outcome) => [
                right(Bytes::new(outcome.total_bytes)),
                right(seconds(outcome.step_seconds)),
                right(scaled(outcome.tokens_per_second).trim_end()),
                Cell::new(outcome.settings.text()),
            ],
            None => [
                Cell::new(""),
                Cell::new(""),
                Cell::new(""),
                Cell::new("nothing fits"),
            ],
        };
        table.add_row(first.into_iter().chain(rest));
    }
    table::settle(&mut table, &[3, 1]);
    format!("\n{table}\n")
}

fn techniques(report: &FitReport) -> String {
    let mut text = String::from("\nfrom there, each alone:\n");
    for technique in report.techniques.iter().take(MOST_ROWS) {
        let fits = if technique.fits {
            ""
        } else {
            " (does not fit)"
        };
        text += &format!("  {}{fits}\n", technique.text());
    }
    text
}

fn front(report: &FitReport) -> String {
    let mut table = table::new(&["memory", "tokens/s", "settings"]);
    let points = &report.front;
    // The ends and what lies between them, evenly.
    let shown = points.len().min(MOST_ROWS);
    let index = |row: usize| row * (points.len() - 1) / (shown - 1).max(1);
    for point in (0..shown).map(|row| &points[index(row)]) {
        let mark = match point.settings == report.recommended.settings {
            true => " ←",
            false => "",
        };
        table.add_row([
            right(Bytes::new(point.total_bytes)),
            right(scaled(point.tokens_per_second).trim_end()),
            Cell::new(format!("{}{mark}", point.settings.text())),
        ]);
    }
    let left_out = points.len() - shown;
    let rest = match left_out {
        0 => String::new(),
        more => format!("{more} points between them: --json\n"),
    };
    format!("\nmemory against speed:\n{table}\n{rest}")
}

/// The guide's rows: its setting, the plan of it, what is recommended.
pub fn guide(rows: &[GuideRow]) -> String {
    let mut table = table::new(&[
        "guide",
        "model",
        "card",
        "its setting",
        "it says",
        "planned",
        "tokens/s",
        "recommended",
        "takes",
        "tokens/s",
    ]);
    for row in rows {
        let claim = row.claim.as_ref().map_or_else(String::new, |claim| {
            format!(
                "{} {}, is {}",
                claim.what,
                Bytes::new(claim.claimed_bytes),
                Bytes::new(claim.planned_bytes)
            )
        });
        let rate = |outcome: &FitOutcome| scaled(outcome.tokens_per_second).trim_end().to_owned();
        let fits = if row.fits { "" } else { " (does not fit)" };
        let recommendation = row.recommendation.as_ref();
        table.add_row([
            Cell::new(&row.source),
            Cell::new(&row.size),
            Cell::new(row.card),
            Cell::new(&row.setting),
            Cell::new(claim),
            right(format!("{}{fits}", Bytes::new(row.plan.total_bytes))),
            right(rate(&row.plan)),
            Cell::new(recommendation.map_or_else(
                || "nothing fits".to_owned(),
                |outcome| outcome.settings.text(),
            )),
            right(recommendation.map_or_else(String::new, |outcome| {
                Bytes::new(outcome.total_bytes).to_string()
            })),
            right(recommendation.map_or_else(String::new, rate)),
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
    is_written: bool,
) -> String {
    let mut words = vec!["cinch train".to_owned()];
    if let Some(file) = &arguments.settings.plain.config {
        words.push(format!("--config {}", quoted(&file.to_string_lossy())));
    }
    let decided = |key: &str| report.values.iter().any(|one| one.key == key);
    for one in settings.explain() {
        if let Source::Flag(flag) = &one.source
            && !decided(one.key)
            && one.key != "vram.budget"
        {
            words.push(match flag.as_str() {
                "--set" => format!("--set {}={}", one.key, quoted(&one.value.to_string())),
                flag => format!("{flag} {}", quoted(&one.value.to_string())),
            });
        }
    }
    if is_written {
        return words.join(" ");
    }
    for one in &report.values {
        let Some(value) = &one.value else { continue };
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
