//! The activation functions that a configuration can name.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// One kernel, exact or by the hyperbolic tangent.
    Gelu,
    /// The same, op by op.
    GeluNew,
    /// The same in other ops.
    GeluFast,
    /// `x · sigmoid(1.702 · x)`, op by op.
    QuickGelu,
    Relu,
    Sigmoid,
    Silu,
    Tanh,
}

/// By the names that transformers has for them.
const NAMES: [(&str, Activation); 11] = [
    ("gelu", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::Gelu),
    ("gelu_new", Activation::GeluNew),
    ("gelu_python_tanh", Activation::GeluNew),
    ("gelu_fast", Activation::GeluFast),
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

    /// The first of its names.
    pub fn name(self) -> &'static str {
        let mut names = NAMES.iter();
        let found = names.find(|(_, activation)| *activation == self);
        found.map_or("", |(name, _)| name)
    }

    pub fn names() -> String {
        NAMES.map(|(name, _)| name).join(", ")
    }
}
