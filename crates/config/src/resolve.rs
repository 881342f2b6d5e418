//! From layers to one config: which model, what its size supplies, and the
//! typed structs every later crate reads.
//!
//! Every value that is worked out on the way is pushed back into the layers, so
//! that the listing of origins shows what the config holds.

use std::path::PathBuf;

use crate::completion::Completion;
use crate::config::{
    BatchConfig, Checkpointing, Config, DataConfig, Gpt2Config, MambaConfig, ModelConfig,
    ModelKind, OutputConfig, Precision, Schedule, StateFormat, TrainingConfig,
};
use crate::error::{ConfigError, Stated};
use crate::registry::SETTINGS;
use crate::rules::{ACCUMULATION, BATCH};
use crate::settings::{Explained, Settings};
use crate::size::{ModelSize, find_size, name_of_shape};
use crate::source::{Layer, Source};
use crate::value::Value;

impl Settings {
    /// The typed config, or the first thing that does not go together.
    pub fn resolve(&self) -> Result<Config, ConfigError> {
        Resolution::of(self).map(|resolution| resolution.config)
    }

    /// Each setting of the model with its value and origin, in listing order.
    /// Settings without a value are left out. Where the settings contradict
    /// each other, what was given is listed without what would follow from it.
    pub fn explain(&self) -> Vec<Explained> {
        match Resolution::of(self) {
            Ok(resolution) => {
                let model = resolution.config.model.kind();
                resolution.settings.listing(Some(model))
            }
            Err(_) => self.listing(None),
        }
    }

    /// What was filled in or moved, in sentences. Empty where the settings do
    /// not resolve: then the error is the message.
    pub fn notes(&self) -> Vec<String> {
        let notes = |resolution: Resolution| [resolution.notes, resolution.filled].concat();
        Resolution::of(self).map_or_else(|_| Vec::new(), notes)
    }

    /// As [`Self::notes`], without what files left to defaults: that is the same in every run.
    pub fn adjustments(&self) -> Vec<String> {
        Resolution::of(self).map_or_else(|_| Vec::new(), |resolution| resolution.notes)
    }
}

struct Resolution {
    config: Config,
    settings: Settings,
    notes: Vec<String>,
    /// What files left open, a sentence a file.
    filled: Vec<String>,
}

impl Resolution {
    fn of(given: &Settings) -> Result<Resolution, ConfigError> {
        let mut completion = Completion::new(given);
        let kind = completion.model_kind()?;
        let size = completion.apply_size(kind)?;
        completion.check_keys_belong(kind)?;
        let model = completion.model(kind)?;
        completion.note_outweighed_size(size, &model);
        let batch = completion.batch(&model)?;
        let training = completion.training()?;
        let data = completion.data(&model)?;
        let output = completion.output(&model);
        let filled = completion.filled(kind);
        Ok(Resolution {
            config: Config {
                model,
                batch,
                training,
                data,
                output,
            },
            settings: completion.settings,
            notes: completion.notes,
            filled,
        })
    }
}

