//! The rules between settings: what is filled in from what, what gives way to
//! what, and what cannot stand together.
//!
//! A value the user stated is moved by no rule without an error or a note.

use std::path::Path;

use cinch_architecture::{Architecture, Family, Number, families};

use crate::completion::Completion;
use crate::config::share_of;
use crate::dialect::{NODES, Program, RANKS};
use crate::error::ConfigError;
use crate::preset::Preset;
use crate::registry::SETTINGS;
use crate::source::{Layer, Source};
use crate::value::Value;

/// Sequences per optimizer step when nobody says otherwise, as 8 × 2.
const DEFAULT_EFFECTIVE_BATCH: u64 = 16;
const DEFAULT_BATCH: u64 = 8;

/// Tokens of a sequence where nobody says it and the model has no positions of its own.
const USUAL_LENGTH: u64 = 1024;

/// Tokens that a tokenizer needs which is named and not read: GPT-2's byte pairs, bytes with an end
/// of text, and the fewest of one that is trained: bytes and four special tokens.
const TOKENIZERS: [(&str, u64); 3] = [("gpt2", 50257), ("bytes", 257), ("train", 260)];

pub(crate) const BATCH: &str = "vram.batch_size";
pub(crate) const WARMUP_RATIO: &str = "training.warmup_ratio";
pub(crate) const ACCUMULATION: &str = "vram.gradient_accumulation_steps";

/// An effective batch that nobody cut yet, over ranks: the largest micro batch that is not above
/// the usual one, and its accumulation.
fn divided(effective: u64, usual: u64, ranks: u64) -> Result<(u64, u64), ConfigError> {
    if !effective.is_multiple_of(ranks) {
        return Err(ConfigError::WorldSize {
            ranks,
            effective,
            nearby: nearby_ranks(effective, ranks),
        });
    }
    let each = effective / ranks;
    let micro = (1..=usual.min(each)).rev();
    let micro = micro.into_iter().find(|micro| each.is_multiple_of(*micro));
    let micro = micro.unwrap_or(1);
    Ok((micro, each / micro))
}

/// The numbers of ranks next to one that does not divide a batch, in words.
pub(crate) fn nearby_ranks(batch: u64, ranks: u64) -> String {
    let divides = |ranks: &u64| batch.is_multiple_of(*ranks);
    let below = (1..ranks.min(batch + 1)).rev().find(divides);
    let above = (ranks + 1..=batch).find(divides);
    let words: Vec<String> = below
        .into_iter()
        .chain(above)
        .map(|n| n.to_string())
        .collect();
    words.join(" or ")
}

impl Completion {
    pub(crate) fn check_keys_belong(&self, family: &Family) -> Result<(), ConfigError> {
        // Someone who names a model for another program's file wants that file's way of training,
        // not its shape.
        let foreign = self.is_typed("model.type")
            && self
                .settings
                .files
                .iter()
                .any(|file| file.program == Program::PyTorch);
        let stray = SETTINGS.iter().find(|setting| {
            let stated = match foreign {
                true => self.is_typed(setting.key),
                false => self.settings.is_explicit(setting.key),
            };
            stated && !setting.belongs_to(family)
        });
        let Some(setting) = stray else {
            return Ok(());
        };
        let owners: Vec<&str> = setting.families.iter().map(|family| family.name).collect();
        Err(ConfigError::KeyOfOtherModel {
            key: setting.key,
            origin: Box::new(self.stated(setting.key).source),
            belongs_to: owners.join(" or "),
            model: family.name,
            model_origin: Box::new(self.stated("model.type").source),
        })
    }

