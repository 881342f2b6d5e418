//! Documents nobody wrote: generated with their values' places known, changed
//! at random, and compared with a replacement of exactly those bytes.

use std::ops::Range;
use std::path::Path;

use cinch_config::{Document, Format, Scalar, edit};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// A value with the manner it is written in.
#[derive(Clone, Debug)]
enum Literal {
    Integer(u32),
    /// In double quotation marks, or single ones where the language has them.
    QuotedInteger(u32, bool),
    Switch(bool),
    Word(String, bool),
}

#[derive(Clone, Debug)]
enum Node {
    Leaf(Literal),
    /// Its members, and whether they stand on one line where that is possible.
    Section(Vec<Node>, bool),
}

#[derive(Clone, Debug)]
struct Style {
    indent: usize,
    comments: bool,
    blank_lines: bool,
    windows: bool,
    mark: bool,
    final_newline: bool,
    trailing_comma: bool,
}

fn literal() -> impl Strategy<Value = Literal> {
    prop_oneof![
        any::<u32>().prop_map(Literal::Integer),
        (any::<u32>(), any::<bool>())
            .prop_map(|(number, single)| Literal::QuotedInteger(number, single)),
        any::<bool>().prop_map(Literal::Switch),
        ("[a-z]{3,8}z", any::<bool>()).prop_map(|(word, single)| Literal::Word(word, single)),
    ]
}

fn node() -> impl Strategy<Value = Node> {
    let leaf = literal().prop_map(Node::Leaf);
    leaf.prop_recursive(3, 24, 5, |inner| {
        (vec(inner, 1..5), any::<bool>()).prop_map(|(members, flow)| Node::Section(members, flow))
    })
}

fn style() -> impl Strategy<Value = Style> {
    (1..5_usize, any::<[bool; 6]>()).prop_map(|(indent, flags)| Style {
        indent,
        comments: flags[0],
        blank_lines: flags[1],
        windows: flags[2],
        mark: flags[3],
        final_newline: flags[4],
        trailing_comma: flags[5],
    })
}

/// A text under construction, with where its values stand.
struct Writer<'a> {
    format: Format,
    style: &'a Style,
    text: String,
    leaves: Vec<(Vec<String>, Range<usize>, Literal)>,
    sections: Vec<Vec<String>>,
}

impl Writer<'_> {
    fn newline(&mut self) {
        self.text += if self.style.windows { "\r\n" } else { "\n" };
    }

    fn literal(&mut self, literal: &Literal, path: &[String]) {
        let start = self.text.len();
        self.text += &written(self.format, literal);
        self.leaves
            .push((path.to_vec(), start..self.text.len(), literal.clone()));
    }

    fn comment(&mut self, path: &[String]) {
        // A comment that looks like a setting.
        let mark = if self.format == Format::Json {
            "//"
        } else {
            "#"
        };
        if self.style.comments && path.len().is_multiple_of(2) {
            self.text += &format!("  {mark} {} = 1: {{2, \"3\"", path.join("."));
        }
    }

    fn blank(&mut self) {
        if self.style.blank_lines {
            self.newline();
        }
    }

    fn name(&self, name: &str, single: bool) -> String {
        match (self.format, single) {
            (Format::Json, _) => format!("\"{name}\""),
            (Format::Python, true) => format!("'{name}'"),
            (Format::Python, false) => format!("\"{name}\""),
            _ => name.to_owned(),
        }
    }

    fn indent(&mut self, depth: usize) {
        self.text += &" ".repeat(self.style.indent * depth);
    }

    /// Members between brackets, on one line or on several.
    fn brackets(&mut self, members: &[Node], path: &[String], flow: bool, depth: usize) {
        let lines = !flow && self.format != Format::Toml;
        self.sections.push(path.to_vec());
        self.text.push('{');
        for (index, (path, member)) in children(members, path).into_iter().enumerate() {
            if lines {
                self.blank();
                if index == 0 || !self.style.blank_lines {
                    self.newline();
                }
                self.indent(depth + 1);
            } else {
                self.text.push(' ');
            }
            let name = self.name(&path[path.len() - 1], index % 2 == 1);
            self.text += &name;
            self.text += if self.format == Format::Toml {
                " = "
            } else {
                ": "
            };
            self.value(member, &path, !lines, depth + 1);
            let last = index + 1 == members.len();
            let trailing = self.style.trailing_comma && self.format != Format::Toml;
            if !last || (lines && trailing) {
                self.text.push(',');
            }
            if lines {
                self.comment(&path);
            }
        }
        if lines {
            self.newline();
            self.indent(depth);
        } else {
            self.text.push(' ');
        }
        self.text.push('}');
    }

    fn value(&mut self, node: &Node, path: &[String], flow: bool, depth: usize) {
        match node {
            Node::Leaf(literal) => self.literal(literal, path),
            Node::Section(members, inline) => self.brackets(members, path, flow || *inline, depth),
        }
    }

    fn yaml_block(&mut self, members: &[Node], path: &[String], depth: usize) {
        self.sections.push(path.to_vec());
        for (path, member) in children(members, path) {
            self.indent(depth);
            self.text += &path[path.len() - 1];
            self.text.push(':');
            match member {
                Node::Section(members, false) => {
                    self.comment(&path);
                    self.newline();
                    self.yaml_block(members, &path, depth + 1);
                    continue;
                }
                other => {
                    self.text.push(' ');
                    self.value(other, &path, true, depth);
                }
            }
            self.comment(&path);
            self.newline();
            self.blank();
        }
    }

    fn toml_table(&mut self, members: &[Node], path: &[String]) {
        self.sections.push(path.to_vec());
        let members = children(members, path);
        let is_table = |node: &Node| matches!(node, Node::Section(_, false));
        for (path, member) in members.iter().filter(|(_, node)| !is_table(node)) {
            self.text += &format!("{} = ", path[path.len() - 1]);
            self.value(member, path, true, 0);
            self.comment(path);
            self.newline();
        }
        for (path, member) in members.iter().filter(|(_, node)| is_table(node)) {
            self.blank();
            self.text += &format!("[{}]", path.join("."));
            self.comment(path);
            self.newline();
            if let Node::Section(members, _) = member {
                self.toml_table(members, path);
            }
        }
    }

    fn python_module(&mut self, members: &[Node]) {
        self.sections.push(Vec::new());
        for (path, member) in children(members, &[]) {
            self.text += &format!("{} = ", path[0]);
            self.value(member, &path, false, 0);
            self.comment(&path);
            self.newline();
            self.blank();
        }
    }
}

