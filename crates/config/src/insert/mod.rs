//! Puts a missing key beside its neighbours, in their style: their indentation,
//! quotation marks, spaces and commas.

mod brackets;
mod lines;
mod style;

use crate::edit::{Edit, File, Splice};
use crate::error::ConfigError;
use crate::format::Format;
use crate::outline::{Hold, Layout, Leaf, Member, Outline, Table};

/// What a new key needs to be put into the text.
struct Insertion<'a> {
    file: &'a File<'a>,
    outline: &'a Outline,
    edit: &'a Edit,
    /// The names that do not exist yet: the key, after any missing sections.
    names: &'a [String],
    literal: &'a str,
    newline: &'static str,
}

pub(crate) fn insert(
    file: &File<'_>,
    outline: &Outline,
    edit: &Edit,
    literal: &str,
) -> Result<Vec<Splice>, ConfigError> {
    let Some(parents) = edit.path.len().checked_sub(1) else {
        return Err(no_place(file, edit, "an empty name is no key"));
    };
    let newline = if file.text.contains("\r\n") {
        "\r\n"
    } else {
        "\n"
    };
    // The deepest section on the way that exists.
    let depth = (0..=parents)
        .rev()
        .find(|depth| outline.table(&edit.path[..*depth]).is_some());
    let depth = depth.unwrap_or(0);
    let insertion = Insertion {
        file,
        outline,
        edit,
        names: &edit.path[depth..],
        literal,
        newline,
    };
    let in_the_way = outline.leaves.iter().find(|leaf| {
        leaf.path.len() > depth
            && leaf.path.len() < edit.path.len()
            && edit.path.starts_with(&leaf.path)
    });
    if let Some(leaf) = in_the_way {
        return insertion.under(leaf);
    }
    let Some(table) = outline.table(&edit.path[..depth]) else {
        return Err(no_place(file, edit, "the file has no sections"));
    };
    insertion.in_table(table)
}

fn no_place(file: &File<'_>, edit: &Edit, reason: &str) -> ConfigError {
    ConfigError::NoPlace {
        path: file.path.to_owned(),
        key: edit.path.join("."),
        reason: reason.to_owned(),
    }
}

impl Insertion<'_> {
    fn no_place(&self, reason: &str) -> ConfigError {
        no_place(self.file, self.edit, reason)
    }

    fn text(&self) -> &str {
        self.file.text
    }

    /// Below a key whose value is no section. `vram:` with nothing behind it is
    /// one that is still empty.
    fn under(&self, leaf: &Leaf) -> Result<Vec<Splice>, ConfigError> {
        let empty = self.file.format == Format::Yaml && leaf.value.is_empty();
        let in_block = self.outline.table(&leaf.path[..leaf.path.len() - 1]);
        let in_block = in_block.is_some_and(|table| matches!(table.layout, Layout::Lines { .. }));
        if !empty || !in_block || leaf.hold.is_some() {
            return Err(ConfigError::NotEditable {
                path: self.file.path.to_owned(),
                line: self.file.line(leaf.name.start),
                key: leaf.path.join("."),
                reason: format!("it is {} and no section that could take a key", leaf.scalar),
                hint: "make it a section, or remove it".to_owned(),
            });
        }
        let names = &self.edit.path[leaf.path.len()..];
        let indent = self.indent_of(leaf.name.start) + &self.unit();
        let line = self.block(names, &indent, "");
        Ok(vec![Splice::at(
            self.line_end(leaf.value.end),
            format!("{}{indent}{line}", self.newline),
        )])
    }

    fn in_table(&self, table: &Table) -> Result<Vec<Splice>, ConfigError> {
        if let Some(hold) = table.hold {
            let (reason, hint) = self.file.held(hold);
            let line = match (hold, table.members.first()) {
                (Hold::Aliased(offset), _) => self.file.line(offset),
                (_, Some(member)) => self.file.line(member.name.start),
                _ => 1,
            };
            return Err(ConfigError::NotEditable {
                path: self.file.path.to_owned(),
                line,
                key: self.edit.path.join("."),
                reason,
                hint,
            });
        }
        match table.layout {
            Layout::Lines { .. } if self.file.format == Format::Toml && self.names.len() > 1 => {
                Ok(vec![self.toml_section()])
            }
            Layout::Lines { opened } => self.on_a_line(table, opened).map(|splice| vec![splice]),
            Layout::Brackets { open, close } | Layout::Arguments { open, close } => {
                self.between(table, open, close)
            }
        }
    }

    /// The member to put the new one after.
    fn neighbour<'t>(&self, table: &'t Table) -> Option<(usize, &'t Member)> {
        let wanted = self.edit.after.as_ref().and_then(|path| {
            let leaf = self.outline.find(path).next()?;
            let member = |member: &Member| member.name == leaf.name;
            table.members.iter().position(member)
        });
        // In a module, constants stand together and other things follow.
        let constant = |member: &Member| {
            let plain = |leaf: &&Leaf| !leaf.scalar.is_composite();
            self.outline
                .leaves
                .iter()
                .filter(plain)
                .any(|leaf| leaf.name == member.name)
        };
        let last = table.members.len().checked_sub(1)?;
        let index = wanted.unwrap_or_else(|| match (self.file.format, table.layout) {
            (Format::Python, Layout::Lines { .. }) => {
                table.members.iter().rposition(constant).unwrap_or(last)
            }
            _ => last,
        });
        Some((index, &table.members[index]))
    }
}
