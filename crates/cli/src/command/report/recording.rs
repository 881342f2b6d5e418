//! A recording: memory over time by GPU, who held it, what stood out.

use cinch_config::Bytes;
use cinch_monitor::text::{self, bytes, command};
use cinch_monitor::{History, MonitorError, Recording, Series, signs};
use cinch_report::{Page, PageChart, Part, Section, Unit};

use crate::args::ReportArguments;

/// Processes of which a curve is drawn, the largest.
const MOST_CURVES: usize = 8;

pub fn page(arguments: &ReportArguments) -> anyhow::Result<Page> {
    let path = &arguments.subject;
    let mut recording = Recording::open(path)?;
    let mut history = History::default();
    // What a process was called stays known after it has ended.
    let mut ended = std::collections::BTreeMap::new();
    while let Some(sample) = recording.next_sample()? {
        for facts in &sample.processes {
            ended.insert(facts.pid, facts.clone());
        }
        history.push(sample);
    }
    let Some(last) = history.last.clone() else {
        return Err(MonitorError::Empty { path: path.clone() }.into());
    };
    history.settle();
    let mut sections = Vec::new();
    let found = signs(&history);
    let mut parts: Vec<Part> = found
        .iter()
        .map(|sign| Part::Text(text::sign_line(sign)))
        .collect();
    if parts.is_empty() {
        parts.push(Part::Text(
            "No warning sign: memory is steady and the GPUs are used.".to_owned(),
        ));
    }
    sections.push(Section {
        title: "Diagnosis".to_owned(),
        parts,
    });
    for (index, gpu) in &history.gpus {
        let mut processes: Vec<_> = history
            .processes
            .iter()
            .filter(|(key, _)| key.gpu == Some(*index))
            .collect();
        processes.sort_by_key(|(_, process)| std::cmp::Reverse(process.peak_bytes));
        let mut series = vec![("all".to_owned(), points(&gpu.used))];
        for (key, process) in processes.iter().take(MOST_CURVES) {
            let name = command(ended.get(&key.pid), None);
            series.push((format!("{} {name:.32}", key.pid), points(&process.series)));
        }
        let memory = PageChart {
            title: format!("GPU {index}: memory"),
            description: format!("At most {}.", Bytes::new(gpu.peak_bytes)),
            x_name: "time".to_owned(),
            x_unit: Unit::Seconds,
            y_unit: Unit::Bytes,
            from_zero: true,
            series,
            levels: gpu
                .reading
                .total_bytes
                .map(|bytes| ("card".to_owned(), bytes as f64))
                .into_iter()
                .collect(),
            ..PageChart::default()
        };
        let busy = PageChart {
            title: format!("GPU {index}: share of the time in which a kernel ran"),
            x_name: "time".to_owned(),
            x_unit: Unit::Seconds,
            y_unit: Unit::Percent,
            from_zero: true,
            series: vec![("busy".to_owned(), points(&gpu.utilization))],
            ..PageChart::default()
        };
        let rows = processes.iter().map(|(key, process)| {
            let facts = ended.get(&key.pid);
            let plan = facts
                .and_then(|facts| facts.plan.as_ref())
                .map(|plan| plan.bytes);
            let trend = process.trend.map_or_else(
                || text::MISSING.to_owned(),
                |trend| match trend.is_creep {
                    true => format!("{:+.1} MiB a minute", trend.mebibytes_per_minute()),
                    false => "steady".to_owned(),
                },
            );
            vec![
                key.pid.to_string(),
                facts
                    .and_then(|facts| facts.user.clone())
                    .unwrap_or_else(|| text::MISSING.to_owned()),
                bytes(process.series.last()),
                Bytes::new(process.peak_bytes).to_string(),
                bytes(plan),
                trend,
                command(facts, None),
            ]
        });
        let header = [
            "process", "user", "last", "peak", "planned", "trend", "command",
        ];
        sections.push(Section {
            title: format!("GPU {index}: {}", gpu.reading.name),
            parts: vec![
                Part::Chart(memory),
                Part::Table {
                    header: header.map(str::to_owned).to_vec(),
                    rows: rows.collect(),
                },
                Part::Chart(busy),
            ],
        });
    }
    sections.push(Section {
        title: "Host memory".to_owned(),
        parts: vec![Part::Chart(PageChart {
            title: "Host memory in use".to_owned(),
            description: format!("At most {}.", Bytes::new(history.host_peak_bytes)),
            x_name: "time".to_owned(),
            x_unit: Unit::Seconds,
            y_unit: Unit::Bytes,
            from_zero: true,
            series: vec![("in use".to_owned(), points(&history.host))],
            levels: last
                .host
                .total_bytes
                .map(|bytes| ("memory".to_owned(), bytes as f64))
                .into_iter()
                .collect(),
            ..PageChart::default()
        })],
    });
    Ok(Page {
        title: format!("Recording {}", cinch_files::shown(path)),
        subtitle: format!(
            "{} samples over {}, {} GPUs read by {}",
            history.num_samples,
            text::span(last.seconds),
            history.gpus.len(),
            last.read_by.name()
        ),
        sections,
        refresh_seconds: None,
    })
}

fn points(series: &Series) -> Vec<(f64, f64)> {
    series
        .points()
        .map(|(seconds, value)| (seconds, value as f64))
        .collect()
}
