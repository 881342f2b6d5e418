//! What is shown, and what keys and the mouse change about it.

use std::path::PathBuf;

use ratatui::crossterm::event::{
    Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers, MouseButton, MouseEvent, MouseEventKind,
};
use ratatui::layout::{Position, Rect};

use cinch_ranks::pace::RanksTable;

use crate::history::{History, ProcessHistory, ProcessKey};
use crate::rank_lines::read_ranks;
use crate::run_folder::{RunCurve, read_curve};
use crate::sample::Sample;
use crate::signs::{Sign, signs};
use crate::text::command;

/// What the user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Stay,
    Leave,
    Suspend,
}

/// Which screen.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum View {
    #[default]
    Machine,
    /// A run's folder.
    Run(PathBuf),
}

/// What processes are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Memory,
    Peak,
    Trend,
    Gpu,
    User,
    Pid,
}

impl Order {
    pub(super) const ALL: [Self; 6] = [
        Self::Memory,
        Self::Peak,
        Self::Trend,
        Self::Gpu,
        Self::User,
        Self::Pid,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Peak => "peak",
            Self::Trend => "trend",
            Self::Gpu => "GPU",
            Self::User => "user",
            Self::Pid => "PID",
        }
    }

    fn next(self) -> Self {
        let place = Self::ALL.iter().position(|order| *order == self);
        Self::ALL[(place.unwrap_or(0) + 1) % Self::ALL.len()]
    }
}

/// Where on the last frame things were, for the mouse.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    pub gpus: Rect,
    /// The GPU on the first line of `gpus`.
    pub first_gpu: usize,
    pub processes: Rect,
    /// Where each column's title stands, and what it sorts by.
    pub titles: Vec<(u16, u16, Order)>,
}

#[derive(Debug, Default)]
pub struct State {
    pub history: History,
    pub view: View,
    pub(super) signs: Vec<Sign>,
    /// Which of the GPUs the chart shows, by its place in the list.
    pub(super) selected: usize,
    pub(super) order: Order,
    pub(super) filter: String,
    pub(super) is_typing: bool,
    /// Only processes of the selected GPU.
    pub(super) only_selected: bool,
    pub(super) scroll: usize,
    pub(super) is_paused: bool,
    pub(super) shows_help: bool,
    pub(super) curve: RunCurve,
    pub(super) curve_problem: Option<String>,
    pub(super) ranks: Option<RanksTable>,
    pub(super) places: Places,
    waiting: Vec<Sample>,
    changed: bool,
}

impl State {
    pub fn new(view: View) -> Self {
        Self {
            view,
            changed: true,
            ..Self::default()
        }
    }

    /// Takes a sample up. While the screen is paused it is only kept.
    pub fn push(&mut self, sample: Sample) {
        /// Samples kept while the screen stands still; the oldest are let go.
        const MOST_WAITING: usize = 600;
        if self.is_paused {
            if self.waiting.len() == MOST_WAITING {
                self.waiting.remove(0);
            }
            self.waiting.push(sample);
            return;
        }
        self.history.push(sample);
        self.signs = signs(&self.history);
        if let View::Run(folder) = &self.view {
            match read_curve(folder) {
                Ok(curve) => (self.curve, self.curve_problem) = (curve, None),
                Err(error) => self.curve_problem = Some(error.to_string()),
            }
            // What cannot be read of them keeps no curve from being shown.
            self.ranks = read_ranks(folder).ok().flatten();
        }
    }

    /// Whether something was changed by the user since the last frame.
    pub(super) fn is_changed(&self) -> bool {
        self.changed
    }

    pub(super) fn drawn(&mut self) {
        self.changed = false;
    }

    /// Processes that are shown, sorted.
    pub(super) fn rows(&self) -> Vec<(ProcessKey, &ProcessHistory)> {
        let newest = self.history.last.as_ref().map_or(0.0, |last| last.seconds);
        let selected = self.history.gpus.keys().nth(self.selected).copied();
        let processes = self.history.processes.iter();
        let mut rows: Vec<_> = processes
            .filter(|(_, process)| process.last_seen >= newest)
            .filter(|(key, _)| !self.only_selected || key.gpu == selected)
            .filter(|(key, _)| self.matches(**key))
            .map(|(key, process)| (*key, process))
            .collect();
        let user = |key: &ProcessKey| {
            let last = self.history.last.as_ref();
            last.and_then(|last| last.facts(key.pid)?.user.clone())
        };
        let rate = |process: &ProcessHistory| {
            process
                .trend
                .map_or(i64::MIN, |trend| trend.bytes_per_second as i64)
        };
        let used = |process: &ProcessHistory| std::cmp::Reverse(process.series.last());
        match self.order {
            Order::Memory => rows.sort_by_key(|(key, process)| (used(process), *key)),
            Order::Peak => {
                rows.sort_by_key(|(key, process)| (std::cmp::Reverse(process.peak_bytes), *key));
            }
            Order::Trend => {
                rows.sort_by_key(|(key, process)| (std::cmp::Reverse(rate(process)), *key));
            }
            Order::Gpu => {
                rows.sort_by_key(|(key, process)| {
                    (key.gpu.is_none(), key.gpu, used(process), *key)
                });
            }
            Order::User => {
                rows.sort_by_cached_key(|(key, process)| (user(key), used(process), *key))
            }
            Order::Pid => rows.sort_by_key(|(key, _)| key.pid),
        }
        rows
    }

