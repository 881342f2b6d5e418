//! Why there is no plan.

use cinch_config::ConfigError;
use cinch_device::DeviceError;
use cinch_graph::GraphError;
use cinch_model::ModelError;
use cinch_plan::PlanError;
use thiserror::Error;

use crate::DoesNotFit;

#[derive(Debug, Error)]
pub enum FitError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Device(#[from] DeviceError),
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
        "an effective batch of {target} cannot be had exactly with {}\n\
         hint: {}",
        stated_values(stated),
        offers(nearest)
    )]
    EffectiveBatch {
        target: usize,
        /// What was stated of micro batch and accumulation.
        stated: Vec<(&'static str, usize)>,
        /// The nearest effective batches that can be had, in rising order.
        nearest: Vec<usize>,
    },
    #[error(
        "no settings are left to choose from: {stated} cannot be had together on this machine\n\
         hint: leave one of them open"
    )]
    NothingToChoose { stated: String },
    #[error(
        "a margin of {margin} leaves nothing\nhint: the margin is a share from 0 to just below 1, such as 0.1"
    )]
    Margin { margin: f64 },
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

impl FitError {
    /// Whether the sizes are more than can be counted.
    pub fn is_too_large(&self) -> bool {
        matches!(
            self,
            Self::Graph(GraphError::TooLarge { .. }) | Self::Plan(PlanError::TooLarge { .. })
        )
    }
}

fn stated_values(stated: &[(&str, usize)]) -> String {
    let values = stated.iter().map(|(key, value)| format!("{key} = {value}"));
    values.collect::<Vec<_>>().join(" and ")
}

fn offers(nearest: &[usize]) -> String {
    let offers: Vec<String> = nearest.iter().map(ToString::to_string).collect();
    format!(
        "the nearest that can is {}; or leave the micro batch and the accumulation open",
        offers.join(" or ")
    )
}
