//! Token ids that another program wrote: `train.bin`, with `metadata.json` beside it.
//!
//! The metadata say how wide an id is (`dtype`: uint16, int32, uint32 or int64, little-endian)
//! and how large the vocabulary (`vocab_size`); without a width it is the narrowest unsigned one
//! that holds the vocabulary. The whole file is read once before a run: an id that the model does
//! not have is told then, and what is read is what the run's fingerprint stands for.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use cinch_files::MAX_READ;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::cache::{FORMAT_VERSION, Header, TokenStore, bytes_per_token};
use crate::corpus::Corpus;
use crate::error::DataError;
use crate::progress::Progress;

/// The names of the two files.
const IDS: &str = "train.bin";
const METADATA: &str = "metadata.json";

/// Bytes that are looked at together; a multiple of every width.
const BLOCK_BYTES: usize = 4 << 20;

/// Bytes from which on the width of ids can be told by what they are.
const LEAST_TO_TELL: u64 = 64;

/// What `metadata.json` says; what else it holds is the other program's.
#[derive(Debug, Deserialize)]
struct Metadata {
    dtype: Option<String>,
    vocab_size: Option<usize>,
    #[serde(alias = "total_tokens")]
    num_tokens: Option<u64>,
    eos_token_id: Option<i32>,
}

/// The file of ids that a path means: itself, or the one in the folder that it is.
fn ids_of(path: &Path) -> Option<PathBuf> {
    let ids = match path.is_dir() {
        true => path.join(IDS),
        false => path.to_owned(),
    };
    let is_ids = ids.extension().is_some_and(|ending| ending == "bin");
    (is_ids && ids.is_file()).then_some(ids)
}

impl Corpus {
    /// Whether a path holds ids rather than text.
    pub fn holds_ids(path: &Path) -> bool {
        ids_of(path).is_some()
    }

    /// The ids that a path holds, where it does; `vocabulary` is the model's.
    pub fn of_ids(
        path: &Path,
        vocabulary: usize,
        progress: &dyn Progress,
    ) -> Result<Option<Self>, DataError> {
        let Some(path) = ids_of(path) else {
            return Ok(None);
        };
        let metadata = metadata(&path)?;
        let width = width(&path, &metadata, vocabulary)?;
        let file = cinch_files::open_regular(&path).map_err(|source| DataError::Read {
            path: path.clone(),
            source,
        })?;
        let vocabulary = Vocabulary {
            model: vocabulary,
            stated: metadata.vocab_size.unwrap_or(vocabulary),
        };
        let scanned = scan(&file, &path, width, vocabulary, progress)?;
        let vocabulary = vocabulary.model;
        let problem = |problem: String| DataError::TokenFile {
            path: path.clone(),
            problem,
        };
        if let Some(stated) = metadata
            .num_tokens
            .filter(|&stated| stated != scanned.tokens)
        {
            return Err(problem(format!(
                "it holds {} ids of {width} bytes, and {METADATA} says {stated}",
                scanned.tokens
            )));
        }
        if scanned.tokens < 2 {
            return Err(problem(format!("it holds {} ids", scanned.tokens)));
        }
        let header = Header {
            format_version: FORMAT_VERSION,
            fingerprint: scanned.digest[..32].to_owned(),
            tokenizer: IDS.to_owned(),
            vocab_size: vocabulary,
            bytes_per_token: width,
            num_tokens: scanned.tokens,
            num_documents: 1,
            num_cuts: 0,
            checksum: scanned.digest,
            sources: Vec::new(),
        };
        let store = TokenStore::of_file(file, path.clone(), width, vocabulary, scanned.tokens);
        let padding = metadata.eos_token_id.unwrap_or(0);
        Ok(Some(Self::new(header, store, path, padding)))
    }
}

fn metadata(ids: &Path) -> Result<Metadata, DataError> {
    let path = ids.with_file_name(METADATA);
    if !path.is_file() {
        return Ok(Metadata {
            dtype: None,
            vocab_size: None,
            num_tokens: None,
            eos_token_id: None,
        });
    }
    let bytes = cinch_files::read_regular(&path, MAX_READ).map_err(|source| DataError::Read {
        path: path.clone(),
        source,
    })?;
    serde_json::from_slice(&bytes).map_err(|error| DataError::TokenFile {
        path,
        problem: format!("it is not the metadata of token ids: {error}"),
    })
}

/// Bytes of an id.
fn width(ids: &Path, metadata: &Metadata, vocabulary: usize) -> Result<usize, DataError> {
    let problem = |problem: String| DataError::TokenFile {
        path: ids.with_file_name(METADATA),
        problem,
    };
    if let Some(stated) = metadata.vocab_size.filter(|&stated| stated > vocabulary) {
        return Err(problem(format!(
            "its ids are of a vocabulary of {stated}, and the model has {vocabulary}"
        )));
    }
    let stated = metadata.vocab_size.unwrap_or(vocabulary);
    match metadata
        .dtype
        .as_deref()
        .map(|name| name.trim_start_matches("np."))
    {
        None => Ok(bytes_per_token(stated)),
        Some("uint16" | "<u2") => Ok(2),
        Some("int32" | "uint32" | "<i4" | "<u4") => Ok(4),
        Some("int64" | "uint64" | "<i8" | "<u8") => Ok(8),
        Some(other) => Err(problem(format!(
            "ids of the type {other}; uint16, int32, uint32 and int64 can be read"
        ))),
    }
}

/// How many ids there are: as the model has them, and as the metadata say.
#[derive(Clone, Copy)]
struct Vocabulary {
    model: usize,
    stated: usize,
}

