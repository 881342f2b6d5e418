//! A small font of strokes, so that a PNG needs no font from the system and no font file.
//!
//! Each glyph is one pen path on a grid: the baseline is 0, capitals are 14 high, small letters
//! 10, descenders reach −4. The pen has a round tip; bold is the same path with a wider pen.
//! The commands of a path, each a letter and its numbers:
//!
//! - `M x y` lifts the pen and moves it, `L x y` draws a line.
//! - `H x y` draws a quarter of an ellipse that leaves horizontally and arrives vertically,
//!   `V x y` one that leaves vertically and arrives horizontally. Bowls are chains of both.
//! - `C x y x y x y` draws a cubic curve, `E x y rx ry` an ellipse around a centre.

mod glyphs;

use glyphs::{GLYPHS, MISSING};

/// Grid units in an em: capitals are then about as high as in the usual sans-serif fonts, and
/// the advances are like theirs.
const UNITS_PER_EM: f64 = 19.4;

/// Extents above and below the baseline, in ems.
pub(crate) const ASCENT: f64 = 0.84;
pub(crate) const DESCENT: f64 = 0.24;

/// How much wider than this font the reader's may be.
const SPARE: f64 = 1.07;

const PEN: f64 = 1.5;
const BOLD_PEN: f64 = 2.25;
/// What is added to every advance: strokes of one width need a little more air than shapes that
/// swell and taper, and a wider pen more again.
const TRACKING: f64 = 0.3;
const BOLD_TRACKING: f64 = 0.8;

/// A piece of a path, in pixels relative to the start of the text, y down.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Segment {
    Move((f64, f64)),
    Line((f64, f64)),
    Cubic((f64, f64), (f64, f64), (f64, f64)),
}

struct Glyph {
    advance: f64,
    path: &'static str,
}

/// Finds what is drawn for a character: its own glyph, or the box of a missing one.
fn glyph(character: char) -> Glyph {
    let known = GLYPHS.iter().find(|(c, ..)| *c == character);
    let &(_, advance, path) = known.unwrap_or(&MISSING);
    Glyph { advance, path }
}

fn advance(character: char, bold: bool) -> f64 {
    let extra = if bold { BOLD_TRACKING } else { TRACKING };
    glyph(character).advance + extra
}

/// The width of a text in this font.
pub(crate) fn width(text: &str, size: f64, bold: bool) -> f64 {
    let units: f64 = text.chars().map(|c| advance(c, bold)).sum();
    units * size / UNITS_PER_EM
}

/// The width to keep free for a text, whatever sans-serif font shows it.
pub(crate) fn room(text: &str, size: f64, bold: bool) -> f64 {
    width(text, size, bold) * SPARE
}

/// The width of the pen.
pub(crate) fn pen(size: f64, bold: bool) -> f64 {
    let units = if bold { BOLD_PEN } else { PEN };
    units * size / UNITS_PER_EM
}

/// The paths of a text that starts at the origin.
pub(crate) fn outline(text: &str, size: f64, bold: bool) -> Vec<Segment> {
    let unit = size / UNITS_PER_EM;
    let mut segments = Vec::new();
    let mut start = 0.0;
    for character in text.chars() {
        trace(glyph(character).path, start, unit, &mut segments);
        start += advance(character, bold) * unit;
    }
    segments
}

/// The handles of a quarter of an ellipse.
fn quarter(from: (f64, f64), to: (f64, f64), horizontal: bool) -> ((f64, f64), (f64, f64)) {
    /// Where they lie: slightly beyond a true ellipse's 0.5523, which makes bowls a little
    /// square and open, and small text clearer.
    const ARC: f64 = 0.585;
    let along = |a: f64, b: f64| a + ARC * (b - a);
    if horizontal {
        ((along(from.0, to.0), from.1), (to.0, along(to.1, from.1)))
    } else {
        ((from.0, along(from.1, to.1)), (along(to.0, from.0), to.1))
    }
}

/// The commands of a path: a letter and its numbers.
fn commands(path: &str) -> impl Iterator<Item = (&str, Vec<f64>)> {
    let mut rest = path;
    std::iter::from_fn(move || {
        let (letter, after) = rest.split_at_checked(1)?;
        let end = after.find(char::is_alphabetic).unwrap_or(after.len());
        let (numbers, next) = after.split_at(end);
        rest = next;
        let numbers = numbers.split_ascii_whitespace();
        Some((letter, numbers.filter_map(|n| n.parse().ok()).collect()))
    })
}

