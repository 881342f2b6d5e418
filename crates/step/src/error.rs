//! Why a step cannot be planned.

use cinch_graph::GraphError;
use cinch_model::ModelError;
use cinch_plan::PlanError;
use cinch_weights::WeightError;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum StepError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("a step needs a graph to train by")]
    NoVariant,
    #[error(
        "the phases `{}` and `{}` of a model do not train the same parameters",
        phases[0], phases[1]
    )]
    OtherParameters { phases: [String; 2] },
    #[error(
        "vram.update_in_backward needs vram.gradient_accumulation_steps 1, but it is \
         {accumulation}: a gradient that is gone after its update cannot be added to\n\
         hint: leave out --update-in-backward, or give --grad-accum 1 and a --batch-size of the \
         whole effective batch, with --checkpointing full if that is too large"
    )]
    UpdateInBackward { accumulation: usize },
    #[error(
        "vram.update_in_backward is for one rank, but there are {ranks}: a gradient that is gone \
         after its update cannot be added up over them\n\
         hint: leave out --update-in-backward; --shard gradients keeps only a part of gradients too"
    )]
    UpdateInBackwardOfRanks { ranks: usize },
    #[error(
        "the batch cannot be cut over {ranks} ranks because of {what}: {reason}\n\
         hint: train it on one device: --world 1"
    )]
    WholeBatchOfRanks {
        ranks: usize,
        what: String,
        reason: &'static str,
    },
    #[error(transparent)]
    Adapters(#[from] WeightError),
    #[error(
        "lora.modules_to_save names `{name}`, and `{module}` is a linear layer: those are trained by \
         their adapters here\n\
         hint: leave `{name}` out, or train all weights, without --lora-rank"
    )]
    WholeLinear { name: String, module: String },
    #[error(
        "lora.modules_to_save names `{name}`, and no embedding, norm or head of this model has a \
         name that ends so\n\
         hint: these can be trained whole beside adapters: {ends}"
    )]
    NothingWhole { name: String, ends: String },
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
        "optimizer states in fp16 would lose every square below 6e-8 and divide by nothing\n\
         hint: --optimizer-states 8bit, or --precision bf16"
    )]
    StatesInHalf,
    #[error(
        "the batch cannot be cut into {accumulation} micro batches because of {what}: {reason}\n\
         hint: --grad-accum 1 with a --batch-size of the whole batch, {effective}"
    )]
    WholeBatch {
        accumulation: usize,
        effective: usize,
        what: String,
        reason: &'static str,
    },
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
