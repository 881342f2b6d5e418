//! One planned training step: its graphs, their plans, evaluation in the same arena, the predicted
//! time on a card, and the report of all that.
//!
//! A step is planned as its configuration stands. Choosing the configuration so that a budget is
//! met is not done here but in the crate that searches.
//!
//! ```
//! use cinch_config::Settings;
//! use cinch_graph::Target;
//! use cinch_step::StepPlan;
//!
//! let config = Settings::new().resolve()?;
//! let step = StepPlan::new(&config, Target::Cuda, 0)?;
//! assert_eq!(step.breakdown().total(), step.total_bytes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cost;
mod encoder;
mod error;
mod files;
mod generation;
mod graph;
mod network;
mod network_bytes;
mod plan;
mod recorded;
mod report;

pub use cost::{Prediction, StepTimes};
pub use encoder::{EncoderPlan, EncoderRun};
pub use error::StepError;
pub use files::FileMemory;
pub use generation::{GenerationPlan, GenerationRun, SamplePlan};
pub use graph::{
    CUDA_CHUNK_BYTES, VariantForm, adapter_config, adapter_shape, check_cut, differentiated,
    evaluation_graph, needs_whole_batch, options, recomputed, same_graph, sharding, variant_forms,
};
pub use network::NetworkTimes;
pub use network_bytes::NetworkBytes;
pub use plan::{EmbeddingPlan, StepPlan, Variant, VariantGraphs, beside_arena, sample_bytes};
pub use recorded::{num_micro_recordings, recorded_bytes, training_launches, whole_launches};
pub use report::{
    CheckpointingReport, HostMemory, MemoryReport, PlanReport, SettingsReport, VariantReport,
};

use cinch_graph::Target;

/// What a step is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTarget {
    pub target: Target,
    /// What the device loses besides the arena and recorded steps: the plan's own figure, or a
    /// measured one.
    pub overhead_bytes: u64,
    /// What it loses to the network where several ranks exchange messages: the same.
    pub network: NetworkBytes,
}

impl From<Target> for StepTarget {
    fn from(target: Target) -> Self {
        Self {
            target,
            overhead_bytes: cinch_plan::overhead_bytes(target),
            network: NetworkBytes::assumed(target),
        }
    }
}
