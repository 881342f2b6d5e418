//! Ticks at round numbers, and the names of numbers along an axis.

/// A place on an axis and what is written beside it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tick {
    pub value: f64,
    pub label: String,
}

/// Ticks from 0 to at most `max` bytes, no more than `most` and the zero. Memory is counted in
/// powers of two, so those are its round numbers: 4, 8, 12 GiB rather than 5, 10, 15.
pub(crate) fn byte_ticks(max: f64, most: usize) -> Vec<Tick> {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let fits = |power: &usize| 1024_f64.powi(*power as i32) <= max;
    let power = (0..UNITS.len()).rev().find(fits).unwrap_or(0);
    let unit = 1024_f64.powi(power as i32);
    // A byte is not cut up; of a larger unit, a quarter is still a round number.
    let mut step = if power == 0 { 1.0 } else { unit / 4.0 };
    while max / step > most.max(1) as f64 {
        step *= 2.0;
    }
    let decimals = match step / unit {
        0.25 => 2,
        0.5 => 1,
        _ => 0,
    };
    let label = |value: f64| format!("{:.decimals$} {}", value / unit, UNITS[power]);
    ticks((0.0, max), step, label)
}

/// Ticks between two numbers at multiples of 1, 2 or 5 times a power of ten, no more than about
/// `most`.
pub(crate) fn decimal_ticks(
    (low, high): (f64, f64),
    most: usize,
    label: impl Fn(f64) -> String,
) -> Vec<Tick> {
    let rough = (high - low) / most.max(1) as f64;
    if !rough.is_finite() || rough <= 0.0 {
        return ticks((low, low), 1.0, label);
    }
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0].map(|factor| factor * power);
    let step = step.into_iter().find(|step| *step >= rough * (1.0 - 1e-9));
    ticks((low, high), step.unwrap_or(10.0 * power), label)
}

fn ticks((low, high): (f64, f64), step: f64, label: impl Fn(f64) -> String) -> Vec<Tick> {
    // The first and the last multiple may miss the ends by a rounding.
    let first = (low / step - 1e-9).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    let values = (first..=last).map(|index| index as f64 * step);
    let tick = |value| Tick {
        value,
        label: match value {
            0.0 => "0".to_owned(),
            value => label(value),
        },
    };
    values.map(tick).collect()
}

/// A duration in a unit that suits the longest on the axis.
pub(crate) fn duration(seconds: f64, longest: f64) -> String {
    let (scale, unit) = match longest {
        longest if longest >= 1.0 => (1.0, "s"),
        longest if longest >= 1e-3 => (1e3, "ms"),
        _ => (1e6, "µs"),
    };
    let text = plain(seconds * scale);
    format!("{text} {unit}")
}

/// Three digits and a suffix: `950`, `45.2 k`, `1.2 M`.
pub(crate) fn short(value: f64) -> String {
    let (scale, suffix) = match value.abs() {
        size if size >= 999.5e6 => (1e9, " G"),
        size if size >= 999.5e3 => (1e6, " M"),
        size if size >= 999.5 => (1e3, " k"),
        _ => (1.0, ""),
    };
    format!("{}{suffix}", plain(value / scale))
}

/// Three digits, without those that say nothing.
fn plain(value: f64) -> String {
    if value.abs() >= 1e6 {
        return format!("{value:.0e}");
    }
    let decimals = match value.abs() {
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.0995 => 2,
        _ => 4,
    };
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(ticks: &[Tick]) -> Vec<&str> {
        ticks.iter().map(|tick| tick.label.as_str()).collect()
    }

    #[test]
    fn bytes_are_ticked_at_powers_of_two() {
        let gib = f64::from(1 << 30);
        let ticks = byte_ticks(25.3 * gib, 7);
        let expected = [
            "0", "4 GiB", "8 GiB", "12 GiB", "16 GiB", "20 GiB", "24 GiB",
        ];
        assert_eq!(labels(&ticks), expected);
        assert_eq!(ticks[6].value, 24.0 * gib);
        let expected = ["0", "0.25 GiB", "0.50 GiB", "0.75 GiB", "1.00 GiB"];
        assert_eq!(labels(&byte_ticks(1.1 * gib, 6)), expected);
        assert_eq!(labels(&byte_ticks(3.0, 6)), ["0", "1 B", "2 B", "3 B"]);
        assert_eq!(labels(&byte_ticks(0.0, 6)), ["0"]);
        assert_eq!(byte_ticks(u64::MAX as f64, 6).len(), 5);
    }

    #[test]
    fn every_scale_has_a_readable_number_of_ticks() {
        let mut max = 1.0;
        while max < 1e19 {
            let bytes = byte_ticks(max, 6).len();
            assert!((2..=7).contains(&bytes), "{max}: {bytes}");
            let decimal = decimal_ticks((0.0, max / 1e9), 6, short).len();
            assert!((3..=7).contains(&decimal), "{max}: {decimal}");
            max *= 1.37;
        }
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0.0, "0"),
            (7.0, "7"),
            (950.0, "950"),
            (999.7, "1 k"),
            (1234.0, "1.23 k"),
            (45_210.0, "45.2 k"),
            (1_200_000.0, "1.2 M"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!(short(3e30), "3e21 G");
        assert_eq!(duration(0.0125, 0.4), "12.5 ms");
        assert_eq!(duration(2.0, 8.0), "2 s");
        let ticks = decimal_ticks((31_400.0, 52_000.0), 5, short);
        assert_eq!(labels(&ticks), ["35 k", "40 k", "45 k", "50 k"]);
        assert_eq!(
            labels(&decimal_ticks((0.0, 0.43), 5, |s| duration(s, 0.43)))[1],
            "100 ms"
        );
    }
}
