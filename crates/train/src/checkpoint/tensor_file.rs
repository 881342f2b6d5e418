//! Tensors in a safetensors file: laid out and streamed on the way out, read one by one on the
//! way in.
//!
//! The file is written here and not by the safetensors crate because a save must not hold a second
//! copy of the weights: the header is small and known beforehand, and each tensor's bytes go from
//! where they lie straight to the file. Reading uses the crate's header parser, which also checks
//! that offsets are contiguous and match the shapes. The file is not mapped: a tensor is read to
//! where it is needed, which leaves nothing of the file resident, and a file that somebody cuts
//! off meanwhile is an error.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use cinch_files::read_exact_at;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde_json::{Map, Value, json};

use super::error::CheckpointError;

/// The key under which the format keeps text about the whole file.
const METADATA_KEY: &str = "__metadata__";
/// The file begins with the header's length as a little-endian u64.
const LENGTH_PREFIX: usize = size_of::<u64>();
/// Headers that the format's own reader refuses are not read: 100 million bytes.
const LARGEST_HEADER: u64 = 100_000_000 + LENGTH_PREFIX as u64;

/// A named tensor: row-major elements, little-endian, where they lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub dtype: Dtype,
    pub bytes: &'a [u8],
}

/// A safetensors file before it is written: the header, and the tensors in the file's order.
#[derive(Debug)]
pub(super) struct Layout<'a> {
    /// Length prefix, JSON, and spaces up to a multiple of 8.
    header: Vec<u8>,
    tensors: Vec<&'a TensorView<'a>>,
    num_bytes: u64,
}

impl<'a> Layout<'a> {
    pub(super) fn new(tensors: &'a [TensorView<'a>]) -> Result<Self, CheckpointError> {
        let mut names = HashSet::new();
        for tensor in tensors {
            check(tensor)?;
            if !names.insert(tensor.name) {
                return Err(CheckpointError::DuplicateTensor {
                    name: tensor.name.to_owned(),
                });
            }
        }
        // Wide elements first: the data begins at a multiple of 8, so every tensor is aligned for
        // its element in a reader that maps the file, also after an odd number of bytes.
        let mut ordered: Vec<_> = tensors.iter().collect();
        ordered.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bitsize()));

        let mut entries = Map::new();
        // "pt" is what the loaders of the PyTorch world look for.
        entries.insert(METADATA_KEY.to_owned(), json!({ "format": "pt" }));
        let mut offset = 0;
        for tensor in &ordered {
            let end = offset + tensor.bytes.len();
            entries.insert(
                tensor.name.to_owned(),
                json!(TensorInfo {
                    dtype: tensor.dtype,
                    shape: tensor.shape.to_vec(),
                    data_offsets: (offset, end),
                }),
            );
            offset = end;
        }
        let mut text = Value::Object(entries).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        let num_bytes = (header.len() + offset) as u64;
        Ok(Self {
            header,
            tensors: ordered,
            num_bytes,
        })
    }

    /// Length of the whole file.
    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    pub(super) fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.header)?;
        for tensor in &self.tensors {
            out.write_all(tensor.bytes)?;
        }
        Ok(())
    }
}

fn check(tensor: &TensorView<'_>) -> Result<(), CheckpointError> {
    if tensor.name == METADATA_KEY {
        return Err(CheckpointError::ReservedName {
            name: tensor.name.to_owned(),
        });
    }
    let bits = tensor
        .shape
        .iter()
        .try_fold(tensor.dtype.bitsize() as u64, |product, &extent| {
            product.checked_mul(extent as u64)
        });
    let expected = bits.map_or(u64::MAX, |bits| bits.div_ceil(8));
    let found = tensor.bytes.len() as u64;
    if expected == found && bits.is_some_and(|bits| bits % 8 == 0) {
        return Ok(());
    }
    Err(CheckpointError::TensorLength {
        name: tensor.name.to_owned(),
        shape: tensor.shape.to_vec(),
        dtype: tensor.dtype,
        expected,
        found,
    })
}

/// An open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    file: File,
    metadata: Metadata,
    /// In the order of the data.
    names: Vec<String>,
    data_start: u64,
}

