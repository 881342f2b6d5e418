//! The texts that are embedded: lines of a file, or records in them.

use std::io::{self, Read};
use std::path::Path;

use anyhow::Context;
use cinch_data::taxonomy::CHANNEL_NAMES;
use serde_json::Value;

use crate::failure::{unread_input, usage};
use crate::progress::shown;

/// The largest file of texts that is read.
const LARGEST_FILE: u64 = 1 << 30;

/// What is embedded as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Text {
    Plain(String),
    /// Title, description, excluded and examples.
    Channels([String; CHANNEL_NAMES.len()]),
}

impl Text {
    /// Of each channel. A text without channels stands for its own title and description.
    pub fn channels(&self) -> [&str; CHANNEL_NAMES.len()] {
        match self {
            Self::Plain(text) => [text, text, "", ""],
            Self::Channels(channels) => channels.each_ref().map(String::as_str),
        }
    }
}

/// The texts of a file, and how many of its lines are empty.
pub struct Texts {
    /// With the numbers of their lines.
    pub texts: Vec<(usize, Text)>,
    pub empty_lines: usize,
}

impl Texts {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let content = match path == Path::new("-") {
            true => read_input()?,
            false => cinch_files::read_regular_text(path, LARGEST_FILE).map_err(|error| {
                usage(format!(
                    "cannot read {}: {error}\n\
                     hint: name a file with a text in each line, or - for standard input",
                    shown(path)
                ))
            })?,
        };
        let content = content.strip_prefix('\u{feff}').unwrap_or(&content);
        let is_json = path
            .extension()
            .is_some_and(|ending| ending == "jsonl" || ending == "ndjson");
        let (mut texts, mut empty_lines) = (Vec::new(), 0);
        for (number, line) in (1..).zip(content.lines()) {
            if line.trim().is_empty() {
                empty_lines += 1;
                continue;
            }
            let text = match is_json {
                true => record(line).with_context(|| place(path, number))?,
                false => Text::Plain(line.to_owned()),
            };
            texts.push((number, text));
        }
        match texts.is_empty() {
            true => Err(usage(format!("{} has no texts", named(path)))),
            false => Ok(Self { texts, empty_lines }),
        }
    }
}

/// Standard input, as whole as a file is.
fn read_input() -> anyhow::Result<String> {
    let mut content = String::new();
    let mut input = io::stdin().lock().take(LARGEST_FILE + 1);
    input.read_to_string(&mut content).map_err(unread_input)?;
    match content.len() as u64 > LARGEST_FILE {
        true => Err(usage(format!(
            "standard input has more than {} MiB\nhint: embed the texts in parts",
            LARGEST_FILE >> 20
        ))),
        false => Ok(content),
    }
}

/// A line of a file, for messages.
pub fn place(path: &Path, number: usize) -> String {
    format!("{} line {number}", named(path))
}

fn named(path: &Path) -> String {
    match path == Path::new("-") {
        true => "standard input".to_owned(),
        false => shown(path),
    }
}

fn record(line: &str) -> anyhow::Result<Text> {
    let value: Value = serde_json::from_str(line).map_err(|error| {
        usage(format!(
            "it is no JSON: {error}\n\
             hint: a .jsonl file has a record such as {{\"text\": \"…\"}} in each line; plain lines \
             go into a .txt file"
        ))
    })?;
    let field = |name: &str| value.get(name).and_then(Value::as_str);
    if let Some(other) = value
        .get("text")
        .filter(|text| !text.is_null() && !text.is_string())
    {
        return Err(usage(format!("`text` is {other}, not a string")));
    }
    if let Some(text) = field("text") {
        return Ok(Text::Plain(text.to_owned()));
    }
    let channels = CHANNEL_NAMES.map(|name| field(name).unwrap_or_default().to_owned());
    match channels.iter().all(String::is_empty) {
        true => Err(usage(format!(
            "there is no text: neither `text` nor any of {}",
            CHANNEL_NAMES.join(", ")
        ))),
        false => Ok(Text::Channels(channels)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_lines_or_records() {
        let plain = record("{\"text\": \"t\"}").unwrap();
        assert_eq!(plain, Text::Plain("t".to_owned()));
        assert_eq!(plain.channels(), ["t", "t", "", ""]);
        let record_of = |line| record(line).unwrap();
        let channels = record_of("{\"title\": \"t\", \"examples\": \"e\"}");
        assert_eq!(channels.channels(), ["t", "", "", "e"]);
        let problem = record("{\"code\": \"11\"}").unwrap_err().to_string();
        assert!(problem.contains("there is no text"), "{problem}");
        let problem = record("{\"text\": 5}").unwrap_err().to_string();
        assert!(problem.contains("`text` is 5"), "{problem}");
        let problem = record("soy bean farming").unwrap_err().to_string();
        assert!(problem.contains("no JSON"), "{problem}");
    }

    #[test]
    fn standard_input_is_called_so() {
        assert_eq!(place(Path::new("-"), 3), "standard input line 3");
        assert_eq!(place(Path::new("a.txt"), 3), "a.txt line 3");
    }

    #[test]
    fn empty_lines_are_counted_and_a_byte_order_mark_is_no_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("texts.txt");
        std::fs::write(&path, "\u{feff}oil\r\n\r\n gas\n\n").unwrap();
        let read = Texts::read(&path).unwrap();
        let plain = |text: &str| Text::Plain(text.to_owned());
        assert_eq!(read.texts, [(1, plain("oil")), (3, plain(" gas"))]);
        assert_eq!(read.empty_lines, 2);
    }
}
