//! Beside the points: the front in figures.

use super::{Chart, FrontPoint, Standing};
use crate::frame::{BODY, MUTED, SIDE, SMALL, bytes, entry, heading};
use crate::label::shorten;
use crate::palette::Ink;
use crate::scene::{Circle, Mark, Scene};

impl Chart<'_> {
    /// The front in figures, in the order of memory.
    pub(super) fn list(&self, scene: &mut Scene) {
        const ROW: f64 = 41.0;
        /// Of a row, what its name takes.
        const LABEL: f64 = 16.0;
        const DOT: f64 = 4.0;
        const INDENT: f64 = 17.0;
        let mut y = SIDE.top + 10.0;
        heading(scene, y, "memory and speed");
        let rows: Vec<_> = self.on_front().collect();
        let most = ((SIDE.bottom() - y) / ROW) as usize;
        let shown = choose(&rows, most);
        let hidden = rows.len() - shown.len();
        y += 25.0;
        for (point, standing) in shown {
            let (fill, style) = match standing {
                Standing::Recommended => (Ink::Recommended, BODY.bold()),
                Standing::OnFront => (Ink::Front, BODY),
                Standing::Beaten | Standing::OverBudget => (Ink::Beaten, MUTED),
            };
            scene.marks.push(Mark::Circle(Circle {
                center: (SIDE.left + DOT, y - DOT),
                radius: DOT,
                fill,
                ring: None,
                hover: None,
            }));
            // Where there is no name, the figures are all.
            if !point.label.is_empty() {
                let label = shorten(&point.label, style, SIDE.width - INDENT);
                scene.text((SIDE.left + INDENT, y), style, label);
                y += LABEL;
            }
            let at = (SIDE.left + INDENT, y);
            let rate = self.rate(point.rate);
            entry(scene, at, &bytes(point.bytes), &rate, SMALL);
            y += ROW - LABEL;
        }
        if hidden > 0 {
            let text = format!("and {hidden} more");
            scene.text((SIDE.left + INDENT, y), SMALL, text);
        }
    }
}

/// As many as there is room for; the recommended one is always among them. One row is kept for
/// the number of the others.
fn choose<'a>(rows: &[(&'a FrontPoint, Standing)], most: usize) -> Vec<(&'a FrontPoint, Standing)> {
    if rows.len() <= most {
        return rows.to_vec();
    }
    let most = most.saturating_sub(1).max(1);
    let recommended = rows.iter().position(|row| row.1 == Standing::Recommended);
    // Spread over the front, both ends included.
    let spread = |row: usize| row * (rows.len() - 1) / (most - 1).max(1);
    let mut chosen: Vec<usize> = (0..most).map(spread).collect();
    if let Some(recommended) = recommended.filter(|row| !chosen.contains(row)) {
        let nearest = (0..most).min_by_key(|&row| chosen[row].abs_diff(recommended));
        chosen[nearest.unwrap_or(0)] = recommended;
    }
    chosen.into_iter().map(|row| rows[row]).collect()
}
