//! A run of cinch: loss, speed, memory against plan, the planned step, the settings.

use cinch_config::Bytes;
use cinch_graph::Target;
use cinch_monitor::{RunCurve, RunPoint, read_curve, read_ranks};
use cinch_ranks::pace::{RankRow, RanksTable, seconds};
use cinch_report::{Page, PageChart, Part, Section, Unit};

use super::{diagnosis, plan, settings};
use crate::args::{ReportArguments, SettingArguments};
use crate::overhead;
use crate::resume::Checkpoint;

pub fn page(arguments: &ReportArguments) -> anyhow::Result<Page> {
    let folder = &arguments.subject;
    let curve = read_curve(folder)?;
    let mut sections = vec![progress(&curve)];
    sections.extend(read_ranks(folder)?.map(|table| ranks(&table)));
    sections.extend([against_plan(&curve), diagnosis::of_run(&curve)]);
    let mut subtitle = match curve.last() {
        Some(last) => format!("step {}", last.step),
        None => "no step is logged yet".to_owned(),
    };
    // A young run has no checkpoint yet, and its curves are worth a page all the same.
    match Checkpoint::newest_of(folder) {
        Ok(checkpoint) => {
            let on_gpu = curve
                .last()
                .is_some_and(|last| last.device_used_bytes.is_some());
            let target = if on_gpu { Target::Cuda } else { Target::Cpu };
            if let Ok(step) = cinch_fit::plan(&checkpoint.state.config, overhead::machine(target)) {
                let report = step.report(target, false);
                subtitle += &format!(", {}", crate::table::settings_line(&report));
                sections.extend(plan::of_step(&step));
            }
            let ranks = checkpoint.state.config.batch.world.ranks;
            let saved = checkpoint.settings_with(&SettingArguments::default(), ranks)?;
            sections.push(settings(&saved.explain()));
        }
        Err(_) => sections.push(Section {
            title: "Settings and where each came from".to_owned(),
            parts: vec![Part::Text(
                "They are kept with the first checkpoint, which is not there yet.".to_owned(),
            )],
        }),
    }
    Ok(Page {
        title: format!("Run {}", cinch_files::shown(folder)),
        subtitle,
        sections,
        refresh_seconds: None,
    })
}

/// Who trained, what each computed and waited for, and its memory.
fn ranks(table: &RanksTable) -> Section {
    let slowest = table.slowest();
    let mut figures = vec![("ranks".to_owned(), table.rows.len().to_string())];
    let clear = slowest.filter(|slowest| slowest.is_clear);
    figures.push((
        "slowest".to_owned(),
        clear.map_or_else(|| "none".to_owned(), |one| format!("rank {}", one.rank)),
    ));
    let lately = table.slowest_lately().filter(|slowest| slowest.is_clear);
    if lately.map(|one| one.rank) != clear.map(|one| one.rank) {
        figures.push((
            format!("slowest at step {}", table.step),
            lately.map_or_else(|| "none".to_owned(), |one| format!("rank {}", one.rank)),
        ));
    }
    let told = slowest.map_or_else(
        || "No step is logged yet.".to_owned(),
        |slowest| {
            let mut told = table.told(&slowest);
            if let Some(first) = told.get_mut(..1) {
                first.make_ascii_uppercase();
            }
            format!("{told}.")
        },
    );
    let size = |bytes: Option<u64>| {
        bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes::new(bytes).to_string())
    };
    let row = |(rank, row): (usize, &RankRow)| {
        let mark = match clear {
            Some(slowest) if slowest.rank == rank => " (slowest)",
            _ => "",
        };
        let share = 100.0 * row.pace.waited_seconds / row.pace.seconds.max(f64::MIN_POSITIVE);
        vec![
            format!("{rank}{mark}"),
            row.facts.host.clone(),
            row.facts.process.to_string(),
            row.facts.device.clone(),
            seconds(row.pace.busy_seconds()),
            seconds(row.pace.waited_seconds),
            format!("{share:.0} %"),
            size(Some(table.planned_bytes)),
            size(row.measured()),
            size(row.most_bytes),
        ]
    };
    let header = [
        "rank",
        "host",
        "process",
        "device",
        "computes",
        "waits",
        "of a step",
        "planned",
        "in use",
        "at most",
    ];
    let mut parts = vec![
        Part::Figures(figures),
        Part::Text(told),
        Part::Text(format!(
            "Means of {} steps. Ranks wait where they exchange something; on GPUs NCCL waits by \
             itself, and that counts as computing.",
            table.steps
        )),
        Part::Table {
            header: header.map(str::to_owned).to_vec(),
            rows: table.rows.iter().enumerate().map(row).collect(),
        },
    ];
    if table.curve.len() > 1 {
        let series = (0..table.rows.len()).map(|rank| {
            let points = table.curve.iter();
            let points = points.map(|(step, busy)| (*step as f64, busy[rank]));
            (format!("rank {rank}"), points.collect())
        });
        parts.push(Part::Chart(PageChart {
            title: "Computing in a step, by rank".to_owned(),
            description: "Seconds that each rank computes in a step, without waiting.".to_owned(),
            x_name: "step".to_owned(),
            y_unit: Unit::Seconds,
            from_zero: true,
            series: series.collect(),
            ..PageChart::default()
        }));
    }
    Section {
        title: "Ranks".to_owned(),
        parts,
    }
}