/// Follows one glyph's commands.
fn trace(path: &str, start: f64, unit: f64, segments: &mut Vec<Segment>) {
    let place = |(x, y): (f64, f64)| (start + x * unit, -y * unit);
    let curve = |(leave, arrive), to| Segment::Cubic(place(leave), place(arrive), place(to));
    let mut pen = (0.0, 0.0);
    for (letter, numbers) in commands(path) {
        match (letter, &numbers[..]) {
            ("M", &[x, y]) => segments.push(Segment::Move(place((x, y)))),
            ("L", &[x, y]) => segments.push(Segment::Line(place((x, y)))),
            ("H" | "V", &[x, y]) => {
                segments.push(curve(quarter(pen, (x, y), letter == "H"), (x, y)));
            }
            ("C", &[ax, ay, bx, by, x, y]) => {
                segments.push(curve(((ax, ay), (bx, by)), (x, y)));
            }
            ("E", &[x, y, rx, ry]) => {
                let around = [(x + rx, y), (x, y + ry), (x - rx, y), (x, y - ry)];
                segments.push(Segment::Move(place(around[0])));
                for turn in 0..4 {
                    let (from, to) = (around[turn], around[(turn + 1) % 4]);
                    segments.push(curve(quarter(from, to, turn % 2 == 1), to));
                }
            }
            _ => debug_assert!(false, "a glyph has the command {letter} {numbers:?}"),
        }
        if let &[.., x, y] = &numbers[..] {
            pen = (x, y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every command of every glyph is one that `trace` knows, and no pen leaves the line.
    #[test]
    fn glyphs_are_well_formed() {
        let arity = |letter| match letter {
            "M" | "L" | "H" | "V" => 2,
            "E" => 4,
            "C" => 6,
            other => panic!("no command {other}"),
        };
        for &(character, advance, path) in GLYPHS.iter().chain([&MISSING]) {
            for (letter, numbers) in commands(path) {
                assert_eq!(numbers.len(), arity(letter), "{character} {letter}");
            }
            let words: usize = commands(path).map(|(_, n)| n.len()).sum();
            let written = path.split(|c: char| c.is_whitespace() || c.is_alphabetic());
            assert_eq!(words, written.filter(|w| !w.is_empty()).count(), "{path}");
            let mut segments = Vec::new();
            trace(path, 0.0, 1.0, &mut segments);
            for segment in segments {
                let (Segment::Move((x, y)) | Segment::Line((x, y)) | Segment::Cubic(_, _, (x, y))) =
                    segment;
                assert!((0.0..=advance).contains(&x), "{character}: x {x}");
                assert!((-16.0..=4.0).contains(&y), "{character}: y {y}");
            }
        }
    }

    #[test]
    fn no_character_has_two_glyphs_and_all_of_ascii_has_one() {
        for (index, (character, ..)) in GLYPHS.iter().enumerate() {
            assert!(GLYPHS[..index].iter().all(|(c, ..)| c != character));
        }
        for character in (' '..='~').chain("…×≤−·→↑".chars()) {
            assert!(GLYPHS.iter().any(|(c, ..)| *c == character), "{character}");
        }
    }

    /// A circle's rightmost, topmost and other extreme points are where the command says.
    #[test]
    fn an_ellipse_goes_through_its_four_corners() {
        let mut segments = Vec::new();
        trace("E5 7 4 6", 0.0, 1.0, &mut segments);
        let ends = segments.iter().map(|segment| match segment {
            Segment::Move(to) | Segment::Line(to) | Segment::Cubic(_, _, to) => *to,
        });
        let corners = [
            (9.0, -7.0),
            (5.0, -13.0),
            (1.0, -7.0),
            (5.0, -1.0),
            (9.0, -7.0),
        ];
        assert!(ends.eq(corners));
        // Leaves upwards, arrives to the left.
        let Segment::Cubic(leave, arrive, _) = segments[1] else {
            panic!("{segments:?}");
        };
        assert!(leave.0 == 9.0 && arrive.1 == -13.0);
    }

    #[test]
    fn digits_stand_in_columns_and_bold_is_wider() {
        for digit in '0'..='9' {
            assert_eq!(advance(digit, false), advance('0', false));
        }
        assert!(width("peak", 12.0, true) > width("peak", 12.0, false));
        let apart = width("a", 12.0, false) + width("b", 12.0, false);
        assert!((width("ab", 12.0, false) - apart).abs() < 1e-9);
        assert!(room("peak", 12.0, false) > width("peak", 12.0, false));
    }
}
