//! No label lies over another or leaves the picture, whatever is drawn.

use cinch_graph::Phase;
use cinch_report::{
    FrontPicture, FrontPoint, Held, Ink, Mark, Moment, Scene, StepPicture, Words, front, timeline,
};
use proptest::prelude::*;

use crate::sample::{Sample, choices};

fn check(scene: &Scene) {
    let paper = scene.place();
    let mut texts: Vec<(cinch_report::Place, &str)> = Vec::new();
    for mark in &scene.marks {
        match mark {
            Mark::Text(text) => {
                let place = text.place();
                assert!(paper.contains(&place), "`{}` is at {place:?}", text.text);
                for (other, name) in &texts {
                    assert!(!place.overlaps(other), "`{}` over `{name}`", text.text);
                }
                texts.push((place, &text.text));
            }
            // What a label lies on hides no other label.
            Mark::Rectangle(chip) if chip.fill == Ink::Paper => {
                for (text, name) in &texts {
                    assert!(!chip.place.overlaps(text), "`{name}` is covered");
                }
            }
            Mark::Area(area) => finite(area.points.iter()),
            Mark::Line(line) => finite(line.points.iter()),
            Mark::Rectangle(_) | Mark::Circle(_) => {}
        }
    }
}

fn finite<'a>(mut points: impl Iterator<Item = &'a (f64, f64)>) {
    assert!(points.all(|(x, y)| x.is_finite() && y.is_finite()));
}

/// From nothing to all that can be counted, and all scales between.
fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(u64::MAX),
        (0..63_u32, 0..1024_u64).prop_map(|(shift, n)| (1 << shift) | n),
    ]
}

fn limits() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![Just(None), sizes().prop_map(Some)]
}

fn names() -> impl Strategy<Value = String> {
    prop_oneof![".*", "[a-z.]{0,12}", "[W@mi]{80,200}"]
}

fn moments() -> impl Strategy<Value = Moment> {
    let phase = prop_oneof![
        Just(Phase::Forward),
        Just(Phase::Recompute),
        Just(Phase::Backward),
        Just(Phase::Exchange),
        Just(Phase::Update),
    ];
    let seconds = prop_oneof![
        9 => (0.0..1.0_f64).prop_map(Some),
        1 => prop_oneof![Just(None), Just(Some(f64::NAN)), Just(Some(1e300))],
    ];
    let block = prop::option::of(0..200_usize);
    let bytes = prop::array::uniform11(sizes());
    (names(), phase, block, seconds, bytes).prop_map(|(name, phase, block, seconds, bytes)| {
        Moment {
            name,
            phase,
            block,
            seconds,
            bytes,
        }
    })
}

prop_compose! {
    fn steps()(
        texts in (names(), names()),
        limits in (limits(), limits(), limits()),
        sizes in (sizes(), sizes()),
        micro_batches in 0..100_u64,
        moments in prop::collection::vec(moments(), 0..40),
        largest in prop::collection::vec((names(), sizes()), 0..20),
    ) -> StepPicture {
        StepPicture {
            title: texts.0,
            subtitle: texts.1,
            budget_bytes: limits.0,
            capacity_bytes: limits.1,
            overhead_bytes: sizes.0,
            arena_bytes: sizes.1,
            micro_batches,
            moments,
            largest: largest.into_iter().map(|(name, bytes)| Held { name, bytes }).collect(),
            safe_bytes: limits.2,
            words: Words::default(),
        }
    }
}

prop_compose! {
    fn fronts()(
        texts in (names(), names(), names()),
        limits in (limits(), limits()),
        points in prop::collection::vec(
            (names(), sizes(), -1.0..40.0_f64, any::<bool>()),
            0..40,
        ),
    ) -> FrontPicture {
        let point = |(label, bytes, log, recommended)| FrontPoint {
            label,
            bytes,
            rate: match log {
                log if log < -0.5 => f64::NAN,
                log => 1.9_f64.powf(log),
            },
            recommended,
        };
        FrontPicture {
            title: texts.0,
            subtitle: texts.1,
            unit: texts.2,
            budget_bytes: limits.0,
            capacity_bytes: limits.1,
            points: points.into_iter().map(point).collect(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn labels_of_a_step_keep_apart(picture in steps()) {
        check(&timeline(&picture));
    }

    #[test]
    fn labels_of_a_front_keep_apart(picture in fronts()) {
        check(&front(&picture));
    }
}

/// The budget at every height, the peak under it at every place.
#[test]
fn the_peak_is_named_wherever_it_is() {
    let mut picture = Sample::default().step();
    let peak = picture.peak_bytes();
    for share in 1..=30 {
        picture.budget_bytes = Some(peak / 10 * share);
        picture.capacity_bytes = Some(peak / 10 * share + peak / 200);
        // Also near the right end, where the names of the limits are.
        let last = picture.peak().unwrap() + 1;
        for turn in [0, 40, last - 1, last, last + 5, last + 20] {
            let mut turned = picture.clone();
            turned.moments.rotate_left(turn);
            let scene = timeline(&turned);
            check(&scene);
            let named = scene.marks.iter().any(|mark| match mark {
                Mark::Text(text) => text.text.starts_with("peak "),
                _ => false,
            });
            assert!(named, "budget {share}, turned by {turn}");
        }
    }
}

#[test]
fn the_recommended_choice_is_named_and_listed() {
    let mut choices = choices();
    for index in 0..60 {
        choices.points.push(FrontPoint {
            label: format!("choice {index}"),
            bytes: (index + 2) << 28,
            rate: 20_000.0 + 300.0 * index as f64,
            recommended: false,
        });
    }
    let scene = front(&choices);
    check(&scene);
    let texts = scene.marks.iter().filter(|mark| match mark {
        Mark::Text(text) => text.text == "aggressive",
        _ => false,
    });
    assert_eq!(texts.count(), 2, "beside the point and in the list");
}

/// The staircase has exactly the points that no other beats, found by comparing all pairs.
#[test]
fn the_front_is_what_nothing_beats() {
    let choices = choices();
    let beaten = |point: &FrontPoint| {
        let beats = |other: &&FrontPoint| {
            let better = other.bytes < point.bytes || other.rate > point.rate;
            other.bytes <= point.bytes && other.rate >= point.rate && better
        };
        choices.points.iter().find(beats).is_some()
    };
    let expected = choices.points.iter().filter(|p| !beaten(p)).count();
    let scene = front(&choices);
    let corners = scene.marks.iter().find_map(|mark| match mark {
        Mark::Line(line) if line.ink == Ink::Front => Some(line.points.len()),
        _ => None,
    });
    // Two corners a point, one for the first, and the end at the right edge.
    assert_eq!(corners, Some(2 * expected));
}
