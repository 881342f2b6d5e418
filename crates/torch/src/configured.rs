//! From a resolved configuration to the run in PyTorch that it describes, each guess said.

use cinch_architecture::{Architecture, LayerCheckpointing, Quantization};
use cinch_config::{
    Checkpointing as Asked, Config, FrozenWeights, LoraConfig, LoraTargets, StateFormat,
    TorchAttention, TorchOptimizer, TorchPrecision, TrainingLoop,
};
use cinch_device::Card;

use crate::TorchError;
use crate::allocator::AllocatorConfig;
use crate::chip::Chip;
use crate::convention::Convention;
use crate::eager::checkpoint::Checkpointing;
use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::{Precision, Recipe};
use crate::model::Workload;
use crate::model::adapter::{Lora, LoraLibrary};
use crate::model::frozen::Frozen;
use crate::model::liger::Liger;
use crate::model::mask::Attention;

/// A run, and what was taken for granted about it.
#[derive(Clone, Debug)]
pub struct Configured {
    pub workload: Workload,
    pub assumed: Vec<String>,
}

impl Configured {
    /// The run of a configuration, with the allocator's settings as text, on a card where one is known.
    pub fn of(
        config: &Config,
        alloc_conf: &str,
        card: Option<&Card>,
    ) -> Result<Configured, TorchError> {
        let torch = &config.torch;
        let mut assumed = torch.assumed.clone();
        let chip = chip(card, &mut assumed);
        let frozen = frozen(config)?;
        if frozen.is_quantised() && torch.prepared {
            assumed.push(
                "the model is prepared for training as peft does it (prepare_model_for_kbit_training): what is not quantised is in fp32"
                    .into(),
            );
        }
        let convention = match torch.training_loop {
            TrainingLoop::Plain => Convention::PlainLoop,
            TrainingLoop::Trainer => Convention::Trainer,
        };
        let recipe = Recipe {
            precision: precision(torch.precision),
            optimizer: optimizer(config)?,
            accumulation: u32::try_from(config.batch.accumulation).unwrap_or(u32::MAX),
            clips_gradients: config.training.max_grad_norm > 0.0,
            convention,
        };
        let stated = torch.optimizer.map(|_| recipe.optimizer);
        let mut recipe = convention.recipe(recipe);
        recipe.optimizer = stated.unwrap_or(recipe.optimizer);
        recipe.clips_gradients = config.training.max_grad_norm > 0.0;
        if stated.is_none() {
            assumed.extend(convention.assumptions().iter().map(|&one| one.to_owned()));
        }
        let mut architecture = config.model.clone();
        if let Architecture::Mu(shape) = &mut architecture {
            // The published program makes as many positions as its sequences have tokens.
            shape.positions = config.batch.seq_len as u64;
        }
        let workload = Workload {
            architecture,
            batch: config.batch.batch_size as u64,
            length: config.batch.seq_len as u64,
            attention: attention(config, chip, &mut assumed)?,
            checkpoints: checkpoints(config)?,
            liger: liger(config)?,
            lora: config
                .tuning
                .lora
                .as_ref()
                .map(|lora| adapters(lora, config))
                .transpose()?,
            frozen,
            prepared: frozen.is_quantised() && torch.prepared,
            recipe,
            allocator: AllocatorConfig::parse(alloc_conf)?,
            chip,
            memory_limit: None,
        };
        Ok(Configured { workload, assumed })
    }
}

/// What decides of the card; where nothing is known of it, that of the card on which PyTorch was measured.
fn chip(card: Option<&Card>, assumed: &mut Vec<String>) -> Chip {
    let Some(card) = card else {
        assumed.push(
            "kernels and their workspaces are those of an H200, because no card is known: say --gpu"
                .into(),
        );
        return Chip::H200;
    };
    Chip::of(card).unwrap_or_else(|| {
        assumed.push(format!(
            "kernels and their workspaces are those of an H200: the ones of the {} are not known",
            card.name
        ));
        Chip::H200
    })
}

