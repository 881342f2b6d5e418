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
    #[error(
        "no linear layer of the model matches the adapters' target `{target}`\n\
         hint: the layers are {modules}; or say --lora-targets all-linear"
    )]
    NoTarget { target: String, modules: String },
    #[error(
        "the adapters' target `{pattern}` is no regular expression: {problem}\n\
         hint: list names, --lora-targets q_proj,v_proj, or say all-linear"
    )]
    Pattern { pattern: String, problem: String },
    #[error(
        "quantised weights cannot be trained\n\
         hint: train adapters on them, --lora-rank 16, or leave out --quantization"
    )]
    QuantisedAndTrained,
    #[error(
        "the model's files hold quantised weights, which cinch does not read\n\
         hint: take the files before quantisation, and say --quantization 4bit to have them \
         quantised while they are read"
    )]
    SavedQuantised,
    #[error(
        "cinch trains adapters in fp32\n\
         hint: set lora.dtype to fp32; `--engine pytorch` predicts the others"
    )]
    AdapterType,
}

impl StepError {
    /// Names the modules there are by their ends, each once.
    pub(crate) fn no_target(target: &str, modules: &[String]) -> Self {
        let mut ends: Vec<&str> = Vec::new();
        for module in modules {
            let end = module.rsplit('.').next().unwrap_or(module);
            if !ends.contains(&end) {
                ends.push(end);
            }
        }
        Self::NoTarget {
            target: target.to_owned(),
            modules: ends.join(", "),
        }
    }

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
