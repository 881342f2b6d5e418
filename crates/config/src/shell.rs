//! Reads the flags of a command line in a shell script without running it: `--name value`,
//! `--name=value`, switches, and variables that are set to plain values.
//!
//! A flag whose value is a variable has the value that the script gives it; that value is changed
//! where it is set, not where it is used.

use std::collections::{BTreeMap, BTreeSet};

use crate::document::Scalar;
use crate::number;
use crate::outline::{Fault, Hold, Leaf, Outline, Span};

/// Flags whose value is every word up to the next flag: lists of names, as transformers' parser
/// takes them.
const LISTS: [&str; 5] = [
    "lora_target_modules",
    "target_modules",
    "lora_modules_to_save",
    "modules_to_save",
    "lora_target_parameters",
];

/// One word of the script.
struct Word {
    /// Quotation marks included.
    span: Span,
    /// What the program gets: quotation marks taken off, variables not replaced.
    text: String,
    /// Whether it opens a line or a command.
    is_first: bool,
}

/// Reads `text`, which has no byte order mark.
pub(crate) fn outline(text: &str) -> Result<Outline, Fault> {
    let words = words(text)?;
    if words.is_empty() {
        return Err(Fault::Empty);
    }
    let mut outline = Outline::default();
    let mut variables: BTreeMap<String, (Scalar, Span)> = BTreeMap::new();
    let mut set_again: BTreeSet<String> = BTreeSet::new();
    let mut at = 0;
    while at < words.len() {
        let word = &words[at];
        at += 1;
        let written = &text[word.span.clone()];
        if let Some((name, value)) = assigned(word).filter(|(name, _)| written.starts_with(name)) {
            let start = word.span.start + name.len() + 1;
            let scalar = scalar_of(value);
            let literal = (scalar.clone(), start..word.span.end);
            if variables.insert(name.to_owned(), literal).is_some() {
                set_again.insert(name.to_owned());
            }
            outline.leaves.push(Leaf {
                path: vec![name.to_owned()],
                name: word.span.start..start - 1,
                value: start..word.span.end,
                scalar,
                hold: None,
            });
            continue;
        }
        let Some(flag) = word.text.strip_prefix("--").filter(|name| !name.is_empty()) else {
            continue;
        };
        // Quotation marks inside of a name: where it ends is not known by its length.
        let is_literal = |name: &str| {
            let rest = written.strip_prefix("--");
            rest.is_some_and(|rest| rest.starts_with(name))
        };
        let (name, value, span) = match flag.split_once('=') {
            Some((name, value)) if !is_literal(name) => {
                (name, Some(value.to_owned()), word.span.clone())
            }
            Some((name, value)) => {
                let start = word.span.start + 2 + name.len() + 1;
                (name, Some(value.to_owned()), start..word.span.end)
            }
            None => match words.get(at).filter(|next| is_value(next)) {
                Some(next) => {
                    at += 1;
                    (flag, Some(next.text.clone()), next.span.clone())
                }
                None => (flag, None, word.span.end..word.span.end),
            },
        };
        let (scalar, span, hold) = match value {
            None => (
                Scalar::Bool(true),
                span,
                Some(Hold::Unwritable("a switch without a value")),
            ),
            Some(value) => match variable(&value).map(|name| (name, variables.get(name))) {
                // Where it is set once, it is changed there.
                Some((name, Some((known, literal)))) => {
                    let again = set_again.contains(name);
                    let hold = again.then_some(Hold::Unwritable("a variable that is set twice"));
                    (known.clone(), literal.clone(), hold)
                }
                Some((_, None)) => (
                    Scalar::Composite("a variable"),
                    span,
                    Some(Hold::Unwritable("a variable")),
                ),
                None => (scalar_of(&value), span, None),
            },
        };
        let path = name.replace('-', "_");
        let is_list = LISTS.contains(&path.as_str()) && !flag.contains('=');
        let more = words[at..]
            .iter()
            .take_while(|word| is_list && is_value(word));
        let more: Vec<&Word> = more.collect();
        let (scalar, span, hold) = match more.last() {
            None => (scalar, span, hold),
            Some(last) => {
                let span = words[at - 1].span.start..last.span.end;
                at += more.len();
                let known = |word: &&Word| match variable(&word.text) {
                    Some(name) => variables.get(name).map(|(scalar, _)| scalar.clone()),
                    None => Some(scalar_of(&word.text)),
                };
                let rest = more.iter().map(known);
                let rest = rest.map(|word| word.unwrap_or(Scalar::Composite("a variable")));
                let list = Scalar::list([scalar].into_iter().chain(rest).collect());
                (list, span, Some(Hold::Unwritable("several words")))
            }
        };
        let (name_span, hold) = if is_literal(name) {
            let start = word.span.start + 2;
            (start..start + name.len(), hold)
        } else {
            let quoted = Hold::Unwritable("a flag with quotation marks in its name");
            (word.span.clone(), Some(quoted))
        };
        outline.leaves.push(Leaf {
            path: vec![path],
            name: name_span,
            value: span,
            scalar,
            hold,
        });
    }
    match outline.leaves.is_empty() {
        true => Err(Fault::NotSections),
        false => Ok(outline),
    }
}

