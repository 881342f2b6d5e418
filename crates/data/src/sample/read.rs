//! From files to records with their places: JSON lines, JSON arrays, text and Penman graphs.
//!
//! Files are read as streams, so that memory is bounded by the longest record and not by the
//! file; a record longer than [`LONGEST_RECORD_BYTES`] is refused.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::array;
use super::penman::Blocks;
use super::record::{Kind, Record};
use crate::error::DataError;

/// Far above any sample that a model can take, far below what would exhaust memory.
pub const LONGEST_RECORD_BYTES: usize = 16 << 20;

/// How much of a file is looked at to see what it is.
const SNIFFED_BYTES: usize = 1 << 16;

const JSON_EXTENSIONS: [&str; 3] = ["jsonl", "json", "ndjson"];
const TEXT_EXTENSIONS: [&str; 5] = ["txt", "text", "md", "amr", "penman"];
/// Files of tables and packed ones, which are no text and no JSON lines.
pub(crate) const UNREAD_EXTENSIONS: [&str; 9] = [
    "parquet", "arrow", "gz", "zst", "zip", "csv", "tsv", "xlsx", "xz",
];

/// What one sample of a plain text file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextUnit {
    /// Each line that is not blank.
    #[default]
    Line,
    /// The whole file.
    File,
}

/// How a file is cut into records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    JsonLines,
    JsonArray,
    Lines,
    File,
    Penman,
}

impl Format {
    /// The kind that all records of such a file have; a JSON file's is known by its first record.
    pub(super) fn kind(self) -> Option<Kind> {
        match self {
            Self::JsonLines | Self::JsonArray => None,
            Self::Lines => Some(Kind::Lines),
            Self::File => Some(Kind::File),
            Self::Penman => Some(Kind::Penman),
        }
    }
}

/// A record as it was found.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Found {
    /// The line of the file where it begins, from 1.
    pub(super) line: u64,
    /// How many bytes of the file it accounts for in progress.
    pub(super) num_bytes: u64,
    pub(super) content: Content,
}

/// JSON is parsed later, on all cores.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    Json(String),
    Record(Record),
}

/// Receives records in order; false ends the reading.
pub(super) type Sink<'a> = &'a mut dyn FnMut(Found) -> Result<bool, DataError>;

