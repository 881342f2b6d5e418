//! The rules between settings: what is filled in from what, what gives way to
//! what, and what cannot stand together.
//!
//! A value the user stated is moved by no rule without an error or a note.

use crate::completion::Completion;
use crate::config::{ModelConfig, ModelKind};
use crate::error::ConfigError;
use crate::preset::{Preset, effective_batch_for};
use crate::registry::SETTINGS;
use crate::size::{BYTES_VOCABULARY, GPT2_VOCABULARY, ModelSize};
use crate::source::{Layer, Source};
use crate::value::Value;

/// Sequences per optimizer step when nobody says otherwise, as 8 × 2.
const DEFAULT_EFFECTIVE_BATCH: u64 = 16;
const DEFAULT_BATCH: u64 = 8;

pub(crate) const BATCH: &str = "vram.batch_size";
pub(crate) const ACCUMULATION: &str = "vram.gradient_accumulation_steps";

impl Completion {
    /// The model all files and flags agree on.
    pub(crate) fn model_kind(&mut self) -> Result<ModelKind, ConfigError> {
        let stated = self.stated("model.type");
        let name = stated.value.to_string();
        for file in &self.settings.files {
            let Some(model) = file.model.as_ref().filter(|model| model.name != name) else {
                continue;
            };
            // Someone who names a model of ours for another program's file wants
            // that file's way of training, not its architecture.
            if let (None, Source::Flag(flag)) = (ModelKind::from_name(&model.name), &stated.source)
            {
                self.notes.push(format!(
                    "{} is a config for {} (line {}: `{}`): {flag} {name} takes over its batch and training settings, and nothing of its shape",
                    file.path.display(),
                    model.name,
                    model.line,
                    model.evidence
                ));
                continue;
            }
            if self.settings.is_explicit("model.type") {
                return Err(ConfigError::OtherModel {
                    path: file.path.clone(),
                    config_model: model.name.clone(),
                    evidence: model.evidence.clone(),
                    line: model.line,
                    given: name,
                    given_by: Box::new(stated.source),
                });
            }
            return Err(ConfigError::UnknownModel {
                path: file.path.clone(),
                config_model: model.name.clone(),
                section: model.evidence.clone(),
                line: model.line,
                known: ModelKind::NAMES.join(", "),
            });
        }
        self.note_ignored();
        let kind = ModelKind::from_name(&name)
            .unwrap_or_else(|| unreachable!("model.type accepts only known models, not {name}"));
        for file in &self.settings.files {
            if let Some(model) = &file.model
                && kind != ModelKind::Mamba
                && model.evidence != "model.type"
            {
                self.notes.push(format!(
                    "{} names no model.type; `{}` on line {} makes it a config for {name}",
                    file.path.display(),
                    model.evidence,
                    model.line
                ));
            }
        }
        Ok(kind)
    }

    /// What was left alone in files of other programs.
    fn note_ignored(&mut self) {
        const NAMED: usize = 8;
        for file in &self.settings.files {
            let mut named: Vec<String> = file.ignored.iter().take(NAMED).cloned().collect();
            let keys = match file.ignored.len() {
                0 => continue,
                1 => "1 key".to_owned(),
                many => format!("{many} keys"),
            };
            if file.ignored.len() > NAMED {
                named.push(format!("and {} more", file.ignored.len() - NAMED));
            }
            self.notes.push(format!(
                "{}, read as {}, has {keys} without a setting here: {}",
                file.path.display(),
                file.dialect.unwrap_or("another program's"),
                named.join(", ")
            ));
        }
    }

    pub(crate) fn check_keys_belong(&self, kind: ModelKind) -> Result<(), ConfigError> {
        let stray = SETTINGS
            .iter()
            .find(|setting| !setting.belongs_to(kind) && self.settings.is_explicit(setting.key));
        let Some(setting) = stray else {
            return Ok(());
        };
        let owners: Vec<&str> = setting.models.iter().map(|model| model.name()).collect();
        Err(ConfigError::KeyOfOtherModel {
            key: setting.key,
            origin: Box::new(self.stated(setting.key).source),
            belongs_to: owners.join(" or "),
            model: kind.name(),
            model_origin: Box::new(self.stated("model.type").source),
        })
    }

