//! The tensors of an adapter: opened, checked against a base model, and written.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::config::AdapterConfig;
use super::{ADAPTER_CONFIG_FILE, ADAPTER_FILE};
use crate::companions::Vocabulary;
use crate::error::WeightError;
use crate::open::{Tensor, WeightFiles};
use crate::write::{TensorSpec, TensorWriter, new_folder, write_file};

/// What peft puts before the names of the model's own modules.
const PREFIX: &str = "base_model.model.";
/// Where peft keeps what a module was before it had an adapter.
const BASE_LAYER: &str = "base_layer.";
/// Where it keeps a module that is trained whole, and what that was before. With
/// `save_embedding_layers` it writes embeddings and head under these names besides.
const WRAPPED: [&str; 2] = [".modules_to_save.", ".original_module."];
/// Files of older versions of peft.
const PICKLE: &str = "adapter_model.bin";

/// The two factors of a module's adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Factor {
    /// [rank, inputs]
    A,
    /// [outputs, rank]
    B,
}

/// The sizes of a module's adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterModule {
    /// Of the base model, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    pub rank: usize,
    pub inputs: usize,
    pub outputs: usize,
}

impl AdapterModule {
    pub fn shape(&self, factor: Factor) -> [usize; 2] {
        match factor {
            Factor::A => [self.rank, self.inputs],
            Factor::B => [self.outputs, self.rank],
        }
    }

    /// The name of a factor in `adapter_model.safetensors`.
    pub fn tensor(&self, factor: Factor) -> String {
        format!("{PREFIX}{}.lora_{factor:?}.weight", self.name)
    }

    /// The base's tensor that it adapts.
    pub fn weight(&self) -> String {
        format!("{}.weight", self.name)
    }
}

/// A tensor that was trained whole and takes the place of the base's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// The name in the base.
    pub tensor: String,
    /// The name in the adapter's file.
    pub stored: String,
}

/// The head of a language model, and the embeddings that a model may have in its place.
const HEAD: &str = "lm_head.weight";
const TABLE: &str = "model.embed_tokens.weight";

/// An adapter's open files.
#[derive(Debug)]
pub struct Adapter {
    pub folder: PathBuf,
    pub config: AdapterConfig,
    pub files: WeightFiles,
    /// In the order of their names.
    pub modules: Vec<AdapterModule>,
    /// Modules and biases that were trained whole.
    pub replaced: Vec<Replaced>,
    /// The stored names of A and B of each module.
    stored: Vec<[String; 2]>,
}

impl Adapter {
    /// Opens the folder of an adapter and checks that its two files belong together.
    pub fn open(folder: &Path) -> Result<Adapter, WeightError> {
        let config_path = folder.join(ADAPTER_CONFIG_FILE);
        if !config_path.is_file() {
            return Err(WeightError::NoWeights {
                path: folder.to_owned(),
                problem: format!("it holds no {ADAPTER_CONFIG_FILE}"),
                hint: "name the folder that peft or cinch saved an adapter in",
            });
        }
        let config = AdapterConfig::read(&config_path)?;
        let path = folder.join(ADAPTER_FILE);
        let pickle = folder.join(PICKLE);
        let files = match !path.exists() && pickle.exists() {
            true => WeightFiles::open(&pickle),
            false => WeightFiles::open(&path),
        }?;
        let mut adapter = Adapter {
            folder: folder.to_owned(),
            config,
            files,
            modules: Vec::new(),
            replaced: Vec::new(),
            stored: Vec::new(),
        };
        adapter.sort_tensors()?;
        Ok(adapter)
    }

