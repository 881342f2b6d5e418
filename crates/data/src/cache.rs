//! The token cache: a corpus is tokenised once and then read from the file, window by window.
//!
//! An entry is two files named after the corpus' fingerprint: `<key>.tokens`, little-endian ids
//! of two or four bytes, and `<key>.json`, the header. Both are put in place whole and in that
//! order, the header last: an entry is complete or absent. The content follows from the key, so two processes that write the same entry write the same bytes
//! and it does not matter whose rename comes last. An entry that does not match its header in
//! length or checksum counts as absent and is written anew. What a killed process left is cleared
//! by the next one that looks for an entry.
//!
//! The file is not mapped: anybody who may write in the folder can cut it off while it is used,
//! which for a mapping ends the process and for a read is an error.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;

use cinch_files::{MAX_READ, Replacement, read_exact_at, sweep};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::document::SourceRecord;
use crate::error::DataError;
use crate::progress::Progress;
use crate::tokenizer::Tokenizer;

/// Raised whenever the files' layout or the way text becomes tokens changes.
pub(crate) const FORMAT_VERSION: u32 = 2;

/// Endings of an entry's two files.
const TOKENS: &str = ".tokens";
const HEADER: &str = ".json";
/// Ending of a tokenizer that was trained on the text.
const TOKENIZER: &str = ".tokenizer.json";

/// The checksum is a hash of the hashes of blocks of this size, so that all cores can check it.
const CHECKSUM_BLOCK_BYTES: usize = 4 << 20;

/// What `<key>.json` holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) format_version: u32,
    pub(crate) fingerprint: String,
    pub(crate) tokenizer: String,
    pub(crate) vocab_size: usize,
    pub(crate) bytes_per_token: usize,
    pub(crate) num_tokens: u64,
    pub(crate) num_documents: u64,
    /// Places where a text was cut for its length and the tokens beside them may differ from
    /// those of the uncut text.
    pub(crate) num_cuts: u64,
    pub(crate) checksum: String,
    pub(crate) sources: Vec<SourceRecord>,
}

/// Bytes that store every id of a vocabulary.
pub(crate) fn bytes_per_token(vocab_size: usize) -> usize {
    if vocab_size <= 1 << 16 { 2 } else { 4 }
}

/// Where the cache lies unless the user names a folder.
pub fn default_cache_folder() -> Result<PathBuf, DataError> {
    cinch_files::find_cache_folder().map_err(|refused| DataError::CacheWrite {
        folder: refused.folder,
        source: io::Error::other(refused.reason),
    })
}

/// The ids of a corpus in their file.
#[derive(Debug, Clone)]
pub(crate) struct TokenStore {
    file: Arc<File>,
    path: PathBuf,
    bytes_per_token: usize,
    vocab_size: usize,
    len: u64,
}

impl TokenStore {
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Appends up to `count` ids from `start` on: fewer at the end.
    pub(crate) fn read(
        &self,
        start: u64,
        count: usize,
        ids: &mut Vec<i32>,
    ) -> Result<(), DataError> {
        let width = self.bytes_per_token;
        let count = self.len.saturating_sub(start).min(count as u64) as usize;
        let mut bytes = vec![0; count * width];
        read_exact_at(&self.file, &mut bytes, start * width as u64)
            .map_err(|source| self.read_error(source))?;
        for id in bytes.chunks_exact(width) {
            let id = Self::id(id);
            // The checksum held when the file was opened, and ids index the embedding.
            if id >= self.vocab_size as u64 {
                let changed = format!("it was changed: the id {id} is not in the vocabulary");
                return Err(self.read_error(io::Error::other(changed)));
            }
            ids.push(id as i32);
        }
        Ok(())
    }

    /// A file of ids whose length and ids were looked at.
    pub(crate) fn of_file(
        file: File,
        path: PathBuf,
        bytes_per_token: usize,
        vocab_size: usize,
        len: u64,
    ) -> Self {
        Self {
            file: Arc::new(file),
            path,
            bytes_per_token,
            vocab_size,
            len,
        }
    }

    /// An id of two, four or eight bytes.
    pub(crate) fn id(bytes: &[u8]) -> u64 {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(wide)
    }

