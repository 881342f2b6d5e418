//! The graphs of a configuration: the training step, with blocks recomputed and weights updated
//! as it says, and the evaluation.

use cinch_config::{Config, StateFormat};
use cinch_graph::op::MomentFormat;
use cinch_graph::{Graph, Optimizer, Recompute, Target, TrainingGraph, differentiate};
use cinch_model::{Build, Purpose, build, compute_type};
use cinch_plan::Options;

use crate::{StepError, StepTarget};

/// The step of a configuration, before any block is chosen for recomputation.
pub fn differentiated(config: &Config, target: Target) -> Result<TrainingGraph, StepError> {
    let purpose = Purpose::Train {
        label_smoothing: config.training.label_smoothing,
        loss_chunk: loss_chunk(config, target),
    };
    let forward = build(&config.model, form(config, purpose))?;
    Ok(differentiate(forward, &optimizer(config))?)
}

/// The step as it runs with its first `blocks` blocks recomputed.
pub fn recomputed(
    differentiated: &TrainingGraph,
    config: &Config,
    blocks: usize,
) -> Result<TrainingGraph, StepError> {
    let step = differentiated.recompute(Recompute::Blocks(blocks))?;
    if !config.batch.update_in_backward {
        return Ok(step);
    }
    match config.batch.accumulation {
        1 => Ok(step.update_in_backward()),
        accumulation => Err(StepError::UpdateInBackward { accumulation }),
    }
}

/// The same model without dropout and gradients.
pub fn evaluation_graph(config: &Config, target: Target) -> Result<Graph, StepError> {
    let loss_chunk = loss_chunk(config, target);
    let purpose = Purpose::Evaluate { loss_chunk };
    Ok(build(&config.model, form(config, purpose))?)
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
fn loss_chunk(config: &Config, target: Target) -> Option<usize> {
    config.batch.loss_chunk.or_else(|| match target {
        Target::Cpu => None,
        Target::Cuda => Some(cuda_loss_chunk(config)),
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
        },
    }
}
