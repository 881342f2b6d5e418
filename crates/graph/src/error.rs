//! What can be wrong with a graph.

use thiserror::Error;

/// Every message names the node, so that the line of the model that built it can be found.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GraphError {
    #[error("{op} `{node}`: {problem}")]
    Op {
        op: &'static str,
        node: String,
        problem: String,
    },
    #[error("node {index} ({op} `{node}`): {problem}")]
    Malformed {
        index: usize,
        op: &'static str,
        node: String,
        problem: String,
    },
    #[error("tensor `{tensor}`: {problem}")]
    Tensor { tensor: String, problem: String },
    #[error(
        "{what} more than 2^64 {unit}, which no plan counts\n\
         hint: a smaller batch, shorter sequences or a smaller model"
    )]
    TooLarge { what: String, unit: &'static str },
    #[error("the graph has no loss, so there is nothing to differentiate")]
    NoLoss,
    #[error("{op} `{node}` has no derivative: it belongs after training, not in it")]
    NotDifferentiable { op: &'static str, node: String },
    #[error(
        "a step whose weights are updated inside the backward is not cut over {ranks} ranks: its \
         gradients are gone before they are added up"
    )]
    UpdatedInBackward { ranks: usize },
    #[error("cannot recompute {asked} blocks: the model has {blocks}")]
    TooManyBlocks { asked: usize, blocks: usize },
}
