//! Single changes to a run's settings: the remedies that memory guides name, each as a step from one run to another.
//!
//! [`crate::remedy`] prices them one by one, [`crate::choose`] combines them.

use cinch_architecture::{Architecture, LayerCheckpointing};

use crate::eager::checkpoint::Checkpointing;
use crate::eager::optimizer::{Execution, Optimizer};
use crate::eager::training::Precision;
use crate::model::Workload;
use crate::model::adapter::{Lora, LoraLibrary};
use crate::model::mask::Attention;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A smaller micro batch, with more of them: the effective batch stays.
    HalfBatch,
    HalfLength,
    Checkpointing,
    Precision(Precision),
    FusedOptimizer,
    EightBitOptimizer,
    PlainSgd,
    Adapters,
    HalfRank,
    ExpandableSegments,
    SplitLimit,
    FusedAttention,
    FewerNegatives,
    HalfKeys,
    HalfLayers,
    EmptyCache,
    DeleteNames,
}

/// Every change, in the order in which equal savings are listed: what costs least comes first.
pub const ALL: [Change; 19] = [
    Change::ExpandableSegments,
    Change::SplitLimit,
    Change::FusedOptimizer,
    Change::FusedAttention,
    Change::HalfBatch,
    Change::Checkpointing,
    Change::Precision(Precision::AutocastBFloat16),
    Change::Precision(Precision::AutocastFloat16),
    Change::EightBitOptimizer,
    Change::Precision(Precision::BFloat16),
    Change::PlainSgd,
    Change::Adapters,
    Change::HalfRank,
    Change::FewerNegatives,
    Change::HalfKeys,
    Change::HalfLength,
    Change::HalfLayers,
    Change::EmptyCache,
    Change::DeleteNames,
];

/// The rank of adapters that are proposed: small beside any layer, and peft's common choice.
const ADAPTER_RANK: u64 = 16;
/// The limit that the guides set with `max_split_size_mb`.
const SPLIT_LIMIT_MIB: u64 = 128;

