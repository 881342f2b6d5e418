//! The architectures, each a function that builds a graph from its configuration.
//!
//! A model says what is computed; what that costs in memory follows from the ops it uses.
//!
//! ```
//! use cinch_architecture::{Architecture, Gpt2};
//! use cinch_graph::DType;
//! use cinch_model::{Build, Purpose, build};
//!
//! let graph = build(
//!     &Architecture::Gpt2(Gpt2::default()),
//!     Build {
//!         batch: 1,
//!         seq_len: 128,
//!         compute: DType::Bf16,
//!         purpose: Purpose::Evaluate { loss_chunk: None },
//!     },
//! )?;
//! assert!(graph.loss.is_some());
//! assert_eq!(graph.blocks.len(), 12);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod gpt2;
mod mamba;

use cinch_architecture::{Architecture, with_architectures};
use cinch_config::Precision;
use cinch_graph::{DType, Graph, GraphError, Init, TensorId};
use thiserror::Error;

#[derive(Debug, Error)]
pub enum ModelError {
    #[error(
        "a sequence of {seq_len} is longer than the model's {positions} positions\n\
         hint: lower vram.max_seq_len to {positions}, or raise model.max_seq_len to {seq_len}"
    )]
    SequenceTooLong { seq_len: usize, positions: usize },
    #[error(
        "cinch's engine does not train {family} yet\nhint: `cinch plan --engine pytorch` predicts what PyTorch takes for it; `cinch models` lists what can be trained"
    )]
    NotTrained { family: &'static str },
    #[error("{problem}\nhint: `cinch plan --engine pytorch` predicts what PyTorch takes for it")]
    Beyond { problem: String },
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

/// An architecture that cinch's engine trains. Every one that the list calls trained has it.
trait Builds {
    fn build(&self, graph: &mut Graph, build: Build) -> Result<(), GraphError>;
}

macro_rules! dispatch {
    (trained { $($trained:ident),* } predicted { $($predicted:ident),* }) => {
        fn build_into(
            model: &Architecture,
            graph: &mut Graph,
            build: Build,
        ) -> Result<(), ModelError> {
            match model {
                $(Architecture::$trained(shape) => Ok(Builds::build(shape, graph, build)?),)*
                $(Architecture::$predicted(_))|* => Err(ModelError::NotTrained {
                    family: model.family().title,
                }),
            }
        }
    };
}
with_architectures!(dispatch);

/// Builds the forward graph of a model.
pub fn build(model: &Architecture, build: Build) -> Result<Graph, ModelError> {
    if let Some(problem) = model.beyond_the_engine() {
        return Err(ModelError::Beyond { problem });
    }
    if let Some(positions) = model.positions()
        && build.seq_len as u64 > positions
    {
        return Err(ModelError::SequenceTooLong {
            seq_len: build.seq_len,
            positions: positions as usize,
        });
    }
    let mut graph = Graph::new(build.compute);
    build_into(model, &mut graph, build)?;
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
