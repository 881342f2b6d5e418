//! A training log: why memory ran out, what its step lines tell, what it says of the run.

use cinch_diagnose::{Curve, Log, Measure, Quantity, Source};
use cinch_report::{Page, PageChart, Part, Section, Unit};

use super::diagnosis;
use crate::args::ReportArguments;
use crate::command::diagnose;
use crate::failure::usage;

/// Ranks of which curves are drawn.
const MOST_CURVES: usize = 8;

pub fn page(arguments: &ReportArguments) -> anyhow::Result<Page> {
    let path = &arguments.subject;
    let log = diagnose::read(path)?;
    if log.lines_read() == 0 {
        return Err(usage(format!(
            "{} is empty\nhint: name a log that a run has written to",
            cinch_files::shown(path)
        )));
    }
    let failures = diagnose::of_output(&log, None);
    let failures: Vec<serde_json::Value> = diagnose::distinct(&failures)
        .into_iter()
        .map(serde_json::to_value)
        .collect::<Result<_, _>>()?;
    let mut said = vec!["No sign that memory ran out.".to_owned()];
    let trends = log.trends();
    said.extend(trends.iter().map(|(source, measure, trend)| {
        let name = format!("{}{}", diagnosis::measure_name(*measure), of_rank(*source));
        diagnosis::trend_line(&name, *trend)
    }));
    let mut sections = vec![diagnosis::section(&failures, &said)];
    sections.extend(steps(&log.curves()));
    sections.extend(settings(&log));
    let failed = match failures.len() {
        0 => String::new(),
        1 => ", 1 failure".to_owned(),
        count => format!(", {count} failures"),
    };
    Ok(Page {
        title: format!("Log {}", cinch_files::shown(path)),
        subtitle: format!("{} lines{failed}", log.lines_read()),
        sections,
        refresh_seconds: None,
    })
}

fn of_rank(source: Source) -> String {
    match source {
        Source::Unnamed => String::new(),
        Source::Rank(rank) => format!(" of rank {rank}"),
        Source::Process(process) => format!(" of process {process}"),
    }
}

/// Memory and loss over the steps.
fn steps(curves: &[Curve]) -> Option<Section> {
    let drawn = |wanted: fn(Quantity) -> Option<&'static str>| -> Vec<(String, Vec<(f64, f64)>)> {
        let found = curves.iter().filter_map(|curve| {
            let name = wanted(curve.quantity)?;
            // One reading makes no line.
            (curve.points.len() > 1).then(|| {
                (
                    format!("{name}{}", of_rank(curve.source)),
                    curve.points.clone(),
                )
            })
        });
        found.take(MOST_CURVES).collect()
    };
    let card = drawn(|quantity| match quantity {
        Quantity::Memory(Measure::Host) | Quantity::Loss => None,
        Quantity::Memory(measure) => Some(diagnosis::measure_name(measure)),
    });
    let host = drawn(|quantity| match quantity {
        Quantity::Memory(Measure::Host) => Some(diagnosis::measure_name(Measure::Host)),
        _ => None,
    });
    let loss = drawn(|quantity| match quantity {
        Quantity::Loss => Some("Loss"),
        Quantity::Memory(_) => None,
    });
    let chart = |title: &str, y_unit, from_zero, series: Vec<_>| {
        (!series.is_empty()).then(|| {
            Part::Chart(PageChart {
                title: title.to_owned(),
                description: format!("{title}, as the lines of the log tell it."),
                x_name: "step".to_owned(),
                y_unit,
                from_zero,
                series,
                ..PageChart::default()
            })
        })
    };
    let parts: Vec<Part> = [
        chart("Memory over the steps", Unit::Bytes, true, card),
        chart("Host memory over the steps", Unit::Bytes, true, host),
        chart("Loss over the steps", Unit::Number, false, loss),
    ]
    .into_iter()
    .flatten()
    .collect();
    (!parts.is_empty()).then(|| Section {
        title: "Steps".to_owned(),
        parts,
    })
}

/// What the log says of the run.
fn settings(log: &Log) -> Option<Section> {
    let told = log.told();
    let mut rows: Vec<Vec<String>> = told
        .settings
        .iter()
        .map(|(known, (value, line))| {
            vec![known.name().to_owned(), value.clone(), line.to_string()]
        })
        .collect();
    if told.expandable_segments {
        rows.push(
            ["expandable_segments", "true", ""]
                .map(str::to_owned)
                .to_vec(),
        );
    }
    rows.extend(
        told.programs
            .iter()
            .map(|name| ["program", *name, ""].map(str::to_owned).to_vec()),
    );
    (!rows.is_empty()).then(|| Section {
        title: "What the log says of the run".to_owned(),
        parts: vec![Part::Table {
            header: ["setting", "value", "line"].map(str::to_owned).to_vec(),
            rows,
        }],
    })
}
