//! Memory against speed: what is possible on a card, what the budget allows, and what is
//! recommended.
//!
//! A point is on the front if no other is at least as fast with less memory. Between two points
//! of it the faster one does not fit yet, so the front is a staircase.

mod list;

use crate::axis::{byte_ticks, decimal_ticks, short};
use crate::frame::{self, CHIP, Headline, SIZE, SMALL, bytes, centered, chip, chip_width};
use crate::label::{Room, shorten, spread};
use crate::palette::Ink;
use crate::scene::{Anchor, Area, Circle, Line, Mark, Place, Point, Rectangle, Scene, Style};

const PLOT: Place = Place {
    height: 474.0,
    ..frame::PLOT
};

/// Choices of settings, each with its memory and its speed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FrontPicture {
    pub title: String,
    pub subtitle: String,
    /// Of the speed: `tokens/s`.
    pub unit: String,
    pub budget_bytes: Option<u64>,
    pub capacity_bytes: Option<u64>,
    pub points: Vec<FrontPoint>,
}

/// One choice of settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FrontPoint {
    /// `balanced`, `micro batch 4, 3 blocks recomputed`; a point may have none.
    pub label: String,
    pub bytes: u64,
    /// In the picture's unit; a point without a number, or with one below zero, is not drawn.
    pub rate: f64,
    pub recommended: bool,
}

/// Draws memory against speed.
pub fn front(picture: &FrontPicture) -> Scene {
    let mut scene = Scene::new(SIZE, &picture.title);
    let chart = Chart::new(picture);
    scene.description = chart.describe();
    let (title, subtitle) = (&picture.title, &picture.subtitle);
    frame::header(&mut scene, title, subtitle, &chart.headline());
    let mut room = Room::new(PLOT);
    chart.axes(&mut scene, &mut room);
    chart.staircase(&mut scene, &mut room);
    chart.limits(&mut scene, &mut room);
    chart.points(&mut scene, &mut room);
    chart.list(&mut scene);
    scene
}

/// What a point is, in the order in which they are drawn: the important ones last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Beaten,
    OverBudget,
    OnFront,
    Recommended,
}

struct Chart<'a> {
    picture: &'a FrontPicture,
    /// In the order of memory, the faster first among equals.
    points: Vec<(&'a FrontPoint, Standing)>,
    right: f64,
    bottom: f64,
    top: f64,
}