impl Change {
    pub fn name(self) -> &'static str {
        match self {
            Change::HalfBatch => "half the micro batch",
            Change::HalfLength => "half the length",
            Change::Checkpointing => "activation checkpointing",
            Change::Precision(Precision::AutocastBFloat16) => "bf16 autocast",
            Change::Precision(Precision::AutocastFloat16) => "fp16 autocast",
            Change::Precision(Precision::BFloat16) => "bf16 weights",
            Change::Precision(Precision::Float16) => "fp16 weights",
            Change::Precision(Precision::BFloat16UnderAutocast) => "bf16 weights under autocast",
            Change::Precision(Precision::Float16UnderAutocast) => "fp16 weights under autocast",
            Change::Precision(Precision::Float32) => "fp32",
            Change::FusedOptimizer => "fused optimizer",
            Change::EightBitOptimizer => "8-bit AdamW",
            Change::PlainSgd => "SGD without momentum",
            Change::Adapters => "LoRA",
            Change::HalfRank => "half the LoRA rank",
            Change::ExpandableSegments => "expandable segments",
            Change::SplitLimit => "max_split_size_mb",
            Change::FusedAttention => "SDPA attention",
            Change::FewerNegatives => "fewer negatives",
            Change::HalfKeys => "half the selected keys",
            Change::HalfLayers => "half the layers",
            Change::EmptyCache => "empty_cache",
            Change::DeleteNames => "del",
        }
    }

    /// The run with this change; none where it would change nothing or the model has no such setting.
    pub fn apply(self, workload: &Workload) -> Option<Workload> {
        let mut changed = workload.clone();
        match self {
            Change::HalfBatch => {
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
            Change::HalfLength => {
                // Two tokens are the least that has a next one to predict.
                changed.length = Some(workload.length / 2).filter(|length| *length >= 2)?;
            }
            Change::Checkpointing => {
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
            Change::Precision(precision) => {
                if precision == workload.recipe.precision
                    || precision.weights().size() > workload.recipe.precision.weights().size()
                    || precision == Precision::Float32
                {
                    return None;
                }
                changed.recipe.precision = precision;
            }
            Change::FusedOptimizer => match &mut changed.recipe.optimizer {
                Optimizer::Adam(execution) if *execution != Execution::Fused => {
                    *execution = Execution::Fused;
                }
                _ => return None,
            },
            Change::EightBitOptimizer => match workload.recipe.optimizer {
                Optimizer::Adam(_) => changed.recipe.optimizer = Optimizer::Adam8Bit,
                _ => return None,
            },
            Change::PlainSgd => {
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
            Change::Adapters => {
                if workload.lora.is_some() {
                    return None;
                }
                let targets = workload.architecture.adapters()?.linear;
                changed.lora = Some(Lora {
                    rank: ADAPTER_RANK,
                    dropout: 0.0,
                    targets: targets.iter().map(|name| (*name).into()).collect(),
                    in_float32: true,
                    library: LoraLibrary::Peft,
                });
            }
            Change::HalfRank => {
                let lora = changed.lora.as_mut().filter(|lora| lora.rank > 1)?;
                lora.rank /= 2;
            }
            Change::ExpandableSegments => {
                if workload.allocator.expandable_segments {
                    return None;
                }
                changed.allocator.expandable_segments = true;
            }
            Change::SplitLimit => {
                if workload.allocator.max_split != u64::MAX {
                    return None;
                }
                changed.allocator.max_split = SPLIT_LIMIT_MIB << 20;
            }
            Change::FusedAttention => {
                if workload.attention == Attention::Sdpa
                    || !workload.architecture.family().chooses_attention
                {
                    return None;
                }
                changed.attention = Attention::Sdpa;
            }
            Change::FewerNegatives => match &mut changed.architecture {
                Architecture::Naics(config) if config.negatives > 2 => {
                    config.negatives -= config.negatives / 3;
                }
                _ => return None,
            },
            Change::HalfKeys => match &mut changed.architecture {
                Architecture::Gsa(config) if config.most_keys > 1 => config.most_keys /= 2,
                _ => return None,
            },
            Change::HalfLayers => {
                let layers = workload.architecture.layers() / 2;
                changed.architecture = workload
                    .architecture
                    .with_layers(Some(layers).filter(|layers| *layers > 0)?);
            }
            Change::EmptyCache | Change::DeleteNames => {}
        }
        Some(changed)
    }

    /// What to set, with the values of this run. `after` is the run with the change.
    pub fn describe(self, before: &Workload, after: &Workload) -> String {
        match self {
            Change::HalfBatch => format!(
                "batch {} → {}, accumulation {} → {}",
                before.batch, after.batch, before.recipe.accumulation, after.recipe.accumulation
            ),
            Change::HalfLength => format!("length {} → {}", before.length, after.length),
            Change::Checkpointing => "checkpoint every layer, use_reentrant=False".into(),
            Change::Precision(Precision::AutocastBFloat16) => {
                "torch.autocast(dtype=torch.bfloat16), weights in fp32".into()
            }
            Change::Precision(Precision::AutocastFloat16) => {
                "torch.autocast(dtype=torch.float16) with a GradScaler, weights in fp32".into()
            }
            Change::Precision(_) => "the model in bfloat16: weights, gradients and states".into(),
            Change::FusedOptimizer => "AdamW(fused=True)".into(),
            Change::EightBitOptimizer => "bitsandbytes.optim.AdamW8bit".into(),
            Change::PlainSgd => "torch.optim.SGD(momentum=0)".into(),
            Change::Adapters => match &after.lora {
                Some(lora) => format!("LoRA, r={}, on {}", lora.rank, lora.targets.join(", ")),
                None => String::new(),
            },
            Change::HalfRank => {
                let rank = |run: &Workload| run.lora.as_ref().map_or(0, |lora| lora.rank);
                format!("LoRA r {} → {}", rank(before), rank(after))
            }
            Change::ExpandableSegments => "PYTORCH_ALLOC_CONF=expandable_segments:True".into(),
            Change::SplitLimit => {
                format!("PYTORCH_ALLOC_CONF=max_split_size_mb:{SPLIT_LIMIT_MIB}")
            }
            Change::FusedAttention => "attn_implementation=\"sdpa\"".into(),
            Change::FewerNegatives => match (&before.architecture, &after.architecture) {
                (Architecture::Naics(before), Architecture::Naics(after)) => {
                    format!("n_negatives {} → {}", before.negatives, after.negatives)
                }
                _ => String::new(),
            },
            Change::HalfKeys => match (&before.architecture, &after.architecture) {
                (Architecture::Gsa(before), Architecture::Gsa(after)) => {
                    format!("k_max {} → {}", before.most_keys, after.most_keys)
                }
                _ => String::new(),
            },
            Change::HalfLayers => format!(
                "layers {} → {}",
                before.architecture.layers(),
                after.architecture.layers()
            ),
            Change::EmptyCache => "torch.cuda.empty_cache() in the loop".into(),
            Change::DeleteNames => "del of intermediate tensors in forward".into(),
        }
    }

    /// Whether what is trained has the same shape afterwards.
    pub fn keeps_the_model(self) -> bool {
        !matches!(self, Change::HalfLayers | Change::HalfKeys)
    }

    /// What else the change does, or why it does nothing.
    pub fn note(self) -> Option<&'static str> {
        Some(match self {
            Change::HalfBatch => {
                "the effective batch stays: the same gradients, up to rounding; gradients and optimizer states do not shrink with the batch"
            }
            Change::HalfLength => {
                "longer texts are cut or split, and a step sees half as many tokens"
            }
            Change::Checkpointing => {
                "the same loss; each layer's forward runs twice (measured steps take 1.4 to 1.9 times as long)"
            }
            Change::Precision(Precision::AutocastFloat16) => {
                "takes as much memory as bf16, and needs a gradient scaler"
            }
            Change::Precision(Precision::BFloat16 | Precision::Float16) => {
                "changes the result: updates smaller than 1/256 of a weight are lost"
            }
            Change::Precision(_) => {
                "weights, gradients and states stay in fp32, and a copy of the weights in half precision is added"
            }
            Change::EightBitOptimizer => {
                "changes the result slightly: states are rounded to a byte"
            }
            Change::PlainSgd => "changes the result: no moments are kept",
            Change::Adapters => "changes what is trained: the base is frozen",
            Change::HalfRank => "changes what is trained",
            Change::FewerNegatives => "changes the loss",
            Change::HalfKeys => "changes the model: each query sees fewer keys",
            Change::HalfLayers => "changes the model",
            Change::EmptyCache => {
                "frees nothing that is needed: it gives back segments that are wholly free, and the next step asks the driver for them again, slowly; called in another process it does nothing"
            }
            Change::DeleteNames => {
                "frees nothing that autograd holds: a tensor saved for backward lives until backward has used it, whatever its name"
            }
            Change::ExpandableSegments
            | Change::SplitLimit
            | Change::FusedOptimizer
            | Change::FusedAttention => return None,
        })
    }
}
