//! Writes a value in the language of a file, in the manner of the value that
//! stood there: quotation marks, `yes` for `true`, `1_000`, hexadecimal digits.

use crate::document::Scalar;
use crate::format::Format;
use crate::{number, yaml};

/// A literal, and the value a reader will find in it. The two differ from what
/// was asked where a number stands in quotation marks and keeps them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Written {
    pub text: String,
    pub scalar: Scalar,
}

/// Whether `new` is already there, however it is written.
pub(crate) fn is_same(old: &Scalar, new: &Scalar) -> bool {
    match (old, new) {
        (Scalar::Number(old), Scalar::Number(new)) => number::equal(old, new),
        (Scalar::Text(old), Scalar::Number(new)) => {
            number::canonical(old).is_some() && number::equal(old, new)
        }
        (Scalar::Text(old), Scalar::Bool(new)) => old.eq_ignore_ascii_case(&new.to_string()),
        _ => old == new,
    }
}

/// `new` as a literal. `old` is the literal it replaces with what it means.
/// `None` where the language has no way to write it.
pub(crate) fn write(format: Format, new: &Scalar, old: Option<(&str, &Scalar)>) -> Option<Written> {
    let raw = old.map_or("", |(raw, _)| raw);
    // "4" becomes "8": whoever reads the file expects a text there.
    if let (Some((_, Scalar::Text(_))), Scalar::Number(_) | Scalar::Bool(_)) = (old, new)
        && raw.ends_with(['"', '\''])
    {
        let inner = match new {
            Scalar::Bool(value) => quoted_bool(*value, raw),
            other => other.to_string(),
        };
        return write_text(format, &inner, raw);
    }
    let text = match new {
        Scalar::Null => null(format, raw)?.to_owned(),
        Scalar::Bool(value) => bool_literal(format, *value, raw),
        Scalar::Number(digits) => number_literal(format, digits, raw),
        Scalar::Text(text) => return write_text(format, text, raw),
        Scalar::List(_) | Scalar::Composite(_) => return None,
    };
    Some(Written {
        text,
        scalar: new.clone(),
    })
}

/// Characters that a shell passes on as they are.
fn plain_in_shell(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-./:,=@%+".contains(c)
}

fn null(format: Format, raw: &str) -> Option<&'static str> {
    match format {
        Format::Json => Some("null"),
        Format::Yaml => Some(if raw == "~" { "~" } else { "null" }),
        Format::Python => Some("None"),
        Format::Toml | Format::Shell => None,
    }
}

fn bool_literal(format: Format, value: bool, raw: &str) -> String {
    match (format, value) {
        (Format::Python, true) => "True".to_owned(),
        (Format::Python, false) => "False".to_owned(),
        (Format::Yaml, _) => yaml_bool(value, raw),
        (Format::Shell, _) => in_case_of(&value.to_string(), raw),
        _ => value.to_string(),
    }
}

/// `yes` for `no`, `On` for `Off`, `TRUE` for `FALSE`.
fn yaml_bool(value: bool, raw: &str) -> String {
    const PAIRS: [(&str, &str); 3] = [("true", "false"), ("yes", "no"), ("on", "off")];
    let (on, off) = PAIRS
        .into_iter()
        .find(|(on, off)| raw.eq_ignore_ascii_case(on) || raw.eq_ignore_ascii_case(off))
        .unwrap_or(PAIRS[0]);
    in_case_of(if value { on } else { off }, raw)
}

fn quoted_bool(value: bool, raw: &str) -> String {
    in_case_of(&value.to_string(), raw.trim_matches(['"', '\'']))
}

fn in_case_of(word: &str, model: &str) -> String {
    let mut letters = model.chars().filter(|c| c.is_alphabetic());
    match (letters.next(), letters.next()) {
        (Some(first), Some(second)) if first.is_uppercase() && second.is_uppercase() => {
            word.to_uppercase()
        }
        (Some(first), _) if first.is_uppercase() => word[..1].to_uppercase() + &word[1..],
        _ => word.to_owned(),
    }
}

fn number_literal(format: Format, digits: &str, raw: &str) -> String {
    match format {
        Format::Json => digits.to_owned(),
        Format::Yaml if digits.contains('e') => dotted_exponent(digits),
        _ => number::in_style_of(digits, raw),
    }
}

/// `3e-4` as `3.0e-4`: without the dot and the sign, PyYAML reads a text.
fn dotted_exponent(digits: &str) -> String {
    let (mantissa, exponent) = digits.split_once('e').unwrap_or((digits, "0"));
    let dot = if mantissa.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with(['-', '+']) {
        ""
    } else {
        "+"
    };
    format!("{mantissa}{dot}e{sign}{exponent}")
}

