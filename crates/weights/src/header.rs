//! The header of a safetensors file: its tensors with type, shape and place, all of it checked
//! against the file's length before a tensor is read.
//!
//! A file is the header's length (u64, little-endian), the header as JSON, and the tensors'
//! bytes without holes between them. Parsed here and not by the safetensors crate because that
//! wants the whole file in memory or mapped, and does not say which tensor is wrong.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use safetensors::Dtype;
use serde::Deserialize;
use serde_json::Value;

use crate::error::WeightError;
use crate::read::read_exact_at;

/// The file begins with the header's length.
pub(crate) const LENGTH_PREFIX: u64 = size_of::<u64>() as u64;
/// The key under which the format keeps text about the whole file.
pub(crate) const METADATA_KEY: &str = "__metadata__";
/// The format's own limit, which keeps a damaged length from being allocated.
const LONGEST_HEADER: u64 = 100_000_000;
/// What a file begins with that git-lfs left in the place of the real one.
const LFS_POINTER: &[u8] = b"version ";

/// A tensor and where its bytes are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// From the beginning of the file.
    pub offset: u64,
    pub num_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Header {
    /// In the order of their bytes.
    pub entries: Vec<Entry>,
    pub metadata: HashMap<String, String>,
}

#[derive(Deserialize)]
struct Described {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl Header {
    pub(crate) fn read(file: &File, path: &Path) -> Result<Header, WeightError> {
        let found = file
            .metadata()
            .map_err(WeightError::io("read", path))?
            .len();
        let text = read_text(file, path, found)?;
        let data_start = LENGTH_PREFIX + text.len() as u64;
        let (mut entries, metadata) = parse(&text, path)?;
        entries.sort_by_key(|entry| (entry.offset, entry.num_bytes));
        let data_end = check_places(&entries, path)?;
        let expected = data_start.saturating_add(data_end);
        if found < expected {
            return Err(WeightError::Truncated {
                path: path.to_owned(),
                expected,
                found,
            });
        }
        if found > expected {
            return Err(damaged(
                path,
                format!("its header describes {expected} bytes, the file has {found}"),
            ));
        }
        for entry in &mut entries {
            entry.offset += data_start;
        }
        Ok(Header { entries, metadata })
    }
}

fn read_text(file: &File, path: &Path, found: u64) -> Result<Vec<u8>, WeightError> {
    let mut prefix = [0; LENGTH_PREFIX as usize];
    if found < LENGTH_PREFIX {
        return Err(not_safetensors(path, format!("it has {found} bytes")));
    }
    read_exact_at(file, &mut prefix, 0).map_err(WeightError::io("read", path))?;
    if prefix == LFS_POINTER {
        return Err(not_safetensors(
            path,
            "it is a pointer of git-lfs to the file\nhint: `git lfs pull` in its folder fetches it"
                .to_owned(),
        ));
    }
    let length = u64::from_le_bytes(prefix);
    if length > LONGEST_HEADER {
        return Err(not_safetensors(
            path,
            format!("its header would have {length} bytes, where {LONGEST_HEADER} is the limit"),
        ));
    }
    if LENGTH_PREFIX + length > found {
        return Err(WeightError::Truncated {
            path: path.to_owned(),
            expected: LENGTH_PREFIX + length,
            found,
        });
    }
    let mut text = vec![0; length as usize];
    read_exact_at(file, &mut text, LENGTH_PREFIX).map_err(WeightError::io("read", path))?;
    Ok(text)
}

type Parsed = (Vec<Entry>, HashMap<String, String>);

fn parse(text: &[u8], path: &Path) -> Result<Parsed, WeightError> {
    let header: serde_json::Map<String, Value> = serde_json::from_slice(text)
        .map_err(|error| not_safetensors(path, format!("its header is not JSON: {error}")))?;
    let mut entries = Vec::with_capacity(header.len());
    let mut metadata = HashMap::new();
    for (name, value) in header {
        if name == METADATA_KEY {
            metadata = serde_json::from_value(value)
                .map_err(|error| not_safetensors(path, format!("{METADATA_KEY}: {error}")))?;
            continue;
        }
        let described: Described = serde_json::from_value(value)
            .map_err(|error| not_safetensors(path, format!("tensor `{name}`: {error}")))?;
        entries.push(entry(name, described, path)?);
    }
    Ok((entries, metadata))
}

fn entry(name: String, described: Described, path: &Path) -> Result<Entry, WeightError> {
    let Described {
        dtype,
        shape,
        data_offsets: (start, end),
    } = described;
    let expected = num_bytes(dtype, &shape).ok_or_else(|| {
        let problem = format!("tensor `{name}`: shape {shape:?} of {dtype} is not whole bytes");
        damaged(path, problem)
    })?;
    if end.checked_sub(start) != Some(expected) {
        let problem = format!(
            "tensor `{name}`: shape {shape:?} of {dtype} takes {expected} bytes, its place is {start}..{end}"
        );
        return Err(damaged(path, problem));
    }
    Ok(Entry {
        name,
        dtype,
        shape,
        offset: start,
        num_bytes: expected,
    })
}

/// Bytes of a tensor, where they are whole and can be counted.
pub(crate) fn num_bytes(dtype: Dtype, shape: &[usize]) -> Option<u64> {
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize() as u64, |product, &extent| {
            product.checked_mul(extent as u64)
        })?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// That each tensor begins where the one before it ends; gives the end of the last.
fn check_places(entries: &[Entry], path: &Path) -> Result<u64, WeightError> {
    let mut end = 0;
    let mut last = "";
    for entry in entries {
        if entry.offset < end {
            let problem = format!("tensors `{last}` and `{}` overlap", entry.name);
            return Err(damaged(path, problem));
        }
        if entry.offset > end {
            let problem = format!(
                "bytes {end}..{} of its data, before `{}`, belong to no tensor",
                entry.offset, entry.name
            );
            return Err(damaged(path, problem));
        }
        end = entry.offset.saturating_add(entry.num_bytes);
        last = &entry.name;
    }
    Ok(end)
}

fn damaged(path: &Path, problem: String) -> WeightError {
    WeightError::Damaged {
        path: path.to_owned(),
        problem,
    }
}

fn not_safetensors(path: &Path, problem: String) -> WeightError {
    WeightError::NotSafetensors {
        path: path.to_owned(),
        problem,
    }
}
