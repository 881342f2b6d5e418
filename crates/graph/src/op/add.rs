//! The sum of two tensors: where two gradients of one tensor meet.

use super::{Declare, expect_float, expect_inputs, expect_same};
use crate::types::TensorType;

/// Inputs: a, b. Output: a + b.
#[derive(Clone, Debug, PartialEq)]
pub struct Add;

impl Declare for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2)?;
        expect_float("a", &inputs[0])?;
        expect_same("b", &inputs[1], &inputs[0])?;
        Ok(vec![inputs[0]])
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 0)]
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        inputs[0].shape.elements() as u64
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.5
    }
}
