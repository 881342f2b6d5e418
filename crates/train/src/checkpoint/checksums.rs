//! `checksums.json`: length and SHA-256 of every other file of a checkpoint, taken from the bytes
//! on their way to the disk, so that they witness what was meant and not what arrived.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Seek, Write};
use std::path::Path;

use cinch_files::MAX_READ;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::Damage;
use super::{CHECKSUMS_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE};

/// Large enough to make system calls rare, small enough that a piece is still in the cache when
/// it is written after having been hashed.
const PIECE: usize = 1 << 20;

/// More parts than any run has ranks: each costs a read.
const MAX_PARTS: u64 = 1 << 20;

/// Length and SHA-256 of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileDigest {
    pub(super) bytes: u64,
    pub(super) sha256: String,
    /// For a file that several ranks have hashed: `sha256` is that of the hashes of parts of so
    /// many bytes, one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) part_bytes: Option<u64>,
}

impl FileDigest {
    /// Of a file whose parts of `part_bytes` have these hashes.
    pub(super) fn of_parts(bytes: u64, part_bytes: u64, hashes: &[Vec<u8>]) -> Self {
        let mut hasher = Sha256::new();
        hashes.iter().for_each(|hash| hasher.update(hash));
        Self {
            bytes,
            sha256: hexadecimal(&hasher.finalize()),
            part_bytes: Some(part_bytes),
        }
    }
}

/// The contents of `checksums.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Checksums {
    pub(super) files: BTreeMap<String, FileDigest>,
}

/// A file of a checkpoint and what is wrong with it.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) file: String,
    pub(super) damage: Damage,
}

impl Finding {
    pub(super) fn new(file: &str, damage: Damage) -> Self {
        Self {
            file: file.to_owned(),
            damage,
        }
    }
}

/// A writer that hashes and counts what passes through it.
pub(super) struct Hashed<W> {
    inner: W,
    hasher: Sha256,
    bytes: u64,
}

impl<W: Write> Hashed<W> {
    pub(super) fn new(inner: W) -> Self {
        Self {
            inner,
            hasher: Sha256::new(),
            bytes: 0,
        }
    }