    fn matches(&self, key: ProcessKey) -> bool {
        if self.filter.is_empty() {
            return true;
        }
        let wanted = self.filter.to_lowercase();
        let last = self.history.last.as_ref();
        let facts = last.and_then(|last| last.facts(key.pid));
        let texts = [
            Some(command(facts, None)),
            facts.and_then(|facts| facts.user.clone()),
            facts.and_then(|facts| facts.container.clone()),
            Some(key.pid.to_string()),
        ];
        texts
            .into_iter()
            .flatten()
            .any(|text| text.to_lowercase().contains(&wanted))
    }

    /// Answers a key, the mouse or a new size.
    pub fn answer(&mut self, event: &Event) -> Action {
        self.changed = true;
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => self.key(*key),
            Event::Mouse(mouse) => {
                self.mouse(*mouse);
                Action::Stay
            }
            _ => Action::Stay,
        }
    }

    fn key(&mut self, key: KeyEvent) -> Action {
        let with_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if with_control => return Action::Leave,
            KeyCode::Char('z') if with_control => return Action::Suspend,
            _ if self.is_typing => self.type_filter(key.code),
            KeyCode::Char('q') => return Action::Leave,
            KeyCode::Esc if self.shows_help => self.shows_help = false,
            KeyCode::Esc if !self.filter.is_empty() => self.filter.clear(),
            KeyCode::Esc => return Action::Leave,
            KeyCode::Char('?' | 'h') => self.shows_help = !self.shows_help,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('m') => self.order = Order::Memory,
            KeyCode::Char('t') => self.order = Order::Trend,
            KeyCode::Char('u') => self.order = Order::User,
            KeyCode::Char('p') => self.order = Order::Pid,
            KeyCode::Char('o') => self.only_selected = !self.only_selected,
            KeyCode::Char(' ') => self.pause(),
            KeyCode::Tab | KeyCode::Right => self.select(1),
            KeyCode::BackTab | KeyCode::Left => self.select(-1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll_by(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll_by(-1),
            KeyCode::PageDown => self.scroll_by(self.page()),
            KeyCode::PageUp => self.scroll_by(-self.page()),
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = usize::MAX,
            _ => {}
        }
        Action::Stay
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(letter) => self.filter.push(letter),
            _ => {}
        }
        self.scroll = 0;
    }

    fn pause(&mut self) {
        self.is_paused = !self.is_paused;
        if !self.is_paused {
            for sample in std::mem::take(&mut self.waiting) {
                self.push(sample);
            }
        }
    }

    fn select(&mut self, by: isize) {
        let count = self.history.gpus.len().max(1);
        let place = (self.selected + count).saturating_add_signed(by);
        self.selected = place % count;
    }

    /// Rows of a page of processes.
    fn page(&self) -> isize {
        isize::try_from(self.places.processes.height.max(2) - 1).unwrap_or(1)
    }

    fn scroll_by(&mut self, by: isize) {
        self.scroll = self.scroll.saturating_add_signed(by);
    }

    fn mouse(&mut self, mouse: MouseEvent) {
        let at = Position::new(mouse.column, mouse.row);
        match mouse.kind {
            MouseEventKind::ScrollDown => self.scroll_by(3),
            MouseEventKind::ScrollUp => self.scroll_by(-3),
            MouseEventKind::Down(MouseButton::Left) if self.places.gpus.contains(at) => {
                let row = usize::from(mouse.row - self.places.gpus.y);
                let place = self.places.first_gpu + row;
                if place < self.history.gpus.len() {
                    self.selected = place;
                }
            }
            MouseEventKind::Down(MouseButton::Left) if mouse.row == self.places.processes.y => {
                let mut titles = self.places.titles.iter();
                let title = titles.find(|(left, right, _)| (*left..*right).contains(&mouse.column));
                if let Some((_, _, order)) = title {
                    self.order = *order;
                }
            }
            _ => {}
        }
    }
}
