//! The memory of one training step as stacked areas: what is alive while each node runs, by what
//! it is for, with the budget, the peak, and what is largest there.

mod figures;
mod phases;

use cinch_plan::Category;

use crate::axis::{byte_ticks, decimal_ticks, duration, short};
use crate::columns::{Columns, columns, runs};
use crate::frame::{self, CHIP, Level, PLOT, SIZE, SMALL, bytes, chip, chip_width};
use crate::label::{Room, elide, shorten};
use crate::palette::Ink;
use crate::scene::{Area, Circle, Line, Mark, Place, Point, Scene, Style};
use crate::step::{Moment, StepPicture};
use figures::{describe, headline, largest, legend};
pub(crate) use phases::{PHASES, phase_name};

/// Draws the memory timeline of a step.
pub fn timeline(picture: &StepPicture) -> Scene {
    let mut scene = Scene::new(SIZE, &picture.title);
    scene.description = describe(picture);
    frame::header(
        &mut scene,
        &picture.title,
        &picture.subtitle,
        &headline(picture),
    );
    let chart = Chart::new(picture);
    let ticks = byte_ticks(chart.top, 7);
    frame::rows(&mut scene, &PLOT, &ticks, |value| chart.y(value));
    chart.areas(&mut scene);
    chart.excess(&mut scene);
    chart.time_axis(&mut scene);
    chart.strip(&mut scene);
    chart.phases(&mut scene);
    let mut room = Room::new(PLOT);
    for place in frame::levels(&mut scene, &levels(picture), chart.top, |v| chart.y(v)) {
        room.take(place);
    }
    chart.peak(&mut scene, &mut room);
    let end = legend(&mut scene, picture);
    largest(&mut scene, picture, end);
    scene
}

/// The moments of a step, placed.
struct Chart<'a> {
    picture: &'a StepPicture,
    columns: Columns,
    /// Of the moments, from 0 to 1.
    spans: Vec<(f64, f64)>,
    /// Bytes at the upper end of the axis.
    top: f64,
}

/// Layers of the stack, from the bottom: the overhead, then the categories.
#[derive(Clone, Copy)]
enum Layer {
    Overhead,
    Category(Category),
}

impl Layer {
    fn all(picture: &StepPicture) -> Vec<Self> {
        let overhead = (picture.overhead_bytes > 0).then_some(Self::Overhead);
        let categories = picture.stack().into_iter().map(Self::Category);
        overhead.into_iter().chain(categories).collect()
    }

    fn name(self, picture: &StepPicture) -> &'static str {
        match self {
            Self::Overhead => picture.words.outside,
            Self::Category(category) => category.name(),
        }
    }

    fn ink(self) -> Ink {
        match self {
            Self::Overhead => Ink::Overhead,
            Self::Category(category) => Ink::Category(category),
        }
    }

    fn bytes(self, picture: &StepPicture, moment: &Moment) -> u64 {
        match self {
            Self::Overhead => picture.overhead_bytes,
            Self::Category(category) => moment.bytes[category.index()],
        }
    }
}

impl<'a> Chart<'a> {
    fn new(picture: &'a StepPicture) -> Self {
        let spans = picture.spans();
        let totals: Vec<u64> = picture.moments.iter().map(Moment::total).collect();
        Self {
            picture,
            columns: columns(&spans, &totals, PLOT.width as usize),
            spans,
            top: top(picture),
        }
    }

    fn y(&self, bytes: f64) -> f64 {
        PLOT.bottom() - bytes / self.top * PLOT.height
    }

