//! The changes that `cinch_config::remedy` declares, each as a step from one PyTorch run to another.
//!
//! [`crate::remedy`] prices them one by one, [`crate::choose`] combines them.

use cinch_architecture::{Architecture, LayerCheckpointing};
use cinch_config::remedy::RemedyKind;

use crate::eager::checkpoint::Checkpointing;
use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::Precision;
use crate::model::Workload;
use crate::model::adapter::{Lora, LoraLibrary};
use crate::model::mask::Attention;

/// The rank of adapters that are proposed: small beside any layer, and peft's common choice.
const ADAPTER_RANK: u64 = 16;
/// The limit that the guides set with `max_split_size_mb`.
const SPLIT_LIMIT_MIB: u64 = 128;

/// The run with a change; none where it would change nothing, or where PyTorch or the model has no such setting.
pub fn apply(kind: RemedyKind, workload: &Workload) -> Option<Workload> {
    let mut changed = workload.clone();
    match kind {
        RemedyKind::MicroBatch => {
            let effective = workload
                .batch
                .checked_mul(u64::from(workload.recipe.accumulation))?;
            // 5 × 3 micro batches become 1 × 15: the largest part that divides the whole.
            let batch = (1..=workload.batch / 2)
                .rev()
                .find(|batch| effective.is_multiple_of(*batch))?;
            changed.batch = batch;
            changed.recipe.accumulation = u32::try_from(effective / batch).ok()?;
        }
        RemedyKind::SequenceLength if workload.architecture.has_one_length() => return None,
        RemedyKind::SequenceLength => {
            // Two tokens are the least that has a next one to predict.
            changed.length = Some(workload.length / 2).filter(|length| *length >= 2)?;
        }
        RemedyKind::Recomputation => {
            let family = workload.architecture.family();
            let can = matches!(
                family.checkpointing,
                LayerCheckpointing::Chosen | LayerCheckpointing::Usual
            );
            if workload.checkpoints.is_on() || !can {
                return None;
            }
            changed.checkpoints = Checkpointing::NonReentrant;
        }
        RemedyKind::Bf16 => {
            changed.recipe.precision = lower(workload, Precision::AutocastBFloat16)?
        }
        RemedyKind::Fp16 => changed.recipe.precision = lower(workload, Precision::AutocastFloat16)?,
        RemedyKind::Bf16Weights => {
            // transformers refuses to cast a model of quantised weights.
            if workload.frozen.is_quantised() {
                return None;
            }
            changed.recipe.precision = lower(workload, Precision::BFloat16)?;
        }
        RemedyKind::FusedOptimizer => match &mut changed.recipe.optimizer {
            Optimizer::Adam(execution) if *execution != Execution::Fused => {
                *execution = Execution::Fused;
            }
            _ => return None,
        },
        RemedyKind::EightBitStates => match workload.recipe.optimizer {
            Optimizer::Adam(_) => changed.recipe.optimizer = Optimizer::Adam8Bit,
            _ => return None,
        },
        RemedyKind::PlainSgd => {
            let plain = Optimizer::Sgd {
                momentum: false,
                execution: Execution::Foreach,
            };
            if let Optimizer::Sgd {
                momentum: false, ..
            } = workload.recipe.optimizer
            {
                return None;
            }
            changed.recipe.optimizer = plain;
        }
        RemedyKind::Adapters => {
            if workload.lora.is_some() {
                return None;
            }
            let targets = workload.architecture.adapters()?.linear;
            changed.lora = Some(Lora {
                rank: ADAPTER_RANK,
                dropout: 0.0,
                targets: targets.iter().map(|name| (*name).into()).collect(),
                whole: Vec::new(),
                whole_in_float32: false,
                in_float32: true,
                library: LoraLibrary::Peft,
            });
        }
        RemedyKind::AdapterRank => {
            let lora = changed.lora.as_mut().filter(|lora| lora.rank > 1)?;
            lora.rank /= 2;
        }
        RemedyKind::ExpandableSegments => {
            if workload.allocator.expandable_segments {
                return None;
            }
            changed.allocator.expandable_segments = true;
        }
        RemedyKind::SplitLimit => {
            if workload.allocator.max_split != u64::MAX {
                return None;
            }
            changed.allocator.max_split = SPLIT_LIMIT_MIB << 20;
        }
        RemedyKind::FusedAttention => {
            if workload.attention == Attention::Sdpa
                || !workload.architecture.family().chooses_attention
            {
                return None;
            }
            changed.attention = Attention::Sdpa;
        }
        RemedyKind::Negatives => match &mut changed.architecture {
            Architecture::Naics(config) if config.negatives > 2 => {
                config.negatives -= config.negatives / 3;
            }
            _ => return None,
        },
        RemedyKind::SelectedKeys => match &mut changed.architecture {
            Architecture::Gsa(config) if config.most_keys / 2 >= config.least_keys.max(1) => {
                config.most_keys /= 2;
            }
            _ => return None,
        },
        RemedyKind::ModelSize => {
            let layers = workload.architecture.layers() / 2;
            changed.architecture = workload
                .architecture
                .with_layers(Some(layers).filter(|layers| *layers > 0)?);
        }
        RemedyKind::EmptyCache | RemedyKind::DeleteNames => {}
        // Of cinch's own engine.
        RemedyKind::Shard
        | RemedyKind::Offload
        | RemedyKind::OffloadFrozen
        | RemedyKind::OffloadActivations
        | RemedyKind::UpdateInBackward
        | RemedyKind::LossChunk => return None,
    }
    Some(changed)
}

