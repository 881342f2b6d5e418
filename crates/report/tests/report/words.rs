//! What a picture says in words and figures.

use cinch_report::{FrontPicture, FrontPoint, StepPicture, Words, front, timeline};

use crate::sample::{GIB, Sample};

#[test]
fn shares_have_the_decimals_of_the_tables() {
    let mut picture = Sample::default().step();
    picture.budget_bytes = Some(16 * GIB);
    let share = 100.0 * picture.planned_bytes() as f64 / (16 * GIB) as f64;
    let svg = timeline(&picture).to_svg();
    let expected = format!("{share:.1} % of the budget of 16.00 GiB");
    assert!(svg.contains(&expected), "no {expected}");
    // What must fit may be more than what is allocated.
    picture.safe_bytes = Some(20 * GIB);
    let svg = timeline(&picture).to_svg();
    assert!(svg.contains("safe 20.00 GiB, 125.0 % of 16.00 GiB"));
}

#[test]
fn another_programs_memory_has_its_own_words() {
    let picture = StepPicture {
        words: Words {
            outside: "context, kernels, libraries",
            unused: "rounding, holes, cache",
            total: "device use",
            meaning: "of the card",
            axis: Some("two steps".to_owned()),
        },
        ..Sample::default().step()
    };
    let picture = StepPicture {
        arena_bytes: picture.arena_bytes + GIB,
        budget_bytes: None,
        ..picture
    };
    let svg = timeline(&picture).to_svg();
    for word in [
        "context, kernels, libraries",
        "rounding, holes, cache",
        "device use",
        "of the card",
        "two steps",
    ] {
        assert!(svg.contains(word), "no {word}");
    }
    for word in ["outside the arena", "between tensors", "nodes in the order"] {
        assert!(!svg.contains(word), "{word}");
    }
}

/// Points without a name are in the list too, by their figures.
#[test]
fn every_point_of_a_front_is_listed() {
    let point = |label: &str, gib, rate| FrontPoint {
        label: label.to_owned(),
        bytes: gib * GIB,
        rate,
        recommended: !label.is_empty(),
    };
    let svg = front(&FrontPicture {
        unit: "tokens/s".to_owned(),
        points: vec![point("", 2, 60_730.0), point("recommended", 4, 90_600.0)],
        ..FrontPicture::default()
    })
    .to_svg();
    assert!(svg.contains("60.73 k tokens/s") && svg.contains("90.60 k tokens/s"));
}