fn write_text(format: Format, text: &str, raw: &str) -> Option<Written> {
    let single = raw.starts_with('\'') || format == Format::Python && raw.ends_with('\'');
    let plain_before = !raw.is_empty() && !raw.starts_with(['"', '\'']);
    let tame = !text.contains(|c: char| c.is_control() || c == '\'');
    let literal = match format {
        Format::Json => serde_json::to_string(text).ok()?,
        Format::Yaml if (raw.is_empty() || plain_before) && yaml::plain_is_safe(text) => {
            text.to_owned()
        }
        Format::Yaml if single && tame => format!("'{text}'"),
        Format::Yaml => serde_json::to_string(text).ok()?,
        Format::Shell if text.chars().all(plain_in_shell) => text.to_owned(),
        Format::Shell => format!("'{}'", text.replace('\'', "'\\''")),
        Format::Toml if single && tame => format!("'{text}'"),
        Format::Toml => escaped(text, '"', |c| format!("\\u{:04X}", u32::from(c))),
        Format::Python => escaped(text, if single { '\'' } else { '"' }, |c| {
            format!("\\x{:02x}", u32::from(c))
        }),
    };
    Some(Written {
        text: literal,
        scalar: Scalar::Text(text.to_owned()),
    })
}

fn escaped(text: &str, quote: char, control: impl Fn(char) -> String) -> String {
    let mut literal = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => literal.push_str("\\\\"),
            '\n' => literal.push_str("\\n"),
            '\r' => literal.push_str("\\r"),
            '\t' => literal.push_str("\\t"),
            c if c == quote => literal.extend(['\\', quote]),
            // Control characters end at U+009F, so two digits hold them.
            c if c.is_control() => literal.push_str(&control(c)),
            c => literal.push(c),
        }
    }
    literal.push(quote);
    literal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(digits: &str) -> Scalar {
        Scalar::Number(digits.to_owned())
    }

    fn text(text: &str) -> Scalar {
        Scalar::Text(text.to_owned())
    }

    #[test]
    fn the_manner_of_the_old_value_is_kept() {
        use Format::{Json, Python, Toml, Yaml};
        for (format, raw, old, new, expected) in [
            (Json, "4", number("4"), number("8"), "8"),
            (Json, "\"4\"", text("4"), number("8"), "\"8\""),
            (
                Json,
                "true",
                Scalar::Bool(true),
                Scalar::Bool(false),
                "false",
            ),
            (Json, "\"fp16\"", text("fp16"), text("a\"b"), "\"a\\\"b\""),
            (Yaml, "yes", Scalar::Bool(true), Scalar::Bool(false), "no"),
            (Yaml, "Off", Scalar::Bool(false), Scalar::Bool(true), "On"),
            (
                Yaml,
                "TRUE",
                Scalar::Bool(true),
                Scalar::Bool(false),
                "FALSE",
            ),
            (Yaml, "'4'", text("4"), number("8"), "'8'"),
            (
                Yaml,
                "\"True\"",
                text("True"),
                Scalar::Bool(false),
                "\"False\"",
            ),
            (Yaml, "1e-4", number("1e-4"), number("3e-4"), "3.0e-4"),
            (Yaml, "1_000", number("1000"), number("20000"), "20_000"),
            (
                Yaml,
                "16-mixed",
                text("16-mixed"),
                text("bf16-mixed"),
                "bf16-mixed",
            ),
            (Yaml, "fp16", text("fp16"), text("16"), "\"16\""),
            (Yaml, "'a'", text("a"), text("b"), "'b'"),
            (Yaml, "'a'", text("a"), text("it's"), "\"it's\""),
            (Toml, "'a'", text("a"), text("b"), "'b'"),
            (Toml, "'a'", text("a"), text("b\u{1}"), "\"b\\u0001\""),
            (Toml, "0x10", number("16"), number("32"), "0x20"),
            (Python, "'a'", text("a"), text("it's"), "'it\\'s'"),
            (
                Python,
                "True",
                Scalar::Bool(true),
                Scalar::Bool(false),
                "False",
            ),
            (Python, "1_000", number("1000"), number("2000"), "2_000"),
            (Python, "None", Scalar::Null, number("2"), "2"),
        ] {
            let written = write(format, &new, Some((raw, &old))).unwrap();
            assert_eq!(written.text, expected, "{format:?} {raw} -> {new}");
        }
        assert_eq!(write(Toml, &Scalar::Null, None), None);
    }

    #[test]
    fn sameness_sees_through_spelling() {
        assert!(is_same(&number("1e3"), &number("1000")));
        assert!(is_same(&text("8"), &number("8")));
        assert!(is_same(&text("True"), &Scalar::Bool(true)));
        assert!(!is_same(&text("x"), &number("8")));
        assert!(!is_same(&number("4"), &number("8")));
    }
}
