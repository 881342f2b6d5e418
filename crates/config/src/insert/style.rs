//! The style of the neighbours: quotation marks, what joins name and value,
//! indentation.

use super::Insertion;
use crate::document::Scalar;
use crate::format::Format;
use crate::outline::{Layout, Member};

impl Insertion<'_> {
    /// A name in the quotation marks of `model`, if it has any.
    pub(super) fn key(&self, name: &str, model: &str, argument: bool) -> String {
        let quote = model.chars().next().filter(|c| matches!(c, '"' | '\''));
        let bare = !name.is_empty()
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
        match (self.file.format, quote) {
            _ if argument => name.to_owned(),
            (Format::Json, _) => serde_json::Value::from(name).to_string(),
            (Format::Python, Some(quote)) => format!("{quote}{name}{quote}"),
            (Format::Python, None) if self.in_dictionary() => format!("\"{name}\""),
            (Format::Python, None) => name.to_owned(),
            (_, Some(quote)) if bare => format!("{quote}{name}{quote}"),
            (_, None) if bare => name.to_owned(),
            _ => serde_json::Value::from(name).to_string(),
        }
    }

    pub(super) fn in_dictionary(&self) -> bool {
        let path = &self.edit.path[..self.edit.path.len() - self.names.len()];
        let table = self.outline.table(path);
        table.is_some_and(|table| matches!(table.layout, Layout::Brackets { .. }))
    }

    /// What stands between a neighbour's name and value, where it is only that.
    pub(super) fn joiner(&self, member: &Member) -> String {
        let between = self.text().get(member.name.end..member.value.start);
        let between = between.unwrap_or_default();
        let usual = match self.file.format {
            Format::Json | Format::Yaml => ": ",
            Format::Toml => " = ",
            Format::Python if self.in_dictionary() => ": ",
            Format::Python => " = ",
            Format::Shell => " ",
        };
        let sign = usual.trim();
        if self.file.format == Format::Python
            && sign == "="
            && between.trim_start().starts_with(':')
        {
            // A field of a dataclass is one only with its type.
            return format!(": {} = ", self.type_name());
        }
        let sober = between.len() <= 3 && !between.contains('\n') && between.trim() == sign;
        if sober { between } else { usual }.to_owned()
    }

    pub(super) fn type_name(&self) -> &'static str {
        match &self.edit.value {
            Scalar::Bool(_) => "bool",
            Scalar::Number(digits) if digits.contains(['.', 'e']) => "float",
            Scalar::Number(_) => "int",
            _ => "str",
        }
    }

    /// One level of indentation, as the file has it.
    pub(super) fn unit(&self) -> String {
        self.text()
            .lines()
            .map(|line| &line[..line.len() - line.trim_start().len()])
            .find(|indent| !indent.is_empty())
            .map_or_else(|| "  ".to_owned(), str::to_owned)
    }

    pub(super) fn line_start(&self, at: usize) -> usize {
        self.text()[..at]
            .rfind('\n')
            .map_or(0, |newline| newline + 1)
    }

    /// The end of the line that holds `at`, before its line ending.
    pub(super) fn line_end(&self, at: usize) -> usize {
        let rest = &self.text()[at..];
        let line = &rest[..rest.find('\n').unwrap_or(rest.len())];
        at + line.strip_suffix('\r').unwrap_or(line).len()
    }

    pub(super) fn indent_of(&self, at: usize) -> String {
        let line = &self.text()[self.line_start(at)..at];
        line[..line.len() - line.trim_start().len()].to_owned()
    }
}
