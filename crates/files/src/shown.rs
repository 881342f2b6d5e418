//! Paths in messages. A name may hold anything but a slash and a zero: line feeds that look like
//! another message, codes that a terminal obeys, bytes that are no text.

use std::fmt::{self, Write};
use std::path::Path;

/// A path as it is told to people: as it is where it is plain text, else as bash writes it,
/// `$'a\nb'`, so that it can be typed again.
pub fn shown<P: AsRef<Path> + ?Sized>(path: &P) -> Shown<'_> {
    Shown(path.as_ref())
}

#[derive(Clone, Copy, Debug)]
pub struct Shown<'a>(&'a Path);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = self.0.to_str();
        if let Some(text) = plain.filter(|text| !text.chars().any(is_odd)) {
            return formatter.write_str(text);
        }
        formatter.write_str("$'")?;
        for chunk in self.0.as_os_str().as_encoded_bytes().utf8_chunks() {
            for c in chunk.valid().chars() {
                match c {
                    '\n' => formatter.write_str("\\n")?,
                    '\t' => formatter.write_str("\\t")?,
                    '\'' | '\\' => write!(formatter, "\\{c}")?,
                    c if is_odd(c) => write!(formatter, "\\u{:04x}", u32::from(c))?,
                    c => formatter.write_char(c)?,
                }
            }
            for byte in chunk.invalid() {
                write!(formatter, "\\x{byte:02x}")?;
            }
        }
        formatter.write_char('\'')
    }
}

/// Whether a character is none that stands in a line for itself: a control code, or one that turns
/// the direction of what follows.
fn is_odd(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_odd_names_are_escaped() {
        for (name, text) in [
            ("runs/a b", "runs/a b"),
            ("läufe/it's", "läufe/it's"),
            ("a\nb", "$'a\\nb'"),
            ("\u{1b}[2J'\\", "$'\\u001b[2J\\'\\\\'"),
            ("a\u{202e}b", "$'a\\u202eb'"),
        ] {
            assert_eq!(shown(name).to_string(), text);
        }
    }

    #[cfg(unix)]
    #[test]
    fn bytes_that_are_no_text_are_told() {
        use std::os::unix::ffi::OsStrExt;
        let name = std::ffi::OsStr::from_bytes(b"run\xff\xc3");
        assert_eq!(shown(name).to_string(), "$'run\\xff\\xc3'");
    }
}
