//! What a checkpoint holds besides tensors.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use cinch_architecture::{Architecture, Number, Range};
use cinch_config::{Config, LoraConfig, TooLong};
use cinch_data::TokenizerSpec;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// `state.json`. Everything a run needs to go on exactly where it was: the random state is the
/// seed and the step, the data position is the number of sequences seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub format: u32,
    /// Steps done.
    pub step: u64,
    /// Sequences seen.
    pub samples: u64,
    /// Tokens seen.
    pub tokens: u64,
    pub seed: u64,
    /// The lowest validation loss so far.
    pub best_loss: Option<f64>,
    /// The step it was measured at.
    #[serde(default)]
    pub best_step: Option<u64>,
    /// The first loss of the run, to compare the last one with.
    pub first_loss: Option<f64>,
    /// The evaluation that is due at this step was interrupted: it comes before the next step.
    #[serde(default)]
    pub evaluation_pending: bool,
    /// The stage of a curriculum that the last step was in.
    #[serde(default)]
    pub stage: usize,
    /// The first step of each stage of a curriculum.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stage_starts: Vec<u64>,
    /// Evaluations of the stage since its best one.
    #[serde(default)]
    pub evaluations_since_best: u64,
    /// The steps of the stage with the lowest validation losses, and these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(u64, f64)>,
    /// Clusters of the taxonomy's texts, where negatives are left out by them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clusters: Option<Clusters>,
    /// What the data and the tokenizer were.
    pub corpus: String,
    /// Whether the data were ids of another program, whose tokenizer nobody knows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub of_ids: bool,
    /// What the weights were that are not trained; none where all are, or they came from no file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<String>,
    /// As it was run.
    pub config: Config,
    /// As it was asked for, key by key: what `--resume` starts from.
    pub settings: BTreeMap<String, String>,
}

/// Texts that are about the same to the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clusters {
    /// When they were found.
    pub stage: usize,
    pub epoch: u64,
    /// Of each text of the taxonomy.
    pub of_texts: Vec<u32>,
}

/// A setting with which a run cannot go on, because the checkpoint has another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The setting's key, or [`EFFECTIVE_BATCH`].
    pub key: String,
    pub saved: String,
    pub asked: String,
}

/// The product of two settings: how it is cut may change, what it is may not.
pub const EFFECTIVE_BATCH: &str = "effective batch";

/// Settings outside the model that must stay, besides the effective batch.
const FIXED: [&str; 14] = [
    "data.tokenizer",
    "vram.max_seq_len",
    "training.seed",
    "data.val_split",
    "data.packing",
    "data.too_long",
    "data.train_on_inputs",
    "data.max_samples",
    "lora.rank",
    "lora.alpha",
    "lora.rank_stabilised",
    "lora.modules_to_save",
    "lora.quantization",
    "lora.double_quantization",
];

/// Settings of a model that change neither its weights nor what they mean: the name that its
/// shape has, a rate of the training, and how the scan is cut.
const FREE_IN_MODEL: [&str; 4] = ["size", "dropout", "scan_chunk", "text_chunk"];

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, saved, asked } = self;
        write!(
            formatter,
            "{key}: {saved} in the checkpoint, {asked} asked for"
        )
    }
}

impl State {
    /// Whether a resumed run must have the value of this key that it began with. A size is a name
    /// for several of them.
    pub fn is_fixed(key: &str) -> bool {
        match key.strip_prefix("model.") {
            Some(field) => !FREE_IN_MODEL.contains(&field),
            None => FIXED.contains(&key),
        }
    }

