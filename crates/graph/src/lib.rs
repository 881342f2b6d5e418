//! One training step as a graph: typed tensors, kernel-sized ops, a verifier,
//! differentiation and recomputation as passes.
//!
//! The flow inside this crate, in the order in which a step comes to be:
//!
//! 1. a model builds a [`Graph`] by calling the builder methods in [`op`];
//! 2. [`differentiate`] turns it into a [`TrainingGraph`] with backward and update nodes;
//! 3. [`TrainingGraph::recompute`] trades stored activations for repeated work, block by block;
//! 4. [`TrainingGraph::update_in_backward`] lets gradients go as soon as they are complete;
//! 5. [`TrainingGraph::shard`] makes it the step of one of several ranks;
//! 6. [`verify`] says whether the result is well formed.
//!
//! ```
//! use cinch_graph::{DType, Graph, Init, verify};
//!
//! let mut graph = Graph::new(DType::F32);
//! let x = graph.batch("x", [2, 8], DType::F32);
//! let weight = graph.weight("weight", [4, 8], Init::Normal { std: 0.02 });
//! let y = graph.linear("y", x, weight, None)?;
//! verify(&graph)?;
//! assert_eq!(graph.ty(y).to_string(), "f32[2,4]");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod align;
mod cost;
mod cpu;
mod differentiate;
mod error;
pub mod expression;
mod graph;
mod loss;
mod offload;
mod offload_activations;
pub mod op;
mod parameter;
mod print;
mod recompute;
mod shard;
mod types;
mod update_in_backward;
mod value_again;
mod verify;
mod visit;

pub use align::{ALIGNMENT, aligned};
pub use cost::{Arithmetic, BlockWork, ChunkedCost, Cost, JoinKind, Joins, KernelCost, Wire};
pub use cpu::{CpuCost, CpuProducts, CpuTiles};
pub use differentiate::{Backward, Optimizer, TrainingGraph, differentiate};
pub use error::GraphError;
pub use graph::{
    Block, BlockId, Dropout, Graph, Node, NodeId, Phase, RandomState, Role, Target, Tensor,
    TensorId,
};
pub use loss::{Count, LossTerm, TermInputs, WholeBatch};
pub use parameter::{FilePart, Init, Parameter, Storage};
pub use recompute::Recompute;
pub use shard::{Shard, ShardLevel, Sharding};
pub use types::{DType, Shape, TensorType};
pub use verify::verify;
