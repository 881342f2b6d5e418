//! Changes values in the text of a config and nothing else.
//!
//! A value is changed by replacing the bytes of its literal; a missing key is
//! put beside its neighbours in their style (`insert`). Nothing is ever printed
//! anew, so comments, order, quotation marks, line endings and indentation have
//! no way to change. After each step the text is read again and compared with
//! what it held before: if anything but the one value differs, the edit is
//! refused, so that a mistake here costs an error and not a file.

use std::path::Path;

use crate::document::{Position, Scalar};
use crate::error::ConfigError;
use crate::format::{Format, without_mark};
use crate::insert;
use crate::literal::{Written, is_same, write};
use crate::outline::{Hold, KeyPath, Leaf, Outline, Span};

/// A new text for some bytes of the old one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Splice {
    pub span: Span,
    pub text: String,
}

impl Splice {
    pub(crate) fn at(offset: usize, text: String) -> Splice {
        Splice {
            span: offset..offset,
            text,
        }
    }
}

/// One change of a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Edit {
    pub path: KeyPath,
    pub value: Scalar,
    /// A new last name for the key.
    pub rename: Option<String>,
    /// The neighbour behind which a missing key goes; else the section's last.
    pub after: Option<KeyPath>,
}

/// Sets each key to its value and returns the new text. Keys that are missing
/// are inserted. `path` only names the file in errors; `format` can be had from
/// [`Format::of`].
pub fn edit(
    path: &Path,
    format: Format,
    text: &str,
    changes: &[(KeyPath, Scalar)],
) -> Result<String, ConfigError> {
    changes
        .iter()
        .try_fold(text.to_owned(), |text, (key, value)| {
            let edit = Edit {
                path: key.clone(),
                value: value.clone(),
                rename: None,
                after: None,
            };
            perform(path, format, &text, &edit)
        })
}

/// Makes one edit, with the byte order mark left where it is.
pub(crate) fn perform(
    path: &Path,
    format: Format,
    text: &str,
    edit: &Edit,
) -> Result<String, ConfigError> {
    let body = without_mark(text);
    let mark = &text[..text.len() - body.len()];
    let file = File {
        path,
        format,
        text: body,
    };
    let edited = file.perform(edit)?;
    Ok(format!("{mark}{edited}"))
}

/// A text with what is needed to speak about it.
#[derive(Clone, Copy)]
pub(crate) struct File<'a> {
    pub path: &'a Path,
    pub format: Format,
    pub text: &'a str,
}

