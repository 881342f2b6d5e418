//! Reads YAML: what each key means after aliases and merge keys, and where it
//! is written.

mod node;
mod scalar;

use std::collections::{BTreeMap, BTreeSet};

use node::{Content, Node, compose};
use saphyr_parser::ScalarStyle;
pub(crate) use scalar::plain_is_safe;

use crate::document::Scalar;
use crate::outline::{Fault, Hold, KeyPath, Layout, Leaf, MAX_DEPTH, Member, Outline, Table};

/// How many values aliases may add to those that are written: far more than a config has. Aliases
/// of aliases of aliases can be more than any memory holds.
const MAX_REPEATED: usize = 100_000;
const MERGE: &str = "<<";

/// Reads `text`, which has no byte order mark.
pub(crate) fn outline(text: &str) -> Result<Outline, Fault> {
    let composed = compose(text).or_else(|fault| match with_brackets_drawn_up(text) {
        Some(drawn_up) => compose(&drawn_up).map_err(|_| fault),
        None => Err(fault),
    });
    let Some(root) = composed? else {
        return Err(Fault::Empty);
    };
    match &root.content {
        Content::Map { .. } => {}
        Content::Scalar { text, .. } if text.is_empty() => return Err(Fault::Empty),
        _ => return Err(Fault::NotSections),
    }
    let mut reader = Reader {
        text,
        anchors: BTreeMap::new(),
        repeated: BTreeSet::new(),
        written: 0,
        visits: 0,
        depth: 0,
        outline: Outline::default(),
    };
    reader.collect(&root);
    reader.map(&root, &mut KeyPath::new(), None)?;
    Ok(reader.outline)
}

struct Reader<'a> {
    text: &'a str,
    anchors: BTreeMap<usize, &'a Node>,
    /// Anchors that some alias names.
    repeated: BTreeSet<usize>,
    /// Nodes in the file.
    written: usize,
    /// Nodes looked at, aliases followed.
    visits: usize,
    /// Sections that are being read, one inside the other. A merged one does not lengthen the path.
    depth: usize,
    outline: Outline,
}

impl<'a> Reader<'a> {
    fn collect(&mut self, node: &'a Node) {
        self.written += 1;
        if node.anchor > 0 {
            self.anchors.insert(node.anchor, node);
        }
        match &node.content {
            Content::Scalar { .. } => {}
            Content::Alias(anchor) => {
                self.repeated.insert(*anchor);
            }
            Content::List(items) => items.iter().for_each(|item| self.collect(item)),
            Content::Map { pairs, .. } => pairs.iter().for_each(|(key, value)| {
                self.collect(key);
                self.collect(value);
            }),
        }
    }

    /// What holds the inside of `node`, standing where `outer` holds already.
    fn hold(&self, node: &Node, outer: Option<Hold>) -> Option<Hold> {
        outer.or_else(|| {
            (node.anchor > 0 && self.repeated.contains(&node.anchor))
                .then_some(Hold::Anchored(node.span.start))
        })
    }