impl<'a> Chart<'a> {
    fn new(picture: &'a FrontPicture) -> Self {
        // Below half of the largest number, so that the axis has room above.
        let valid = |p: &&FrontPoint| (0.0..f64::MAX / 2.0).contains(&p.rate);
        let mut points: Vec<&FrontPoint> = picture.points.iter().filter(valid).collect();
        points.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(b.rate.total_cmp(&a.rate)));
        let mut fastest = f64::NEG_INFINITY;
        let standing = |point: &'a FrontPoint| {
            let beats = point.rate > fastest;
            fastest = fastest.max(point.rate);
            let standing = match (point.recommended, beats) {
                (true, _) => Standing::Recommended,
                (false, false) => Standing::Beaten,
                (false, true) if !picture.allows(point) => Standing::OverBudget,
                (false, true) => Standing::OnFront,
            };
            (point, standing)
        };
        let points: Vec<_> = points.into_iter().map(standing).collect();
        let (bottom, top) = speeds(points.iter().map(|(point, _)| point.rate));
        Self {
            right: reach(picture, points.last().map_or(0, |(point, _)| point.bytes)),
            picture,
            points,
            bottom,
            top,
        }
    }

    fn x(&self, bytes: f64) -> f64 {
        PLOT.left + bytes / self.right * PLOT.width
    }

    fn y(&self, rate: f64) -> f64 {
        PLOT.bottom() - (rate - self.bottom) / (self.top - self.bottom) * PLOT.height
    }

    fn at(&self, point: &FrontPoint) -> Point {
        (self.x(point.bytes as f64), self.y(point.rate))
    }

    fn recommended(&self) -> Option<&'a FrontPoint> {
        let mut points = self.points.iter();
        points.find(|(point, _)| point.recommended).map(|p| p.0)
    }

    /// The points that nothing beats.
    fn on_front(&self) -> impl Iterator<Item = (&'a FrontPoint, Standing)> {
        let mut fastest = f64::NEG_INFINITY;
        self.points.iter().copied().filter(move |(point, _)| {
            let beats = point.rate > fastest;
            fastest = fastest.max(point.rate);
            beats
        })
    }

    /// A speed as tables have it, with two decimals and a prefix.
    fn rate(&self, rate: f64) -> String {
        const PREFIXES: [(f64, &str); 3] = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
        let prefix = PREFIXES.iter().find(|(least, _)| rate >= *least);
        let figure = match prefix {
            Some((unit, prefix)) => format!("{:.2} {prefix} ", rate / unit),
            None => format!("{rate:.0} "),
        };
        format!("{figure}{}", self.picture.unit)
    }

    fn headline(&self) -> Headline {
        let Some(point) = self.recommended() else {
            return Headline {
                figure: String::new(),
                meaning: "nothing is recommended".to_owned(),
                ink: Ink::Muted,
            };
        };
        Headline {
            figure: self.rate(point.rate),
            meaning: format!("in {}", self.picture.memory(point)),
            ink: Ink::Recommended,
        }
    }

    fn describe(&self) -> String {
        let choices = self.points.len();
        let mut text = format!("Memory against speed of {choices} choices of settings.");
        if let Some(point) = self.recommended() {
            let (rate, memory) = (self.rate(point.rate), self.picture.memory(point));
            text += &format!(" Recommended: {}, {rate} in {memory}.", point.label);
        }
        text
    }

    fn axes(&self, scene: &mut Scene, room: &mut Room) {
        let rates = decimal_ticks((self.bottom, self.top), 7, short);
        frame::rows(scene, &PLOT, &rates, |value| self.y(value));
        frame::marks(scene, &PLOT, &byte_ticks(self.right, 8), |value| {
            self.x(value)
        });
        let end = SMALL.anchored(Anchor::End);
        scene.text((PLOT.right(), PLOT.bottom() + 40.0), end, "memory");
        let unit = shorten(&self.picture.unit, SMALL, PLOT.width / 4.0);
        let place = Place {
            left: PLOT.left,
            top: PLOT.top,
            width: chip_width(SMALL, &unit),
            height: CHIP,
        };
        chip(scene, place, SMALL, unit);
        room.take(place);
    }

    /// The best speed at each size of memory.
    fn staircase(&self, scene: &mut Scene, room: &mut Room) {
        let mut steps: Vec<Point> = Vec::new();
        for (point, _) in self.on_front() {
            let (x, y) = self.at(point);
            if let Some(&(_, before)) = steps.last() {
                steps.push((x, before));
            }
            steps.push((x, y));
        }
        let (Some(&first), Some(&last)) = (steps.first(), steps.last()) else {
            return;
        };
        steps.push((PLOT.right(), last.1));
        for pair in steps.windows(2) {
            room.avoid(pair[0], pair[1]);
        }
        let mut under = steps.clone();
        under.extend([(PLOT.right(), PLOT.bottom()), (first.0, PLOT.bottom())]);
        scene.marks.push(Mark::Area(Area {
            points: under,
            fill: Ink::Front,
            opacity: 0.1,
            hover: Some("the best speed at each size of memory".to_owned()),
        }));
        scene.marks.push(Mark::Line(Line {
            points: steps,
            ink: Ink::Front,
            width: 2.0,
            dash: None,
        }));
    }

    /// Budget and card, as upright lines named at the top.
    fn limits(&self, scene: &mut Scene, room: &mut Room) {
        let budget = self.picture.budget_bytes;
        if let Some(budget) = budget.filter(|&bytes| bytes as f64 <= self.right) {
            let left = self.x(budget as f64);
            scene.marks.push(Mark::Rectangle(Rectangle {
                place: Place {
                    left,
                    width: PLOT.right() - left,
                    ..PLOT
                },
                radius: 0.0,
                fill: Ink::Budget,
                opacity: 0.06,
                hover: Some("more than the budget".to_owned()),
            }));
        }
        let capacity = self.picture.capacity_bytes;
        let limits = [
            budget.map(|bytes| ("budget", bytes, Ink::Budget, (7.0, 5.0))),
            capacity.map(|bytes| ("card", bytes, Ink::Capacity, (1.0, 4.0))),
        ];
        let mut limits: Vec<_> = limits.into_iter().flatten().collect();
        limits.sort_by_key(|limit| limit.1);
        let mut labels = Vec::new();
        for (name, limit, ink, dash) in limits {
            let inside = limit as f64 <= self.right;
            let x = self.x((limit as f64).min(self.right));
            if inside {
                let (from, to) = ((x, PLOT.top), (x, PLOT.bottom()));
                scene.dashed(from, to, ink, dash);
                room.avoid(from, to);
            }
            let arrow = if inside { "" } else { " →" };
            let text = format!("{name} {}{arrow}", bytes(limit));
            let style = Style::new(11.5, ink).bold();
            labels.push(((x, chip_width(style, &text)), style, text));
        }
        let wanted: Vec<(f64, f64)> = labels.iter().map(|label| label.0).collect();
        // Beside the name of the unit.
        let left = PLOT.left + PLOT.width / 4.0 + 16.0;
        let centers = spread(&wanted, (left, PLOT.right()), 4.0);
        for (((_, width), style, text), center) in labels.into_iter().zip(centers) {
            let place = Place {
                left: center - width / 2.0,
                top: PLOT.top,
                width,
                height: CHIP,
            };
            room.take(place);
            chip(scene, place, style, text);
        }
    }

    fn points(&self, scene: &mut Scene, room: &mut Room) {
        let mut points = self.points.clone();
        points.sort_by_key(|(_, standing)| *standing);
        for &(point, standing) in &points {
            let (radius, fill) = match standing {
                Standing::Beaten | Standing::OverBudget => (4.0, Ink::Beaten),
                Standing::OnFront => (5.0, Ink::Front),
                Standing::Recommended => (7.0, Ink::Recommended),
            };
            let center = self.at(point);
            let (rate, memory) = (self.rate(point.rate), self.picture.memory(point));
            scene.marks.push(Mark::Circle(Circle {
                center,
                radius,
                fill,
                ring: Some(Ink::Paper),
                hover: Some(format!("{}: {rate} in {memory}", point.label)),
            }));
            room.take(Place {
                left: center.0 - radius,
                top: center.1 - radius,
                width: 2.0 * radius,
                height: 2.0 * radius,
            });
        }
        // Who comes first gets the better place.
        for (point, standing) in points.into_iter().rev() {
            const WIDEST: f64 = 220.0;
            let style = match standing {
                Standing::Recommended => Style::new(12.5, Ink::Recommended).bold(),
                Standing::OnFront => SMALL.inked(Ink::Text),
                Standing::Beaten | Standing::OverBudget => SMALL,
            };
            let text = shorten(&point.label, style, WIDEST);
            if text.is_empty() {
                continue;
            }
            let size = (style.room(&text) + 2.0, CHIP - 3.0);
            if let Some(place) = room.beside(self.at(point), size) {
                match room.is_crossed(&place) {
                    true => chip(scene, place, style, text),
                    false => centered(scene, place, style, text),
                }
            }
        }
    }
}