/// `NAME=value` where a command begins.
fn assigned(word: &Word) -> Option<(&str, &str)> {
    let (name, value) = word.text.split_once('=')?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name = !name.is_empty()
        && name.chars().all(plain)
        && !name.starts_with(|c: char| c.is_ascii_digit());
    (word.is_first && is_name && !value.is_empty()).then_some((name, value))
}

/// Whether a word can be the value of the flag before it.
fn is_value(word: &Word) -> bool {
    let negative = word
        .text
        .strip_prefix('-')
        .is_some_and(|rest| rest.parse::<f64>().is_ok());
    !word.is_first && (negative || !word.text.starts_with('-'))
}

/// The name of a word that is one variable and nothing else.
fn variable(text: &str) -> Option<&str> {
    let name = text.strip_prefix('$')?;
    let name = name
        .strip_prefix('{')
        .and_then(|name| name.strip_suffix('}'))
        .unwrap_or(name);
    Some(name)
}

fn scalar_of(text: &str) -> Scalar {
    match text {
        "True" | "true" => Scalar::Bool(true),
        "False" | "false" => Scalar::Bool(false),
        _ if text.contains('$') => Scalar::Composite("a text with variables"),
        _ => match number::canonical(text) {
            Some(number) => Scalar::Number(number),
            None => Scalar::Text(text.to_owned()),
        },
    }
}

/// The words of a script; comments are passed over, and a backslash joins lines.
fn words(text: &str) -> Result<Vec<Word>, Fault> {
    let bytes = text.as_bytes();
    let mut words = Vec::new();
    let mut is_first = true;
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'\n' | b';' | b'&' | b'|' | b'(' | b')' => {
                is_first = true;
                at += 1;
            }
            b' ' | b'\t' | b'\r' => at += 1,
            b'\\' if matches!(bytes.get(at + 1), Some(b'\n' | b'\r')) => at += 2,
            b'#' => {
                while at < bytes.len() && bytes[at] != b'\n' {
                    at += 1;
                }
            }
            _ => {
                let start = at;
                let (word, end) = word(text, start)?;
                // `export NAME=value` sets a variable too.
                let still_first = is_first && matches!(word.as_str(), "export" | "set" | "env");
                words.push(Word {
                    span: start..end,
                    text: word,
                    is_first,
                });
                is_first = still_first;
                at = end;
            }
        }
    }
    Ok(words)
}

