//! A picture as a list of marks, drawn in order: what both back ends show.
//!
//! Coordinates are pixels at scale 1, x to the right and y down, as in SVG.

use crate::font;
use crate::palette::Ink;

pub type Point = (f64, f64);

/// A finished picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    pub width: u32,
    pub height: u32,
    /// What a screen reader says first.
    pub title: String,
    /// The picture in a sentence or two.
    pub description: String,
    pub marks: Vec<Mark>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Mark {
    Rectangle(Rectangle),
    Area(Area),
    Line(Line),
    Circle(Circle),
    Text(Text),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Rectangle {
    pub place: Place,
    /// Of the corners.
    pub radius: f64,
    pub fill: Ink,
    pub opacity: f64,
    /// What is said when the pointer rests on it.
    pub hover: Option<String>,
}

/// A closed polygon.
#[derive(Clone, Debug, PartialEq)]
pub struct Area {
    pub points: Vec<Point>,
    pub fill: Ink,
    pub opacity: f64,
    pub hover: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub points: Vec<Point>,
    pub ink: Ink,
    pub width: f64,
    /// Lengths of a dash and of the gap after it.
    pub dash: Option<(f64, f64)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Circle {
    pub center: Point,
    pub radius: f64,
    pub fill: Ink,
    /// A ring around it, which parts it from what lies beneath.
    pub ring: Option<Ink>,
    pub hover: Option<String>,
}

impl Circle {
    /// The width of a ring.
    pub(crate) const RING: f64 = 2.0;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    /// On the baseline, at the anchor.
    pub at: Point,
    pub anchor: Anchor,
    pub size: f64,
    pub bold: bool,
    pub ink: Ink,
    pub text: String,
}

impl Text {
    /// The room that the text needs in any usual font.
    pub fn place(&self) -> Place {
        let width = font::room(&self.text, self.size, self.bold);
        let left = match self.anchor {
            Anchor::Start => self.at.0,
            Anchor::Middle => self.at.0 - width / 2.0,
            Anchor::End => self.at.0 - width,
        };
        Place {
            left,
            top: self.at.1 - self.size * font::ASCENT,
            width,
            height: self.size * (font::ASCENT + font::DESCENT),
        }
    }
}

/// An upright rectangle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
}

impl Place {
    pub fn right(&self) -> f64 {
        self.left + self.width
    }

    pub fn bottom(&self) -> f64 {
        self.top + self.height
    }

    pub fn overlaps(&self, other: &Self) -> bool {
        self.left < other.right()
            && other.left < self.right()
            && self.top < other.bottom()
            && other.top < self.bottom()
    }

    pub fn contains(&self, other: &Self) -> bool {
        self.left <= other.left
            && self.top <= other.top
            && other.right() <= self.right()
            && other.bottom() <= self.bottom()
    }
}

impl Scene {
    pub(crate) fn new(size: (u32, u32), title: &str) -> Self {
        let mut scene = Self {
            width: size.0,
            height: size.1,
            title: title.to_owned(),
            description: String::new(),
            marks: Vec::new(),
        };
        scene.rectangle(scene.place(), 0.0, Ink::Paper);
        scene
    }

    pub fn place(&self) -> Place {
        Place {
            left: 0.0,
            top: 0.0,
            width: f64::from(self.width),
            height: f64::from(self.height),
        }
    }

    pub(crate) fn rectangle(&mut self, place: Place, radius: f64, fill: Ink) {
        self.marks.push(Mark::Rectangle(Rectangle {
            place,
            radius,
            fill,
            opacity: 1.0,
            hover: None,
        }));
    }

    pub(crate) fn line(&mut self, from: Point, to: Point, ink: Ink, width: f64) {
        self.marks.push(Mark::Line(Line {
            points: vec![from, to],
            ink,
            width,
            dash: None,
        }));
    }

    pub(crate) fn dashed(&mut self, from: Point, to: Point, ink: Ink, dash: (f64, f64)) {
        self.marks.push(Mark::Line(Line {
            points: vec![from, to],
            ink,
            width: 1.5,
            dash: Some(dash),
        }));
    }

    pub(crate) fn text(&mut self, at: Point, style: Style, text: impl Into<String>) {
        // A line break or a tab in a name is shown as a gap.
        let text = text.into().replace(char::is_control, " ");
        if !text.is_empty() {
            self.marks.push(Mark::Text(style.text(at, text)));
        }
    }
}

/// How a piece of text looks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub anchor: Anchor,
    pub size: f64,
    pub bold: bool,
    pub ink: Ink,
}

impl Style {
    pub const fn new(size: f64, ink: Ink) -> Self {
        Self {
            anchor: Anchor::Start,
            size,
            bold: false,
            ink,
        }
    }

    pub const fn bold(self) -> Self {
        Self { bold: true, ..self }
    }

    pub const fn anchored(self, anchor: Anchor) -> Self {
        Self { anchor, ..self }
    }

    pub const fn inked(self, ink: Ink) -> Self {
        Self { ink, ..self }
    }

    pub fn room(&self, text: &str) -> f64 {
        font::room(text, self.size, self.bold)
    }

    pub fn text(&self, at: Point, text: String) -> Text {
        Text {
            at,
            anchor: self.anchor,
            size: self.size,
            bold: self.bold,
            ink: self.ink,
            text,
        }
    }
}