impl FrontPicture {
    fn allows(&self, point: &FrontPoint) -> bool {
        self.budget_bytes.is_none_or(|budget| point.bytes <= budget)
    }

    /// A point's memory, and how it stands to the budget.
    fn memory(&self, point: &FrontPoint) -> String {
        let memory = bytes(point.bytes);
        match self.budget_bytes {
            Some(budget) if budget > 0 => {
                let share = 100.0 * point.bytes as f64 / budget as f64;
                format!("{memory}, {share:.0} % of the budget")
            }
            _ => memory,
        }
    }
}

/// The upper end of the memory axis. A limit far beyond all points is only named.
fn reach(picture: &FrontPicture, most: u64) -> f64 {
    const FAR: f64 = 2.0;
    const MARGIN: f64 = 1.06;
    let most = most as f64;
    let limits = [picture.budget_bytes, picture.capacity_bytes];
    let limits = limits.into_iter().flatten().map(|bytes| bytes as f64);
    let near = limits.filter(|&bytes| bytes <= FAR * most);
    MARGIN * near.fold(most, f64::max).max(1.0)
}

/// The ends of the speed axis. It does not begin at zero where all speeds are alike, because the
/// differences are what is looked for.
fn speeds(rates: impl Iterator<Item = f64>) -> (f64, f64) {
    /// Of the fastest: less is no difference to magnify.
    const LEAST: f64 = 0.2;
    const MARGIN: f64 = 0.25;
    let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
    for rate in rates {
        low = low.min(rate);
        high = high.max(rate);
    }
    if high <= 0.0 {
        return (0.0, 1.0);
    }
    let span = (high - low).max(LEAST * high);
    let low = (low - MARGIN * span).max(0.0);
    (low, high + MARGIN * span)
}
