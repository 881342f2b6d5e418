//! Curves over time, drawn with the dots of Braille characters.

use cinch_config::Bytes;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Borders, Chart, Dataset, GraphType};

use super::state::State;
use crate::series::Series;
use crate::text::span;

/// A curve and what it is called.
pub(super) struct Curve<'a> {
    pub name: String,
    pub points: &'a [(f64, f64)],
    pub color: Color,
}

/// What a chart has around its curves.
pub(super) struct Frames<'a> {
    pub title: String,
    pub x: (f64, f64),
    pub y: (f64, f64),
    pub x_labels: [String; 2],
    pub y_label: &'a dyn Fn(f64) -> String,
}

/// The memory of the selected GPU over time, or of the host where there is none.
pub(super) fn memory(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let selected = state.history.gpus.iter().nth(state.selected);
    let (title, series, total, peak, use_of) = match selected {
        Some((index, gpu)) => (
            format!("GPU {index} {}", gpu.reading.name),
            &gpu.used,
            gpu.reading.total_bytes,
            gpu.peak_bytes,
            Some(&gpu.utilization),
        ),
        None => (
            "host memory".to_owned(),
            &state.history.host,
            state
                .history
                .last
                .as_ref()
                .and_then(|last| last.host.total_bytes),
            state.history.host_peak_bytes,
            None,
        ),
    };
    let top = total.unwrap_or(peak).max(1) as f64;
    let used = points(series, 1.0);
    // Use is drawn on the same frame: 100 % is the whole height.
    let percent = use_of
        .map(|series| points(series, top / 100.0))
        .unwrap_or_default();
    let begin = used.first().map_or(0.0, |point| point.0);
    let end = used.last().map_or(1.0, |point| point.0).max(begin + 1.0);
    let plan = planned(state, selected.map(|(index, _)| *index));
    let plan_line = plan.map(|bytes| [(begin, bytes as f64), (end, bytes as f64)]);
    let now = series
        .last()
        .map_or_else(|| "-".to_owned(), |bytes| Bytes::new(bytes).to_string());
    let mut title = format!(" {title}: memory {now}, peak {}", Bytes::new(peak));
    if let Some(plan) = plan {
        title += &format!(", planned {}", Bytes::new(plan));
    }
    title.push(' ');
    let mut curves = Vec::new();
    if !percent.is_empty() {
        curves.push(Curve {
            name: "busy %".to_owned(),
            points: &percent,
            color: Color::DarkGray,
        });
    }
    if let Some(points) = &plan_line {
        curves.push(Curve {
            name: "planned".to_owned(),
            points,
            color: Color::Yellow,
        });
    }
    curves.push(Curve {
        name: "memory".to_owned(),
        points: &used,
        color: Color::Cyan,
    });
    let frames = Frames {
        title,
        x: (begin, end),
        y: (0.0, top),
        x_labels: [format!("-{}", span(end - begin)), "now".to_owned()],
        y_label: &|value| Bytes::new(value as u64).to_string(),
    };
    draw(frame, area, &curves, &frames);
}

/// What was planned for the processes of a GPU, or of the host, together.
fn planned(state: &State, gpu: Option<usize>) -> Option<u64> {
    let last = state.history.last.as_ref()?;
    let keys = state.history.processes.iter();
    let keys = keys.filter(|(key, process)| key.gpu == gpu && process.last_seen >= last.seconds);
    let plans = keys.filter_map(|(key, _)| last.facts(key.pid)?.plan.as_ref());
    let plans = plans.filter(|plan| plan.on_gpu == gpu.is_some());
    plans.map(|plan| plan.bytes).reduce(u64::saturating_add)
}

fn points(series: &Series, factor: f64) -> Vec<(f64, f64)> {
    let points = series.points();
    points
        .map(|(seconds, value)| (seconds, value as f64 * factor))
        .collect()
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, curves: &[Curve<'_>], frames: &Frames<'_>) {
    let datasets = curves.iter().map(|curve| {
        Dataset::default()
            .name(Line::from(curve.name.clone()))
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(curve.color))
            .data(curve.points)
    });
    let labels = |low: f64, high: f64| {
        let middle = f64::midpoint(low, high);
        [low, middle, high].map(|value| Span::raw((frames.y_label)(value)))
    };
    let y_labels = match area.height {
        0..7 => {
            let [low, _, high] = labels(frames.y.0, frames.y.1);
            vec![low, high]
        }
        _ => labels(frames.y.0, frames.y.1).to_vec(),
    };
    let block = Block::new()
        .borders(Borders::TOP)
        .title(frames.title.clone());
    let x = Axis::default()
        .bounds([frames.x.0, frames.x.1])
        .labels(frames.x_labels.clone().map(Span::raw));
    let y = Axis::default()
        .bounds([frames.y.0, frames.y.1])
        .labels(y_labels);
    let chart = Chart::new(datasets.collect())
        .block(block)
        .x_axis(x)
        .y_axis(y);
    frame.render_widget(chart, area);
}
