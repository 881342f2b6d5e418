//! The graphs of a configuration: the training step, with blocks recomputed and weights updated
//! as it says, and the evaluation.

use std::collections::BTreeSet;
use std::sync::Arc;

use cinch_architecture::Architecture;
use cinch_config::{
    Config, FrozenWeights, GradientType, INITIAL_WEIGHTS, LoraConfig, LoraTargets, Precision,
    ShardedPart, StateFormat,
};
use cinch_graph::op::{GradientFormat, MomentFormat, Quantisation};
use cinch_graph::{
    Graph, Optimizer, Recompute, ShardLevel, Sharding, Target, TrainingGraph, differentiate,
};
use cinch_model::{
    AdapterShape, Build, Embedded, ModelError, Purpose, build, compute_type, embeds,
    linear_modules, phases, whole_modules,
};
use cinch_plan::Options;
use cinch_weights::{AdapterConfig, Modules, Targets};

use crate::{StepError, StepTarget};

/// Which of the training graphs of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VariantForm {
    /// Which of the model's phases.
    pub phase: usize,
    /// Tokens of a row.
    pub seq_len: usize,
}

/// The training graphs of a configuration: for every phase of its model one for each length of
/// rows, the longest first.
pub fn variant_forms(config: &Config) -> Vec<VariantForm> {
    let lengths = config.batch.lengths();
    let phases = 0..phases(&config.model).len();
    let of_phase = |phase| {
        let longest_first = lengths.iter().rev();
        longest_first.map(move |&seq_len| VariantForm { phase, seq_len })
    };
    phases.flat_map(of_phase).collect()
}

/// A training graph of a configuration, before any block is chosen for recomputation.
pub fn differentiated(
    config: &Config,
    variant: VariantForm,
    target: Target,
) -> Result<TrainingGraph, StepError> {
    let batch = &config.batch;
    let in_half = batch.precision == Precision::Fp16 && !config.tuning.has_masters();
    if in_half && batch.states == StateFormat::Weights {
        return Err(StepError::StatesInHalf);
    }
    let forward = forward(config, variant, target)?;
    check_cut(&forward, config)?;
    Ok(differentiate(forward, &optimizer(config))?)
}

/// The model as it is trained, before its backward.
fn forward(config: &Config, variant: VariantForm, target: Target) -> Result<Graph, StepError> {
    let purpose = Purpose::Train {
        label_smoothing: config.training.label_smoothing,
        loss_chunk: loss_chunk(config, variant, target),
    };
    Ok(build(&config.model, &form(config, variant, purpose)?)?)
}

/// Whether the batch may not be cut into micro batches, because an op needs all of its rows. A
/// model that cannot be built is told of where its step is planned.
pub fn needs_whole_batch(config: &Config, target: Target) -> bool {
    let whole =
        |variant| forward(config, variant, target).is_ok_and(|graph| graph.whole_batch().is_some());
    variant_forms(config).into_iter().any(whole)
}

/// Refuses several micro batches where an op needs all rows at once.
pub fn check_cut(graph: &Graph, config: &Config) -> Result<(), StepError> {
    let batch = &config.batch;
    match graph.whole_batch() {
        Some(whole) if !batch.world.is_alone() => Err(StepError::WholeBatchOfRanks {
            ranks: batch.world.ranks,
            what: whole.what,
            reason: whole.reason,
        }),
        Some(whole) if batch.accumulation > 1 => Err(StepError::WholeBatch {
            accumulation: batch.accumulation,
            effective: batch.effective_batch(),
            what: whole.what,
            reason: whole.reason,
        }),
        _ => Ok(()),
    }
}

/// The step as it runs with its first `blocks` blocks recomputed.
pub fn recomputed(
    differentiated: &TrainingGraph,
    config: &Config,
    blocks: usize,
) -> Result<TrainingGraph, StepError> {
    let away = config.batch.offload_activations;
    let mut step = differentiated.recompute_and_offload(Recompute::Blocks(blocks), away)?;
    if config.batch.update_in_backward {
        let ranks = config.batch.world.ranks;
        if ranks > 1 {
            return Err(StepError::UpdateInBackwardOfRanks { ranks });
        }
        step = match config.batch.accumulation {
            1 => step.update_in_backward(),
            accumulation => return Err(StepError::UpdateInBackward { accumulation }),
        };
    }
    if config.batch.offload_frozen {
        step = step.offload_frozen();
    }
    Ok(step.shard(sharding(config))?)
}