/// What a file of ids holds.
struct Scanned {
    tokens: u64,
    /// The hash of the hashes of its blocks.
    digest: String,
}

fn scan(
    mut file: &File,
    path: &Path,
    width: usize,
    vocabulary: Vocabulary,
    progress: &dyn Progress,
) -> Result<Scanned, DataError> {
    let unread = |source: io::Error| DataError::Read {
        path: path.to_owned(),
        source,
    };
    let problem = |problem: String| DataError::TokenFile {
        path: path.to_owned(),
        problem,
    };
    let bytes = file.metadata().map_err(unread)?.len();
    if !bytes.is_multiple_of(width as u64) {
        return Err(problem(format!(
            "its {bytes} bytes are not a whole number of ids of {width} bytes"
        )));
    }
    progress.begin("reading", bytes);
    let mut whole = Sha256::new();
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    let mut read = 0;
    let mut seconds_are_zero = width == 2;
    while read < bytes {
        if progress.is_interrupted() {
            return Err(DataError::Interrupted);
        }
        block.clear();
        let mut part = file.take(BLOCK_BYTES as u64);
        let count = part.read_to_end(&mut block).map_err(unread)?;
        file = part.into_inner();
        if count == 0 {
            return Err(DataError::Changed {
                path: path.to_owned(),
            });
        }
        for (index, id) in block.chunks_exact(width).enumerate() {
            let id = TokenStore::id(id);
            seconds_are_zero &= index.is_multiple_of(2) || id == 0;
            if id >= vocabulary.stated.min(vocabulary.model) as u64 {
                let place = read / width as u64 + index as u64;
                let whose = match id >= vocabulary.model as u64 {
                    true => format!("the model has a vocabulary of {}", vocabulary.model),
                    false => format!("{METADATA} says \"vocab_size\": {}", vocabulary.stated),
                };
                return Err(problem(format!("id {id} at place {place}, and {whose}")));
            }
        }
        whole.update(Sha256::digest(&block));
        read += count as u64;
        progress.advance(count as u64);
    }
    progress.end();
    if seconds_are_zero && read >= LEAST_TO_TELL {
        return Err(problem(format!(
            "every second id of 2 bytes is 0, as in a file of ids of 4; {METADATA} says which with \
             \"dtype\": \"uint32\""
        )));
    }
    Ok(Scanned {
        tokens: read / width as u64,
        digest: format!("{:x}", whole.finalize()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;

    fn folder(ids: &[u8], metadata: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(IDS), ids).unwrap();
        if !metadata.is_empty() {
            std::fs::write(folder.path().join(METADATA), metadata).unwrap();
        }
        folder
    }

    fn opened(folder: &Path, vocabulary: usize) -> Result<Option<Corpus>, DataError> {
        Corpus::of_ids(folder, vocabulary, &NoProgress)
    }

    #[test]
    fn ids_of_every_width_are_read() {
        let ids = [3_u64, 0, 299, 17, 8, 299];
        let bytes = |width: usize| -> Vec<u8> {
            let id = |id: &u64| id.to_le_bytes()[..width].to_vec();
            ids.iter().flat_map(id).collect()
        };
        for (width, dtype) in [(2, "uint16"), (4, "uint32"), (4, "int32"), (8, "int64")] {
            let text = format!(r#"{{"dtype": "{dtype}", "vocab_size": 300, "num_tokens": 6}}"#);
            let folder = folder(&bytes(width), &text);
            let corpus = opened(folder.path(), 300).unwrap().unwrap();
            assert_eq!(corpus.num_tokens(), 6);
            let windows = corpus.windows(5).unwrap();
            let (split, _) = windows.split(0.0, 1);
            let (mut tokens, mut targets) = ([0; 5], [0; 5]);
            split.fill_in_order(0, &mut tokens, &mut targets).unwrap();
            assert_eq!(
                (tokens, targets),
                ([3, 0, 299, 17, 8], [0, 299, 17, 8, 299])
            );
        }
        // Without metadata the vocabulary says how wide an id is.
        let narrow = folder(&bytes(2), "");
        assert_eq!(opened(narrow.path(), 300).unwrap().unwrap().num_tokens(), 6);
        let wide = folder(&bytes(4), "");
        assert_eq!(
            opened(wide.path(), 70_000).unwrap().unwrap().num_tokens(),
            6
        );
        assert!(
            opened(&narrow.path().join("nothing"), 300)
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_file_that_does_not_fit_says_why() {
        let ids = [1, 0, 2, 0, 44, 1];
        let wide: Vec<u8> = (1..30_u32).flat_map(u32::to_le_bytes).collect();
        for (bytes, metadata, vocabulary, expected) in [
            (&ids[..], "", 300, "id 300 at place 2"),
            (&ids[..5], "", 400, "not a whole number of ids of 2 bytes"),
            (&ids[..], r#"{"num_tokens": 4}"#, 400, "says 4"),
            (&ids[..], r#"{"vocab_size": 500}"#, 400, "vocabulary of 500"),
            (
                &ids[..],
                r#"{"vocab_size": 300}"#,
                400,
                "id 300 at place 2, and metadata.json says \"vocab_size\": 300",
            ),
            (&ids[..], r#"{"dtype": "float32"}"#, 400, "float32"),
            (&ids[..], "[1]", 400, "not the metadata"),
            (&ids[..2], "", 400, "1 ids"),
            (
                &wide,
                r#"{"dtype": "uint16"}"#,
                400,
                "every second id of 2 bytes is 0",
            ),
            (&wide, "", 400, "\"dtype\": \"uint32\""),
        ] {
            let folder = folder(bytes, metadata);
            let error = opened(folder.path(), vocabulary).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
