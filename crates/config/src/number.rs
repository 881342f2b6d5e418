//! Numbers as the four languages write them: `1_000`, `0x10`, `1e-4`, `.5`.
//!
//! A number stays text until a setting says what it is, but texts of different
//! languages must compare: [`canonical`] brings them to digits that Rust parses.

/// The number `text` stands for, in digits without separators; `None` if it is
/// none in any of the languages.
pub(crate) fn canonical(text: &str) -> Option<String> {
    let (sign, digits) = match text.as_bytes().first()? {
        b'-' => ("-", &text[1..]),
        b'+' => ("", &text[1..]),
        _ => ("", text),
    };
    let separated = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    if separated || digits.starts_with(['+', '-']) {
        return None;
    }
    let bare = digits.replace('_', "");
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        let prefixed = bare
            .get(..2)
            .is_some_and(|start| start.eq_ignore_ascii_case(prefix));
        if prefixed && bare.len() > 2 {
            let value = u128::from_str_radix(&bare[2..], radix).ok()?;
            return Some(format!("{sign}{value}"));
        }
    }
    // Rust would also take `inf` and `nan`, which are words in config files.
    let numeric = bare
        .bytes()
        .all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'E' | b'+' | b'-'));
    (numeric && bare.parse::<f64>().is_ok()).then(|| format!("{sign}{bare}"))
}

/// Whether two numbers are the same, however they are written.
pub(crate) fn equal(left: &str, right: &str) -> bool {
    let (Some(left), Some(right)) = (canonical(left), canonical(right)) else {
        return left == right;
    };
    match (left.parse::<i128>(), right.parse::<i128>()) {
        (Ok(left), Ok(right)) => left == right,
        _ => left.parse::<f64>().ok() == right.parse::<f64>().ok(),
    }
}

/// Writes `number` the way `model` is written: in hexadecimal digits, or with
/// underscores between thousands.
pub(crate) fn in_style_of(number: &str, model: &str) -> String {
    let Ok(value) = number.parse::<u128>() else {
        return number.to_owned();
    };
    if let Some(digits) = model.strip_prefix("0x").or(model.strip_prefix("0X")) {
        let prefix = &model[..2];
        return if digits.contains(|digit: char| digit.is_ascii_uppercase()) {
            format!("{prefix}{value:X}")
        } else {
            format!("{prefix}{value:x}")
        };
    }
    if !model.contains('_') {
        return number.to_owned();
    }
    let mut grouped = String::new();
    for (index, digit) in number.chars().enumerate() {
        if index > 0 && (number.len() - index).is_multiple_of(3) {
            grouped.push('_');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_a_number() {
        for (text, number) in [
            ("42", "42"),
            ("+42", "42"),
            ("-1", "-1"),
            ("1_000_000", "1000000"),
            ("0x10", "16"),
            ("0XfF", "255"),
            ("0o17", "15"),
            ("0b101", "5"),
            ("1e-4", "1e-4"),
            (".5", ".5"),
            ("5.", "5."),
            ("1_0.5e+3", "10.5e+3"),
        ] {
            assert_eq!(canonical(text).as_deref(), Some(number), "{text}");
        }
        for text in [
            "", "-", "_1", "1_", "1__0", "0x", "0xg", "e", ".", "inf", "nan", "1e", "4 ", "16-m",
            "--1",
        ] {
            assert_eq!(canonical(text), None, "{text}");
        }
    }

    #[test]
    fn equality_is_of_the_number() {
        assert!(equal("1_000", "1000") && equal("0x10", "16") && equal("3e-4", "0.0003"));
        assert!(equal("16.0", "16") && equal("1e5", "100000"));
        assert!(!equal("4", "8") && !equal("9007199254740993", "9007199254740992"));
    }

    #[test]
    fn style_is_kept() {
        assert_eq!(in_style_of("100000", "1_000"), "100_000");
        assert_eq!(in_style_of("100", "1_000"), "100");
        assert_eq!(in_style_of("255", "0x1A"), "0xFF");
        assert_eq!(in_style_of("255", "0x10"), "0xff");
        assert_eq!(in_style_of("1e-4", "1_000"), "1e-4");
    }
}
