//! The same numbers under another shape: no work where the output takes over the input's memory,
//! a copy where the input is read later.

use super::{Declare, expect, expect_float, expect_inputs};
use crate::cost::{Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, TensorId};
use crate::types::{Shape, TensorType};

/// Input: x. Output: x as `shape`, which has as many elements.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    pub shape: Shape,
}

impl Graph {
    pub fn view(
        &mut self,
        name: &str,
        x: TensorId,
        shape: impl Into<Shape>,
    ) -> Result<TensorId, GraphError> {
        let shape = shape.into();
        Ok(self.emit(name, View { shape }, vec![x])?[0])
    }
}

impl Declare for View {
    fn name(&self) -> &'static str {
        "view"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 1)?;
        let x = &inputs[0];
        expect_float("x", x)?;
        expect(x.shape.elements() == self.shape.elements(), || {
            format!("{} does not have the elements of {}", x.shape, self.shape)
        })?;
        Ok(vec![TensorType::new(self.shape, x.dtype)])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let shape = backward.graph().ty(node.inputs[0]).shape;
        let dx = backward.emit(node, "input", Self { shape }, vec![dy])?[0];
        backward.contribute(node, node.inputs[0], dx)
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        0
    }

    /// Nothing, as a rule.
    fn cuda_cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        Cost::of([KernelCost::streamed(0, 0)])
    }
}
