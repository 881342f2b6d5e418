//! Reading files into pieces of documents, with memory bounded by the piece and not by the file.
//!
//! A text file is one document; a JSON-lines file holds one in each line. A long document comes
//! in several pieces where the tokenizer has a place that can be cut without changing a token.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::progress::Progress;
use crate::source::SourceFile;

/// Documents are cut into pieces of about this size: large enough that the work of a piece
/// dwarfs the cost of handing it to a thread.
const PIECE_BYTES: usize = 1 << 20;
const BYTE_ORDER_MARK: &str = "\u{FEFF}";

/// A part of one document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) ends_document: bool,
    /// How many bytes of the source this accounts for in progress.
    pub(crate) source_bytes: u64,
}

/// What identifies a file's content.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct SourceRecord {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
}

/// Hashes what passes through it.
struct Hashing<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hash.update(&buffer[..count]);
        Ok(count)
    }
}

/// Receives pieces in order.
type Sink<'a> = &'a mut dyn FnMut(Piece) -> Result<(), DataError>;

/// The last place where a text may be cut, see `Tokenizer::last_cut`.
type LastCut<'a> = &'a dyn Fn(&str) -> Option<usize>;

fn open(path: &Path) -> Result<Hashing<File>, DataError> {
    let inner = cinch_files::open_regular(path).map_err(|source| read_error(path, source))?;
    Ok(Hashing {
        inner,
        hash: Sha256::new(),
    })
}

fn read_error(path: &Path, source: io::Error) -> DataError {
    DataError::Read {
        path: path.to_path_buf(),
        source,
    }
}

/// Identifies a file by reading all of it: sizes and times do not change when an editor or a
/// checkout restores them.
pub(crate) fn identify(
    file: &SourceFile,
    progress: &dyn Progress,
) -> Result<SourceRecord, DataError> {
    let mut reader = open(&file.path)?;
    let mut buffer = vec![0; 1 << 18];
    let mut bytes = 0;
    loop {
        let count = reader
            .read(&mut buffer)
            .map_err(|source| read_error(&file.path, source))?;
        if count == 0 {
            break;
        }
        bytes += count as u64;
        progress.advance(count as u64);
        if progress.is_interrupted() {
            return Err(DataError::Interrupted);
        }
    }
    Ok(SourceRecord {
        name: file.name.clone(),
        bytes,
        sha256: format!("{:x}", reader.hash.finalize()),
    })
}

/// Reads a file as documents. `record` is what `identify` said of it: if the content is another
/// one by now, the tokens would be filed under the wrong name, so that is an error.
pub(crate) fn read(
    file: &SourceFile,
    record: &SourceRecord,
    text_column: &str,
    last_cut: LastCut<'_>,
    sink: Sink<'_>,
) -> Result<(), DataError> {
    let reader = open(&file.path)?;
    let hash = if file.json_lines {
        read_json_lines(&file.path, reader, text_column, sink)?
    } else {
        read_text(&file.path, reader, last_cut, sink)?
    };
    if format!("{:x}", hash.finalize()) != record.sha256 {
        return Err(DataError::Changed {
            path: file.path.clone(),
        });
    }
    Ok(())
}

