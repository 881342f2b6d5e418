//! Where labels go, and what becomes of those that are too long. Nothing is ever written over
//! something else: a label gets a free place or is not drawn.

use crate::scene::{Place, Style};

/// The beginning of a text, as much as fits, with `…` where it was cut.
pub(crate) fn shorten(text: &str, style: Style, width: f64) -> String {
    if style.room(text) <= width {
        return text.to_owned();
    }
    let left = width - style.room("…");
    let head = fitting(text.chars(), style, left);
    let head: String = text.chars().take(head).collect();
    let head = head.trim_end();
    match left >= 0.0 {
        true => format!("{head}…"),
        false => String::new(),
    }
}

/// Beginning and end of a name: where it is and what it is. `blocks.11.…hidden`.
pub(crate) fn elide(name: &str, style: Style, width: f64) -> String {
    if style.room(name) <= width {
        return name.to_owned();
    }
    let left = width - style.room("…");
    if left < 0.0 {
        return String::new();
    }
    let tail = fitting(name.chars().rev(), style, left * 0.5);
    let characters = name.chars().count();
    let tail: String = name.chars().skip(characters - tail).collect();
    let head = fitting(name.chars(), style, left - style.room(&tail));
    let head: String = name.chars().take(head).collect();
    format!("{head}…{tail}")
}

/// How many characters fit into a width.
fn fitting(characters: impl Iterator<Item = char>, style: Style, width: f64) -> usize {
    let mut left = width;
    let mut buffer = [0; 4];
    let fits = |character: &char| {
        left -= style.room(character.encode_utf8(&mut buffer));
        left >= 0.0
    };
    characters.take_while(fits).count()
}

/// Centres of labels in a row, each as near to where it belongs as the others allow. `wanted` is
/// (centre, width) in the order of the centres, `gap` is kept between two, and all stay within
/// `low..high` if they fit at all.
pub(crate) fn spread(wanted: &[(f64, f64)], (low, high): (f64, f64), gap: f64) -> Vec<f64> {
    let mut centers = Vec::with_capacity(wanted.len());
    let mut edge = low;
    for &(center, width) in wanted {
        let center = center.max(edge + width / 2.0);
        centers.push(center);
        edge = center + width / 2.0 + gap;
    }
    let mut edge = high;
    for (center, &(_, width)) in centers.iter_mut().zip(wanted).rev() {
        *center = center.min(edge - width / 2.0);
        edge = *center - width / 2.0 - gap;
    }
    centers
}

/// The part of a picture in which labels are placed, and what it is taken by.
pub(crate) struct Room {
    bounds: Place,
    taken: Vec<Place>,
    /// What a label avoids, but lies over rather than nowhere.
    crossed: Vec<Place>,
}

impl Room {
    pub fn new(bounds: Place) -> Self {
        Self {
            bounds,
            taken: Vec::new(),
            crossed: Vec::new(),
        }
    }

    pub fn take(&mut self, place: Place) {
        self.taken.push(place);
    }

    /// Asks labels to avoid a line, upright or level.
    pub fn avoid(&mut self, from: (f64, f64), to: (f64, f64)) {
        const WIDTH: f64 = 2.0;
        self.crossed.push(Place {
            left: from.0.min(to.0) - WIDTH / 2.0,
            top: from.1.min(to.1) - WIDTH / 2.0,
            width: (from.0 - to.0).abs() + WIDTH,
            height: (from.1 - to.1).abs() + WIDTH,
        });
    }

    /// Whether a place lies over a line.
    pub fn is_crossed(&self, place: &Place) -> bool {
        self.crossed.iter().any(|line| line.overlaps(place))
    }

    fn is_free(&self, place: &Place) -> bool {
        self.bounds.contains(place) && !self.taken.iter().any(|taken| taken.overlaps(place))
    }

