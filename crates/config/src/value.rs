//! The types a setting can have: what each accepts and how it is read.
//!
//! A value arrives either typed, from a file (`4`, `true`, `"fp16"`), or as
//! bare text, from a flag or the environment. Files are held to their types, so
//! that `"4"` where a number belongs is told rather than guessed.

use std::fmt;
use std::ops::Bound;
use std::path::PathBuf;

use serde::Serialize;

use crate::Bytes;
use crate::document::Scalar;
use crate::lossless;
use cinch_architecture::nearest_name;

/// A value that passed its setting's type and range.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Value {
    Bool(bool),
    Unsigned(u64),
    Float(f64),
    Text(String),
    Size(Bytes),
    Path(#[serde(serialize_with = "lossless::shown")] PathBuf),
}

impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Bool(value) => write!(formatter, "{value}"),
            Value::Unsigned(value) => write!(formatter, "{value}"),
            // Very small numbers as people write them: 1e-8, not 0.00000001.
            Value::Float(value) if *value != 0.0 && value.abs() < 1e-3 => {
                write!(formatter, "{value:e}")
            }
            Value::Float(value) => write!(formatter, "{value:?}"),
            Value::Text(text) => formatter.write_str(text),
            Value::Size(size) => write!(formatter, "{size}"),
            Value::Path(path) => write!(formatter, "{}", cinch_files::shown(path)),
        }
    }
}

/// A setting's type with its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Bool,
    Unsigned {
        min: u64,
        max: u64,
    },
    Float(Interval),
    Text,
    Choice(&'static [&'static str]),
    /// One of some words, or a count.
    ChoiceOrCount(&'static [&'static str]),
    Size,
    Path,
}

/// A range of floats whose ends may be open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub lower: Bound<f64>,
    pub upper: Bound<f64>,
}

impl Interval {
    pub const ABOVE_ZERO: Interval = Interval {
        lower: Bound::Excluded(0.0),
        upper: Bound::Unbounded,
    };
    pub const FROM_ZERO: Interval = Interval {
        lower: Bound::Included(0.0),
        upper: Bound::Unbounded,
    };
    /// [0, 1): probabilities and decay rates that must not reach one.
    pub const BELOW_ONE: Interval = Interval {
        lower: Bound::Included(0.0),
        upper: Bound::Excluded(1.0),
    };

    pub fn contains(&self, number: f64) -> bool {
        number.is_finite() && std::ops::RangeBounds::contains(&(self.lower, self.upper), &number)
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lower {
            Bound::Included(end) => write!(formatter, "a number from {end}")?,
            Bound::Excluded(end) => write!(formatter, "a number above {end}")?,
            Bound::Unbounded => formatter.write_str("a number")?,
        }
        match self.upper {
            Bound::Included(end) => write!(formatter, " up to {end}"),
            Bound::Excluded(end) => write!(formatter, " to just below {end}"),
            Bound::Unbounded => Ok(()),
        }
    }
}

/// Why a value was refused, beyond "not what is accepted".
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Refusal {
    pub hint: Option<String>,
}

impl Refusal {
    fn with_hint(hint: impl Into<String>) -> Self {
        Refusal {
            hint: Some(hint.into()),
        }
    }
}

impl Kind {
    /// What to write, for error messages and help.
    pub fn accepts(&self) -> String {
        let quoted = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
            words.join(", ")
        };
        match self {
            Kind::Bool => "true or false".to_owned(),
            Kind::Unsigned { min, max: u64::MAX } => format!("an integer, {min} or more"),
            Kind::Unsigned { min, max } => format!("an integer from {min} to {max}"),
            Kind::Float(interval) => interval.to_string(),
            Kind::Text => "a text that is not empty".to_owned(),
            Kind::Choice(words) => format!("one of {}", quoted(words)),
            Kind::ChoiceOrCount(words) => format!("one of {}, or a number", quoted(words)),
            Kind::Size => "a size such as \"8gb\", \"512mb\" or 24 (GiB)".to_owned(),
            Kind::Path => "a path that is not empty".to_owned(),
        }
    }

    /// Reads a leaf of a file, which has a type of its own. `Scalar::Null` is
    /// the caller's to handle: it means "not given".
    pub(crate) fn read(&self, scalar: &Scalar) -> Result<Value, Refusal> {
        match (self, scalar) {
            (Kind::Bool, Scalar::Bool(value)) => Ok(Value::Bool(*value)),
            (Kind::Unsigned { .. } | Kind::Float(_), Scalar::Number(text))
            | (Kind::Text | Kind::Choice(_) | Kind::Path, Scalar::Text(text))
            | (Kind::Size | Kind::ChoiceOrCount(_), Scalar::Number(text) | Scalar::Text(text)) => {
                self.parse(text)
            }
            (_, Scalar::Text(text)) if self.parse(text).is_ok() => {
                Err(Refusal::with_hint("remove the quotation marks"))
            }
            (Kind::Bool, Scalar::Number(text)) if self.parse(text).is_ok() => Err(
                Refusal::with_hint(format!("write {} instead", text.trim() == "1")),
            ),
            _ => Err(Refusal::default()),
        }
    }

    /// Reads bare text, as a flag or the environment carries it.
    pub(crate) fn parse(&self, text: &str) -> Result<Value, Refusal> {
        // Spaces are part of a file's name.
        let text = match self {
            Kind::Path => text,
            _ => text.trim(),
        };
        match self {
            Kind::Bool => match text.to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" | "on" => Ok(Value::Bool(true)),
                "false" | "0" | "no" | "off" => Ok(Value::Bool(false)),
                _ => Err(Refusal::default()),
            },
            Kind::Unsigned { min, max } => parse_unsigned(text)
                .filter(|number| (min..=max).contains(&number))
                .map(Value::Unsigned)
                .ok_or_else(Refusal::default),
            Kind::Float(interval) => text
                .parse::<f64>()
                .ok()
                .filter(|&number| interval.contains(number))
                .map(Value::Float)
                .ok_or_else(Refusal::default),
            Kind::Choice(words) => choose(words, text).map(Value::Text),
            Kind::ChoiceOrCount(words) => match parse_unsigned(text) {
                Some(count) => Ok(Value::Unsigned(count)),
                None => choose(words, text).map(Value::Text),
            },
            Kind::Size => text
                .parse::<Bytes>()
                .map(Value::Size)
                .map_err(|error| match error {
                    crate::ConfigError::InvalidSize { reason, .. } => Refusal::with_hint(reason),
                    _ => Refusal::default(),
                }),
            Kind::Text if !text.is_empty() => Ok(Value::Text(text.to_owned())),
            Kind::Path if !text.trim().is_empty() => Ok(Value::Path(PathBuf::from(text))),
            Kind::Text | Kind::Path => Err(Refusal::default()),
        }
    }
}

