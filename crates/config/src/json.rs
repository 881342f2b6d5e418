//! Reads JSON as people write configs: with comments, trailing commas, and, as
//! guides print their snippets, without the outer braces.
//!
//! Beyond that JSON is taken strictly: a missing comma or an unquoted name is
//! more often a slip than an intention.

use std::collections::HashMap;

use jsonc_parser::ast::{Object, ObjectPropName, Value};
use jsonc_parser::common::Ranged;
use jsonc_parser::errors::ParseErrorKind;
use jsonc_parser::{CollectOptions, ParseOptions, parse_to_ast};

use crate::document::Scalar;
use crate::outline::{Fault, KeyPath, Layout, Leaf, MAX_DEPTH, Member, Outline, Span, Table};

const SYNTAX: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_trailing_commas: true,
    allow_loose_object_property_names: false,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

/// Reads `text`, which has no byte order mark.
pub(crate) fn outline(text: &str) -> Result<Outline, Fault> {
    let Some(first) = first_significant(text) else {
        return Err(Fault::Empty);
    };
    // A snippet such as `"vram": {"batch_size": 1}` is the inside of an object.
    // The closing brace gets its own line in case the text ends in a comment.
    let braced;
    let (source, added) = if first == '"' {
        braced = format!("{{{text}\n}}");
        (braced.as_str(), 1)
    } else {
        (text, 0)
    };
    let mut reader = Reader {
        added,
        length: text.len(),
        outline: Outline::default(),
    };
    let parsed = parse_to_ast(source, &CollectOptions::default(), &SYNTAX).map_err(|error| {
        let place = reader.place(error.range().start);
        match error.kind() {
            ParseErrorKind::NestingDepthExceeded => Fault::too_deep(place),
            kind => Fault::syntax(place, lowercase_first(&kind.to_string())),
        }
    })?;
    let Some(Value::Object(object)) = &parsed.value else {
        return Err(Fault::NotSections);
    };
    if let Some(offset) = too_deep(object.properties.iter().map(|one| &one.value), 1) {
        return Err(Fault::too_deep(reader.place(offset)));
    }
    reader.object(object, &mut KeyPath::new())?;
    Ok(reader.outline)
}

struct Reader {
    /// Characters put before the text, which offsets must not count.
    added: usize,
    length: usize,
    outline: Outline,
}

impl Reader {
    fn place(&self, offset: usize) -> usize {
        offset.saturating_sub(self.added).min(self.length)
    }

    fn span(&self, ranged: &impl Ranged) -> Span {
        self.place(ranged.start())..self.place(ranged.end())
    }

    fn object(&mut self, object: &Object<'_>, path: &mut KeyPath) -> Result<(), Fault> {
        Fault::of_section(path, self.place(object.start()))?;
        let bare = path.is_empty() && self.added > 0;
        let table = self.outline.tables.len();
        self.outline.tables.push(Table {
            path: path.clone(),
            layout: Layout::Brackets {
                open: self.place(object.start() + 1),
                close: self.place(object.end() - if bare { 0 } else { 1 }),
            },
            members: Vec::new(),
            hold: None,
        });
        let mut known: HashMap<&str, Span> = HashMap::new();
        for property in &object.properties {
            let name = self.name(&property.name);
            let value = self.span(&property.value);
            path.push(property.name.as_str().to_owned());
            if let Some(first) = known.insert(property.name.as_str(), name.clone()) {
                return Err(Fault::Duplicate {
                    key: path.join("."),
                    first: first.start,
                    second: name.start,
                });
            }
            self.outline.tables[table].members.push(Member {
                name: name.clone(),
                value: value.clone(),
            });
            let scalar = match &property.value {
                Value::Object(inner) => {
                    self.object(inner, path)?;
                    path.pop();
                    continue;
                }
                other => scalar(other),
            };
            self.outline.leaves.push(Leaf {
                path: path.clone(),
                name,
                value,
                scalar,
                hold: None,
            });
            path.pop();
        }
        Ok(())
    }

    fn name(&self, name: &ObjectPropName<'_>) -> Span {
        match name {
            ObjectPropName::String(literal) => self.span(literal),
            ObjectPropName::Word(literal) => self.span(literal),
        }
    }
}

/// Where values are nested too deep; the parser stops this from going on without end.
fn too_deep<'a>(mut values: impl Iterator<Item = &'a Value<'a>>, depth: usize) -> Option<usize> {
    values.find_map(|value| match value {
        Value::Object(_) | Value::Array(_) if depth == MAX_DEPTH => Some(value.start()),
        Value::Object(object) => {
            let inside = object.properties.iter().map(|one| &one.value);
            too_deep(
                &mut inside.into_iter() as &mut dyn Iterator<Item = _>,
                depth + 1,
            )
        }
        Value::Array(array) => too_deep(
            &mut array.elements.iter() as &mut dyn Iterator<Item = _>,
            depth + 1,
        ),
        _ => None,
    })
}