    /// What keeps a run with these settings from going on here. The model and the tokenizer give
    /// the weights their shape and meaning; seed, length and share of the validation say which
    /// text was held out; what is read of the data and how, what a row is; the effective batch,
    /// what a step is; rank, scale and frozen weights, what adapters mean. Everything else may
    /// change.
    pub fn differences(&self, config: &Config) -> Vec<Difference> {
        let saved = &self.config;
        let mut found = model_differences(&saved.model, &config.model);
        let mut compare = |key: &str, saved: String, asked: String| {
            if saved != asked {
                found.push(Difference {
                    key: key.to_owned(),
                    saved,
                    asked,
                });
            }
        };
        // A tokenizer's file may have moved: its contents are compared with those of the data.
        let tokenizers = [saved, config].map(|config| match config.data.tokenizer.parse() {
            Ok(spec) => spec,
            Err(never) => match never {},
        });
        if !matches!(tokenizers, [TokenizerSpec::File(_), TokenizerSpec::File(_)]) {
            let [saved, asked] = tokenizers.map(|spec: TokenizerSpec| spec.to_string());
            compare("data.tokenizer", saved, asked);
        }
        let values = |config: &Config| {
            [
                (EFFECTIVE_BATCH, config.batch.effective_batch().to_string()),
                ("vram.max_seq_len", config.batch.seq_len.to_string()),
                ("training.seed", config.training.seed.to_string()),
                ("data.val_split", config.data.val_split.to_string()),
                ("data.packing", config.data.packing.to_string()),
                ("data.too_long", too_long_name(config).to_owned()),
                (
                    "data.train_on_inputs",
                    config.data.train_on_inputs.to_string(),
                ),
                ("data.max_samples", or_none(config.data.max_samples)),
                ("lora.rank", or_none(lora(config).map(|lora| lora.rank))),
                ("lora.alpha", or_none(lora(config).map(|lora| lora.alpha))),
                (
                    "lora.rank_stabilised",
                    or_none(lora(config).map(|lora| lora.rank_stabilised)),
                ),
                (
                    "lora.modules_to_save",
                    or_none(lora(config).map(|lora| {
                        let mut names = lora.modules_to_save.clone();
                        names.sort_unstable();
                        names.join(",")
                    })),
                ),
                ("lora.quantization", config.tuning.frozen.name().to_owned()),
                (
                    "lora.double_quantization",
                    config.tuning.double_quantization.to_string(),
                ),
            ]
        };
        for ((key, saved), (_, asked)) in values(saved).into_iter().zip(values(config)) {
            compare(key, saved, asked);
        }
        found
    }

    pub const FORMAT: u32 = 1;

    pub fn from_json(path: &Path, value: serde_json::Value) -> Result<Self, TrainError> {
        let fail = |problem: String| TrainError::State {
            path: path.to_owned(),
            problem,
        };
        let format = value.get("format").and_then(serde_json::Value::as_u64);
        if format != Some(u64::from(Self::FORMAT)) {
            return Err(fail(format!(
                "format {} is not {}, the one this version reads",
                format.map_or_else(|| "(none)".to_owned(), |f| f.to_string()),
                Self::FORMAT
            )));
        }
        let state: Self = serde_json::from_value(value).map_err(|error| fail(error.to_string()))?;
        match impossible(&state.config.model) {
            None => Ok(state),
            Some(reason) => Err(fail(format!(
                "there is no such model: {reason}\n\
                 hint: the file was changed after it was saved; take another checkpoint of the run"
            ))),
        }
    }

    pub fn to_json(&self) -> Result<serde_json::Value, serde_json::Error> {
        serde_json::to_value(self)
    }
}

fn lora(config: &Config) -> Option<&LoraConfig> {
    config.tuning.lora.as_ref()
}

fn or_none<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

fn too_long_name(config: &Config) -> &'static str {
    TooLong::NAMES[config.data.too_long as usize]
}