/// How a step is cut over the ranks of its configuration.
pub fn sharding(config: &Config) -> Sharding {
    let world = &config.batch.world;
    Sharding {
        ranks: world.ranks,
        level: match world.shard {
            ShardedPart::None => ShardLevel::None,
            ShardedPart::Optimizer => ShardLevel::Optimizer,
            ShardedPart::Gradients => ShardLevel::Gradients,
            ShardedPart::Weights => ShardLevel::Weights,
        },
    }
}

/// The same model without dropout and gradients.
pub fn evaluation_graph(
    config: &Config,
    variant: VariantForm,
    target: Target,
) -> Result<Graph, StepError> {
    let loss_chunk = loss_chunk(config, variant, target);
    let purpose = Purpose::Evaluate { loss_chunk };
    let mut graph = build(&config.model, &form(config, variant, purpose)?)?;
    if config.batch.offload_frozen {
        graph = graph.offload_frozen();
    }
    Ok(graph.shard(sharding(config)))
}

/// What texts become, and how many at once, where a run groups them between epochs: as many as a
/// chunk of a micro batch has, so that they take no more than training does.
pub fn embedding_graph(config: &Config) -> Result<Option<(Graph, usize)>, StepError> {
    if config.data.cluster_epoch == 0 || !embeds(&config.model) {
        return Ok(None);
    }
    let texts = config.batch.batch_size;
    let form = Build {
        batch: texts,
        ..form(
            config,
            VariantForm {
                phase: 0,
                seq_len: config.batch.seq_len,
            },
            Purpose::Embed {
                what: Embedded::Points,
                frozen: false,
            },
        )?
    };
    let graph = build(&config.model, &form)?.shard(sharding(config));
    graph.check_sizes()?;
    Ok(Some((graph, texts)))
}

/// The configuration without what its graph does not depend on: two that are equal then have the
/// same graph.
pub fn same_graph(config: &Config) -> Config {
    let mut config = config.clone();
    config.batch.offload = false;
    config
}

/// What a step of the configuration is planned with.
pub fn options(config: &Config, machine: StepTarget) -> Options {
    Options {
        target: machine.target,
        offload_states: config.batch.offload,
        overhead_bytes: machine.overhead_bytes,
        network_bytes: match config.batch.world.is_alone() {
            true => 0,
            false => machine.network.of(config.batch.world.shard),
        },
    }
}

fn form(config: &Config, variant: VariantForm, purpose: Purpose) -> Result<Build, StepError> {
    Ok(Build {
        batch: config.batch.batch_size,
        seq_len: variant.seq_len,
        phase: variant.phase,
        compute: compute_type(config.batch.precision),
        purpose,
        packed: config.data.packing,
        masters: config.tuning.has_masters(),
        adapters: adapter_shape(config)?,
    })
}

/// The adapters of a configuration, where it has any.
pub fn adapter_shape(config: &Config) -> Result<Option<AdapterShape>, StepError> {
    let tuning = &config.tuning;
    let quantisation = match (tuning.frozen, &config.named.quantization) {
        (FrozenWeights::FourBit, _) => Some(Quantisation::Nf4 {
            double: tuning.double_quantization,
        }),
        (FrozenWeights::EightBit, _) => Some(Quantisation::Int8),
        (FrozenWeights::InTheirType, None) => None,
        (FrozenWeights::InTheirType, Some(_)) => return Err(StepError::SavedQuantised),
    };
    let Some(lora) = &tuning.lora else {
        return match quantisation {
            Some(_) => Err(StepError::QuantisedAndTrained),
            None => Ok(None),
        };
    };
    let modules = linear_modules(&config.model);
    if modules.is_empty() {
        let family = config.model.family().title;
        return Err(ModelError::WholeOnly { family }.into());
    }
    let adapted = adapter_config(config, lora).adapted(&modules, None)?;
    Ok(Some(AdapterShape {
        rank: lora.rank as usize,
        scale: lora.scale(),
        dropout: lora.dropout,
        modules: Arc::new(adapted.into_iter().map(|module| module.name).collect()),
        whole: Arc::new(trained_whole(lora, &config.model, &modules)?),
        quantisation,
    }))
}