impl Completion {
    fn apply_size(&mut self, kind: ModelKind) -> Result<&'static ModelSize, ConfigError> {
        let stated = self.stated("model.size");
        let size = find_size(kind, &stated.value.to_string(), &stated.source)?;
        for (key, text) in size.values() {
            let setting = SETTINGS.iter().find(|setting| setting.key == key);
            let value = setting.and_then(|setting| setting.kind.parse(&text).ok());
            let value = value.unwrap_or_else(|| unreachable!("{key} = {text} in a size"));
            let source = Source::Preset(size.title());
            self.settings.push(key, Layer::Size, value, source);
        }
        Ok(size)
    }

    fn model(&self, kind: ModelKind) -> Result<ModelConfig, ConfigError> {
        let mut model = match kind {
            ModelKind::Mamba => ModelConfig::Mamba(MambaConfig {
                size: None,
                d_model: self.count("model.d_model"),
                n_layers: self.count("model.n_layers"),
                d_state: self.count("model.d_state"),
                expand_factor: self.count("model.expand_factor"),
                d_conv: self.count("model.d_conv"),
                dropout: self.float("model.dropout"),
                max_seq_len: self.count("model.max_seq_len"),
                vocab_size: self.count("model.vocab_size"),
                scan_chunk: self.count("model.scan_chunk"),
            }),
            ModelKind::Gpt2 => {
                self.check_heads()?;
                ModelConfig::Gpt2(Gpt2Config {
                    size: None,
                    d_model: self.count("model.d_model"),
                    n_layers: self.count("model.n_layers"),
                    n_heads: self.count("model.n_heads"),
                    dropout: self.float("model.dropout"),
                    max_seq_len: self.count("model.max_seq_len"),
                    vocab_size: self.count("model.vocab_size"),
                    layer_norm_eps: self.float("model.layer_norm_eps"),
                })
            }
        };
        let name = name_of_shape(&model).map(str::to_owned);
        match &mut model {
            ModelConfig::Mamba(config) => config.size = name,
            ModelConfig::Gpt2(config) => config.size = name,
        }
        Ok(model)
    }

    fn batch(&mut self, model: &ModelConfig) -> Result<BatchConfig, ConfigError> {
        let micro_is_free =
            !self.settings.is_explicit(BATCH) && !self.settings.is_explicit(ACCUMULATION);
        self.complete_batch();
        self.complete_sequence()?;
        Ok(BatchConfig {
            batch_size: self.count(BATCH),
            accumulation: self.count(ACCUMULATION),
            micro_is_free,
            seq_len: self.count("vram.max_seq_len"),
            precision: match self.text("vram.precision").as_str() {
                "bf16" => Precision::Bf16,
                "fp16" => Precision::Fp16,
                _ => Precision::Fp32,
            },
            checkpointing: self.checkpointing(model)?,
            offload: matches!(self.value("vram.use_cpu_offload"), Some(Value::Bool(true))),
            states: match self.text("vram.optimizer_states").as_str() {
                "8bit" => StateFormat::EightBit,
                _ => StateFormat::Fp32,
            },
            update_in_backward: matches!(
                self.value("vram.update_in_backward"),
                Some(Value::Bool(true))
            ),
            budget: self.budget(),
            loss_chunk: self
                .value("vram.loss_chunk")
                .map(|_| self.count("vram.loss_chunk")),
        })
    }

    fn checkpointing(&self, model: &ModelConfig) -> Result<Checkpointing, ConfigError> {
        match self.value("vram.checkpointing") {
            Some(Value::Unsigned(0)) => Ok(Checkpointing::None),
            Some(Value::Unsigned(blocks)) if *blocks > model.num_blocks() as u64 => Err(self
                .relation(
                    "vram.checkpointing",
                    "model.n_layers",
                    "no more blocks can be recomputed than there are",
                    format!("write \"full\" for all {}", model.num_blocks()),
                )),
            Some(Value::Unsigned(blocks)) => Ok(Checkpointing::Blocks(*blocks as usize)),
            _ => Ok(match self.text("vram.checkpointing").as_str() {
                "none" => Checkpointing::None,
                "full" => Checkpointing::Full,
                _ => Checkpointing::Auto,
            }),
        }
    }

    fn training(&mut self) -> Result<TrainingConfig, ConfigError> {
        self.fit_warmup()?;
        self.check_learning_rates()?;
        Ok(TrainingConfig {
            learning_rate: self.float("training.learning_rate"),
            min_learning_rate: self.float("training.min_learning_rate"),
            schedule: match self.text("training.schedule").as_str() {
                "cosine" => Schedule::Cosine,
                "constant" => Schedule::Constant,
                _ => Schedule::Linear,
            },
            max_steps: self.unsigned("training.max_steps"),
            warmup_steps: self.unsigned("training.warmup_steps"),
            weight_decay: self.float("training.weight_decay"),
            adam_beta1: self.float("training.adam_beta1"),
            adam_beta2: self.float("training.adam_beta2"),
            adam_epsilon: self.float("training.adam_epsilon"),
            max_grad_norm: self.float("training.max_grad_norm"),
            label_smoothing: self.float("training.label_smoothing"),
            eval_interval: self.unsigned("training.eval_interval"),
            eval_batches: self.count("training.eval_batches"),
            save_interval: self.unsigned("training.save_interval"),
            save_total_limit: self.count("training.save_total_limit"),
            logging_steps: self.unsigned("training.logging_steps"),
            seed: self.unsigned("training.seed"),
        })
    }

    fn data(&mut self, model: &ModelConfig) -> Result<DataConfig, ConfigError> {
        self.check_vocabulary(model)?;
        Ok(DataConfig {
            source: self.path("data.source"),
            text_column: self.text("data.text_column"),
            tokenizer: self.text("data.tokenizer"),
            val_split: self.float("data.val_split"),
            cache_dir: self.path("data.cache_dir"),
        })
    }

    fn output(&mut self, model: &ModelConfig) -> OutputConfig {
        const OUTPUT: &str = "output.output_dir";
        let output_dir = self.path(OUTPUT).unwrap_or_else(|| {
            let name = match model.size() {
                Some(size) if size == model.name() => size.to_owned(),
                size => format!("{}-{}", model.name(), size.unwrap_or("custom")),
            };
            let path = PathBuf::from("runs").join(name);
            let source = Source::Derived("model.size".to_owned());
            let value = Value::Path(path.clone());
            self.settings.push(OUTPUT, Layer::Default, value, source);
            path
        });
        OutputConfig { output_dir }
    }

    /// One sentence a file about what its sections left open.
    fn filled(&self, kind: ModelKind) -> Vec<String> {
        const NAMED: usize = 8;
        let mut notes = Vec::new();
        for file in &self.settings.files {
            let filled: Vec<Stated> = SETTINGS
                .iter()
                .filter(|setting| setting.belongs_to(kind))
                .filter(|setting| file.sections.iter().any(|name| name == setting.section()))
                .filter(|setting| {
                    let assignment = self.settings.effective(setting.key);
                    assignment.is_some_and(|one| {
                        one.source == Source::Default || one.layer == Layer::Size
                    })
                })
                .map(|setting| self.stated(setting.key))
                .collect();
            let path = file.path.display();
            let note = match filled.as_slice() {
                [] => continue,
                [one] => format!(
                    "{} was not in {path}: {} {}",
                    one.key, one.source, one.value
                ),
                many => {
                    let mut named: Vec<String> = many
                        .iter()
                        .take(NAMED)
                        .map(|one| format!("{} = {} ({})", one.key, one.value, one.source))
                        .collect();
                    if many.len() > NAMED {
                        named.push(format!("and {} more", many.len() - NAMED));
                    }
                    format!(
                        "{} keys were not in {path}: {}",
                        many.len(),
                        named.join(", ")
                    )
                }
            };
            notes.push(note);
        }
        notes
    }
}
