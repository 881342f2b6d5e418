//! What a YAML scalar is: a number, a switch, nothing, or text.
//!
//! The core schema of YAML 1.2, widened by what YAML 1.1 programs (PyYAML, which
//! most training code uses) write: `yes`, `on`, `1_000`.

use saphyr_parser::ScalarStyle;

use crate::document::Scalar;
use crate::number;

pub(super) fn of_node(text: &str, style: ScalarStyle, tag: Option<&str>) -> Scalar {
    match (tag, style) {
        (Some("str"), _) => Scalar::Text(text.to_owned()),
        (Some("int" | "float" | "bool" | "null"), _) | (None, ScalarStyle::Plain) => plain(text),
        (None, _) => Scalar::Text(text.to_owned()),
        (Some(_), _) => Scalar::Composite("a value with a tag of its own"),
    }
}

/// An unquoted scalar.
fn plain(text: &str) -> Scalar {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Scalar::Null,
        _ => {}
    }
    for (word, value) in [
        ("true", true),
        ("yes", true),
        ("on", true),
        ("false", false),
        ("no", false),
        ("off", false),
    ] {
        if text.eq_ignore_ascii_case(word) {
            return Scalar::Bool(value);
        }
    }
    match number::canonical(text) {
        Some(number) => Scalar::Number(number),
        None => Scalar::Text(text.to_owned()),
    }
}

/// Whether `text` can stand without quotation marks, in blocks and between
/// brackets, and is still that text. Narrower than YAML allows.
pub(crate) fn plain_is_safe(text: &str) -> bool {
    let inner = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | '+');
    text.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '/' | '.'))
        && text.chars().all(inner)
        && matches!(plain(text), Scalar::Text(_))
        // Three dots end a document; digits and dashes are a date in YAML 1.1.
        && !text.starts_with("...")
        && text.contains(|c: char| c.is_alphabetic() || c == '/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_go_without_quotation_marks() {
        for text in [
            "bf16",
            "16-mixed",
            "8bit",
            "data/corpus.txt",
            "/tmp/x",
            "none",
        ] {
            assert!(plain_is_safe(text), "{text}");
        }
        for text in [
            "",
            "true",
            "No",
            "null",
            "1e5",
            "0x10",
            "2024-01-01",
            "a b",
            "a:",
            "#x",
            "-a",
            "...",
            "a, b",
            "é: 1",
            "16",
            "1_0",
        ] {
            assert!(!plain_is_safe(text), "{text}");
        }
    }
}