/// A tensor of an open file: what is known of it without reading it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SavedTensor<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub dtype: Dtype,
    pub num_bytes: usize,
    /// From the beginning of the file.
    offset: u64,
}

impl TensorFile {
    /// Opens a file and reads its header.
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let file = File::open(path).map_err(OpenError::Io)?;
        let length = file.metadata().map_err(OpenError::Io)?.len();
        let header = read_header(&file, length).map_err(OpenError::Io)?;
        let format = |error: SafeTensorError| OpenError::Format(error.to_string());
        let metadata: Metadata = match SafeTensors::read_metadata(&header) {
            Ok((_, metadata)) => metadata,
            // The parser misses the data only after it has found the header to be in order.
            Err(SafeTensorError::MetadataIncompleteBuffer) => {
                let text = header.get(LENGTH_PREFIX..).unwrap_or_default();
                serde_json::from_slice(text)
                    .map_err(|error| format(SafeTensorError::InvalidHeaderDeserialization(error)))?
            }
            Err(error) => return Err(format(error)),
        };
        let data_start = header.len() as u64;
        if data_start.checked_add(metadata.data_len() as u64) != Some(length) {
            return Err(format(SafeTensorError::MetadataIncompleteBuffer));
        }
        let names = metadata.offset_keys();
        Ok(Self {
            file,
            metadata,
            names,
            data_start,
        })
    }

    pub fn num_tensors(&self) -> usize {
        self.names.len()
    }

    /// The tensor of that name, if the file has one.
    pub fn get<'a>(&'a self, name: &'a str) -> Option<SavedTensor<'a>> {
        let info = self.metadata.info(name)?;
        let (start, end) = info.data_offsets;
        Some(SavedTensor {
            name,
            shape: &info.shape,
            dtype: info.dtype,
            num_bytes: end.checked_sub(start)?,
            offset: self.data_start.checked_add(start as u64)?,
        })
    }

    /// Reads a tensor of this file into memory of its size.
    pub fn read_into(&self, tensor: &SavedTensor<'_>, into: &mut [u8]) -> io::Result<()> {
        read_exact_at(&self.file, into, tensor.offset)
    }

    /// Reads a tensor of this file: row-major elements, little-endian.
    pub fn read(&self, tensor: &SavedTensor<'_>) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; tensor.num_bytes];
        self.read_into(tensor, &mut bytes)?;
        Ok(bytes)
    }

    /// All tensors in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = SavedTensor<'_>> {
        self.names.iter().filter_map(|name| self.get(name))
    }
}

/// Why a safetensors file could not be opened; the caller adds which one.
#[derive(Debug)]
pub(super) enum OpenError {
    Io(io::Error),
    Format(String),
}