    /// A size asked for by name yields to any part of the shape that is stated, even by a file
    /// when the size was a flag. That must not go unsaid; a part stated beside the size, or in a
    /// stronger place, is what the user meant.
    pub(crate) fn note_outweighed_size(&mut self, size: &ModelSize, model: &ModelConfig) {
        if !self.settings.is_explicit("model.size") || model.size() == Some(size.name) {
            return;
        }
        let layer = |key| self.settings.effective(key).map(|given| given.layer);
        let outweighing: Vec<String> = SETTINGS
            .iter()
            .filter(|setting| setting.section() == "model" && setting.key != "model.size")
            .filter(|setting| setting.key != "model.type" && self.settings.is_explicit(setting.key))
            .filter(|setting| layer(setting.key) < layer("model.size"))
            .map(|setting| self.stated(setting.key).to_string())
            .collect();
        if outweighing.is_empty() {
            return;
        }
        self.notes.push(format!(
            "{} is not the shape that is built: {} outweighs it",
            self.stated("model.size"),
            outweighing.join(", ")
        ));
    }

    pub(crate) fn check_heads(&self) -> Result<(), ConfigError> {
        let (width, heads) = (
            self.unsigned("model.d_model"),
            self.unsigned("model.n_heads"),
        );
        if width.is_multiple_of(heads) {
            return Ok(());
        }
        let divisor = (1..=heads).rev().find(|&fewer| width.is_multiple_of(fewer));
        Err(self.relation(
            "model.n_heads",
            "model.d_model",
            "the heads share the width evenly",
            format!(
                "set model.n_heads to a divisor of {width}, such as {}",
                divisor.unwrap_or(1)
            ),
        ))
    }

    /// Fills in whichever of micro batch and accumulation was not stated, so
    /// that their product stays what it was meant to be: the preset's, or what
    /// the guide trains with on a card of that budget, or 16.
    pub(crate) fn complete_batch(&mut self) {
        let weaker = |key| match self.settings.effective_below(key, Layer::File) {
            Some(assignment) => match assignment.value {
                Value::Unsigned(number) => Some(number),
                _ => None,
            },
            None => None,
        };
        let preset = weaker(BATCH).zip(weaker(ACCUMULATION)).map(|(a, b)| a * b);
        let budget = self.budget();
        let (effective, basis) = match (preset, budget) {
            (Some(effective), _) => (effective, None),
            (None, Some(budget)) => (effective_batch_for(budget) as u64, Some("vram.budget")),
            (None, None) => (DEFAULT_EFFECTIVE_BATCH, None),
        };
        let (stated, missing) = match (
            self.settings.is_explicit(BATCH),
            self.settings.is_explicit(ACCUMULATION),
        ) {
            (true, true) => return,
            (true, false) => (BATCH, ACCUMULATION),
            (false, true) => (ACCUMULATION, BATCH),
            (false, false) if preset.is_some() => return,
            (false, false) => {
                let (batch, accumulation, source) = match basis {
                    Some(key) => (effective, 1, Source::Derived(key.to_owned())),
                    None => (DEFAULT_BATCH, effective / DEFAULT_BATCH, Source::Default),
                };
                let mut fill = |key, number| {
                    let value = Value::Unsigned(number);
                    self.settings
                        .push(key, Layer::Default, value, source.clone());
                };
                fill(BATCH, batch);
                fill(ACCUMULATION, accumulation);
                return;
            }
        };
        let given = self.unsigned(stated);
        let filled = (effective / given).max(1);
        let layer = match preset {
            Some(_) => Layer::Adjusted,
            None => Layer::Default,
        };
        let source = Source::Derived(stated.to_owned());
        self.settings
            .push(missing, layer, Value::Unsigned(filled), source);
        let total = given * filled;
        self.notes.push(if total == effective {
            format!("{missing} was not given: {filled}, so that the effective batch is {effective}")
        } else {
            format!(
                "{missing} was not given: {filled}; the effective batch is {total}, because {stated} = {given} does not divide {effective}"
            )
        });
    }