fn read_text(
    path: &Path,
    mut reader: Hashing<File>,
    last_cut: LastCut<'_>,
    sink: Sink<'_>,
) -> Result<Sha256, DataError> {
    // Bytes read and not handed on yet; the first of them lies at `offset` in the file.
    let mut held: Vec<u8> = Vec::new();
    let mut offset = 0u64;
    loop {
        // At least doubling what is held keeps the scanning of a text that cannot be cut linear.
        let wanted = held.len().max(PIECE_BYTES) as u64;
        let count = (&mut reader)
            .take(wanted)
            .read_to_end(&mut held)
            .map_err(|source| read_error(path, source))?;
        let at_end = (count as u64) < wanted;
        let valid = match std::str::from_utf8(&held) {
            Ok(text) => text,
            // A character cut by the end of the block continues in the next one.
            Err(error) if error.error_len().is_none() && !at_end => {
                std::str::from_utf8(&held[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => {
                return Err(DataError::NotUtf8 {
                    path: path.to_path_buf(),
                    offset: offset + error.valid_up_to() as u64,
                });
            }
        };
        let cut = if at_end {
            valid.len()
        } else {
            match last_cut(valid) {
                Some(cut) => cut,
                None => continue,
            }
        };
        let mut text = &valid[..cut];
        if offset == 0 {
            text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
        }
        // An empty file is no document; an empty last piece still ends the one before it.
        if !text.is_empty() || offset > 0 {
            sink(Piece {
                text: text.to_owned(),
                ends_document: at_end,
                source_bytes: cut as u64,
            })?;
        }
        if at_end {
            return Ok(reader.hash);
        }
        held.drain(..cut);
        offset += cut as u64;
    }
}

fn read_json_lines(
    path: &Path,
    reader: Hashing<File>,
    column: &str,
    sink: Sink<'_>,
) -> Result<Sha256, DataError> {
    let mut reader = BufReader::with_capacity(1 << 18, reader);
    let mut bytes = Vec::new();
    let mut offset = 0u64;
    for line in 1u64.. {
        bytes.clear();
        let count = reader
            .read_until(b'\n', &mut bytes)
            .map_err(|source| read_error(path, source))?;
        if count == 0 {
            break;
        }
        let mut text = std::str::from_utf8(&bytes).map_err(|error| DataError::NotUtf8 {
            path: path.to_path_buf(),
            offset: offset + error.valid_up_to() as u64,
        })?;
        if line == 1 {
            text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
        }
        offset += count as u64;
        if text.trim().is_empty() {
            continue;
        }
        let document = text_of_line(path, line, text, column)?;
        if !document.is_empty() {
            sink(Piece {
                text: document,
                ends_document: true,
                source_bytes: count as u64,
            })?;
        }
    }
    Ok(reader.into_inner().hash)
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn text_of_line(path: &Path, line: u64, text: &str, column: &str) -> Result<String, DataError> {
    let bad = |problem: String| DataError::BadJsonLine {
        path: path.to_path_buf(),
        line,
        problem,
    };
    let value: Value = serde_json::from_str(text).map_err(|error| {
        // The parser counts lines inside the one line it was given, which would mislead.
        let whole = error.to_string();
        let problem = whole.split(" at line ").next().unwrap_or(&whole);
        bad(format!(
            "not JSON: {problem} at character {}",
            error.column()
        ))
    })?;
    let Value::Object(mut object) = value else {
        return Err(bad(format!("found {}, not an object", kind_of(&value))));
    };
    match object.remove(column) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(DataError::ColumnNotText {
            path: path.to_path_buf(),
            line,
            column: column.to_owned(),
            found: kind_of(&other),
        }),
        None => Err(DataError::MissingColumn {
            path: path.to_path_buf(),
            line,
            column: column.to_owned(),
            columns: object.keys().cloned().collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boundary;
    use crate::progress::NoProgress;
    use crate::source::single_file;

    fn read_all(
        name: &str,
        content: &[u8],
        last_cut: LastCut<'_>,
    ) -> Result<Vec<Piece>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let file = single_file(&path).unwrap();
        let record = identify(&file, &NoProgress).unwrap();
        assert_eq!(record.bytes, content.len() as u64);
        let mut pieces = Vec::new();
        read(&file, &record, "text", last_cut, &mut |piece| {
            pieces.push(piece);
            Ok(())
        })?;
        Ok(pieces)
    }

    fn whole(_: &str) -> Option<usize> {
        None
    }

    fn texts(pieces: &[Piece]) -> Vec<&str> {
        pieces.iter().map(|piece| piece.text.as_str()).collect()
    }

    #[test]
    fn a_long_text_comes_in_pieces_that_add_up() {
        // Three-byte characters, so that blocks end inside one.
        let text = "漢字 and words\n".repeat(200_000);
        let pieces = read_all("a.txt", text.as_bytes(), &boundary::last_cut).unwrap();
        assert!(pieces.len() > 2);
        assert!(
            pieces
                .iter()
                .all(|piece| piece.text.len() <= 2 * PIECE_BYTES)
        );
        assert_eq!(texts(&pieces).concat(), text);
        let ends: Vec<bool> = pieces.iter().map(|piece| piece.ends_document).collect();
        assert_eq!(ends.iter().filter(|&&end| end).count(), 1);
        assert!(ends[ends.len() - 1]);
        let pieces = read_all("a.txt", text.as_bytes(), &whole).unwrap();
        assert_eq!(texts(&pieces), [text]);
    }

    #[test]
    fn a_document_that_ends_with_a_block_is_ended() {
        let text = "x".repeat(PIECE_BYTES);
        let pieces = read_all("a.txt", text.as_bytes(), &|t| Some(t.len())).unwrap();
        assert_eq!(texts(&pieces), [text.as_str(), ""]);
        assert!(pieces[1].ends_document);
    }

    #[test]
    fn empty_files_are_no_documents_and_marks_are_dropped() {
        assert!(read_all("a.txt", b"", &whole).unwrap().is_empty());
        assert!(
            read_all("a.txt", b"\xEF\xBB\xBF", &whole)
                .unwrap()
                .is_empty()
        );
        assert_eq!(
            texts(&read_all("a.txt", b"\xEF\xBB\xBFhi", &whole).unwrap()),
            ["hi"]
        );
    }

    #[test]
    fn the_offset_of_a_bad_byte_is_exact() {
        let mut content = "word ".repeat(500_000).into_bytes();
        let position = 2_000_001;
        content[position] = 0xFF;
        let error = read_all("a.txt", &content, &boundary::last_cut).unwrap_err();
        assert!(matches!(&error, DataError::NotUtf8 { offset, .. } if *offset == position as u64));
        assert!(error.to_string().contains("iconv"));
        // A character that the file's end cuts off.
        let error = read_all("a.txt", b"ok \xE6\xBC", &whole).unwrap_err();
        assert!(matches!(error, DataError::NotUtf8 { offset: 3, .. }));
        let error = read_all("a.jsonl", b"{\"text\":\"a\"}\n{\"text\":\"\xFF\"}", &whole);
        assert!(matches!(error, Err(DataError::NotUtf8 { offset: 22, .. })));
    }

    #[test]
    fn each_json_line_is_a_document() {
        let content = b"{\"text\":\"one\\n\"}\n\n  \r\n{\"id\":3,\"text\":\"two\"}\r\n{\"text\":\"\"}\n{\"text\":\"end\"}";
        let pieces = read_all("a.JSONL", content, &whole).unwrap();
        assert_eq!(texts(&pieces), ["one\n", "two", "end"]);
        assert!(pieces.iter().all(|piece| piece.ends_document));
    }

    #[test]
    fn a_bad_json_line_is_named_with_what_was_found() {
        let message = |content: &str| {
            let error = read_all("a.jsonl", content.as_bytes(), &whole).unwrap_err();
            error.to_string()
        };
        let text = message("{\"text\":\"a\"}\n\n{\"text\": oops}");
        assert!(
            text.contains("line 3") && text.contains("not JSON"),
            "{text}"
        );
        let text = message("[1]");
        assert!(text.contains("line 1") && text.contains("a list"), "{text}");
        let text = message("{\"prompt\":\"a\",\"completion\":\"b\"}");
        assert!(
            text.contains("`prompt`, `completion`") && text.contains("--text-column"),
            "{text}"
        );
        let text = message("{\"text\":4}");
        assert!(text.contains("a number"), "{text}");
    }

    #[test]
    fn a_file_that_changed_since_it_was_identified_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        std::fs::write(&path, "before").unwrap();
        let file = single_file(&path).unwrap();
        let record = identify(&file, &NoProgress).unwrap();
        std::fs::write(&path, "after!").unwrap();
        let result = read(&file, &record, "text", &whole, &mut |_| Ok(()));
        assert!(matches!(result, Err(DataError::Changed { .. })));
    }

    #[cfg(unix)]
    #[test]
    fn an_unreadable_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loop.txt");
        std::os::unix::fs::symlink("loop.txt", &path).unwrap();
        let message = single_file(&path).unwrap_err().to_string();
        assert!(
            message.contains("cannot read") && message.contains("loop.txt"),
            "{message}"
        );
    }
}