    /// Sorts the file's tensors into factors and replaced ones.
    fn sort_tensors(&mut self) -> Result<(), WeightError> {
        let mut factors: BTreeMap<String, [Option<&Tensor>; 2]> = BTreeMap::new();
        for tensor in self.files.tensors() {
            match self.part(tensor)? {
                Part::Factor(module, factor) => {
                    factors.entry(module).or_default()[factor as usize] = Some(tensor);
                }
                Part::Whole(name) => self.replaced.push(Replaced {
                    tensor: name,
                    stored: tensor.name.clone(),
                }),
                Part::Again => {}
            }
        }
        let mut modules = Vec::with_capacity(factors.len());
        let mut stored = Vec::with_capacity(factors.len());
        for (name, factors) in factors {
            let [Some(a), Some(b)] = factors else {
                let problem = format!("module `{name}` has only one of lora_A and lora_B");
                return Err(self.damaged(problem));
            };
            modules.push(self.module(name, a, b)?);
            stored.push([a.name.clone(), b.name.clone()]);
        }
        if modules.is_empty() && self.replaced.is_empty() {
            return Err(self.damaged("it holds no tensors".to_owned()));
        }
        (self.modules, self.stored) = (modules, stored);
        Ok(())
    }

    fn module(&self, name: String, a: &Tensor, b: &Tensor) -> Result<AdapterModule, WeightError> {
        let (&[rank, inputs], &[outputs, of_b]) = (a.shape.as_slice(), b.shape.as_slice()) else {
            let problem = format!(
                "module `{name}`: factors of shapes {:?} and {:?} are not matrices",
                a.shape, b.shape
            );
            return Err(self.damaged(problem));
        };
        let expected = self.config.rank_of(&name)?;
        if (rank, of_b) != (expected, expected) {
            return Err(self.damaged(format!(
                "module `{name}`: {ADAPTER_CONFIG_FILE} gives rank {expected}, and lora_A is \
                 {:?}, lora_B {:?}",
                a.shape, b.shape
            )));
        }
        Ok(AdapterModule {
            name,
            rank,
            inputs,
            outputs,
        })
    }

    fn part(&self, tensor: &Tensor) -> Result<Part, WeightError> {
        let refuse = |reason| WeightError::UnsupportedAdapter {
            path: self.files.path().to_owned(),
            key: tensor.name.clone(),
            value: format!("{:?}", tensor.shape),
            reason,
        };
        let Some(name) = tensor.name.strip_prefix(PREFIX) else {
            return Err(refuse("names of peft begin with base_model.model."));
        };
        for (mark, factor) in [(".lora_A.", Factor::A), (".lora_B.", Factor::B)] {
            // `default` is the adapter's name in files that were not saved by `save_pretrained`.
            match name.split_once(mark) {
                Some((module, "weight" | "default.weight")) => {
                    return Ok(Part::Factor(module.to_owned(), factor));
                }
                Some(_) => return Err(refuse("of a factor only the weight is read")),
                None => {}
            }
        }
        if name.contains("lora_embedding_") {
            return Err(refuse("adapters of embeddings are not read"));
        }
        if name.contains("lora_") {
            return Err(refuse("only lora_A and lora_B are read"));
        }
        let again = WRAPPED.iter().any(|mark| {
            let plain = name.replacen(mark, ".", 1);
            plain != name && self.files.get(&format!("{PREFIX}{plain}")).is_some()
        });
        match again {
            true => Ok(Part::Again),
            false => Ok(Part::Whole(name.replace(BASE_LAYER, ""))),
        }
    }

    /// Reads a factor of a module as f32.
    pub fn read_f32(
        &self,
        module: usize,
        factor: Factor,
        into: &mut [f32],
    ) -> Result<(), WeightError> {
        let name = &self.stored[module][factor as usize];
        let rows = self.files.tensor(name)?.rows();
        self.files.read_f32(name, 0..rows, into)
    }

    /// Reads rows of a factor as the bytes of f32 numbers.
    pub fn read_rows(
        &self,
        module: usize,
        factor: Factor,
        rows: Range<usize>,
        wanted: Dtype,
        into: &mut [u8],
    ) -> Result<(), WeightError> {
        let name = &self.stored[module][factor as usize];
        self.files.read_as(name, rows, wanted, into)
    }