/// The word that begins at `start`, and where it ends.
fn word(text: &str, start: usize) -> Result<(String, usize), Fault> {
    let mut word = String::new();
    let mut quote: Option<char> = None;
    let mut characters = text[start..].char_indices().peekable();
    while let Some((offset, c)) = characters.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some('"') | None, '\\') => match characters.next() {
                // A backslash at the end of a line joins it with the next.
                Some((_, '\n' | '\r')) if quote.is_none() => return Ok((word, start + offset)),
                Some((_, '\n' | '\r')) => {}
                Some((_, escaped)) => word.push(escaped),
                None => {}
            },
            (Some(_), c) => word.push(c),
            (None, '"' | '\'') => quote = Some(c),
            // What the shell computes belongs to the word: `$((BATCH * 2))`.
            (None, '$') if matches!(characters.peek(), Some((_, '('))) => {
                word.push(c);
                let mut depth = 0_usize;
                for (_, c) in characters.by_ref() {
                    word.push(c);
                    match c {
                        '(' => depth += 1,
                        ')' => depth = depth.saturating_sub(1),
                        _ => {}
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
            // Other blanks, such as a form feed, are part of a word to the shell too.
            (None, ' ' | '\t' | '\r' | '\n' | ';' | '&' | '|' | '(' | ')') => {
                return Ok((word, start + offset));
            }
            (None, c) => word.push(c),
        }
    }
    match quote {
        Some(open) => Err(Fault::syntax(
            start,
            format!("the quotation mark {open} is not closed"),
        )),
        None => Ok((word, text.len())),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::document::Document;

    fn read(text: &str) -> Vec<String> {
        let document = Document::read(Path::new("run.sh"), text).unwrap();
        let leaf = |entry: &crate::document::Entry| {
            format!("{}={} @{}", entry.key(), entry.scalar, entry.value_at.line)
        };
        document.entries.iter().map(leaf).collect()
    }

    #[test]
    fn flags_variables_and_switches_are_read() {
        let text = "#!/bin/bash\n# --per_device_train_batch_size 1\nexport BATCH=4\n\
                    CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node=2 train.py \\\n\
                    \x20   --per_device_train_batch_size $BATCH \\\n\
                    \x20   --learning-rate 2e-5 --bf16 True --gradient_checkpointing \\\n\
                    \x20   --output_dir \"out dir\"  # here\n";
        assert_eq!(
            read(text),
            [
                "BATCH=4 @3",
                "CUDA_VISIBLE_DEVICES=0 @4",
                "nproc_per_node=2 @4",
                "per_device_train_batch_size=4 @3",
                "learning_rate=2e-5 @6",
                "bf16=true @6",
                "gradient_checkpointing=true @6",
                "output_dir=\"out dir\" @7",
            ]
        );
    }

    #[test]
    fn names_of_a_list_are_read_up_to_the_next_flag() {
        let text = "Q=q_proj\ntorchrun --nproc_per_node 2 train.py --lora_target_modules $Q v_proj \\\n\
                    \x20 --lora-modules-to-save embed_tokens lm_head\n\
                    echo --target_modules a $B --modules_to_save=a b\n";
        assert_eq!(
            read(text),
            [
                "Q=\"q_proj\" @1",
                "nproc_per_node=2 @2",
                "lora_target_modules=[\"q_proj\", \"v_proj\"] @2",
                "lora_modules_to_save=[\"embed_tokens\", \"lm_head\"] @3",
                "target_modules=a list @4",
                "modules_to_save=\"a\" @4",
            ]
        );
    }

    #[test]
    fn blanks_that_the_shell_does_not_know_end() {
        let read = read("run --a \u{a0}4 --b\u{c} 5\n");
        assert_eq!(read, ["a=\"\\u{a0}4\" @1", "b\u{c}=5 @1"]);
    }

    #[test]
    fn names_in_quotation_marks_are_read() {
        let read = read("run '--é=3' \"--é\" 4 -'-é'=5\n");
        assert_eq!(read, ["é=3 @1", "é=4 @1", "é=5 @1"]);
    }

    #[test]
    fn an_open_quotation_mark_is_told() {
        let error = Document::read(Path::new("a.sh"), "run --a 'b\n").unwrap_err();
        assert!(error.to_string().contains("not closed"), "{error}");
    }
}
