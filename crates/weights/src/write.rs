//! Writing safetensors files: the header first, then tensor after tensor as bytes come, so that
//! no tensor needs to be in memory as a whole.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use cinch_files::{NewFolder, Replacement};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::companions::Companions;
use crate::error::WeightError;
use crate::header::{METADATA_KEY, num_bytes};
use crate::open::{INDEX_FILE, SINGLE_FILE};

/// Bytes that are collected before they go to the file.
pub const WRITE_BUFFER: usize = 1 << 20;
/// Data begins at a multiple of this, so that a mapped file is aligned for every element.
const ALIGNMENT: usize = 8;

/// A tensor that is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpec<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
}

impl TensorSpec<'_> {
    /// Bytes of its elements.
    pub fn num_bytes(&self) -> Result<u64, WeightError> {
        num_bytes(self.dtype, self.shape).ok_or_else(|| WeightError::Unwritable {
            tensor: self.name.to_owned(),
            problem: format!(
                "shape {:?} of {} is not whole bytes",
                self.shape, self.dtype
            ),
        })
    }
}

/// A safetensors file before it is written: its header, and the order of its tensors.
#[derive(Clone, Debug)]
pub struct Layout {
    header: Vec<u8>,
    order: Vec<usize>,
    num_bytes: u64,
}

impl Layout {
    pub fn new(tensors: &[TensorSpec<'_>]) -> Result<Self, WeightError> {
        let mut names = HashSet::new();
        for tensor in tensors {
            let refuse = |problem: &str| WeightError::Unwritable {
                tensor: tensor.name.to_owned(),
                problem: problem.to_owned(),
            };
            if tensor.name == METADATA_KEY {
                return Err(refuse("the format keeps this name for itself"));
            }
            if !names.insert(tensor.name) {
                return Err(refuse("two tensors have this name"));
            }
        }
        // Wide elements first: every tensor is then aligned for its element.
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&place| std::cmp::Reverse(tensors[place].dtype.bitsize()));

        let mut entries = Map::new();
        // "pt" is what the loaders of the PyTorch world look for.
        entries.insert(METADATA_KEY.to_owned(), json!({ "format": "pt" }));
        let mut offset = 0_u64;
        for &place in &order {
            let tensor = &tensors[place];
            let end = offset + tensor.num_bytes()?;
            entries.insert(
                tensor.name.to_owned(),
                json!({
                    "dtype": tensor.dtype.to_string(),
                    "shape": tensor.shape,
                    "data_offsets": [offset, end],
                }),
            );
            offset = end;
        }
        let mut text = Value::Object(entries).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        Ok(Self {
            num_bytes: header.len() as u64 + offset,
            header,
            order,
        })
    }

    /// The bytes before the data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The given tensors in the order of the file, by their places.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Length of the whole file.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }
}

/// Where the bytes of one tensor go.
#[derive(Debug)]
pub struct TensorWriter<'a> {
    path: &'a Path,
    tensor: &'a str,
    out: &'a mut BufWriter<Replacement>,
    file_bytes: u64,
    expected: u64,
    written: u64,
}

impl TensorWriter<'_> {
    /// Appends bytes: row-major elements, little-endian.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), WeightError> {
        self.written += bytes.len() as u64;
        if self.written > self.expected {
            return Err(self.wrong_length());
        }
        let path = self.path;
        self.out
            .write_all(bytes)
            .map_err(|error| failed(path, self.file_bytes, error))
    }

    fn wrong_length(&self) -> WeightError {
        WeightError::Unwritable {
            tensor: self.tensor.to_owned(),
            problem: format!(
                "its shape takes {} bytes, {} were given",
                self.expected, self.written
            ),
        }
    }

    fn finish(self) -> Result<(), WeightError> {
        match self.written == self.expected {
            true => Ok(()),
            false => Err(self.wrong_length()),
        }
    }
}

/// What gives the bytes of each tensor, one after the other.
pub type Contents<'a> =
    dyn FnMut(&TensorSpec<'_>, &mut TensorWriter<'_>) -> Result<(), WeightError> + 'a;

