//! What each of several ranks holds when a model's states are divided among them: DeepSpeed's ZeRO stages and PyTorch's
//! fully sharded data parallel. Computed from the rules below, not measured.
//!
//! | | parameters | gradients | optimizer | while a step runs |
//! |---|---|---|---|---|
//! | DDP | whole | whole | whole | buckets of all gradients |
//! | ZeRO-1 | whole | whole | 1/N | bucket of gradients |
//! | ZeRO-2 | whole | 1/N | 1/N | bucket of gradients |
//! | ZeRO-3 | 1/N | 1/N | 1/N | gathered parameters, bucket of gradients |
//! | FSDP | 1/N | 1/N | 1/N | gathered layers, gradient of a layer |
//!
//! DeepSpeed steps on an fp32 copy of its partition, with fp32 moments, whatever the type of the weights; FSDP steps on
//! the shards as they are. Stages 1 and 2 flatten all trained parameters into one buffer, padded so that every rank's
//! part is the same; stage 3 and FSDP divide each parameter and round up. Frozen parameters are divided only by those
//! two. The micro batch is that of one rank, so activations are those of the run on one card.

use std::num::NonZeroU64;

use crate::TorchError;
use crate::eager::DType;
use crate::eager::optimizer::{Execution, Optimizer};
use crate::holdings::Holdings;
use crate::model::{Prediction, Weights, Workload};
use crate::overhead::Overhead;

/// A way to divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// DistributedDataParallel: every rank holds all of it, and the gradients once more in the
    /// buckets that are exchanged.
    Replicated,
    Zero1,
    Zero2,
    Zero3,
    /// `fully_shard` on every layer and on the model around them.
    FullShard,
}

impl Scheme {
    pub const ALL: [Scheme; 5] = [
        Scheme::Replicated,
        Scheme::Zero1,
        Scheme::Zero2,
        Scheme::Zero3,
        Scheme::FullShard,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Scheme::Replicated => "DDP",
            Scheme::Zero1 => "ZeRO-1",
            Scheme::Zero2 => "ZeRO-2",
            Scheme::Zero3 => "ZeRO-3",
            Scheme::FullShard => "FSDP full shard",
        }
    }

    fn divides_parameters(self) -> bool {
        matches!(self, Scheme::Zero3 | Scheme::FullShard)
    }
}

/// How a run is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    pub scheme: Scheme,
    pub ranks: NonZeroU64,
}

impl Division {
    /// What each rank of a run holds, whose micro batch is the workload's.
    pub fn shares(self, workload: &Workload) -> Result<Shares, TorchError> {
        Ok(Model::of(workload)?.divided(self.scheme, self.ranks))
    }
}

/// Bytes on each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    pub scheme: Scheme,
    pub ranks: NonZeroU64,
    /// Held between uses, frozen ones included.
    pub parameters: u64,
    pub gradients: u64,
    /// Moments, and DeepSpeed's fp32 copy of the parameters.
    pub optimizer: u64,
    /// Parameters of all ranks that are whole at once while a step runs.
    pub gathered: u64,
    /// Gradients on their way to the ranks that keep them.
    pub buckets: u64,
    /// The most that the batch, what is kept for backward and what backward makes take, with workspaces.
    pub activations: u64,
    /// The most that the optimizer takes while it steps, when activations are gone.
    pub step: u64,
    /// The parts that exist at once.
    pub total: u64,
}

impl Shares {
    /// The figure to plan a rank's card with. What the allocator holds beyond tensors is taken over from the run on one
    /// card.
    pub fn safe_bytes(&self, prediction: &Prediction, overhead: &Overhead) -> u64 {
        let beyond = prediction
            .peak_reserved
            .saturating_sub(prediction.peak_allocated);
        let reserved = self.total.saturating_add(beyond);
        let nccl = match self.ranks.get() {
            1 => 0,
            _ => overhead.nccl,
        };
        overhead
            .safe_of(reserved, prediction.libraries)
            .saturating_add(nccl)
    }
}

/// `reduce_bucket_size` of DeepSpeed unless set, in values: one buffer of this size exists in backward.
const REDUCE_BUCKET: u64 = 500_000_000;
/// `stage3_max_live_parameters` of DeepSpeed unless set: parameters that are used again soon stay
/// whole up to this many, and the small ones that it never releases are among them.
const MAX_LIVE: u64 = 1_000_000_000;
/// DeepSpeed starts every rank's part of the flat buffer at an even value.
const ALIGNMENT: u64 = 2;
/// Layers that FSDP holds whole: the one that runs and the one fetched meanwhile.
const WHOLE_LAYERS: u64 = 2;

/// Each scheme's bytes per rank for this many ranks.
pub fn shares(workload: &Workload, ranks: NonZeroU64) -> Result<Vec<Shares>, TorchError> {
    let model = Model::of(workload)?;
    Ok(Scheme::ALL
        .iter()
        .map(|scheme| model.divided(*scheme, ranks))
        .collect())
}

struct Model {
    weights: Weights,
    trained_bytes: u64,
    /// One layer, and what is around the layers.
    layer: u64,
    around: u64,
    activations: u64,
    optimizer: Optimizer,
    dtype: DType,
}