    /// Flushes, and returns the writer with the digest of everything written.
    pub(super) fn finish(mut self) -> io::Result<(W, FileDigest)> {
        self.inner.flush()?;
        let digest = FileDigest {
            bytes: self.bytes,
            sha256: hexadecimal(&self.hasher.finalize()),
            part_bytes: None,
        };
        Ok((self.inner, digest))
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let piece = &buffer[..buffer.len().min(PIECE)];
        let written = self.inner.write(piece)?;
        self.hasher.update(&piece[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl Checksums {
    /// Reads the checksums of a checkpoint and checks that they cover its three files.
    pub(super) fn read(folder: &Path) -> Result<Self, Finding> {
        let refused = |damage| Finding::new(CHECKSUMS_FILE, damage);
        let json = |reason: String| refused(Damage::Json { reason });
        let text = cinch_files::read_regular(&folder.join(CHECKSUMS_FILE), MAX_READ)
            .map_err(|error| refused(unreadable(&error)))?;
        let checksums: Self =
            serde_json::from_slice(&text).map_err(|error| json(error.to_string()))?;
        for required in [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE] {
            if !checksums.files.contains_key(required) {
                return Err(json(format!("no entry for {required}")));
            }
        }
        let uncounted = |digest: &&FileDigest| {
            let parts = digest.part_bytes.map(|part| digest.bytes / part.max(1));
            parts.is_some_and(|parts| parts > MAX_PARTS)
        };
        if let Some(digest) = checksums.files.values().find(uncounted) {
            let part = digest.part_bytes.unwrap_or_default();
            return Err(json(format!("parts of {part} bytes are too small")));
        }
        // The names become paths; one that leads out of the folder was not written by a save.
        match checksums.files.keys().find(|name| !is_plain_name(name)) {
            Some(name) => Err(json(format!("`{name}` is not a plain file name"))),
            None => Ok(checksums),
        }
    }

    /// Compares the lengths only: cheap enough for every listing.
    pub(super) fn check_lengths(&self, folder: &Path) -> Result<(), Finding> {
        for (name, expected) in &self.files {
            check_length(folder, name, expected)?;
        }
        Ok(())
    }

    /// Reads every file and compares lengths and hashes. Lengths of all files come first: a
    /// truncated file is then found without reading the others.
    pub(super) fn check_contents(&self, folder: &Path) -> Result<(), Finding> {
        self.check_lengths(folder)?;
        for name in self.files.keys() {
            self.check_file(folder, name)?;
        }
        Ok(())
    }

    /// Compares length and hash of one listed file.
    pub(super) fn check_file(&self, folder: &Path, name: &str) -> Result<(), Finding> {
        let Some(expected) = self.files.get(name) else {
            return Err(Finding::new(name, Damage::Missing));
        };
        check_length(folder, name, expected)?;
        let found = hash_as(expected, &folder.join(name))
            .map_err(|error| Finding::new(name, unreadable(&error)))?;
        if found.bytes != expected.bytes {
            return Err(Finding::new(name, length(expected, found.bytes)));
        }
        if found.sha256 != expected.sha256 {
            return Err(Finding::new(
                name,
                Damage::Checksum {
                    expected: expected.sha256.clone(),
                    found: found.sha256,
                },
            ));
        }
        Ok(())
    }
}

fn is_plain_name(name: &str) -> bool {
    Path::new(name)
        .file_name()
        .is_some_and(|plain| plain == name)
}

fn check_length(folder: &Path, name: &str, expected: &FileDigest) -> Result<(), Finding> {
    let found = fs::metadata(folder.join(name))
        .map_err(|error| Finding::new(name, unreadable(&error)))?
        .len();
    if found == expected.bytes {
        Ok(())
    } else {
        Err(Finding::new(name, length(expected, found)))
    }
}

fn length(expected: &FileDigest, found: u64) -> Damage {
    Damage::Length {
        expected: expected.bytes,
        found,
    }
}

pub(super) fn unreadable(error: &io::Error) -> Damage {
    if error.kind() == io::ErrorKind::NotFound {
        Damage::Missing
    } else {
        Damage::Unreadable {
            reason: error.to_string(),
        }
    }
}

/// The hash of a file, taken as another was.
fn hash_as(expected: &FileDigest, path: &Path) -> io::Result<FileDigest> {
    let Some(part_bytes) = expected.part_bytes else {
        return hash_file(path);
    };
    let bytes = fs::metadata(path)?.len();
    let parts = bytes.div_ceil(part_bytes.max(1));
    let hashes: io::Result<Vec<Vec<u8>>> = (0..parts)
        .map(|part| hash_part(path, part * part_bytes, part_bytes))
        .collect();
    Ok(FileDigest::of_parts(bytes, part_bytes, &hashes?))
}

/// The hash of `bytes` of a file from `first` on, or of as many as it has.
pub(super) fn hash_part(path: &Path, first: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut file = cinch_files::open_regular(path)?;
    file.seek(io::SeekFrom::Start(first))?;
    let mut part = file.take(bytes);
    let (mut hasher, mut piece) = (Sha256::new(), vec![0; PIECE]);
    loop {
        match part.read(&mut piece) {
            Ok(0) => return Ok(hasher.finalize().to_vec()),
            Ok(count) => hasher.update(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn hash_file(path: &Path) -> io::Result<FileDigest> {
    let mut file = cinch_files::open_regular(path)?;
    let mut hashed = Hashed::new(io::sink());
    let mut piece = vec![0; PIECE];
    loop {
        let count = match file.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hashed.write_all(&piece[..count])?;
    }
    hashed.finish().map(|(_, digest)| digest)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes at most three bytes at a time, as a nearly full pipe would.
    struct Trickle(Vec<u8>);

    impl Write for Trickle {
        fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
            let count = buffer.len().min(3);
            self.0.extend_from_slice(&buffer[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn short_writes_are_hashed_once() {
        let mut hashed = Hashed::new(Trickle(Vec::new()));
        hashed
            .write_all(b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")
            .unwrap();
        let (inner, digest) = hashed.finish().unwrap();
        assert_eq!(inner.0.len(), 56);
        assert_eq!(digest.bytes, 56);
        // The two-block example of FIPS 180-2, appendix B.2.
        assert_eq!(
            digest.sha256,
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        );
    }

    #[test]
    fn a_file_larger_than_one_piece_hashes_like_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        let contents: Vec<u8> = (0..PIECE + 12_345)
            .map(|index| (index % 251) as u8)
            .collect();
        fs::write(&path, &contents).unwrap();
        let digest = hash_file(&path).unwrap();
        assert_eq!(digest.bytes, contents.len() as u64);
        assert_eq!(digest.sha256, hexadecimal(&Sha256::digest(&contents)));
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let digest = FileDigest {
            bytes: 0,
            sha256: String::new(),
            part_bytes: None,
        };
        let mut checksums = Checksums::default();
        for name in [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, "../elsewhere"] {
            checksums.files.insert(name.to_owned(), digest.clone());
        }
        let text = serde_json::to_vec(&checksums).unwrap();
        fs::write(folder.path().join(CHECKSUMS_FILE), text).unwrap();
        let finding = Checksums::read(folder.path()).unwrap_err();
        assert!(finding.damage.to_string().contains("../elsewhere"));
    }
}
