//! Dropout.

use std::borrow::Borrow;

use super::super::dtype::DType;
use super::super::node::grads;
use super::super::tensor::Tensor;
use super::pointwise::like;

/// `F.dropout` in training: `native_dropout` makes the mask (a byte an element), then the result,
/// and keeps the mask; the gradient is one tensor. With p = 0 it gives back its input.
pub fn dropout(x: impl Borrow<Tensor>, p: f64) -> Tensor {
    let tensor = x.borrow();
    if p == 0.0 {
        return tensor.clone();
    }
    let context = tensor.context();
    let mut recorder = context.record(&[tensor]);
    let mask = context.empty("native_dropout", tensor.sizes(), DType::Bool);
    let out = like(tensor, tensor.dtype(), "native_dropout");
    recorder.save_output(&mask);
    drop(mask);
    recorder.finish(&[&out], |step| {
        let grad = step.grad();
        grads![Some(like(grad, grad.dtype(), "native_dropout_backward"))]
    });
    drop(x);
    out
}
