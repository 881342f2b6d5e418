//! Where in a model an op runs: the part, its layer, and the line, under one small number that a node of the graph has room
//! for.

use std::collections::HashMap;

use super::line::Line;

/// A part of a model: its name and which of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    pub name: &'static str,
    pub layer: Option<u32>,
}

#[derive(Clone, Copy)]
pub(super) struct Place {
    pub scope: Scope,
    pub line: Option<&'static Line>,
}

/// The number of a place. Those beyond the last number share it: names may then be wrong, sizes are not.
#[derive(Clone, Copy, Default)]
pub(super) struct PlaceId(u16);

/// Names and lines are constants, so that their addresses tell them apart.
type Key = (usize, Option<u32>, usize);

impl Place {
    fn key(&self) -> Key {
        let line = self.line.map_or(0, |line| std::ptr::from_ref(line).addr());
        (self.scope.name.as_ptr().addr(), self.scope.layer, line)
    }
}

/// Places found last are looked for first, by the low bits of their addresses: the few of a loop's body.
const RECENT: usize = 64;

pub(super) struct Places {
    all: Vec<Place>,
    numbers: HashMap<Key, PlaceId>,
    recent: [(Key, PlaceId); RECENT],
}

impl Default for Places {
    fn default() -> Places {
        Places {
            all: Vec::new(),
            numbers: HashMap::new(),
            // No name has the address zero.
            recent: [((0, None, 0), PlaceId(0)); RECENT],
        }
    }
}

impl Places {
    pub fn number(&mut self, place: Place) -> PlaceId {
        let key = place.key();
        let slot = (key.2 / align_of::<Line>() + key.0) % RECENT;
        let (found, number) = self.recent[slot];
        if found == key {
            return number;
        }
        let all = &mut self.all;
        let number = *self.numbers.entry(key).or_insert_with(|| {
            let number = all.len().min(usize::from(u16::MAX));
            all.truncate(number);
            all.push(place);
            PlaceId(number as u16)
        });
        self.recent[slot] = (key, number);
        number
    }

    pub fn of(&self, number: PlaceId) -> Place {
        self.all[usize::from(number.0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_for_places() {
        const LINES: [Line; 2] = [Line::Statement("a"), Line::Statement("b")];
        static STATEMENTS: [Line; 2] = LINES;
        let mut places = Places::default();
        let mut numbered = Vec::new();
        for layer in (0..300).map(Some).chain([None]) {
            for line in STATEMENTS.iter().map(Some).chain([None]) {
                let scope = Scope {
                    name: "part",
                    layer,
                };
                let place = Place { scope, line };
                numbered.push((place, places.number(place)));
            }
        }
        for &(place, number) in &numbered {
            assert_eq!(places.number(place).0, number.0);
            assert_eq!(places.of(number).key(), place.key());
        }
        assert_eq!(places.all.len(), numbered.len());
    }
}