impl Model {
    fn of(workload: &Workload) -> Result<Model, TorchError> {
        let weights = workload.weights()?;
        let trained_bytes = weights
            .trainable
            .iter()
            .map(|(n, dtype)| n * dtype.size())
            .sum();
        let mut longer = workload.clone();
        longer.architecture = longer
            .architecture
            .with_layers(longer.architecture.layers() + 1);
        // A model with one layer more is larger by that layer; of several encoders, by one in each.
        let all_of_one_layer = longer.weights()?.bytes - weights.bytes;
        let encoders = workload.architecture.towers();
        let holdings = Holdings::of(workload)?;
        Ok(Model {
            layer: all_of_one_layer / encoders,
            around: weights.bytes - workload.architecture.layers() * all_of_one_layer,
            // Leaves that are no parameters take gradients too: embeddings under adapters with checkpointing.
            activations: holdings.activations
                + holdings.workspaces
                + holdings.gradients.saturating_sub(trained_bytes),
            trained_bytes,
            weights,
            optimizer: workload.recipe.optimizer,
            dtype: workload.recipe.precision.weights(),
        })
    }

    fn divided(&self, scheme: Scheme, ranks: NonZeroU64) -> Shares {
        // A replica's part is all of it.
        let n = match scheme {
            Scheme::Replicated => 1,
            _ => ranks.get(),
        };
        let trainable = &self.weights.trainable;
        let elements: u64 = trainable.iter().map(|(elements, _)| elements).sum();
        let frozen = self.weights.bytes - self.trained_bytes;
        // Values of a rank's part.
        let part = if scheme.divides_parameters() {
            trainable.iter().map(|(values, _)| values.div_ceil(n)).sum()
        } else {
            elements.next_multiple_of(ALIGNMENT.saturating_mul(n)) / n
        };
        let part_bytes = if scheme.divides_parameters() {
            let bytes = |(values, dtype): &(u64, DType)| values.div_ceil(n) * dtype.size();
            trainable.iter().map(bytes).sum()
        } else {
            // The flat buffer has one type; the largest of them is on the safe side.
            let size = trainable.iter().map(|(_, dtype)| dtype.size()).max();
            part * size.unwrap_or(0)
        };
        let parameters = if scheme.divides_parameters() {
            part_bytes + frozen.div_ceil(n)
        } else {
            self.weights.bytes
        };
        let gradients = match scheme {
            Scheme::Replicated | Scheme::Zero1 => self.trained_bytes,
            _ => part_bytes,
        };
        let float32 = DType::Float32.size();
        let optimizer = match scheme {
            Scheme::Replicated | Scheme::FullShard => trainable
                .iter()
                .map(|(values, dtype)| {
                    state_bytes(self.optimizer, values.div_ceil(n), dtype.size())
                })
                .sum(),
            _ => part * float32 + state_bytes(self.optimizer, part, float32),
        };
        let all_values = self.weights.bytes / self.dtype.size();
        let (gathered, buckets) = match scheme {
            Scheme::Replicated => (0, self.trained_bytes),
            Scheme::Zero1 | Scheme::Zero2 => (0, REDUCE_BUCKET * self.dtype.size()),
            Scheme::Zero3 => (
                MAX_LIVE.min(all_values) * self.dtype.size(),
                REDUCE_BUCKET * self.dtype.size(),
            ),
            Scheme::FullShard => (
                (self.around + WHOLE_LAYERS * self.layer).min(self.weights.bytes),
                self.layer.max(self.around).min(self.trained_bytes),
            ),
        };
        let step = match (scheme, self.optimizer) {
            // √v of all of the rank's shards.
            (Scheme::Replicated, Optimizer::Adam(Execution::Foreach)) => self.trained_bytes,
            (Scheme::FullShard, Optimizer::Adam(Execution::Foreach)) => part_bytes,
            (Scheme::Replicated | Scheme::FullShard, _) => 0,
            // The rank's gradients in fp32.
            _ => part * float32,
        };
        let states = parameters + gradients + optimizer;
        Shares {
            scheme,
            ranks,
            parameters,
            gradients,
            optimizer,
            gathered,
            buckets,
            activations: self.activations,
            step,
            total: states + step.max(gathered + buckets + self.activations),
        }
    }
}

/// What an optimizer keeps for this many values of this size.
fn state_bytes(optimizer: Optimizer, values: u64, size: u64) -> u64 {
    // A byte a value, and an fp32 scale for every 256.
    let eight_bit = values + values.div_ceil(256) * DType::Float32.size();
    match optimizer {
        Optimizer::Adam(_) => 2 * values * size,
        Optimizer::Sgd { momentum, .. } => u64::from(momentum) * values * size,
        Optimizer::Adam8Bit | Optimizer::PagedAdam { eight_bit: true } => 2 * eight_bit,
        Optimizer::PagedAdam { eight_bit: false } => 2 * values * DType::Float32.size(),
        Optimizer::Lion8Bit => eight_bit,
        // Rows and columns of matrices are small beside them.
        Optimizer::Adafactor => 0,
    }
}
