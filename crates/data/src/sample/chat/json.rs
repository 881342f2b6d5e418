//! JSON as Python's `json.dumps` writes it.
//!
//! Chat templates print tools and arguments with a `tojson` filter that is Python's writer, not
//! Jinja's: nothing is escaped for HTML, and there are spaces after commas and colons. A model
//! was trained on that spelling, so it is written the same here.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// A template is a stranger's program: it may not ask for memory without bound.
const WIDEST_INDENT: usize = 64;

/// How the text is laid out; the arguments of `json.dumps`.
#[derive(Debug, Clone)]
struct Style {
    item_separator: String,
    key_separator: String,
    indent: Option<String>,
    sort_keys: bool,
    ensure_ascii: bool,
}

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent = match arguments.get::<Option<Value>>("indent")? {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(number) => match usize::try_from(number)? {
            width if width <= WIDEST_INDENT => Some(" ".repeat(width)),
            width => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("an indent of {width} spaces is too wide"),
                ));
            }
        },
    };
    let separators: Option<(String, String)> = arguments
        .get::<Option<Value>>("separators")?
        .map(|pair| {
            let part = |index| pair.get_item_by_index(index).map(|text| text.to_string());
            Ok::<_, Error>((part(0)?, part(1)?))
        })
        .transpose()?;
    // Python leaves the space out where a line break follows the comma.
    let between = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) =
        separators.unwrap_or_else(|| (between.to_owned(), ": ".to_owned()));
    let style = Style {
        item_separator,
        key_separator,
        indent,
        sort_keys: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: arguments
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
    };
    arguments.assert_all_used()?;
    let mut text = String::new();
    style.write(value, 0, &mut text)?;
    Ok(text)
}

impl Style {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => text.push_str(&value.to_string()),
            ValueKind::Number => text.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), text),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(("[", "]"), &items, depth, text, |item, text| {
                    self.write(item, depth + 1, text)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_items(("{", "}"), &keys, depth, text, |key, text| {
                    self.write_string(&key.to_string(), text);
                    text.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, text)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson cannot write a value that is {kind}"),
                ));
            }
        }
        Ok(())
    }

    fn write_items(
        &self,
        (open, close): (&str, &str),
        items: &[Value],
        depth: usize,
        text: &mut String,
        mut write: impl FnMut(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        text.push_str(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                text.push_str(&self.item_separator);
            }
            self.break_line(depth + 1, text);
            write(item, text)?;
        }
        if !items.is_empty() {
            self.break_line(depth, text);
        }
        text.push_str(close);
        Ok(())
    }

    fn break_line(&self, depth: usize, text: &mut String) {
        if let Some(indent) = &self.indent {
            text.push('\n');
            text.push_str(&indent.repeat(depth));
        }
    }

    fn write_string(&self, string: &str, text: &mut String) {
        text.push('"');
        for character in string.chars() {
            match character {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{08}' => text.push_str("\\b"),
                '\u{0C}' => text.push_str("\\f"),
                other if other < ' ' || (self.ensure_ascii && !other.is_ascii()) => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        let _ = write!(text, "\\u{unit:04x}");
                    }
                }
                other => text.push(other),
            }
        }
        text.push('"');
    }
}

/// How Python prints `value` if it is a float.
pub(super) fn python_float(value: &Value) -> Option<String> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok().map(float))?
}

/// Python's `repr` of a float: the shortest digits that read back the same, with an exponent of
/// at least two digits below 1e-4 and from 1e16 on.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned();
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{number:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelled_as_python_spells_them() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-2.5e300, "-2.5e+300"),
        ] {
            assert_eq!(float(number), text);
        }
    }
}
