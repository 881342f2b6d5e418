//! Beside the areas: the peak in figures, and the picture in words.

use super::Layer;
use super::phases::phase_name;
use crate::frame::{BODY, Headline, MUTED, SIDE, bytes, entry, heading};
use crate::palette::Ink;
use crate::scene::{Place, Scene};
use crate::step::StepPicture;

pub(super) fn headline(picture: &StepPicture) -> Headline {
    let planned = picture.planned_bytes();
    let figure = bytes(planned);
    let (meaning, ink) = match picture.budget_bytes {
        None => match picture.safe_bytes {
            None => (picture.words.meaning.to_owned(), Ink::Text),
            Some(safe) => (format!("safe figure {}", bytes(safe)), Ink::Text),
        },
        Some(budget) if planned > budget => {
            let over = bytes(planned - budget);
            (format!("{over} over the budget"), Ink::Budget)
        }
        Some(budget) => match picture.safe_bytes {
            None => {
                let share = percent(planned, budget);
                let meaning = format!("{share} of the budget of {}", bytes(budget));
                (meaning, Ink::Recommended)
            }
            Some(safe) => {
                let share = percent(safe, budget);
                let meaning = format!("safe {}, {share} of {}", bytes(safe), bytes(budget));
                let ink = match safe > budget {
                    true => Ink::Budget,
                    false => Ink::Recommended,
                };
                (meaning, ink)
            }
        },
    };
    Headline {
        figure,
        meaning,
        ink,
    }
}

fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "100 %".to_owned(),
        whole => format!("{:.1} %", 100.0 * part as f64 / whole as f64),
    }
}

/// The layers with their bytes at the peak, in the order in which they lie. Gives the place
/// below.
pub(super) fn legend(scene: &mut Scene, picture: &StepPicture) -> f64 {
    const ROW: f64 = 21.0;
    const SWATCH: f64 = 11.0;
    let mut y = SIDE.top + 10.0;
    heading(scene, y, "memory at the peak");
    y += 2.0;
    let peak = picture.peak().map(|index| &picture.moments[index]);
    for layer in Layer::all(picture).into_iter().rev() {
        y += ROW;
        let swatch = Place {
            left: SIDE.left,
            top: y - SWATCH + 1.0,
            width: SWATCH,
            height: SWATCH,
        };
        scene.rectangle(swatch, 2.5, layer.ink());
        let count = peak.map_or(0, |moment| layer.bytes(picture, moment));
        let at = (SIDE.left + SWATCH + 8.0, y);
        entry(scene, at, layer.name(picture), &bytes(count), BODY);
    }
    let unused = picture.planned_bytes() - picture.peak_bytes();
    if unused > 0 {
        y += ROW;
        let at = (SIDE.left + SWATCH + 8.0, y);
        entry(scene, at, picture.words.unused, &bytes(unused), MUTED);
    }
    y += 9.0;
    scene.line((SIDE.left, y), (SIDE.right(), y), Ink::Grid, 1.0);
    y += 18.0;
    let total = bytes(picture.planned_bytes());
    let name = picture.words.total;
    entry(scene, (SIDE.left, y), name, &total, BODY.bold());
    y
}

/// The largest tensors at the peak, as many as there is room for.
pub(super) fn largest(scene: &mut Scene, picture: &StepPicture, above: f64) {
    const ROW: f64 = 19.5;
    /// A longer list is for a table.
    const MOST: usize = 8;
    let kinds = picture.largest_kinds();
    if kinds.is_empty() {
        return;
    }
    let mut y = above + 36.0;
    heading(scene, y, "largest tensors at the peak");
    let rows = (((SIDE.bottom() - y) / ROW) as usize).min(MOST);
    // One row says what is left out.
    let shown = match kinds.len() <= rows {
        true => kinds.len(),
        false => rows.saturating_sub(1),
    };
    let (shown, rest) = kinds.split_at(shown);
    for held in shown {
        y += ROW;
        entry(scene, (SIDE.left, y), &held.name, &bytes(held.bytes), BODY);
    }
    if !rest.is_empty() {
        let sum = rest
            .iter()
            .fold(0, |sum: u64, h| sum.saturating_add(h.bytes));
        let at = (SIDE.left, y + ROW);
        entry(scene, at, "all others", &bytes(sum), MUTED);
    }
}

pub(super) fn describe(picture: &StepPicture) -> String {
    let planned = bytes(picture.planned_bytes());
    let mut text = format!("Memory over one training step. {planned} are allocated");
    if let Some(budget) = picture.budget_bytes {
        text += &format!(", the budget is {}", bytes(budget));
    }
    if let Some(index) = picture.peak() {
        let moment = &picture.moments[index];
        let peak = bytes(picture.peak_bytes());
        let phase = phase_name(moment.phase);
        text += &format!("; the peak is {peak}, in {phase}, at {}", moment.name);
    }
    text + "."
}
