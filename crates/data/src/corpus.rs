//! From a source to a stream of tokens: identify, look in the cache, tokenise if need be.
//!
//! Tokenising runs on all cores and holds one batch of text at a time, whatever the size of the
//! corpus: 32 MiB of text and four times as much for its tokens, beside what is read (`document`)
//! and what a piece takes on each core (`tokenizer`). The result does not depend on the number of
//! threads.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::cache::{Entry, EntryWriter, FORMAT_VERSION, Header, TokenStore, default_cache_folder};
use crate::document::{self, Piece, SourceRecord};
use crate::embedded;
use crate::encode::encode_all;
use crate::error::DataError;
use crate::progress::Progress;
use crate::source::{self, Source, SourceFile};
use crate::tokenizer::{PIECE_BYTES, Tokenizer, TokenizerSpec};
use crate::window::Windows;

/// Text held in memory at a time; its tokens take up to four times as much on top.
const BATCH_BYTES: usize = 32 << 20;

/// What to read and how.
#[derive(Debug, Clone)]
pub struct DataOptions {
    pub source: Source,
    pub tokenizer: TokenizerSpec,
    /// The field of a JSON line that holds its text.
    pub text_column: String,
    /// Where token caches lie; None for `default_cache_folder`.
    pub cache_dir: Option<PathBuf>,
}

impl Default for DataOptions {
    fn default() -> Self {
        Self {
            source: Source::Embedded,
            tokenizer: TokenizerSpec::Gpt2,
            text_column: "text".to_owned(),
            cache_dir: None,
        }
    }
}

impl DataOptions {
    pub(crate) fn cache_folder(&self) -> Result<PathBuf, DataError> {
        match &self.cache_dir {
            Some(folder) => Ok(folder.clone()),
            None => default_cache_folder(),
        }
    }

    pub(crate) fn no_text(&self, num_files: usize) -> DataError {
        let path = match &self.source {
            Source::Folder(path) | Source::File(path) => path.clone(),
            Source::Embedded => PathBuf::from("the embedded text"),
        };
        DataError::NoText { path, num_files }
    }
}

/// A tokenised text.
///
/// Every document is followed by the tokenizer's end-of-text, the last one too, so that a model
/// learns where documents end; with a tokenizer that has none they follow each other directly.
#[derive(Debug, Clone)]
pub struct Corpus {
    header: Header,
    tokens: TokenStore,
    cache_path: PathBuf,
    was_cached: bool,
    padding: i32,
}

/// Where the text of a corpus is, once it is known what there is.
pub(crate) enum Input {
    Embedded(Vec<embedded::Document>),
    Files(Vec<SourceFile>),
}

impl Input {
    pub(crate) fn find(source: &Source, progress: &dyn Progress) -> Result<Self, DataError> {
        Ok(match source {
            Source::Embedded => Self::Embedded(embedded::documents()),
            Source::Folder(path) => Self::Files(source::folder_files(path, progress)?),
            Source::File(path) => Self::Files(vec![source::single_file(path)?]),
        })
    }

    /// Hands on all pieces, in order, cut for `tokenizer`.
    pub(crate) fn read(
        &self,
        records: &[SourceRecord],
        text_column: &str,
        tokenizer: &Tokenizer,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(Piece) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        match self {
            Self::Embedded(documents) => {
                for document in documents {
                    sink(Piece {
                        text: document.text.clone(),
                        ends_document: true,
                        is_exact: true,
                        source_bytes: document.text.len() as u64,
                    })?;
                }
            }
            Self::Files(files) => {
                for (file, record) in files.iter().zip(records) {
                    document::read(file, record, text_column, tokenizer, progress, sink)?;
                }
            }
        }
        Ok(())
    }
}

impl Corpus {
    /// Reads `options.source` with `tokenizer`, which must be the one `options.tokenizer` names.
    pub fn prepare(
        options: &DataOptions,
        tokenizer: &Tokenizer,
        progress: &dyn Progress,
    ) -> Result<Self, DataError> {
        let input = Input::find(&options.source, progress)?;
        let records = identify(&input, progress)?;
        let tokens_of = tokenizer.fingerprint();
        let fingerprint = fingerprint(&input, &records, &options.text_column, &tokens_of);
        let entry = Entry::new(options.cache_folder()?, fingerprint);
        entry.sweep();

        let (was_cached, (header, tokens)) = match entry.open(progress)? {
            Some(found) => (true, found),
            None => {
                tokenize(&input, records, options, tokenizer, &entry, progress)?;
                let vanished = || {
                    entry.write_error(std::io::Error::other(
                        "what was written does not read back the same",
                    ))
                };
                (false, entry.open(progress)?.ok_or_else(vanished)?)
            }
        };
        Ok(Self {
            header,
            tokens,
            cache_path: entry.tokens_path(),
            was_cached,
            padding: tokenizer.end_of_text().unwrap_or(0) as i32,
        })
    }

    /// A corpus whose tokens are there already.
    pub(crate) fn new(header: Header, tokens: TokenStore, path: PathBuf, padding: i32) -> Self {
        Self {
            header,
            tokens,
            cache_path: path,
            was_cached: true,
            padding,
        }
    }

    pub fn num_tokens(&self) -> u64 {
        self.tokens.len()
    }

    pub fn num_documents(&self) -> u64 {
        self.header.num_documents
    }

