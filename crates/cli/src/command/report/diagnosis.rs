//! The diagnosis as a section of a page: of a log, of a command's attempts, of a run of cinch.

use cinch_config::Bytes;
use cinch_diagnose::trend::{Series, Trend};
use cinch_diagnose::{Cause, Measure};
use cinch_monitor::RunCurve;
use cinch_report::{Part, Section};
use serde_json::Value;

const TITLE: &str = "Diagnosis";

/// A diagnosis as `cinch diagnose --json` prints it, or what is said where there is none.
pub fn section(failures: &[Value], otherwise: &[String]) -> Section {
    let parts = match failures.is_empty() {
        true => otherwise.iter().cloned().map(Part::Text).collect(),
        false => failures.iter().flat_map(parts).collect(),
    };
    Section {
        title: TITLE.to_owned(),
        parts,
    }
}

/// One failure: what happened, why, and what to do.
pub fn parts(failure: &Value) -> Vec<Part> {
    let text = |name: &str| failure[name].as_str().unwrap_or_default();
    let cause: Option<Cause> = serde_json::from_value(failure["cause"].clone()).ok();
    let confidence = 100.0 * failure["confidence"].as_f64().unwrap_or(0.0);
    let place = match failure["line"].as_u64() {
        Some(line) => format!(" (line {line})"),
        None => String::new(),
    };
    let mut parts = vec![
        Part::Text(format!("{}{place}.", text("summary"))),
        Part::Figures(vec![
            ("cause".to_owned(), text("cause").to_owned()),
            ("certainty".to_owned(), format!("{confidence:.0} %")),
        ]),
    ];
    if let Some(cause) = cause {
        parts.push(Part::Text(format!("That is: {}.", cause.said())));
    }
    parts.extend(list("What tells so", &failure["evidence"]));
    let fixes = failure["fixes"].as_array().into_iter().flatten();
    let rows: Vec<Vec<String>> = fixes
        .map(|fix| {
            let saves = fix["saves_bytes"].as_u64();
            vec![
                fix["what"].as_str().unwrap_or_default().to_owned(),
                saves.map_or_else(String::new, |bytes| Bytes::new(bytes).to_string()),
                fix["command"].as_str().unwrap_or_default().to_owned(),
            ]
        })
        .collect();
    if !rows.is_empty() {
        parts.push(Part::Table {
            header: ["what to do, in order", "saves", "lines or command"]
                .map(str::to_owned)
                .to_vec(),
            rows,
        });
    }
    parts.extend(list("What will not help", &failure["will_not_help"]));
    parts
}

fn list(title: &str, lines: &Value) -> Option<Part> {
    let lines: Vec<Vec<String>> = lines
        .as_array()?
        .iter()
        .filter_map(Value::as_str)
        .map(|line| vec![line.to_owned()])
        .collect();
    (!lines.is_empty()).then(|| Part::Table {
        header: vec![title.to_owned()],
        rows: lines,
    })
}

/// What memory does from step to step, in a sentence.
pub fn trend_line(what: &str, trend: Trend) -> String {
    let level = Bytes::new(trend.level.max(0.0) as u64);
    match trend.is_rising {
        true => format!(
            "{what} climbs by {} a step over {} readings, to {level}: is something kept from step to step?",
            Bytes::new(trend.slope.max(0.0) as u64),
            trend.samples
        ),
        false => format!("{what} stays at {level} over {} readings.", trend.samples),
    }
}

pub fn measure_name(measure: Measure) -> &'static str {
    match measure {
        Measure::Allocated => "Allocated memory",
        Measure::Reserved => "Reserved memory",
        Measure::Used => "Memory in use",
        Measure::Host => "Host memory",
    }
}

/// A run of cinch, by what it logged.
pub fn of_run(curve: &RunCurve) -> Section {
    let mut memory = Series::new();
    for point in &curve.steps {
        if let Some(bytes) = point.device_used_bytes.or(point.resident_bytes) {
            memory.push(point.step as f64, bytes as f64);
        }
    }
    let mut said = Vec::new();
    said.push(match memory.trend() {
        Some(trend) => trend_line("Memory in use", trend),
        None => "Too few steps are logged to tell whether memory climbs.".to_owned(),
    });
    let broken = curve
        .steps
        .iter()
        .find(|point| point.loss.is_some_and(|loss| !loss.is_finite()));
    said.extend(broken.map(|point| format!("The loss is no number at step {}.", point.step)));
    section(&[], &said)
}