/// Why no model has this shape. Settings are held to the same ranges before a run begins, so a
/// saved shape outside of them was not saved by one.
fn impossible(model: &Architecture) -> Option<String> {
    let wrong = model.family().settings.iter().find_map(|setting| {
        let (value, wanted) = match (setting.range, (setting.get)(model)?) {
            (Range::Whole { min, max }, Number::Whole(number)) => (!(min..=max).contains(&number))
                .then(|| (number.to_string(), format!("from {min} to {max}")))?,
            (Range::Rate, Number::Real(number)) => (!(0.0..1.0).contains(&number))
                .then(|| (number.to_string(), "from 0 to below 1".to_owned()))?,
            (Range::Positive, Number::Real(number)) => (!(number > 0.0 && number.is_finite()))
                .then(|| (number.to_string(), "above 0".to_owned()))?,
            _ => return None,
        };
        Some(format!("{} is {value}, not {wanted}", setting.key))
    });
    let whole = |key: &str| model.get(key).and_then(Number::whole);
    wrong.or_else(|| {
        let (width, heads) = (whole("model.d_model")?, whole("model.n_heads")?);
        let uneven = !width.is_multiple_of(heads);
        uneven.then(|| format!("model.n_heads {heads} does not divide model.d_model {width}"))
    })
}

/// Setting by setting, then what no setting says, field by field; of another architecture, that
/// alone.
fn model_differences(saved: &Architecture, asked: &Architecture) -> Vec<Difference> {
    let difference = |key: String, saved: String, asked: String| Difference { key, saved, asked };
    if saved.name() != asked.name() {
        let (saved, asked) = (saved.name().to_owned(), asked.name().to_owned());
        return vec![difference("model.type".to_owned(), saved, asked)];
    }
    let mut found = Vec::new();
    let mut rest = asked.clone();
    for setting in saved.family().settings {
        let values = (setting.get)(saved).zip((setting.get)(asked));
        let Some((was, is)) = values.filter(|(was, is)| was != is) else {
            continue;
        };
        (setting.set)(&mut rest, was);
        if State::is_fixed(setting.key) {
            let key = setting.key.to_owned();
            found.push(difference(key, was.to_string(), is.to_string()));
        }
    }
    let fields = |model: &Architecture| match serde_json::to_value(model) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let rest = fields(&rest);
    found.extend(fields(saved).into_iter().filter_map(|(field, saved)| {
        let asked = rest.get(&field).filter(|asked| **asked != saved)?;
        let key = format!("model.{field}");
        State::is_fixed(&key).then(|| difference(key, saved.to_string(), asked.to_string()))
    }));
    found
}

#[cfg(test)]
mod tests {
    use cinch_config::{Settings, Source};

    use super::*;

    fn config(own: &[(&str, &str)]) -> Config {
        let mut settings = Settings::new();
        for (key, value) in own {
            let source = Source::Flag("test".to_owned());
            settings.set(key, value, source).unwrap();
        }
        settings.resolve().unwrap()
    }

    fn state() -> State {
        State {
            format: State::FORMAT,
            step: 3,
            samples: 48,
            tokens: 1,
            seed: 42,
            best_loss: None,
            best_step: None,
            first_loss: None,
            evaluation_pending: false,
            stage: 0,
            stage_starts: Vec::new(),
            evaluations_since_best: 0,
            top: Vec::new(),
            clusters: None,
            corpus: String::new(),
            of_ids: false,
            frozen: None,
            config: config(&[]),
            settings: BTreeMap::new(),
        }
    }

    #[test]
    fn what_a_step_means_must_stay_as_it_was() {
        for (own, key, saved, asked) in [
            (
                &[("model.size", "medium-lite")][..],
                "model.d_model",
                "512",
                "640",
            ),
            (&[("model.type", "gpt2")], "model.type", "mamba", "gpt2"),
            (&[("model.d_state", "8")], "model.d_state", "16", "8"),
            (
                &[("model.vocab_size", "60000")],
                "model.vocab_size",
                "50257",
                "60000",
            ),
            (
                &[("data.tokenizer", "bytes")],
                "data.tokenizer",
                "gpt2",
                "bytes",
            ),
            (
                &[("data.tokenizer", "my.json")],
                "data.tokenizer",
                "gpt2",
                "my.json",
            ),
            (
                &[("vram.max_seq_len", "512")],
                "vram.max_seq_len",
                "1024",
                "512",
            ),
            (&[("training.seed", "7")], "training.seed", "42", "7"),
            (
                &[("data.val_split", "0.1")],
                "data.val_split",
                "0.05",
                "0.1",
            ),
            (
                &[
                    ("vram.batch_size", "8"),
                    ("vram.gradient_accumulation_steps", "4"),
                ],
                EFFECTIVE_BATCH,
                "16",
                "32",
            ),
        ] {
            let expected = Difference {
                key: key.to_owned(),
                saved: saved.to_owned(),
                asked: asked.to_owned(),
            };
            let found = state().differences(&config(own));
            assert!(found.contains(&expected), "{own:?}: {found:?}");
        }
    }

