//! A cinch run: its loss, its speed and its memory against the plan, from what it writes down.

use cinch_config::Bytes;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Color;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::chart::{Curve, Frames, draw as draw_chart};
use super::draw::{BOLD, FAINT};
use super::state::{State, View};
use crate::rank_lines::rank_lines;
use crate::run_folder::RunPoint;

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let View::Run(folder) = &state.view else {
        return;
    };
    // A third for the ranks; curves get the rest.
    let ranks = state.ranks.as_ref();
    let ranks = ranks.map_or_else(Vec::new, |table| {
        rank_lines(table, usize::from(area.height / 3).max(3))
    });
    let [head, middle, body] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(ranks.len() as u16),
        Constraint::Min(1),
    ])
    .areas(area);
    let mut text: Vec<Line<'_>> = ranks.into_iter().map(Line::from).collect();
    if let Some(first) = text.first_mut() {
        first.style = BOLD;
    }
    if let Some(titles) = text.get_mut(1) {
        titles.style = FAINT;
    }
    frame.render_widget(Paragraph::new(text), middle);
    let mut lines = vec![Line::styled(format!("run {}", folder.display()), BOLD)];
    if let Some(problem) = &state.curve_problem {
        lines.push(Line::from(
            problem.lines().next().unwrap_or_default().to_owned(),
        ));
        frame.render_widget(Paragraph::new(lines), head);
        return;
    }
    let Some(last) = state.curve.last() else {
        lines.push(Line::from("no step is logged yet"));
        frame.render_widget(Paragraph::new(lines), head);
        return;
    };
    lines.push(Line::from(last.summary()));
    frame.render_widget(Paragraph::new(lines), head);
    let areas: [Rect; 3] = match body.width >= 120 {
        true => {
            let [left, right] =
                Layout::horizontal([Constraint::Percentage(60), Constraint::Percentage(40)])
                    .areas(body);
            let [top, bottom] =
                Layout::vertical([Constraint::Percentage(50), Constraint::Percentage(50)])
                    .areas(right);
            [left, top, bottom]
        }
        false => Layout::vertical([Constraint::Ratio(1, 3); 3]).areas(body),
    };
    let steps = &state.curve.steps;
    let losses = points(steps, |point| point.loss);
    let validation = points(&state.curve.evaluations, |point| point.validation_loss);
    let speeds = points(steps, |point| point.tokens_per_second);
    let planned = points(steps, |point| point.planned_bytes.map(|bytes| bytes as f64));
    let used = points(steps, |point| point.measured().map(|bytes| bytes as f64));
    let curve = |name: &str, points, color| Curve {
        name: name.to_owned(),
        points,
        color,
    };
    let mut loss_curves = vec![curve("loss", &losses, Color::Cyan)];
    if !validation.is_empty() {
        loss_curves.push(curve("validation", &validation, Color::Yellow));
    }
    let plain = |value: f64| format!("{value:.3}");
    let rate = |value: f64| format!("{value:.0}");
    let size = |value: f64| Bytes::new(value.max(0.0) as u64).to_string();
    let memory = [
        curve("planned", &planned, Color::Yellow),
        curve("measured", &used, Color::Cyan),
    ];
    chart(frame, areas[0], "loss", &loss_curves, false, &plain);
    chart(
        frame,
        areas[1],
        "tokens/s",
        &[curve("tokens/s", &speeds, Color::Cyan)],
        true,
        &rate,
    );
    chart(frame, areas[2], "memory against plan", &memory, true, &size);
}

fn points(steps: &[RunPoint], value: impl Fn(&RunPoint) -> Option<f64>) -> Vec<(f64, f64)> {
    let points = steps
        .iter()
        .filter_map(|point| Some((point.step as f64, value(point)?)));
    points.filter(|point| point.1.is_finite()).collect()
}

fn chart(
    frame: &mut Frame<'_>,
    area: Rect,
    title: &str,
    curves: &[Curve<'_>],
    from_zero: bool,
    y_label: &dyn Fn(f64) -> String,
) {
    let all = || curves.iter().flat_map(|curve| curve.points);
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NEG_INFINITY, f64::max);
    let x = (
        least(&mut all().map(|point| point.0)),
        most(&mut all().map(|point| point.0)),
    );
    let y = (
        least(&mut all().map(|point| point.1)),
        most(&mut all().map(|point| point.1)),
    );
    if !x.0.is_finite() {
        return;
    }
    let y = if from_zero { (0.0, y.1) } else { y };
    // A flat curve still needs a height.
    let y = (y.0, if y.1 > y.0 { y.1 } else { y.0 + 1.0 });
    let frames = Frames {
        title: format!(" {title} "),
        x: (x.0, x.1.max(x.0 + 1.0)),
        y,
        x_labels: [format!("step {:.0}", x.0), format!("{:.0}", x.1)],
        y_label,
    };
    draw_chart(frame, area, curves, &frames);
}
