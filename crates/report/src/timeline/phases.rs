//! Below the areas: which phase and which block runs when.

use std::collections::BTreeMap;

use cinch_graph::Phase;

use super::Chart;
use crate::columns::runs;
use crate::frame::{self, PLOT, SMALL, bytes};
use crate::label::spread;
use crate::palette::Ink;
use crate::scene::{Mark, Place, Rectangle, Scene, Style};

/// In the order in which they are named.
pub(crate) const PHASES: [Phase; 5] = [
    Phase::Forward,
    Phase::Recompute,
    Phase::Backward,
    Phase::Exchange,
    Phase::Update,
];

/// What a part of the strip stands for.
type StripKey = (Phase, Option<usize>);

pub(crate) fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Recompute => "recompute",
        Phase::Backward => "backward",
        Phase::Exchange => "exchange",
        Phase::Update => "update",
    }
}

impl Chart<'_> {
    /// Which phase and block runs, as a strip below the axis.
    pub(super) fn strip(&self, scene: &mut Scene) {
        let moments = &self.picture.moments;
        let keys = self.columns.longest.iter().map(|&index| {
            let moment = &moments[index];
            (moment.phase, moment.block)
        });
        let runs = runs(keys);
        for &(start, end, (phase, block)) in &runs {
            let most = self.columns.highest[start..end].iter();
            let most = most.map(|&index| moments[index].total()).max().unwrap_or(0);
            let most = bytes(most.saturating_add(self.picture.overhead_bytes));
            let name = phase_name(phase);
            let hover = match block {
                Some(block) => format!("{name} of block {block}, up to {most}"),
                None => format!("{name}, up to {most}"),
            };
            // Blocks that follow each other are told apart by shade.
            let odd = block.is_some_and(|block| block % 2 == 1);
            scene.marks.push(Mark::Rectangle(Rectangle {
                place: strip_place(start, end),
                radius: 0.0,
                fill: Ink::Phase(phase),
                opacity: if odd { 0.65 } else { 1.0 },
                hover: Some(hover),
            }));
        }
        for phase in PHASES {
            block_numbers(scene, phase, &runs);
        }
    }

    /// The phases' names below the strip, each under the middle of its part.
    pub(super) fn phases(&self, scene: &mut Scene) {
        const SWATCH: f64 = 9.0;
        const BASELINE: f64 = PLOT.top + PLOT.height + 61.0;
        let moments = &self.picture.moments;
        let mut labels: Vec<(f64, f64, Phase)> = Vec::new();
        for phase in PHASES {
            // Weighted by length; a phase of no length is under its first moment.
            let of_phase = || {
                let spans = moments.iter().zip(&self.spans);
                spans.filter(|(m, _)| m.phase == phase).map(|(_, s)| *s)
            };
            let Some(first) = of_phase().next() else {
                continue;
            };
            let length: f64 = of_phase().map(|(start, end)| end - start).sum();
            let moment: f64 = of_phase().map(|(a, b)| (b - a) * f64::midpoint(a, b)).sum();
            let center = if length > 0.0 {
                moment / length
            } else {
                first.0
            };
            let width = SWATCH + 5.0 + SMALL.room(phase_name(phase));
            labels.push((PLOT.left + center * PLOT.width, width, phase));
        }
        labels.sort_by(|a, b| a.0.total_cmp(&b.0));
        let wanted: Vec<(f64, f64)> = labels.iter().map(|l| (l.0, l.1)).collect();
        let centers = spread(&wanted, (PLOT.left, PLOT.right()), 16.0);
        for ((_, width, phase), center) in labels.into_iter().zip(centers) {
            let left = center - width / 2.0;
            let swatch = Place {
                left,
                top: BASELINE - SWATCH,
                width: SWATCH,
                height: SWATCH,
            };
            scene.rectangle(swatch, 2.0, Ink::Phase(phase));
            let at = (left + SWATCH + 5.0, BASELINE);
            scene.text(at, SMALL, phase_name(phase));
        }
    }
}

/// A part of the strip, with a gap to the next if it can spare one.
fn strip_place(start: usize, end: usize) -> Place {
    const LEAST: f64 = 5.0;
    let width = (end - start) as f64;
    let gap = if width >= LEAST { 1.0 } else { 0.0 };
    Place {
        left: PLOT.left + start as f64,
        top: PLOT.bottom() + 28.0,
        width: width - gap,
        height: 14.0,
    }
}

/// Numbers the blocks of a phase, each once, on its widest part; all of them or none.
fn block_numbers(scene: &mut Scene, phase: Phase, runs: &[(usize, usize, StripKey)]) {
    const NUMBER: Style = Style::new(9.5, Ink::Text);
    let mut widest: BTreeMap<usize, Place> = BTreeMap::new();
    for &(start, end, (of, block)) in runs {
        if let Some(block) = block.filter(|_| of == phase) {
            let place = strip_place(start, end);
            let entry = widest.entry(block).or_insert(place);
            if place.width > entry.width {
                *entry = place;
            }
        }
    }
    let fits =
        |(block, place): (&usize, &Place)| NUMBER.room(&block.to_string()) + 2.0 <= place.width;
    if widest.iter().all(fits) {
        for (block, place) in widest {
            frame::centered(scene, place, NUMBER, block.to_string());
        }
    }
}