fn children<'a>(members: &'a [Node], path: &[String]) -> Vec<(Vec<String>, &'a Node)> {
    let named = members.iter().enumerate().map(|(index, member)| {
        let mut path = path.to_vec();
        path.push(format!("key_{}_{index}", path.len()));
        (path, member)
    });
    named.collect()
}

fn written(format: Format, literal: &Literal) -> String {
    let quoted = |text: &str, single: bool| match (format, single) {
        (Format::Json, _) | (_, false) => format!("\"{text}\""),
        _ => format!("'{text}'"),
    };
    match literal {
        Literal::Integer(number) => number.to_string(),
        Literal::QuotedInteger(number, single) => quoted(&number.to_string(), *single),
        Literal::Switch(value) if format == Format::Python => {
            (if *value { "True" } else { "False" }).to_owned()
        }
        Literal::Switch(value) => value.to_string(),
        // YAML needs no quotation marks for a word.
        Literal::Word(word, true) if format == Format::Yaml => word.clone(),
        Literal::Word(word, single) => quoted(word, *single),
    }
}

fn meaning(literal: &Literal) -> Scalar {
    match literal {
        Literal::Integer(number) => Scalar::Number(number.to_string()),
        Literal::QuotedInteger(number, _) => Scalar::Text(number.to_string()),
        Literal::Switch(value) => Scalar::Bool(*value),
        Literal::Word(word, _) => Scalar::Text(word.clone()),
    }
}

/// Another value of the same kind, and what to ask for to get it.
fn changed(literal: &Literal, number: u32) -> (Literal, Scalar) {
    let digits = Scalar::Number(number.to_string());
    match literal {
        Literal::Integer(_) => (Literal::Integer(number), digits),
        Literal::QuotedInteger(_, single) => (Literal::QuotedInteger(number, *single), digits),
        Literal::Switch(value) => (Literal::Switch(!value), Scalar::Bool(!value)),
        Literal::Word(_, single) => {
            let word = format!("w{number}z");
            (Literal::Word(word.clone(), *single), Scalar::Text(word))
        }
    }
}

type Generated = (
    String,
    Vec<(Vec<String>, Range<usize>, Literal)>,
    Vec<Vec<String>>,
);

