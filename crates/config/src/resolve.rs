//! From layers to one config: which model, what its size supplies, and the
//! typed structs every later crate reads.
//!
//! Every value that is worked out on the way is pushed back into the layers, so
//! that the listing of origins shows what the config holds.

use std::path::PathBuf;

use cinch_architecture::{Architecture, Family, NamedSize, Number};

use crate::completion::Completion;
use crate::config::{
    BatchConfig, BucketChoice, Checkpointing, Config, DataConfig, GradientType, NamedModel,
    OutputConfig, Precision, Schedule, ShardedPart, StateFormat, TooLong, TrainingConfig,
    WorldConfig,
};
use crate::curriculum::Stage;
use crate::dialect::{NODES, Program, RANKS, SHARDING};
use crate::error::ConfigError;
use crate::pytorch::{
    FrozenWeights, Sharding, TorchAttention, TorchConfig, TorchOptimizer, TorchPrecision,
    TrainingLoop,
};
use crate::rules::{ACCUMULATION, BATCH, WARMUP_RATIO};
use crate::settings::{Explained, Settings, parse};
use crate::source::{Layer, Source};
use crate::tuning::{LoraConfig, LoraTargets, TuningConfig, names};
use crate::value::Value;

/// Settings that mean nothing without adapters.
const OF_ADAPTERS: [&str; 7] = [
    "lora.alpha",
    "lora.dropout",
    "lora.targets",
    "lora.modules_to_save",
    "lora.from",
    "lora.dtype",
    "lora.rank_stabilised",
];

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
                let family = resolution.config.model.family();
                resolution.settings.listing(Some(family))
            }
            Err(_) => self.listing(None),
        }
    }

    /// What was filled in or moved, in sentences. Empty where the settings do
    /// not resolve: then the error is the message.
    pub fn notes(&self) -> Vec<String> {
        let Ok(resolution) = Resolution::of(self) else {
            return Vec::new();
        };
        let world = self.world_note().into_iter();
        let not_read = self.not_read.iter();
        let not_read = not_read.map(|(why, files)| why.told(files));
        world.chain(not_read).chain(resolution.notes).collect()
    }
}

struct Resolution {
    config: Config,
    settings: Settings,
    notes: Vec<String>,
}

impl Resolution {
    fn of(given: &Settings) -> Result<Resolution, ConfigError> {
        let mut completion = Completion::new(given);
        let (mut model, named) = completion.model()?;
        let curriculum = completion.curriculum(&mut model)?;
        completion.tokenizer_of_weights();
        let batch = completion.batch(&model)?;
        let tuning = completion.tuning()?;
        let training = completion.training()?;
        let data = completion.data(&model, curriculum)?;
        let output = completion.output(&model, &named);
        let torch = completion.torch(&named)?;
        Ok(Resolution {
            config: Config {
                model,
                named,
                weights: completion.optional_text("model.weights"),
                batch,
                tuning,
                training,
                data,
                output,
                torch,
            },
            settings: completion.settings,
            notes: completion.notes,
        })
    }
}

