//! The languages config files are written in, and which one a file is in.

use std::path::Path;

use crate::document::{Document, Scalar};
use crate::error::ConfigError;
use crate::outline::{Fault, Outline};
use crate::{json, python, shell, toml, yaml};

/// A language a config can be written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// With comments and trailing commas.
    Json,
    Yaml,
    Toml,
    /// Constants, dictionaries and class attributes of a module that is never run.
    Python,
    /// Flags of the commands in a script that is never run.
    Shell,
}

/// Every extension that names a format.
pub(crate) const EXTENSIONS: [(&str, Format); 8] = [
    ("json", Format::Json),
    ("jsonc", Format::Json),
    ("yaml", Format::Yaml),
    ("yml", Format::Yaml),
    ("toml", Format::Toml),
    ("py", Format::Python),
    ("sh", Format::Shell),
    ("bash", Format::Shell),
];

impl Format {
    pub const ALL: [Format; 5] = [
        Format::Json,
        Format::Yaml,
        Format::Toml,
        Format::Python,
        Format::Shell,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Format::Json => "JSON",
            Format::Yaml => "YAML",
            Format::Toml => "TOML",
            Format::Python => "Python",
            Format::Shell => "shell",
        }
    }

    /// By the file's extension, or else by what the text looks like.
    pub fn of(path: &Path, text: &str) -> Format {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let extension = extension.map(str::to_ascii_lowercase);
        EXTENSIONS
            .iter()
            .find(|(name, _)| Some(*name) == extension.as_deref())
            .map_or_else(|| Format::of_text(text), |(_, format)| *format)
    }

    /// The first language that makes sense of the text. JSON comes before YAML,
    /// whose flow maps contain it, and TOML before Python, which shares
    /// `name = 4`. A Python class reads as a YAML section whose values are texts
    /// like `int = 4`, so YAML gives way where Python finds more values that are
    /// no such texts.
    fn of_text(text: &str) -> Format {
        let text = without_mark(text);
        if text.starts_with("#!") && text.lines().next().is_some_and(|line| line.contains("sh")) {
            return Format::Shell;
        }
        let values = |format: Format| {
            let outline = format.outline(text).ok()?;
            let plain = outline.leaves.iter().filter(|leaf| match &leaf.scalar {
                Scalar::Text(text) => !text.contains('='),
                Scalar::Null | Scalar::List(_) | Scalar::Composite(_) => false,
                _ => true,
            });
            Some(plain.count())
        };
        let settled = [Format::Json, Format::Toml]
            .into_iter()
            .find(|format| values(*format).is_some());
        settled.unwrap_or_else(|| match (values(Format::Yaml), values(Format::Python)) {
            (Some(yaml), python) if yaml > 0 && Some(yaml) >= python => Format::Yaml,
            (_, Some(python)) if python > 0 => Format::Python,
            (Some(_), _) => Format::Yaml,
            _ => Format::Json,
        })
    }

    /// Reads `text`, which has no byte order mark.
    pub(crate) fn outline(self, text: &str) -> Result<Outline, Fault> {
        match self {
            Format::Json => json::outline(text),
            Format::Yaml => yaml::outline(text),
            Format::Toml => toml::outline(text),
            Format::Python => python::outline(text),
            Format::Shell => shell::outline(text),
        }
    }

    pub(crate) fn smallest(self) -> &'static str {
        match self {
            Format::Json | Format::Yaml => "{}",
            Format::Toml => "[model]",
            Format::Python => "BATCH_SIZE = 1",
            Format::Shell => "python train.py --batch_size 1",
        }
    }

    pub(crate) fn example(self) -> &'static str {
        match self {
            Format::Json => "{\"model\": {\"d_model\": 512}}",
            Format::Yaml => "model: {d_model: 512}",
            Format::Toml => "model = { d_model = 512 }",
            Format::Python => "model = {\"d_model\": 512}",
            Format::Shell => "python train.py --batch_size 1",
        }
    }

    /// What most often is the matter with a text that does not parse.
    pub(crate) fn advice(self) -> &'static str {
        match self {
            Format::Json => {
                "comments and trailing commas are allowed; names and texts need double quotation marks"
            }
            Format::Yaml => {
                "keys of one section begin in the same column, are indented by spaces, and a colon is followed by a space"
            }
            Format::Toml => {
                "texts need quotation marks, and sections are written [model] on a line of their own"
            }
            Format::Python => {
                "only constants, dictionaries and class attributes are read, but brackets and quotation marks must be closed"
            }
            Format::Shell => {
                "only flags and variables are read, but quotation marks must be closed"
            }
        }
    }
}

impl Document {
    /// Reads a config in whichever format it is; `path` also names it in errors.
    pub fn read(path: &Path, text: &str) -> Result<Document, ConfigError> {
        let text = without_mark(text);
        let format = Format::of(path, text);
        let outline = format
            .outline(text)
            .map_err(|fault| fault.in_file(path, format, text))?;
        Ok(outline.document(path, format, text))
    }
}

/// Some editors on Windows begin a file with a byte order mark.
pub(crate) fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_come_first() {
        for (name, format) in [
            ("a.json", Format::Json),
            ("a.YML", Format::Yaml),
            ("a.b.toml", Format::Toml),
            ("config.py", Format::Python),
        ] {
            assert_eq!(Format::of(Path::new(name), "nonsense ]["), format);
        }
    }

    #[test]
    fn other_names_are_judged_by_their_text() {
        for (text, format) in [
            ("{\"vram\": {\"batch_size\": 1}}", Format::Json),
            ("// note\n\"vram\": {}", Format::Json),
            ("vram:\n  batch_size: 1\n", Format::Yaml),
            ("a: 1\nb: 2\n", Format::Yaml),
            ("[vram]\nbatch_size = 1\n", Format::Toml),
            ("batch_size = 1\n", Format::Toml),
            ("import os\nBATCH_SIZE = 1\nFP16 = True\n", Format::Python),
            (
                "class Config:\n    batch_size: int = 4\n    fp16 = True\n",
                Format::Python,
            ),
            ("CONFIG = {\n  'batch_size': 1,\n}\n", Format::Python),
        ] {
            assert_eq!(Format::of(Path::new("run.conf"), text), format, "{text}");
        }
    }
}
