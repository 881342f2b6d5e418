//! The activation functions as they run. What they cost differs: fused kernels keep one tensor, formulas written out in
//! Python keep one for each of their ops.

use cinch_architecture::Activation;

use crate::eager::Tensor;
use crate::eager::op::pointwise;

pub fn forward(activation: Activation, x: &Tensor) -> Tensor {
    match activation {
        Activation::Gelu => pointwise::gelu(x),
        Activation::GeluNew => gelu_new(x),
        Activation::GeluFast => gelu_fast(x),
        Activation::QuickGelu => pointwise::mul(x, pointwise::sigmoid(pointwise::mul_number(x))),
        Activation::Relu => pointwise::relu(x),
        Activation::Sigmoid => pointwise::sigmoid(x),
        Activation::Silu => pointwise::silu(x),
        Activation::Tanh => pointwise::tanh(x),
    }
}

/// `0.5 * x * (1 + tanh(√(2/π) * (x + 0.044715 * x³)))`.
fn gelu_new(x: &Tensor) -> Tensor {
    let half = pointwise::mul_number(x);
    let cubed = pointwise::mul_number(pointwise::pow_number(x));
    let inner = pointwise::mul_number(pointwise::add(x, cubed));
    pointwise::mul(half, pointwise::add_number(pointwise::tanh(inner)))
}

/// `0.5 * x * (1 + tanh(x * √(2/π) * (1 + 0.044715 * x * x)))`.
fn gelu_fast(x: &Tensor) -> Tensor {
    let half = pointwise::mul_number(x);
    let scaled = pointwise::mul_number(x);
    let square = pointwise::mul(pointwise::mul_number(x), x);
    let inner = pointwise::mul(scaled, pointwise::add_number(square));
    pointwise::mul(half, pointwise::add_number(pointwise::tanh(inner)))
}