    /// By the key that its files have, whatever the shape calls the field.
    #[test]
    fn differences_of_every_family_are_told_by_their_keys() {
        for (model, own) in [
            (
                "gsa",
                [
                    ("model.k_max", "1024", "512"),
                    ("model.d_ffn", "1536", "1024"),
                ],
            ),
            (
                "mu",
                [
                    ("model.causal", "true", "false"),
                    ("model.n_layers", "24", "12"),
                ],
            ),
            (
                "naics",
                [
                    ("model.n_experts", "4", "8"),
                    ("model.d_model", "384", "768"),
                ],
            ),
        ] {
            let mut state = state();
            state.config = config(&[("model.type", model)]);
            for (key, saved, asked) in own {
                let differs = Difference {
                    key: key.to_owned(),
                    saved: saved.to_owned(),
                    asked: asked.to_owned(),
                };
                let asked = config(&[("model.type", model), (key, asked)]);
                assert_eq!(state.differences(&asked), [differs]);
            }
        }
        let mut state = state();
        state.config = config(&[("model.type", "naics")]);
        let free = config(&[("model.type", "naics"), ("model.dropout", "0.2")]);
        assert_eq!(state.differences(&free), []);
    }

    #[test]
    fn what_differs_is_among_what_is_fixed() {
        let other = config(&[
            ("model.size", "tiny"),
            ("training.seed", "7"),
            ("data.val_split", "0.1"),
            ("data.packing", "true"),
            ("data.too_long", "drop"),
            ("data.train_on_inputs", "true"),
            ("data.max_samples", "9"),
            ("lora.rank", "4"),
            ("lora.rank_stabilised", "true"),
            ("lora.modules_to_save", "lm_head"),
            ("lora.quantization", "4bit"),
            ("lora.double_quantization", "true"),
        ]);
        let found = state().differences(&other);
        assert!(found.len() > FIXED.len(), "{found:?}");
        for one in &found {
            assert!(State::is_fixed(&one.key), "{}", one.key);
        }
        assert!(
            FIXED
                .iter()
                .all(|key| found.iter().any(|one| one.key == *key))
        );
        assert!(!State::is_fixed("model.dropout") && !State::is_fixed("vram.batch_size"));
    }

    #[test]
    fn how_a_step_is_carried_out_may_change() {
        let own = [
            ("model.dropout", "0.3"),
            ("model.scan_chunk", "16"),
            ("vram.batch_size", "4"),
            ("vram.gradient_accumulation_steps", "4"),
            ("vram.precision", "bf16"),
            ("vram.optimizer_states", "8bit"),
            ("training.max_steps", "7000"),
            ("training.learning_rate", "1e-3"),
            ("data.source", "elsewhere"),
            ("output.output_dir", "elsewhere"),
        ];
        assert_eq!(state().differences(&config(&own)), []);
    }

    #[test]
    fn a_state_from_before_evaluations_could_be_interrupted_is_read() {
        let mut json = state().to_json().unwrap();
        json.as_object_mut().unwrap().remove("evaluation_pending");
        let read = State::from_json(Path::new("state.json"), json).unwrap();
        assert_eq!(read, state());
    }
}