/// What to set, with the values of this run. `after` is the run with the change.
pub fn describe(kind: RemedyKind, before: &Workload, after: &Workload) -> String {
    if let Some(always) = kind.declaration().in_torch {
        return always.to_owned();
    }
    match kind {
        RemedyKind::MicroBatch => format!(
            "batch {} → {}, accumulation {} → {}",
            before.batch, after.batch, before.recipe.accumulation, after.recipe.accumulation
        ),
        RemedyKind::SequenceLength => format!("length {} → {}", before.length, after.length),
        RemedyKind::Adapters => match &after.lora {
            Some(lora) => format!("LoRA, r={}, on {}", lora.rank, lora.targets.join(", ")),
            None => String::new(),
        },
        RemedyKind::AdapterRank => {
            let rank = |run: &Workload| run.lora.as_ref().map_or(0, |lora| lora.rank);
            format!("LoRA r {} → {}", rank(before), rank(after))
        }
        RemedyKind::SplitLimit => {
            format!("PYTORCH_ALLOC_CONF=max_split_size_mb:{SPLIT_LIMIT_MIB}")
        }
        RemedyKind::Negatives => match (&before.architecture, &after.architecture) {
            (Architecture::Naics(before), Architecture::Naics(after)) => {
                format!("n_negatives {} → {}", before.negatives, after.negatives)
            }
            _ => String::new(),
        },
        RemedyKind::SelectedKeys => match (&before.architecture, &after.architecture) {
            (Architecture::Gsa(before), Architecture::Gsa(after)) => {
                format!("k_max {} → {}", before.most_keys, after.most_keys)
            }
            _ => String::new(),
        },
        RemedyKind::ModelSize => format!(
            "layers {} → {}",
            before.architecture.layers(),
            after.architecture.layers()
        ),
        // What has no value to tell is called by its name.
        _ => kind.declaration().name.to_owned(),
    }
}

/// A precision with no larger weights than the run has, and another one.
fn lower(workload: &Workload, precision: Precision) -> Option<Precision> {
    let has = workload.recipe.precision;
    let is_lower = precision != has && precision.weights().size() <= has.weights().size();
    is_lower.then_some(precision)
}
