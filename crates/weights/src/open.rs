//! Opening the weights of a model: which files there are, and which tensors are in them.
//!
//! Files are not mapped. A mapped file that another process cuts off ends this one by a signal
//! (SIGBUS) at the next touch, where a read gives an error; and pages of a mapping count as this
//! process's memory until the system takes them back. [`WeightFiles`] holds headers alone, and
//! reads by position into memory that the caller has.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use cinch_architecture::nearest_name;
use safetensors::Dtype;
use serde::Deserialize;

use crate::error::WeightError;
use crate::header::Header;
use crate::write::TensorSpec;

pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
/// How the names of index files end.
const INDEX_ENDING: &str = ".index.json";
/// Endings of files that PyTorch writes by pickling.
const PICKLE_ENDINGS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// The open files of a model, or of any other set of named tensors.
#[derive(Debug)]
pub struct WeightFiles {
    /// What was opened: a folder or a file.
    path: PathBuf,
    pub(crate) files: Vec<OpenFile>,
    /// File by file, in the order of their bytes.
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
}

#[derive(Debug)]
pub(crate) struct OpenFile {
    pub path: PathBuf,
    pub file: File,
    pub metadata: HashMap<String, String>,
}

/// A tensor of a file: row-major, little-endian.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub(crate) file: usize,
    pub(crate) offset: u64,
    num_bytes: u64,
}

impl Tensor {
    /// Its first extent; a scalar has one row.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of one row.
    pub fn row_elements(&self) -> usize {
        // Not the product of the other extents, which only that of all was checked to be countable.
        self.num_elements().checked_div(self.rows()).unwrap_or(0)
    }

    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// What a file with this tensor declares.
    pub fn spec(&self) -> TensorSpec<'_> {
        TensorSpec {
            name: &self.name,
            dtype: self.dtype,
            shape: &self.shape,
        }
    }

    /// Bytes in the file.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }
}

