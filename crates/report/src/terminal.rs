//! The same memory in a few lines of a terminal, in block characters and without colour codes:
//! who prints decides about colour.

use cinch_graph::Phase;
use cinch_plan::Category;

use crate::columns::columns;
use crate::frame::bytes;
use crate::step::{Moment, StepPicture};
use crate::timeline::{PHASES, phase_name};

/// A cell filled by so many eighths, from the bottom.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Values as one line of blocks, at most `width` of them; the highest is a full block. Where
/// there are more values than columns, a column shows its largest.
pub fn sparkline(values: &[u64], width: usize) -> String {
    let width = width.min(values.len());
    let most = values.iter().copied().max().unwrap_or(0);
    let count = values.len() as f64;
    let spans: Vec<(f64, f64)> = (0..values.len())
        .map(|index| (index as f64 / count, (index + 1) as f64 / count))
        .collect();
    let shown = columns(&spans, values, width).highest.into_iter();
    shown
        .map(|index| EIGHTHS[eighths(values[index], most, 1)])
        .collect()
}

/// How many eighths of `cells` cells a value fills; what is there at all fills one.
fn eighths(value: u64, most: u64, cells: usize) -> usize {
    if most == 0 {
        return 0;
    }
    let filled = u128::from(value) * 8 * cells as u128 / u128::from(most);
    (filled as usize).max(usize::from(value > 0))
}

/// The size of a chart in a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextChart {
    /// Characters in a line, the scale at the left included.
    pub width: usize,
    /// Lines of the curve; the axis, its phases and the keys come below.
    pub height: usize,
    /// Whether the curve is shaded by what the memory is for.
    pub categories: bool,
}

/// Room for the scale: `1023.9 MiB ┤`.
const SCALE: usize = 12;
/// Narrower than this nothing can be seen.
const LEAST: usize = 8;

/// The memory timeline of a step in lines of text, each at most `width` characters. In a
/// terminal too narrow for a scale it is a sparkline.
pub fn text_chart(picture: &StepPicture, chart: TextChart) -> String {
    let totals: Vec<u64> = picture.moments.iter().map(Moment::total).collect();
    if chart.width < SCALE + LEAST || chart.height < 2 {
        return sparkline(&totals, chart.width);
    }
    let width = chart.width - SCALE;
    let columns = columns(&picture.spans(), &totals, width);
    let moments = |indices: &[usize]| -> Vec<&Moment> {
        indices
            .iter()
            .map(|&index| &picture.moments[index])
            .collect()
    };
    let curve = Curve {
        picture,
        moments: moments(&columns.highest),
        most: top(picture),
        height: chart.height,
    };
    let mut lines: Vec<String> = (0..chart.height)
        .map(|row| curve.line(row, chart.categories))
        .collect();
    let running = moments(&columns.longest);
    let strip: String = running.iter().map(|moment| mark(moment.phase)).collect();
    lines.push(" ".repeat(SCALE) + &strip);
    if chart.categories {
        lines.push(keys(&curve.keys(), chart.width));
    }
    let seen = |phase: &Phase| running.iter().any(|moment| moment.phase == *phase);
    let phases: Vec<(char, &str)> = PHASES
        .into_iter()
        .filter(seen)
        .map(|phase| (mark(phase), phase_name(phase)))
        .collect();
    lines.push(keys(&phases, chart.width));
    let lines = lines.iter().map(|line| line.trim_end());
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join("\n")
}

/// The upper end of the scale: the peak, or a budget that is near it.
fn top(picture: &StepPicture) -> u64 {
    let peak = picture.peak_bytes();
    let near = |budget: &u64| *budget > peak && *budget <= peak.saturating_mul(2);
    picture.budget_bytes.filter(near).unwrap_or(peak)
}

struct Curve<'a> {
    picture: &'a StepPicture,
    /// By column.
    moments: Vec<&'a Moment>,
    most: u64,
    height: usize,
}

