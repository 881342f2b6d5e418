//! `adapter_config.json`: read as peft means it, and written so that peft reads it.
//!
//! Keys are of three kinds: those that are understood, those that change nothing about the result
//! whatever they hold, and the rest. One of the rest that is set (neither null, false, 0 nor empty)
//! is refused by name, because the adapter would mean something else here.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::WeightError;

/// peft's name for "every linear module but the output head".
const ALL_LINEAR: &str = "all-linear";
/// Keys that are read below.
const UNDERSTOOD: [&str; 19] = [
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
];
/// Keys about other libraries, about how training began, or only effective with a key that is
/// refused.
const WITHOUT_EFFECT: [&str; 11] = [
    "auto_mapping",
    "corda_config",
    "enable_lora",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
];
/// Ways to begin that leave the base as it is. The others subtract from it, so that the adapter
/// alone does not say what the result is.
const PLAIN_BEGINNINGS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// What an adapter is put on and how strong it is.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// Hub id or path of the model it was trained on.
    pub base_model: Option<String>,
    pub revision: Option<String>,
    /// `CAUSAL_LM` for language models.
    pub task_type: Option<String>,
    pub rank: usize,
    pub alpha: f64,
    pub dropout: f64,
    /// alpha / √rank instead of alpha / rank.
    pub use_rslora: bool,
    pub targets: Targets,
    /// Modules that are left out though a target matches.
    pub exclude: Option<Modules>,
    /// Which biases were trained too.
    pub bias: Bias,
    /// Modules that are trained whole and saved with the adapter.
    pub modules_to_save: Vec<String>,
    /// Ranks and alphas of single modules, by patterns; the first that matches counts.
    pub rank_pattern: Vec<(String, usize)>,
    pub alpha_pattern: Vec<(String, f64)>,
    /// Layers that are adapted; all where there are none.
    pub layers: Vec<usize>,
    /// Names of the list that layers are counted in; any where there are none.
    pub layers_pattern: Vec<String>,
}

/// Modules by name or by pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Modules {
    /// Whole names, or their last parts.
    Names(Vec<String>),
    /// A regular expression for the whole name.
    Pattern(String),
}

/// Which modules are adapted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    Modules(Modules),
    /// Every linear module but the output head.
    AllLinear,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    None,
    All,
    LoraOnly,
}

impl Bias {
    /// As peft names it.
    pub fn name(self) -> &'static str {
        match self {
            Bias::None => "none",
            Bias::All => "all",
            Bias::LoraOnly => "lora_only",
        }
    }
}

impl AdapterConfig {
    /// An adapter without exceptions.
    pub fn new(rank: usize, alpha: f64, targets: Targets) -> AdapterConfig {
        AdapterConfig {
            base_model: None,
            revision: None,
            task_type: Some("CAUSAL_LM".to_owned()),
            rank,
            alpha,
            dropout: 0.0,
            use_rslora: false,
            targets,
            exclude: None,
            bias: Bias::None,
            modules_to_save: Vec::new(),
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            layers: Vec::new(),
            layers_pattern: Vec::new(),
        }
    }

    /// Reads an `adapter_config.json`.
    pub fn read(path: &Path) -> Result<AdapterConfig, WeightError> {
        let text = std::fs::read(path).map_err(WeightError::io("read", path))?;
        let keys: Map<String, Value> =
            serde_json::from_slice(&text).map_err(|error| WeightError::AdapterConfig {
                path: path.to_owned(),
                key: "the file".to_owned(),
                problem: error.to_string(),
            })?;
        Keys { keys: &keys, path }.config()
    }

