//! Where a run's memory goes: its course over the requests, and what is alive when it is highest.

use std::collections::HashMap;
use std::fmt;

use crate::eager::{AllocationCategory, Event, Line, Scope};

/// Tensors of one kind that are alive at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alive {
    pub category: AllocationCategory,
    /// The part of the model that made them, all layers together.
    pub scope: &'static str,
    /// The op that made them.
    pub op: &'static str,
    pub origin: Origin,
    pub count: u64,
    pub bytes: u64,
}

/// The line that a tensor comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Origin {
    /// It is there before the model runs, or belongs to a library.
    Nowhere,
    /// Made by this line.
    Line(&'static Line),
    /// Made for the gradient of what this line computes.
    BackwardOf(&'static Line),
}

impl Origin {
    pub fn of(event: &Event) -> Origin {
        match (event.line, event.category) {
            // Parameters were made before; a workspace is its thread's, whichever product came first.
            (None, _) | (_, AllocationCategory::Parameter | AllocationCategory::Workspace) => {
                Origin::Nowhere
            }
            (Some(line), AllocationCategory::Backward | AllocationCategory::Gradient) => {
                Origin::BackwardOf(line)
            }
            (Some(line), _) => Origin::Line(line),
        }
    }

    pub fn line(self) -> Option<&'static Line> {
        match self {
            Origin::Nowhere => None,
            Origin::Line(line) | Origin::BackwardOf(line) => Some(line),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Nowhere => Ok(()),
            Origin::Line(line) => line.fmt(f),
            Origin::BackwardOf(line) => write!(f, "backward of {line}"),
        }
    }
}

/// A point of the course.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// Requests before this point.
    pub event: u64,
    pub bytes: u64,
    pub scope: Scope,
    pub origin: Origin,
}

#[derive(Clone, Debug)]
pub struct Profile {
    /// Bytes asked for over the run, thinned to the highest of each stretch.
    pub course: Vec<Point>,
    pub peak: Point,
    /// Largest first.
    pub alive: Vec<Alive>,
}

/// Points that the course is thinned to.
const POINTS: usize = 512;

impl Profile {
    pub fn of(events: &[Event]) -> Profile {
        let none = Point {
            event: 0,
            bytes: 0,
            scope: Scope {
                name: "model",
                layer: None,
            },
            origin: Origin::Nowhere,
        };
        let (mut bytes, mut peak) = (0, none);
        let stretch = events.len().div_ceil(POINTS).max(1);
        let mut course = Vec::with_capacity(POINTS);
        for chunk in events.chunks(stretch).enumerate() {
            let (number, chunk) = chunk;
            let mut highest = none;
            for (offset, event) in chunk.iter().enumerate() {
                bytes = if event.is_free {
                    bytes - event.bytes
                } else {
                    bytes + event.bytes
                };
                if bytes >= highest.bytes {
                    highest = Point {
                        event: (number * stretch + offset + 1) as u64,
                        bytes,
                        scope: event.scope,
                        origin: Origin::of(event),
                    };
                }
            }
            if highest.bytes > peak.bytes {
                peak = highest;
            }
            course.push(highest);
        }
        Profile {
            course,
            peak,
            alive: alive_at(events, peak.event as usize),
        }
    }
}

/// What is allocated after so many events. A gradient's category is known when it is freed: frees tell it.
fn alive_at(events: &[Event], end: usize) -> Vec<Alive> {
    let mut living: HashMap<u32, Event> = HashMap::new();
    for event in &events[..end] {
        if event.is_free {
            living.remove(&event.id);
        } else {
            living.insert(event.id, *event);
        }
    }
    for event in &events[end..] {
        if let Some(alive) = living.get_mut(&event.id)
            && event.is_free
        {
            alive.category = event.category;
        }
    }
    let mut groups: HashMap<(AllocationCategory, &str, &str, Origin), Alive> = HashMap::new();
    for event in living.values() {
        let origin = Origin::of(event);
        let key = (event.category, event.scope.name, event.op, origin);
        let alive = groups.entry(key).or_insert(Alive {
            category: event.category,
            scope: event.scope.name,
            op: event.op,
            origin,
            count: 0,
            bytes: 0,
        });
        alive.count += 1;
        alive.bytes += event.bytes;
    }
    let mut alive: Vec<Alive> = groups.into_values().collect();
    alive.sort_by(|a, b| {
        (b.bytes, a.op, a.scope, a.category, a.origin)
            .cmp(&(a.bytes, b.op, b.scope, b.category, b.origin))
    });
    alive
}
