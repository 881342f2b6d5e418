//! Rotary position embedding: each head's columns, taken in pairs, turn by an angle that grows
//! with the position, so that the product of a query and a key depends on their distance.

use std::sync::Arc;

use super::{Declare, expect, expect_dtype, expect_float, expect_inputs, expect_shape, product};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, TensorId};
use crate::types::{DType, TensorType};

/// Inputs: x [B, T, width], and with `positions` those of x, i32 [B, T]; otherwise they are
/// 0 to T − 1. Output: x, where of each head in the first `columns` columns the columns i and
/// i + head_dim/2 (the pairs of LLaMA and Qwen) at position t have turned by t·frequencies[i] and
/// are multiplied by `scale`. The other columns are as they were.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// What each pair of a head turns by from one position to the next, in radians.
    pub frequencies: Arc<[f64]>,
    pub columns: usize,
    pub scale: f64,
    pub positions: bool,
    /// Turns the other way. A rotation's transpose is its inverse, so this is its backward.
    pub inverse: bool,
}

impl Rotary {
    /// The most pairs of a head: a GPU's kernel is given their frequencies as arguments.
    pub const MOST_PAIRS: usize = 256;

    pub fn head_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// base^(−2i/head_dim): what Rotary is without any scaling.
    pub fn frequencies(base: f64, head_dim: usize) -> Arc<[f64]> {
        let half = head_dim / 2;
        let frequency = |i| base.powf(-(i as f64) / half as f64);
        (0..half).map(frequency).collect()
    }
}

impl Graph {
    /// Turns all columns of x, as many heads as fit, by the positions given or their own.
    pub fn rotary(
        &mut self,
        name: &str,
        x: TensorId,
        frequencies: &Arc<[f64]>,
        positions: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let op = Rotary {
            frequencies: frequencies.clone(),
            columns: self.ty(x).width(),
            scale: 1.0,
            positions: positions.is_some(),
            inverse: false,
        };
        let inputs = [x].into_iter().chain(positions).collect();
        Ok(self.emit(name, op, inputs)?[0])
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
        expect_inputs(inputs, 1 + usize::from(self.positions))?;
        let x = &inputs[0];
        expect_float("x", x)?;
        expect(x.shape.rank() == 3, || {
            format!("x is {}, expected [batch,length,width]", x.shape)
        })?;
        let (pairs, head_dim) = (self.frequencies.len(), self.head_dim());
        expect((1..=Self::MOST_PAIRS).contains(&pairs), || {
            format!(
                "a head of {head_dim} columns, expected 2 to {}",
                2 * Self::MOST_PAIRS
            )
        })?;
        expect(
            self.columns <= x.width() && self.columns.is_multiple_of(head_dim),
            || {
                format!(
                    "turns {} columns of {}, expected a whole number of heads of {head_dim}",
                    self.columns,
                    x.width()
                )
            },
        )?;
        let finite = self.frequencies.iter().all(|f| f.is_finite()) && self.scale.is_finite();
        expect(finite, || {
            "a frequency or the scale is not finite".to_owned()
        })?;
        if self.positions {
            expect_dtype("the positions", &inputs[1], DType::I32)?;
            expect_shape("the positions", &inputs[1], &x.shape.dims()[..2])?;
        }
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
        let inputs = [dy].into_iter().chain(node.inputs[1..].iter().copied());
        let dx = backward.emit(node, "input", op, inputs.collect())?[0];
        backward.contribute(node, node.inputs[0], dx)
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Two products and a sum; the sines of a position serve all its heads.
        product([inputs[0].rows() as u64, self.columns as u64, 3])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.53
    }

    fn bytes(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // In place, as a rule: only what turns is read and written.
        product([
            2,
            inputs[0].rows() as u64,
            self.columns as u64,
            inputs[0].dtype.size(),
        ])
    }
}
