//! The text of one line of a JSON-lines file.
//!
//! Only the column that was asked for is kept. The rest of the line is read past: a list of
//! numbers that fills a line would take many times the line's bytes as values.

use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Column names that are told where the one asked for is missing.
const TOLD_COLUMNS: usize = 20;

/// What to do about a record that does not end where its line does.
pub(crate) const ONE_LINE: &str =
    "hint: a record has one line; only a list of records may go over several";

/// What a line holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    Text(String),
    /// The column holds something else: its kind, in words.
    ColumnNotText(&'static str),
    /// The names of the first columns there are.
    NoColumn(Vec<String>),
    /// Something else than an object: its kind, in words.
    NotAnObject(&'static str),
}

/// Reads a line. The error says what is wrong and where in the line.
pub(crate) fn parse(text: &str, column: &str) -> Result<Line, String> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let line = Object { column }
        .deserialize(&mut deserializer)
        .and_then(|line| deserializer.end().map(|()| line));
    line.map_err(|error| {
        // The parser counts lines inside the one line it was given, which would mislead.
        let whole = error.to_string();
        let problem = whole.split(" at line ").next().unwrap_or(&whole);
        let problem = format!("not JSON: {problem} at character {}", error.column());
        match error.is_eof() {
            true => format!("{problem}\n{ONE_LINE}"),
            false => problem,
        }
    })
}

/// A value of which only a text is kept.
enum Found {
    Text(String),
    Other(&'static str),
}

/// Reads past lists and objects and says what a value is.
struct Value;

impl<'de> DeserializeSeed<'de> for Value {
    type Value = Found;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Found, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// The kinds that a value and a line tell in the same words.
macro_rules! other_kinds {
    ($made:expr) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("JSON")
        }
        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok($made("null"))
        }
        fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
            Ok($made("a boolean"))
        }
        fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
            Ok($made("a number"))
        }
        fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
            Ok($made("a number"))
        }
        fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
            Ok($made("a number"))
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            while list.next_element::<IgnoredAny>()?.is_some() {}
            Ok($made("a list"))
        }
    };
}

impl<'de> Visitor<'de> for Value {
    type Value = Found;

    other_kinds!(Found::Other);

    fn visit_str<E>(self, text: &str) -> Result<Found, E> {
        Ok(Found::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Found, E> {
        Ok(Found::Text(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Found, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Found::Other("an object"))
    }
}

/// A line, of which one column is kept.
struct Object<'a> {
    column: &'a str,
}

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = Line;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Line, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = Line;

    other_kinds!(Line::NotAnObject);

    fn visit_str<E>(self, _: &str) -> Result<Line, E> {
        Ok(Line::NotAnObject("a string"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Line, A::Error> {
        let mut found = None;
        let mut columns = Vec::new();
        while let Some(name) = object.next_key::<String>()? {
            // Of a name that comes twice the last value counts, as in other readers.
            if name == self.column {
                found = Some(object.next_value_seed(Value)?);
                continue;
            }
            object.next_value::<IgnoredAny>()?;
            if columns.len() < TOLD_COLUMNS {
                columns.push(name);
            }
        }
        Ok(match found {
            Some(Found::Text(text)) => Line::Text(text),
            Some(Found::Other(kind)) => Line::ColumnNotText(kind),
            None => Line::NoColumn(columns),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(line: &str) -> Line {
        parse(line, "text").unwrap()
    }

    #[test]
    fn one_column_is_kept_whatever_stands_beside_it() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let line = format!(r#"{{"a":{{"text":[1]}},"b":{deep},"text":"é\n","c":-1.5}} "#);
        assert_eq!(text(&line), Line::Text("é\n".to_owned()));
        let twice = r#"{"text":1,"text":"last"}"#;
        assert_eq!(text(twice), Line::Text("last".to_owned()));
    }

    #[test]
    fn what_is_no_text_is_told_by_its_kind() {
        for (value, kind) in [
            ("null", "null"),
            ("true", "a boolean"),
            ("3", "a number"),
            ("-3", "a number"),
            ("0.5", "a number"),
            ("[[1],2]", "a list"),
            (r#"{"text":{"a":1}}"#, "an object"),
        ] {
            let line = format!(r#"{{"text":{value}}}"#);
            assert_eq!(text(&line), Line::ColumnNotText(kind), "{line}");
            if kind != "an object" {
                assert_eq!(text(value), Line::NotAnObject(kind), "{value}");
            }
        }
        assert_eq!(text(r#""text""#), Line::NotAnObject("a string"));
    }

    #[test]
    fn a_missing_column_tells_the_first_that_are_there() {
        let many: Vec<String> = (0..1000).map(|i| format!(r#""c{i}":{i}"#)).collect();
        let line = format!("{{{}}}", many.join(","));
        let Line::NoColumn(columns) = text(&line) else {
            panic!("no such column");
        };
        assert_eq!(columns.len(), TOLD_COLUMNS);
        assert_eq!(columns[0], "c0");
    }

    #[test]
    fn what_is_not_json_is_told_with_its_place() {
        for (line, is_cut) in [
            (r#"{"text":"a"} x"#, false),
            (r#"{"text":"a""#, true),
            ("{", true),
            (r#"{"text":oops}"#, false),
        ] {
            let problem = parse(line, "text").unwrap_err();
            assert!(problem.starts_with("not JSON: "), "{problem}");
            assert!(problem.contains(" at character "), "{problem}");
            assert!(!problem.contains(" at line "), "{problem}");
            assert_eq!(problem.contains(ONE_LINE), is_cut, "{problem}");
        }
    }
}
