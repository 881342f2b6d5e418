//! Weights from a model's files into a session's arena: read where they go, in the type in which
//! they are kept there, or quantised on the way, so that a model never exists a second time.

mod numbers;

use std::borrow::Cow;
use std::collections::HashSet;
use std::convert::Infallible;
use std::path::{Path, PathBuf};

use cinch_architecture::{Architecture, Model};
use cinch_config::{Config, INITIAL_WEIGHTS, LoraConfig};
use cinch_data::Progress;
use cinch_engine::Engine;
use cinch_graph::{DType, Graph, Parameter, Storage};
use cinch_step::{StepPlan, adapter_shape};
use cinch_weights::{ADAPTER_CONFIG_FILE, Adapter, Bias, Dtype, Factor, WeightError, WeightFiles};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::TrainError;
use crate::export::is_factor;
use crate::kept;
use crate::session::{placement, saved_type};

pub(crate) use numbers::{Codes, bytes_in, numbers, write_numbers};

/// Where a run's first weights come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirstWeights {
    /// Made from the seed.
    Initial,
    /// A folder or a file of a model.
    Files(PathBuf),
}

impl FirstWeights {
    /// The files of a model that was named by its folder or by a hub id, where they are here.
    /// Adapters are put on weights that were trained, so there initial ones have to be asked for.
    pub fn of(config: &Config) -> Result<Self, TrainError> {
        let (tuned, asked) = (config.tuning.lora.is_some(), config.weights.as_deref());
        match asked {
            Some(INITIAL_WEIGHTS) => return Ok(Self::Initial),
            Some(path) => return Ok(Self::Files(path.into())),
            None => {}
        }
        let here = config.named.folder.as_deref();
        match (here.filter(|folder| holds_weights(folder)), tuned) {
            (Some(folder), _) => Ok(Self::Files(folder.to_owned())),
            (None, false) => Ok(Self::Initial),
            (None, true) => Err(TrainError::NoWeights {
                model: config.model_title(),
            }),
        }
    }
}

/// What to say where the `config.json` beside weights that were named by themselves describes
/// another model than the one they go into. Shapes do not tell how many heads a product has, what
/// is added to a variance, or how positions turn.
pub fn described_otherwise(config: &Config) -> Option<String> {
    let path = Path::new(config.weights.as_deref()?);
    let folder = match path.is_dir() {
        true => path,
        false => path.parent()?,
    };
    let file = folder.join("config.json");
    let text = cinch_files::read_regular_text(&file, cinch_files::MAX_READ).ok()?;
    let origin = cinch_files::shown(&file).to_string();
    let described = serde_json::from_str(&text).map_err(|error| error.to_string());
    let described = described.and_then(|fields: Value| {
        Model::of_config(&fields, "", &origin).map_err(|error| error.to_string())
    });
    let described = match described {
        Ok(described) => described.architecture,
        Err(problem) => {
            return Some(format!(
                "{origin} was not compared with the model: {problem}"
            ));
        }
    };
    let model = match &config.model {
        Architecture::Naics(shape) => Architecture::Bert(shape.encoder.clone()),
        other => other.clone(),
    };
    let fields = |model: &Architecture| serde_json::to_value(model).unwrap_or_default();
    let (theirs, ours) = (fields(&described), fields(&model));
    let differing = theirs.as_object()?.iter().filter(|(key, value)| {
        // These are no part of what weights compute once they are trained.
        let is_of_training =
            key.ends_with("dropout") || ["initial_std", "tied"].contains(&key.as_str());
        !is_of_training && ours.get(key) != Some(value)
    });
    let listed: Vec<String> = differing
        .map(|(key, value)| {
            let ours = ours.get(key).unwrap_or(&Value::Null);
            format!("{key} {value} (here {ours})")
        })
        .collect();
    (!listed.is_empty()).then(|| {
        format!(
            "{origin} describes another model than these weights go into: {}",
            listed.join(", ")
        )
    })
}

/// Whether a folder holds weights of any kind, also such as cannot be read: what is wrong with
/// them is told when they are opened, and none are made from the seed in their place.
fn holds_weights(folder: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return false;
    };
    let mut names = entries.flatten().map(|entry| entry.file_name());
    names.any(|name| {
        let name = name.to_string_lossy();
        let is_pickle = name.starts_with("pytorch_model") && name.ends_with(".bin");
        let is_safe = name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
        is_pickle || is_safe && !name.starts_with("adapter")
    })
}

