//! Text charts: known lines, their width, and the same peak as the picture.

use cinch_report::{StepPicture, TextChart, sparkline, text_chart};

use crate::sample::{GIB, Sample};

#[test]
fn a_sparkline_is_known() {
    assert_eq!(sparkline(&[0, 1, 2, 3, 4, 5, 6, 7, 8], 20), " ▁▂▃▄▅▆▇█");
    assert_eq!(sparkline(&[1, 1000], 2), "▁█");
    assert_eq!(sparkline(&[5, 5, 5], 8), "███");
    assert_eq!(sparkline(&[0, 0], 8), "  ");
    assert_eq!(sparkline(&[], 8), "");
    assert_eq!(sparkline(&[1, 2, 3], 0), "");
    assert_eq!(sparkline(&[u64::MAX, u64::MAX / 2 + 1], 2), "█▄");
}

#[test]
fn a_short_peak_is_not_lost() {
    let mut values = vec![10; 5000];
    values[3211] = 80;
    let line = sparkline(&values, 60);
    assert_eq!(line.chars().count(), 60);
    assert_eq!(line.chars().filter(|&c| c == '█').count(), 1);
    assert_eq!(line.chars().position(|c| c == '█'), Some(3211 * 60 / 5000));
}

#[test]
fn charts_keep_to_their_size() {
    let picture = Sample::default().step();
    for width in 0..140 {
        for categories in [false, true] {
            let chart = TextChart {
                width,
                height: 9,
                categories,
            };
            let text = text_chart(&picture, chart);
            for line in text.lines() {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
    }
}

#[test]
fn a_chart_shows_scale_budget_and_phases() {
    let mut picture = Sample::default().step();
    let chart = TextChart {
        width: 100,
        height: 12,
        categories: false,
    };
    let text = text_chart(&picture, chart);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 14);
    assert!(lines[0].contains("7.20 GiB ┤╌╌╌"), "{text}");
    assert!(lines[11].contains("0 ┤███"), "{text}");
    assert!(lines[13].ends_with("› forward  » recompute  ‹ backward  + update"));
    // The column of the peak is as high as its share of the scale.
    let filled = lines[..12]
        .iter()
        .filter(|line| line.chars().any(|c| c == '█'))
        .count();
    let share = picture.peak_bytes() as f64 / (7.2 * GIB as f64);
    assert_eq!(filled, (12.0 * share) as usize, "{text}");
    picture.budget_bytes = Some(picture.peak_bytes() / 2);
    let text = text_chart(&picture, chart);
    assert!(text.lines().nth(6).unwrap().contains("budget ┤"), "{text}");
}

#[test]
fn shades_say_what_the_memory_is_for() {
    let picture = Sample::default().step();
    let chart = TextChart {
        width: 100,
        height: 12,
        categories: true,
    };
    let text = text_chart(&picture, chart);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[11].contains("0 ┤░░░"), "{text}");
    assert!(lines[10].contains("┤███"), "{text}");
    // After the last activation only what stays is left.
    let update = lines[7].chars().last();
    assert_eq!(update, Some('█'), "{text}");
    assert!(lines[7].contains('▒'), "{text}");
    assert!(text.contains("░ outside the arena  █ weights, gradients, states  ▒ activations"));
}

#[test]
fn nothing_is_drawn_of_nothing() {
    let chart = TextChart {
        width: 60,
        height: 4,
        categories: true,
    };
    let text = text_chart(&StepPicture::default(), chart);
    assert_eq!(text.lines().count(), 4, "{text}");
}