    /// Gives a base that it belongs to a head of its own, with the numbers of the embeddings, where
    /// it changes only one of the two or each by itself. Tells whether they were one before: in the
    /// base's files, or by its `config.json`, which may say so of files that hold both.
    pub fn untie(&self, base: &mut WeightFiles) -> bool {
        let changed = |replaced: &Replaced| [HEAD, TABLE].contains(&replaced.tensor.as_str());
        if base.get(TABLE).is_none() || !self.replaced.iter().any(changed) {
            return false;
        }
        let is_one = base.get(HEAD).is_none();
        base.lend(TABLE, HEAD);
        is_one || Vocabulary::of(base.folder()).is_tied == Some(true)
    }

    /// Checks that this is an adapter of that base: every module is there with its sizes, and so
    /// is every replaced tensor. Gives notes on what the names say.
    pub fn check_base(&self, base: &WeightFiles) -> Result<Vec<String>, WeightError> {
        let check = |name: &str, shape: &[usize]| {
            let problem = match base.get(name) {
                Some(tensor) if tensor.shape == shape => return Ok(()),
                Some(tensor)
                    if [HEAD, TABLE].contains(&name) && more_rows(shape, &tensor.shape) =>
                {
                    format!(
                        "it expects `{name}` of {shape:?}, and the base has {:?}, which are fewer \
                         tokens: its base was saved after `resize_token_embeddings({})`",
                        tensor.shape, shape[0]
                    )
                }
                Some(tensor) => format!(
                    "it expects `{name}` of {shape:?}, and the base has {:?}",
                    tensor.shape
                ),
                None => format!("it expects `{name}` of {shape:?}, which the base does not have"),
            };
            Err(WeightError::AnotherBase {
                adapter: self.folder.clone(),
                base: base.path().to_owned(),
                problem,
                named: self.config.base_model.clone(),
            })
        };
        for module in &self.modules {
            check(&module.weight(), &[module.outputs, module.inputs])?;
        }
        for replaced in &self.replaced {
            let shape = &self.files.tensor(&replaced.stored)?.shape;
            check(&replaced.tensor, shape)?;
        }
        self.refuse_a_table_that_is_the_head(base)?;
        Ok(self.note_on_base(base.folder()).into_iter().collect())
    }

    /// Refuses what would reach the head besides: in a language model that names its embeddings
    /// otherwise than [`TABLE`], and whose files have no second tensor of their shape, they are the
    /// head too, of which peft leaves the original.
    fn refuse_a_table_that_is_the_head(&self, base: &WeightFiles) -> Result<(), WeightError> {
        let vocabulary = Vocabulary::of(base.folder());
        let task = self.config.task_type.as_deref();
        let has_head = matches!(task, None | Some("CAUSAL_LM" | "SEQ_2_SEQ_LM"));
        if !has_head || vocabulary.is_tied == Some(false) {
            return Ok(());
        }
        for replaced in &self.replaced {
            let tensor = self.files.tensor(&replaced.stored)?;
            let is_table = tensor.shape.len() == 2 && Some(tensor.rows()) == vocabulary.size;
            let alike = |other: &&Tensor| other.shape == tensor.shape;
            if is_table && base.tensors().iter().filter(alike).count() < 2 {
                return Err(WeightError::UnsupportedAdapter {
                    path: self.files.path().to_owned(),
                    key: tensor.name.clone(),
                    value: format!("{:?}", tensor.shape),
                    reason: "the base has these embeddings as its head too, and the adapter leaves \
                             the head as it was",
                });
            }
        }
        Ok(())
    }

    /// What is to be said where the adapter names another base than the one that is used. Sizes
    /// are the same in all models of one shape, so that only the name tells them apart.
    fn note_on_base(&self, base: &Path) -> Option<String> {
        let named = self.config.base_model.as_deref()?;
        let used = hub_id(base);
        let last = |name: &str| {
            name.trim_end_matches('/')
                .rsplit('/')
                .next()
                .map(str::to_lowercase)
        };
        (last(named) != last(&used)).then(|| {
            format!(
                "{ADAPTER_CONFIG_FILE} names `{named}` as its base; the one used is `{used}`, which \
                 has the same sizes"
            )
        })
    }