/// The part of `model.safetensors.index.json` that is read.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Opens a model folder, a `.safetensors` file or an index of shards, and checks every header.
    pub fn open(path: &Path) -> Result<WeightFiles, WeightError> {
        if path.is_dir() {
            let single = path.join(SINGLE_FILE);
            let index = path.join(INDEX_FILE);
            // Where a folder has both, transformers reads the single file too.
            return match (single.exists(), index.exists()) {
                (true, _) => Self::open_files(path, vec![single]),
                (_, true) => Self::open_index(path, &index),
                _ => Err(nothing_in(path)),
            };
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ending = path.extension().unwrap_or_default().to_string_lossy();
        if PICKLE_ENDINGS.contains(&&*ending) {
            return Err(WeightError::Pickle {
                path: path.to_owned(),
            });
        }
        if name.ends_with(INDEX_ENDING) {
            return Self::open_index(path, path);
        }
        Self::open_files(path, vec![path.to_owned()])
    }

    fn open_index(path: &Path, index: &Path) -> Result<WeightFiles, WeightError> {
        let text = std::fs::read(index).map_err(WeightError::io("read", index))?;
        let wrong = |problem: String| WeightError::Index {
            path: index.to_owned(),
            problem,
        };
        let Index { weight_map } =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let mut shards: BTreeMap<&str, usize> = BTreeMap::new();
        for file in weight_map.values() {
            *shards.entry(file).or_default() += 1;
        }
        let folder = cinch_files::parent_of(index);
        let mut paths = Vec::with_capacity(shards.len());
        for (&file, &num_tensors) in &shards {
            // A name with a folder in it would lead out of the model's own.
            if Path::new(file).file_name() != Some(file.as_ref()) {
                return Err(wrong(format!(
                    "`{file}` is not the name of a file beside it"
                )));
            }
            let shard = folder.join(file);
            if !shard.exists() {
                return Err(WeightError::MissingShard {
                    index: index.to_owned(),
                    file: file.to_owned(),
                    num_tensors,
                });
            }
            paths.push(shard);
        }
        let files = Self::open_files(path, paths)?;
        for (tensor, file) in &weight_map {
            let named = Some(file.as_ref());
            let found = files.get(tensor).map(|tensor| files.file_of(tensor));
            if found.and_then(Path::file_name) != named {
                return Err(WeightError::NotInShard {
                    index: index.to_owned(),
                    tensor: tensor.clone(),
                    file: file.clone(),
                });
            }
        }
        Ok(files)
    }

    fn open_files(path: &Path, paths: Vec<PathBuf>) -> Result<WeightFiles, WeightError> {
        let mut opened = WeightFiles {
            path: path.to_owned(),
            files: Vec::with_capacity(paths.len()),
            tensors: Vec::new(),
            by_name: HashMap::new(),
        };
        for path in paths {
            opened.add(path)?;
        }
        Ok(opened)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), WeightError> {
        let file = File::open(&path).map_err(WeightError::io("open", &path))?;
        let Header { entries, metadata } = Header::read(&file, &path)?;
        let number = self.files.len();
        for entry in entries {
            let known = self.by_name.insert(entry.name.clone(), self.tensors.len());
            if let Some(known) = known {
                return Err(WeightError::InTwoFiles {
                    tensor: entry.name,
                    first: self.file_of(&self.tensors[known]).to_owned(),
                    second: path,
                });
            }
            self.tensors.push(Tensor {
                name: entry.name,
                dtype: entry.dtype,
                shape: entry.shape,
                file: number,
                offset: entry.offset,
                num_bytes: entry.num_bytes,
            });
        }
        self.files.push(OpenFile {
            path,
            file,
            metadata,
        });
        Ok(())
    }

    /// What was opened: a folder or a file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder in which the files are.
    pub fn folder(&self) -> &Path {
        match self.files.first() {
            Some(file) => cinch_files::parent_of(&file.path),
            None => &self.path,
        }
    }

    /// All tensors: file by file, each in the order of its bytes.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor of that name, if there is one.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|&place| &self.tensors[place])
    }

    /// The tensor of that name, or an error that suggests another.
    pub fn tensor(&self, name: &str) -> Result<&Tensor, WeightError> {
        self.get(name).ok_or_else(|| {
            let names = self.tensors.iter().map(|tensor| tensor.name.as_str());
            WeightError::NoTensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
                suggestion: nearest_name(name, names).map(str::to_owned),
            }
        })
    }

    /// Gives a tensor a second name, under which it is a tensor of its own with the same numbers.
    /// Nothing happens where there is none, or another has the name.
    pub fn lend(&mut self, name: &str, second: &str) {
        let Some(tensor) = self.get(name).filter(|_| self.get(second).is_none()) else {
            return;
        };
        let tensor = Tensor {
            name: second.to_owned(),
            ..tensor.clone()
        };
        self.by_name.insert(tensor.name.clone(), self.tensors.len());
        self.tensors.push(tensor);
    }

    /// The files, in the order in which they were opened.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The file in which a tensor is.
    pub fn file_of(&self, tensor: &Tensor) -> &Path {
        self.files
            .get(tensor.file)
            .map_or(&self.path, |file| &file.path)
    }

    /// Bytes of all tensors.
    pub fn num_bytes(&self) -> u64 {
        self.tensors.iter().map(Tensor::num_bytes).sum()
    }

    /// Text about the whole of the first file, such as `format`.
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.files.first().map(|file| &file.metadata)
    }
}

/// Why a folder without a file of the usual names has no weights.
fn nothing_in(folder: &Path) -> WeightError {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => return WeightError::io("list", folder)(error),
    };
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let pickled = names.iter().find(|name| {
        let pickle_index = name.starts_with("pytorch_model") && name.ends_with(INDEX_ENDING);
        pickle_index || name.starts_with("pytorch_model") && name.ends_with(".bin")
    });
    if let Some(name) = pickled {
        return WeightError::Pickle {
            path: folder.join(name),
        };
    }
    let others: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| name.ends_with(".safetensors") || name.ends_with(".gguf"))
        .collect();
    let problem = match others.as_slice() {
        [] => format!("it holds neither {SINGLE_FILE} nor {INDEX_FILE}"),
        [first, rest @ ..] => {
            let more = match rest {
                [] => String::new(),
                rest => format!(" and {} more", rest.len()),
            };
            format!("it holds neither {SINGLE_FILE} nor {INDEX_FILE}, only {first}{more}")
        }
    };
    let is_adapter = names.iter().any(|name| name == "adapter_config.json");
    let is_shard = |name: &&str| name.starts_with("model-") && name.contains("-of-");
    let hint = if is_adapter {
        "this is the folder of an adapter: add it to its base with `cinch merge`, or train it further with --lora-from"
    } else if others.iter().any(is_shard) {
        "the index of these shards is missing: copy or download model.safetensors.index.json too"
    } else {
        "name the folder of a model in safetensors, or one file with its path"
    };
    WeightError::NoWeights {
        path: folder.to_owned(),
        problem,
        hint,
    }
}