fn scalar(value: &Value<'_>) -> Scalar {
    match value {
        Value::Object(_) => Scalar::Composite("a section"),
        Value::Array(array) => Scalar::list(array.elements.iter().map(scalar).collect()),
        Value::StringLit(literal) => Scalar::Text(literal.value.to_string()),
        Value::NumberLit(literal) => Scalar::Number(literal.value.to_owned()),
        Value::BooleanLit(literal) => Scalar::Bool(literal.value),
        Value::NullKeyword(_) => Scalar::Null,
    }
}

/// The first character that is neither space nor comment.
fn first_significant(text: &str) -> Option<char> {
    let mut rest = text.trim_start();
    loop {
        if let Some(comment) = rest.strip_prefix("//") {
            rest = comment.split_once('\n')?.1.trim_start();
        } else if let Some(comment) = rest.strip_prefix("/*") {
            // An unterminated comment is left for the parser to complain about.
            match comment.split_once("*/") {
                Some((_, after)) => rest = after.trim_start(),
                None => return Some('/'),
            }
        } else {
            return rest.chars().next();
        }
    }
}

fn lowercase_first(message: &str) -> String {
    let mut characters = message.chars();
    characters.next().map_or_else(String::new, |first| {
        first.to_lowercase().chain(characters).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::document::Document;

    fn read(text: &str) -> Result<Vec<(String, String, usize, usize)>, String> {
        Document::read(Path::new("run.json"), text)
            .map(|document| {
                document
                    .entries
                    .iter()
                    .map(|entry| {
                        (
                            entry.key(),
                            entry.scalar.to_string(),
                            entry.value_at.line,
                            entry.value_at.column,
                        )
                    })
                    .collect()
            })
            .map_err(|error| error.to_string())
    }

    #[test]
    fn leaves_keep_their_place() {
        let text = "{ // sizes\n  \"model\": {\n    \"d_model\": 256, /* small */ \"n_layers\": 4,\n  },\n}";
        let leaves = read(text).unwrap();
        assert_eq!(
            leaves,
            [
                ("model.d_model".to_owned(), "256".to_owned(), 3, 16),
                ("model.n_layers".to_owned(), "4".to_owned(), 3, 45),
            ]
        );
    }

    #[test]
    fn braces_may_be_missing_and_positions_stay_true() {
        let bare = read("// first\n\"vram\": {\"batch_size\": 1} // last").unwrap();
        let braced = read("// first\n{\"vram\":{\"batch_size\": 1}}").unwrap();
        assert_eq!(bare[0].0, braced[0].0);
        assert_eq!((bare[0].2, bare[0].3), (2, 24));
        assert_eq!((braced[0].2, braced[0].3), (2, 24));
        // On the first line the added brace would shift the column by one.
        assert_eq!(read("\"a\": 7").unwrap()[0].3, 6);
    }

    #[test]
    fn a_byte_order_mark_is_no_content() {
        assert_eq!(read("\u{feff}{\"a\": 1}").unwrap()[0].3, 7);
    }

    #[test]
    fn duplicates_are_refused_at_any_depth() {
        let leaf = read("{\"vram\": {\n\"batch_size\": 1,\n\"batch_size\": 2}}").unwrap_err();
        assert!(
            leaf.contains("`vram.batch_size`") && leaf.contains("lines 2 and 3"),
            "{leaf}"
        );
        let section = read("{\"vram\": {},\n\"vram\": {}}").unwrap_err();
        assert!(
            section.contains("`vram`") && section.contains("lines 1 and 2"),
            "{section}"
        );
    }

    #[test]
    fn broken_text_names_the_place() {
        let missing_comma = read("{\"a\": 1\n \"b\": 2}").unwrap_err();
        assert!(
            missing_comma.starts_with("run.json line 1 column 8: expected comma"),
            "{missing_comma}"
        );
        for text in ["", "  \n", "// only a comment", "// a\n/* b */\n"] {
            let message = read(text).unwrap_err();
            assert!(
                message.starts_with("run.json is empty"),
                "{text:?}: {message}"
            );
        }
        for text in ["[1, 2]", "3", "null"] {
            let message = read(text).unwrap_err();
            assert!(message.contains("holds no sections"), "{text:?}: {message}");
        }
        for text in [
            "/* open",
            "{\"a\": ",
            "\"a\"",
            "{'a': 1}",
            "{\"a\": NaN}",
            "{a: 1}",
            "{}{}",
            "}",
            "\"a\": \"\\q\"",
            "\u{0}",
        ] {
            assert!(
                read(text).unwrap_err().starts_with("run.json line "),
                "{text:?}"
            );
        }
        assert!(read(&"{\"a\":".repeat(5000)).is_err());
    }
}
