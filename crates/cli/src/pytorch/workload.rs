//! From flags, files and environment to a run in PyTorch, each guess said.

use std::path::Path;

use cinch_config::{
    Checkpointing, Config, ModelConfig, ModelKind, Precision, Settings, Source, StateFormat,
};
use cinch_torch::allocator::AllocatorConfig;
use cinch_torch::change::Change;
use cinch_torch::convention::Convention;
use cinch_torch::eager::checkpoint;
use cinch_torch::eager::optimizer::{Execution, Optimizer};
use cinch_torch::eager::training;
use cinch_torch::model::gpt2::Gpt2Config;
use cinch_torch::model::gsa::GsaConfig;
use cinch_torch::model::hugging_face;
use cinch_torch::model::mamba::MambaConfig;
use cinch_torch::model::mask::Attention;
use cinch_torch::model::module::Lora;
use cinch_torch::model::mu::MuConfig;
use cinch_torch::model::naics::NaicsConfig;
use cinch_torch::model::{Architecture, Workload};
use serde_json::Map;

use crate::args::{
    SettingArguments, TorchArguments, TorchAttention, TorchLoop, TorchOptimizer, TorchPrecision,
};
use crate::failure::usage;

/// Where PyTorch itself looks for the allocator's settings, the newer name first.
const VARIABLES: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// Tokens of a sequence where nothing says it and the model has no settings of cinch.
const LENGTH: u64 = 1024;

/// The guide's number of negatives in its first stage.
const NEGATIVES: u64 = 24;

/// The seed projects' own models, besides Mamba.
const OWN_MODELS: [&str; 3] = ["gsa", "mu", "naics"];

/// A run, and how it came about.
pub struct Run {
    /// The model, for people.
    pub name: String,
    pub workload: Workload,
    /// The allocator's settings as text; empty for PyTorch's defaults.
    pub alloc_conf: String,
    pub settings: Settings,
    pub config: Config,
    /// What nobody said, in sentences.
    pub assumed: Vec<String>,
}

impl Run {
    pub fn read(settings: &SettingArguments, torch: &TorchArguments) -> anyhow::Result<Self> {
        refuse_other_settings(settings)?;
        let mut assumed = Vec::new();
        let Model {
            name,
            architecture,
            settings,
            is_of_settings,
        } = Model::read(settings, torch, &mut assumed)?;
        let config = settings.resolve()?;
        assumed.extend(settings.notes());
        if torch.negatives.is_some() && !matches!(architecture, Architecture::Naics(_)) {
            return Err(usage(format!(
                "--negatives is about the model naics, not about {name}\nhint: leave it out"
            )));
        }
        let (alloc_conf, origin) = alloc_conf(torch.alloc_conf.as_deref());
        if let Some(variable) = origin {
            assumed.push(format!(
                "the allocator's settings are those of {variable}: {alloc_conf}"
            ));
        }
        let mut workload = Workload {
            length: match is_of_settings || settings.is_explicit("vram.max_seq_len") {
                true => config.batch.seq_len as u64,
                false => usual_length(&architecture, &mut assumed),
            },
            batch: config.batch.batch_size as u64,
            attention: match torch.attention {
                None | Some(TorchAttention::Sdpa) => Attention::Sdpa,
                Some(TorchAttention::Eager) => Attention::Eager,
            },
            checkpoints: checkpoints(&architecture, &settings, &config)?,
            lora: None,
            recipe: training::Recipe {
                precision: precision(torch.torch_precision, &config),
                optimizer: optimizer(torch.optimizer, &config),
                accumulation: config.batch.accumulation as u32,
                clips_gradients: config.training.max_grad_norm > 0.0,
            },
            memory_limit: None,
            allocator: AllocatorConfig::parse(&alloc_conf)?,
            architecture,
        };
        if let Some(rank) = torch.lora_rank {
            workload.lora = Some(adapters(&workload, rank)?);
        }
        if !settings.is_explicit("vram.batch_size") {
            assumed.push(format!(
                "a batch of {} × {}: say --batch-size and --grad-accum",
                workload.batch, workload.recipe.accumulation
            ));
        }
        if torch.training_loop == Some(TorchLoop::Trainer) {
            let stated = torch.optimizer.map(|_| workload.recipe.optimizer);
            workload.recipe = Convention::Trainer.recipe(workload.recipe);
            workload.recipe.optimizer = stated.unwrap_or(workload.recipe.optimizer);
            let sentences = Convention::Trainer.assumptions().iter();
            assumed.extend(sentences.map(|&one| one.to_owned()));
        }
        Ok(Self {
            name,
            workload,
            alloc_conf,
            settings,
            config,
            assumed,
        })
    }
}

impl Run {
    /// The run with as many micro batches as it takes to see all that happens: the first makes
    /// gradients, the second adds into them, and each further one is like the second.
    pub fn outline(&self) -> Workload {
        let mut workload = self.workload.clone();
        let accumulation = &mut workload.recipe.accumulation;
        *accumulation = (*accumulation).min(2);
        workload
    }
}

