//! Pointwise non-linearities.

use super::{
    Declare, Op, Operand, Recipe, ValueAgain, expect_float, expect_inputs, expect_same, product,
};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, TensorId};
use crate::types::TensorType;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationKind {
    /// GELU by its tanh approximation, as GPT-2 has it:
    /// `x/2 · (1 + tanh(√(2/π)·(x + 0.044715 x³)))`.
    GeluTanh,
    /// GELU by the error function: `x · Φ(x) = x/2 · (1 + erf(x/√2))`.
    Gelu,
    /// `x · σ(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
}

/// Input: x. Output: f(x).
#[derive(Clone, Debug, PartialEq)]
pub struct Activation {
    pub kind: ActivationKind,
}

/// Inputs: dy, x. Outputs: dx = dy·f′(x), when `value` f(x) again.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationBackward {
    pub kind: ActivationKind,
    pub value: bool,
}

impl Graph {
    pub fn activation(
        &mut self,
        name: &str,
        x: TensorId,
        kind: ActivationKind,
    ) -> Result<TensorId, GraphError> {
        Ok(self.emit(name, Activation { kind }, vec![x])?[0])
    }
}

/// An exponential and a division count as about ten operations.
const FLOPS_PER_ELEMENT: u64 = 14;
const BACKWARD_FLOPS_PER_ELEMENT: u64 = 20;

impl Declare for Activation {
    fn name(&self) -> &'static str {
        match self.kind {
            ActivationKind::GeluTanh => "gelu_tanh",
            ActivationKind::Gelu => "gelu",
            ActivationKind::Silu => "silu",
            ActivationKind::Relu => "relu",
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 1)?;
        expect_float("x", &inputs[0])?;
        Ok(vec![inputs[0]])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let x = node.inputs[0];
        let op = ActivationBackward {
            kind: self.kind,
            value: false,
        };
        let dx = backward.emit(node, "input", op, vec![dy, x])?[0];
        backward.contribute(node, x, dx)
    }

    /// f(x) again: x is kept for the derivative anyway.
    fn recipe(&self, _output: usize) -> Option<Recipe> {
        Some(Recipe {
            op: Op::from(self.clone()),
            inputs: vec![Operand::Input(0)],
            output: 0,
        })
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([inputs[0].shape.elements() as u64, FLOPS_PER_ELEMENT])
    }
}

impl Declare for ActivationBackward {
    fn name(&self) -> &'static str {
        "activation_backward"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "value"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2)?;
        expect_float("x", &inputs[1])?;
        expect_same("dy", &inputs[0], &inputs[1])?;
        let value = self.value.then_some(inputs[1]);
        Ok([inputs[0]].into_iter().chain(value).collect())
    }

    fn value_again(&self) -> Option<ValueAgain> {
        (!self.value).then(|| ValueAgain {
            op: Op::from(Self {
                value: true,
                ..self.clone()
            }),
            output: 1,
            recipe: Op::from(Activation { kind: self.kind }),
            inputs: vec![Some(1)],
        })
    }

    /// dx over dy; with the value, which is over dy then, over x.
    fn in_place(&self) -> &'static [(usize, usize)] {
        match self.value {
            true => &[(0, 1), (1, 0)],
            false => &[(0, 0)],
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([
            inputs[0].shape.elements() as u64,
            BACKWARD_FLOPS_PER_ELEMENT,
        ])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.25
    }
}