    fn read_error(&self, source: io::Error) -> DataError {
        let source = match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                io::Error::new(source.kind(), "it was cut off since it was opened")
            }
            _ => source,
        };
        DataError::CacheRead {
            path: self.path.clone(),
            source,
        }
    }

    /// The hash of the hashes of the file's blocks.
    fn checksum(&self, progress: &dyn Progress) -> Result<String, DataError> {
        let num_bytes = self.len * self.bytes_per_token as u64;
        let blocks: Vec<_> = (0..num_bytes.div_ceil(CHECKSUM_BLOCK_BYTES as u64))
            .into_par_iter()
            .map(|block| {
                if progress.is_interrupted() {
                    return Err(DataError::Interrupted);
                }
                let start = block * CHECKSUM_BLOCK_BYTES as u64;
                let count = (num_bytes - start).min(CHECKSUM_BLOCK_BYTES as u64);
                let mut bytes = vec![0; count as usize];
                read_exact_at(&self.file, &mut bytes, start)
                    .map_err(|source| self.read_error(source))?;
                Ok(Sha256::digest(&bytes))
            })
            .collect::<Result<_, DataError>>()?;
        let mut whole = Sha256::new();
        for block in blocks {
            whole.update(block);
        }
        Ok(format!("{:x}", whole.finalize()))
    }
}

/// One entry of a cache folder, present or not.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    folder: PathBuf,
    fingerprint: String,
}

impl Entry {
    pub(crate) fn new(folder: PathBuf, fingerprint: String) -> Self {
        Self {
            folder,
            fingerprint,
        }
    }

    pub(crate) fn tokens_path(&self) -> PathBuf {
        self.folder.join(format!("{}{TOKENS}", self.fingerprint))
    }

    pub(crate) fn tokenizer_path(&self) -> PathBuf {
        self.folder.join(format!("{}{TOKENIZER}", self.fingerprint))
    }

    fn header_path(&self) -> PathBuf {
        self.folder.join(format!("{}{HEADER}", self.fingerprint))
    }

    /// Removes what processes that were killed left unfinished in the folder.
    pub(crate) fn sweep(&self) {
        let is_entry = |name: &str| {
            let key = name
                .strip_suffix(TOKENS)
                .or_else(|| name.strip_suffix(TOKENIZER))
                .or_else(|| name.strip_suffix(HEADER));
            key.is_some_and(|key| {
                key.len() == self.fingerprint.len()
                    && key.bytes().all(|byte| byte.is_ascii_hexdigit())
            })
        };
        sweep(&self.folder, is_entry);
    }

    /// The entry if it is there and undamaged. The only error is an interruption.
    pub(crate) fn open(
        &self,
        progress: &dyn Progress,
    ) -> Result<Option<(Header, TokenStore)>, DataError> {
        let Some((header, store)) = self.open_unchecked() else {
            return Ok(None);
        };
        match store.checksum(progress) {
            Err(DataError::Interrupted) => Err(DataError::Interrupted),
            Ok(checksum) if checksum == header.checksum => Ok(Some((header, store))),
            _ => Ok(None),
        }
    }

    fn open_unchecked(&self) -> Option<(Header, TokenStore)> {
        let header = cinch_files::read_regular(&self.header_path(), MAX_READ).ok()?;
        let header: Header = serde_json::from_slice(&header).ok()?;
        if header.format_version != FORMAT_VERSION
            || header.fingerprint != self.fingerprint
            || header.bytes_per_token != bytes_per_token(header.vocab_size)
        {
            return None;
        }
        let path = self.tokens_path();
        let file = cinch_files::open_regular(&path).ok()?;
        let expected = header
            .num_tokens
            .checked_mul(header.bytes_per_token as u64)?;
        if file.metadata().ok()?.len() != expected {
            return None;
        }
        let store = TokenStore {
            file: Arc::new(file),
            path,
            bytes_per_token: header.bytes_per_token,
            vocab_size: header.vocab_size,
            len: header.num_tokens,
        };
        Some((header, store))
    }

    pub(crate) fn write_error(&self, source: io::Error) -> DataError {
        DataError::CacheWrite {
            folder: self.folder.clone(),
            source,
        }
    }
}

/// Writes the tokens of one entry.
pub(crate) struct EntryWriter<'a> {
    entry: &'a Entry,
    tokenizer: &'a Tokenizer,
    file: BufWriter<Replacement>,
    bytes_per_token: usize,
    num_tokens: u64,
    block: Vec<u8>,
    checksum: Sha256,
}

impl<'a> EntryWriter<'a> {
    pub(crate) fn create(entry: &'a Entry, tokenizer: &'a Tokenizer) -> Result<Self, DataError> {
        fs::create_dir_all(&entry.folder).map_err(|error| entry.write_error(error))?;
        let file =
            Replacement::create(&entry.tokens_path()).map_err(|error| entry.write_error(error))?;
        Ok(Self {
            entry,
            tokenizer,
            file: BufWriter::new(file),
            bytes_per_token: bytes_per_token(tokenizer.vocab_size()),
            num_tokens: 0,
            block: Vec::with_capacity(CHECKSUM_BLOCK_BYTES),
            checksum: Sha256::new(),
        })
    }

