//! Settings as the text of a file, each with what it is for.

use std::path::Path;

use cinch_config::{SETTINGS, Value};

use crate::failure::usage;

/// A setting to be written.
pub struct Entry {
    pub key: &'static str,
    value: Value,
}

impl Entry {
    pub fn new(key: &'static str, value: Value) -> Self {
        Self { key, value }
    }

    fn section(&self) -> &'static str {
        self.key.split_once('.').map_or("", |(section, _)| section)
    }

    fn name(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(_, name)| name)
    }

    fn help(&self) -> &'static str {
        let setting = SETTINGS.iter().find(|setting| setting.key == self.key);
        setting.map_or("", |setting| setting.help)
    }

    /// The value as all three languages write it: numbers and truth values bare, other words in
    /// quotation marks.
    fn literal(&self) -> String {
        let bare = |text: &str| text == "true" || text == "false" || text.parse::<f64>().is_ok();
        match &self.value {
            Value::Size(size) => format!("\"{}mb\"", size.get() >> 20),
            Value::Bool(_) | Value::Unsigned(_) | Value::Float(_) => self.value.to_string(),
            Value::Text(text) if bare(text) => text.clone(),
            Value::Text(_) | Value::Path(_) => {
                serde_json::Value::String(self.value.to_string()).to_string()
            }
        }
    }
}

/// A language for configuration files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    Yaml,
    Json,
    Toml,
}

impl Language {
    /// That of a file's ending.
    pub fn of(path: &Path) -> anyhow::Result<Self> {
        let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
        match ending.as_deref().and_then(|ending| ending.to_str()) {
            Some("yaml" | "yml") => Ok(Self::Yaml),
            Some("json" | "jsonc") => Ok(Self::Json),
            Some("toml") => Ok(Self::Toml),
            _ => Err(usage(format!(
                "{} has no ending that says how to write it\nhint: end it in .yaml, .json or .toml",
                path.display()
            ))),
        }
    }

    /// The file: what it is for, then the entries by section.
    pub fn write(self, heading: &[String], entries: &[Entry]) -> String {
        let comment = match self {
            Self::Json => "//",
            Self::Yaml | Self::Toml => "#",
        };
        let mut text = String::new();
        for line in heading {
            text += &format!("{comment} {line}\n");
        }
        if self == Self::Json {
            text += "{\n";
        }
        let sections: Vec<&[Entry]> = entries
            .chunk_by(|one, next| one.section() == next.section())
            .collect();
        for (place, section) in sections.iter().enumerate() {
            let is_last = place + 1 == sections.len();
            text += &self.section(section, is_last);
        }
        if self == Self::Json {
            text += "}\n";
        }
        text
    }

    fn section(self, entries: &[Entry], is_last: bool) -> String {
        let name = entries.first().map_or("", Entry::section);
        let mut text = match self {
            Self::Yaml => format!("\n{name}:\n"),
            Self::Toml => format!("\n[{name}]\n"),
            Self::Json => format!("  \"{name}\": {{\n"),
        };
        let (indent, comment) = match self {
            Self::Yaml => ("  ", "#"),
            Self::Toml => ("", "#"),
            Self::Json => ("    ", "//"),
        };
        for (place, entry) in entries.iter().enumerate() {
            let (key, value) = (entry.name(), entry.literal());
            let comma = if place + 1 == entries.len() { "" } else { "," };
            text += &format!("{indent}{comment} {}\n", entry.help());
            text += &match self {
                Self::Yaml => format!("{indent}{key}: {value}\n"),
                Self::Toml => format!("{indent}{key} = {value}\n"),
                Self::Json => format!("{indent}\"{key}\": {value}{comma}\n"),
            };
        }
        if self == Self::Json {
            text += if is_last { "  }\n" } else { "  },\n" };
        }
        text
    }
}
