//! The architectures, each a function that builds a graph from its configuration.
//!
//! A model says what is computed; what that costs in memory follows from the ops it uses.

mod gpt2;
mod mamba;
mod variant;

use cinch_config::{ModelConfig, Precision};
use cinch_graph::{DType, Graph, GraphError, Init, TensorId};
use thiserror::Error;

pub use variant::{Tunable, tunables, with_num_blocks};

#[derive(Debug, Error)]
pub enum ModelError {
    #[error(
        "a sequence of {seq_len} is longer than the model's {positions} positions\n\
         hint: lower vram.max_seq_len to {positions}, or raise model.max_seq_len to {seq_len}"
    )]
    SequenceTooLong { seq_len: usize, positions: usize },
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// What a graph is built for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Purpose {
    /// The loss, with dropout.
    Train {
        label_smoothing: f64,
        /// Rows of logits at once; chosen from the vocabulary where not given.
        loss_chunk: Option<usize>,
    },
    /// The loss, without dropout or smoothing.
    Evaluate { loss_chunk: Option<usize> },
    /// The logits of one position of each sequence.
    Generate,
}

/// The sizes that do not belong to the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Build {
    pub batch: usize,
    pub seq_len: usize,
    /// What activations are computed in.
    pub compute: DType,
    pub purpose: Purpose,
}

/// The element type of a precision's activations.
pub fn compute_type(precision: Precision) -> DType {
    match precision {
        Precision::Fp32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
        Precision::Fp16 => DType::F16,
    }
}

/// Builds the forward graph of a model.
pub fn build(model: &ModelConfig, build: Build) -> Result<Graph, ModelError> {
    let positions = model.max_seq_len();
    if build.seq_len > positions {
        return Err(ModelError::SequenceTooLong {
            seq_len: build.seq_len,
            positions,
        });
    }
    let mut graph = Graph::new(build.compute);
    match model {
        ModelConfig::Mamba(config) => mamba::build(&mut graph, config, build)?,
        ModelConfig::Gpt2(config) => gpt2::build(&mut graph, config, build)?,
    }
    Ok(graph)
}

/// Names of the inputs that the training loop fills.
pub mod input {
    pub const TOKENS: &str = "tokens";
    pub const TARGETS: &str = "targets";
    /// The position whose logits are wanted.
    pub const POSITION: &str = "position";
}

impl Build {
    fn tokens(&self, graph: &mut Graph) -> TensorId {
        graph.batch(input::TOKENS, [self.batch, self.seq_len], DType::I32)
    }

    /// The rate while training, zero otherwise.
    fn dropout(&self, rate: f64) -> f64 {
        match self.purpose {
            Purpose::Train { .. } => rate,
            Purpose::Evaluate { .. } | Purpose::Generate => 0.0,
        }
    }

    /// What comes after the last norm: the loss, or the logits.
    fn head(&self, graph: &mut Graph, h: TensorId, weight: TensorId) -> Result<(), GraphError> {
        let (label_smoothing, loss_chunk) = match self.purpose {
            Purpose::Train {
                label_smoothing,
                loss_chunk,
            } => (label_smoothing, loss_chunk),
            Purpose::Evaluate { loss_chunk } => (0.0, loss_chunk),
            Purpose::Generate => {
                let position = graph.batch(input::POSITION, [self.batch], DType::I32);
                graph.logits("logits", h, weight, position)?;
                return Ok(());
            }
        };
        let targets = graph.batch(input::TARGETS, [self.batch, self.seq_len], DType::I32);
        graph.cross_entropy("loss", h, weight, targets, label_smoothing, loss_chunk)?;
        Ok(())
    }
}

/// Scale and shift of a layer norm.
fn norm_weights(graph: &mut Graph, name: &str, width: usize) -> (TensorId, TensorId) {
    let gamma = graph.small_weight(&format!("{name}.weight"), [width], Init::Ones);
    let beta = graph.small_weight(&format!("{name}.bias"), [width], Init::Zeros);
    (gamma, beta)
}
