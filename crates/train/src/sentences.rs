//! How a model's folder says that a sentence becomes a vector: the files that sentence-transformers
//! keeps beside those of the encoder.
//!
//! `modules.json` lists what follows the encoder. Anything but the average of all tokens or the
//! first one, and a length of 1, is refused by name: the numbers would be those of another model.

use std::path::{Component, Path, PathBuf};

use cinch_architecture::Bert;
use cinch_model::Pooling;
use serde_json::{Map, Value};

use crate::error::TrainError;

const MODULES: &str = "modules.json";
const SETTINGS: &str = "config_sentence_transformers.json";
/// What the encoder reads of a sentence.
const READING: &str = "sentence_bert_config.json";
const TOKENIZER: &str = "tokenizer_config.json";
/// In the folder of a module.
const MODULE: &str = "config.json";

/// One of these is true in older files.
const POOLING_FLAGS: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ("pooling_mode_lasttoken", "lasttoken"),
];

/// How a sentence becomes a vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentenceForm {
    pub pooling: Pooling,
    /// Whether vectors have the length 1.
    pub normalised: bool,
    /// The most tokens that are read of a sentence.
    pub longest: usize,
    pub lower_case: bool,
    /// What is put before every sentence.
    pub prompt: String,
    /// Whether the folder says so; else it is the usual.
    pub is_said: bool,
}

impl SentenceForm {
    /// What the files of a folder say, and averages of length 1 where they say nothing.
    pub fn of(folder: &Path, encoder: &Bert) -> Result<Self, TrainError> {
        let reading = JsonFile::read(folder.join(READING))?;
        let lower_case = reading.as_ref().map(|file| file.flag("do_lower_case"));
        let usual = Self {
            pooling: Pooling::Mean,
            normalised: true,
            longest: longest(folder, reading.as_ref(), encoder)?,
            lower_case: lower_case.transpose()?.unwrap_or(false),
            prompt: String::new(),
            is_said: false,
        };
        let Some(modules) = JsonFile::read(folder.join(MODULES))? else {
            return Ok(usual);
        };
        let settings = JsonFile::read(folder.join(SETTINGS))?;
        let prompt = settings.as_ref().map(prompt).transpose()?;
        let prompt = prompt.unwrap_or_default();
        let (pooling, normalised) = after_encoder(folder, &modules, !prompt.is_empty())?;
        Ok(Self {
            pooling,
            normalised,
            prompt,
            is_said: true,
            ..usual
        })
    }

    /// A sentence as sentence-transformers gives it to the encoder's tokenizer: without white space
    /// at its ends, of which some tokenizers make tokens.
    pub fn prepared(&self, sentence: &str) -> String {
        let whole = format!("{}{sentence}", self.prompt);
        match self.lower_case {
            true => whole.trim().to_lowercase(),
            false => whole.trim().to_owned(),
        }
    }
}

/// The most tokens of a sentence: what the file says, or the tokenizer's, and no more than the
/// encoder has positions for.
fn longest(folder: &Path, reading: Option<&JsonFile>, encoder: &Bert) -> Result<usize, TrainError> {
    let said = reading
        .map(|file| file.length("max_seq_length"))
        .transpose()?;
    let most = match said.flatten() {
        Some(said) => Some(said),
        None => match JsonFile::read(folder.join(TOKENIZER))? {
            Some(file) => file.length("model_max_length")?,
            None => None,
        },
    };
    Ok(most.unwrap_or(u64::MAX).min(encoder.positions) as usize)
}

/// What is put before every sentence where nobody asks for another prompt.
fn prompt(settings: &JsonFile) -> Result<String, TrainError> {
    const NAME: &str = "default_prompt_name";
    let name = match settings.get(NAME) {
        None => return Ok(String::new()),
        Some(Value::String(name)) => name,
        Some(other) => return Err(settings.wants(NAME, other, "a name")),
    };
    let prompts = settings
        .get("prompts")
        .and_then(|prompts| prompts.get(name));
    match prompts {
        Some(Value::String(prompt)) => Ok(prompt.clone()),
        Some(Value::Null) => Ok(String::new()),
        _ => Err(settings.problem(format!(
            "`{NAME}` is {name:?}, which `prompts` does not have"
        ))),
    }
}

