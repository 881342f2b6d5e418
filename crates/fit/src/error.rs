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
    /// An answer, not a failure: what is needed, and what would fit.
    #[error("{0}")]
    DoesNotFit(Box<DoesNotFit>),
}
