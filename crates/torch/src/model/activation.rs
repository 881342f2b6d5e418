//! The activation functions that a configuration of transformers can name. What they cost differs: fused kernels keep one
//! tensor, formulas written out in Python keep one for each of their ops.

use crate::eager::Tensor;
use crate::eager::op::pointwise;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// One kernel, exact or by the hyperbolic tangent.
    Gelu,
    /// The same, op by op.
    GeluNew,
    /// `x * sigmoid(1.702 * x)`, op by op.
    QuickGelu,
    Relu,
    Sigmoid,
    Silu,
    Tanh,
}

/// By the names that transformers has for them.
const NAMES: [(&str, Activation); 10] = [
    ("gelu", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::Gelu),
    ("gelu_new", Activation::GeluNew),
    ("gelu_python_tanh", Activation::GeluNew),
    ("quick_gelu", Activation::QuickGelu),
    ("relu", Activation::Relu),
    ("sigmoid", Activation::Sigmoid),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("tanh", Activation::Tanh),
];

impl Activation {
    pub fn named(name: &str) -> Option<Activation> {
        let found = NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, activation)| *activation)
    }

    pub fn names() -> String {
        NAMES.map(|(name, _)| name).join(", ")
    }

    pub fn forward(self, x: &Tensor) -> Tensor {
        match self {
            Activation::Gelu => pointwise::gelu(x),
            Activation::GeluNew => gelu_new(x),
            Activation::QuickGelu => {
                pointwise::mul(x, pointwise::sigmoid(pointwise::mul_number(x)))
            }
            Activation::Relu => pointwise::relu(x),
            Activation::Sigmoid => pointwise::sigmoid(x),
            Activation::Silu => pointwise::silu(x),
            Activation::Tanh => pointwise::tanh(x),
        }
    }
}

/// `0.5 * x * (1 + tanh(√(2/π) * (x + 0.044715 * x³)))`.
fn gelu_new(x: &Tensor) -> Tensor {
    let half = pointwise::mul_number(x);
    let cubed = pointwise::mul_number(pointwise::pow_number(x));
    let inner = pointwise::mul_number(pointwise::add(x, cubed));
    pointwise::mul(half, pointwise::add_number(pointwise::tanh(inner)))
}