/// A model's files. Where adapters leave it with embeddings and a head of their own, and it has one
/// tensor for both, that is there under both names.
pub fn open_weights(config: &Config, path: &Path) -> Result<WeightFiles, TrainError> {
    let mut files = WeightFiles::open(path)?;
    let adapters = adapter_shape(config)?;
    let is_untied = adapters.is_some_and(|adapters| adapters.unties_the_head());
    if is_untied && config.model.is_tied() {
        files.lend(EMBEDDINGS, HEAD);
    }
    Ok(files)
}

/// What tells the parameters that no model's files have: beside frozen weights, those that are
/// trained, but for modules that are trained whole beside adapters.
pub(crate) fn begins_anew(
    step: &StepPlan,
) -> Result<impl Fn(&Parameter) -> bool + use<>, TrainError> {
    let mut parameters = step.training.parameters.iter();
    let has_frozen = parameters.any(|parameter| !parameter.is_trained());
    let has_adapters = adapter_shape(&step.config)?.is_some();
    Ok(move |parameter: &Parameter| {
        let is_new = !has_adapters || parameter.parts.iter().any(|part| is_factor(&part.name));
        has_frozen && parameter.is_trained() && is_new
    })
}

/// Fills the parameters that `which` picks from a model's files.
pub(crate) fn load(
    step: &StepPlan,
    (engine, rank): (&mut Engine, usize),
    files: &WeightFiles,
    which: impl Fn(&Parameter) -> bool,
    progress: &dyn Progress,
) -> Result<(), TrainError> {
    let graph: &Graph = &step.training;
    let chosen = graph.parameters.iter().filter(|p| which(p));
    let chosen: Vec<&Parameter> = chosen.filter(|p| !lacks_pooler(files, p)).collect();
    let mut total = 0;
    for parameter in &chosen {
        total += files_bytes(parameter, files)?;
    }
    progress.begin("loading weights", total);
    let outcome = chosen.into_iter().try_for_each(|parameter| {
        fill(step, (engine, rank), parameter, files)?;
        for part in &parameter.parts {
            progress.advance(files.tensor(&name_in(files, &part.name))?.num_bytes());
        }
        match progress.is_interrupted() {
            true => Err(TrainError::Data(cinch_data::DataError::Interrupted)),
            false => Ok(()),
        }
    });
    progress.end();
    outcome
}

/// Bytes of a parameter's tensors in the files, which have to have its shape.
fn files_bytes(parameter: &Parameter, files: &WeightFiles) -> Result<u64, TrainError> {
    let mut bytes = 0;
    for part in &parameter.parts {
        let tensor = files.tensor(&name_in(files, &part.name))?;
        let expected = kept::file_shape(parameter, part);
        if tensor.shape != expected {
            return Err(TrainError::WeightShape {
                path: files.file_of(tensor).to_owned(),
                name: part.name.clone(),
                found: tensor.shape.clone(),
                expected,
            });
        }
        bytes += tensor.num_bytes();
    }
    Ok(bytes)
}

/// What tells the weights that are not trained from others: of each tensor the first and the last
/// row, in fp32, so that the type in which a file keeps them is no matter.
pub(crate) fn frozen_fingerprint(
    graph: &Graph,
    files: &WeightFiles,
) -> Result<Option<String>, TrainError> {
    let mut hash = Sha256::new();
    let frozen = graph.parameters.iter().filter(|p| !p.is_trained());
    let mut frozen = frozen.filter(|p| !lacks_pooler(files, p));
    let mut has_any = false;
    frozen.try_for_each(|parameter| {
        has_any = true;
        for part in &parameter.parts {
            let name = name_in(files, &part.name);
            let tensor = files.tensor(&name)?;
            let (rows, mut row) = (tensor.rows(), vec![0.0; tensor.row_elements()]);
            hash.update(part.name.as_bytes());
            for number in [0, rows.saturating_sub(1)] {
                files.read_f32(&name, number..rows.min(number + 1), &mut row)?;
                row.iter()
                    .for_each(|value| hash.update(value.to_le_bytes()));
            }
        }
        Ok::<(), TrainError>(())
    })?;
    Ok(has_any.then(|| format!("{:x}", hash.finalize())))
}

