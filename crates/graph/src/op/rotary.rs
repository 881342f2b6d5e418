//! Rotary position embedding: each head's columns, taken in pairs, turn by an angle that grows
//! with the position, so that the product of a query and a key depends on their distance.

use super::{Declare, expect, expect_float, expect_inputs, product};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, TensorId};
use crate::types::TensorType;

/// Input: x [B, T, heads·head_dim]. Output: the same shape, where of each head the columns i and
/// i + head_dim/2 (the pairs of LLaMA and Qwen) at position t have turned by t·base^(−2i/head_dim).
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    pub base: f64,
    pub head_dim: usize,
    /// Turns the other way. A rotation's transpose is its inverse, so this is its backward.
    pub inverse: bool,
}

impl Graph {
    pub fn rotary(
        &mut self,
        name: &str,
        x: TensorId,
        head_dim: usize,
        base: f64,
    ) -> Result<TensorId, GraphError> {
        let op = Rotary {
            base,
            head_dim,
            inverse: false,
        };
        Ok(self.emit(name, op, vec![x])?[0])
    }
}

impl Declare for Rotary {
    fn name(&self) -> &'static str {
        if self.inverse {
            "rotary_inverse"
        } else {
            "rotary"
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 1)?;
        let x = &inputs[0];
        expect_float("x", x)?;
        expect(x.shape.rank() == 3, || {
            format!("x is {}, expected [batch,length,width]", x.shape)
        })?;
        expect(self.head_dim > 0 && self.head_dim.is_multiple_of(2), || {
            format!("a head of {} columns does not pair up", self.head_dim)
        })?;
        expect(x.width().is_multiple_of(self.head_dim), || {
            format!(
                "{} columns are no whole number of heads of {}",
                x.width(),
                self.head_dim
            )
        })?;
        expect(self.base.is_finite() && self.base > 0.0, || {
            format!("a base of {} has no powers to turn by", self.base)
        })?;
        Ok(vec![*x])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let op = Self {
            inverse: !self.inverse,
            ..self.clone()
        };
        let dx = backward.emit(node, "input", op, vec![dy])?[0];
        backward.contribute(node, node.inputs[0], dx)
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Two products and a sum; the sines of a position serve all its heads and sequences.
        product([inputs[0].shape.elements() as u64, 3])
    }
}
