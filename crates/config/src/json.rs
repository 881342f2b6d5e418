//! Reads JSON as people write configs: with comments, trailing commas, and, as
//! guides print their snippets, without the outer braces.
//!
//! Beyond that JSON is taken strictly: a missing comma or an unquoted name is
//! more often a slip than an intention.

use std::path::Path;

use jsonc_parser::ast::{Object, ObjectPropName, Value};
use jsonc_parser::common::Ranged;
use jsonc_parser::{CollectOptions, ParseOptions, parse_to_ast};

use crate::ConfigError;
use crate::document::{Document, Entry, Position, Scalar};

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

/// Flattens the JSON in `text`; `path` only names it in errors and provenance.
pub fn read_json(path: &Path, text: &str) -> Result<Document, ConfigError> {
    // Some editors on Windows begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let Some(first) = first_significant(text) else {
        return Err(ConfigError::EmptyFile {
            path: path.to_owned(),
        });
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
    let reader = Reader { path, text, added };
    let parsed = parse_to_ast(source, &CollectOptions::default(), &SYNTAX).map_err(|error| {
        let at = reader.position(error.range().start);
        ConfigError::Syntax {
            path: path.to_owned(),
            line: at.line,
            column: at.column,
            message: lowercase_first(&error.kind().to_string()),
        }
    })?;
    let Some(Value::Object(object)) = &parsed.value else {
        return Err(ConfigError::NotSections {
            path: path.to_owned(),
        });
    };
    let mut document = Document {
        path: path.to_owned(),
        entries: Vec::new(),
        sections: object
            .properties
            .iter()
            .map(|property| property.name.as_str().to_owned())
            .collect(),
    };
    reader.flatten(object, &mut Vec::new(), &mut document.entries)?;
    Ok(document)
}

struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
    /// Characters put before the text, which positions must not count.
    added: usize,
}

impl Reader<'_> {
    fn position(&self, offset: usize) -> Position {
        Position::of(self.text, offset.saturating_sub(self.added))
    }

    fn flatten(
        &self,
        object: &Object<'_>,
        prefix: &mut Vec<String>,
        entries: &mut Vec<Entry>,
    ) -> Result<(), ConfigError> {
        for (index, property) in object.properties.iter().enumerate() {
            let name = property.name.as_str();
            let name_at = self.position(name_start(&property.name));
            prefix.push(name.to_owned());
            if let Some(first) = object.properties[..index]
                .iter()
                .find(|earlier| earlier.name.as_str() == name)
            {
                return Err(ConfigError::DuplicateKey {
                    path: self.path.to_owned(),
                    key: prefix.join("."),
                    first_line: self.position(name_start(&first.name)).line,
                    line: name_at.line,
                });
            }
            let scalar = match &property.value {
                Value::Object(inner) => {
                    self.flatten(inner, prefix, entries)?;
                    prefix.pop();
                    continue;
                }
                Value::Array(_) => Scalar::Composite("a list"),
                Value::StringLit(literal) => Scalar::Text(literal.value.to_string()),
                Value::NumberLit(literal) => Scalar::Number(literal.value.to_owned()),
                Value::BooleanLit(literal) => Scalar::Bool(literal.value),
                Value::NullKeyword(_) => Scalar::Null,
            };
            entries.push(Entry {
                path: prefix.clone(),
                scalar,
                name_at,
                value_at: self.position(property.value.start()),
            });
            prefix.pop();
        }
        Ok(())
    }
}

fn name_start(name: &ObjectPropName<'_>) -> usize {
    match name {
        ObjectPropName::String(literal) => literal.range.start,
        ObjectPropName::Word(literal) => literal.range.start,
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
    use super::*;

    fn read(text: &str) -> Result<Vec<(String, String, usize, usize)>, String> {
        read_json(Path::new("run.json"), text)
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
