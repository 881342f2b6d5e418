//! A line a GPU: memory as a bar and in figures, use, temperature, power, PCIe, trend.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::draw::{BOLD, FAINT, MARKED};
use super::state::State;
use crate::history::GpuHistory;
use crate::text::{MISSING, bytes, rate, span};
use crate::trend::Trend;

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &mut State) {
    if state.history.gpus.is_empty() {
        frame.render_widget(Paragraph::new(without(state)), area);
        state.places.gpus = Rect::default();
        return;
    }
    let rows = usize::from(area.height);
    let count = state.history.gpus.len();
    state.selected = state.selected.min(count - 1);
    // The selected one stays in sight.
    let first = state.selected.saturating_sub(rows.saturating_sub(1));
    let first = first.min(count.saturating_sub(rows));
    (state.places.gpus, state.places.first_gpu) = (area, first);
    let shown = state.history.gpus.iter().enumerate().skip(first).take(rows);
    let lines: Vec<Line<'_>> = shown
        .map(|(place, (index, gpu))| {
            let is_selected = place == state.selected && count > 1;
            line(*index, gpu, is_selected, area.width)
        })
        .collect();
    frame.render_widget(Paragraph::new(lines), area);
}

fn without(state: &State) -> Line<'static> {
    let reason = state.history.last.as_ref().map(|last| {
        let reason = last.reason.as_deref().unwrap_or("none was found");
        format!("no GPU: {reason}. Host memory and cinch's runs are shown.")
    });
    Line::from(reason.unwrap_or_else(|| "reading …".to_owned()))
}

fn line(index: usize, gpu: &GpuHistory, is_selected: bool, width: u16) -> Line<'static> {
    let reading = &gpu.reading;
    let mark = if is_selected { MARKED } else { BOLD };
    let mut parts = vec![Span::styled(format!("{index:>2} "), mark)];
    let name = reading.name.trim_start_matches("NVIDIA ").to_owned();
    parts.push(Span::raw(format!("{name:<12.12} ")));
    if gpu.is_gone {
        parts.push(Span::styled(
            "vanished: the driver no longer tells of it",
            BOLD,
        ));
        return Line::from(parts);
    }
    if let Some(problem) = &reading.problem {
        parts.push(Span::styled(format!("cannot be read: {problem}"), BOLD));
        return Line::from(parts);
    }
    let share = reading.used_bytes.zip(reading.total_bytes);
    let share = share.map(|(used, total)| used as f64 / total.max(1) as f64);
    let bar_width = match width {
        0..100 => 8,
        100..160 => 24,
        _ => 40,
    };
    parts.push(Span::raw(bar(share, bar_width)));
    let figures = match (width, reading.used_bytes, reading.total_bytes) {
        // Two figures of one unit are shorter.
        (0..100, Some(used), Some(total)) => {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            format!(" {:>5.1}/{:<5.1} GiB", gib(used), gib(total))
        }
        (_, used, total) => format!(" {:>10}/{:<10}", bytes(used), bytes(total)),
    };
    parts.push(Span::raw(figures));
    let missing = || MISSING.to_owned();
    let percent = reading
        .utilization_percent
        .map_or_else(missing, |percent| format!("{percent}%"));
    let degrees = reading
        .temperature_celsius
        .map_or_else(missing, |degrees| format!("{degrees}°C"));
    let watts = reading
        .power_watts
        .map_or_else(missing, |watts| format!("{watts:.0}W"));
    parts.push(Span::raw(format!(" {percent:>4} {degrees:>5} {watts:>5}")));
    if width >= 100 {
        let limit = reading
            .power_limit_watts
            .map_or_else(missing, |watts| format!("{watts:.0}W"));
        parts.push(Span::styled(format!("/{limit:<5}"), FAINT));
    }
    if width >= 130 {
        let (receive, send) = (rate(reading.pcie_receive), rate(reading.pcie_send));
        parts.push(Span::raw(format!(" PCIe in {receive:>9} out {send:>9}")));
    }
    let is_wide = width >= 100;
    parts.push(Span::raw(format!(
        " {}",
        trend(gpu.trend, reading.free_bytes, is_wide)
    )));
    Line::from(parts)
}

/// MiB a minute, and when the card will be full.
pub(super) fn trend(trend: Option<Trend>, free: Option<u64>, is_wide: bool) -> String {
    let Some(trend) = trend else {
        return String::new();
    };
    let rate = trend.mebibytes_per_minute();
    let rate = match trend.is_creep {
        true => format!("{rate:+.0} MiB/min"),
        false => "steady".to_owned(),
    };
    match free.and_then(|free| trend.seconds_until(free)) {
        Some(seconds) if is_wide => format!("{rate}, full in {}", span(seconds)),
        Some(_) | None => rate,
    }
}

/// A bar of eighths; a missing share is dots.
fn bar(share: Option<f64>, width: usize) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let Some(share) = share else {
        return "·".repeat(width + 2);
    };
    let filled = (share.clamp(0.0, 1.0) * (width * 8) as f64).round() as usize;
    let mut text = String::from("▕");
    text.extend(std::iter::repeat_n('█', filled / 8));
    if !filled.is_multiple_of(8) {
        text.push(EIGHTHS[filled % 8]);
    }
    let drawn = filled.div_ceil(8);
    text.extend(std::iter::repeat_n(' ', width.saturating_sub(drawn)));
    text.push('▏');
    text
}
