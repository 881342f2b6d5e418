//! Reading files into pieces of documents, with memory bounded by the piece and not by the file.
//!
//! A text file is one document; a JSON-lines file holds one in each line, which may have up to
//! 64 MiB. A document longer than a piece (`PIECE_BYTES`) comes in
//! several, cut where no token changes, or, where there is no such place, at one that is counted
//! and told. A text file of any length takes the memory of two pieces, a line about three times
//! its bytes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::json_line::{self, Line};
use crate::progress::Progress;
use crate::source::SourceFile;
use crate::tokenizer::{PIECE_BYTES, Tokenizer};

/// Longer lines of a JSON-lines file are refused: a line is held whole.
const LONGEST_LINE_BYTES: u64 = 64 << 20;
const BYTE_ORDER_MARK: &str = "\u{FEFF}";

/// A part of one document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) ends_document: bool,
    /// Whether the tokens beside its end are those of the uncut text.
    pub(crate) is_exact: bool,
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
    tokenizer: &Tokenizer,
    progress: &dyn Progress,
    sink: Sink<'_>,
) -> Result<(), DataError> {
    let reader = open(&file.path)?;
    let hash = if file.json_lines {
        let lines = JsonLines {
            path: &file.path,
            column: text_column,
        };
        lines.read(reader, tokenizer, progress, sink)?
    } else {
        read_text(&file.path, reader, tokenizer, sink)?
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
    tokenizer: &Tokenizer,
    sink: Sink<'_>,
) -> Result<Sha256, DataError> {
    let wanted = PIECE_BYTES as u64;
    // Bytes read and not handed on yet; the first of them lies at `offset` in the file.
    let mut held: Vec<u8> = Vec::new();
    let mut offset = 0u64;
    loop {
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
        let mut rest = valid;
        if offset == 0 {
            rest = rest.strip_prefix(BYTE_ORDER_MARK).unwrap_or(rest);
        }
        rest = hand_on(rest, tokenizer, sink)?;
        if at_end {
            // An empty file is no document.
            if !rest.is_empty() {
                sink(Piece {
                    text: rest.to_owned(),
                    ends_document: true,
                    is_exact: true,
                    source_bytes: rest.len() as u64,
                })?;
            }
            return Ok(reader.hash);
        }
        let handed_on = valid.len() - rest.len();
        held.drain(..handed_on);
        offset += handed_on as u64;
    }
}

/// A file whose lines are objects, of which one column is text.
struct JsonLines<'a> {
    path: &'a Path,
    column: &'a str,
}

impl JsonLines<'_> {
    fn read(
        &self,
        reader: Hashing<File>,
        tokenizer: &Tokenizer,
        progress: &dyn Progress,
        sink: Sink<'_>,
    ) -> Result<Sha256, DataError> {
        let path = self.path;
        let mut reader = BufReader::with_capacity(1 << 18, reader);
        let mut bytes = Vec::new();
        let mut offset = 0u64;
        for line in 1u64.. {
            // Lines without text reach nobody else who would look.
            if progress.is_interrupted() {
                return Err(DataError::Interrupted);
            }
            bytes.clear();
            let count = (&mut reader)
                .take(LONGEST_LINE_BYTES + 1)
                .read_until(b'\n', &mut bytes)
                .map_err(|source| read_error(path, source))?;
            if count == 0 {
                break;
            }
            if count as u64 > LONGEST_LINE_BYTES {
                return Err(DataError::LineTooLong {
                    path: path.to_path_buf(),
                    line,
                    longest_bytes: LONGEST_LINE_BYTES,
                });
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
            let document = self.text(line, text)?;
            let rest = hand_on(&document, tokenizer, sink)?;
            if !rest.is_empty() {
                let accounted = document.len() - rest.len();
                sink(Piece {
                    text: rest.to_owned(),
                    ends_document: true,
                    is_exact: true,
                    // A text never has more bytes than its JSON.
                    source_bytes: count.saturating_sub(accounted) as u64,
                })?;
            }
        }
        Ok(reader.into_inner().hash)
    }

    fn text(&self, line: u64, text: &str) -> Result<String, DataError> {
        let column = self.column;
        let path = || self.path.to_path_buf();
        let bad = |problem: String| DataError::BadJsonLine {
            path: path(),
            line,
            problem,
        };
        match json_line::parse(text, column).map_err(bad)? {
            Line::Text(text) => Ok(text),
            Line::NotAnObject(kind) => Err(bad(format!("found {kind}, not an object"))),
            Line::ColumnNotText(found) => Err(DataError::ColumnNotText {
                path: path(),
                line,
                column: column.to_owned(),
                found,
            }),
            Line::NoColumn(columns) => Err(DataError::MissingColumn {
                path: path(),
                line,
                column: column.to_owned(),
                columns,
            }),
        }
    }
}

