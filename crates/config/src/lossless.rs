//! Paths in JSON: as text, or as the list of their bytes where they are no text. On Unix a name is
//! bytes, and what is kept must lead back to the same file.

use std::path::{Path, PathBuf};

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Stored {
    Text(PathBuf),
    Bytes(Vec<u8>),
}

pub(crate) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    match bytes_of(path).filter(|_| path.to_str().is_none()) {
        Some(bytes) => bytes.serialize(serializer),
        None => path.serialize(serializer),
    }
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    match Stored::deserialize(deserializer)? {
        Stored::Text(path) => Ok(path),
        Stored::Bytes(bytes) => {
            path_of(bytes).ok_or_else(|| D::Error::custom("a path in bytes is of another system"))
        }
    }
}

/// A path in what is told and not read back.
pub(crate) fn shown<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&cinch_files::shown(path))
}

/// The same for a path that may be missing.
pub(crate) mod optional {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Lossless(#[serde(with = "super")] PathBuf);

    #[expect(clippy::ref_option, reason = "serde hands the field over so")]
    pub(crate) fn serialize<S: Serializer>(
        path: &Option<PathBuf>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        path.clone().map(Lossless).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<PathBuf>, D::Error> {
        let path = Option::<Lossless>::deserialize(deserializer)?;
        Ok(path.map(|Lossless(path)| path))
    }
}

#[cfg(unix)]
fn bytes_of(path: &Path) -> Option<&[u8]> {
    use std::os::unix::ffi::OsStrExt;
    Some(path.as_os_str().as_bytes())
}

#[cfg(unix)]
fn path_of(bytes: Vec<u8>) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    Some(std::ffi::OsString::from_vec(bytes).into())
}

// Elsewhere names are not bytes: one that is no text is refused.
#[cfg(not(unix))]
fn bytes_of(_path: &Path) -> Option<&[u8]> {
    None
}

#[cfg(not(unix))]
fn path_of(_bytes: Vec<u8>) -> Option<PathBuf> {
    None
}