/// The files that a path stands for: itself, or those of a folder that can be read, by name.
pub(super) fn files_of(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    let metadata = fs::metadata(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => DataError::SamplesMissing {
            path: path.to_path_buf(),
        },
        _ => read_error(path, source),
    })?;
    if metadata.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    if !metadata.is_dir() {
        return Err(DataError::WrongKind {
            path: path.to_path_buf(),
            wanted: "file or folder",
            found: "neither",
        });
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(|source| read_error(path, source))? {
        let child = entry.map_err(|source| read_error(path, source))?.path();
        let ending = extension(&child);
        let is_read = JSON_EXTENSIONS.contains(&ending.as_str())
            || TEXT_EXTENSIONS.contains(&ending.as_str());
        if is_read && child.is_file() {
            files.push(child);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(DataError::NoSampleFile {
            folder: path.to_path_buf(),
            endings: JSON_EXTENSIONS
                .iter()
                .chain(&TEXT_EXTENSIONS)
                .fold(String::new(), |list, ending| format!("{list} .{ending}")),
        });
    }
    Ok(files)
}

fn extension(path: &Path) -> String {
    path.extension()
        .map(|ending| ending.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default()
}

pub(super) fn read_error(path: &Path, source: io::Error) -> DataError {
    DataError::Read {
        path: path.to_path_buf(),
        source,
    }
}

/// How `path` is to be read, by its ending and its first bytes.
pub(super) fn format_of(path: &Path, unit: TextUnit) -> Result<Format, DataError> {
    let ending = extension(path);
    if UNREAD_EXTENSIONS.contains(&ending.as_str()) {
        return Err(DataError::SampleFormat {
            path: path.to_path_buf(),
            ending,
        });
    }
    let mut head = Vec::new();
    File::open(path)
        .and_then(|file| file.take(SNIFFED_BYTES as u64).read_to_end(&mut head))
        .map_err(|source| read_error(path, source))?;
    let head = String::from_utf8_lossy(&head);
    let head = head.trim_start_matches('\u{FEFF}').trim_start();
    let is_json = JSON_EXTENSIONS.contains(&ending.as_str())
        || (!TEXT_EXTENSIONS.contains(&ending.as_str()) && head.starts_with(['{', '[']));
    let first_line = head.lines().next().unwrap_or_default();
    Ok(match (is_json, unit) {
        (true, _) if head.starts_with('[') => Format::JsonArray,
        (true, _) => Format::JsonLines,
        _ if first_line.starts_with('#') && first_line.contains("::") => Format::Penman,
        (false, TextUnit::Line) => Format::Lines,
        (false, TextUnit::File) => Format::File,
    })
}

/// Reads the records of a file.
pub(super) fn read(path: &Path, format: Format, sink: Sink<'_>) -> Result<(), DataError> {
    let file = File::open(path).map_err(|source| read_error(path, source))?;
    let mut lines = Lines {
        path,
        reader: BufReader::with_capacity(1 << 18, file),
        bytes: Vec::new(),
        line: 0,
        offset: 0,
    };
    match format {
        Format::JsonLines | Format::Lines => {
            while let Some((line, text)) = lines.next()? {
                let num_bytes = text.len() as u64;
                if text.trim().is_empty() {
                    continue;
                }
                let content = if format == Format::JsonLines {
                    Content::Json(text.trim().to_owned())
                } else {
                    Content::Record(Record::Text(text.trim_end_matches(['\r', '\n']).to_owned()))
                };
                let found = Found {
                    line,
                    num_bytes,
                    content,
                };
                if !sink(found)? {
                    break;
                }
            }
            Ok(())
        }
        Format::Penman => {
            let mut blocks = Blocks::default();
            loop {
                let next = lines.next()?;
                let at_end = next.is_none();
                let (line, text) = next.unwrap_or((0, ""));
                let found =
                    blocks
                        .push(line, text)
                        .map_err(|(line, problem)| DataError::BadRecord {
                            path: path.to_path_buf(),
                            line,
                            problem,
                        })?;
                if let Some(found) = found
                    && !sink(found)?
                {
                    break;
                }
                if at_end {
                    break;
                }
            }
            Ok(())
        }
        Format::JsonArray => array::read(path, lines.reader, sink),
        Format::File => {
            let mut text = String::new();
            let mut num_bytes = 0;
            while let Some((line, part)) = lines.next()? {
                num_bytes += part.len();
                if num_bytes > LONGEST_RECORD_BYTES {
                    return Err(too_long(path, line));
                }
                text.push_str(part);
            }
            if !text.trim().is_empty() {
                sink(Found {
                    line: 1,
                    num_bytes: num_bytes as u64,
                    content: Content::Record(Record::Text(text)),
                })?;
            }
            Ok(())
        }
    }
}

pub(super) fn too_long(path: &Path, line: u64) -> DataError {
    DataError::LongRecord {
        path: path.to_path_buf(),
        line,
        limit: LONGEST_RECORD_BYTES,
    }
}

/// The lines of a file, each with its line break.
struct Lines<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    bytes: Vec<u8>,
    line: u64,
    offset: u64,
}

impl Lines<'_> {
    /// The number of the next line and its text.
    fn next(&mut self) -> Result<Option<(u64, &str)>, DataError> {
        self.bytes.clear();
        self.line += 1;
        let count = (&mut self.reader)
            .take(LONGEST_RECORD_BYTES as u64 + 1)
            .read_until(b'\n', &mut self.bytes)
            .map_err(|source| read_error(self.path, source))?;
        if count == 0 {
            return Ok(None);
        }
        if count > LONGEST_RECORD_BYTES {
            return Err(too_long(self.path, self.line));
        }
        let offset = self.offset;
        self.offset += count as u64;
        let text = std::str::from_utf8(&self.bytes).map_err(|error| DataError::NotUtf8 {
            path: self.path.to_path_buf(),
            offset: offset + error.valid_up_to() as u64,
        })?;
        let text = match self.line {
            1 => text.strip_prefix('\u{FEFF}').unwrap_or(text),
            _ => text,
        };
        Ok(Some((self.line, text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(name: &str, content: &[u8], unit: TextUnit) -> Result<Vec<Found>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let mut found = Vec::new();
        read(&path, format_of(&path, unit)?, &mut |record| {
            found.push(record);
            Ok(true)
        })?;
        Ok(found)
    }

    fn places(name: &str, content: &str) -> Vec<(u64, String)> {
        let found = read_all(name, content.as_bytes(), TextUnit::Line).unwrap();
        found
            .into_iter()
            .map(|found| match found.content {
                Content::Json(text) | Content::Record(Record::Text(text)) => (found.line, text),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn records_are_found_with_their_lines() {
        let own = |list: &[(u64, &str)]| -> Vec<(u64, String)> {
            list.iter()
                .map(|(line, text)| (*line, (*text).to_owned()))
                .collect()
        };
        assert_eq!(
            places("a.jsonl", "\u{FEFF}{\"a\":1}\n\n {\"a\":2}"),
            own(&[(1, "{\"a\":1}"), (3, "{\"a\":2}")])
        );
        assert_eq!(
            places(
                "a.json",
                "\u{FEFF}[\n {\"a\": \"],\\\"[\"},\n\n {\"b\": [1,\n2]}\n]\n"
            ),
            own(&[(2, "{\"a\": \"],\\\"[\"}"), (4, "{\"b\": [1,\n2]}\n")])
        );
        assert_eq!(places("a.json", "[ ]"), []);
        assert_eq!(
            places("a.json", "{\"a\":1}\n{\"a\":2}\n").len(),
            2,
            "lines in .json"
        );
        assert_eq!(
            places("a", "[{}]"),
            own(&[(1, "{}")]),
            "known by its content"
        );
        assert_eq!(
            places("a.txt", "[one]\r\n\n two\n"),
            own(&[(1, "[one]"), (3, " two")])
        );
        let whole = read_all("a.md", b"one\n\ntwo\n", TextUnit::File).unwrap();
        assert_eq!(
            whole[0].content,
            Content::Record(Record::Text("one\n\ntwo\n".to_owned()))
        );
    }

    #[test]
    fn what_is_no_array_is_refused_with_its_line() {
        for (content, line, word) in [
            ("[{},\n{}", 2, "ends before"),
            ("[{},\n,{}]", 2, "comma"),
            ("[{},\n]", 2, "comma"),
            ("[{}]\n{}", 2, "follows"),
        ] {
            let error = read_all("a.json", content.as_bytes(), TextUnit::Line).unwrap_err();
            match error {
                DataError::BadRecord {
                    line: found,
                    problem,
                    ..
                } => {
                    assert_eq!(found, line, "{content}");
                    assert!(problem.contains(word), "{content}: {problem}");
                }
                other => panic!("{other}"),
            }
        }
    }

    #[test]
    fn long_records_and_other_encodings_are_refused() {
        let long = format!(
            "{{\"text\": \"a\"}}\n{}",
            "x".repeat(LONGEST_RECORD_BYTES + 1)
        );
        for name in ["a.jsonl", "a.txt"] {
            let error = read_all(name, long.as_bytes(), TextUnit::Line).unwrap_err();
            assert!(
                matches!(error, DataError::LongRecord { line: 2, .. }),
                "{error}"
            );
        }
        let array = format!("[1,\n\"{long}\"]");
        let error = read_all("a.json", array.as_bytes(), TextUnit::Line).unwrap_err();
        assert!(
            matches!(error, DataError::LongRecord { line: 2, .. }),
            "{error}"
        );
        let error = read_all("a.txt", long.as_bytes(), TextUnit::File).unwrap_err();
        assert!(matches!(error, DataError::LongRecord { .. }), "{error}");
        for (name, content) in [
            ("a.jsonl", &b"ab\n\xFF"[..]),
            ("a.json", &b"[\"\xFF\"]"[..]),
        ] {
            let error = read_all(name, content, TextUnit::Line).unwrap_err();
            assert!(matches!(error, DataError::NotUtf8 { .. }), "{error}");
        }
        let error = read_all("a.parquet", b"PAR1", TextUnit::Line).unwrap_err();
        assert!(error.to_string().contains("JSON"), "{error}");
    }

    #[test]
    fn a_folder_stands_for_its_files_by_name() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(
            files_of(folder.path()),
            Err(DataError::NoSampleFile { .. })
        ));
        for name in ["b.jsonl", "a.txt", "picture.png"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        let names: Vec<_> = files_of(folder.path())
            .unwrap()
            .iter()
            .map(|path| path.file_name().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["a.txt", "b.jsonl"]);
        assert!(matches!(
            files_of(&folder.path().join("c")),
            Err(DataError::SamplesMissing { .. })
        ));
    }
}
