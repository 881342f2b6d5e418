//! The gated activation of a feed-forward layer: f(gate)·up, SwiGLU where f is SiLU.

use super::{
    ActivationKind, Declare, Op, Operand, Recipe, ValueAgain, expect_float, expect_inputs,
    expect_same, product, sum,
};
use crate::cost::{JoinKind, Joins};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, TensorId};
use crate::types::TensorType;

/// Inputs: gate, up. Output: f(gate)·up.
#[derive(Clone, Debug, PartialEq)]
pub struct Gated {
    pub kind: ActivationKind,
}

/// Inputs: dy, gate, up. Outputs: dgate = dy·up·f′(gate), dup = dy·f(gate), when `value`
/// f(gate)·up again.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedBackward {
    pub kind: ActivationKind,
    pub value: bool,
}

impl Graph {
    pub fn gated(
        &mut self,
        name: &str,
        gate: TensorId,
        up: TensorId,
        kind: ActivationKind,
    ) -> Result<TensorId, GraphError> {
        Ok(self.emit(name, Gated { kind }, vec![gate, up])?[0])
    }
}

/// An exponential and a division count as about ten operations.
const FLOPS_PER_ELEMENT: u64 = 15;
const BACKWARD_FLOPS_PER_ELEMENT: u64 = 24;

/// Whether a GPU's products have kernels that end with the gate.
fn is_joined(kind: ActivationKind) -> bool {
    kind == ActivationKind::Silu
}

impl Declare for Gated {
    fn name(&self) -> &'static str {
        match self.kind {
            ActivationKind::GeluTanh => "geglu_tanh",
            ActivationKind::Gelu => "geglu",
            ActivationKind::Silu => "swiglu",
            ActivationKind::Relu => "reglu",
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 2)?;
        expect_float("the gate", &inputs[0])?;
        expect_same("up", &inputs[1], &inputs[0])?;
        Ok(vec![inputs[0]])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let inputs = [dy].into_iter().chain(node.inputs.iter().copied());
        let op = GatedBackward {
            kind: self.kind,
            value: false,
        };
        let gradients = backward.emit(node, "input", op, inputs.collect())?;
        for (&input, gradient) in node.inputs.iter().zip(gradients) {
            backward.contribute(node, input, gradient)?;
        }
        Ok(())
    }

    /// The product again: gate and up are kept for the derivative anyway.
    fn recipe(&self, _output: usize) -> Option<Recipe> {
        Some(Recipe {
            op: Op::from(self.clone()),
            inputs: vec![Operand::Input(0), Operand::Input(1)],
            output: 0,
        })
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 0)]
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([inputs[0].shape.elements() as u64, FLOPS_PER_ELEMENT])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.09
    }

    /// To the product that makes what is gated, which the backward reads.
    fn joins(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Option<Joins> {
        is_joined(self.kind).then(|| Joins {
            input: 1,
            bytes: sum([inputs[0].bytes(), outputs[0].bytes()]),
            kind: JoinKind::Tail { over: false },
        })
    }
}

impl Declare for GatedBackward {
    fn name(&self) -> &'static str {
        "gated_backward"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["gate", "up", "value"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, 3)?;
        expect_float("the gate", &inputs[1])?;
        expect_same("dy", &inputs[0], &inputs[1])?;
        expect_same("up", &inputs[2], &inputs[1])?;
        let value = self.value.then_some(inputs[1]);
        Ok([inputs[1], inputs[2]].into_iter().chain(value).collect())
    }

    fn value_again(&self) -> Option<ValueAgain> {
        (!self.value).then(|| ValueAgain {
            op: Op::from(Self {
                value: true,
                ..self.clone()
            }),
            output: 2,
            recipe: Op::from(Gated { kind: self.kind }),
            inputs: vec![Some(1), Some(2)],
        })
    }

    /// Each gradient over its own tensor, so that the backward needs no room at all, and the value
    /// over dy. Without a value, a gradient may be over dy where its own tensor is read later.
    fn in_place(&self) -> &'static [(usize, usize)] {
        match self.value {
            true => &[(1, 0), (2, 1), (0, 2)],
            false => &[(1, 0), (2, 1), (0, 0), (0, 1)],
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([
            inputs[0].shape.elements() as u64,
            BACKWARD_FLOPS_PER_ELEMENT,
        ])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.2
    }

    /// To the product that makes dy, which nobody else reads.
    fn joins(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Option<Joins> {
        let others = inputs[1..].iter().chain(outputs);
        is_joined(self.kind).then(|| Joins {
            input: 0,
            bytes: sum(others.map(TensorType::bytes)),
            kind: JoinKind::Tail { over: true },
        })
    }
}