impl File<'_> {
    pub(crate) fn outline(&self, text: &str) -> Result<Outline, ConfigError> {
        self.format
            .outline(text)
            .map_err(|fault| fault.in_file(self.path, self.format, text))
    }

    fn perform(&self, edit: &Edit) -> Result<String, ConfigError> {
        let outline = self.outline(self.text)?;
        let found: Vec<&Leaf> = outline.find(&edit.path).collect();
        // A variable of a script and the flag that takes its value from it have one place.
        if let [first, .., last] = found.as_slice()
            && found.iter().any(|leaf| leaf.value != first.value)
        {
            return Err(ConfigError::DuplicateKey {
                path: self.path.to_owned(),
                key: edit.path.join("."),
                first_line: self.line(first.name.start),
                line: self.line(last.name.start),
            });
        }
        let leaf = found.first().copied();
        if edit.rename.is_none() && leaf.is_some_and(|leaf| is_same(&leaf.scalar, &edit.value)) {
            return Ok(self.text.to_owned());
        }
        let overridable =
            |leaf: &Leaf| matches!(leaf.hold, Some(Hold::Merged(_))) && edit.rename.is_none();
        let (splices, written) = match leaf.filter(|leaf| !overridable(leaf)) {
            Some(leaf) => self.replace(leaf, edit)?,
            None => {
                let written = write(self.format, &edit.value, None)
                    .ok_or_else(|| self.unwritable(&edit.path, &edit.value))?;
                (
                    insert::insert(self, &outline, edit, &written.text)?,
                    written,
                )
            }
        };
        let edited = splice(self.text, splices);
        self.verify(&outline, &edited, edit, &written)?;
        Ok(edited)
    }

    fn replace(&self, leaf: &Leaf, edit: &Edit) -> Result<(Vec<Splice>, Written), ConfigError> {
        self.check_free(leaf)?;
        let raw = &self.text[leaf.value.clone()];
        // An alias gives way to a value, which then stands here alone.
        let alias = self.format == Format::Yaml && raw.starts_with('*');
        let old = (!alias).then_some((raw, &leaf.scalar));
        let mut written = write(self.format, &edit.value, old)
            .ok_or_else(|| self.unwritable(&edit.path, &edit.value))?;
        if leaf.value.is_empty() {
            written.text.insert(0, ' ');
        }
        let mut splices = vec![Splice {
            span: leaf.value.clone(),
            text: written.text.clone(),
        }];
        if let Some(name) = &edit.rename {
            let raw = &self.text[leaf.name.clone()];
            let quote = raw.chars().next().filter(|c| matches!(c, '"' | '\''));
            let quote = quote.map_or_else(String::new, String::from);
            splices.push(Splice {
                span: leaf.name.clone(),
                text: format!("{quote}{name}{quote}"),
            });
        }
        Ok((splices, written))
    }

    /// Refuses what must not be changed where it stands.
    fn check_free(&self, leaf: &Leaf) -> Result<(), ConfigError> {
        let key = leaf.path.join(".");
        let what = match &leaf.scalar {
            Scalar::Composite(what) => what,
            _ => "a list",
        };
        let (reason, hint) = match (leaf.hold, &leaf.scalar) {
            (Some(hold), _) => self.held(hold),
            (None, scalar) if scalar.is_composite() => (
                format!("it is {what}, and only numbers, texts and switches are written"),
                "change it by hand, or write a plain value there first".to_owned(),
            ),
            (None, _) => return Ok(()),
        };
        Err(ConfigError::NotEditable {
            path: self.path.to_owned(),
            line: self.line(leaf.value.start),
            key,
            reason,
            hint,
        })
    }

    /// Why a hold is one, and the way out.
    pub(crate) fn held(&self, hold: Hold) -> (String, String) {
        let by_hand = "change it by hand".to_owned();
        match hold {
            Hold::Anchored(offset) => (
                format!(
                    "it belongs to the anchor on line {}, and other places repeat that anchor",
                    self.line(offset)
                ),
                "change it by hand if all of them should follow; otherwise write the key out where it is repeated".to_owned(),
            ),
            Hold::Aliased(offset) => (
                format!(
                    "the alias on line {} repeats it from another place, which would change too",
                    self.line(offset)
                ),
                "write the section out instead of the alias, or change the anchor by hand".to_owned(),
            ),
            Hold::Merged(offset) => (
                format!("it comes from the merge on line {}", self.line(offset)),
                by_hand,
            ),
            Hold::Unwritable(what) => (format!("it is {what}"), by_hand),
            Hold::Conditional(offset) => (
                format!("it is set again on line {}", self.line(offset)),
                "change it by hand: which of the two holds is known only when the program runs".to_owned(),
            ),
        }
    }

    fn unwritable(&self, path: &KeyPath, value: &Scalar) -> ConfigError {
        ConfigError::NoPlace {
            path: self.path.to_owned(),
            key: path.join("."),
            reason: format!("{} has no way to write {value}", self.format.name()),
        }
    }

    pub(crate) fn line(&self, offset: usize) -> usize {
        Position::of(self.text, offset).line
    }

    /// Reads the new text and checks that every value is what it was, except
    /// the one that was to change.
    fn verify(
        &self,
        before: &Outline,
        edited: &str,
        edit: &Edit,
        written: &Written,
    ) -> Result<(), ConfigError> {
        let mut target = edit.path.clone();
        if let (Some(name), Some(last)) = (&edit.rename, target.last_mut()) {
            last.clone_from(name);
        }
        // A literal that several names stand for changes under all of them.
        let shared: Vec<&KeyPath> = before
            .find(&edit.path)
            .flat_map(|changed| {
                before
                    .leaves
                    .iter()
                    .filter(|leaf| leaf.value == changed.value)
            })
            .filter(|leaf| !leaf.value.is_empty())
            .map(|leaf| &leaf.path)
            .collect();
        // A section that had no value yet vanishes when it gets a member.
        let gives_way = |leaf: &&Leaf| {
            leaf.path == edit.path
                || shared.contains(&&leaf.path)
                || leaf.scalar == Scalar::Null && edit.path.starts_with(&leaf.path)
        };
        let kept = |leaf: &Leaf, text: &str| {
            let raw = text[leaf.value.clone()].to_owned();
            (leaf.path.clone(), leaf.scalar.clone(), raw)
        };
        let after = self
            .outline(edited)
            .map_err(|error| self.broken(edit, error.to_string()))?;
        let mut expected: Vec<_> = before
            .leaves
            .iter()
            .filter(|leaf| !gives_way(leaf))
            .map(|leaf| kept(leaf, self.text))
            .collect();
        let mut found: Vec<_> = after
            .leaves
            .iter()
            .filter(|leaf| leaf.path != target && !shared.contains(&&leaf.path))
            .map(|leaf| kept(leaf, edited))
            .collect();
        expected.sort_by(|left, right| left.0.cmp(&right.0));
        found.sort_by(|left, right| left.0.cmp(&right.0));
        if expected != found {
            let other = expected
                .iter()
                .chain(&found)
                .find(|leaf| expected.contains(leaf) != found.contains(leaf));
            let other = other.map_or_else(String::new, |(path, ..)| path.join("."));
            return Err(self.broken(edit, format!("`{other}` would have changed as well")));
        }
        let set: Vec<&Leaf> = after.find(&target).collect();
        match set.as_slice() {
            [first, others @ ..]
                if is_same(&first.scalar, &written.scalar)
                    && others.iter().all(|leaf| leaf.value == first.value) =>
            {
                Ok(())
            }
            _ => Err(self.broken(edit, "the value would not have been read back".to_owned())),
        }
    }

    fn broken(&self, edit: &Edit, problem: String) -> ConfigError {
        ConfigError::EditRefused {
            path: self.path.to_owned(),
            key: edit.path.join("."),
            value: edit.value.to_string(),
            problem,
        }
    }
}

fn splice(text: &str, mut splices: Vec<Splice>) -> String {
    splices.sort_by_key(|splice| splice.span.start);
    let mut edited = String::with_capacity(text.len() + 64);
    let mut at = 0;
    for splice in splices {
        edited.push_str(&text[at..splice.span.start]);
        edited.push_str(&splice.text);
        at = splice.span.end;
    }
    edited.push_str(&text[at..]);
    edited
}
