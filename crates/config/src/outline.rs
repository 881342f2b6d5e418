//! A config file as its bytes: every value, every section, and where each
//! stands.
//!
//! This is what readers produce and what the editor cuts into. Offsets count
//! bytes of the text without its byte order mark. A reader promises that
//! `text[leaf.value]` is the literal itself, without comments or anchors, so
//! that replacing those bytes replaces the value and nothing else.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use crate::document::{Document, Entry, Position, Scalar};
use crate::error::ConfigError;
use crate::format::Format;

/// The names from the top of a file down to one value.
pub type KeyPath = Vec<String>;

pub(crate) type Span = Range<usize>;

/// How deep sections and brackets may be nested, in every format. Deeper than any config is, less
/// deep than where the parsers of the formats stop, and shallow enough for every stack.
pub(crate) const MAX_DEPTH: usize = 64;

/// How long the name of a section may be with those around it, in bytes. Every value in a section
/// is kept under its whole path, so a name of megabytes would be copied once for each value.
pub(crate) const MAX_SECTION_NAME: usize = 1024;

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outline {
    /// In the order in which they stand. Only Python may repeat a path.
    pub leaves: Vec<Leaf>,
    /// What can take new members; the top level first.
    pub tables: Vec<Table>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Leaf {
    pub path: KeyPath,
    pub name: Span,
    /// Empty where a key has no value; then it lies where one would begin.
    pub value: Span,
    pub scalar: Scalar,
    /// Why these bytes must stay as they are.
    pub hold: Option<Hold>,
}

/// What forbids changing a value where it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It is part of an anchored node (at this offset) that other places repeat.
    Anchored(usize),
    /// It is repeated here from an anchored node by the alias at this offset.
    Aliased(usize),
    /// It comes from a merge key; a key of one's own outweighs it.
    Merged(usize),
    /// Its type or syntax is nothing the editor writes.
    Unwritable(&'static str),
    /// The same name is set again, under a condition, at this offset.
    Conditional(usize),
}

/// A section, with what is needed to add a member in its style.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Table {
    pub path: KeyPath,
    pub layout: Layout,
    pub members: Vec<Member>,
    pub hold: Option<Hold>,
}

/// A direct member that a new one can be put after.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Member {
    pub name: Span,
    /// To the end of everything below it.
    pub value: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// A member a line: YAML blocks, TOML tables, Python modules and classes.
    /// The offset is the end of the line that opens the section.
    Lines { opened: usize },
    /// Members between brackets, which stand at these offsets.
    Brackets { open: usize, close: usize },
    /// Keyword arguments of a Python call, between its brackets.
    Arguments { open: usize, close: usize },
}

/// What keeps a text from being an outline.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    Empty,
    NotSections,
    Syntax {
        offset: usize,
        message: String,
    },
    Duplicate {
        key: String,
        first: usize,
        second: usize,
    },
}

impl Fault {
    pub(crate) fn syntax(offset: usize, message: impl Into<String>) -> Fault {
        Fault::Syntax {
            offset,
            message: message.into(),
        }
    }

    /// Sections or brackets inside of others, more than anybody writes.
    pub(crate) fn too_deep(offset: usize) -> Fault {
        Fault::syntax(offset, format!("nested more than {MAX_DEPTH} levels deep"))
    }

    /// Refuses a section that is too deep or whose name is too long.
    pub(crate) fn of_section(path: &[String], offset: usize) -> Result<(), Fault> {
        // The file itself is the first level.
        if path.len() >= MAX_DEPTH {
            return Err(Fault::too_deep(offset));
        }
        if path.iter().map(String::len).sum::<usize>() > MAX_SECTION_NAME {
            return Err(Fault::syntax(
                offset,
                format!("the name of this section is longer than {MAX_SECTION_NAME} bytes"),
            ));
        }
        Ok(())
    }

    /// The same, for a reader who has the file before them.
    pub(crate) fn in_file(self, path: &Path, format: Format, text: &str) -> ConfigError {
        let path = path.to_owned();
        match self {
            Fault::Empty => ConfigError::EmptyFile {
                path,
                smallest: format.smallest(),
            },
            Fault::NotSections => ConfigError::NotSections {
                path,
                example: format.example(),
            },
            Fault::Syntax { offset, message } => {
                let Position { line, column } = Position::of(text, offset);
                ConfigError::Syntax {
                    path,
                    line,
                    column,
                    message,
                    advice: format.advice(),
                }
            }
            Fault::Duplicate { key, first, second } => ConfigError::DuplicateKey {
                path,
                key,
                first_line: Position::of(text, first).line,
                line: Position::of(text, second).line,
            },
        }
    }
}

