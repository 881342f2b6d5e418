//! A frame: header, GPUs, the chart of the selected one, processes, signs, keys. What a small
//! screen has no room for is left out from the right and from the bottom of each part.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Wrap};

use cinch_device::ReadBy;

use super::state::{State, View};
use super::{chart, gpu_rows, process_rows, run_view};
use crate::text::{sign_line, span};

pub(super) const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
pub(super) const FAINT: Style = Style::new().add_modifier(Modifier::DIM);
pub(super) const MARKED: Style = Style::new().add_modifier(Modifier::REVERSED);

/// The smallest screen that can show anything of use.
const LEAST: (u16, u16) = (40, 10);

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, state: &mut State) {
    let area = frame.area();
    state.drawn();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!("cinch monitor needs {} × {}", LEAST.0, LEAST.1);
        frame.render_widget(Paragraph::new(text), area);
        return;
    }
    let [head, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(header(state)), head);
    frame.render_widget(Paragraph::new(footer(state)), foot);
    match &state.view {
        View::Run(_) => run_view::draw(frame, body, state),
        View::Machine => machine(frame, body, state),
    }
    if state.shows_help {
        help(frame, area);
    }
}

fn machine(frame: &mut Frame<'_>, area: Rect, state: &mut State) {
    let num_gpus = state.history.gpus.len().max(1) as u16;
    // Half of what is there for many GPUs; the rest is divided between chart and processes.
    let gpus = num_gpus.min(area.height / 3).max(1);
    let lines = state
        .signs
        .iter()
        .map(|sign| Line::from(vec![Span::styled("! ", BOLD), Span::raw(sign_line(sign))]));
    let lines: Vec<Line<'_>> = lines.collect();
    let wrapped = |line: &Line<'_>| (line.width() as u16).div_ceil(area.width.max(1));
    let wanted = lines.iter().map(wrapped).fold(0, u16::saturating_add);
    let signs = wanted.min(area.height / 4);
    let left = area.height.saturating_sub(gpus + signs);
    let chart_height = (left / 2).clamp(4, 24).min(left.saturating_sub(3));
    let [top, middle, list, bottom] = Layout::vertical([
        Constraint::Length(gpus),
        Constraint::Length(chart_height),
        Constraint::Min(2),
        Constraint::Length(signs),
    ])
    .areas(area);
    gpu_rows::draw(frame, top, state);
    chart::memory(frame, middle, state);
    process_rows::draw(frame, list, state);
    let lines = Paragraph::new(lines).wrap(Wrap { trim: false });
    frame.render_widget(lines, bottom);
}

fn header(state: &State) -> Line<'static> {
    let mut parts = vec![Span::styled(" cinch monitor ", MARKED)];
    let mut say = |text: String| parts.push(Span::raw(format!("  {text}")));
    if let Some(last) = &state.history.last {
        say(match last.read_by {
            ReadBy::Nobody => "no GPU".to_owned(),
            by => match last.gpus.len() {
                1 => format!("1 GPU by {}", by.name()),
                count => format!("{count} GPUs by {}", by.name()),
            },
        });
        say(format!("{} UTC", clock(last.at)));
        say(format!("watching for {}", span(last.seconds)));
    }
    if state.is_paused {
        say("PAUSED".to_owned());
    }
    if !state.filter.is_empty() || state.is_typing {
        let cursor = if state.is_typing { "_" } else { "" };
        say(format!("filter: {}{cursor}", state.filter));
    }
    Line::from(parts)
}

/// The time of day of seconds since 1970.
fn clock(at: f64) -> String {
    let seconds = at.max(0.0) as u64 % 86_400;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}", seconds % 60)
}

fn footer(state: &State) -> Line<'static> {
    let keys: &[(&str, &str)] = match (state.is_typing, &state.view) {
        (true, _) => &[("Enter", "keep"), ("Esc", "clear")],
        (false, View::Run(_)) => &[("Space", "pause"), ("q", "quit")],
        (false, View::Machine) => &[
            ("Tab", "GPU"),
            ("s", "sort"),
            ("/", "filter"),
            ("o", "only this GPU"),
            ("Space", "pause"),
            ("?", "help"),
            ("q", "quit"),
        ],
    };
    let mut parts = Vec::new();
    for (key, meaning) in keys {
        parts.push(Span::styled(format!(" {key} "), MARKED));
        parts.push(Span::raw(format!(" {meaning} ")));
    }
    Line::from(parts)
}

fn help(frame: &mut Frame<'_>, area: Rect) {
    const TEXT: &str = "\
Tab, ← →, click   which GPU the chart shows
↑ ↓, wheel, PgDn  more processes
s, click a title  sort; m memory, t trend, u user, p PID
/                 filter by command, user, container, PID
o                 only processes of the selected GPU
Space             stand still; nothing is lost
Ctrl-Z, q, Esc    suspend, leave

PLAN is what was predicted: of cinch's own runs, and of
a run whose configuration was given (--config).
TREND is MiB a minute; - is a reading nobody gives.
No process is ever ended from here.";
    let width = 62.min(area.width);
    let height = (TEXT.lines().count() as u16 + 2).min(area.height);
    let place = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    frame.render_widget(Clear, place);
    let block = Block::bordered().title(" keys ");
    frame.render_widget(Paragraph::new(TEXT).block(block), place);
}