    pub(crate) fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    pub(crate) fn append(&mut self, ids: &[u32]) -> Result<(), DataError> {
        for &id in ids {
            if id as usize >= self.tokenizer.vocab_size() {
                return Err(DataError::TokenIdTooLarge {
                    tokenizer: self.tokenizer.name().to_owned(),
                    id,
                    largest: self.tokenizer.vocab_size() as u32 - 1,
                });
            }
            let bytes = id.to_le_bytes();
            self.block.extend_from_slice(&bytes[..self.bytes_per_token]);
            if self.block.len() == CHECKSUM_BLOCK_BYTES {
                self.write_block()?;
            }
        }
        self.num_tokens += ids.len() as u64;
        Ok(())
    }

    fn write_block(&mut self) -> Result<(), DataError> {
        self.checksum.update(Sha256::digest(&self.block));
        self.file
            .write_all(&self.block)
            .map_err(|error| self.entry.write_error(error))?;
        self.block.clear();
        Ok(())
    }

    /// Puts the entry in place: tokens first, then the header that makes them count.
    pub(crate) fn finish(
        mut self,
        num_documents: u64,
        num_cuts: u64,
        sources: Vec<SourceRecord>,
    ) -> Result<(), DataError> {
        if !self.block.is_empty() {
            self.write_block()?;
        }
        let entry = self.entry;
        let header = Header {
            format_version: FORMAT_VERSION,
            fingerprint: entry.fingerprint.clone(),
            tokenizer: self.tokenizer.fingerprint(),
            vocab_size: self.tokenizer.vocab_size(),
            bytes_per_token: self.bytes_per_token,
            num_tokens: self.num_tokens,
            num_documents,
            num_cuts,
            checksum: format!("{:x}", self.checksum.finalize()),
            sources,
        };
        let place = || -> io::Result<()> {
            put(self.file)?;
            let mut file = BufWriter::new(Replacement::create(&entry.header_path())?);
            serde_json::to_writer_pretty(&mut file, &header)?;
            put(file)
        };
        place().map_err(|error| entry.write_error(error))
    }
}

fn put(file: BufWriter<Replacement>) -> io::Result<()> {
    file.into_inner()
        .map_err(io::IntoInnerError::into_error)?
        .put()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;
    use crate::tokenizer::TokenizerSpec;

    #[test]
    fn ids_survive_the_file_at_both_widths() {
        let folder = tempfile::tempdir().unwrap();
        let json = r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0,"z":70000},"unk_token":"a"}}"#;
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, json).unwrap();
        let wide = [0u32, 255, 65_535, 65_536, 70_000];
        let narrow = [0u32, 255, 50_256];
        for (spec, ids, width) in [
            (TokenizerSpec::File(path), &wide[..], 4),
            (TokenizerSpec::Gpt2, &narrow[..], 2),
        ] {
            let tokenizer = Tokenizer::load(&spec).unwrap();
            let entry = Entry::new(folder.path().join("cache"), format!("key{width}"));
            let mut writer = EntryWriter::create(&entry, &tokenizer).unwrap();
            writer.append(ids).unwrap();
            writer.finish(1, 0, Vec::new()).unwrap();
            let (header, store) = entry.open(&NoProgress).unwrap().unwrap();
            assert_eq!(header.bytes_per_token, width);
            let from = |start, count| {
                let mut back = Vec::new();
                store.read(start, count, &mut back).unwrap();
                back.into_iter().map(|id| id as u32).collect::<Vec<_>>()
            };
            assert_eq!(from(0, ids.len()), ids);
            assert_eq!(from(2, 1), ids[2..3]);
            assert_eq!(from(1, 99), ids[1..]);
            assert!(from(99, 1).is_empty());
        }
    }

    #[test]
    fn the_checksum_of_blocks_is_the_checksum_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = Tokenizer::load(&TokenizerSpec::Bytes).unwrap();
        let entry = Entry::new(folder.path().to_path_buf(), "key".into());
        let mut writer = EntryWriter::create(&entry, &tokenizer).unwrap();
        // Two blocks and a bit, in portions that do not divide a block.
        let portion: Vec<u32> = (0..100_003).map(|i| i % 257).collect();
        for _ in 0..45 {
            writer.append(&portion).unwrap();
        }
        writer.finish(1, 0, Vec::new()).unwrap();
        let (_, store) = entry.open(&NoProgress).unwrap().unwrap();
        assert_eq!(store.len(), 45 * 100_003);
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_refused_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = Tokenizer::load(&TokenizerSpec::Bytes).unwrap();
        let entry = Entry::new(folder.path().to_path_buf(), "key".into());
        let mut writer = EntryWriter::create(&entry, &tokenizer).unwrap();
        let error = writer.append(&[256, 257]).unwrap_err();
        assert!(matches!(
            error,
            DataError::TokenIdTooLarge {
                id: 257,
                largest: 256,
                ..
            }
        ));
        drop(writer);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
