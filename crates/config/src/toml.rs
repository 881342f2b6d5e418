//! Reads TOML: tables, dotted keys and inline tables, each with its place.

use toml_edit::{Document, Item, TableLike, Value};

use crate::document::Scalar;
use crate::number;
use crate::outline::{Fault, Hold, KeyPath, Layout, Leaf, MAX_DEPTH, Member, Outline, Span, Table};

/// Reads `text`, which has no byte order mark.
pub(crate) fn outline(text: &str) -> Result<Outline, Fault> {
    let document = Document::parse(text).map_err(|error| {
        let offset = error.span().map_or(0, |span| span.start);
        match error.message() {
            // The parser's own words for what is far deeper than is taken here.
            message if PARSER_STOPS.iter().any(|words| message.contains(words)) => {
                Fault::too_deep(offset)
            }
            message => Fault::syntax(offset, message.replace('\n', ", ")),
        }
    })?;
    let mut reader = Reader {
        text,
        outline: Outline::default(),
    };
    let root = Layout::Lines { opened: 0 };
    reader.table(document.as_table(), &mut KeyPath::new(), root)?;
    if reader.outline.leaves.is_empty() && reader.outline.tables.len() == 1 {
        return Err(Fault::Empty);
    }
    reader.outline.leaves.sort_by_key(|leaf| leaf.name.start);
    Ok(reader.outline)
}

/// How the parser says that something is nested too deep.
const PARSER_STOPS: [&str; 2] = ["max recursion depth", "recursion limit"];

struct Reader<'a> {
    text: &'a str,
    outline: Outline,
}

impl Reader<'_> {
    fn table(
        &mut self,
        table: &dyn TableLike,
        path: &mut KeyPath,
        layout: Layout,
    ) -> Result<(), Fault> {
        let opened = match layout {
            Layout::Lines { opened } => opened,
            Layout::Brackets { open, .. } | Layout::Arguments { open, .. } => open,
        };
        Fault::of_section(path, opened)?;
        let index = self.outline.tables.len();
        self.outline.tables.push(Table {
            path: path.clone(),
            layout,
            members: Vec::new(),
            hold: None,
        });
        let mut members: Vec<Member> = Vec::new();
        for (name, _) in table.iter() {
            let Some((key, item)) = table.get_key_value(name) else {
                continue;
            };
            path.push(name.to_owned());
            let key_span = key.span().unwrap_or_default();
            match item {
                Item::None => {}
                Item::Value(value) => {
                    let inside = self.value(value, key_span, path, layout)?;
                    members.extend(inside);
                }
                // `a.b = 1` makes a table of `a`, whose members stand among ours.
                Item::Table(inner) if inner.is_dotted() => {
                    let first = self.outline.tables.len();
                    self.table(inner, path, layout)?;
                    members.extend(self.outline.tables[first].members.clone());
                }
                // `[a.b]` makes a table of `a` that nobody opened.
                Item::Table(inner) => {
                    let header = inner.span().filter(|_| !inner.is_implicit());
                    self.section(inner, path, header)?;
                }
                Item::ArrayOfTables(_) => {
                    self.leaf(
                        path,
                        key_span.clone(),
                        key_span,
                        Scalar::Composite("a list of tables"),
                    );
                }
            }
            path.pop();
        }
        members.sort_by_key(|member| member.name.start);
        self.outline.tables[index].members = members;
        Ok(())
    }

    /// A table under a header of its own, or one that only has sub-tables.
    fn section(
        &mut self,
        table: &toml_edit::Table,
        path: &mut KeyPath,
        header: Option<Span>,
    ) -> Result<(), Fault> {
        let index = self.outline.tables.len();
        let opened = header.as_ref().map_or(0, |header| header.end);
        self.table(table, path, Layout::Lines { opened })?;
        if header.is_none() {
            // A member cannot be added to it before someone writes its header.
            self.outline.tables.remove(index);
        }
        Ok(())
    }

    /// A value under a key; gives what a neighbour can be put after.
    fn value(
        &mut self,
        value: &Value,
        key: Span,
        path: &mut KeyPath,
        layout: Layout,
    ) -> Result<Vec<Member>, Fault> {
        let span = value.span().unwrap_or_default();
        let scalar = match value {
            Value::InlineTable(inner) if inner.is_dotted() => {
                let first = self.outline.tables.len();
                self.table(inner, path, layout)?;
                self.outline.tables[first].hold =
                    Some(Hold::Unwritable("a dotted key between braces"));
                return Ok(self.outline.tables[first].members.clone());
            }
            Value::InlineTable(inner) => {
                let layout = Layout::Brackets {
                    open: span.start + 1,
                    close: span.end.saturating_sub(1),
                };
                self.table(inner, path, layout)?;
                return Ok(vec![Member {
                    name: key,
                    value: span,
                }]);
            }
            Value::String(text) => Scalar::Text(text.value().clone()),
            Value::Boolean(value) => Scalar::Bool(*value.value()),
            Value::Integer(_) | Value::Float(_) => {
                let raw = &self.text[span.clone()];
                Scalar::Number(number::canonical(raw).unwrap_or_else(|| raw.to_owned()))
            }
            Value::Datetime(_) => Scalar::Composite("a date"),
            Value::Array(_) if depth_of(value) + path.len() > MAX_DEPTH => {
                return Err(Fault::too_deep(span.start));
            }
            Value::Array(items) => Scalar::list(items.iter().map(item).collect()),
        };
        self.leaf(path, key.clone(), span.clone(), scalar);
        Ok(vec![Member {
            name: key,
            value: span,
        }])
    }

    fn leaf(&mut self, path: &KeyPath, name: Span, value: Span, scalar: Scalar) {
        let several_lines = self.text[value.clone()].starts_with("\"\"\"")
            || self.text[value.clone()].starts_with("'''");
        self.outline.leaves.push(Leaf {
            path: path.clone(),
            name,
            value,
            scalar,
            hold: several_lines.then_some(Hold::Unwritable("a text of several lines")),
        });
    }
}