/// The modules that are trained whole, as peft finds them: every one whose name ends so.
fn trained_whole(
    lora: &LoraConfig,
    model: &Architecture,
    linear: &[String],
) -> Result<BTreeSet<String>, StepError> {
    let known = whole_modules(model);
    let mut found = BTreeSet::new();
    for name in &lora.modules_to_save {
        if let Some(linear) = linear.iter().find(|module| module.ends_with(name.as_str())) {
            return Err(StepError::WholeLinear {
                name: name.clone(),
                module: linear.clone(),
            });
        }
        let mut named = known
            .iter()
            .filter(|module| module.ends_with(name.as_str()));
        let Some(first) = named.next() else {
            return Err(StepError::NothingWhole {
                name: name.clone(),
                ends: ends(&known),
            });
        };
        found.insert(first.clone());
        found.extend(named.cloned());
    }
    Ok(found)
}

/// The last parts of names, each once.
fn ends(names: &[String]) -> String {
    let ends = names.iter().filter_map(|name| name.rsplit('.').next());
    let ends: BTreeSet<&str> = ends.collect();
    ends.into_iter().collect::<Vec<_>>().join(", ")
}

/// The adapters as their file describes them.
pub fn adapter_config(config: &Config, lora: &LoraConfig) -> AdapterConfig {
    let targets = match &lora.targets {
        LoraTargets::AllLinear => Targets::AllLinear,
        LoraTargets::Names(names) => Targets::Modules(Modules::Names(names.clone())),
        LoraTargets::Pattern(pattern) => Targets::Modules(Modules::Pattern(pattern.clone())),
    };
    let base_model = match config.weights.as_deref() {
        None => config.named.title.clone(),
        Some(INITIAL_WEIGHTS) => None,
        Some(path) => Some(path.to_owned()),
    };
    AdapterConfig {
        base_model,
        dropout: lora.dropout,
        use_rslora: lora.rank_stabilised,
        modules_to_save: lora.modules_to_save.clone(),
        ..AdapterConfig::new(lora.rank as usize, lora.alpha, targets)
    }
}

/// Rows of logits that exist at once; `None` leaves it to the op. Shorter rows have no larger
/// chunks than the longest, so that they never take more.
fn loss_chunk(config: &Config, variant: VariantForm, target: Target) -> Option<usize> {
    let rows = config.batch.batch_size * variant.seq_len;
    config.batch.loss_chunk.or_else(|| match target {
        Target::Cpu => None,
        Target::Cuda => Some(cuda_loss_chunk(config).min(rows.max(1))),
    })
}

/// What a chunk of logits may take on a GPU when nobody chose.
pub const CUDA_CHUNK_BYTES: u64 = 512 << 20;

/// Rows of logits at once on a GPU: as few chunks as stay below this many bytes each, all of
/// them alike. Each chunk reads and writes the gradient of the whole vocabulary, and a product
/// fills the card only with some thousand rows.
fn cuda_loss_chunk(config: &Config) -> usize {
    /// What the library's tiles divide.
    const TILE: usize = 128;
    let rows = config.batch.batch_size * config.batch.seq_len;
    let element = compute_type(config.batch.precision).size();
    let logits = (rows as u64)
        .saturating_mul(config.model.vocab_size() as u64)
        .saturating_mul(element);
    let chunks = logits.div_ceil(CUDA_CHUNK_BYTES).max(1) as usize;
    rows.div_ceil(chunks)
        .next_multiple_of(TILE)
        .min(rows.max(1))
}

fn optimizer(config: &Config) -> Optimizer {
    let training = &config.training;
    Optimizer {
        beta1: training.adam_beta1,
        beta2: training.adam_beta2,
        epsilon: training.adam_epsilon,
        weight_decay: training.weight_decay,
        max_norm: (training.max_grad_norm > 0.0).then_some(training.max_grad_norm),
        moments: match config.batch.states {
            StateFormat::Fp32 => MomentFormat::Full,
            StateFormat::EightBit => MomentFormat::EightBit,
            StateFormat::Weights => MomentFormat::AsKept,
        },
        // Those of ranks are added up as those of micro batches are.
        gradients: match (config.batch.gradients, config.batch.effective_micros()) {
            (GradientType::Weights, _) | (GradientType::Auto, 1) => GradientFormat::AsKept,
            (GradientType::Fp32, _) | (GradientType::Auto, _) => GradientFormat::Full,
        },
    }
}