fn beyond(problem: impl Into<String>) -> TorchError {
    TorchError::Beyond {
        problem: problem.into(),
    }
}

/// As the run says, else as the files are stored.
fn frozen(config: &Config) -> Result<Frozen, TorchError> {
    let tuning = &config.tuning;
    let frozen = match (&tuning.frozen, &config.named.quantization) {
        (FrozenWeights::FourBit, _) => Frozen::FourBit {
            double: tuning.double_quantization,
        },
        (FrozenWeights::EightBit, _) => Frozen::EightBit,
        (FrozenWeights::InTheirType, Some(Quantization::FourBit { double })) => {
            Frozen::FourBit { double: *double }
        }
        (FrozenWeights::InTheirType, Some(Quantization::EightBit)) => Frozen::EightBit,
        (FrozenWeights::InTheirType, Some(Quantization::Other(name))) => {
            return Err(beyond(format!(
                "weights quantised by {name} are not computed"
            )));
        }
        (FrozenWeights::InTheirType, None) => Frozen::InTheirType,
    };
    Ok(frozen)
}

fn precision(stated: TorchPrecision) -> Precision {
    match stated {
        TorchPrecision::Fp32 => Precision::Float32,
        TorchPrecision::AmpBf16 => Precision::AutocastBFloat16,
        TorchPrecision::AmpFp16 => Precision::AutocastFloat16,
        TorchPrecision::Bf16 => Precision::BFloat16,
        TorchPrecision::Fp16 => Precision::Float16,
        TorchPrecision::Bf16Amp => Precision::BFloat16UnderAutocast,
        TorchPrecision::Fp16Amp => Precision::Float16UnderAutocast,
    }
}

fn optimizer(config: &Config) -> Result<Optimizer, TorchError> {
    let sgd = |momentum| Optimizer::Sgd {
        momentum,
        execution: Execution::Foreach,
    };
    Ok(match config.torch.optimizer {
        None if config.batch.states == StateFormat::EightBit => Optimizer::Adam8Bit,
        None | Some(TorchOptimizer::Adamw | TorchOptimizer::Adam) => {
            Optimizer::Adam(Execution::Foreach)
        }
        Some(TorchOptimizer::AdamwFused) => Optimizer::Adam(Execution::Fused),
        Some(TorchOptimizer::AdamwLoop) => Optimizer::Adam(Execution::Loop),
        Some(TorchOptimizer::Adamw8bit) => Optimizer::Adam8Bit,
        Some(TorchOptimizer::Sgd) => sgd(false),
        Some(TorchOptimizer::Sgdm) => sgd(true),
        Some(TorchOptimizer::PagedAdamw8bit) => Optimizer::PagedAdam { eight_bit: true },
        Some(TorchOptimizer::PagedAdamw32bit) => Optimizer::PagedAdam { eight_bit: false },
    })
}

fn attention(
    config: &Config,
    chip: Chip,
    assumed: &mut Vec<String>,
) -> Result<Attention, TorchError> {
    let kind = config.torch.attention;
    let is_flash = matches!(kind, TorchAttention::Flash2 | TorchAttention::Flash3);
    if is_flash && config.model.family().chooses_attention && !chip.has_flash_attention() {
        return Err(beyond(format!(
            "{} does not run on compute capability {}: flash-attn needs Ampere or later, and PyTorch's own attention (sdpa) \
             does not",
            kind.name(),
            chip.capability
        )));
    }
    Ok(match kind {
        TorchAttention::Eager => Attention::Eager,
        TorchAttention::Sdpa => Attention::Sdpa,
        TorchAttention::Flash2 | TorchAttention::Flash3 | TorchAttention::Flex => {
            if config.model.family().chooses_attention {
                assumed.push(format!(
                    "{} is replayed as PyTorch's own fused attention (sdpa), which keeps the same tensors",
                    kind.name()
                ));
            }
            Attention::Sdpa
        }
    })
}

