//! Why there is no plan.

use cinch_graph::GraphError;
use cinch_model::ModelError;
use cinch_plan::PlanError;
use thiserror::Error;

use crate::DoesNotFit;

#[derive(Debug, Error)]
pub enum FitError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(
        "the effective batch is empty: batch_size and gradient_accumulation_steps must be 1 or more"
    )]
    EmptyBatch,
    #[error(
        "vram.update_in_backward needs vram.gradient_accumulation_steps 1, but it is \
         {accumulation}: a gradient that is gone after its update cannot be added to\n\
         hint: leave out --update-in-backward, or give --grad-accum 1 and a --batch-size of the \
         whole effective batch, with --checkpointing full if that is too large"
    )]
    UpdateInBackward { accumulation: usize },
    /// An answer, not a failure: what is needed, and what would fit.
    #[error("{0}")]
    DoesNotFit(Box<DoesNotFit>),
}