    /// Takes a place for a label of this size beside a point: above it if possible, for what is
    /// drawn comes up to the point from below.
    pub fn beside(&mut self, (x, y): (f64, f64), (width, height): (f64, f64)) -> Option<Place> {
        const DISTANCE: f64 = 8.0;
        let columns = [x - width / 2.0, x - width + DISTANCE, x - DISTANCE];
        let sides = [x + DISTANCE, x - DISTANCE - width];
        let above = y - height - DISTANCE;
        let below = y + DISTANCE;
        let candidates = columns
            .map(|left| (left, above))
            .into_iter()
            .chain(sides.map(|left| (left, y - height / 2.0)))
            .chain(columns.map(|left| (left, below)))
            .chain(sides.map(|left| (left, above)))
            .chain(sides.map(|left| (left, below)))
            .chain(columns.map(|left| (left, above - height)))
            .chain(columns.map(|left| (left, below + height)));
        let place = |(left, top)| Place {
            left,
            top,
            width,
            height,
        };
        let free = candidates.map(place).filter(|place| self.is_free(place));
        let place = free.min_by_key(|place| self.is_crossed(place))?;
        self.take(place);
        Some(place)
    }

    /// As [`Self::beside`], and anywhere in the room rather than nowhere.
    pub fn near(&mut self, at: (f64, f64), size: (f64, f64)) -> Option<Place> {
        if let Some(place) = self.beside(at, size) {
            return Some(place);
        }
        const STEP: f64 = 8.0;
        let Place { left, top, .. } = self.bounds;
        let across = (self.bounds.width / STEP) as usize;
        let down = (self.bounds.height / STEP) as usize;
        let places = (0..=across * down.max(1)).map(|cell| Place {
            left: left + (cell % across.max(1)) as f64 * STEP,
            top: top + (cell / across.max(1)) as f64 * STEP,
            width: size.0,
            height: size.1,
        });
        let distance = |place: &Place| {
            let x = place.left + place.width / 2.0 - at.0;
            let y = place.top + place.height / 2.0 - at.1;
            x * x + y * y
        };
        let place = places
            .filter(|place| self.is_free(place))
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
        self.take(place);
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::palette::Ink;

    const STYLE: Style = Style::new(12.0, Ink::Text);

    #[test]
    fn cut_texts_fit_and_say_that_they_were_cut() {
        let name = "blocks.11.mixer.input_projection.weight_gradient";
        for width in 0..400 {
            let width = f64::from(width);
            for text in [shorten(name, STYLE, width), elide(name, STYLE, width)] {
                assert!(STYLE.room(&text) <= width, "{text} in {width}");
                assert!(text.is_empty() || text == name || text.contains('…'));
            }
        }
        let elided = elide(name, STYLE, 150.0);
        assert!(
            elided.starts_with("blocks.11") && elided.ends_with("gradient"),
            "{elided}"
        );
        assert!(shorten(name, STYLE, 150.0).starts_with("blocks.11.mixer"));
        assert_eq!(shorten("a short one", STYLE, 150.0), "a short one");
    }

    #[test]
    fn spread_labels_keep_their_distance_and_their_place() {
        let far = [(50.0, 40.0), (150.0, 40.0)];
        assert_eq!(spread(&far, (0.0, 300.0), 8.0), [50.0, 150.0]);
        let near = [(100.0, 40.0), (102.0, 60.0), (299.0, 80.0)];
        let centers = spread(&near, (0.0, 300.0), 8.0);
        for (index, pair) in centers.windows(2).enumerate() {
            let apart = f64::midpoint(near[index].1, near[index + 1].1) + 8.0;
            assert!(pair[1] - pair[0] >= apart - 1e-9, "{centers:?}");
        }
        assert!(centers[2] + 40.0 <= 300.0 && centers[0] - 20.0 >= 0.0);
    }

    #[test]
    fn a_room_gives_no_place_twice() {
        let bounds = Place {
            left: 0.0,
            top: 0.0,
            width: 200.0,
            height: 60.0,
        };
        let mut room = Room::new(bounds);
        let mut places = Vec::new();
        while let Some(place) = room.near((100.0, 30.0), (60.0, 14.0)) {
            assert!(bounds.contains(&place));
            assert!(places.iter().all(|other| !place.overlaps(other)));
            places.push(place);
        }
        assert!(places.len() >= 6, "{places:?}");
        assert_eq!(room.near((100.0, 30.0), (500.0, 14.0)), None);
    }
}