impl Completion {
    /// The model that is named: a family in one of its sizes, or a shape that a hub id or a file
    /// gives.
    fn model(&mut self) -> Result<(Architecture, NamedModel), ConfigError> {
        let stated = self.stated("model.type");
        let foreign = self
            .settings
            .files
            .iter()
            .find(|file| file.program == Program::PyTorch);
        if let (Source::Default, Some(file)) = (&stated.source, foreign) {
            return Err(ConfigError::NoModel {
                path: file.path.clone(),
            });
        }
        let name = stated.value.to_string();
        let sized = Family::named(&name).filter(|family| !family.sizes.is_empty());
        let (architecture, named) = match sized {
            Some(family) => {
                let size = self.size_of(family)?;
                let architecture = (size.shape)();
                self.push_shape(&architecture, &family.title_of(size));
                let tokenizer = Value::Text(size.tokenizer.to_owned());
                let source = Source::Preset(family.title_of(size));
                self.settings
                    .push("data.tokenizer", Layer::Size, tokenizer, source.clone());
                for (key, value) in family.training {
                    let (_, value) = parse(key, value, &source)?;
                    self.settings.push(key, Layer::Size, value, source.clone());
                }
                (architecture, NamedModel::default())
            }
            None => {
                let found = cinch_architecture::find(&name, &self.settings.hub);
                let found = found.map_err(|source| ConfigError::Model {
                    origin: Box::new(stated.source.clone()),
                    source,
                })?;
                self.check_size_unstated(&found.title)?;
                self.push_shape(&found.architecture, &found.title);
                if let Some(folder) = &found.folder {
                    let path = folder.join("tokenizer.json");
                    if path.is_file() {
                        let tokenizer = Value::Text(path.display().to_string());
                        let source = Source::Preset(found.title.clone());
                        self.settings
                            .push("data.tokenizer", Layer::Size, tokenizer, source);
                    }
                }
                // Weights in 16 bits are computed with in that type.
                if let Some(saved) = found.weights {
                    let precision = Value::Text(saved.name().to_owned());
                    let source = Source::Preset(found.title.clone());
                    self.settings
                        .push("vram.precision", Layer::Size, precision, source);
                }
                let named = NamedModel {
                    title: Some(found.title),
                    weights: found.weights,
                    quantization: found.quantization,
                    found_in: Some(found.found_in),
                    folder: found.folder,
                };
                (found.architecture, named)
            }
        };
        self.check_keys_belong(architecture.family())?;
        let shape = self.shaped(architecture)?;
        if let Some(family) = sized {
            self.note_outweighed_size(family, &shape);
        }
        Ok((shape, named))
    }

    /// Weights that come with a tokenizer are read with it.
    fn tokenizer_of_weights(&mut self) {
        let Some(weights) = self.optional_text("model.weights") else {
            return;
        };
        let path = PathBuf::from(weights).join("tokenizer.json");
        if path.is_file() {
            let source = self.stated("model.weights").source;
            let tokenizer = Value::Text(path.display().to_string());
            self.settings
                .push("data.tokenizer", Layer::Size, tokenizer, source);
        }
    }

