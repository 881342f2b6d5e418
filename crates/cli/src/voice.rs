//! How much is said, and what is coloured: decided once, by the command line and by who reads.

use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use cinch_config::Settings;

use crate::table;

/// How much is said besides the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verbosity {
    /// The answer and errors.
    Quiet,
    /// Notes and progress too.
    #[default]
    Normal,
    /// Where each setting came from too.
    Verbose,
}

static VERBOSITY: OnceLock<Verbosity> = OnceLock::new();

/// Sets how much is said from now on; only the first call counts.
pub fn set(verbosity: Verbosity) {
    let _ = VERBOSITY.set(verbosity);
}

fn verbosity() -> Verbosity {
    VERBOSITY.get().copied().unwrap_or_default()
}

pub fn is_quiet() -> bool {
    is_hushed() || verbosity() == Verbosity::Quiet
}

/// Whether another process gives the answer.
static HUSHED: AtomicBool = AtomicBool::new(false);

/// Leaves everything but errors to the first of several processes.
pub fn hush() {
    HUSHED.store(true, Ordering::Relaxed);
}

pub fn is_hushed() -> bool {
    HUSHED.load(Ordering::Relaxed)
}

pub fn is_verbose() -> bool {
    !is_hushed() && verbosity() == Verbosity::Verbose
}

/// A line on standard error. Where nobody reads it any more, the work goes on: a training run
/// does not end because the terminal that showed its progress did.
pub fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Notes in lines of their own; none with `--quiet`.
pub fn notes<'a>(notes: impl IntoIterator<Item = &'a String>) -> String {
    if is_quiet() {
        return String::new();
    }
    let lines = notes.into_iter().map(|note| table::note(note) + "\n");
    lines.collect()
}

/// A note beside the answer, on standard error, if there is one; none with `--quiet`.
pub fn aside(note: Option<String>) {
    if let Some(note) = note.filter(|_| !is_quiet()) {
        tell(&message(&table::note(&note)));
    }
}

/// With `--verbose`, where each setting came from, on standard error.
pub fn explain(settings: &Settings) {
    if is_verbose() {
        tell(&table::explain(&settings.explain()).to_string());
    }
}

/// What a colour stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    Good,
    Bad,
    Way,
}

impl Paint {
    /// The number of the terminal's own colour, in bold where it is a verdict.
    fn code(self) -> &'static str {
        match self {
            Self::Good => "1;32",
            Self::Bad => "1;31",
            Self::Way => "36",
        }
    }

    fn on(self, text: &str) -> String {
        format!("\u{1b}[{}m{text}\u{1b}[0m", self.code())
    }
}

/// Whether a person reads it in a terminal that shows colours and has not been told otherwise
/// (<https://no-color.org>).
fn is_colored(stream: &impl IsTerminal) -> bool {
    let refuses = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_plain = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    stream.is_terminal() && !refuses && !is_plain
}

/// Text of the answer, coloured where a person reads it.
pub fn painted(text: &str, paint: Paint) -> String {
    match is_colored(&std::io::stdout()) {
        true => paint.on(text),
        false => text.to_owned(),
    }
}

/// `fits` or `does not fit`.
pub fn verdict(fits: bool) -> String {
    match fits {
        true => painted("fits", Paint::Good),
        false => painted("does not fit", Paint::Bad),
    }
}

/// Lines of a diff, green where something is added and red where it goes.
pub fn diff(text: &str) -> String {
    let line = |line: &str| match line.as_bytes().first() {
        Some(b'+') if !line.starts_with("+++") => painted(line, Paint::Good) + "\n",
        Some(b'-') if !line.starts_with("---") => painted(line, Paint::Bad) + "\n",
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

/// A message for standard error: on a terminal broken between words, its marks coloured.
pub fn message(text: &str) -> String {
    let text = match table::error_width() {
        Some(width) => table::broken(text, width),
        None => text.to_owned(),
    };
    match is_colored(&std::io::stderr()) {
        true => marked(&text),
        false => text,
    }
}

fn marked(message: &str) -> String {
    const MARKS: [(&str, Paint); 2] = [("error:", Paint::Bad), ("hint:", Paint::Way)];
    let line = |line: &str| {
        let mark = MARKS.iter().find(|(mark, _)| line.starts_with(mark));
        mark.map_or_else(
            || line.to_owned(),
            |(mark, paint)| paint.on(mark) + &line[mark.len()..],
        )
    };
    message.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_piped_has_no_colour() {
        // The output of tests is no terminal.
        assert_eq!(verdict(true), "fits");
        assert_eq!(verdict(false), "does not fit");
        assert_eq!(diff("--- a\n-1\n+2"), "--- a\n-1\n+2\n");
    }

    #[test]
    fn the_first_words_of_an_error_are_coloured() {
        assert_eq!(
            marked("error: no file\nhint: name one"),
            "\u{1b}[1;31merror:\u{1b}[0m no file\n\u{1b}[36mhint:\u{1b}[0m name one"
        );
        assert_eq!(marked("no mark here"), "no mark here");
    }
}
