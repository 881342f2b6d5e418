//! What a program computes from a value that is changed: `EVAL_BATCH = BATCH_SIZE * 4`.

use crate::dialect::Naming;
use crate::document::{Position, Scalar};
use crate::format::Format;
use crate::outline::{KeyPath, Leaf, Outline, Span};

/// A sentence for each value that changes with the one at `path`, besides those that say the
/// same setting.
pub(crate) fn derived(
    format: Format,
    text: &str,
    outline: &Outline,
    naming: Naming,
    path: &KeyPath,
) -> Vec<String> {
    let Some(changed) = outline.find(path).next() else {
        return Vec::new();
    };
    let name = match format {
        Format::Python | Format::Shell => name_before(text, &changed.value),
        _ => path.last().map(String::as_str).unwrap_or_default(),
    };
    if name.is_empty() {
        return Vec::new();
    }
    let setting = |leaf: &Leaf| naming.find(&leaf.path).map(|(setting, _)| setting.key);
    let own = setting(changed);
    let line = |leaf: &Leaf| Position::of(text, leaf.name.start).line;
    let others = outline.leaves.iter().filter(|leaf| leaf.path != *path);
    others
        .filter_map(|leaf| {
            let key = leaf.path.join(".");
            if leaf.value == changed.value && !leaf.value.is_empty() {
                let defines = leaf.path.last().is_some_and(|leaf| leaf == name);
                let same = own.is_some() && setting(leaf) == own;
                return (!defines && !same).then(|| {
                    format!(
                        "`{key}` on line {} is `{name}` and changes with it",
                        line(leaf)
                    )
                });
            }
            let raw = &text[leaf.value.clone()];
            let computes = match (format, &leaf.scalar) {
                (Format::Python, Scalar::Composite(_)) => mentions(raw, name),
                (Format::Shell, Scalar::Composite(_)) => raw.contains('$') && mentions(raw, name),
                (Format::Yaml, Scalar::Text(value)) => interpolates(value, path),
                _ => false,
            };
            computes.then(|| {
                format!(
                    "`{key}` on line {} is computed from `{name}` and changes with it: {raw}",
                    line(leaf)
                )
            })
        })
        .collect()
}

/// The name that the value at `value` is given: what stands before its `=` or `:`.
fn name_before<'t>(text: &'t str, value: &Span) -> &'t str {
    let line_start = text[..value.start].rfind('\n').map_or(0, |end| end + 1);
    let before = text[line_start..value.start].trim_end();
    let before = before.strip_suffix(['=', ':']).unwrap_or(before);
    // An annotation stands between the name and the value.
    let before = before.split(": ").next().unwrap_or(before);
    let before = before.trim_end().trim_end_matches(['"', '\'', ']']);
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let start = before.trim_end_matches(is_part).len();
    &before[start..]
}

/// Whether an expression has a name in it as a word of its own.
fn mentions(expression: &str, name: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    expression.match_indices(name).any(|(at, _)| {
        let before = expression[..at].chars().next_back();
        let after = expression[at + name.len()..].chars().next();
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

/// Whether a text takes the value at a path, as `${training.batch_size}` does.
fn interpolates(text: &str, path: &KeyPath) -> bool {
    let whole = path.join(".");
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.');
    let mut parts = text.split("${").skip(1);
    parts.any(|part| {
        let inside = part.split('}').next().unwrap_or_default();
        let mut names = inside.split(|c: char| !is_part(c));
        names.any(|name| name.trim_start_matches('.') == whole)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str, text: &str, key: &str) -> Vec<String> {
        let format = Format::of(std::path::Path::new(name), text);
        let outline = format.outline(text).unwrap();
        let document = outline.document(std::path::Path::new(name), format, text);
        let path: KeyPath = key.split('.').map(str::to_owned).collect();
        derived(format, text, &outline, Naming::of(&document), &path)
    }

    #[test]
    fn what_is_computed_from_a_value_is_told() {
        let text = "BATCH_SIZE = 4\nEVAL_BATCH = BATCH_SIZE * 4\nMY_BATCH_SIZE_2 = 3 + 1\n";
        assert_eq!(
            told("c.py", text, "BATCH_SIZE"),
            [
                "`EVAL_BATCH` on line 2 is computed from `BATCH_SIZE` and changes with it: BATCH_SIZE * 4"
            ]
        );
        let text = "def main():\n    size: int = 4\n    TrainingArguments(per_device_train_batch_size=size, per_device_eval_batch_size=size, n=size + 1)\n";
        assert_eq!(
            told(
                "c.py",
                text,
                "TrainingArguments.per_device_train_batch_size"
            ),
            [
                "`TrainingArguments.per_device_eval_batch_size` on line 3 is `size` and changes with it",
                "`TrainingArguments.n` on line 3 is computed from `size` and changes with it: size + 1",
            ]
        );
        let text = "batch_size: 4\nname: run\neval: {batch_size: \"${batch_size}\"}\nother: ${training.batch_size}\n";
        assert_eq!(told("c.yaml", text, "batch_size").len(), 1);
    }
}