/// Hands on the pieces of a text that are known to be followed by more of it, and returns the
/// rest.
fn hand_on<'t>(
    mut text: &'t str,
    tokenizer: &Tokenizer,
    sink: Sink<'_>,
) -> Result<&'t str, DataError> {
    while let Some(cut) = tokenizer.cut(text) {
        sink(Piece {
            text: text[..cut.at].to_owned(),
            ends_document: false,
            is_exact: cut.is_exact,
            source_bytes: cut.at as u64,
        })?;
        text = &text[cut.at..];
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;
    use crate::source::single_file;
    use crate::tokenizer::TokenizerSpec;

    fn gpt2() -> Tokenizer {
        Tokenizer::load(&TokenizerSpec::Gpt2).unwrap()
    }

    fn read_all(name: &str, content: &[u8]) -> Result<Vec<Piece>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let file = single_file(&path).unwrap();
        let record = identify(&file, &NoProgress).unwrap();
        assert_eq!(record.bytes, content.len() as u64);
        let mut pieces = Vec::new();
        read(&file, &record, "text", &gpt2(), &NoProgress, &mut |piece| {
            pieces.push(piece);
            Ok(())
        })?;
        Ok(pieces)
    }

    fn texts(pieces: &[Piece]) -> Vec<&str> {
        pieces.iter().map(|piece| piece.text.as_str()).collect()
    }

    #[test]
    fn a_long_text_comes_in_pieces_that_add_up() {
        // Three-byte characters, so that blocks end inside one.
        let text = "漢字 and words\n".repeat(200_000);
        let line = format!("{{\"text\":{}}}\n", serde_json::Value::from(text.as_str()));
        for (name, content) in [("a.txt", &text), ("a.jsonl", &line)] {
            let pieces = read_all(name, content.as_bytes()).unwrap();
            assert!(pieces.len() > 2);
            let longest = PIECE_BYTES;
            assert!(pieces.iter().all(|piece| piece.text.len() <= longest));
            assert!(pieces.iter().all(|piece| piece.is_exact));
            assert_eq!(texts(&pieces).concat(), text);
            let ends: Vec<bool> = pieces.iter().map(|piece| piece.ends_document).collect();
            assert_eq!(ends.iter().filter(|&&end| end).count(), 1);
            assert!(ends[ends.len() - 1]);
            let accounted: u64 = pieces.iter().map(|piece| piece.source_bytes).sum();
            assert_eq!(accounted, content.len() as u64);
        }
    }

    #[test]
    fn a_document_of_whole_pieces_is_ended_once() {
        let longest = PIECE_BYTES;
        for (len, num_pieces) in [(longest, 1), (2 * longest, 2), (2 * longest + 1, 3)] {
            let text = "x".repeat(len);
            let pieces = read_all("a.txt", text.as_bytes()).unwrap();
            assert_eq!(texts(&pieces).concat(), text);
            assert_eq!(pieces.len(), num_pieces);
            // A word has no place where it could be cut unseen.
            let (last, others) = pieces.split_last().unwrap();
            assert!(others.iter().all(|piece| !piece.is_exact));
            assert!(last.ends_document && last.is_exact);
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_named() {
        let longest = LONGEST_LINE_BYTES as usize;
        let mut content = b"{\"text\":\"a\"}\n".to_vec();
        let before = content.len();
        content.resize(before + longest, b' ');
        assert_eq!(read_all("a.jsonl", &content).unwrap().len(), 1);
        content.push(b' ');
        let message = read_all("a.jsonl", &content).unwrap_err().to_string();
        assert!(
            message.contains("a.jsonl") && message.contains("line 2") && message.contains("64 MiB"),
            "{message}"
        );
    }

    #[test]
    fn empty_files_are_no_documents_and_marks_are_dropped() {
        assert!(read_all("a.txt", b"").unwrap().is_empty());
        assert!(read_all("a.txt", b"\xEF\xBB\xBF").unwrap().is_empty());
        assert_eq!(
            texts(&read_all("a.txt", b"\xEF\xBB\xBFhi").unwrap()),
            ["hi"]
        );
    }

    #[test]
    fn the_offset_of_a_bad_byte_is_exact() {
        let mut content = "word ".repeat(500_000).into_bytes();
        let position = 2_000_001;
        content[position] = 0xFF;
        let error = read_all("a.txt", &content).unwrap_err();
        assert!(matches!(&error, DataError::NotUtf8 { offset, .. } if *offset == position as u64));
        assert!(error.to_string().contains("iconv"));
        // A character that the file's end cuts off.
        let error = read_all("a.txt", b"ok \xE6\xBC").unwrap_err();
        assert!(matches!(error, DataError::NotUtf8 { offset: 3, .. }));
        let error = read_all("a.jsonl", b"{\"text\":\"a\"}\n{\"text\":\"\xFF\"}");
        assert!(matches!(error, Err(DataError::NotUtf8 { offset: 22, .. })));
    }

    #[test]
    fn each_json_line_is_a_document() {
        let content = b"{\"text\":\"one\\n\"}\n\n  \r\n{\"id\":3,\"text\":\"two\"}\r\n{\"text\":\"\"}\n{\"text\":\"end\"}";
        let pieces = read_all("a.JSONL", content).unwrap();
        assert_eq!(texts(&pieces), ["one\n", "two", "end"]);
        assert!(pieces.iter().all(|piece| piece.ends_document));
    }

    #[test]
    fn a_bad_json_line_is_named_with_what_was_found() {
        let message = |content: &str| {
            let error = read_all("a.jsonl", content.as_bytes()).unwrap_err();
            error.to_string()
        };
        let text = message("{\"text\":\"a\"}\n\n{\"text\": oops}");
        assert!(
            text.contains("line 3") && text.contains("not JSON"),
            "{text}"
        );
        let text = message("[1]");
        assert!(text.contains("line 1") && text.contains("a list"), "{text}");
        let text = message("{\"title\":\"a\",\"body\":\"b\"}");
        assert!(
            text.contains("`title`, `body`") && text.contains("--text-column"),
            "{text}"
        );
        let text = message("{\"prompt\":\"a\",\"completion\":\"b\"}");
        assert!(
            text.contains("`prompt`, `completion`") && text.contains("--data-dir"),
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
        let result = read(
            &file,
            &record,
            "text",
            &gpt2(),
            &NoProgress,
            &mut |_| Ok(()),
        );
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