impl Outline {
    pub(crate) fn table(&self, path: &[String]) -> Option<&Table> {
        self.tables.iter().find(|table| table.path == path)
    }

    /// Every leaf with this path: none, one, or in Python several.
    pub(crate) fn find<'a>(&'a self, path: &'a [String]) -> impl Iterator<Item = &'a Leaf> {
        self.leaves.iter().filter(move |leaf| leaf.path == path)
    }

    /// What the settings see of it.
    pub(crate) fn document(&self, path: &Path, format: Format, text: &str) -> Document {
        let places = Places::of(text);
        let mut sections: Vec<String> = Vec::new();
        let mut known: HashSet<&str> = HashSet::new();
        let tops = self.tables.iter().map(|table| &table.path);
        let tops = tops.chain(self.leaves.iter().map(|leaf| &leaf.path));
        for name in tops.filter_map(|path| path.first()) {
            if known.insert(name) {
                sections.push(name.clone());
            }
        }
        Document {
            path: path.to_owned(),
            format,
            entries: self
                .leaves
                .iter()
                .map(|leaf| Entry {
                    path: leaf.path.clone(),
                    scalar: leaf.scalar.clone(),
                    name_at: places.of_offset(leaf.name.start),
                    value_at: places.of_offset(leaf.value.start),
                })
                .collect(),
            sections,
        }
    }
}

/// Where lines begin and how many characters stand before each block, so that an offset becomes a
/// position without a look at all of its line: a file may be one line.
struct Places<'a> {
    text: &'a str,
    starts: Vec<usize>,
    /// Characters before every `BLOCK` bytes.
    characters: Vec<usize>,
}

const BLOCK: usize = 256;

impl<'a> Places<'a> {
    fn of(text: &'a str) -> Self {
        let newlines = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let starts = std::iter::once(0).chain(newlines.map(|(index, _)| index + 1));
        let blocks = text.as_bytes().chunks(BLOCK);
        let counted = blocks.scan(0, |before, block| {
            *before += num_characters(block);
            Some(*before)
        });
        Places {
            text,
            starts: starts.collect(),
            characters: std::iter::once(0).chain(counted).collect(),
        }
    }

    fn of_offset(&self, offset: usize) -> Position {
        let offset = offset.min(self.text.len());
        let line = self.starts.partition_point(|start| *start <= offset);
        let start = self.starts[line - 1];
        Position {
            line,
            column: self.before(offset) - self.before(start) + 1,
        }
    }

    /// How many characters begin before an offset.
    fn before(&self, offset: usize) -> usize {
        let block = offset / BLOCK;
        self.characters[block] + num_characters(&self.text.as_bytes()[block * BLOCK..offset])
    }
}

/// How many characters of a text begin among some of its bytes.
fn num_characters(bytes: &[u8]) -> usize {
    let begins = |byte: &&u8| **byte & 0b1100_0000 != 0b1000_0000;
    bytes.iter().filter(begins).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_that_counting_finds() {
        let line = "añ→😀 ".repeat(BLOCK / 3);
        let text = format!("{line}\n\n{line}{line}\nend");
        let places = Places::of(&text);
        for (offset, _) in text.char_indices().chain([(text.len(), ' ')]) {
            assert_eq!(places.of_offset(offset), Position::of(&text, offset));
        }
    }
}

/// An outline as the readers' tests compare it.
#[cfg(test)]
pub(crate) mod rows {
    use super::Outline;

    /// Path, value, the bytes the value stands in, and whether they are held.
    pub(crate) type Row = (String, String, String, bool);

    pub(crate) fn row(path: &str, scalar: &str, raw: &str, held: bool) -> Row {
        (path.to_owned(), scalar.to_owned(), raw.to_owned(), held)
    }

    pub(crate) fn rows(outline: &Outline, text: &str) -> Vec<Row> {
        let leaves = outline.leaves.iter();
        leaves
            .map(|leaf| {
                let (path, scalar) = (leaf.path.join("."), leaf.scalar.to_string());
                row(
                    &path,
                    &scalar,
                    &text[leaf.value.clone()],
                    leaf.hold.is_some(),
                )
            })
            .collect()
    }
}
