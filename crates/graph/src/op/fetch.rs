//! Weights and activations on their way from host memory into the arena, ahead of the nodes that
//! read them.

use super::{Declare, expect, sum};
use crate::cost::{Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::Node;
use crate::types::TensorType;

/// Inputs: tensors in host memory. Outputs: the same in the arena, one for each. A GPU copies them
/// beside its computing; what reads an output waits for all of the node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch;

impl Declare for Fetch {
    fn name(&self) -> &'static str {
        "fetch"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect(!inputs.is_empty(), || "has nothing to fetch".to_owned())?;
        Ok(inputs.to_vec())
    }

    /// What is fetched is not trained.
    fn backward(&self, _: &mut Backward<'_>, _: &Node) -> Result<(), GraphError> {
        Ok(())
    }

    /// Or activations, by the role of what is fetched.
    fn brings_weights(&self) -> bool {
        true
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    /// Copied by the bus, which has no kernels: how long nodes wait for it is a matter of all of
    /// a block's nodes.
    fn cuda_cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        Cost::of([KernelCost::streamed(0, 0)])
    }

    fn bus_bytes(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        sum(outputs.iter().map(TensorType::bytes))
    }
}