fn generate(format: Format, members: &[Node], style: &Style) -> Generated {
    let mut writer = Writer {
        format,
        style,
        text: if style.mark {
            "\u{feff}".to_owned()
        } else {
            String::new()
        },
        leaves: Vec::new(),
        sections: Vec::new(),
    };
    match format {
        Format::Json => {
            writer.brackets(members, &[], false, 0);
            writer.newline();
        }
        Format::Yaml => writer.yaml_block(members, &[], 0),
        Format::Toml => writer.toml_table(members, &[]),
        Format::Python => writer.python_module(members),
        // Flags have no sections: the shell's reader has tests of its own.
        Format::Shell => unreachable!("not among the formats with sections"),
    }
    if !style.final_newline {
        let length = writer.text.trim_end().len();
        writer.text.truncate(length);
    }
    (writer.text, writer.leaves, writer.sections)
}

fn is_subsequence(short: &str, long: &str) -> bool {
    let mut rest = long.chars();
    short.chars().all(|c| rest.any(|other| other == c))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn only_the_value_changes(
        members in vec(node(), 1..6),
        style in style(),
        picks in vec((any::<Index>(), any::<u32>()), 1..4),
    ) {
        for format in Format::ALL.into_iter().filter(|format| *format != Format::Shell) {
            let path = Path::new("generated");
            let (text, leaves, _) = generate(format, &members, &style);
            let outline = edit(path, format, &text, &[]).unwrap();
            prop_assert_eq!(&outline, &text);
            // Several changes at once, the last of each value counts.
            let mut wanted = std::collections::BTreeMap::new();
            let mut changes = Vec::new();
            for (pick, number) in &picks {
                let index = pick.index(leaves.len());
                let (literal, scalar) = changed(&leaves[index].2, *number);
                changes.push((leaves[index].0.clone(), scalar));
                wanted.insert(index, literal);
            }
            let mut expected = text.clone();
            let mut places: Vec<(Range<usize>, String)> = wanted
                .iter()
                .map(|(index, literal)| (leaves[*index].1.clone(), written(format, literal)))
                .collect();
            places.sort_by_key(|(span, _)| std::cmp::Reverse(span.start));
            for (span, literal) in places {
                expected.replace_range(span, &literal);
            }
            let edited = edit(path, format, &text, &changes);
            prop_assert!(edited.is_ok(), "{:?}\n{}\n{:?}", format, text, edited);
            let edited = edited.unwrap();
            prop_assert_eq!(&edited, &expected, "{:?}", format);
            prop_assert_eq!(edit(path, format, &edited, &changes).unwrap(), edited);
        }
    }

    #[test]
    fn readers_find_what_was_written(members in vec(node(), 1..6), style in style()) {
        for (format, name) in [
            (Format::Json, "a.json"),
            (Format::Yaml, "a.yaml"),
            (Format::Toml, "a.toml"),
            (Format::Python, "a.py"),
        ] {
            let (text, leaves, _) = generate(format, &members, &style);
            let document = Document::read(Path::new(name), &text).unwrap();
            let found: Vec<_> = document
                .entries
                .iter()
                .map(|entry| (entry.path.clone(), entry.scalar.clone()))
                .collect();
            let expected: Vec<_> = leaves
                .iter()
                .map(|(path, _, literal)| (path.clone(), meaning(literal)))
                .collect();
            prop_assert_eq!(found, expected, "{}", text);
        }
    }

    #[test]
    fn a_new_key_leaves_everything_else(
        members in vec(node(), 1..6),
        style in style(),
        pick in any::<Index>(),
        number in any::<u32>(),
    ) {
        for format in Format::ALL.into_iter().filter(|format| *format != Format::Shell) {
            let path = Path::new("generated");
            let (text, leaves, sections) = generate(format, &members, &style);
            let mut key = sections[pick.index(sections.len())].clone();
            key.push("a_new_key".to_owned());
            let change = [(key.clone(), Scalar::Number(number.to_string()))];
            let edited = edit(path, format, &text, &change);
            prop_assert!(edited.is_ok(), "{:?} {:?}\n{}\n{:?}", format, key, text, edited);
            let edited = edited.unwrap();
            // Nothing was taken away, and little more than the key came.
            prop_assert!(is_subsequence(&text, &edited), "{}\n{}", text, edited);
            let needed = "a_new_key".len() + number.to_string().len();
            let extra = edited.len() - text.len() - needed;
            prop_assert!(extra <= 12 + 4 * style.indent * key.len(), "{}\n{}", text, edited);
            prop_assert_eq!(edited.matches("a_new_key").count(), 1);
            // Every old value is still written as it was, in its order.
            let mut at = 0;
            for (_, span, _) in &leaves {
                let raw = &text[span.clone()];
                let found = edited[at..].find(raw);
                prop_assert!(found.is_some());
                at += found.unwrap_or(0) + raw.len();
            }
        }
    }
}