/// The modules after the encoder: how tokens become a vector, and whether it has the length 1.
fn after_encoder(
    folder: &Path,
    modules: &JsonFile,
    has_prompt: bool,
) -> Result<(Pooling, bool), TrainError> {
    let Value::Array(list) = &modules.value else {
        return Err(modules.problem("it is no list of modules".to_owned()));
    };
    let mut pooling = None;
    let mut normalised = false;
    for (index, module) in list.iter().enumerate() {
        let text = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or_default();
        let (kind, path) = (text("type"), Path::new(text("path")));
        let name = kind.rsplit('.').next().unwrap_or_default();
        match name {
            "Transformer" if index == 0 && path.as_os_str().is_empty() => {}
            "Pooling" if index > 0 && pooling.is_none() => {
                let is_inside = path.components().all(|c| matches!(c, Component::Normal(_)));
                if !is_inside {
                    let path = cinch_files::shown(path);
                    let problem = format!("the path {path} of a module leads out of the folder");
                    return Err(modules.problem(problem));
                }
                pooling = Some(pooling_of(&folder.join(path).join(MODULE), has_prompt)?);
            }
            "Normalize" if pooling.is_some() => normalised = true,
            _ => {
                let problem =
                    format!("module {index} is `{kind}`, which cinch does not compute there");
                return Err(modules.problem(problem));
            }
        }
    }
    match pooling {
        Some(pooling) => Ok((pooling, normalised)),
        None => Err(modules.problem("no module makes one vector of the tokens'".to_owned())),
    }
}

fn pooling_of(path: &Path, has_prompt: bool) -> Result<Pooling, TrainError> {
    const MODE: &str = "pooling_mode";
    const WITH_PROMPT: &str = "include_prompt";
    let Some(file) = JsonFile::read(path.to_owned())? else {
        return Err(TrainError::SentenceModel {
            path: path.to_owned(),
            problem: "it is not there".to_owned(),
        });
    };
    if has_prompt && matches!(file.get(WITH_PROMPT), Some(Value::Bool(false))) {
        let problem = format!("`{WITH_PROMPT}` is false, and there is a prompt");
        return Err(file.problem(problem));
    }
    let mut modes = Vec::new();
    match file.get(MODE) {
        None => {
            for (key, mode) in POOLING_FLAGS {
                if file.flag(key)? {
                    modes.push((key, mode));
                }
            }
            // What sentence-transformers takes where the file says none.
            if modes.is_empty() {
                modes.push((MODE, "mean"));
            }
        }
        Some(Value::Array(list)) => {
            let names = list.iter().map(|mode| mode.as_str().unwrap_or_default());
            modes.extend(names.map(|mode| (MODE, mode)));
        }
        Some(mode) => modes.push((MODE, mode.as_str().unwrap_or_default())),
    }
    match modes[..] {
        [(_, "mean")] => Ok(Pooling::Mean),
        [(_, "cls")] => Ok(Pooling::First),
        _ => {
            let asked: Vec<String> = modes
                .iter()
                .map(|(key, mode)| match *key == MODE {
                    true => format!("`{key}` {mode:?}"),
                    false => format!("`{key}`"),
                })
                .collect();
            Err(file.problem(format!(
                "{} is neither the average of the tokens nor the first of them",
                asked.join(" with ")
            )))
        }
    }
}

/// A file of the folder.
struct JsonFile {
    path: PathBuf,
    value: Value,
}

impl JsonFile {
    /// None where there is no such file.
    fn read(path: PathBuf) -> Result<Option<Self>, TrainError> {
        if !path.exists() {
            return Ok(None);
        }
        let text = cinch_files::read_regular_text(&path, cinch_files::MAX_READ);
        let text = text.map_err(|error| error.to_string());
        let value = text.and_then(|text| {
            serde_json::from_str::<Value>(&text).map_err(|error| error.to_string())
        });
        match value {
            Ok(value) => Ok(Some(Self { path, value })),
            Err(problem) => Err(TrainError::SentenceModel { path, problem }),
        }
    }

    /// What a key has, unless that is null.
    fn get(&self, key: &str) -> Option<&Value> {
        let fields: Option<&Map<String, Value>> = self.value.as_object();
        fields?.get(key).filter(|value| !value.is_null())
    }

    fn flag(&self, key: &str) -> Result<bool, TrainError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wants(key, other, "true or false")),
        }
    }

    /// A length, which some files give as a number far beyond any.
    fn length(&self, key: &str) -> Result<Option<u64>, TrainError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_f64() {
            // As a cast, at most the largest number.
            Some(length) if length >= 1.0 => Ok(Some(length as u64)),
            _ => Err(self.wants(key, value, "a number of tokens")),
        }
    }

    fn wants(&self, key: &str, value: &Value, wanted: &str) -> TrainError {
        self.problem(format!("`{key}` is {value}, not {wanted}"))
    }

    fn problem(&self, problem: String) -> TrainError {
        TrainError::SentenceModel {
            path: self.path.clone(),
            problem,
        }
    }
}