/// Refuses a head in the files of a model whose embeddings are its head: transformers reads such
/// files as a model with two tables, and what was trained in one of them would be lost here. A
/// head that holds the same numbers is left out.
pub(crate) fn check_tied_head(is_tied: bool, files: &WeightFiles) -> Result<(), TrainError> {
    let (Some(table), Some(head)) = (files.get(EMBEDDINGS), files.get(HEAD)) else {
        return Ok(());
    };
    if !is_tied {
        return Ok(());
    }
    let other = || TrainError::OtherHead {
        path: files.path().to_owned(),
    };
    if table.shape != head.shape {
        return Err(other());
    }
    let width = table.row_elements().max(1);
    let step = (COMPARED_ELEMENTS / width).max(1);
    let (mut one, mut two) = (Vec::new(), Vec::new());
    for start in (0..table.rows()).step_by(step) {
        let rows = start..(start + step).min(table.rows());
        for (name, into) in [(EMBEDDINGS, &mut one), (HEAD, &mut two)] {
            into.resize(rows.len() * width, 0.0);
            files.read_f32(name, rows.clone(), into)?;
        }
        if one != two {
            return Err(other());
        }
    }
    Ok(())
}

/// Whether a graph's embeddings are its head.
pub(crate) fn has_tied_head(graph: &Graph) -> bool {
    let mut parts = graph.parameters.iter().flat_map(|p| &p.parts);
    parts.all(|part| part.name != HEAD)
}

const EMBEDDINGS: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// How much of the two is compared at once.
const COMPARED_ELEMENTS: usize = 1 << 20;

/// What to say of tensors that a language model's files hold and it has no place for. transformers
/// leaves out tables of rotary positions, masks, and a head in whose place the embeddings are.
pub(crate) fn unread(graph: &Graph, files: &WeightFiles) -> Option<String> {
    let parts = graph.parameters.iter().flat_map(|p| &p.parts);
    let read: HashSet<&str> = parts.map(|part| part.name.as_str()).collect();
    let buffers = [".inv_freq", ".attn.bias", ".attn.masked_bias"];
    let is_left_out = |name: &str| name == HEAD || buffers.iter().any(|end| name.ends_with(end));
    let names = files.tensors().iter().map(|tensor| tensor.name.as_str());
    let others: Vec<&str> = names
        .filter(|name| !read.contains(name) && !is_left_out(name))
        .collect();
    let first = others.first()?;
    let path = cinch_files::shown(files.path());
    Some(match others.len() {
        1 => format!("{path}: the model has no place for the tensor `{first}`, which is not read"),
        count => format!(
            "{path}: the model has no place for {count} tensors, such as `{first}`, which are not read"
        ),
    })
}

/// Looks whether a step's first weights can be loaded from files: each tensor is there in its
/// shape, and its first and last row can be read. Returns their bytes.
pub fn test_load(step: &StepPlan, files: &WeightFiles) -> Result<u64, TrainError> {
    check_tied_head(has_tied_head(&step.training), files)?;
    let parameters = &step.training.parameters;
    let begins_anew = begins_anew(step)?;
    let needed =
        |parameter: &&Parameter| !(begins_anew(parameter) || lacks_pooler(files, parameter));
    let mut total = 0;
    for parameter in parameters.iter().filter(needed) {
        total += files_bytes(parameter, files)?;
        for part in &parameter.parts {
            let name = name_in(files, &part.name);
            let tensor = files.tensor(&name)?;
            let (rows, mut row) = (tensor.rows(), vec![0.0; tensor.row_elements()]);
            for number in [0, rows.saturating_sub(1)] {
                files.read_f32(&name, number..rows.min(number + 1), &mut row)?;
            }
        }
    }
    Ok(total)
}