    /// The file that peft reads.
    pub fn to_json(&self) -> Value {
        let patterns = |pairs: Vec<(&String, Value)>| -> Value {
            let pairs = pairs.into_iter();
            Value::Object(pairs.map(|(key, value)| (key.clone(), value)).collect())
        };
        let ranks = self.rank_pattern.iter().map(|(key, r)| (key, json!(r)));
        let alphas = self.alpha_pattern.iter().map(|(key, a)| (key, number(*a)));
        let mut keys = json!({
            "alpha_pattern": patterns(alphas.collect()),
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model,
            "bias": self.bias.name(),
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "layers_pattern": some(&self.layers_pattern),
            "layers_to_transform": some(&self.layers),
            "lora_alpha": number(self.alpha),
            "lora_dropout": self.dropout,
            "modules_to_save": some(&self.modules_to_save),
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": patterns(ranks.collect()),
            "revision": self.revision,
            "target_modules": match &self.targets {
                Targets::AllLinear => json!(ALL_LINEAR),
                Targets::Modules(modules) => modules.to_json(),
            },
            "task_type": self.task_type,
            "use_dora": false,
            "use_rslora": self.use_rslora,
        });
        // Not known to every version of peft that knows the others.
        if let (Some(exclude), Value::Object(keys)) = (&self.exclude, &mut keys) {
            keys.insert("exclude_modules".to_owned(), exclude.to_json());
        }
        keys
    }
}

impl Modules {
    fn to_json(&self) -> Value {
        match self {
            Modules::Names(names) => json!(names),
            Modules::Pattern(pattern) => json!(pattern),
        }
    }
}

/// Null in the place of an empty list, as peft has it.
fn some<T: serde::Serialize>(list: &[T]) -> Value {
    match list.is_empty() {
        true => Value::Null,
        false => json!(list),
    }
}

/// Whole numbers are written without a fraction: peft declares alpha as an integer.
fn number(value: f64) -> Value {
    match value.fract() == 0.0 && value.abs() < f64::from(u32::MAX) {
        true => json!(value as i64),
        false => json!(value),
    }
}

/// The keys of a file, while they are read.
struct Keys<'a> {
    keys: &'a Map<String, Value>,
    path: &'a Path,
}

