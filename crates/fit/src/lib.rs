//! From a configuration to a plan that stays inside its budget.
//!
//! What the user asked for is kept: effective batch, sequence length, precision. What may
//! change to meet a budget is how the effective batch is cut into micro batches, how many blocks
//! are recomputed and how many rows of logits exist at once, because none of these changes the
//! gradient.
//!
//! ```
//! use cinch_config::{Settings, Source};
//! use cinch_graph::Target;
//!
//! let mut settings = Settings::new();
//! settings.set("vram.budget", "2gb", Source::Flag("--vram".to_owned()))?;
//! let config = settings.resolve()?;
//! let step = cinch_fit::plan(&config, Target::Cuda)?;
//! assert!(step.total_bytes() <= 2 << 30);
//! // The batch is cut otherwise; what a step learns from stays.
//! let (asked, planned) = (&config.batch, &step.config.batch);
//! assert_eq!(
//!     asked.batch_size * asked.accumulation,
//!     planned.batch_size * planned.accumulation
//! );
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod budget;
mod error;
pub mod search;
pub mod world;

pub use budget::{BudgetChange, DoesNotFit};
pub use error::FitError;

use cinch_config::{Checkpointing, Config};
use cinch_step::{StepPlan, StepTarget};

/// The plan of a configuration: as it stands, or within its budget.
///
/// With a budget, the largest micro batch that fits without recomputation is taken; where none
/// does, a micro batch of one with the fewest recomputed blocks, and with fewer rows of logits at
/// once only if that is not enough. A configuration that says how many blocks to recompute, or
/// how many rows of logits to hold, is taken at its word.
pub fn plan(config: &Config, machine: impl Into<StepTarget>) -> Result<StepPlan, FitError> {
    let machine = machine.into();
    let Some(budget) = config.batch.budget else {
        // Whoever wants activations in host memory has them recomputed otherwise.
        let away = config.batch.offload_activations;
        let blocks = asked_blocks(config).unwrap_or(away.min(config.model.num_blocks()));
        return Ok(StepPlan::new(config, machine, blocks)?);
    };
    let budget = budget.get();
    let asked = asked_blocks(config);
    let (mut smallest, mut uncounted) = (None, None);
    let whole = cinch_step::needs_whole_batch(config, machine.target);
    for (micro, accumulation) in budget::splits(config, whole) {
        let mut split = config.clone();
        split.batch.batch_size = micro;
        split.batch.accumulation = accumulation;
        let step = match StepPlan::new(&split, machine, asked.unwrap_or(0)) {
            // What cannot be counted does not fit; a smaller micro batch may.
            Err(error) if error.is_too_large() => {
                uncounted = Some(error);
                continue;
            }
            other => other?,
        };
        if step.total_bytes() <= budget {
            return Ok(step);
        }
        smallest = Some((split, step));
    }
    let Some((split, step)) = smallest else {
        return Err(uncounted.map_or(FitError::EmptyBatch, FitError::Step));
    };
    for loss_chunk in budget::loss_chunks(&split) {
        let mut chunked = split.clone();
        chunked.batch.loss_chunk = loss_chunk;
        let found = match asked {
            None => budget::fewest_blocks(&chunked, machine, budget)?,
            Some(blocks) => Some(StepPlan::new(&chunked, machine, blocks)?),
        };
        if let Some(step) = found.filter(|step| step.total_bytes() <= budget) {
            return Ok(step);
        }
    }
    Err(FitError::DoesNotFit(Box::new(DoesNotFit::new(
        config, &step, machine, budget,
    )?)))
}

/// The number of recomputed blocks that the configuration fixes.
fn asked_blocks(config: &Config) -> Option<usize> {
    match config.batch.checkpointing {
        Checkpointing::Auto => None,
        Checkpointing::None => Some(0),
        Checkpointing::Full => Some(config.model.num_blocks()),
        Checkpointing::Blocks(blocks) => Some(blocks),
    }
}