impl Curve<'_> {
    fn total(&self, moment: &Moment) -> u64 {
        moment.total().saturating_add(self.picture.overhead_bytes)
    }

    /// One line of the curve, counted from the top, with the scale at its left.
    fn line(&self, row: usize, categories: bool) -> String {
        // Rows from the bottom.
        let level = self.height - 1 - row;
        let budget = self.picture.budget_bytes.filter(|&b| b <= self.most);
        let is_budget = budget.is_some_and(|budget| {
            let eighth = eighths(budget, self.most, self.height);
            eighth.saturating_sub(1) / 8 == level
        });
        let label = match row {
            0 => bytes(self.most),
            row if row + 1 == self.height => "0".to_owned(),
            _ if is_budget => "budget".to_owned(),
            _ => String::new(),
        };
        let empty = if is_budget { '╌' } else { ' ' };
        let cell = |moment: &&Moment| {
            let filled = eighths(self.total(moment), self.most, self.height);
            match filled.saturating_sub(8 * level).min(8) {
                0 => empty,
                eighths if !categories => EIGHTHS[eighths],
                // Shades fill whole cells: those of which half is taken.
                eighths if eighths >= 4 || level == 0 => self.shade(moment, level),
                _ => empty,
            }
        };
        let cells: String = self.moments.iter().map(cell).collect();
        format!("{label:>width$} ┤{cells}", width = SCALE - 2)
    }

    /// What the middle of a cell's filled part is for.
    fn shade(&self, moment: &Moment, level: usize) -> char {
        let (most, height) = (u128::from(self.most), self.height as u128);
        let floor = level as u128 * most / height;
        let ceiling = (level as u128 + 1) * most / height;
        let middle = u128::midpoint(floor, ceiling.min(u128::from(self.total(moment))));
        let mut below = u128::from(self.picture.overhead_bytes);
        let mut shown = OUTSIDE;
        for category in self.picture.stack() {
            if middle < below {
                break;
            }
            let bytes = u128::from(moment.bytes[category.index()]);
            if bytes > 0 {
                shown = shade(category).0;
            }
            below += bytes;
        }
        shown
    }

    /// The shades that occur.
    fn keys(&self) -> Vec<(char, &'static str)> {
        let outside = (OUTSIDE, self.picture.words.outside);
        let outside = (self.picture.overhead_bytes > 0).then_some(outside);
        let stack = self.picture.stack().into_iter().map(shade);
        let mut keys: Vec<(char, &str)> = outside.into_iter().chain(stack).collect();
        keys.dedup();
        keys
    }
}

/// The shade of what lies outside the arena.
const OUTSIDE: char = '░';

/// Four shades are as many as one can tell apart; what stays over the whole step has one.
fn shade(category: Category) -> (char, &'static str) {
    match category {
        Category::Activations | Category::Staged | Category::Exchanged => ('▒', "activations"),
        Category::Workspace => ('▪', "workspace"),
        Category::Weights
        | Category::ComputeCopies
        | Category::Gradients
        | Category::Optimizer
        | Category::Batch
        | Category::Cache
        | Category::Other => ('█', "weights, gradients, states"),
    }
}

fn mark(phase: Phase) -> char {
    match phase {
        Phase::Forward => '›',
        Phase::Recompute => '»',
        Phase::Backward => '‹',
        Phase::Exchange => '=',
        Phase::Update => '+',
    }
}

/// Signs and what they mean, in as many lines as they take; one that is wider than a line is left
/// out.
fn keys(keys: &[(char, &str)], width: usize) -> String {
    let room = width - SCALE;
    let mut lines: Vec<String> = Vec::new();
    for (sign, meaning) in keys {
        let key = format!("{sign} {meaning}");
        let needed = key.chars().count();
        match lines.last_mut() {
            _ if needed > room => {}
            Some(line) if line.chars().count() + 2 + needed <= room => *line += &format!("  {key}"),
            _ => lines.push(key),
        }
    }
    let lines = lines.into_iter().map(|line| " ".repeat(SCALE) + &line);
    lines.collect::<Vec<_>>().join("\n")
}
