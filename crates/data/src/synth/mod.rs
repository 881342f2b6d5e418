//! Code-like files for those who have no data yet.
//!
//! Every file is a small program invented from a seed and printed in one of ten notations, with
//! names that stay the same from definition to test. The same seed gives the same files on any
//! machine and with any number of threads.

mod ada;
mod author;
mod brace_tests;
mod braces;
mod folder;
mod forms;
mod nodes;
mod page;
mod program;
mod prose;
mod python;
mod routines;
mod taxonomy;

pub use taxonomy::{TaxonomyShape, taxonomy};

use std::fmt;
use std::str::FromStr;

use crate::error::DataError;

pub use folder::{SynthOptions, SynthReport, generate};

/// What a file is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Language {
    Python,
    Rust,
    Go,
    C,
    Cpp,
    Java,
    JavaScript,
    TypeScript,
    Ada,
    Markdown,
}

impl Language {
    pub const ALL: [Self; 10] = [
        Self::Python,
        Self::Rust,
        Self::Go,
        Self::C,
        Self::Cpp,
        Self::Java,
        Self::JavaScript,
        Self::TypeScript,
        Self::Ada,
        Self::Markdown,
    ];

    /// The ending of its files, without the dot.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Python => "py",
            Self::Rust => "rs",
            Self::Go => "go",
            Self::C => "c",
            Self::Cpp => "cpp",
            Self::Java => "java",
            Self::JavaScript => "js",
            Self::TypeScript => "ts",
            Self::Ada => "adb",
            Self::Markdown => "md",
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Python => "python",
            Self::Rust => "rust",
            Self::Go => "go",
            Self::C => "c",
            Self::Cpp => "cpp",
            Self::Java => "java",
            Self::JavaScript => "javascript",
            Self::TypeScript => "typescript",
            Self::Ada => "ada",
            Self::Markdown => "markdown",
        })
    }
}

impl FromStr for Language {
    type Err = DataError;

    /// Accepts the name, the file ending, and `c++`.
    fn from_str(name: &str) -> Result<Self, DataError> {
        let wanted = name.to_ascii_lowercase().replace("c++", "cpp");
        let found = Self::ALL
            .into_iter()
            .find(|language| language.to_string() == wanted || language.extension() == wanted);
        found.ok_or_else(|| {
            let known: Vec<String> = Self::ALL.iter().map(Self::to_string).collect();
            DataError::UnknownLanguage {
                name: name.to_owned(),
                known: known.join(", "),
            }
        })
    }
}

/// A function takes about this many bytes with its test, in the average of all languages.
const BYTES_PER_FUNCTION: usize = 450;

/// One file's text of roughly `approx_bytes`, always a whole program.
pub fn text(language: Language, seed: u64, approx_bytes: usize) -> String {
    sized_program(language, seed, approx_bytes).1
}

/// The module's name and the text. The first attempt measures how long this program's functions
/// are in this language, the second has the number of them that fits.
fn sized_program(language: Language, seed: u64, approx_bytes: usize) -> (String, String) {
    let attempt = |num_functions: usize| {
        let program = author::write(seed, num_functions.max(1));
        let text = match language {
            Language::Python => python::render(&program),
            Language::Ada => ada::render(&program),
            Language::Markdown => prose::render(&program, seed),
            braces => braces::render(braces, &program),
        };
        (program.module, text)
    };
    let guess = approx_bytes.div_ceil(BYTES_PER_FUNCTION);
    let (_, first) = attempt(guess);
    attempt((guess * approx_bytes + first.len() / 2) / first.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_depends_on_the_seed_only_and_has_about_the_size_asked_for() {
        for language in Language::ALL {
            for bytes in [2_000, 8_000, 40_000] {
                let one = text(language, 11, bytes);
                assert_eq!(one, text(language, 11, bytes));
                assert_ne!(one, text(language, 12, bytes));
                let ratio = one.len() as f64 / bytes as f64;
                assert!(
                    (0.5..2.0).contains(&ratio),
                    "{language} {bytes}: {}",
                    one.len()
                );
            }
            assert!(!text(language, 0, 0).is_empty());
        }
    }

    #[test]
    fn brackets_and_blocks_are_balanced() {
        for language in Language::ALL {
            for seed in 0..20 {
                let text = text(language, seed, 3_000);
                for (open, close) in [('(', ')'), ('{', '}'), ('[', ']')] {
                    let count = |c: char| text.chars().filter(|&x| x == c).count();
                    assert_eq!(
                        count(open),
                        count(close),
                        "{language} {seed} {open}\n{text}"
                    );
                }
                assert!(!text.contains("\n\n\n\n"), "{language}: {text}");
            }
        }
    }

    #[test]
    fn assertions_agree_with_independent_arithmetic() {
        // raise_to_power is the one form that the standard library has too.
        let mut num_checked = 0;
        for seed in 0..60 {
            let program = author::write(seed, 12);
            for check in program
                .checks
                .iter()
                .filter(|c| c.function == "raise_to_power")
            {
                let (base, exponent) = (check.arguments[0].unwrap(), check.arguments[1].unwrap());
                assert_eq!(check.expected, base.pow(exponent as u32));
                num_checked += 1;
            }
            for check in program
                .checks
                .iter()
                .filter(|c| c.function.starts_with("largest_"))
            {
                let field = check.function.trim_start_matches("largest_");
                let Some(column) = program.fields.iter().position(|f| f == field) else {
                    continue;
                };
                let largest = program.samples.iter().map(|row| row[column]).max();
                assert_eq!(Some(check.expected), largest);
                num_checked += 1;
            }
        }
        assert!(num_checked > 50, "{num_checked}");
    }

    #[test]
    fn names_of_languages_round_trip() {
        for language in Language::ALL {
            assert_eq!(language.to_string().parse::<Language>().unwrap(), language);
            assert_eq!(language.extension().parse::<Language>().unwrap(), language);
        }
        assert_eq!("C++".parse::<Language>().unwrap(), Language::Cpp);
        let message = "cobol".parse::<Language>().unwrap_err().to_string();
        assert!(
            message.contains("cobol") && message.contains("markdown"),
            "{message}"
        );
    }
}