/// Flags and settings that only cinch's own engine has a meaning for.
fn refuse_other_settings(settings: &SettingArguments) -> anyhow::Result<()> {
    super::refuse_flags_of_cinch(&crate::args::given(&[
        ("--offload", settings.offload),
        ("--update-in-backward", settings.update_in_backward),
        ("--optimizer-states", settings.optimizer_states.is_some()),
    ]))
}

/// A model by name, by file or from the settings.
struct Model {
    name: String,
    architecture: Architecture,
    /// With which it runs.
    settings: Settings,
    /// Whether its shape is that of the settings.
    is_of_settings: bool,
}

impl Model {
    fn read(
        arguments: &SettingArguments,
        torch: &TorchArguments,
        assumed: &mut Vec<String>,
    ) -> anyhow::Result<Self> {
        let name = arguments.model.as_deref();
        let Some(name) = name.filter(|name| ModelKind::from_name(name).is_none()) else {
            return Self::of_settings(arguments.settings()?);
        };
        for (flag, is_given) in [
            ("--model-size", arguments.model_size.is_some()),
            ("--dropout", arguments.dropout.is_some()),
            ("--set model.…", arguments.sets_the_model()),
        ] {
            if is_given {
                return Err(usage(format!(
                    "{flag} says nothing of the model {name}, whose shape its name or file gives\n\
                     hint: {flag} goes with --model mamba and --model gpt2"
                )));
            }
        }
        let architecture = named(name, torch.negatives, assumed)?;
        let without_model = SettingArguments {
            model: None,
            ..arguments.clone()
        };
        let mut settings = without_model.settings()?;
        // The model of the settings is not the one that runs: it must not limit the length.
        let source = Source::Flag("--model".to_owned());
        settings.set("model.max_seq_len", &MOST_LENGTH.to_string(), source)?;
        Ok(Self {
            name: name.to_owned(),
            architecture,
            settings,
            is_of_settings: false,
        })
    }

    fn of_settings(settings: Settings) -> anyhow::Result<Self> {
        let model = settings.resolve()?.model;
        let name = match model.size() {
            Some(size) if size == model.name() => size.to_owned(),
            size => format!("{} {}", model.name(), size.unwrap_or("(custom)")),
        };
        Ok(Self {
            name,
            architecture: of_settings(&model, settings.is_explicit("model.dropout")),
            settings,
            is_of_settings: true,
        })
    }
}

/// A model that is not one of cinch's own.
fn named(
    name: &str,
    negatives: Option<u64>,
    assumed: &mut Vec<String>,
) -> anyhow::Result<Architecture> {
    Ok(match name {
        "gsa" => Architecture::Gsa(GsaConfig::default()),
        "mu" => Architecture::Mu(MuConfig::default()),
        "naics" => {
            if negatives.is_none() {
                assumed.push(format!(
                    "{NEGATIVES} negatives for each anchor: say --negatives"
                ));
            }
            Architecture::Naics(NaicsConfig::new(negatives.unwrap_or(NEGATIVES)))
        }
        name if looks_like_a_file(name) => hugging_face::read(&config_file(name))?,
        name if hugging_face::preset_names().any(|preset| preset == name) => {
            hugging_face::preset(name, &Map::new())?
        }
        name => {
            let mut known = ModelKind::NAMES.to_vec();
            known.extend(hugging_face::preset_names().filter(|name| *name != "gpt2"));
            known.extend(OWN_MODELS);
            return Err(usage(format!(
                "no model is known by the name {name}\n\
                 hint: the known ones are {}; any other is given as the path of its config.json",
                known.join(", ")
            )));
        }
    })
}

/// The longest sequence that the settings take.
const MOST_LENGTH: u64 = 1 << 20;

fn looks_like_a_file(name: &str) -> bool {
    name.ends_with(".json") || name.contains(['/', '\\']) || Path::new(name).is_dir()
}

/// A folder stands for the `config.json` in it.
fn config_file(name: &str) -> std::path::PathBuf {
    let path = Path::new(name);
    match path.is_dir() {
        true => path.join("config.json"),
        false => path.to_owned(),
    }
}

/// The seed projects' Mamba, and GPT-2 as transformers has it, in the shape of the settings.
fn of_settings(model: &ModelConfig, dropout_is_stated: bool) -> Architecture {
    match model {
        ModelConfig::Mamba(config) => Architecture::Mamba(MambaConfig {
            vocabulary: config.vocab_size as u64,
            width: config.d_model as u64,
            layers: config.n_layers as u64,
            positions: config.max_seq_len as u64,
            states: config.d_state as u64,
            expansion: config.expand_factor as u64,
            dropout: config.dropout,
        }),
        ModelConfig::Gpt2(config) => {
            let usual = Gpt2Config::default();
            let rate = |usual: f64| match dropout_is_stated {
                true => config.dropout,
                false => usual,
            };
            Architecture::Gpt2(Gpt2Config {
                vocabulary: config.vocab_size as u64,
                positions: config.max_seq_len as u64,
                width: config.d_model as u64,
                layers: config.n_layers as u64,
                heads: config.n_heads as u64,
                residual_dropout: rate(usual.residual_dropout),
                embedding_dropout: rate(usual.embedding_dropout),
                attention_dropout: rate(usual.attention_dropout),
                ..usual
            })
        }
    }
}

