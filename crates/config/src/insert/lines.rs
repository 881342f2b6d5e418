//! Members on lines of their own: YAML blocks, TOML tables, Python modules and
//! classes.

use super::Insertion;
use crate::edit::Splice;
use crate::error::ConfigError;
use crate::format::Format;
use crate::outline::Table;

impl Insertion<'_> {
    pub(super) fn on_a_line(&self, table: &Table, opened: usize) -> Result<Splice, ConfigError> {
        if self.file.format == Format::Python && self.names.len() > 1 {
            return Err(self.no_place("there is no dictionary or class of that name in it"));
        }
        let Some((_, member)) = self.neighbour(table) else {
            return match self.file.format {
                Format::Toml if table.path.is_empty() => {
                    let line = self.line_text("", " = ");
                    Ok(Splice::at(
                        0,
                        format!("{line}{}{}", self.newline, self.newline),
                    ))
                }
                Format::Toml => {
                    let line = self.line_text("", " = ");
                    Ok(Splice::at(
                        self.line_end(opened),
                        format!("{}{line}", self.newline),
                    ))
                }
                _ => Err(self.no_place("no other key stands there whose style it could follow")),
            };
        };
        let start = self.line_start(member.name.start);
        let mut lead = &self.text()[start..member.name.start];
        // Before the name stand its indentation and, in TOML, a dotted prefix.
        if self.file.format != Format::Toml {
            lead = &lead[..lead.len() - lead.trim_start().len()];
        }
        let line = match self.file.format {
            Format::Yaml => self.block(self.names, lead, &self.text()[member.name.clone()]),
            _ => self.line_text(&self.text()[member.name.clone()], &self.joiner(member)),
        };
        Ok(Splice::at(
            self.line_end(member.value.end),
            format!("{}{lead}{line}", self.newline),
        ))
    }

    pub(super) fn line_text(&self, model: &str, joiner: &str) -> String {
        let name = self.key(&self.names[self.names.len() - 1], model, false);
        format!("{name}{joiner}{}", self.literal)
    }

    /// A YAML key with its value, behind `lead`, sections on lines of their own.
    pub(super) fn block(&self, names: &[String], lead: &str, model: &str) -> String {
        let mut text = String::new();
        let mut indent = lead.to_owned();
        for (index, name) in names.iter().enumerate() {
            if index > 0 {
                indent += &self.unit();
                text += self.newline;
                text += &indent;
            }
            text += &self.key(name, model, false);
            text.push(':');
        }
        format!("{text} {}", self.literal)
    }

    /// `[section]` at the end of the file.
    pub(super) fn toml_section(&self) -> Splice {
        let text = self.text();
        let newline = self.newline;
        let sections: Vec<String> = self.edit.path[..self.edit.path.len() - 1]
            .iter()
            .map(|name| self.key(name, "", false))
            .collect();
        let gap = if text.ends_with('\n') || text.is_empty() {
            newline.to_owned()
        } else {
            newline.repeat(2)
        };
        let line = self.line_text("", " = ");
        // A file that had no final newline gets none.
        let end = if text.ends_with('\n') { newline } else { "" };
        Splice::at(
            text.len(),
            format!("{gap}[{}]{newline}{line}{end}", sections.join(".")),
        )
    }
}
