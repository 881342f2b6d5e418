//! Everything that is planned for one configuration: the training step, and evaluation in the
//! same arena.

use cinch_config::{Config, StateFormat};
use cinch_graph::op::MomentFormat;
use cinch_graph::{Graph, Optimizer, Recompute, Target, TrainingGraph, differentiate};
use cinch_model::{Build, Purpose, build, compute_type};
use cinch_plan::{Breakdown, Options, Plan};

use crate::{FitError, Machine};

/// A planned configuration.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// What is run: the configuration with its final micro batch and accumulation.
    pub config: Config,
    pub training: TrainingGraph,
    pub plan: Plan,
    /// The same model without dropout and gradients.
    pub evaluation: Graph,
    pub evaluation_plan: Plan,
}

impl StepPlan {
    /// Plans `config` with the first `blocks` blocks recomputed, whatever it takes.
    pub fn new(
        config: &Config,
        machine: impl Into<Machine>,
        blocks: usize,
    ) -> Result<Self, FitError> {
        let machine = machine.into();
        let training = recomputed(&differentiated(config, machine.target)?, config, blocks)?;
        training.check_sizes()?;
        let plan = Plan::new(&training, options(config, machine));
        plan.check_sizes(&training)?;
        let evaluation = evaluation_graph(config, machine.target)?;
        evaluation.check_sizes()?;
        let evaluation_plan = plan.sharing(&training, &evaluation)?;
        evaluation_plan.check_sizes(&evaluation)?;
        Ok(Self {
            config: config.clone(),
            training,
            plan,
            evaluation,
            evaluation_plan,
        })
    }

    /// What is allocated: room for training and, in turn, for evaluation.
    pub fn arena_bytes(&self) -> u64 {
        self.plan.arena_bytes.max(self.evaluation_plan.arena_bytes)
    }

    /// The arena and what lies outside it.
    pub fn total_bytes(&self) -> u64 {
        self.arena_bytes().saturating_add(self.overhead_bytes())
    }

    /// What lies outside the arena.
    pub fn overhead_bytes(&self) -> u64 {
        beside_arena(self.plan.options, self.plan.host_bytes)
    }

    /// Bytes by purpose; they add up to [`Self::total_bytes`].
    pub fn breakdown(&self) -> Breakdown {
        let mut breakdown = self.plan.breakdown(&self.training);
        breakdown.overhead = self.overhead_bytes();
        breakdown.activations += self.arena_bytes() - self.plan.arena_bytes;
        breakdown
    }

    /// Operations of one optimizer step as it runs, recomputation included.
    pub fn step_flops(&self) -> u128 {
        let micro = self.training.micro_flops();
        micro * self.config.batch.accumulation as u128 + self.training.update_flops()
    }

    /// Operations of one optimizer step that the result needs.
    pub fn useful_flops(&self) -> u128 {
        let micro = self.training.useful_flops();
        micro * self.config.batch.accumulation as u128 + self.training.update_flops()
    }
}

/// What lies outside the arena. On the CPU offloaded states are a second allocation in the same
/// memory, so they count here; a GPU is rid of them.
pub(crate) fn beside_arena(options: Options, host_bytes: u64) -> u64 {
    let beside = match options.target {
        Target::Cpu => host_bytes,
        Target::Cuda => 0,
    };
    options.overhead_bytes.saturating_add(beside)
}

/// The step of a configuration, before any block is chosen for recomputation.
pub(crate) fn differentiated(config: &Config, target: Target) -> Result<TrainingGraph, FitError> {
    let purpose = Purpose::Train {
        label_smoothing: config.training.label_smoothing,
        loss_chunk: loss_chunk(config, target),
    };
    let forward = build(&config.model, form(config, purpose))?;
    Ok(differentiate(forward, &optimizer(config))?)
}

/// The step as it runs with its first `blocks` blocks recomputed.
pub(crate) fn recomputed(
    differentiated: &TrainingGraph,
    config: &Config,
    blocks: usize,
) -> Result<TrainingGraph, FitError> {
    let step = differentiated.recompute(Recompute::Blocks(blocks))?;
    if !config.batch.update_in_backward {
        return Ok(step);
    }
    match config.batch.accumulation {
        1 => Ok(step.update_in_backward()),
        accumulation => Err(FitError::UpdateInBackward { accumulation }),
    }
}

/// The same model without dropout and gradients.
pub(crate) fn evaluation_graph(config: &Config, target: Target) -> Result<Graph, FitError> {
    let loss_chunk = loss_chunk(config, target);
    let purpose = Purpose::Evaluate { loss_chunk };
    Ok(build(&config.model, form(config, purpose))?)
}

/// The configuration without what its graph does not depend on: two that are equal then have the
/// same graph.
pub(crate) fn same_graph(config: &Config) -> Config {
    let mut config = config.clone();
    config.batch.offload = false;
    config
}

/// What a step of the configuration is planned with.
pub(crate) fn options(config: &Config, machine: Machine) -> Options {
    Options {
        target: machine.target,
        offload_states: config.batch.offload,
        overhead_bytes: machine.overhead_bytes,
    }
}

fn form(config: &Config, purpose: Purpose) -> Build {
    Build {
        batch: config.batch.batch_size,
        seq_len: config.batch.seq_len,
        compute: compute_type(config.batch.precision),
        purpose,
    }
}

/// Rows of logits that exist at once; `None` leaves it to the op.
pub(crate) fn loss_chunk(config: &Config, target: Target) -> Option<usize> {
    config.batch.loss_chunk.or_else(|| match target {
        Target::Cpu => None,
        Target::Cuda => Some(cuda_loss_chunk(config)),
    })
}

/// What a chunk of logits may take on a GPU when nobody chose.
pub(crate) const CUDA_CHUNK_BYTES: u64 = 512 << 20;

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
        },
    }
}
