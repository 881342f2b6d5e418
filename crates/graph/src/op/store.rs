//! Activations on their way from the arena into host memory, where they wait for the backward.

use super::{Declare, expect, sum};
use crate::cost::{Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::Node;
use crate::types::TensorType;

/// Inputs: tensors in the arena. Outputs: the same in host memory, one for each. A GPU copies them
/// beside its computing; the places of the inputs are free when [`super::Await`] has waited for
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store;

impl Declare for Store {
    fn name(&self) -> &'static str {
        "store"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect(!inputs.is_empty(), || "has nothing to store".to_owned())?;
        Ok(inputs.to_vec())
    }

    /// It stands in steps that have their backward.
    fn backward(&self, _: &mut Backward<'_>, _: &Node) -> Result<(), GraphError> {
        Ok(())
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    /// As for [`super::Fetch`], the bus has no kernels.
    fn cuda_cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        Cost::of([KernelCost::streamed(0, 0)])
    }

    fn bus_bytes(&self, _inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        sum(outputs.iter().map(TensorType::bytes))
    }
}
