//! What any config file looks like once read: leaves with a path and a place.
//!
//! This is the border between readers (one for each format) and
//! the registry of settings. A reader knows syntax and no setting; the registry
//! knows settings and no syntax.

use std::fmt;
use std::path::PathBuf;

use crate::format::Format;

/// A file, flattened to its leaves in the order they were written.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    pub path: PathBuf,
    pub format: Format,
    pub entries: Vec<Entry>,
    /// Names at the top level, with or without leaves below them.
    pub sections: Vec<String>,
}

/// One leaf: `vram` → `batch_size` → 4, at a line and column.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub path: Vec<String>,
    pub scalar: Scalar,
    pub name_at: Position,
    pub value_at: Position,
}

impl Entry {
    /// The path as settings are declared: `vram.batch_size`.
    pub fn key(&self) -> String {
        self.path.join(".")
    }
}

/// 1-based, columns in characters, as editors count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    pub line: usize,
    pub column: usize,
}

impl Position {
    /// The place of byte `offset` in `text`.
    pub fn of(text: &str, offset: usize) -> Position {
        let mut end = offset.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let before = &text[..end];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Position {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

/// A leaf's value as its file typed it. Numbers stay text until a setting says
/// whether they are integers or floats, so that no digit of a seed is lost.
#[derive(Clone, Debug, PartialEq)]
pub enum Scalar {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    /// A list of plain values, in order.
    List(Vec<Scalar>),
    /// Something no setting takes; the words name it in an error.
    Composite(&'static str),
}

impl Scalar {
    /// What a list of these is: a list where all are plain, else something that is not read.
    pub(crate) fn list(items: Vec<Scalar>) -> Scalar {
        let plain = |item: &Scalar| !matches!(item, Scalar::List(_) | Scalar::Composite(_));
        match items.iter().all(plain) {
            true => Scalar::List(items),
            false => Scalar::Composite("a list"),
        }
    }

    /// Whether it is more than one value.
    pub(crate) fn is_composite(&self) -> bool {
        matches!(self, Scalar::List(_) | Scalar::Composite(_))
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Null => formatter.write_str("null"),
            Scalar::Bool(value) => write!(formatter, "{value}"),
            Scalar::Number(text) => formatter.write_str(text),
            Scalar::Text(text) => write!(formatter, "{text:?}"),
            Scalar::List(items) => {
                let items: Vec<String> = items.iter().map(Scalar::to_string).collect();
                write!(formatter, "[{}]", items.join(", "))
            }
            Scalar::Composite(what) => formatter.write_str(what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_characters_and_survive_any_offset() {
        let text = "ab\nçd\n";
        assert_eq!(Position::of(text, 0), Position { line: 1, column: 1 });
        assert_eq!(Position::of(text, 5), Position { line: 2, column: 2 });
        assert_eq!(Position::of(text, 4), Position { line: 2, column: 1 });
        assert_eq!(Position::of(text, 999), Position { line: 3, column: 1 });
    }
}
