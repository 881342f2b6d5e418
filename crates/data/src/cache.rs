//! The token cache: a corpus is tokenised once and then mapped into memory.
//!
//! An entry is two files named after the corpus' fingerprint: `<key>.tokens`, little-endian ids
//! of two or four bytes, and `<key>.json`, the header. Both are put in place whole and in that
//! order, the header last: an entry is complete or absent. The
//! content follows from the key, so two processes that write the same entry write the same bytes
//! and it does not matter whose rename comes last. An entry that does not match its header in
//! length or checksum counts as absent and is written anew.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cinch_files::{MAX_READ, Replacement};
use memmap2::Mmap;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::document::SourceRecord;
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// Raised whenever the files' layout or the way text becomes tokens changes.
pub(crate) const FORMAT_VERSION: u32 = 1;

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

/// The ids of a corpus, read where they lie.
#[derive(Debug, Clone)]
pub(crate) struct TokenStore {
    map: Arc<Mmap>,
    bytes_per_token: usize,
}

impl TokenStore {
    pub(crate) fn len(&self) -> u64 {
        (self.map.len() / self.bytes_per_token) as u64
    }

    /// The ids from `start` on, at most up to the end.
    pub(crate) fn tokens_from(&self, start: u64) -> impl Iterator<Item = i32> + '_ {
        let width = self.bytes_per_token;
        let first = (start.min(self.len()) as usize) * width;
        self.map[first..].chunks_exact(width).map(move |bytes| {
            let high = if width == 4 {
                [bytes[2], bytes[3]]
            } else {
                [0, 0]
            };
            i32::from_le_bytes([bytes[0], bytes[1], high[0], high[1]])
        })
    }
}

#[expect(unsafe_code, reason = "a memory map is only as constant as its file")]
fn map(path: &Path) -> io::Result<Mmap> {
    let file = cinch_files::open_regular(path)?;
    // SAFETY: entries are replaced by renaming a new file over them and never written in place,
    // so the mapped file does not change under the map.
    unsafe { Mmap::map(&file) }
}

fn checksum_of(bytes: &[u8]) -> String {
    let blocks: Vec<_> = bytes
        .par_chunks(CHECKSUM_BLOCK_BYTES)
        .map(Sha256::digest)
        .collect();
    let mut whole = Sha256::new();
    for block in blocks {
        whole.update(block);
    }
    format!("{:x}", whole.finalize())
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
        self.folder.join(format!("{}.tokens", self.fingerprint))
    }

    fn header_path(&self) -> PathBuf {
        self.folder.join(format!("{}.json", self.fingerprint))
    }

    /// The entry if it is there and undamaged.
    pub(crate) fn open(&self) -> Option<(Header, TokenStore)> {
        let header = cinch_files::read_regular(&self.header_path(), MAX_READ).ok()?;
        let header: Header = serde_json::from_slice(&header).ok()?;
        if header.format_version != FORMAT_VERSION
            || header.fingerprint != self.fingerprint
            || header.bytes_per_token != bytes_per_token(header.vocab_size)
        {
            return None;
        }
        let map = map(&self.tokens_path()).ok()?;
        let expected = header
            .num_tokens
            .checked_mul(header.bytes_per_token as u64)?;
        if map.len() as u64 != expected || checksum_of(&map) != header.checksum {
            return None;
        }
        let store = TokenStore {
            map: Arc::new(map),
            bytes_per_token: header.bytes_per_token,
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
            writer.finish(1, Vec::new()).unwrap();
            let (header, store) = entry.open().unwrap();
            assert_eq!(header.bytes_per_token, width);
            let back: Vec<u32> = store.tokens_from(0).map(|id| id as u32).collect();
            assert_eq!(back, ids);
            assert_eq!(store.tokens_from(2).next(), Some(ids[2] as i32));
            assert_eq!(store.tokens_from(99).next(), None);
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
        writer.finish(1, Vec::new()).unwrap();
        assert_eq!(entry.open().unwrap().1.len(), 45 * 100_003);
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