    /// Places where a text that is too long to be encoded at once was cut although the tokens
    /// beside the cut may differ from those of the uncut text. There are none in ordinary text
    /// with the tokenizers that are built in.
    pub fn num_cuts(&self) -> u64 {
        self.header.num_cuts
    }

    /// What a user should know of such cuts, if there are any.
    pub fn cut_note(&self) -> Option<String> {
        let count = self.num_cuts();
        (count > 0).then(|| {
            let places = if count == 1 { "place" } else { "places" };
            format!(
                "long texts were cut at {count} {places} (a piece has at most {} KiB), beside \
                 which a token may differ from that of the uncut text",
                PIECE_BYTES >> 10
            )
        })
    }

    /// The file that holds the tokens.
    pub fn cache_path(&self) -> &Path {
        &self.cache_path
    }

    /// Identifies content and tokenizer: a resumed run compares it with the one it started with.
    pub fn fingerprint(&self) -> &str {
        &self.header.fingerprint
    }

    /// Whether the tokens were there already.
    pub fn was_cached(&self) -> bool {
        self.was_cached
    }

    /// The corpus as windows of `seq_len` inputs.
    pub fn windows(&self, seq_len: usize) -> Result<Windows, DataError> {
        Windows::new(self.tokens.clone(), seq_len, self.padding)
    }
}

pub(crate) fn identify(
    input: &Input,
    progress: &dyn Progress,
) -> Result<Vec<SourceRecord>, DataError> {
    match input {
        Input::Embedded(documents) => Ok(documents
            .iter()
            .map(|document| SourceRecord {
                name: document.name.clone(),
                bytes: document.text.len() as u64,
                sha256: format!("{:x}", Sha256::digest(&document.text)),
            })
            .collect()),
        Input::Files(files) => {
            let size = |file: &SourceFile| std::fs::metadata(&file.path).map_or(0, |m| m.len());
            progress.begin("reading", files.iter().map(size).sum());
            let records: Result<Vec<SourceRecord>, DataError> = files
                .par_iter()
                .map(|file| document::identify(file, progress))
                .collect();
            progress.end();
            records
        }
    }
}

/// A hash of everything that is made from a text depends on: the text, and `by`, which says how it
/// is made. Each part is preceded by its length, so that no two lists of parts run together into
/// the same bytes.
pub(crate) fn fingerprint(
    input: &Input,
    records: &[SourceRecord],
    text_column: &str,
    by: &str,
) -> String {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(&FORMAT_VERSION.to_le_bytes());
    part(by.as_bytes());
    for (index, record) in records.iter().enumerate() {
        let json_lines = matches!(input, Input::Files(files) if files[index].json_lines);
        part(record.name.as_bytes());
        part(record.sha256.as_bytes());
        part(if json_lines {
            text_column.as_bytes()
        } else {
            b""
        });
    }
    // 128 bits tell any number of corpora apart and keep file names short.
    format!("{:x}", hash.finalize())[..32].to_owned()
}

fn tokenize(
    input: &Input,
    records: Vec<SourceRecord>,
    options: &DataOptions,
    tokenizer: &Tokenizer,
    entry: &Entry,
    progress: &dyn Progress,
) -> Result<(), DataError> {
    let mut batch = Batch {
        tokenizer,
        progress,
        writer: EntryWriter::create(entry, tokenizer)?,
        pieces: Vec::new(),
        num_bytes: 0,
        num_documents: 0,
        num_cuts: 0,
    };
    progress.begin(
        "tokenizing",
        records.iter().map(|record| record.bytes).sum(),
    );
    let outcome = input
        .read(
            &records,
            &options.text_column,
            tokenizer,
            progress,
            &mut |piece| batch.push(piece),
        )
        .and_then(|()| batch.flush());
    progress.end();
    outcome?;

    if batch.num_documents == 0 {
        return Err(options.no_text(records.len()));
    }
    if batch.writer.num_tokens() < 2 {
        return Err(DataError::TooFewTokens {
            num_tokens: batch.writer.num_tokens(),
            tokenizer: tokenizer.name().to_owned(),
        });
    }
    batch
        .writer
        .finish(batch.num_documents, batch.num_cuts, records)
}

/// Text that waits to be tokenised together.
struct Batch<'a> {
    tokenizer: &'a Tokenizer,
    progress: &'a dyn Progress,
    writer: EntryWriter<'a>,
    pieces: Vec<Piece>,
    num_bytes: usize,
    num_documents: u64,
    num_cuts: u64,
}

impl Batch<'_> {
    fn push(&mut self, piece: Piece) -> Result<(), DataError> {
        if self.progress.is_interrupted() {
            return Err(DataError::Interrupted);
        }
        self.num_bytes += piece.text.len();
        self.pieces.push(piece);
        if self.num_bytes >= BATCH_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Encodes in parallel, writes in order.
    fn flush(&mut self) -> Result<(), DataError> {
        let pieces = Arc::new(std::mem::take(&mut self.pieces));
        self.num_bytes = 0;
        let encoded = encode_all(self.tokenizer, &pieces, self.progress)?;
        for (piece, ids) in pieces.iter().zip(encoded) {
            self.writer.append(&ids)?;
            if piece.ends_document {
                self.writer
                    .append(self.tokenizer.end_of_text().as_slice())?;
                self.num_documents += 1;
            }
            self.num_cuts += u64::from(!piece.is_exact);
        }
        Ok(())
    }
}