    fn damaged(&self, problem: String) -> WeightError {
        WeightError::Damaged {
            path: self.files.path().to_owned(),
            problem,
        }
    }
}

/// Whether one shape is the other with more rows.
fn more_rows(one: &[usize], other: &[usize]) -> bool {
    let (rows, others) = (one.first(), other.first());
    one.len() == other.len() && one.get(1..) == other.get(1..) && rows > others
}

enum Part {
    Factor(String, Factor),
    Whole(String),
    /// What another tensor of the file says, or what that one takes the place of.
    Again,
}

/// The id of a folder in the hub's cache (`models--owner--name/snapshots/…`), else its path.
fn hub_id(folder: &Path) -> String {
    let cached = folder
        .components()
        .filter_map(|part| part.as_os_str().to_str()?.strip_prefix("models--"))
        .next_back();
    match cached {
        Some(id) => id.replacen("--", "/", 1),
        None => folder
            .canonicalize()
            .unwrap_or_else(|_| folder.to_owned())
            .display()
            .to_string(),
    }
}

/// What an adapter's file holds.
pub struct AdapterParts<'a> {
    pub modules: &'a [AdapterModule],
    /// Tensors that were trained whole, by the base's names.
    pub whole: &'a [TensorSpec<'a>],
    /// Of the factors.
    pub dtype: Dtype,
}

/// A tensor that is to be written.
#[derive(Clone, Copy, Debug)]
pub enum AdapterTensor<'a> {
    Factor(&'a AdapterModule, Factor),
    /// By the base's name.
    Whole(&'a str),
}

/// What gives the bytes of each tensor, one after the other.
pub type AdapterContents<'a> =
    dyn FnMut(AdapterTensor<'_>, &mut TensorWriter<'_>) -> Result<(), WeightError> + 'a;

/// Writes the folder of an adapter, whole or not at all; there is nothing at `folder` yet but an
/// empty folder at most.
pub fn write_adapter(
    folder: &Path,
    config: &AdapterConfig,
    parts: &AdapterParts<'_>,
    contents: &mut AdapterContents<'_>,
) -> Result<(), WeightError> {
    let new = new_folder(folder)?;
    write_adapter_files(new.path(), config, parts, contents)?;
    new.put().map_err(WeightError::io("create", folder))
}

/// Writes the two files of an adapter into a folder that is there, each of them whole.
pub fn write_adapter_files(
    folder: &Path,
    config: &AdapterConfig,
    parts: &AdapterParts<'_>,
    contents: &mut AdapterContents<'_>,
) -> Result<(), WeightError> {
    let mut places = BTreeMap::new();
    for module in parts.modules {
        for factor in [Factor::A, Factor::B] {
            let tensor = AdapterTensor::Factor(module, factor);
            let shape = module.shape(factor).to_vec();
            places.insert(module.tensor(factor), (tensor, parts.dtype, shape));
        }
    }
    for spec in parts.whole {
        let tensor = AdapterTensor::Whole(spec.name);
        let place = (tensor, spec.dtype, spec.shape.to_vec());
        places.insert(format!("{PREFIX}{}", spec.name), place);
    }
    let specs: Vec<TensorSpec<'_>> = places
        .iter()
        .map(|(name, (_, dtype, shape))| TensorSpec {
            name,
            dtype: *dtype,
            shape,
        })
        .collect();
    let mut by_place =
        |spec: &TensorSpec<'_>, out: &mut TensorWriter<'_>| contents(places[spec.name].0, out);
    write_file(&folder.join(ADAPTER_FILE), &specs, &mut by_place)?;
    let path = folder.join(ADAPTER_CONFIG_FILE);
    let text = format!("{:#}\n", config.to_json());
    cinch_files::replace(&path, text.as_bytes()).map_err(WeightError::io("write", &path))
}
