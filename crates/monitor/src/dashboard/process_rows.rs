//! The processes: who, how much now and at the peak, what was planned, where it is going.

use cinch_config::Bytes;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::draw::{BOLD, FAINT};
use super::state::{Order, State};
use crate::history::{ProcessHistory, ProcessKey};
use crate::text::{MISSING, bytes, command};

/// A column: its title, its width, whether it is right-aligned, what it sorts by.
struct Column {
    title: &'static str,
    width: usize,
    is_right: bool,
    order: Option<Order>,
    /// From this width of the screen on.
    from: u16,
}

const fn column(
    title: &'static str,
    width: usize,
    is_right: bool,
    order: Option<Order>,
    from: u16,
) -> Column {
    Column {
        title,
        width,
        is_right,
        order,
        from,
    }
}

const COLUMNS: [Column; 10] = [
    column("PID", 7, true, Some(Order::Pid), 0),
    column("USER", 8, false, Some(Order::User), 60),
    column("GPU", 4, true, Some(Order::Gpu), 0),
    column("MEMORY", 9, true, Some(Order::Memory), 0),
    column("PEAK", 9, true, Some(Order::Peak), 60),
    column("PLAN", 9, true, None, 70),
    column("OF PLAN", 7, true, None, 100),
    column("TREND", 7, true, Some(Order::Trend), 76),
    column("CORES", 5, true, None, 110),
    column("CONTAINER", 12, false, None, 120),
];

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &mut State) {
    state.places.processes = area;
    let columns: Vec<&Column> = COLUMNS
        .iter()
        .filter(|one| area.width >= one.from)
        .collect();
    let mut lines = vec![titles(&columns, state, area)];
    let room = usize::from(area.height).saturating_sub(1);
    let rows = state.rows();
    let count = rows.len();
    let first = state.scroll.min(count.saturating_sub(room));
    let shown: Vec<Line<'_>> = rows
        .iter()
        .skip(first)
        .take(room)
        .map(|(key, process)| row(&columns, state, *key, process))
        .collect();
    lines.extend(shown);
    if count == 0 {
        lines.push(Line::styled(nobody(state), FAINT));
    }
    state.scroll = first;
    frame.render_widget(Paragraph::new(lines), area);
}

/// Why the list is empty.
fn nobody(state: &State) -> String {
    let hides = |last: &crate::sample::Sample| {
        let mut gpus = last.gpus.iter().filter(|gpu| gpu.problem.is_none());
        gpus.any(|gpu| gpu.processes.is_none())
    };
    match &state.history.last {
        _ if !state.filter.is_empty() => "no process matches the filter".to_owned(),
        Some(last) if hides(last) => {
            "the driver does not tell who holds memory (no permission)".to_owned()
        }
        Some(last) if last.gpus.is_empty() => "no run of cinch on this machine".to_owned(),
        _ => "no process holds GPU memory".to_owned(),
    }
}

fn titles(columns: &[&Column], state: &mut State, area: Rect) -> Line<'static> {
    state.places.titles.clear();
    let mut text = String::new();
    for column in columns {
        let left = area.x + text.chars().count() as u16;
        let mark = match column.order == Some(state.order) {
            true => "▾",
            false => "",
        };
        let title = format!("{}{mark}", column.title);
        text += &cell(&title, column.width, column.is_right);
        text.push(' ');
        let right = area.x + text.chars().count() as u16;
        let place = column.order.map(|order| (left, right, order));
        state.places.titles.extend(place);
    }
    let sorted = format!(
        "COMMAND   sorted by {}, {} shown",
        state.order.name(),
        state.rows().len()
    );
    let room = usize::from(area.width).saturating_sub(text.chars().count());
    text += &cell(&sorted, room, false);
    Line::styled(text, BOLD)
}

fn row(
    columns: &[&Column],
    state: &State,
    key: ProcessKey,
    process: &ProcessHistory,
) -> Line<'static> {
    let last = state.history.last.as_ref();
    let facts = last.and_then(|last| last.facts(key.pid));
    let name = last.and_then(|last| {
        let mut processes = last.on_gpus();
        processes
            .find(|(_, process)| process.pid == key.pid)?
            .1
            .name
            .clone()
    });
    let plan = facts.and_then(|facts| facts.plan.as_ref());
    let plan = plan.filter(|plan| plan.on_gpu == key.gpu.is_some());
    let used = process.series.last();
    let missing = || MISSING.to_owned();
    let mut text = String::new();
    for column in columns {
        let value = match column.title {
            "PID" => key.pid.to_string(),
            "USER" => facts
                .and_then(|facts| facts.user.clone())
                .unwrap_or_else(missing),
            "GPU" => key
                .gpu
                .map_or_else(|| "host".to_owned(), |gpu| gpu.to_string()),
            "MEMORY" => bytes(used),
            "PEAK" => bytes((process.peak_bytes > 0).then_some(process.peak_bytes)),
            "PLAN" => plan.map_or_else(missing, |plan| Bytes::new(plan.bytes).to_string()),
            "OF PLAN" => plan.zip(used).map_or_else(missing, |(plan, used)| {
                format!("{:.1}%", 100.0 * used as f64 / plan.bytes.max(1) as f64)
            }),
            "TREND" => process
                .trend
                .map_or_else(missing, |trend| match trend.is_creep {
                    true => format!("{:+.0}", trend.mebibytes_per_minute()),
                    false => "steady".to_owned(),
                }),
            "CORES" => process
                .cores_busy
                .map_or_else(missing, |cores| format!("{cores:.1}")),
            _ => facts
                .and_then(|facts| facts.container.clone())
                .unwrap_or_else(missing),
        };
        text += &cell(&value, column.width, column.is_right);
        text.push(' ');
    }
    text += &command(facts, name.as_deref());
    Line::from(text)
}

/// Text in a column of so many characters, cut where it is longer.
fn cell(text: &str, width: usize, is_right: bool) -> String {
    let cut: String = match text.chars().count() > width {
        true if width > 1 => text.chars().take(width - 1).chain(Some('…')).collect(),
        _ => text.chars().take(width).collect(),
    };
    match is_right {
        true => format!("{cut:>width$}"),
        false => format!("{cut:<width$}"),
    }
}