/// How many lists and tables there are inside each other; the parser stops this from going on
/// without end.
fn depth_of(value: &Value) -> usize {
    let deepest = match value {
        Value::Array(items) => items.iter().map(depth_of).max(),
        Value::InlineTable(table) => table.iter().map(|(_, value)| depth_of(value)).max(),
        _ => return 0,
    };
    deepest.unwrap_or(0) + 1
}

/// A value of a list.
fn item(value: &Value) -> Scalar {
    match value {
        Value::String(text) => Scalar::Text(text.value().clone()),
        Value::Boolean(value) => Scalar::Bool(*value.value()),
        Value::Integer(number) => Scalar::Number(number.value().to_string()),
        Value::Float(number) => Scalar::Number(number.value().to_string()),
        _ => Scalar::Composite("a section"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<(String, String, &str)> {
        outline(text)
            .unwrap()
            .leaves
            .into_iter()
            .map(|leaf| {
                let raw = &text[leaf.value.clone()];
                (leaf.path.join("."), leaf.scalar.to_string(), raw)
            })
            .collect()
    }

    #[test]
    fn every_kind_of_table() {
        let text = "top = 1_000 # kilo\n\
                    vram.batch_size = 2\nvram.precision = 'bf16'\n\
                    [model] # shape\nd_model = 0x200\n\
                    [training.schedule]\nrate = { peak = 3e-4, floor.value = 0 }\n\
                    [[stage]]\nname = \"a\"\n";
        let leaves = read(text);
        let shown: Vec<(&str, &str, &str)> = leaves
            .iter()
            .map(|(path, scalar, raw)| (path.as_str(), scalar.as_str(), *raw))
            .collect();
        assert_eq!(
            shown,
            [
                ("top", "1000", "1_000"),
                ("vram.batch_size", "2", "2"),
                ("vram.precision", "\"bf16\"", "'bf16'"),
                ("model.d_model", "512", "0x200"),
                ("training.schedule.rate.peak", "3e-4", "3e-4"),
                ("training.schedule.rate.floor.value", "0", "0"),
                ("stage", "a list of tables", "stage"),
            ]
        );
    }

    #[test]
    fn what_does_not_parse_has_a_place() {
        for (text, offset) in [("a = ", 4), ("a = 1\na = 2\n", 6), ("[x\n", 2)] {
            match outline(text).unwrap_err() {
                Fault::Syntax { offset: found, .. } => assert_eq!(found, offset, "{text:?}"),
                other => panic!("{text:?}: {other:?}"),
            }
        }
        assert_eq!(outline(" # nothing\n").unwrap_err(), Fault::Empty);
    }
}