/// Names of kernels with commas between them, or a word for those that Liger applies by itself.
fn liger(config: &Config) -> Result<Liger, TorchError> {
    let kernels = match config.torch.liger.as_deref() {
        None => return Ok(Liger::default()),
        Some("all") => return Ok(Liger::USUAL),
        Some(kernels) => kernels,
    };
    let mut liger = Liger::default();
    for kernel in kernels.split(',').map(str::trim) {
        if !liger.switch(kernel, true) {
            return Err(beyond(format!(
                "`{kernel}` in pytorch.liger is no kernel of Liger's that is known here\n\
                 hint: all, none, or names with commas: {}",
                Liger::KERNELS.join(", ")
            )));
        }
    }
    Ok(liger)
}

/// Every layer or none.
fn checkpoints(config: &Config) -> Result<Checkpointing, TorchError> {
    let habit = config.model.family().checkpointing;
    let by_itself = matches!(
        habit,
        LayerCheckpointing::Usual | LayerCheckpointing::Always
    );
    let is_on = match (config.batch.checkpointing, habit) {
        (_, LayerCheckpointing::Always) => true,
        (Asked::Auto, _) => by_itself,
        (Asked::None, _) => false,
        (Asked::Full, LayerCheckpointing::Never) => {
            return Err(beyond(format!(
                "the program of {} has no checkpointing",
                config.model.family().title
            )));
        }
        (Asked::Full, _) => true,
        (Asked::Blocks(blocks), _) => {
            return Err(beyond(format!(
                "checkpointing of {blocks} blocks: PyTorch's models checkpoint every layer or none (say full or none)"
            )));
        }
    };
    Ok(match (is_on, config.torch.reentrant) {
        (false, _) => Checkpointing::Off,
        (true, false) => Checkpointing::NonReentrant,
        (true, true) => Checkpointing::Reentrant,
    })
}

fn adapters(lora: &LoraConfig, config: &Config) -> Result<Lora, TorchError> {
    let model = &config.model;
    let Some(known) = model.adapters() else {
        return Err(beyond(format!(
            "adapters in {} are not known here",
            model.family().title
        )));
    };
    let targets: Vec<String> = match &lora.targets {
        LoraTargets::AllLinear => known.linear.iter().map(|name| (*name).to_owned()).collect(),
        LoraTargets::Pattern(pattern) => {
            return Err(beyond(format!(
                "adapters chosen by the regular expression `{pattern}` are not predicted\n\
                 hint: list the names of the layers, --lora-targets q_proj,v_proj"
            )));
        }
        LoraTargets::Names(names) => {
            let unknown = names
                .iter()
                .find(|name| !known.linear.contains(&name.as_str()));
            if let Some(name) = unknown {
                return Err(beyond(format!(
                    "an adapter on {name}: known are {}",
                    known.linear.join(", ")
                )));
            }
            names.clone()
        }
    };
    // Those that the replay of decoders knows how to copy.
    let copied = ["embed_tokens", "lm_head"];
    let is_decoder = matches!(
        model,
        Architecture::Llama(_)
            | Architecture::Mistral(_)
            | Architecture::Qwen2(_)
            | Architecture::Qwen3(_)
            | Architecture::Phi3(_)
    );
    let mut named = lora.modules_to_save.iter();
    if let Some(name) = named.find(|name| !is_decoder || !copied.contains(&name.as_str())) {
        return Err(beyond(format!(
            "{name} trained whole beside adapters (lora.modules_to_save) in {}: predicted are {} of \
             LLaMA, Mistral, Qwen2, Qwen3 and Phi-3",
            model.family().title,
            copied.join(" and ")
        )));
    }
    Ok(Lora {
        rank: lora.rank,
        dropout: lora.dropout,
        targets,
        whole: lora.modules_to_save.clone(),
        whole_in_float32: config.torch.whole_in_float32,
        in_float32: lora.in_float32,
        library: LoraLibrary::Peft,
    })
}