    /// A size asked for by name yields to any part of the shape that is stated, even by a file
    /// when the size was a flag. That must not go unsaid; a part stated beside the size, or in a
    /// stronger place, is what the user meant.
    pub(crate) fn note_outweighed_size(&mut self, family: &Family, model: &Architecture) {
        let stated = family.size(&self.stated("model.size").value.to_string());
        let built = model.size().map(|size| size.name);
        if !self.settings.is_explicit("model.size") || built == stated.map(|size| size.name) {
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

    /// A shape that its name or file gives has no size besides.
    pub(crate) fn check_size_unstated(&self, title: &str) -> Result<(), ConfigError> {
        if !self.settings.is_explicit("model.size") {
            return Ok(());
        }
        let families: Vec<&str> = families()
            .filter(|family| family.sizes.len() > 1)
            .map(|family| family.name)
            .collect();
        Err(ConfigError::SizeOfNamedModel {
            origin: Box::new(self.stated("model.size").source),
            title: title.to_owned(),
            families: families.join(", "),
        })
    }

    pub(crate) fn check_heads(&self, model: &Architecture) -> Result<(), ConfigError> {
        let number = |key: &str| model.get(key).and_then(Number::whole);
        let (Some(width), Some(heads)) = (number("model.d_model"), number("model.n_heads")) else {
            return Ok(());
        };
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

    /// Key heads share the query heads, and the fewest keys of a query are not more than the most.
    pub(crate) fn check_selection(&self, model: &Architecture) -> Result<(), ConfigError> {
        let number = |key: &str| model.get(key).and_then(Number::whole);
        if let (Some(heads), Some(key_heads)) =
            (number("model.n_heads"), number("model.n_kv_heads"))
            && !heads.is_multiple_of(key_heads)
        {
            return Err(self.relation(
                "model.n_kv_heads",
                "model.n_heads",
                "each head of keys serves as many heads",
                format!("set model.n_kv_heads to a divisor of {heads}"),
            ));
        }
        let (Some(least), Some(most)) = (number("model.k_min"), number("model.k_max")) else {
            return Ok(());
        };
        if least <= most {
            return Ok(());
        }
        Err(self.relation(
            "model.k_min",
            "model.k_max",
            "a query cannot have more keys at the least than at the most",
            format!("set model.k_min to {most} or less, or model.k_max to {least} or more"),
        ))
    }

    /// A text takes no more experts than there are, and titles are read by the encoder of all texts.
    pub(crate) fn check_embedder(&self, model: &Architecture) -> Result<(), ConfigError> {
        let number = |key: &str| model.get(key).and_then(Number::whole);
        if let (Some(taken), Some(experts)) = (number("model.top_k"), number("model.n_experts"))
            && taken > experts
        {
            return Err(self.relation(
                "model.top_k",
                "model.n_experts",
                "a text cannot take more experts than there are",
                format!(
                    "set model.top_k to {experts} or less, or model.n_experts to {taken} or more"
                ),
            ));
        }
        if let (Some(titles), Some(positions)) =
            (number("model.title_length"), number("model.max_seq_len"))
            && titles > positions
        {
            return Err(self.relation(
                "model.title_length",
                "model.max_seq_len",
                "a title cannot be longer than the encoder's positions",
                format!("set model.title_length to {positions} or less"),
            ));
        }
        Ok(())
    }

    /// Fills in whichever of micro batch and accumulation was not stated, so
    /// that their product stays what it was meant to be: the preset's, or 16.
    pub(crate) fn complete_batch(&mut self) -> Result<(), ConfigError> {
        let weaker = |key| match self.settings.effective_below(key, Layer::File) {
            Some(assignment) => match assignment.value {
                Value::Unsigned(number) => Some(number),
                _ => None,
            },
            None => None,
        };
        let preset = weaker(BATCH).zip(weaker(ACCUMULATION));
        let usual = preset.map_or(DEFAULT_BATCH, |(micro, _)| micro);
        let preset = preset.map(|(a, b)| a * b);
        let effective = preset.unwrap_or(DEFAULT_EFFECTIVE_BATCH);
        // The batch of another program's file is that of each GPU, also where nobody states it.
        let files = self.settings.files.iter();
        let foreign = files.clone().any(|file| file.program == Program::PyTorch);
        let ranks = match foreign {
            true => 1,
            false => self.num_ranks(),
        };
        // Where a program is silent, its own default holds and no rule of ours.
        let decided = |key| self.settings.program_says(key).is_some();
        let (stated, missing) = match (
            self.settings.is_explicit(BATCH),
            self.settings.is_explicit(ACCUMULATION),
        ) {
            (true, true) => return Ok(()),
            (true, false) if decided(ACCUMULATION) => return Ok(()),
            (false, true) if decided(BATCH) => return Ok(()),
            (true, false) => (BATCH, ACCUMULATION),
            (false, true) => (ACCUMULATION, BATCH),
            (false, false) if decided(BATCH) && decided(ACCUMULATION) => return Ok(()),
            (false, false) if preset.is_some() && ranks == 1 => return Ok(()),
            (false, false) => {
                let (micro, accumulation) = divided(effective, usual, ranks)?;
                let layer = match preset {
                    Some(_) => Layer::Adjusted,
                    None => Layer::Default,
                };
                let source = || match ranks {
                    1 => Source::Default,
                    _ => Source::Derived(RANKS.to_owned()),
                };
                for (key, number) in [(BATCH, micro), (ACCUMULATION, accumulation)] {
                    let value = Value::Unsigned(number);
                    self.settings.push(key, layer, value, source());
                }
                return Ok(());
            }
        };
        let given = self.unsigned(stated);
        let filled = (effective / given.saturating_mul(ranks)).max(1);
        let layer = match preset {
            Some(_) => Layer::Adjusted,
            None => Layer::Default,
        };
        let source = Source::Derived(stated.to_owned());
        self.settings
            .push(missing, layer, Value::Unsigned(filled), source);
        let total = given.saturating_mul(filled).saturating_mul(ranks);
        self.notes.push(if total == effective {
            format!("{missing} was not given: {filled}, so that the effective batch is {effective}")
        } else {
            format!(
                "{missing} was not given: {filled}; the effective batch is {total}, because {} does not divide {effective}",
                match ranks {
                    1 => format!("{stated} = {given}"),
                    ranks => format!("{stated} = {given} on {ranks} ranks"),
                }
            )
        });
        Ok(())
    }

    /// How many train together: one on each machine, where only those are counted.
    pub(crate) fn num_ranks(&self) -> u64 {
        match self.value(RANKS) {
            Some(_) => self.unsigned(RANKS),
            None => self.unsigned(NODES),
        }
    }

    /// The sequence of a model of images has one length, whatever presets and programs say.
    fn complete_images(
        &mut self,
        key: &'static str,
        tokens: u64,
        model: &Architecture,
    ) -> Result<(), ConfigError> {
        let stated = self.settings.effective(key).is_some();
        if stated && self.unsigned(key) == tokens {
            return Ok(());
        }
        if self.settings.is_explicit(key) {
            return Err(ConfigError::OneLength {
                length: Box::new(self.stated(key)),
                title: model.family().title,
                tokens,
            });
        }
        let layer = if stated {
            Layer::Adjusted
        } else {
            Layer::Default
        };
        let value = Value::Unsigned(tokens);
        self.settings.push(key, layer, value, Source::Default);
        Ok(())
    }

    /// A training sequence is as long as the model has positions, unless told. Where the shape is
    /// not one of settings, or has no positions, it is a usual length.
    pub(crate) fn complete_sequence(&mut self, model: &Architecture) -> Result<(), ConfigError> {
        const SEQUENCE: &str = "vram.max_seq_len";
        const POSITIONS: &str = "model.max_seq_len";
        let is_setting = model.get(POSITIONS).is_some() && model.is_trained();
        let positions = model.positions();
        if let Some(tokens) = positions.filter(|_| model.has_one_length()) {
            return self.complete_images(SEQUENCE, tokens, model);
        }
        if self.settings.effective(SEQUENCE).is_none() {
            let (length, source) = match positions.filter(|_| is_setting) {
                Some(positions) => (positions, Source::Derived(POSITIONS.to_owned())),
                None => {
                    let length = positions.map_or(USUAL_LENGTH, |most| most.min(USUAL_LENGTH));
                    (length, Source::Default)
                }
            };
            let value = Value::Unsigned(length);
            self.settings.push(SEQUENCE, Layer::Default, value, source);
            return Ok(());
        }
        let Some(positions) = positions.filter(|most| self.unsigned(SEQUENCE) > *most) else {
            return Ok(());
        };
        if self.settings.is_explicit(SEQUENCE) {
            if is_setting {
                return Err(self.relation(
                    SEQUENCE,
                    POSITIONS,
                    "a training sequence cannot be longer than the model's positions",
                    format!("raise {POSITIONS}, or lower {SEQUENCE} to {positions}"),
                ));
            }
            return Err(ConfigError::BeyondPositions {
                length: Box::new(self.stated(SEQUENCE)),
                positions,
            });
        }
        let sequence = self.stated(SEQUENCE);
        self.notes.push(format!(
            "{sequence} is longer than the model's {positions} positions: training sequences have {positions} tokens; set {POSITIONS} for more"
        ));
        let source = Source::Derived(POSITIONS.to_owned());
        let value = Value::Unsigned(positions);
        self.settings.push(SEQUENCE, Layer::Adjusted, value, source);
        Ok(())
    }

    /// A warm-up gives way to a length of the run that was stated in a stronger place: a flag
    /// that cuts a file's run short, as people do to try a config, must not need a second flag.
    /// Two that were stated in the same place contradict each other.
    pub(crate) fn fit_warmup(&mut self) -> Result<(), ConfigError> {
        const WARMUP: &str = "training.warmup_steps";
        const STEPS: &str = "training.max_steps";
        if self.epochs().is_some() {
            // How many steps they are is known with the data.
            return Ok(());
        }
        let steps = self.unsigned(STEPS);
        if let Some(ratio) = self.warmup_ratio() {
            let source = Source::Derived(WARMUP_RATIO.to_owned());
            let value = Value::Unsigned(share_of(steps, ratio));
            self.settings.push(WARMUP, Layer::Adjusted, value, source);
            return Ok(());
        }
        if self.unsigned(WARMUP) <= steps {
            return Ok(());
        }
        // Another program's steps are its own business.
        if self
            .settings
            .files
            .iter()
            .any(|file| file.program == Program::PyTorch)
        {
            let source = Source::Derived(STEPS.to_owned());
            let value = Value::Unsigned(steps);
            self.settings.push(WARMUP, Layer::Adjusted, value, source);
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
    pub(crate) fn check_vocabulary(&mut self, model: &Architecture) -> Result<(), ConfigError> {
        const TOKENIZER: &str = "data.tokenizer";
        const VOCABULARY: &str = "model.vocab_size";
        // Ids that are there already need no tokenizer, and are counted when they are read.
        if let Some(Value::Path(source)) = self.value("data.source")
            && is_token_file(source)
        {
            return Ok(());
        }
        let tokenizer = self.text(TOKENIZER);
        // A tokenizer in a file is counted when it is read.
        let Some(&(_, needed)) = TOKENIZERS.iter().find(|(name, _)| *name == tokenizer) else {
            return Ok(());
        };
        // What a file or an id describes has no vocabulary to set; training counts its tokens.
        let is_named = self.value(VOCABULARY).is_none();
        if model.vocabulary() >= needed || !model.is_trained() || is_named {
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

/// Whether a path holds token ids rather than text: `train.bin` in a folder, or such a file.
fn is_token_file(path: &Path) -> bool {
    match path.is_dir() {
        true => path.join("train.bin").is_file(),
        false => path.extension().is_some_and(|ending| ending == "bin"),
    }
}
