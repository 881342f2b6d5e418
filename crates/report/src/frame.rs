//! What all pictures have around them: title, headline, grid, axes, reference lines and the
//! column at the side.

use cinch_config::Bytes;

use crate::axis::Tick;
use crate::label::{elide, shorten, spread};
use crate::palette::Ink;
use crate::scene::{Anchor, Mark, Place, Point, Rectangle, Scene, Style};

pub(crate) const SIZE: (u32, u32) = (1200, 640);

/// Where the curves of a timeline are; below it is room for the phases.
pub(crate) const PLOT: Place = Place {
    left: 84.0,
    top: 104.0,
    width: 816.0,
    height: 412.0,
};

/// The column of figures.
pub(crate) const SIDE: Place = Place {
    left: 932.0,
    top: 104.0,
    width: 240.0,
    height: 508.0,
};

pub(crate) const TITLE: Style = Style::new(21.0, Ink::Text).bold();
pub(crate) const BODY: Style = Style::new(12.5, Ink::Text);
pub(crate) const MUTED: Style = Style::new(12.5, Ink::Muted);
pub(crate) const SMALL: Style = Style::new(11.5, Ink::Muted);

/// Height of a label with its background.
pub(crate) const CHIP: f64 = 19.0;

pub(crate) fn bytes(count: u64) -> String {
    Bytes::new(count).to_string()
}

/// The figure that matters most, at the top right.
pub(crate) struct Headline {
    pub figure: String,
    pub meaning: String,
    pub ink: Ink,
}

pub(crate) fn header(scene: &mut Scene, title: &str, subtitle: &str, headline: &Headline) {
    const MARGIN: f64 = 32.0;
    let width = PLOT.right() - MARGIN;
    scene.text((MARGIN, 46.0), TITLE, shorten(title, TITLE, width));
    scene.text((MARGIN, 72.0), MUTED, shorten(subtitle, MUTED, width));
    let figure = TITLE.inked(headline.ink);
    let text = shorten(&headline.figure, figure, SIDE.width);
    scene.text((SIDE.left, 46.0), figure, text);
    let text = shorten(&headline.meaning, MUTED, SIDE.width);
    scene.text((SIDE.left, 72.0), MUTED, text);
}

/// Horizontal lines with their values to the left.
pub(crate) fn rows(scene: &mut Scene, plot: &Place, ticks: &[Tick], y: impl Fn(f64) -> f64) {
    let style = SMALL.anchored(Anchor::End);
    for tick in ticks {
        let y = y(tick.value);
        scene.line((plot.left, y), (plot.right(), y), Ink::Grid, 1.0);
        let label = shorten(&tick.label, SMALL, plot.left - 16.0);
        scene.text((plot.left - 10.0, y + 4.0), style, label);
    }
}

/// The lower edge of the plot, with short strokes and their values beneath.
pub(crate) fn marks(scene: &mut Scene, plot: &Place, ticks: &[Tick], x: impl Fn(f64) -> f64) {
    let style = SMALL.anchored(Anchor::Middle);
    let bottom = plot.bottom();
    scene.line((plot.left, bottom), (plot.right(), bottom), Ink::Muted, 1.0);
    for tick in ticks {
        let x = x(tick.value);
        scene.line((x, bottom), (x, bottom + 4.0), Ink::Muted, 1.0);
        scene.text((x, bottom + 18.0), style, tick.label.clone());
    }
}

/// A text on a piece of paper, so that it can be read over anything.
pub(crate) fn chip(scene: &mut Scene, place: Place, style: Style, text: String) {
    scene.marks.push(Mark::Rectangle(Rectangle {
        place,
        radius: 4.0,
        fill: Ink::Paper,
        opacity: 0.88,
        hover: None,
    }));
    centered(scene, place, style, text);
}

/// A text in the middle of a place.
pub(crate) fn centered(scene: &mut Scene, place: Place, style: Style, text: String) {
    /// From the middle of a line of text to its baseline, in ems.
    const DROP: f64 = 0.35;
    let x = place.left + place.width / 2.0;
    let y = place.top + place.height / 2.0 + style.size * DROP;
    scene.text((x, y), style.anchored(Anchor::Middle), text);
}

/// The width of a chip with this text.
pub(crate) fn chip_width(style: Style, text: &str) -> f64 {
    style.room(text) + 12.0
}

/// A height that means something: the budget, the card, what is allocated.
pub(crate) struct Level {
    pub name: &'static str,
    pub bytes: u64,
    pub ink: Ink,
    pub dash: (f64, f64),
}

/// Draws levels as lines through the plot, named at its right end, and gives the places of the
/// names. What lies above the plot is only named, with an arrow, over its corner.
pub(crate) fn levels(
    scene: &mut Scene,
    levels: &[Level],
    top: f64,
    y: impl Fn(f64) -> f64,
) -> Vec<Place> {
    let mut levels: Vec<&Level> = levels.iter().collect();
    levels.sort_by_key(|level| std::cmp::Reverse(level.bytes));
    let (inside, outside): (Vec<&Level>, Vec<&Level>) = levels
        .into_iter()
        .partition(|level| level.bytes as f64 <= top);
    let mut right = PLOT.right();
    for level in outside {
        let text = format!("↑ {} {}", level.name, bytes(level.bytes));
        let place = level.chip(scene, (right, PLOT.top - CHIP / 2.0 - 1.0), text);
        right = place.left - 4.0;
    }
    for level in &inside {
        let y = y(level.bytes as f64);
        scene.dashed((PLOT.left, y), (PLOT.right(), y), level.ink, level.dash);
    }
    // On their lines if they can be.
    let above = |level: &&Level| (y(level.bytes as f64) - CHIP / 2.0 - 1.0, CHIP);
    let wanted: Vec<(f64, f64)> = inside.iter().map(above).collect();
    let centers = spread(&wanted, (PLOT.top, PLOT.bottom()), 1.0);
    let named = inside.into_iter().zip(centers).map(|(level, center)| {
        let text = format!("{} {}", level.name, bytes(level.bytes));
        level.chip(scene, (PLOT.right(), center), text)
    });
    named.collect()
}

impl Level {
    /// Writes the level's name so that it ends at `right`.
    fn chip(&self, scene: &mut Scene, (right, center): Point, text: String) -> Place {
        let style = Style::new(11.5, self.ink).bold();
        let width = chip_width(style, &text);
        let place = Place {
            left: right - width,
            top: center - CHIP / 2.0,
            width,
            height: CHIP,
        };
        chip(scene, place, style, text);
        place
    }
}

/// A line of the side column: a name, cut if need be, and a figure at the right end.
pub(crate) fn entry(scene: &mut Scene, at: Point, name: &str, figure: &str, style: Style) {
    let (x, y) = at;
    let figure = shorten(figure, style, SIDE.right() - x);
    let width = SIDE.right() - x - style.room(&figure) - 10.0;
    scene.text((x, y), style, elide(name, style, width));
    let end = style.anchored(Anchor::End);
    scene.text((SIDE.right(), y), end, figure);
}

/// The line that opens a part of the side column.
pub(crate) fn heading(scene: &mut Scene, y: f64, text: &str) {
    const HEADING: Style = Style::new(12.5, Ink::Text).bold();
    let text = elide(text, HEADING, SIDE.width);
    scene.text((SIDE.left, y), HEADING, text);
}
