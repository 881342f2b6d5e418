//! What was trained, in the files that others read: adapters as peft writes them, whole models as
//! transformers does.

use std::path::{Path, PathBuf};

use cinch_config::{Config, LoraConfig};
use cinch_step::adapter_config;
use cinch_weights::{
    AdapterModule, AdapterParts, AdapterTensor, Companions, Dtype, Factor, PIECE_BYTES, Tensor,
    TensorSpec, TensorWriter, WeightError, WeightFiles, write_adapter, write_adapter_files,
    write_model_folder,
};

use crate::checkpoint::MODEL_FILE;
use crate::error::TrainError;

/// The folder of a run that holds the adapters of its newest checkpoint.
pub const ADAPTER_FOLDER: &str = "adapter";

const ENDINGS: [(&str, Factor); 2] = [(".lora_A.weight", Factor::A), (".lora_B.weight", Factor::B)];

/// What an export has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exported {
    /// An adapter in peft's format.
    Adapter { modules: usize, whole: usize },
    /// A model that transformers loads, and the files besides its weights that were copied.
    Model { copied: Vec<&'static str> },
}

/// What a checkpoint holds of adapters.
struct Parts<'a> {
    modules: Vec<AdapterModule>,
    whole: Vec<TensorSpec<'a>>,
    /// Of the factors: all have the same.
    dtype: Dtype,
}

impl<'a> Parts<'a> {
    fn of(files: &'a WeightFiles) -> Self {
        let (factors, whole): (Vec<&Tensor>, Vec<&Tensor>) = files
            .tensors()
            .iter()
            .partition(|tensor| is_factor(&tensor.name));
        Self {
            modules: modules(&factors),
            whole: whole.into_iter().map(Tensor::spec).collect(),
            dtype: factors.first().map_or(Dtype::F32, |tensor| tensor.dtype),
        }
    }

    fn all(&self) -> AdapterParts<'_> {
        AdapterParts {
            modules: &self.modules,
            whole: &self.whole,
            dtype: self.dtype,
        }
    }
}

/// Whether a tensor is one of the two of an adapter.
pub(crate) fn is_factor(name: &str) -> bool {
    ENDINGS.iter().any(|(ending, _)| name.ends_with(ending))
}

/// The modules of adapters, from the names and shapes of their tensors.
fn modules(tensors: &[&Tensor]) -> Vec<AdapterModule> {
    let mut modules: Vec<AdapterModule> = Vec::new();
    for tensor in tensors {
        let found = ENDINGS
            .iter()
            .find_map(|(ending, factor)| Some((tensor.name.strip_suffix(ending)?, *factor)));
        let (Some((name, factor)), [rows, width]) = (found, &tensor.shape[..]) else {
            continue;
        };
        let at = modules.iter().position(|module| module.name == name);
        let at = at.unwrap_or_else(|| {
            modules.push(AdapterModule {
                name: name.to_owned(),
                rank: 0,
                inputs: 0,
                outputs: 0,
            });
            modules.len() - 1
        });
        let module = &mut modules[at];
        match factor {
            Factor::A => (module.rank, module.inputs) = (*rows, *width),
            Factor::B => module.outputs = *rows,
        }
    }
    modules
}

/// Our name of a module's factor.
fn tensor_name(module: &AdapterModule, factor: Factor) -> String {
    let (ending, _) = ENDINGS[factor as usize];
    format!("{}{ending}", module.name)
}

/// Puts the adapters of a checkpoint, which was just saved, into the run's folder.
pub(crate) fn keep_adapters(
    run: &Path,
    config: &Config,
    lora: &LoraConfig,
    checkpoint: &Path,
) -> Result<PathBuf, TrainError> {
    let folder = run.join(ADAPTER_FOLDER);
    cinch_files::create_folder(&folder).map_err(WeightError::io("create", &folder))?;
    let files = WeightFiles::open(&checkpoint.join(MODEL_FILE))?;
    let adapter = adapter_config(config, lora);
    let mut contents = contents(&files);
    write_adapter_files(&folder, &adapter, &Parts::of(&files).all(), &mut contents)?;
    Ok(folder)
}

/// What gives the tensors of an adapter from a checkpoint.
fn contents(
    files: &WeightFiles,
) -> impl FnMut(AdapterTensor<'_>, &mut TensorWriter<'_>) -> Result<(), WeightError> {
    |tensor, out| match tensor {
        AdapterTensor::Factor(module, factor) => {
            copy_tensor(files, &tensor_name(module, factor), out)
        }
        AdapterTensor::Whole(name) => copy_tensor(files, name, out),
    }
}

/// Writes a checkpoint as a folder that others load; there is nothing at `to` yet.
pub fn export(checkpoint: &Path, config: &Config, to: &Path) -> Result<Exported, TrainError> {
    let files = WeightFiles::open(&checkpoint.join(MODEL_FILE))?;
    if let Some(lora) = &config.tuning.lora {
        let parts = Parts::of(&files);
        let adapter = adapter_config(config, lora);
        write_adapter(to, &adapter, &parts.all(), &mut contents(&files))?;
        return Ok(Exported::Adapter {
            modules: parts.modules.len(),
            whole: parts.whole.len(),
        });
    }
    let Some(folder) = &config.named.folder else {
        return Err(TrainError::NothingToExport {
            model: config.model_title(),
        });
    };
    let specs = files.tensors().iter().map(|tensor| tensor.spec()).collect();
    let mut contents =
        |spec: &TensorSpec<'_>, out: &mut TensorWriter<'_>| copy_tensor(&files, spec.name, out);
    let companions = Companions::of(folder);
    let written = write_model_folder(to, &[specs], companions, &mut contents)?;
    Ok(Exported::Model {
        copied: written.companions,
    })
}

/// A tensor's bytes, some rows at a time.
fn copy_tensor(
    files: &WeightFiles,
    name: &str,
    out: &mut TensorWriter<'_>,
) -> Result<(), WeightError> {
    let tensor = files.tensor(name)?;
    let rows = tensor.rows();
    let row_bytes = tensor.num_bytes() as usize / rows.max(1);
    let step = (PIECE_BYTES / row_bytes.max(1)).max(1);
    let mut bytes = Vec::new();
    let mut first = 0;
    while first < rows {
        let last = rows.min(first + step);
        bytes.resize((last - first) * row_bytes, 0);
        files.read(name, first..last, &mut bytes)?;
        out.put(&bytes)?;
        first = last;
    }
    Ok(())
}