fn points(steps: &[RunPoint], value: impl Fn(&RunPoint) -> Option<f64>) -> Vec<(f64, f64)> {
    steps
        .iter()
        .filter_map(|point| Some((point.step as f64, value(point)?)))
        .collect()
}

fn progress(curve: &RunCurve) -> Section {
    let mut figures = Vec::new();
    let mut figure = |name: &str, value: Option<String>| {
        figures.extend(value.map(|value| (name.to_owned(), value)));
    };
    let last = curve.last();
    figure("step", last.map(|last| last.step.to_string()));
    figure(
        "loss",
        last.and_then(|last| last.loss)
            .map(|loss| format!("{loss:.4}")),
    );
    let best = curve
        .evaluations
        .iter()
        .filter_map(|point| Some((point.validation_loss?, point.step)));
    let best = best.min_by(|a, b| a.0.total_cmp(&b.0));
    figure(
        "lowest validation loss",
        best.map(|(loss, step)| format!("{loss:.4} at step {step}")),
    );
    figure(
        "speed",
        last.and_then(|last| last.tokens_per_second)
            .map(|rate| format!("{rate:.0} tokens/s")),
    );
    figure(
        "epoch",
        last.and_then(|last| last.epoch)
            .map(|epoch| format!("{epoch:.2}")),
    );
    let chart = |title: &str, from_zero, series: Vec<(String, Vec<(f64, f64)>)>| {
        Part::Chart(PageChart {
            title: title.to_owned(),
            description: format!("{title} over the steps of the run."),
            x_name: "step".to_owned(),
            from_zero,
            series: series.into_iter().filter(|one| !one.1.is_empty()).collect(),
            ..PageChart::default()
        })
    };
    let mut parts = vec![Part::Figures(figures)];
    parts.push(chart(
        "Loss",
        false,
        vec![
            (
                "training".to_owned(),
                points(&curve.steps, |point| point.loss),
            ),
            (
                "validation".to_owned(),
                points(&curve.evaluations, |point| point.validation_loss),
            ),
        ],
    ));
    parts.push(chart(
        "Tokens a second",
        true,
        vec![(
            "tokens/s".to_owned(),
            points(&curve.steps, |point| point.tokens_per_second),
        )],
    ));
    if curve.num_unread > 0 {
        parts.push(Part::Text(format!(
            "{} lines of metrics.jsonl cannot be read.",
            curve.num_unread
        )));
    }
    Section {
        title: "Progress".to_owned(),
        parts,
    }
}

fn against_plan(curve: &RunCurve) -> Section {
    let used = |point: &RunPoint| point.device_used_bytes.or(point.resident_bytes);
    let as_float = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
    let most = curve.steps.iter().filter_map(used).max();
    let planned = curve.last().and_then(|last| last.planned_bytes);
    let mut figures = Vec::new();
    figures.extend(planned.map(|bytes| ("planned".to_owned(), Bytes::new(bytes).to_string())));
    figures.extend(most.map(|bytes| {
        (
            "measured, at most".to_owned(),
            Bytes::new(bytes).to_string(),
        )
    }));
    if let Some((planned, most)) = planned.zip(most) {
        let share = 100.0 * most as f64 / planned.max(1) as f64;
        figures.push(("of the plan".to_owned(), format!("{share:.1} %")));
    }
    let verdict = match planned.zip(most) {
        Some((planned, most)) if most > planned => format!(
            "More was in use than planned, by {}. On a GPU the reading is that of the whole card: other programs count too.",
            Bytes::new(most - planned)
        ),
        Some(_) => "The run stayed within its plan.".to_owned(),
        None => "Nothing is measured yet.".to_owned(),
    };
    let series = vec![
        (
            "measured".to_owned(),
            points(&curve.steps, |point| as_float(used(point))),
        ),
        (
            "planned".to_owned(),
            points(&curve.steps, |point| as_float(point.planned_bytes)),
        ),
        (
            "arena".to_owned(),
            points(&curve.steps, |point| as_float(point.arena_bytes)),
        ),
    ];
    Section {
        title: "Plan against measurement".to_owned(),
        parts: vec![
            Part::Figures(figures),
            Part::Text(verdict),
            Part::Chart(PageChart {
                title: "Memory in use".to_owned(),
                description: "Memory that was planned and that was measured, over the steps."
                    .to_owned(),
                x_name: "step".to_owned(),
                y_unit: Unit::Bytes,
                from_zero: true,
                series,
                ..PageChart::default()
            }),
        ],
    }
}