/// The length prefix and as much of the header as it speaks of and the file has. A length that
/// cannot be is left to the parser to refuse: only the prefix is read then.
fn read_header(file: &File, length: u64) -> io::Result<Vec<u8>> {
    let mut header = vec![0; LENGTH_PREFIX.min(length as usize)];
    read_exact_at(file, &mut header, 0)?;
    if let Ok(prefix) = <[u8; LENGTH_PREFIX]>::try_from(header.as_slice()) {
        let end = u64::from_le_bytes(prefix).checked_add(LENGTH_PREFIX as u64);
        if let Some(end) = end.filter(|&end| end <= length.min(LARGEST_HEADER)) {
            header.resize(end as usize, 0);
            read_exact_at(file, &mut header[LENGTH_PREFIX..], LENGTH_PREFIX as u64)?;
        }
    }
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(tensors: &[TensorView<'_>]) -> Vec<u8> {
        let layout = Layout::new(tensors).unwrap();
        let mut out = Vec::new();
        layout.write_to(&mut out).unwrap();
        assert_eq!(out.len() as u64, layout.num_bytes());
        out
    }

    #[test]
    fn the_safetensors_crate_reads_what_is_written() {
        let halves = [1_u8, 2, 3, 4, 5, 6];
        let floats: Vec<u8> = [1.5_f32, -2.0, 0.25, 8.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let flags = [7_u8, 8, 9];
        let counters = 42_i64.to_le_bytes();
        let tensors = [
            view("flags", &[3], Dtype::U8, &flags),
            view("half", &[3, 1], Dtype::BF16, &halves),
            view("quoted \"ñ\"", &[2, 2], Dtype::F32, &floats),
            view("empty", &[0, 4], Dtype::F32, &[]),
            view("scalar", &[], Dtype::I64, &counters),
        ];
        let out = written(&tensors);
        let parsed = SafeTensors::deserialize(&out).unwrap();
        assert_eq!(parsed.len(), tensors.len());
        for tensor in &tensors {
            let found = parsed.tensor(tensor.name).unwrap();
            assert_eq!(found.shape(), tensor.shape);
            assert_eq!(found.dtype(), tensor.dtype);
            assert_eq!(found.data(), tensor.bytes);
            // Alignment within the file, which a mapping carries over to memory.
            let position = found.data().as_ptr() as usize - out.as_ptr() as usize;
            assert_eq!(
                position % (tensor.dtype.bitsize() / 8),
                0,
                "{}",
                tensor.name
            );
        }
        let (_, metadata) = SafeTensors::read_metadata(&out).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    }

    #[test]
    fn a_file_without_tensors_is_valid() {
        assert!(SafeTensors::deserialize(&written(&[])).unwrap().is_empty());
    }

    #[test]
    fn a_file_gives_the_tensors_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        let bytes = [1_u8, 2, 3, 4, 5, 6, 7, 8];
        let tensors = [
            view("a", &[2, 2], Dtype::F16, &bytes),
            view("b", &[2], Dtype::F32, &bytes),
        ];
        std::fs::write(&path, written(&tensors)).unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.num_tensors(), 2);
        let found: Vec<_> = file.iter().collect();
        for (found, tensor) in found.iter().zip([&tensors[1], &tensors[0]]) {
            assert_eq!(
                (found.name, found.shape, found.dtype),
                (tensor.name, tensor.shape, tensor.dtype)
            );
            assert_eq!(file.read(found).unwrap(), tensor.bytes);
        }
        assert_eq!(file.get("a"), Some(found[1]));
        assert_eq!(file.get("c"), None);
    }

    #[test]
    fn a_file_that_is_cut_off_while_it_is_open_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        // Larger than a page, so that a mapping would have lost whole ones.
        let bytes = vec![7_u8; 1 << 16];
        std::fs::write(&path, written(&[view("w", &[1 << 14], Dtype::F32, &bytes)])).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let writer = File::options().write(true).open(&path).unwrap();
        writer.set_len(4096).unwrap();
        let tensor = file.get("w").unwrap();
        let error = file.read(&tensor).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn headers_that_cannot_be_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        let bytes = [0_u8; 8];
        let whole = written(&[view("w", &[2], Dtype::F32, &bytes)]);
        let mut long = whole.clone();
        long.push(0);
        let short = whole[..whole.len() - 1].to_vec();
        let absurd = u64::MAX.to_le_bytes().to_vec();
        let beyond = 1000_u64.to_le_bytes().to_vec();
        for content in [Vec::new(), vec![1, 2], absurd, beyond, short, long] {
            std::fs::write(&path, &content).unwrap();
            let result = TensorFile::open(&path);
            assert!(matches!(result, Err(OpenError::Format(_))), "{content:?}");
        }
    }

    #[test]
    fn inconsistent_tensors_are_refused() {
        let bytes = [0_u8; 8];
        let refusal = |tensors: &[TensorView<'_>]| Layout::new(tensors).unwrap_err().to_string();
        assert_eq!(
            refusal(&[view("w", &[3], Dtype::F32, &bytes)]),
            "tensor `w`: shape [3] of F32 takes 12 bytes, 8 were given"
        );
        let twice = view("w", &[2], Dtype::F32, &bytes);
        assert!(refusal(&[twice, twice]).contains("two tensors are called `w`"));
        assert!(
            refusal(&[view("__metadata__", &[2], Dtype::F32, &bytes)]).contains("__metadata__")
        );
        let huge = [usize::MAX, 3];
        refusal(&[view("overflow", &huge, Dtype::F32, &bytes)]);
    }

    fn view<'a>(
        name: &'a str,
        shape: &'a [usize],
        dtype: Dtype,
        bytes: &'a [u8],
    ) -> TensorView<'a> {
        TensorView {
            name,
            shape,
            dtype,
            bytes,
        }
    }
}