    fn size_of(&mut self, family: &'static Family) -> Result<&'static NamedSize, ConfigError> {
        const SIZE: &str = "model.size";
        if self.settings.effective(SIZE).is_none()
            && let Some(size) = family.usual_size()
        {
            let value = Value::Text(size.name.to_owned());
            self.settings
                .push(SIZE, Layer::Default, value, Source::Default);
        }
        let stated = self.stated(SIZE);
        let name = stated.value.to_string();
        family.size(&name).ok_or_else(|| {
            let names: Vec<&str> = family.sizes.iter().map(|size| size.name).collect();
            ConfigError::UnknownSize {
                model: family.name,
                suggestion: family.nearest_size(&name).map(str::to_owned),
                size: name,
                origin: Box::new(stated.source),
                known: names.join(", "),
            }
        })
    }

    /// What a named shape says, key by key, below everything that was stated.
    fn push_shape(&mut self, architecture: &Architecture, title: &str) {
        for setting in architecture.family().settings {
            let value = match (setting.get)(architecture) {
                Some(Number::Whole(number)) => Value::Unsigned(number),
                Some(Number::Real(number)) => Value::Float(number),
                Some(Number::Switch(is_on)) => Value::Bool(is_on),
                None => continue,
            };
            let source = Source::Preset(title.to_owned());
            self.settings.push(setting.key, Layer::Size, value, source);
        }
    }

    /// The shape with every number that was stated.
    fn shaped(&self, mut architecture: Architecture) -> Result<Architecture, ConfigError> {
        for setting in architecture.family().settings {
            let number = match self.value(setting.key) {
                Some(Value::Unsigned(number)) => Number::Whole(*number),
                Some(Value::Float(number)) => Number::Real(*number),
                Some(Value::Bool(is_on)) => Number::Switch(*is_on),
                _ => continue,
            };
            // A rate that nobody stated stays what the shape says of each of its parts.
            if (setting.get)(&architecture) != Some(number) {
                (setting.set)(&mut architecture, number);
            }
        }
        self.check_heads(&architecture)?;
        self.check_selection(&architecture)?;
        self.check_embedder(&architecture)?;
        Ok(architecture)
    }

    fn batch(&mut self, model: &Architecture) -> Result<BatchConfig, ConfigError> {
        let micro_is_free =
            !self.settings.is_explicit(BATCH) && !self.settings.is_explicit(ACCUMULATION);
        self.complete_batch()?;
        self.complete_sequence(model)?;
        let (_, buckets) = self.buckets()?;
        Ok(BatchConfig {
            batch_size: self.count(BATCH),
            accumulation: self.count(ACCUMULATION),
            world: self.world()?,
            micro_is_free,
            seq_len: self.count("vram.max_seq_len"),
            buckets,
            precision: self.precision(),
            checkpointing: self.checkpointing(model)?,
            offload: matches!(self.value("vram.use_cpu_offload"), Some(Value::Bool(true))),
            offload_frozen: matches!(self.value("vram.offload_frozen"), Some(Value::Bool(true))),
            offload_activations: self.offload_activations(model)?,
            states: self.states(),
            gradients: match self.text("vram.gradients").as_str() {
                "fp32" => GradientType::Fp32,
                "weights" => GradientType::Weights,
                _ => GradientType::Auto,
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

    /// Who trains together. Machines have the same number of ranks each.
    fn world(&self) -> Result<WorldConfig, ConfigError> {
        let ranks = self.num_ranks() as usize;
        let nodes = self.count(NODES);
        if !ranks.is_multiple_of(nodes) {
            let per_node = (ranks / nodes).max(1);
            let fit = format!(
                "{} ranks fit {nodes} machines",
                per_node.saturating_mul(nodes)
            );
            return Err(self.relation(
                RANKS,
                NODES,
                "every machine has as many ranks as the others",
                fit,
            ));
        }
        Ok(WorldConfig {
            ranks,
            nodes,
            shard: match self.text(SHARDING).as_str() {
                "zero1" => ShardedPart::Optimizer,
                "zero2" => ShardedPart::Gradients,
                "zero3" | "fsdp" => ShardedPart::Weights,
                _ => ShardedPart::None,
            },
            link: self.optional_text("world.link"),
            network: self.optional_text("world.network"),
        })
    }

    /// To which lengths rows are padded besides the longest.
    fn buckets(&self) -> Result<(BucketChoice, Vec<usize>), ConfigError> {
        const BUCKETS: &str = "data.buckets";
        let text = self.text(BUCKETS);
        match text.as_str() {
            "auto" => return Ok((BucketChoice::Auto, Vec::new())),
            "off" => return Ok((BucketChoice::Off, Vec::new())),
            _ => {}
        }
        let lengths = text.split([',', ' ']).filter(|word| !word.is_empty());
        let lengths = lengths.map(|word| word.parse().ok().filter(|length| *length > 0));
        match lengths.collect::<Option<Vec<usize>>>() {
            Some(lengths) if !lengths.is_empty() => Ok((BucketChoice::Stated, lengths)),
            _ => Err(ConfigError::WrongValue {
                origin: Box::new(self.stated(BUCKETS).source),
                key: BUCKETS.to_owned(),
                found: text,
                accepted: "auto, off, or lengths such as 128,256,512".to_owned(),
                hint: None,
            }),
        }
    }

    /// What was stated, or else what a file says of PyTorch.
    fn precision(&mut self) -> Precision {
        let given = self.settings.effective("pytorch.precision").cloned();
        let torch = given.and_then(|given| match &given.value {
            Value::Text(word) => Some((TorchPrecision::named(word)?, given)),
            _ => None,
        });
        if let (Some((torch, given)), false) = (torch, self.settings.is_stated("vram.precision")) {
            // The value that holds is shown with the place that it comes from.
            let value = Value::Text(torch.compute().name().to_owned());
            let layer = given.layer.max(Layer::Preset);
            self.settings
                .push("vram.precision", layer, value, given.source);
        }
        self.stated_precision()
    }

    /// What was stated, or else what a file says of PyTorch's AdamW.
    fn states(&mut self) -> StateFormat {
        const STATES: &str = "vram.optimizer_states";
        let given = self.settings.effective("pytorch.optimizer").cloned();
        let is_eight_bit = |value: &Value| {
            let optimizer = TorchOptimizer::named(&value.to_string());
            optimizer.is_some_and(TorchOptimizer::is_eight_bit)
        };
        if let Some(given) = given.filter(|given| is_eight_bit(&given.value))
            && !self.settings.is_explicit(STATES)
        {
            // The value that holds is shown with the place that it comes from.
            let value = Value::Text(StateFormat::EightBit.name().to_owned());
            self.settings.push(STATES, given.layer, value, given.source);
        }
        match self.text(STATES).as_str() {
            "8bit" => StateFormat::EightBit,
            "weights" => StateFormat::Weights,
            _ => StateFormat::Fp32,
        }
    }

    fn stated_precision(&self) -> Precision {
        match self.text("vram.precision").as_str() {
            "bf16" => Precision::Bf16,
            "fp16" => Precision::Fp16,
            _ => Precision::Fp32,
        }
    }

    fn checkpointing(&self, model: &Architecture) -> Result<Checkpointing, ConfigError> {
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

    /// Where fewer blocks are recomputed, it is all of them: how many is often the planner's choice.
    fn offload_activations(&self, model: &Architecture) -> Result<usize, ConfigError> {
        const KEY: &str = "vram.offload_activations";
        match self.value(KEY) {
            Some(Value::Unsigned(blocks)) if *blocks > model.num_blocks() as u64 => Err(self
                .relation(
                    KEY,
                    "model.n_layers",
                    "no more blocks can have activations in host memory than there are",
                    format!("write {} for all", model.num_blocks()),
                )),
            Some(Value::Unsigned(blocks)) => Ok(*blocks as usize),
            _ => Ok(0),
        }
    }

    /// Passes over the data, where steps were not said as strongly.
    pub(crate) fn epochs(&self) -> Option<f64> {
        const EPOCHS: &str = "training.epochs";
        const STEPS: &str = "training.max_steps";
        let layer = |key| self.settings.effective(key).map(|given| given.layer);
        let said = layer(EPOCHS)?;
        let holds = !self.settings.is_explicit(STEPS) || Some(said) > layer(STEPS);
        holds.then(|| self.float(EPOCHS))
    }

    /// The share of the run that warm-up takes, where its steps were not said as strongly. None of
    /// them are as good as not said.
    pub(crate) fn warmup_ratio(&self) -> Option<f64> {
        const STEPS: &str = "training.warmup_steps";
        let ratio = self.settings.effective(WARMUP_RATIO)?.layer;
        let steps = self.settings.effective(STEPS)?;
        let follows = matches!(&steps.source, Source::Derived(key) if key == WARMUP_RATIO);
        let holds =
            follows || ratio > steps.layer || ratio == steps.layer && self.unsigned(STEPS) == 0;
        holds.then(|| self.float(WARMUP_RATIO))
    }

    /// Epochs between evaluations, where steps between them were not said more strongly.
    fn eval_epochs(&self) -> Option<f64> {
        const EPOCHS: &str = "training.eval_epochs";
        let layer = |key| self.settings.effective(key).map(|given| given.layer);
        let holds = layer(EPOCHS)? >= layer("training.eval_interval")?;
        holds.then(|| self.float(EPOCHS))
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
                "onecycle" => Schedule::OneCycle,
                _ => Schedule::Linear,
            },
            max_steps: self.unsigned("training.max_steps"),
            epochs: self.epochs(),
            warmup_steps: self.unsigned("training.warmup_steps"),
            warmup_ratio: self.warmup_ratio(),
            weight_decay: self.float("training.weight_decay"),
            adam_beta1: self.float("training.adam_beta1"),
            adam_beta2: self.float("training.adam_beta2"),
            adam_epsilon: self.float("training.adam_epsilon"),
            max_grad_norm: self.float("training.max_grad_norm"),
            label_smoothing: self.float("training.label_smoothing"),
            eval_interval: self.unsigned("training.eval_interval"),
            eval_epochs: self.eval_epochs(),
            patience: self.unsigned("training.patience"),
            save_top: self.count("training.save_top"),
            eval_batches: self.count("training.eval_batches"),
            save_interval: self.unsigned("training.save_interval"),
            save_total_limit: self.count("training.save_total_limit"),
            logging_steps: self.unsigned("training.logging_steps"),
            seed: self.unsigned("training.seed"),
            sample_tokens: self.count("training.sample_tokens"),
            sample_prompt: match self.value("training.sample_prompt") {
                Some(prompt) => prompt.to_string(),
                None => String::new(),
            },
        })
    }

    fn torch(&self, named: &NamedModel) -> Result<TorchConfig, ConfigError> {
        let word = |key: &'static str| match self.value(key) {
            Some(Value::Text(text)) => Some(text.as_str()),
            _ => None,
        };
        let on = |key: &str| matches!(self.value(key), Some(Value::Bool(true)));
        let usual = TorchConfig::default();
        let mut assumed: Vec<String> = Vec::new();
        let precision = word("pytorch.precision").and_then(TorchPrecision::named);
        let precision = precision.unwrap_or_else(|| {
            let is_stated = self.settings.is_stated("vram.precision");
            let stated = is_stated.then(|| self.stated_precision());
            let (precision, note) = TorchPrecision::usual(stated, named.weights);
            assumed.extend(note);
            precision
        });
        Ok(TorchConfig {
            precision,
            attention: word("pytorch.attention")
                .and_then(TorchAttention::named)
                .unwrap_or(usual.attention),
            optimizer: word("pytorch.optimizer").and_then(TorchOptimizer::named),
            alloc_conf: word("pytorch.alloc_conf").map(str::to_owned),
            training_loop: word("pytorch.loop")
                .and_then(TrainingLoop::named)
                .unwrap_or(usual.training_loop),
            prepared: on("pytorch.prepared"),
            whole_in_float32: word("pytorch.whole_dtype") == Some("fp32"),
            reentrant: on("pytorch.reentrant"),
            packing: on("pytorch.packing"),
            liger: word("pytorch.liger")
                .filter(|kernels| *kernels != "none")
                .map(str::to_owned),
            sharding: word(SHARDING)
                .and_then(Sharding::named)
                .unwrap_or(usual.sharding),
            ranks: self.value(RANKS).map(|_| self.unsigned(RANKS)),
            assumed,
        })
    }

    fn is_on(&self, key: &str) -> bool {
        matches!(self.value(key), Some(Value::Bool(true)))
    }

    fn optional_text(&self, key: &str) -> Option<String> {
        match self.value(key) {
            Some(Value::Text(text)) => Some(text.clone()),
            _ => None,
        }
    }

    fn tuning(&self) -> Result<TuningConfig, ConfigError> {
        let frozen = match self.value("lora.quantization") {
            Some(Value::Text(word)) => FrozenWeights::named(word).unwrap_or_default(),
            _ => FrozenWeights::default(),
        };
        let double = self.value("lora.double_quantization");
        Ok(TuningConfig {
            lora: self.lora()?,
            frozen,
            double_quantization: matches!(double, Some(Value::Bool(true))),
            without_masters: !self.is_on("training.master_weights"),
        })
    }

    /// Adapters are trained where a file says so, or a rank is given and nothing says otherwise.
    fn lora(&self) -> Result<Option<LoraConfig>, ConfigError> {
        let rank = self.value("lora.rank").map(|_| self.unsigned("lora.rank"));
        let asked = match self.value("lora.adapter") {
            Some(Value::Text(word)) => word == "lora" || self.is_typed("lora.rank"),
            _ => rank.is_some(),
        };
        let without_rank = |key| ConfigError::AdapterWithoutRank {
            adapter: Box::new(self.stated(key)),
        };
        if !asked {
            // A file may hold what is not used; who types it means it.
            let mut of_adapters = OF_ADAPTERS.into_iter();
            let typed = of_adapters.find(|key| rank.is_none() && self.is_typed(key));
            return typed.map_or(Ok(None), |key| Err(without_rank(key)));
        }
        let Some(rank) = rank else {
            return Err(without_rank("lora.adapter"));
        };
        Ok(Some(LoraConfig {
            rank,
            // Twice the rank, as most people choose it.
            alpha: match self.value("lora.alpha") {
                Some(_) => self.float("lora.alpha"),
                None => 2.0 * rank as f64,
            },
            rank_stabilised: matches!(self.value("lora.rank_stabilised"), Some(Value::Bool(true))),
            dropout: self.float("lora.dropout"),
            targets: LoraTargets::parse(&self.text("lora.targets")),
            modules_to_save: self
                .optional_text("lora.modules_to_save")
                .map(|text| names(&text))
                .unwrap_or_default(),
            from: self.optional_text("lora.from"),
            in_float32: self.text("lora.dtype") == "fp32",
        }))
    }

    /// The stages that the run trains. A number that was typed holds for all of them.
    fn curriculum(&self, model: &mut Architecture) -> Result<Vec<Stage>, ConfigError> {
        const CURRICULUM: &str = "data.curriculum";
        let Some(text) = self.optional_text(CURRICULUM) else {
            return match self.optional_text("data.stage") {
                Some(stage) => Err(self.no_such_stage(stage, &[])),
                None => Ok(Vec::new()),
            };
        };
        let stages: Result<Vec<Stage>, _> = serde_json::from_str(&text);
        let mut stages = stages.map_err(|error| ConfigError::WrongValue {
            origin: Box::new(self.stated(CURRICULUM).source),
            key: CURRICULUM.to_owned(),
            found: text.clone(),
            accepted: "a list of stages, such as [{\"name\": \"01\", \"n_negatives\": 8}]"
                .to_owned(),
            hint: Some(error.to_string()),
        })?;
        if let Some(word) = self.optional_text("data.stage") {
            let known: Vec<String> = stages.iter().map(|stage| stage.name.clone()).collect();
            stages.retain(|stage| stage.is_called(&word));
            if stages.is_empty() {
                return Err(self.no_such_stage(word, &known));
            }
        }
        let negatives = match self.value("model.negatives") {
            Some(Value::Unsigned(number)) => *number,
            _ => return Ok(stages),
        };
        let positives = self.unsigned("data.positives");
        for stage in &mut stages {
            if self.is_typed("model.negatives") || stage.n_negatives.is_none() {
                stage.n_negatives = Some(negatives);
            }
            if self.is_typed("data.positives") || stage.n_positives.is_none() {
                stage.n_positives = Some(positives);
            }
        }
        let negatives = stages.iter().filter_map(|stage| stage.n_negatives);
        *model = model.with_stages(negatives.collect());
        Ok(stages)
    }

    fn no_such_stage(&self, found: String, known: &[String]) -> ConfigError {
        ConfigError::WrongValue {
            origin: Box::new(self.stated("data.stage").source),
            key: "data.stage".to_owned(),
            found,
            accepted: match known {
                [] => "a stage of a curriculum, and none is given".to_owned(),
                known => format!("one of {}", known.join(", ")),
            },
            hint: known.is_empty().then(|| {
                "a curriculum is a folder of stages beside a configuration: --config-path conf \
                 with conf/text_curriculum/01_stage.yaml"
                    .to_owned()
            }),
        }
    }

    fn data(
        &mut self,
        model: &Architecture,
        curriculum: Vec<Stage>,
    ) -> Result<DataConfig, ConfigError> {
        self.check_vocabulary(model)?;
        Ok(DataConfig {
            source: self.path("data.source"),
            text_column: self.text("data.text_column"),
            tokenizer: self.text("data.tokenizer"),
            val_split: self.float("data.val_split"),
            packing: self.is_on("data.packing"),
            too_long: match self.text("data.too_long").as_str() {
                "drop" => TooLong::Drop,
                "error" => TooLong::Error,
                _ => TooLong::Truncate,
            },
            buckets: self.buckets()?.0,
            max_samples: self
                .value("data.max_samples")
                .map(|_| self.count("data.max_samples")),
            positives: self.count("data.positives"),
            curriculum,
            cluster_epoch: self.unsigned("data.cluster_epoch"),
            clusters: self
                .value("data.clusters")
                .map(|_| self.count("data.clusters")),
            train_on_inputs: self.is_on("data.train_on_inputs"),
            cache_dir: self.path("data.cache_dir"),
        })
    }

    fn output(&mut self, model: &Architecture, named: &NamedModel) -> OutputConfig {
        const OUTPUT: &str = "output.output_dir";
        let output_dir = self.path(OUTPUT).unwrap_or_else(|| {
            let size = model.size().map(|size| size.name);
            let name = match (&named.title, size) {
                (Some(title), _) => title.replace(['/', '\\'], "-"),
                (None, Some(size)) if size == model.name() => size.to_owned(),
                (None, size) => format!("{}-{}", model.name(), size.unwrap_or("custom")),
            };
            let path = PathBuf::from("runs").join(name);
            let source = Source::Derived("model.size".to_owned());
            let value = Value::Path(path.clone());
            self.settings.push(OUTPUT, Layer::Default, value, source);
            path
        });
        OutputConfig { output_dir }
    }
}
