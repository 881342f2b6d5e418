//! Members between brackets: JSON, YAML flow maps, inline tables, dictionaries
//! and arguments of calls.

use super::Insertion;
use crate::edit::Splice;
use crate::error::ConfigError;
use crate::format::Format;
use crate::outline::{Layout, Table};

impl Insertion<'_> {
    pub(super) fn between(
        &self,
        table: &Table,
        open: usize,
        close: usize,
    ) -> Result<Vec<Splice>, ConfigError> {
        let arguments = matches!(table.layout, Layout::Arguments { .. });
        let Some((_, member)) = self.neighbour(table) else {
            return Ok(vec![self.between_nothing(open, close, arguments)]);
        };
        let text = self.text();
        let before = &text[open.min(member.name.start)..member.name.start];
        let space = &before[before.trim_end().len()..];
        // The first key of a snippet without braces begins a line as well.
        let begins_file =
            member.name.start == space.len() && text.contains('\n') && !text.starts_with('{');
        let indent = match space.rfind('\n') {
            Some(newline) => Some(&space[newline + 1..]),
            None => begins_file.then_some(space),
        };
        let end = member.value.end;
        let comma = self.comma_after(end, close);
        let model = &text[member.name.clone()];
        let joiner = self.joiner(member);
        let new = self.member(model, &joiner, indent, arguments);
        let trailing = if comma.is_some() { "," } else { "" };
        let place = comma.map_or(end, |comma| comma + 1);
        let mut splices = Vec::new();
        let separator = match indent {
            Some(indent) => format!("{}{indent}", self.newline),
            None if space.is_empty() && before.contains(',') => String::new(),
            None if joiner == ":" => String::new(),
            None => " ".to_owned(),
        };
        // A comment behind the neighbour stays with it.
        let line_end = self.line_end(place);
        let rest_is_comment = line_end <= close && self.skip_trivia(place, line_end) == line_end;
        let place_new = if indent.is_some() && rest_is_comment {
            line_end
        } else {
            place
        };
        if comma.is_none() {
            if place_new == place {
                return Ok(vec![Splice::at(end, format!(",{separator}{new}"))]);
            }
            splices.push(Splice::at(end, ",".to_owned()));
        }
        splices.push(Splice::at(place_new, format!("{separator}{new}{trailing}")));
        Ok(splices)
    }

    pub(super) fn between_nothing(&self, open: usize, close: usize, arguments: bool) -> Splice {
        let inner = &self.text()[open..close];
        let joiner = match self.file.format {
            Format::Toml => " = ",
            _ if arguments => "=",
            _ => ": ",
        };
        if inner.contains('\n') {
            let indent = self.indent_of(close) + &self.unit();
            let new = self.member("", joiner, Some(&indent), arguments);
            let place = open + inner.trim_end().len();
            return Splice::at(place, format!("{}{indent}{new}", self.newline));
        }
        let new = self.member("", joiner, None, arguments);
        let new = if self.file.format == Format::Toml {
            format!(" {new} ")
        } else {
            new
        };
        if inner.trim().is_empty() {
            Splice {
                span: open..close,
                text: new,
            }
        } else {
            Splice::at(close, new)
        }
    }

    /// The member's text; missing sections become brackets of their own.
    pub(super) fn member(
        &self,
        model: &str,
        joiner: &str,
        indent: Option<&str>,
        arguments: bool,
    ) -> String {
        let (name, sections) = match self.names.split_last() {
            Some((name, sections)) => (name, sections),
            None => return String::new(),
        };
        let mut text = String::new();
        let mut closing = String::new();
        let mut inside = indent.map(str::to_owned);
        let padding = if self.file.format == Format::Toml {
            " "
        } else {
            ""
        };
        for (depth, section) in sections.iter().enumerate() {
            text += &self.key(section, model, arguments && depth == 0);
            text += joiner;
            text.push('{');
            match &mut inside {
                Some(indent) => {
                    closing = format!("{}{indent}}}{closing}", self.newline);
                    *indent += &self.unit();
                    text += self.newline;
                    text += indent;
                }
                None => {
                    text += padding;
                    closing = format!("{padding}}}{closing}");
                }
            }
        }
        text += &self.key(name, model, arguments && sections.is_empty());
        text += joiner;
        text += self.literal;
        text + &closing
    }

    pub(super) fn comma_after(&self, at: usize, close: usize) -> Option<usize> {
        let next = self.skip_trivia(at, close);
        self.text()[next..close].starts_with(',').then_some(next)
    }

    /// The first byte from `at` up to `end` that is no space and no comment.
    pub(super) fn skip_trivia(&self, mut at: usize, end: usize) -> usize {
        while at < end {
            let rest = &self.text()[at..end];
            let json = self.file.format == Format::Json;
            let length = if rest.starts_with(char::is_whitespace) {
                rest.find(|c: char| !c.is_whitespace())
            } else if json && rest.starts_with("/*") {
                match rest.find("*/") {
                    Some(found) => Some(found + 2),
                    // It goes on beyond the end.
                    None => break,
                }
            } else if json && rest.starts_with("//") || !json && rest.starts_with('#') {
                rest.find('\n')
            } else {
                break;
            };
            at += length.unwrap_or(rest.len());
        }
        at
    }
}