    fn moments(&self) -> impl Iterator<Item = &'a Moment> {
        let moments = &self.picture.moments;
        self.columns.highest.iter().map(|&index| &moments[index])
    }

    /// The stack is painted from the top down, each layer from its upper edge to the axis, the
    /// next one over it: no seams between neighbours, and one edge to store instead of two.
    fn areas(&self, scene: &mut Scene) {
        let mut layers = Layer::all(self.picture);
        let peak = self.picture.peak().map(|i| &self.picture.moments[i]);
        while let Some(&layer) = layers.last() {
            let below = |moment: &Moment| {
                let bytes = layers.iter().map(|l| l.bytes(self.picture, moment) as f64);
                bytes.sum::<f64>()
            };
            let edge = self.moments().map(|m| self.y(below(m)));
            let points = self.steps(0, PLOT.bottom(), edge);
            let at_peak = peak.map_or(0, |moment| layer.bytes(self.picture, moment));
            scene.marks.push(Mark::Area(Area {
                points,
                fill: layer.ink(),
                opacity: 1.0,
                hover: Some(format!(
                    "{}: {} at the peak",
                    layer.name(self.picture),
                    bytes(at_peak)
                )),
            }));
            layers.pop();
        }
    }

    /// What lies above the budget: it cannot be had, so it is pale, within a line.
    fn excess(&self, scene: &mut Scene) {
        let Some(budget) = self.picture.budget_bytes else {
            return;
        };
        let overhead = self.picture.overhead_bytes;
        let total = |moment: &Moment| moment.total().saturating_add(overhead);
        let floor = self.y(budget as f64);
        for (start, end, over) in runs(self.moments().map(|m| total(m) > budget)) {
            if !over {
                continue;
            }
            let heights = self.moments().map(|m| self.y(total(m) as f64));
            let heights = heights.skip(start).take(end - start);
            let points = self.steps(start, floor, heights);
            scene.marks.push(Mark::Area(Area {
                points: points.clone(),
                fill: Ink::Paper,
                opacity: 0.45,
                hover: Some("above the budget".to_owned()),
            }));
            scene.marks.push(Mark::Line(Line {
                points,
                ink: Ink::Budget,
                width: 1.5,
                dash: None,
            }));
        }
    }

    /// An outline over columns of these heights, from `first` on, that begins and ends on a
    /// floor.
    fn steps(&self, first: usize, floor: f64, heights: impl Iterator<Item = f64>) -> Vec<Point> {
        let left = PLOT.left + first as f64;
        let mut points = vec![(left, floor)];
        for (start, end, y) in runs(heights) {
            points.push((left + start as f64, y));
            points.push((left + end as f64, y));
        }
        let right = points.last().map_or(left, |point| point.0);
        points.push((right, floor));
        points
    }

    fn time_axis(&self, scene: &mut Scene) {
        const MOST: usize = 8;
        let (end, ticks) = match self.picture.total_seconds() {
            Some(total) => (
                total,
                decimal_ticks((0.0, total), MOST, |s| duration(s, total)),
            ),
            None => {
                let nodes = self.picture.moments.len() as f64;
                let mut ticks = decimal_ticks((0.0, nodes), MOST, short);
                ticks.retain(|tick| tick.value.fract() == 0.0);
                (nodes.max(1.0), ticks)
            }
        };
        let x = |value| PLOT.left + value / end * PLOT.width;
        frame::marks(scene, &PLOT, &ticks, x);
        let caption = shorten(&self.caption(), SMALL, PLOT.width);
        scene.text((PLOT.left, 608.0), SMALL, caption);
    }

    fn caption(&self) -> String {
        if let Some(caption) = &self.picture.words.axis {
            return caption.clone();
        }
        let mut caption = match self.picture.total_seconds() {
            Some(_) => "predicted time".to_owned(),
            None => match self.picture.moments.len() {
                0 => return "a graph without nodes".to_owned(),
                1 => "one node".to_owned(),
                nodes => format!("{nodes} nodes in the order in which they run"),
            },
        };
        if self.picture.micro_batches > 1 {
            let times = self.picture.micro_batches;
            caption += &format!("; forward and backward run {times} times, then the update");
        }
        caption
    }

    /// A dot on the highest point, and what runs there.
    fn peak(&self, scene: &mut Scene, room: &mut Room) {
        const STYLE: Style = Style::new(12.5, Ink::Text).bold();
        const RADIUS: f64 = 5.0;
        /// The longest label.
        const WIDEST: f64 = 300.0;
        let Some(peak) = self.picture.peak() else {
            return;
        };
        let center = peak_point(self, peak);
        let moment = &self.picture.moments[peak];
        let total = self.picture.peak_bytes();
        let figure = format!("peak {}", bytes(total));
        scene.marks.push(Mark::Circle(Circle {
            center,
            radius: RADIUS,
            fill: Ink::Peak,
            ring: Some(Ink::Paper),
            hover: Some(format!("{figure} at {}", moment.name)),
        }));
        let side = 2.0 * RADIUS + 4.0;
        room.take(Place {
            left: center.0 - side / 2.0,
            top: center.1 - side / 2.0,
            width: side,
            height: side,
        });
        let left = WIDEST - STYLE.room(&figure) - STYLE.room(" · ");
        // After a comma comes the line of the code, which the figure has no room for.
        let name = moment.name.split(", ").next().unwrap_or_default();
        let text = match elide(name, STYLE, left) {
            name if name.is_empty() => figure,
            name => format!("{figure} · {name}"),
        };
        let size = (chip_width(STYLE, &text), CHIP);
        if let Some(place) = room.near(center, size) {
            chip(scene, place, STYLE, text);
        }
    }
}

/// Where the peak is drawn: over the middle of its node, on the upper edge.
fn peak_point(chart: &Chart<'_>, peak: usize) -> Point {
    let (start, end) = chart.spans[peak];
    let x = PLOT.left + f64::midpoint(start, end) * PLOT.width;
    (x, chart.y(chart.picture.peak_bytes() as f64))
}

/// The upper end of the axis: above everything that is drawn. A budget far above the plan would
/// press the areas flat, and is only named.
fn top(picture: &StepPicture) -> f64 {
    const FAR: f64 = 2.0;
    const HEADROOM: f64 = 1.07;
    let planned = picture.planned_bytes() as f64;
    let levels = [picture.budget_bytes, picture.capacity_bytes];
    let levels = levels.into_iter().flatten().map(|bytes| bytes as f64);
    let near = levels.filter(|&bytes| bytes <= FAR * planned);
    HEADROOM * near.fold(planned, f64::max).max(1.0)
}

fn levels(picture: &StepPicture) -> Vec<Level> {
    let mut levels = Vec::new();
    let mut level = |name, bytes, ink, dash| {
        levels.push(Level {
            name,
            bytes,
            ink,
            dash,
        });
    };
    if let Some(bytes) = picture.capacity_bytes {
        level("card", bytes, Ink::Capacity, (1.0, 4.0));
    }
    if let Some(bytes) = picture.budget_bytes {
        level("budget", bytes, Ink::Budget, (7.0, 5.0));
    }
    levels
}