impl Keys<'_> {
    fn config(&self) -> Result<AdapterConfig, WeightError> {
        self.refuse_what_is_not_understood()?;
        let rank = self.required("r", Value::as_u64)? as usize;
        if rank == 0 {
            return Err(self.wrong("r", "a rank is at least 1"));
        }
        let dropout = self.or("lora_dropout", 0.0, Value::as_f64)?;
        if !(0.0..1.0).contains(&dropout) {
            return Err(self.wrong("lora_dropout", "a share is at least 0 and below 1"));
        }
        let targets = self.modules("target_modules")?;
        let targets = match targets {
            Some(Modules::Pattern(word)) if word.eq_ignore_ascii_case(ALL_LINEAR) => {
                Targets::AllLinear
            }
            Some(modules) => Targets::Modules(modules),
            None => return Err(self.wrong("target_modules", "no module is named")),
        };
        Ok(AdapterConfig {
            base_model: self.optional("base_model_name_or_path", text)?,
            revision: self.optional("revision", text)?,
            task_type: self.optional("task_type", text)?,
            rank,
            alpha: self.required("lora_alpha", Value::as_f64)?,
            dropout,
            use_rslora: self.or("use_rslora", false, Value::as_bool)?,
            targets,
            exclude: self.modules("exclude_modules")?,
            bias: self.or("bias", Bias::None, |value| match value.as_str()? {
                "none" => Some(Bias::None),
                "all" => Some(Bias::All),
                "lora_only" => Some(Bias::LoraOnly),
                _ => None,
            })?,
            modules_to_save: self.or("modules_to_save", Vec::new(), texts)?,
            rank_pattern: self.or("rank_pattern", Vec::new(), |value| {
                let rank = |value: &Value| value.as_u64().filter(|&rank| rank > 0);
                pairs(value, |value| rank(value).map(|rank| rank as usize))
            })?,
            alpha_pattern: self.or("alpha_pattern", Vec::new(), |value| {
                pairs(value, Value::as_f64)
            })?,
            layers: self.or("layers_to_transform", Vec::new(), |value| {
                one_or_many(value, |layer| layer.as_u64().map(|layer| layer as usize))
            })?,
            layers_pattern: self.or("layers_pattern", Vec::new(), |value| {
                one_or_many(value, text)
            })?,
        })
    }

    fn refuse_what_is_not_understood(&self) -> Result<(), WeightError> {
        let refuse = |key: &str, reason: &'static str| WeightError::UnsupportedAdapter {
            path: self.path.to_owned(),
            key: key.to_owned(),
            value: self.keys.get(key).unwrap_or(&Value::Null).to_string(),
            reason,
        };
        match self.keys.get("peft_type").and_then(Value::as_str) {
            Some("LORA") => {}
            Some(_) => return Err(refuse("peft_type", "only LORA is read")),
            None => return Err(self.wrong("peft_type", "it is missing; peft writes LORA here")),
        }
        if self.or("use_dora", false, Value::as_bool)? {
            return Err(refuse("use_dora", "DoRA scales the merged weights by rows"));
        }
        if self.or("fan_in_fan_out", false, Value::as_bool)? {
            return Err(refuse("fan_in_fan_out", "the weights would be transposed"));
        }
        let beginning = self.keys.get("init_lora_weights").and_then(Value::as_str);
        if beginning.is_some_and(|name| !PLAIN_BEGINNINGS.contains(&name)) {
            let reason = "this start changes the base, which the adapter's files do not hold; \
                          save it with peft's path_initial_model_for_weight_conversion";
            return Err(refuse("init_lora_weights", reason));
        }
        let unknown = self.keys.iter().find(|(key, value)| {
            let key = key.as_str();
            is_set(value) && !UNDERSTOOD.contains(&key) && !WITHOUT_EFFECT.contains(&key)
        });
        match unknown {
            Some((key, _)) => Err(refuse(key, "it changes what the adapter means")),
            None => Ok(()),
        }
    }

    fn modules(&self, key: &str) -> Result<Option<Modules>, WeightError> {
        let modules = self.optional(key, |value| match value {
            Value::String(pattern) => Some(Modules::Pattern(pattern.clone())),
            other => texts(other).map(Modules::Names),
        })?;
        let is_empty = |modules: &Modules| match modules {
            Modules::Names(names) => names.is_empty(),
            Modules::Pattern(pattern) => pattern.is_empty(),
        };
        Ok(modules.filter(|modules| !is_empty(modules)))
    }

    /// The value of a key that may be missing or null.
    fn optional<T>(
        &self,
        key: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, WeightError> {
        match self.keys.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(value) {
                Some(read) => Ok(Some(read)),
                None => Err(self.wrong(key, &format!("`{value}` is not what peft writes there"))),
            },
        }
    }

    fn or<T>(
        &self,
        key: &str,
        default: T,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<T, WeightError> {
        Ok(self.optional(key, read)?.unwrap_or(default))
    }

    fn required<T>(&self, key: &str, read: impl Fn(&Value) -> Option<T>) -> Result<T, WeightError> {
        self.optional(key, read)?
            .ok_or_else(|| self.wrong(key, "it is missing"))
    }

    fn wrong(&self, key: &str, problem: &str) -> WeightError {
        WeightError::AdapterConfig {
            path: self.path.to_owned(),
            key: key.to_owned(),
            problem: problem.to_owned(),
        }
    }
}

/// Whether a value is other than what a feature has that is not used.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(value) => value.as_f64() != Some(0.0),
        Value::String(value) => !value.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn texts(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(text).collect()
}

fn one_or_many<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    match value {
        Value::Array(values) => values.iter().map(read).collect(),
        one => read(one).map(|one| vec![one]),
    }
}

fn pairs<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<(String, T)>> {
    let pairs = value.as_object()?.iter();
    pairs
        .map(|(key, value)| Some((key.clone(), read(value)?)))
        .collect()
}