    /// A training sequence is as long as the model has positions, unless told.
    pub(crate) fn complete_sequence(&mut self) -> Result<(), ConfigError> {
        const SEQUENCE: &str = "vram.max_seq_len";
        const POSITIONS: &str = "model.max_seq_len";
        let positions = self.stated(POSITIONS);
        let source = Source::Derived(POSITIONS.to_owned());
        if self.settings.effective(SEQUENCE).is_none() {
            self.settings
                .push(SEQUENCE, Layer::Default, positions.value, source);
            return Ok(());
        }
        if self.unsigned(SEQUENCE) <= self.unsigned(POSITIONS) {
            return Ok(());
        }
        if self.settings.is_explicit(SEQUENCE) {
            return Err(self.relation(
                SEQUENCE,
                POSITIONS,
                "a training sequence cannot be longer than the model's positions",
                format!(
                    "raise {POSITIONS}, or lower {SEQUENCE} to {}",
                    positions.value
                ),
            ));
        }
        let sequence = self.stated(SEQUENCE);
        self.notes.push(format!(
            "{sequence} is longer than the model's {} positions ({}): training sequences have {} tokens; set {POSITIONS} for more",
            positions.value, positions.source, positions.value
        ));
        self.settings
            .push(SEQUENCE, Layer::Adjusted, positions.value, source);
        Ok(())
    }

    /// A warm-up gives way to a length of the run that was stated in a stronger place: a flag
    /// that cuts a file's run short, as people do to try a config, must not need a second flag.
    /// Two that were stated in the same place contradict each other.
    pub(crate) fn fit_warmup(&mut self) -> Result<(), ConfigError> {
        const WARMUP: &str = "training.warmup_steps";
        const STEPS: &str = "training.max_steps";
        let steps = self.unsigned(STEPS);
        if self.unsigned(WARMUP) <= steps {
            return Ok(());
        }
        let layer = |key| self.settings.effective(key).map(|given| given.layer);
        if self.settings.is_explicit(WARMUP) && layer(WARMUP) >= layer(STEPS) {
            return Err(self.relation(
                WARMUP,
                STEPS,
                "warm-up cannot be longer than the run",
                format!("set {WARMUP} to {steps} or less, or raise {STEPS}"),
            ));
        }
        let shortened = steps / 10;
        // What nobody chose may give way in silence: the default's, and the demo's.
        let stated = self.stated(WARMUP);
        if ![Source::Default, Source::Preset(Preset::Demo.title())].contains(&stated.source) {
            self.notes.push(format!(
                "{stated} is longer than the run of {steps} steps: shortened to {shortened}"
            ));
        }
        let source = Source::Derived(STEPS.to_owned());
        self.settings
            .push(WARMUP, Layer::Adjusted, Value::Unsigned(shortened), source);
        Ok(())
    }

    pub(crate) fn check_learning_rates(&self) -> Result<(), ConfigError> {
        const MINIMUM: &str = "training.min_learning_rate";
        const PEAK: &str = "training.learning_rate";
        if self.float(MINIMUM) <= self.float(PEAK) {
            return Ok(());
        }
        Err(self.relation(
            MINIMUM,
            PEAK,
            "the schedule falls from the peak to the minimum",
            format!("lower {MINIMUM}; 0 is the default"),
        ))
    }

    /// The tokenizer must not produce tokens the model has no row for.
    pub(crate) fn check_vocabulary(&mut self, model: &ModelConfig) -> Result<(), ConfigError> {
        const TOKENIZER: &str = "data.tokenizer";
        const VOCABULARY: &str = "model.vocab_size";
        let tokenizer = self.text(TOKENIZER);
        let needed = match tokenizer.as_str() {
            "gpt2" => GPT2_VOCABULARY,
            "bytes" => BYTES_VOCABULARY,
            // A tokenizer in a file is counted when it is read.
            _ => return Ok(()),
        };
        if model.vocab_size() >= needed {
            return Ok(());
        }
        if self.settings.is_explicit(TOKENIZER) {
            return Err(self.relation(
                VOCABULARY,
                TOKENIZER,
                "the tokenizer has tokens beyond the model's vocabulary",
                format!("set {VOCABULARY} to {needed} or more"),
            ));
        }
        // Someone who only plans a model need not own a tokenizer for it.
        self.notes.push(format!(
            "{} is less than the {needed} tokens of the {tokenizer} tokenizer: to train, set {TOKENIZER} to one with that vocabulary",
            self.stated(VOCABULARY)
        ));
        Ok(())
    }
}