    fn map(&mut self, node: &Node, path: &mut KeyPath, outer: Option<Hold>) -> Result<(), Fault> {
        let Content::Map { pairs, flow } = &node.content else {
            return Ok(());
        };
        Fault::of_section(path, node.span.start)?;
        self.visit(node)?;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Fault::too_deep(node.span.start));
        }
        let hold = self.hold(node, outer);
        // The parser puts a value that is missing before a closing bracket behind it: `{key}`.
        let last = if *flow {
            node.span.end - 1
        } else {
            self.text.len()
        };
        self.outline.tables.push(Table {
            path: path.clone(),
            layout: if *flow {
                Layout::Brackets {
                    open: node.span.start + 1,
                    close: node.span.end - 1,
                }
            } else {
                Layout::Lines {
                    opened: node.span.start,
                }
            },
            members: pairs
                .iter()
                .map(|(key, value)| {
                    let start = value.span.start.max(key.span.end).min(last);
                    let end = value.span.end.max(key.span.end).min(last);
                    Member {
                        name: key.span.clone(),
                        value: start..end,
                    }
                })
                .collect(),
            hold,
        });
        let mut own: BTreeMap<&str, usize> = BTreeMap::new();
        let mut merged = Vec::new();
        for (key, value) in pairs {
            let Content::Scalar { text: name, style } = &key.content else {
                continue;
            };
            if name == MERGE && *style == ScalarStyle::Plain {
                merged.push(value);
                continue;
            }
            path.push(name.clone());
            if let Some(first) = own.insert(name, key.span.start) {
                return Err(Fault::Duplicate {
                    key: path.join("."),
                    first,
                    second: key.span.start,
                });
            }
            self.value(key, value, path, hold)?;
            path.pop();
        }
        let own: BTreeSet<String> = own.into_keys().map(str::to_owned).collect();
        for value in merged {
            self.merge(value, path, &own, outer)?;
        }
        self.depth -= 1;
        Ok(())
    }

    /// Counts what is read, since aliases of aliases can have no end in practice.
    fn visit(&mut self, node: &Node) -> Result<(), Fault> {
        self.visits += 1;
        if self.visits > self.written + MAX_REPEATED {
            return Err(Fault::syntax(
                node.span.start,
                format!("the aliases of this file repeat more than {MAX_REPEATED} values"),
            ));
        }
        Ok(())
    }

    fn value(
        &mut self,
        key: &Node,
        value: &Node,
        path: &mut KeyPath,
        outer: Option<Hold>,
    ) -> Result<(), Fault> {
        if !matches!(value.content, Content::Map { .. }) {
            self.visit(key)?;
        }
        let hold = self.hold(value, outer);
        let (scalar, hold) = match &value.content {
            Content::Map { .. } => return self.map(value, path, outer),
            Content::List(items) => (list(items), hold),
            Content::Scalar { text, style } => {
                let several_lines = matches!(style, ScalarStyle::Literal | ScalarStyle::Folded)
                    || self.text[value.span.clone()].contains('\n');
                let scalar = scalar::of_node(text, *style, value.tag.as_deref());
                let hold =
                    hold.or(several_lines.then_some(Hold::Unwritable("a text of several lines")));
                (scalar, hold)
            }
            Content::Alias(anchor) => match self.anchors.get(anchor).copied() {
                // An alias inside its own anchor has no end.
                Some(target) if !encloses(target, value) => match &target.content {
                    Content::Map { .. } => {
                        let aliased = Hold::Aliased(value.span.start);
                        let tables = self.outline.tables.len();
                        self.map(target, path, outer.or(Some(aliased)))?;
                        for table in &mut self.outline.tables[tables..] {
                            table.hold = Some(aliased);
                        }
                        return Ok(());
                    }
                    Content::Scalar { text, style } => {
                        (scalar::of_node(text, *style, target.tag.as_deref()), hold)
                    }
                    Content::List(items) => (list(items), hold),
                    Content::Alias(_) => (Scalar::Composite("an alias"), hold),
                },
                _ => (Scalar::Composite("an alias"), hold),
            },
        };
        // Where there is no value it belongs behind the colon.
        let missing = value.span.is_empty();
        let behind = &self.text[key.span.end..];
        let space = behind.len() - behind.trim_start().len();
        let after_colon = match behind[space..].starts_with(':') {
            true => key.span.end + space + 1,
            false => key.span.end,
        };
        self.outline.leaves.push(Leaf {
            path: path.clone(),
            name: key.span.clone(),
            value: if missing {
                after_colon..after_colon
            } else {
                value.span.clone()
            },
            scalar,
            hold,
        });
        Ok(())
    }

    /// `<<: *base` or `<<: [*a, *b]`: keys of the base that are not given here;
    /// of several bases the first has precedence.
    fn merge(
        &mut self,
        value: &Node,
        path: &mut KeyPath,
        own: &BTreeSet<String>,
        outer: Option<Hold>,
    ) -> Result<(), Fault> {
        let bases: Vec<&Node> = match &value.content {
            Content::List(items) => items.iter().collect(),
            _ => vec![value],
        };
        let mut given = own.clone();
        for base in bases {
            let target = match &base.content {
                Content::Alias(anchor) => {
                    let anchored = self.anchors.get(anchor).copied();
                    anchored.filter(|target| !encloses(target, base))
                }
                _ => Some(base),
            };
            let Some(target) = target else {
                continue;
            };
            let (leaves, tables) = (self.outline.leaves.len(), self.outline.tables.len());
            self.map(target, path, outer)?;
            // The base is no section of its own here.
            self.outline.tables.truncate(tables);
            let depth = path.len();
            let mut added = self.outline.leaves.split_off(leaves);
            added.retain(|leaf| !given.contains(&leaf.path[depth]));
            for leaf in &mut added {
                leaf.hold = Some(Hold::Merged(base.span.start));
                given.insert(leaf.path[depth].clone());
            }
            self.outline.leaves.extend(added);
        }
        Ok(())
    }
}

fn encloses(outer: &Node, inner: &Node) -> bool {
    outer.span.start <= inner.span.start && inner.span.end <= outer.span.end
}

/// The text with closing brackets moved to the line before, byte for byte in the same places, where
/// they begin a line. YAML wants them further in than their key, and PyYAML, which reads most
/// training configs, does not. None where there are none.
fn with_brackets_drawn_up(text: &str) -> Option<String> {
    let mut drawn_up = text.as_bytes().to_vec();
    let mut start = 0;
    let mut is_changed = false;
    for line in text.split_inclusive('\n') {
        let next = start + line.len();
        let closes = text[next..].trim_start_matches(' ').starts_with([']', '}']);
        // Behind a comment a bracket would be part of it.
        if closes && line.ends_with('\n') && !line.contains('#') {
            drawn_up[next - 1] = b' ';
            is_changed = true;
        }
        start = next;
    }
    let drawn_up = String::from_utf8(drawn_up).ok()?;
    is_changed.then_some(drawn_up)
}

/// The plain values of a list; aliases and sections are not followed.
fn list(items: &[Node]) -> Scalar {
    let value = |item: &Node| match &item.content {
        Content::Scalar { text, style } => scalar::of_node(text, *style, item.tag.as_deref()),
        _ => Scalar::Composite("a section"),
    };
    Scalar::list(items.iter().map(value).collect())
}

#[cfg(test)]
mod tests;