/// Writes a file of tensors, whole or not at all. `contents` is asked for the tensors in the
/// order of the file.
pub fn write_file(
    path: &Path,
    tensors: &[TensorSpec<'_>],
    contents: &mut Contents<'_>,
) -> Result<(), WeightError> {
    let layout = Layout::new(tensors)?;
    let file_bytes = layout.num_bytes();
    let fail = |error| failed(path, file_bytes, error);
    let file = Replacement::create(path).map_err(WeightError::io("create", path))?;
    let mut out = BufWriter::with_capacity(WRITE_BUFFER, file);
    out.write_all(layout.header()).map_err(fail)?;
    for &place in layout.order() {
        let tensor = &tensors[place];
        let mut writer = TensorWriter {
            path,
            tensor: tensor.name,
            out: &mut out,
            file_bytes,
            expected: tensor.num_bytes()?,
            written: 0,
        };
        contents(tensor, &mut writer)?;
        writer.finish()?;
    }
    let file = out.into_inner().map_err(|error| fail(error.into_error()))?;
    file.put().map_err(fail)
}

/// Cuts tensors into files of at most `limit` bytes of data, in their order, as transformers does:
/// a tensor that is larger has a file of its own.
pub fn cut_shards<'a>(
    tensors: &[TensorSpec<'a>],
    limit: u64,
) -> Result<Vec<Vec<TensorSpec<'a>>>, WeightError> {
    let mut shards: Vec<Vec<TensorSpec<'a>>> = Vec::new();
    let mut used = u64::MAX;
    for &tensor in tensors {
        let bytes = tensor.num_bytes()?;
        match shards.last_mut() {
            Some(shard) if used.saturating_add(bytes) <= limit => {
                shard.push(tensor);
                used += bytes;
            }
            _ => {
                shards.push(vec![tensor]);
                used = bytes;
            }
        }
    }
    Ok(shards)
}

/// Writes the weights of a model into a folder: one file, or shards with their index, under the
/// names that transformers reads. Gives the names of the files.
///
/// Each file is written whole, one after the other; [`write_model_folder`] makes a folder that is
/// whole or not there.
pub fn write_model(
    folder: &Path,
    shards: &[Vec<TensorSpec<'_>>],
    contents: &mut Contents<'_>,
) -> Result<Vec<PathBuf>, WeightError> {
    let count = shards.len();
    if count <= 1 {
        let tensors = shards.first().map_or(&[][..], Vec::as_slice);
        let path = folder.join(SINGLE_FILE);
        write_file(&path, tensors, contents)?;
        return Ok(vec![path]);
    }
    let mut weight_map = BTreeMap::new();
    let (mut total_size, mut total_parameters) = (0, 0);
    let mut paths = Vec::with_capacity(count + 1);
    for (number, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", number + 1);
        for tensor in tensors {
            if weight_map.insert(tensor.name, name.clone()).is_some() {
                return Err(WeightError::Unwritable {
                    tensor: tensor.name.to_owned(),
                    problem: "two files would have it".to_owned(),
                });
            }
            total_size += tensor.num_bytes()?;
            total_parameters += tensor.shape.iter().product::<usize>();
        }
        let path = folder.join(name);
        write_file(&path, tensors, contents)?;
        paths.push(path);
    }
    let metadata = json!({ "total_parameters": total_parameters, "total_size": total_size });
    let index = json!({ "metadata": metadata, "weight_map": weight_map });
    let path = folder.join(INDEX_FILE);
    let text = format!("{index:#}\n");
    cinch_files::replace(&path, text.as_bytes()).map_err(WeightError::io("write", &path))?;
    paths.push(path);
    Ok(paths)
}

/// Writes the folder of a model, whole or not at all: its weights, and configuration and tokenizer
/// copied from the folder of the model that it came from. There is nothing at `to` yet but an
/// empty folder at most.
pub fn write_model_folder(
    to: &Path,
    shards: &[Vec<TensorSpec<'_>>],
    companions: Companions<'_>,
    contents: &mut Contents<'_>,
) -> Result<WrittenFolder, WeightError> {
    let folder = new_folder(to)?;
    let files = write_model(folder.path(), shards, contents)?;
    let companions = companions.copy_to(folder.path())?;
    folder.put().map_err(WeightError::io("create", to))?;
    let names = files.iter().filter_map(|path| path.file_name());
    Ok(WrittenFolder {
        weights: names.map(|name| to.join(name)).collect(),
        companions,
    })
}

/// What a model folder was filled with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFolder {
    /// Files of weights, and the index where there are several.
    pub weights: Vec<PathBuf>,
    /// Names of copied files.
    pub companions: Vec<&'static str>,
}

/// Begins a folder; a place that has something in it is refused.
pub(crate) fn new_folder(path: &Path) -> Result<NewFolder, WeightError> {
    NewFolder::create(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => WeightError::Taken {
            path: path.to_owned(),
        },
        _ => WeightError::io("create", path)(error),
    })
}

fn failed(path: &Path, needed: u64, source: io::Error) -> WeightError {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => WeightError::DiskFull {
            path: path.to_owned(),
            needed,
            source,
        },
        _ => WeightError::io("write", path)(source),
    }
}