/// `1e5` is an integer too: people write step counts that way. Exact up to
/// 2^53, beyond which a float no longer names one integer.
fn parse_unsigned(text: &str) -> Option<u64> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    text.parse::<u64>().ok().or_else(|| {
        text.parse::<f64>()
            .ok()
            .filter(|number| number.fract() == 0.0 && (0.0..=EXACT).contains(number))
            .map(|number| number as u64)
    })
}

fn choose(words: &[&'static str], text: &str) -> Result<String, Refusal> {
    words
        .iter()
        .find(|word| word.eq_ignore_ascii_case(text))
        .map(|word| (*word).to_owned())
        .ok_or_else(|| Refusal {
            hint: nearest_name(text, words.iter().copied())
                .map(|word| format!("did you mean \"{word}\"?")),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: Kind = Kind::Unsigned { min: 1, max: 1000 };

    fn number(text: &str) -> Scalar {
        Scalar::Number(text.to_owned())
    }

    fn text(text: &str) -> Scalar {
        Scalar::Text(text.to_owned())
    }

    #[test]
    fn integers_are_exact_and_in_range() {
        assert_eq!(COUNT.read(&number("1e2")), Ok(Value::Unsigned(100)));
        assert_eq!(COUNT.read(&number("100.0")), Ok(Value::Unsigned(100)));
        let any = Kind::Unsigned {
            min: 0,
            max: u64::MAX,
        };
        assert_eq!(
            any.read(&number("18446744073709551615")),
            Ok(Value::Unsigned(u64::MAX))
        );
        for wrong in [
            "0",
            "1001",
            "-1",
            "1.5",
            "1e300",
            "18446744073709551616",
            "",
        ] {
            assert!(COUNT.read(&number(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn floats_respect_open_ends() {
        let rate = Kind::Float(Interval::BELOW_ONE);
        assert_eq!(rate.parse("0"), Ok(Value::Float(0.0)));
        assert_eq!(rate.parse("1e-08"), Ok(Value::Float(1e-8)));
        for wrong in ["1", "1.0", "-0.1", "nan", "inf", "x"] {
            assert!(rate.parse(wrong).is_err(), "{wrong}");
        }
        assert!(Kind::Float(Interval::ABOVE_ZERO).parse("0").is_err());
    }

    #[test]
    fn files_are_held_to_their_types() {
        let hint = |kind: Kind, scalar: Scalar| kind.read(&scalar).unwrap_err().hint;
        assert_eq!(
            hint(COUNT, text("4")).as_deref(),
            Some("remove the quotation marks")
        );
        assert_eq!(hint(COUNT, text("four")), None);
        assert_eq!(
            hint(Kind::Bool, number("1")).as_deref(),
            Some("write true instead")
        );
        assert_eq!(
            hint(Kind::Bool, number("0")).as_deref(),
            Some("write false instead")
        );
        assert_eq!(hint(Kind::Text, Scalar::Bool(true)), None);
        assert_eq!(hint(COUNT, Scalar::Composite("a list")), None);
        assert_eq!(
            hint(Kind::Choice(&["linear", "cosine"]), text("cosin")).as_deref(),
            Some("did you mean \"cosine\"?")
        );
        assert_eq!(
            hint(Kind::Size, number("-4")).as_deref(),
            Some("a size cannot be negative")
        );
    }

    #[test]
    fn values_are_shown_as_people_write_them() {
        for (value, shown) in [
            (Value::Float(1e-8), "1e-8"),
            (Value::Float(3e-4), "3e-4"),
            (Value::Float(0.1), "0.1"),
            (Value::Float(1.0), "1.0"),
            (Value::Float(0.0), "0.0"),
            (Value::Size(Bytes::from_gib(8)), "8.00 GiB"),
            (Value::Unsigned(16), "16"),
        ] {
            assert_eq!(value.to_string(), shown);
        }
    }
}
