//! What `cinch run --report` wrote: every attempt, and why each failed.

use cinch_config::Bytes;
use cinch_monitor::text;
use cinch_report::{Page, Part, Section};
use serde_json::Value;

use super::diagnosis;
use crate::args::ReportArguments;

/// Bytes that such a file has at the most.
const LARGEST: u64 = 64 << 20;

/// The attempts of a file, where it is one.
pub fn of_file(path: &std::path::Path) -> Option<Value> {
    let bytes = cinch_files::read_regular(path, LARGEST).ok()?;
    let value: Value = serde_json::from_slice(&bytes).ok()?;
    let attempts = value.get("attempts")?.as_array()?;
    let is_told = attempts
        .iter()
        .all(|attempt| attempt.get("end").is_some() && attempt.get("diagnosis").is_some());
    is_told.then_some(value)
}

pub fn page(arguments: &ReportArguments) -> anyhow::Result<Page> {
    let path = &arguments.subject;
    let story = of_file(path).unwrap_or_default();
    let attempts = story["attempts"].as_array().cloned().unwrap_or_default();
    let row = |attempt: &Value| {
        let number = |name: &str| {
            attempt[name]
                .as_u64()
                .map_or_else(|| text::MISSING.to_owned(), |number| number.to_string())
        };
        let peaks = attempt["peak_gpu_bytes"].as_array().into_iter().flatten();
        let peak = peaks.filter_map(|pair| pair[1].as_u64()).max();
        vec![
            number("attempt"),
            number("batch"),
            number("accumulation"),
            attempt["end"]
                .as_str()
                .unwrap_or_default()
                .replace('_', " "),
            text::span(attempt["seconds"].as_f64().unwrap_or(0.0)),
            peak.map_or_else(
                || text::MISSING.to_owned(),
                |bytes| Bytes::new(bytes).to_string(),
            ),
            attempt["evidence"].as_str().unwrap_or_default().to_owned(),
        ]
    };
    let header = [
        "attempt",
        "batch",
        "accumulation",
        "end",
        "time",
        "GPU memory at the peak",
        "what tells so",
    ];
    let works = story["batch"].as_u64().zip(story["accumulation"].as_u64());
    let mut parts = vec![Part::Table {
        header: header.map(str::to_owned).to_vec(),
        rows: attempts.iter().map(row).collect(),
    }];
    parts.extend(works.map(|(batch, accumulation)| {
        Part::Text(format!(
            "Batch {batch} × {accumulation} works: the effective batch is {}, as before.",
            batch.saturating_mul(accumulation)
        ))
    }));
    let mut sections = vec![Section {
        title: "Attempts".to_owned(),
        parts,
    }];
    // The last failure tells what is left to do.
    let failures = attempts
        .iter()
        .rev()
        .filter_map(|attempt| attempt["diagnosis"]["failures"].as_array())
        .find(|failures| !failures.is_empty());
    sections.push(diagnosis::section(
        failures.map_or(&[], Vec::as_slice),
        &["No attempt tells that memory ran out.".to_owned()],
    ));
    Ok(Page {
        title: format!("Attempts {}", cinch_files::shown(path)),
        subtitle: match attempts.len() {
            1 => "1 attempt".to_owned(),
            count => format!("{count} attempts"),
        },
        sections,
        refresh_seconds: None,
    })
}
