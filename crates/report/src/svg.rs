//! A scene as SVG: small, readable, with both themes in its style sheet.
//!
//! Colours are classes, so that `prefers-color-scheme` can change them; a viewer that does not
//! know media queries shows the light ones. Text stays text, in the reader's sans-serif font.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::palette::{Ink, Theme};
use crate::scene::{Anchor, Area, Circle, Line, Mark, Point, Rectangle, Scene, Text};

impl Scene {
    /// The picture as an SVG document.
    pub fn to_svg(&self) -> String {
        let (width, height) = (self.width, self.height);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"title desc\">\n"
        );
        let title = escape(&self.title);
        let description = escape(&self.description);
        // Writing to a string cannot fail.
        let _ = writeln!(svg, "<title id=\"title\">{title}</title>");
        let _ = writeln!(svg, "<desc id=\"desc\">{description}</desc>");
        svg.push_str(&self.style());
        for mark in &self.marks {
            svg.push_str(&element(mark));
            svg.push('\n');
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Rules for the inks that are used, and for text.
    fn style(&self) -> String {
        let mut fills = BTreeSet::new();
        let mut strokes = BTreeSet::new();
        for mark in &self.marks {
            match mark {
                Mark::Rectangle(Rectangle { fill, .. }) | Mark::Area(Area { fill, .. }) => {
                    fills.insert(*fill);
                }
                Mark::Text(text) => {
                    fills.insert(text.ink);
                }
                Mark::Line(line) => {
                    strokes.insert(line.ink);
                }
                Mark::Circle(circle) => {
                    fills.insert(circle.fill);
                    strokes.extend(circle.ring);
                }
            }
        }
        let rules = |theme| {
            let fills = fills.iter().map(|ink| rule("f", "fill", *ink, theme));
            let strokes = strokes.iter().map(|ink| rule("s", "stroke", *ink, theme));
            fills.chain(strokes).collect::<String>()
        };
        format!(
            "<style>text{{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,\
             sans-serif;font-variant-numeric:tabular-nums}}.b{{font-weight:600}}\
             .l{{fill:none;stroke-linecap:round;stroke-linejoin:round}}\n{}\n\
             @media(prefers-color-scheme:dark){{{}}}</style>\n",
            rules(Theme::Light),
            rules(Theme::Dark)
        )
    }
}

fn rule(prefix: &str, property: &str, ink: Ink, theme: Theme) -> String {
    let class = ink.class();
    let [red, green, blue] = ink.color(theme);
    format!(".{prefix}-{class}{{{property}:#{red:02x}{green:02x}{blue:02x}}}")
}

fn element(mark: &Mark) -> String {
    match mark {
        Mark::Rectangle(rectangle) => {
            let place = rectangle.place;
            let radius = match rectangle.radius {
                0.0 => String::new(),
                radius => format!(" rx=\"{}\"", number(radius)),
            };
            let attributes = format!(
                "x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"{radius} class=\"f-{}\"{}",
                number(place.left),
                number(place.top),
                number(place.width),
                number(place.height),
                rectangle.fill.class(),
                opacity(rectangle.opacity),
            );
            hovering("rect", &attributes, rectangle.hover.as_deref())
        }
        Mark::Area(area) => {
            let attributes = format!(
                "d=\"{}Z\" class=\"f-{}\"{}",
                path(&area.points),
                area.fill.class(),
                opacity(area.opacity)
            );
            hovering("path", &attributes, area.hover.as_deref())
        }
        Mark::Line(line) => line_element(line),
        Mark::Circle(circle) => circle_element(circle),
        Mark::Text(text) => text_element(text),
    }
}

fn line_element(line: &Line) -> String {
    let dash = line.dash.map_or(String::new(), |(dash, gap)| {
        format!(" stroke-dasharray=\"{} {}\"", number(dash), number(gap))
    });
    let attributes = format!(
        "d=\"{}\" class=\"l s-{}\" stroke-width=\"{}\"{dash}",
        path(&line.points),
        line.ink.class(),
        number(line.width)
    );
    hovering("path", &attributes, None)
}

fn circle_element(circle: &Circle) -> String {
    let ring = circle.ring.map_or(String::new(), |ink| {
        format!(
            " s-{}\" stroke-width=\"{}",
            ink.class(),
            number(Circle::RING)
        )
    });
    let attributes = format!(
        "cx=\"{}\" cy=\"{}\" r=\"{}\" class=\"f-{}{ring}\"",
        number(circle.center.0),
        number(circle.center.1),
        number(circle.radius),
        circle.fill.class(),
    );
    hovering("circle", &attributes, circle.hover.as_deref())
}

fn text_element(text: &Text) -> String {
    let anchor = match text.anchor {
        Anchor::Start => "",
        Anchor::Middle => " text-anchor=\"middle\"",
        Anchor::End => " text-anchor=\"end\"",
    };
    let bold = if text.bold { "b " } else { "" };
    format!(
        "<text x=\"{}\" y=\"{}\" font-size=\"{}\"{anchor} class=\"{bold}f-{}\">{}</text>",
        number(text.at.0),
        number(text.at.1),
        number(text.size),
        text.ink.class(),
        escape(&text.text)
    )
}

fn hovering(name: &str, attributes: &str, hover: Option<&str>) -> String {
    match hover {
        None => format!("<{name} {attributes}/>"),
        Some(hover) => format!(
            "<{name} {attributes}><title>{}</title></{name}>",
            escape(hover)
        ),
    }
}

fn opacity(opacity: f64) -> String {
    match opacity {
        1.0 => String::new(),
        opacity => format!(" fill-opacity=\"{}\"", number(opacity)),
    }
}

/// A path through the points. Steps are relative and in tenths of a pixel, which is what keeps a
/// timeline of a thousand steps small; each is the difference of two rounded places, so that
/// rounding does not add up.
fn path(points: &[Point]) -> String {
    let tenths = |value: f64| (value * 10.0).round() as i64;
    let tenth = |value: i64| number(value as f64 / 10.0);
    let mut path = String::new();
    let mut pen = None;
    for &(x, y) in points {
        let (x, y) = (tenths(x), tenths(y));
        let Some((from_x, from_y)) = pen.replace((x, y)) else {
            path = format!("M{} {}", tenth(x), tenth(y));
            continue;
        };
        let _ = match (x - from_x, y - from_y) {
            (0, 0) => Ok(()),
            (dx, 0) => write!(path, "h{}", tenth(dx)),
            (0, dy) => write!(path, "v{}", tenth(dy)),
            (dx, dy) => write!(path, "l{} {}", tenth(dx), tenth(dy)),
        };
    }
    path
}

/// At most two decimals, and none that say nothing.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    match text {
        "-0" | "" => "0".to_owned(),
        text => text.to_owned(),
    }
}

/// Text as XML has it. Characters that no XML document may hold become the one that says so.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\n' | '\t' => escaped.push(' '),
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            character => escaped.push(character),
        }
    }
    escaped
}