/// Fills all trained parameters from an adapter's files, whose modules and rank must be theirs.
pub(crate) fn load_adapter(
    step: &StepPlan,
    (engine, rank): (&mut Engine, usize),
    adapter: &Adapter,
) -> Result<(), TrainError> {
    let graph: &Graph = &step.training;
    let trained = || graph.parameters.iter().filter(|p| p.is_trained());
    if adapter.config.bias != Bias::None {
        return Err(TrainError::Weights(WeightError::UnsupportedAdapter {
            path: adapter.folder.join(ADAPTER_CONFIG_FILE),
            key: "bias".to_owned(),
            value: adapter.config.bias.name().to_owned(),
            reason: "biases are not trained beside adapters here",
        }));
    }
    let is_here = |name: &str| trained().any(|p| p.parts.iter().any(|part| part.name == name));
    let mut replaced = adapter.replaced.iter();
    if let Some(other) = replaced.find(|replaced| !is_here(&replaced.tensor)) {
        return Err(TrainError::OtherAdapter {
            folder: adapter.folder.clone(),
            problem: format!(
                "it holds `{}`, which is not trained whole in this run (lora.modules_to_save)",
                other.tensor
            ),
        });
    }
    let num_parts: usize = trained().map(|parameter| parameter.parts.len()).sum();
    let num_saved = 2 * adapter.modules.len() + adapter.replaced.len();
    if num_parts != num_saved {
        return Err(TrainError::OtherAdapter {
            folder: adapter.folder.clone(),
            problem: format!("it has {num_saved} tensors, the model's adapters {num_parts}"),
        });
    }
    let scale = step.config.tuning.lora.as_ref().map(LoraConfig::scale);
    for module in &adapter.modules {
        let saved = adapter.config.scale_of(&module.name)?;
        let own = scale.unwrap_or(saved);
        if (own - saved).abs() > 1e-6 * own {
            return Err(TrainError::OtherAdapter {
                folder: adapter.folder.clone(),
                problem: format!(
                    "what it adds to `{}` is scaled by {saved}, and by {own} in this run",
                    module.name
                ),
            });
        }
    }
    for parameter in trained() {
        clear_cut(step, engine, parameter)?;
        for kept in kept::weights(graph, &step.plan, parameter, rank) {
            let size = kept.dtype.size() as usize;
            if !is_factor(kept.name) {
                let stored = find_whole(adapter, kept.name, &kept.shape)?;
                let wanted = saved_type(kept.dtype);
                kept.fill(engine, |elements, bytes| {
                    adapter
                        .files
                        .read_elements_as(stored, elements, wanted, bytes)
                })??;
                continue;
            }
            let (module, factor) = find_factor(adapter, kept.name, &kept.shape)?;
            // An adapter is read in rows, and is small.
            let mut all = vec![0; kept.num_elements() * size];
            let rows = kept.shape.first().copied().unwrap_or(1);
            adapter.read_rows(module, factor, 0..rows, saved_type(kept.dtype), &mut all)?;
            let Ok(()) = kept.fill(engine, |elements, bytes| {
                bytes.copy_from_slice(&all[elements.start * size..elements.end * size]);
                Ok::<(), Infallible>(())
            })?;
        }
    }
    Ok(())
}

/// The name in an adapter's file of a tensor that was trained whole.
fn find_whole<'a>(
    adapter: &'a Adapter,
    name: &str,
    shape: &[usize],
) -> Result<&'a str, TrainError> {
    let other = |problem: String| TrainError::OtherAdapter {
        folder: adapter.folder.clone(),
        problem,
    };
    let mut replaced = adapter.replaced.iter();
    let Some(found) = replaced.find(|replaced| replaced.tensor == name) else {
        return Err(other(format!(
            "it does not hold `{name}`, which this run trains whole (lora.modules_to_save)"
        )));
    };
    let saved = &adapter.files.tensor(&found.stored)?.shape;
    match saved == shape {
        true => Ok(&found.stored),
        false => Err(other(format!(
            "`{name}` is {saved:?}, the model's is {shape:?}"
        ))),
    }
}

/// `<module>.lora_A.weight` or `<module>.lora_B.weight` of an adapter.
fn find_factor(
    adapter: &Adapter,
    name: &str,
    shape: &[usize],
) -> Result<(usize, Factor), TrainError> {
    let other = |problem: String| TrainError::OtherAdapter {
        folder: adapter.folder.clone(),
        problem,
    };
    let factors = [(".lora_A.weight", Factor::A), (".lora_B.weight", Factor::B)];
    let found = factors
        .into_iter()
        .find_map(|(ending, factor)| Some((name.strip_suffix(ending)?, factor)));
    let module = found.and_then(|(module, factor)| {
        let mut modules = adapter.modules.iter();
        Some((modules.position(|saved| saved.name == module)?, factor))
    });
    let Some((module, factor)) = module else {
        return Err(other(format!("it has no tensor `{name}`")));
    };
    let found = adapter.modules[module].shape(factor);
    if found != shape {
        return Err(other(format!(
            "`{name}` is {found:?}, the model's is {shape:?}"
        )));
    }
    Ok((module, factor))
}

/// Where only a part is kept, what lies beyond the end of the whole stays zero.
fn clear_cut(
    step: &StepPlan,
    engine: &mut Engine,
    parameter: &Parameter,
) -> Result<(), TrainError> {
    if parameter.shard.is_some() {
        kept::clear(engine, placement(&step.plan, parameter.master))?;
    }
    Ok(())
}

