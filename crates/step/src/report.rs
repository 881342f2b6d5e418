//! The plan as data with stable names: `cinch plan --json`.

use std::collections::BTreeMap;

use cinch_graph::{Graph, Role, Target};
use cinch_plan::{Breakdown, LiveTensor, Moment};
use serde::{Serialize, Serializer};

use crate::{FileMemory, StepPlan};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanReport {
    pub model: String,
    pub size: Option<String>,
    pub parameters: u64,
    pub trainable: u64,
    pub device: &'static str,
    pub settings: SettingsReport,
    pub memory: MemoryReport,
    pub budget_bytes: Option<u64>,
    pub fits: bool,
    /// Operations of one optimizer step as it runs.
    #[serde(serialize_with = "count")]
    pub step_flops: u128,
    /// Those of them that are not recomputation.
    #[serde(serialize_with = "count")]
    pub useful_flops: u128,
    /// The graphs that share the arena, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub variants: Vec<VariantReport>,
    /// Of the variant that takes the most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<Moment>,
}

/// What 64 bits do not hold is written in floating point: few readers of JSON have larger
/// integers.
fn count<S: Serializer>(count: &u128, serializer: S) -> Result<S::Ok, S::Error> {
    match u64::try_from(*count) {
        Ok(count) => serializer.serialize_u64(count),
        Err(_) => serializer.serialize_f64(*count as f64),
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SettingsReport {
    pub batch_size: usize,
    pub accumulation: usize,
    pub effective_batch: usize,
    pub seq_len: usize,
    pub precision: &'static str,
    pub checkpointing: CheckpointingReport,
    pub offload: bool,
    pub offload_frozen: bool,
    /// Recomputed blocks with activations in host memory.
    pub offload_activations: usize,
    pub optimizer_states: &'static str,
    pub update_in_backward: bool,
    /// Those that train together, each with such micro batches.
    pub ranks: usize,
    pub nodes: usize,
    /// What each of them keeps only a part of.
    pub shard: &'static str,
}

/// One of several graphs that a configuration is trained by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VariantReport {
    pub name: String,
    pub phase: String,
    /// The step with which its phase begins.
    pub first_step: Option<u64>,
    pub seq_len: usize,
    /// What it uses of the arena at its own peak.
    pub peak_bytes: u64,
    /// Whether the plan's peak is this one's.
    pub is_peak: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CheckpointingReport {
    pub blocks: usize,
    pub of: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryReport {
    /// The most that is in use inside the arena at once.
    pub peak_bytes: u64,
    /// What is allocated.
    pub arena_bytes: u64,
    /// What the device loses besides the arena.
    pub overhead_bytes: u64,
    /// No plan of this step can be smaller.
    pub lower_bound_bytes: u64,
    /// In host memory: what is allocated there for offloaded tensors.
    pub host_bytes: u64,
    pub host: HostMemory,
    pub breakdown: Breakdown,
    /// The node at which the peak is reached, and the largest tensors alive then.
    pub peak_at: String,
    pub alive_at_peak: Vec<LiveTensor>,
}

/// What the host's memory holds, as far as it is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HostMemory {
    /// Optimizer states that the device reads and writes there.
    pub offloaded_states: u64,
    /// Frozen weights that are fetched from there.
    pub offloaded_weights: u64,
    /// Activations that are stored there in the forward and fetched in the backward.
    pub offloaded_activations: u64,
    /// Pinned buffers through which batches reach a GPU.
    pub staging: u64,
    /// The effective batch of a step, as wide as the longest rows.
    pub batch: u64,
    /// Samples with their layout, where the data has been read; text is read from its cache on
    /// disk as it is needed.
    pub samples: u64,
    /// A text that the run writes between steps, with the weights in single precision.
    pub text: u64,
    /// What passes through it while a run saves or resumes, and while adapters are merged.
    pub files: FileMemory,
    /// On the CPU, the arena with all that a step works in; on a GPU it is the device's.
    pub arena: u64,
    /// The process itself: code, tables, thread stacks. Known for the CPU, where it is the plan's
    /// overhead.
    pub process: Option<u64>,
}

impl HostMemory {
    /// All that is known.
    pub fn total(&self) -> u64 {
        let here = [self.arena, self.process.unwrap_or(0)];
        let besides = self.besides_arena().map(|(_, bytes)| bytes);
        let parts = besides.into_iter().chain(here);
        parts.fold(0, u64::saturating_add)
    }

    /// The parts that are no arena and no program, by name.
    pub fn besides_arena(&self) -> [(&'static str, u64); 8] {
        [
            ("optimizer states", self.offloaded_states),
            ("frozen weights", self.offloaded_weights),
            ("activations", self.offloaded_activations),
            ("pinned buffers", self.staging),
            ("samples", self.samples),
            ("the batch of a step", self.batch),
            ("a text after each epoch", self.text),
            ("saving or resuming", self.files.of_run()),
        ]
    }
}

/// Tensors that a report lists by name.
const NUM_ALIVE: usize = 10;

impl StepPlan {
    /// Bytes of a checkpoint: what is trained, and the optimizer's states.
    pub fn checkpoint_bytes(&self) -> u64 {
        let graph: &Graph = &self.training;
        let trained = graph.parameters.iter().filter(|one| one.is_trained());
        let tensors = trained.flat_map(|one| std::iter::once(one.master).chain(one.states()));
        let tensors = tensors.chain(graph.loss_scale);
        tensors.fold(0, |sum, id| sum.saturating_add(graph.ty(id).bytes()))
    }

    /// The host's side of the plan; samples are counted by who reads them.
    pub fn host_memory(&self) -> HostMemory {
        let batch = self.longest().training.tensors.iter();
        let batch = batch.filter(|tensor| tensor.role == Role::Batch);
        let batch = batch.fold(0_u64, |sum, tensor| sum.saturating_add(tensor.ty.bytes()));
        // What variants name alike has one place, as large as the longest rows need it.
        let away = |role: Role| {
            let mut places: BTreeMap<&str, u64> = BTreeMap::new();
            let tensors = self.variants().iter().flat_map(|v| &v.training.tensors);
            for tensor in tensors.filter(|tensor| tensor.role == role) {
                let place = places.entry(&tensor.name).or_default();
                *place = cinch_graph::aligned(tensor.ty.bytes()).max(*place);
            }
            places.into_values().fold(0, u64::saturating_add)
        };
        let offloaded_weights = away(Role::Offloaded);
        let offloaded_activations = away(Role::HostActivation);
        let others = offloaded_weights.saturating_add(offloaded_activations);
        let target = self.plan.options.target;
        let accumulation = self.config.batch.accumulation as u64;
        let text = self.sample().map_or(0, |sample| sample.host_bytes);
        let host = HostMemory {
            offloaded_states: self.plan.host_bytes.saturating_sub(others),
            offloaded_weights,
            offloaded_activations,
            staging: 0,
            batch: batch.saturating_mul(accumulation),
            samples: 0,
            text,
            files: FileMemory::of(&self.training, target),
            arena: 0,
            process: None,
        };
        match target {
            Target::Cpu => HostMemory {
                arena: self.arena_bytes(),
                process: Some(self.plan.options.overhead_bytes.saturating_sub(text)),
                ..host
            },
            Target::Cuda => HostMemory {
                staging: batch,
                ..host
            },
        }
    }

    /// The graphs that share the arena; none where there is only one.
    pub fn variant_reports(&self) -> Vec<VariantReport> {
        if self.variants().len() == 1 {
            return Vec::new();
        }
        let variants = self.variants().iter().enumerate();
        let report = variants.map(|(index, variant)| VariantReport {
            name: variant.name(),
            phase: variant.phase.name.to_string(),
            first_step: variant.phase.begins(),
            seq_len: variant.seq_len,
            peak_bytes: variant.plan.peak_bytes,
            is_peak: self.is_largest(index),
        });
        report.collect()
    }

    pub fn report(&self, target: Target, with_timeline: bool) -> PlanReport {
        let config = &self.config;
        let budget_bytes = config.batch.budget.map(|budget| budget.get());
        let mut alive_at_peak = self.plan.alive_at_peak(&self.training);
        alive_at_peak.truncate(NUM_ALIVE);
        PlanReport {
            model: config.model.name().to_owned(),
            size: config.model.size_name().map(str::to_owned),
            parameters: config.model.parameters(),
            trainable: self.training.num_trainable(),
            device: match target {
                Target::Cpu => "cpu",
                Target::Cuda => "cuda",
            },
            settings: SettingsReport {
                batch_size: config.batch.batch_size,
                accumulation: config.batch.accumulation,
                effective_batch: config.batch.effective_batch(),
                seq_len: config.batch.seq_len,
                precision: config.batch.precision.name(),
                checkpointing: CheckpointingReport {
                    blocks: self.training.num_recomputed,
                    of: config.model.num_blocks(),
                },
                offload: self.plan.options.offload_states,
                offload_frozen: config.batch.offload_frozen,
                offload_activations: self.training.num_offloaded,
                optimizer_states: config.batch.states.name(),
                update_in_backward: config.batch.update_in_backward,
                ranks: config.batch.world.ranks,
                nodes: config.batch.world.nodes,
                shard: config.batch.world.shard.name(),
            },
            memory: MemoryReport {
                peak_bytes: self.plan.peak_bytes,
                arena_bytes: self.arena_bytes(),
                overhead_bytes: self.overhead_bytes(),
                lower_bound_bytes: self.plan.lower_bound_bytes,
                host_bytes: self.plan.host_bytes,
                host: self.host_memory(),
                breakdown: self.breakdown(),
                peak_at: self.training.nodes[self.plan.peak_node].name.clone(),
                alive_at_peak,
            },
            budget_bytes,
            fits: budget_bytes.is_none_or(|budget| self.total_bytes() <= budget),
            step_flops: self.step_flops(),
            useful_flops: self.useful_flops(),
            variants: self.variant_reports(),
            timeline: if with_timeline {
                self.plan.moments(&self.training)
            } else {
                Vec::new()
            },
        }
    }
}
