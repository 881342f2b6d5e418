//! JSON arrays, cut at the commas of their outermost level.
//!
//! A file written without line breaks is one line, so this goes by bytes: the elements are what
//! is bounded, and each is parsed by itself.

use std::io::BufRead;
use std::path::Path;

use super::read::{Content, Found, LONGEST_RECORD_BYTES, Sink, read_error, too_long};
use crate::error::DataError;

/// Reads the elements of the array in `reader`.
pub(super) fn read(path: &Path, reader: impl BufRead, sink: Sink<'_>) -> Result<(), DataError> {
    let mut array = Array::default();
    for (offset, byte) in reader.bytes().enumerate() {
        let byte = byte.map_err(|source| read_error(path, source))?;
        let bad = |line, problem: &str| DataError::BadRecord {
            path: path.to_path_buf(),
            line,
            problem: problem.to_owned(),
        };
        let element = array
            .push(byte)
            .map_err(|problem| bad(array.line, problem))?;
        if array.element.len() > LONGEST_RECORD_BYTES {
            return Err(too_long(path, array.first_line));
        }
        let Some((line, bytes)) = element else {
            continue;
        };
        let num_bytes = bytes.len() as u64;
        let text = String::from_utf8(bytes).map_err(|error| DataError::NotUtf8 {
            path: path.to_path_buf(),
            offset: offset as u64 - num_bytes + error.utf8_error().valid_up_to() as u64,
        })?;
        let found = Found {
            line,
            num_bytes,
            content: Content::Json(text),
        };
        if !sink(found)? {
            return Ok(());
        }
    }
    match array.place {
        Place::After => Ok(()),
        _ => Err(DataError::BadRecord {
            path: path.to_path_buf(),
            line: array.line,
            problem: "the file ends before the list does".to_owned(),
        }),
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Before,
    Inside,
    After,
}

/// Where the scanner of an array is.
#[derive(Debug)]
struct Array {
    place: Place,
    element: Vec<u8>,
    num_elements: u64,
    /// The line that is read, and the one where the element begins.
    line: u64,
    first_line: u64,
    depth: usize,
    in_string: bool,
    after_backslash: bool,
}

impl Default for Array {
    fn default() -> Self {
        Self {
            place: Place::Before,
            element: Vec::new(),
            num_elements: 0,
            line: 1,
            first_line: 1,
            depth: 0,
            in_string: false,
            after_backslash: false,
        }
    }
}

impl Array {
    /// Takes one byte; at the end of an element, gives its line and its bytes.
    fn push(&mut self, byte: u8) -> Result<Option<(u64, Vec<u8>)>, &'static str> {
        if byte == b'\n' {
            self.line += 1;
        }
        let is_space = byte.is_ascii_whitespace();
        match self.place {
            Place::Before => {
                // Anything else before the bracket is a byte order mark.
                if byte == b'[' {
                    self.place = Place::Inside;
                }
                Ok(None)
            }
            Place::After if is_space => Ok(None),
            Place::After => Err("something follows the end of the list"),
            Place::Inside => {
                if self.element.is_empty() {
                    if is_space {
                        return Ok(None);
                    }
                    self.first_line = self.line;
                }
                if self.in_string {
                    self.in_string = self.after_backslash || byte != b'"';
                    self.after_backslash = !self.after_backslash && byte == b'\\';
                } else {
                    match byte {
                        b'"' => self.in_string = true,
                        b'{' | b'[' => self.depth += 1,
                        b']' if self.depth == 0 => {
                            self.place = Place::After;
                            if self.element.is_empty() && self.num_elements == 0 {
                                return Ok(None);
                            }
                            return self.end();
                        }
                        b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                        b',' if self.depth == 0 => return self.end(),
                        _ => {}
                    }
                }
                self.element.push(byte);
                Ok(None)
            }
        }
    }

    fn end(&mut self) -> Result<Option<(u64, Vec<u8>)>, &'static str> {
        if self.element.is_empty() {
            return Err("there is nothing beside a comma");
        }
        self.num_elements += 1;
        Ok(Some((self.first_line, std::mem::take(&mut self.element))))
    }
}