/// The positions that a model has, where it has learned ones.
fn positions(architecture: &Architecture) -> Option<u64> {
    match architecture {
        Architecture::Gpt2(config) => Some(config.positions),
        Architecture::Bert(config) => Some(config.positions),
        Architecture::Naics(config) => Some(config.encoder.positions),
        Architecture::Mamba(config) => Some(config.positions),
        Architecture::Llama(_)
        | Architecture::HuggingFaceMamba(_)
        | Architecture::Gsa(_)
        | Architecture::Mu(_) => None,
    }
}

/// The length where nobody says one.
fn usual_length(architecture: &Architecture, assumed: &mut Vec<String>) -> u64 {
    let length = LENGTH.min(positions(architecture).unwrap_or(LENGTH));
    assumed.push(format!("sequences of {length} tokens: say --seq-len"));
    length
}

/// Every layer or none. The sparse-attention model of the seed projects checkpoints by itself.
fn checkpoints(
    architecture: &Architecture,
    settings: &Settings,
    config: &Config,
) -> anyhow::Result<checkpoint::Checkpointing> {
    let by_itself = matches!(architecture, Architecture::Gsa(_));
    let is_stated = settings.is_explicit("vram.checkpointing");
    let is_on = match config.batch.checkpointing {
        _ if !is_stated => by_itself || config.batch.checkpointing == Checkpointing::Full,
        Checkpointing::Auto => by_itself,
        Checkpointing::None => false,
        Checkpointing::Full => true,
        Checkpointing::Blocks(blocks) => {
            return Err(usage(format!(
                "--checkpointing {blocks}: PyTorch's models checkpoint every layer or none\n\
                 hint: say full or none"
            )));
        }
    };
    Ok(match is_on {
        true => checkpoint::Checkpointing::NonReentrant,
        false => checkpoint::Checkpointing::Off,
    })
}

/// The precision of the settings under autocast, which is how most people train in it.
fn precision(stated: Option<TorchPrecision>, config: &Config) -> training::Precision {
    match (stated, config.batch.precision) {
        (Some(TorchPrecision::Fp32), _) | (None, Precision::Fp32) => training::Precision::Float32,
        (Some(TorchPrecision::AmpBf16), _) | (None, Precision::Bf16) => {
            training::Precision::AutocastBFloat16
        }
        (Some(TorchPrecision::AmpFp16), _) | (None, Precision::Fp16) => {
            training::Precision::AutocastFloat16
        }
        (Some(TorchPrecision::Bf16), _) => training::Precision::BFloat16,
        (Some(TorchPrecision::Fp16), _) => training::Precision::Float16,
    }
}

fn optimizer(stated: Option<TorchOptimizer>, config: &Config) -> Optimizer {
    let sgd = |momentum| Optimizer::Sgd {
        momentum,
        execution: Execution::Foreach,
    };
    match stated {
        None if config.batch.states == StateFormat::EightBit => Optimizer::Adam8Bit,
        None | Some(TorchOptimizer::Adamw | TorchOptimizer::Adam) => {
            Optimizer::Adam(Execution::Foreach)
        }
        Some(TorchOptimizer::AdamwFused) => Optimizer::Adam(Execution::Fused),
        Some(TorchOptimizer::AdamwLoop) => Optimizer::Adam(Execution::Loop),
        Some(TorchOptimizer::Adamw8bit) => Optimizer::Adam8Bit,
        Some(TorchOptimizer::Sgd) => sgd(false),
        Some(TorchOptimizer::Sgdm) => sgd(true),
    }
}

/// Adapters of this rank on every linear layer that can have one.
fn adapters(workload: &Workload, rank: u64) -> anyhow::Result<Lora> {
    if rank == 0 {
        return Err(usage(
            "--lora-rank 0 trains nothing\nhint: 8 and 16 are usual",
        ));
    }
    let changed = Change::Adapters.apply(workload);
    let lora = changed.and_then(|changed| changed.lora).ok_or_else(|| {
        usage(
            "--lora-rank: adapters are known for LLaMA, Mistral, Qwen2, BERT and transformers' Mamba models only\n\
             hint: leave it out; the model naics has its own",
        )
    })?;
    Ok(Lora { rank, ..lora })
}

/// The allocator's settings, and the variable they come from where no flag says them.
fn alloc_conf(flag: Option<&str>) -> (String, Option<&'static str>) {
    if let Some(text) = flag {
        return (text.to_owned(), None);
    }
    let mut variables = VARIABLES.into_iter();
    variables
        .find_map(|name| {
            let text = std::env::var(name).ok()?;
            (!text.is_empty()).then_some((text, Some(name)))
        })
        .unwrap_or_default()
}