fn fill(
    step: &StepPlan,
    (engine, rank): (&mut Engine, usize),
    parameter: &Parameter,
    files: &WeightFiles,
) -> Result<(), TrainError> {
    if let Storage::Quantised(quantisation) = parameter.storage {
        // A quantised parameter is one tensor of the files: its codes have scales of their own.
        for part in &parameter.parts {
            let codes = Codes::read(quantisation, &parameter.shape, files, &part.name)?;
            codes.write(step, (engine, rank), parameter)?;
        }
        return Ok(());
    }
    let wanted = match step.training.ty(parameter.master).dtype {
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        _ => Dtype::F32,
    };
    clear_cut(step, engine, parameter)?;
    for kept in kept::weights(&step.training, &step.plan, parameter, rank) {
        let name = name_in(files, kept.name);
        kept.fill(engine, |elements, bytes| {
            files.read_elements_as(&name, elements, wanted, bytes)
        })??;
    }
    Ok(())
}

/// The name that files have for a tensor. An encoder among others is saved by itself, so there its
/// tensors lack the encoder's name, and may have that of the class that it was saved from. Norms
/// that TensorFlow trained have names of their own, which transformers reads as well.
pub(crate) fn name_in<'a>(files: &WeightFiles, name: &'a str) -> Cow<'a, str> {
    if files.get(name).is_some() {
        return Cow::Borrowed(name);
    }
    let own = name
        .strip_prefix(ENCODERS)
        .and_then(|rest| rest.split_once('.'));
    let own = own.map_or(name, |(_, own)| own);
    let of_norm = OLD_NORMS.iter().find_map(|(now, before)| {
        let module = own.strip_suffix(now)?;
        Some(format!("{module}{before}"))
    });
    let names = [Some(own), of_norm.as_deref()];
    for own in names.into_iter().flatten() {
        let of_class = format!("{ENCODER_CLASS}{own}");
        if let Some(found) = [&of_class, own]
            .into_iter()
            .find(|n| files.get(n).is_some())
        {
            return Cow::Owned(found.to_owned());
        }
    }
    Cow::Borrowed(own)
}

/// Whether files have no pooler for an encoder among others, as those that were saved with another
/// head: nothing reads it there.
fn lacks_pooler(files: &WeightFiles, parameter: &Parameter) -> bool {
    let mut names = parameter.parts.iter().map(|part| part.name.as_str());
    names.all(|name| is_missing_pooler(files, name))
}

pub(crate) fn is_missing_pooler(files: &WeightFiles, name: &str) -> bool {
    name.starts_with(ENCODERS)
        && name.contains(POOLER)
        && files.get(&name_in(files, name)).is_none()
}

/// What the names of encoders begin with, of which a model has several.
const ENCODERS: &str = "encoders.";
const POOLER: &str = ".pooler.";
/// What a model with a head has before the names of its encoder.
const ENCODER_CLASS: &str = "bert.";
const OLD_NORMS: [(&str, &str); 2] = [
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of two tables of two columns each.
    fn tables(folder: &Path, table: [f32; 4], head: &[f32]) -> WeightFiles {
        let rows = head.len() / 2;
        let (from, to) = (16, 16 + 4 * head.len());
        let header = format!(
            "{{\"{EMBEDDINGS}\":{{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}},\
             \"{HEAD}\":{{\"dtype\":\"F32\",\"shape\":[{rows},2],\"data_offsets\":[{from},{to}]}}}}"
        );
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(
            table
                .iter()
                .chain(head)
                .flat_map(|value| value.to_le_bytes()),
        );
        let path = folder.join("model.safetensors");
        std::fs::write(&path, bytes).unwrap();
        WeightFiles::open(&path).unwrap()
    }

    #[test]
    fn a_head_of_its_own_is_refused_where_the_embeddings_are_the_head() {
        let folder = tempfile::tempdir().unwrap();
        let table = [1.0, 2.0, 3.0, 4.0];
        let same = tables(folder.path(), table, &table);
        assert!(check_tied_head(true, &same).is_ok());
        let last = tables(folder.path(), table, &[1.0, 2.0, 3.0, 4.5]);
        let error = check_tied_head(true, &last).unwrap_err().to_string();
        assert!(
            error.contains("tie_word_embeddings") && error.contains("hint:"),
            "{error}"
        );
        assert!(check_tied_head(false, &last).is_ok());
        let longer = tables(folder.path(), table, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert!(check_tied_head(true, &longer).is_err());
    }
}
