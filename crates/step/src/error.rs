//! Why a step cannot be planned.

use cinch_graph::GraphError;
use cinch_model::ModelError;
use cinch_plan::PlanError;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum StepError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(
        "vram.update_in_backward needs vram.gradient_accumulation_steps 1, but it is \
         {accumulation}: a gradient that is gone after its update cannot be added to\n\
         hint: leave out --update-in-backward, or give --grad-accum 1 and a --batch-size of the \
         whole effective batch, with --checkpointing full if that is too large"
    )]
    UpdateInBackward { accumulation: usize },
}

impl StepError {
    /// Whether the sizes are more than can be counted.
    pub fn is_too_large(&self) -> bool {
        matches!(
            self,
            Self::Graph(GraphError::TooLarge { .. })
                | Self::Model(ModelError::Graph(GraphError::TooLarge { .. }))
                | Self::Plan(PlanError::TooLarge { .. })
        )
    }
}
